"""The plans that were made, by what they depend on.

A decode step costs a dictionary look-up instead of the checks and the choice of a kernel. A key holds sizes, strides,
dtypes, devices and the kind of the weight, and no address: layers of one shape share their plans, and a call that
torch.compile traced, which makes a PackedWeight of its own, finds the plans of the others.
"""

from __future__ import annotations

import functools
import threading

import torch

from ..args import GemmArgs, HasKind
from ..packed import PackedWeight
from ..plain import PLAIN
from .base import Plan

MAX_PLANS = 1 << 13
"""A server sees some hundred values of M, for some ten kinds of weights."""

Key = tuple[object, ...]

_plans: dict[Key, Plan] = {}
_lock = threading.Lock()

layers: dict[Key, object] = {}
"""The plans of whole layers of experts (experts.py), by keys of their own."""

checked_layers: set[Key] = set()
"""Kinds of such layers whose weights were checked: what is checked depends on nothing else."""

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
    """Those that are kept, the oldest first."""
    return list(_plans.values())


def key_of(args: GemmArgs) -> Key:
    """All that the checks and the plan of a call depend on.

    Raises AttributeError, TypeError or RuntimeError where an argument is not of its type; the checks say which.
    """
    x, w, scales, zeros, bias, perm = args.x, args.qweight, args.scales, args.zeros, args.bias, args.perm
    if args.weight is not None:
        return _key_of_weight(args, args.weight)
    if (
        type(x) not in PLAIN
        or x.is_neg()
        or type(scales) not in PLAIN
        or scales.is_neg()
        or (zeros is not None and (type(zeros) not in PLAIN or zeros.is_neg()))
        or (bias is not None and (type(bias) not in PLAIN or bias.is_neg()))
        or (perm is not None and type(perm) not in PLAIN)
    ):
        raise TypeError("a subclass of torch.Tensor has no plan, nor has a negated view")
    device = x.get_device()
    return (
        w._kind or kind_of(w),
        x.shape,
        x.is_contiguous() or x.stride(),
        x.dtype,
        device if device >= 0 else _devices(args),
        scales.shape,
        scales.is_contiguous() or scales.stride(),
        scales.dtype,
        scales.get_device(),
        None
        if zeros is None
        else (zeros.shape, zeros.is_contiguous() or zeros.stride(), zeros.dtype, zeros.get_device()),
        None if bias is None else (bias.shape, bias.is_contiguous() or bias.stride(), bias.dtype, bias.get_device()),
        None if perm is None else (perm.shape, perm.is_contiguous() or perm.stride(), perm.dtype, perm.get_device()),
        args.activation,
        args.config,
    )


def _key_of_weight(args: GemmArgs, weight: HasKind) -> Key:
    """The key of a call with a QuantizedWeight, whose kind has its part in one object."""
    x, bias = args.x, args.bias
    if type(x) not in PLAIN or x.is_neg() or (bias is not None and (type(bias) not in PLAIN or bias.is_neg())):
        raise TypeError("a subclass of torch.Tensor has no plan, nor has a negated view")
    return (
        weight._kind or weight.look_again(),
        x.shape,
        x.is_contiguous() or x.stride(),
        x.dtype,
        x.device,
        None if bias is None else (bias.shape, bias.is_contiguous() or bias.stride(), bias.dtype, bias.device),
        args.activation,
        args.config,
    )


def _devices(args: GemmArgs) -> tuple[torch.device | None, ...]:
    """Of tensors that are on no GPU: `get_device` is -1 for a CPU and for what has no memory at all."""
    zeros, bias, perm = args.zeros, args.bias, args.perm
    return (
        args.x.device,
        args.scales.device,
        None if zeros is None else zeros.device,
        None if bias is None else bias.device,
        None if perm is None else perm.device,
    )


def kind_of(qweight: PackedWeight) -> object:
    """What a plan depends on of a weight, as an object that is compared by identity; kept on the weight."""
    w = qweight
    if w._kind is not None:
        return w._kind
    if type(w.data) not in PLAIN:
        raise TypeError("a subclass of torch.Tensor has no plan")
    expected = (w.group_size, w.has_zeros, w.has_perm)
    w._kind = kind = _kind(w.k, w.n, w.format, w.layout, w.code, w.experts, expected, w.device)
    return kind


def kind_of_operands(qweight: PackedWeight, *operands: torch.Tensor | None) -> object:
    """The same of a weight with its scales, zeros and perm. Raises TypeError where one of them has no plan."""
    if any(t is not None and (type(t) not in PLAIN or t.is_neg()) for t in operands):
        raise TypeError("a subclass of torch.Tensor has no plan, nor has a negated view")
    described = (None if t is None else (t.shape, t.stride(), t.dtype, t.device) for t in operands)
    return _kind(kind_of(qweight), *described)


@functools.lru_cache(maxsize=MAX_PLANS)
def _kind(*fields: object) -> object:
    return object()
