"""A report: measurements of whole models, as one HTML page and as tables.

`python -m weightonly.bench report --shapes llama3-8b,llama3-70b --formats int4,int8 --out report` writes into a folder

    report.html  the page, with everything in it
    report.md    its tables as markdown
    times.csv    a line per shape, M and format: the time of every provider, and the ratios
    results.csv  every row that was measured, for --from and --compare
"""

from .document import Report
from .measure import GROUP_SIZES, MODELS, REPORT_BATCH, measure
from .results import Results

__all__ = ["GROUP_SIZES", "MODELS", "REPORT_BATCH", "Report", "Results", "measure"]
