"""The weight shapes that the benchmarks know by name, each as (k, n): y[m, n] = x[m, k] @ w[k, n]."""

from __future__ import annotations

from collections.abc import Iterable

Shape = tuple[int, int]

# Attention query, key and value are one matrix, and so are gate and up, as inference engines store them.
NAMED: dict[str, tuple[Shape, ...]] = {
    "llama3-8b": ((4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096)),
    "llama3-70b": ((8192, 10240), (8192, 8192), (8192, 57344), (28672, 8192)),
    "table": (
        (4096, 4096),
        (4096, 6144),
        (4096, 28672),
        (14336, 4096),
        (8192, 8192),
        (8192, 10240),
        (28672, 8192),
    ),
    "minilm": ((384, 384), (384, 1536), (1536, 384)),
}


def _parse_one(text: str) -> tuple[Shape, ...]:
    """A name of `NAMED`, or "KxN"."""
    if text in NAMED:
        return NAMED[text]
    k, cross, n = text.lower().partition("x")
    if cross and k.isdecimal() and n.isdecimal() and int(k) > 0 and int(n) > 0:
        return ((int(k), int(n)),)
    raise ValueError(f"shapes: expected one of {', '.join(NAMED)} or KxN (such as 4096x4096), got {text!r}")


def resolve(shapes: str | Iterable[str | Shape]) -> list[Shape]:
    """The (k, n) list that `shapes` means, in its order, without repeats.

    `shapes` is a name of `NAMED`, "KxN", several of these joined by commas, or a list whose items are any of
    these or (k, n) pairs. Raises ValueError for a name that does not exist (the message lists those that do),
    for sizes below 1 and for an empty list.
    """
    items: list[str | Shape] = [*shapes.split(",")] if isinstance(shapes, str) else list(shapes)
    found: list[Shape] = []
    for item in items:
        if isinstance(item, str):
            found.extend(_parse_one(item.strip()))
            continue
        if len(item) != 2 or not all(isinstance(size, int) and size > 0 for size in item):
            raise ValueError(f"shapes: expected (k, n) of two positive integers, got {item!r}")
        found.append((item[0], item[1]))
    if not found:
        raise ValueError(f"shapes: expected at least one, got none; names: {', '.join(NAMED)}")
    return list(dict.fromkeys(found))
