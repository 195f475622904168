"""Regular expressions out of files, matched in bounded time and memory.

Python's `re` tries one way after another, and some patterns have exponentially many. The package `regex` does so, too,
but stops after a time. Its memory grows with what counts like {1000} make of a pattern, so these are limited.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

MAX_LENGTH = 1000
"""Characters of a pattern."""


class PatternError(ValueError):
    """A pattern that is none, is not supported, or takes too long; or too many patterns."""


@dataclass(eq=False)
class Budget:
    """What all patterns of a folder may take together.

    seconds: of CPU time. characters: of the patterns, those of one with counts times each count; there are
    dozens of patterns in configs, here may be thousands.
    """

    seconds: float = 10.0
    characters: int = 100_000

    @contextlib.contextmanager
    def spend(self) -> Iterator[float]:
        """The seconds that are left, less what passes until the end. Raises PatternError where there are none."""
        begun = time.process_time()
        try:
            if self.seconds <= 0:
                raise TimeoutError
            yield self.seconds
        except TimeoutError as error:
            raise PatternError("its patterns take too long to match with the names of its layers") from error
        finally:
            self.seconds -= time.process_time() - begun


class Pattern:
    """A regular expression, in ASCII. Raises PatternError for text that is none, is not supported, or is too much."""

    def __init__(self, text: str, budget: Budget) -> None:
        import regex  # 20 ms, for folders that have patterns

        if len(text) > MAX_LENGTH:
            raise PatternError(f"expected at most {MAX_LENGTH} characters, got {len(text)}")
        if not text.isascii():  # wide classes take long to compile
            raise PatternError("expected ASCII characters, got others")
        budget.characters -= (len(text) + 1) * _times(text)
        if budget.characters < 0:
            raise PatternError(
                f"expected at most {Budget.characters} characters in all patterns, each times its counts"
            )
        try:
            with budget.spend():
                re.compile(text)  # more is a pattern to `regex`, such as one that contains itself
                self._regex = regex.compile(text, cache_pattern=False)
        except (re.error, regex.error, RecursionError, OverflowError) as error:
            raise PatternError(str(error)) from error
        self._budget = budget

    def matches_start(self, name: str) -> bool:
        """Whether some beginning of `name` matches, as `re.match` says."""
        return self._matches(self._regex.match, name)

    def matches_part(self, name: str) -> bool:
        """Whether some part of `name` matches, as `re.search` says."""
        return self._matches(self._regex.search, name)

    def _matches(self, function: Any, name: str) -> bool:
        with self._budget.spend() as seconds:
            return function(name, timeout=seconds) is not None


def _times(text: str) -> int:
    """How often counts repeat a part of a pattern, at most: {2,3} inside of {4}: 12 times."""
    times = 1
    for counts in re.findall(r"\{([^}]*)", text):
        numbers = counts.split(",")
        if not re.fullmatch(r"\d{1,9}|\d{0,9},\d{0,9}", counts):
            raise PatternError(f"expected counts in braces, as in {{2,3}}, got {counts!r}")
        times *= max(1, *(int(number or 1) for number in numbers))
    return times
