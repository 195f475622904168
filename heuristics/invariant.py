"""The one class of kernels that computes a weight in the batch-invariant mode: their bits do not depend on M.

`Family.bits_class` says what the bits of a row depend on. Of the classes that have a kernel for every M the weight gets
the one that is quickest on average.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping

from .families import KernelConfig
from .problem import Problem

MEAN_ROWS = tuple(2**i for i in range(13))
"""Rows of x whose times count alike: the class has the least geometric mean."""

MOST_ROWS = 1 << 20
"""Up to so many rows a class has to have a kernel. Of more there may be one."""


def class_of(config: KernelConfig, problem: Problem) -> Hashable | None:
    """`Family.bits_class` of one launch, or of two that have the same; else None."""
    found = config.rules.bits_class(config, problem)
    if config.tail is None or found is None:
        return found
    return found if config.tail.rules.bits_class(config.tail, problem) == found else None


def computes_class(config: KernelConfig, problem: Problem, of: Hashable) -> bool:
    """Whether each launch of a configuration is of a class, or may follow it."""
    launches = (config,) if config.tail is None else (config, config.tail)
    return all(c.rules.bits_class(c, problem) == of or c.rules.may_follow(c, of) for c in launches)


def quickest_class(classes: Iterable[Hashable], time_us: Callable[[Hashable, int], float | None]) -> Hashable | None:
    """The class of the least geometric mean of its times; None: none has a kernel for every M.

    time_us(class, M): of its quickest kernel, us; None: it has none.
    """
    means: dict[Hashable, float] = {}
    for each in classes:
        times = [time_us(each, m) for m in (*MEAN_ROWS, MOST_ROWS)]
        if None not in times:
            means[each] = math.prod(us for us in times[:-1] if us is not None)
    return min(means, key=means.__getitem__, default=None)


def check_class(problem: Problem, found: Hashable | None, seen: Mapping[Hashable, object]) -> None:
    """Raises ValueError where a weight has no class."""
    if found is None:
        p = problem
        of_rows = "each class has kernels for some M alone" if seen else "it has no such kernels"
        raise ValueError(
            f"batch_invariant: expected a weight that kernels of sm{p.arch} compute in one order for every M, got "
            f"{p.format} in groups of {p.group_size}, K = {p.k}, N = {p.n}, in layout {p.layout!r}: {of_rows}"
        )
