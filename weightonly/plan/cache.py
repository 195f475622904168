"""The plans that were made, by what they depend on.

A decode step costs a dictionary look-up instead of the checks and the choice of a kernel. A key (`GemmArgs.key`) holds
sizes, strides, dtypes, devices and the kind of the weight, and no address: layers of one shape share their plans, and a
call that torch.compile traced, which makes a PackedWeight of its own, finds the plans of the others.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from ..args import GemmArgs
from .base import Plan

MAX_PLANS = 1 << 13
"""A server sees some hundred values of M, for some ten kinds of weights."""

Key = tuple[object, ...]
Args = TypeVar("Args", bound=GemmArgs)

_plans: dict[Key, Plan] = {}
_lock = threading.Lock()

layers: dict[Key, object] = {}
"""The plans of whole layers of experts (experts.py), by keys of their own."""

checked_layers: set[Key] = set()
"""Kinds of such layers that were checked: what is checked depends on nothing else."""

find = _plans.get
"""The plan of a key, or None."""


def add(key: Key, plan: Plan) -> None:
    """Keeps a plan. Beyond MAX_PLANS the oldest one goes."""
    with _lock:
        if len(_plans) >= MAX_PLANS:
            del _plans[next(iter(_plans))]
        _plans[key] = plan


def clear() -> None:
    """Forgets all plans: the next calls choose anew."""
    with _lock:
        _plans.clear()
        layers.clear()
        checked_layers.clear()


def plans() -> list[Plan]:
    """The plans that are kept, the oldest first."""
    return list(_plans.values())


def plan_of(args: Args, make: Callable[[Args], Plan]) -> Plan:
    """The plan of these arguments, which is made if it is not there. All that the call reads is in memory then.

    Raises what `make` raises, and TypeError or ValueError for an operand that kernels cannot read by its address.
    """
    key: Key | None = None
    try:
        plan = find(args.key())
        if plan is not None and plan.holds(args):
            return plan
        key = args.key()  # the weight was looked at again
        plan = find(key)
    except (AttributeError, TypeError, RuntimeError):
        plan = None  # some argument is not what it should be: the checks say which
    if plan is None:
        plan = make(args)
        if key is not None:
            add(key, plan)
    if not plan.holds(args):
        args.check()
        args.check_memory()
    return plan
