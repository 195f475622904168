"""Whether kernels may start before the one before them has ended: programmatic dependent launch."""

from __future__ import annotations

from typing import Literal

from .kernels import _C

LaunchOverlap = bool | Literal["constant_weights"]

# As kernels/params.h numbers them.
_NUMBERS: dict[LaunchOverlap, int] = {False: 0, True: 1, "constant_weights": 2}

_overlap: LaunchOverlap = True


def set_launch_overlap(overlap: LaunchOverlap) -> None:
    """Let the kernels of Hopper start while the kernel before them in the stream still runs, or not; default: True.

    True: a kernel that starts early only asks for weights and scales to come nearer, into the L2 cache, and uses
    nothing until all work before it in the stream is done. The results are the same, whatever that work writes.

    "constant_weights": it takes its first weights and scales into shared memory meanwhile, which is faster. This is a
    promise: no work that runs just before a `gemm` writes that call's packed weight, scales or zero points (x, bias and
    `out` it may write). A model that runs keeps it; one that is being loaded or changed does not: synchronize between
    that and the next `gemm`, or stay with True. (Scales that `gemm` itself copies first are waited for: where N is no
    multiple of 64, or they are not contiguous or not 16-byte aligned.)

    False: each call is timed by itself; the benchmarks do that. (Where a call is two launches the second one starts
    early all the same.)

    It holds for calls of `gemm` from now on, in this process, on tiled weights; a CUDA graph keeps what it was captured
    with. Raises TypeError for anything but a bool or a str, ValueError for another str.
    """
    global _overlap
    if not isinstance(overlap, (bool, str)):
        raise TypeError(f"overlap: expected a bool or 'constant_weights', got {type(overlap).__name__}")
    if overlap not in _NUMBERS:
        raise ValueError(f"overlap: expected a bool or 'constant_weights', got {overlap!r}")
    if _C is not None:
        _C.set_launch_overlap(_NUMBERS[overlap])
    _overlap = overlap


def launch_overlap() -> LaunchOverlap:
    """What `set_launch_overlap` has set."""
    return _overlap
