"""The programs that build the kernels, which are not installed."""

from __future__ import annotations

import sys

from tests import ROOT

sys.path.insert(0, str(ROOT / "kernels"))
