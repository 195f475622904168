"""How a command ends: by itself, by Ctrl-C, or because nobody reads what it prints any more."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

INTERRUPTED, UNREAD = 130, 141
"""Exit status of a program that SIGINT or SIGPIPE ends, as shells have it."""


def guarded(run: Callable[[], int]) -> int:
    """The exit status of `run`. Ctrl-C is a line, a closed pipe nothing."""
    try:
        try:
            return run()
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # What is left in the buffer is flushed again at exit: it must have a place.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return UNREAD
