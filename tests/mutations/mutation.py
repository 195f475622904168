"""What a mutation is."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

Change = tuple[str, str, str, str] | tuple[str, str, str, str, str]
"""(name, function, old text, new text), and where no caller can see the difference, why not."""


@dataclass(frozen=True)
class Mutation:
    """One fault.

    function: where, as `definitions` finds it: `Class.method`, a function, a class, or a name that is assigned.
    old, new: texts; the function has the old one once. A line that is old with its end, and "" as new, goes whole.
    tests: names of files that cover the file, the nearest first, without folder, "test_" and ".py".
    """

    name: str
    file: str
    function: str
    old: str
    new: str
    tests: tuple[str, ...]
    equivalent: str = ""


def of(file: str, tests: str, changes: Iterable[Change]) -> list[Mutation]:
    """The mutations of a file. tests: names with spaces between them."""
    found = []
    for name, function, old, new, *why in changes:
        found.append(Mutation(f"{file}: {name}", file, function, old, new, tuple(tests.split()), *why))
    return found
