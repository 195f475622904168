"""Whether kernels may start before the one before them has ended: programmatic dependent launch."""

from __future__ import annotations

from .kernels import _C

_overlap = True


def set_launch_overlap(enabled: bool) -> None:
    """Let the kernels of Hopper start while the kernel before them in the stream still runs, or not; default: let them.

    A kernel that starts early only asks for its weights to come nearer, into the L2 cache, and computes nothing until
    all work before it in the stream is done. The results are the same, whatever that work writes. It holds for calls of
    `gemm` from now on, in this process, on tiled weights; a CUDA graph keeps what it was captured with. Off, each call
    is timed by itself: the benchmarks do that. (Where a call is two launches the second one starts early all the same.)
    Raises TypeError unless `enabled` is a bool.
    """
    global _overlap
    if not isinstance(enabled, bool):
        raise TypeError(f"enabled: expected a bool, got {type(enabled).__name__}")
    if _C is not None:
        _C.set_launch_overlap(enabled)
    _overlap = enabled


def launch_overlap() -> bool:
    """What `set_launch_overlap` has set."""
    return _overlap
