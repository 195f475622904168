"""Tensor parallel: the linears of a model's layers, cut over 1, 2, 4 ranks, and the sums between ranks.

`python -m weightonly.bench parallel --shapes llama3-70b --out parallel` starts a process for each GPU; under torchrun
it takes the processes that are there.

    ranks.py    the processes, as one of them sees the others
    pieces.py   a linear, or all of a decoder layer, whole and cut
    decode.py   decode steps of whole models
    rows.py     the rows of a piece: compared with one rank, then timed
    measure.py  measures them within a time budget, and writes each as it comes
    tables.py   the tables
"""

from __future__ import annotations

from ..model.providers import MODEL_PROVIDERS, DenseModel, Ours

BATCH = (1, 16, 64, 128, 1024)
RANKS = (1, 2, 4)

PROVIDERS = [name for name, one in MODEL_PROVIDERS.items() if isinstance(one, Ours | DenseModel)]
"""Those whose layers can be cut."""

DEFAULT_PROVIDERS = ("ours-int4", "ours-int8", "dense")
