"""Imported first: the benchmark without pandas is an error that says what installs it, of a command in a line."""

import sys

from weightonly.extras import require_package
from weightonly.search_path import asked_module

try:
    require_package("pandas")
except ImportError as error:
    if asked_module().startswith("weightonly.bench"):
        sys.exit(f"error: {error}")
    raise
