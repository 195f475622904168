"""Random cases against an oracle of their own: `python -m tools.fuzz --target calls --seconds 60`.

A target draws and checks its cases (`loop.Target`); `loop.fuzz` counts, stops and resumes for all of them.
"""

from __future__ import annotations

from .calls import Calls
from .files import Files
from .invalid import InvalidCalls
from .loop import Outcome, State, Target, fuzz
from .rows import Rows
from .states import States

TARGETS: dict[str, type[Target]] = {
    "calls": Calls,
    "invalid": InvalidCalls,
    "rows": Rows,
    "files": Files,
    "state": States,
}
"""Name -> target; one takes the device to run on."""

__all__ = ["TARGETS", "Outcome", "State", "Target", "fuzz"]
