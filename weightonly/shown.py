"""Text for people to read: names of others, which may hold what a terminal obeys, and counts."""

from __future__ import annotations


def shown(text: object, keep: str = "") -> str:
    """`text` with escapes, as `repr` has them, for characters that are not printable: escape codes, line ends, marks
    that turn the direction of writing, halves of surrogate pairs. keep: characters that stay."""
    return "".join(c if c.isprintable() or c in keep else repr(c)[1:-1] for c in str(text))


def counted(number: int, noun: str) -> str:
    """ "1 layer", "2 layers"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
