"""Whether kernels start before the kernel in front of them has ended: programmatic dependent launch (PDL)."""

from __future__ import annotations

from typing import Any, Literal

from .kernels import _C

LaunchOverlap = bool | Literal["constant_weights"]

PDL_MODES: dict[LaunchOverlap, int] = {False: 0, True: 1, "constant_weights": 2}
"""enum PdlMode of cutlass_ext/gemm_params.h."""

_overlap: LaunchOverlap = True


def set_launch_overlap(overlap: LaunchOverlap) -> None:
    """Set whether Hopper's kernels start while the kernel in front of them in the stream still runs; default: True.

    It holds for calls of `gemm` from now on, in this process, on tiled weights. A CUDA graph keeps what it was captured
    with.

    Args:
        overlap: True: a kernel that starts early prefetches weights and scales into the L2 cache. It uses nothing
            before all work in front of it in the stream has ended. The results are the same, whatever that work writes.
            "constant_weights": it also loads its first weights and scales into shared memory, which is faster. This is
            a promise by the caller: no work that runs just before a `gemm` writes the packed weight, the scales or the
            zero points of that call; x, bias and `out` it may write. A model that runs keeps the promise. A model that
            is loaded or changed does not: synchronize between that and the next `gemm`, or stay with True. (Where
            `gemm` itself copies the scales, because N is no multiple of 64, or they are not contiguous or not 16-byte
            aligned, the kernel waits for the copy.) False: each call begins when all work in front of it has ended; the
            benchmarks time single calls so. (Where a call is two launches the second one starts early all the same.)

    Raises:
        TypeError: anything but a bool or a str.
        ValueError: another str.

    Examples:
        >>> wo.set_launch_overlap("constant_weights")
        >>> wo.launch_overlap()
        'constant_weights'
        >>> wo.set_launch_overlap(True)
    """
    global _overlap
    if not isinstance(overlap, (bool, str)):
        raise TypeError(f"overlap: expected a bool or 'constant_weights', got {type(overlap).__name__}")
    if overlap not in PDL_MODES:
        raise ValueError(f"overlap: expected a bool or 'constant_weights', got {overlap!r}")
    if _C is not None:
        _C.set_pdl_mode(PDL_MODES[overlap])
    _overlap = overlap


def launch_overlap() -> LaunchOverlap:
    """The mode that `set_launch_overlap` has set.

    Examples:
        >>> wo.launch_overlap()
        True
    """
    return _overlap


def compile_options(*, cudagraphs: bool = False) -> dict[str, Any]:
    """Options of torch.compile with which its own kernels start early, too: norms, rotations, gates between products.

    On Hopper and later each kernel that Triton makes is launched while the one before it still runs, and waits for it
    before it reads anything. The results are the same. A decode step is a chain of short kernels: one of Llama-3-8B
    with fused layers took 5 to 13% less time on an H200, at batch 1. There `set_launch_overlap(False)` took another 4%
    off, and nothing of other models: measure yours.

    Args:
        cudagraphs: capture CUDA graphs, as mode="reduce-overhead" does; torch.compile takes a mode or options.

    Returns:
        For `torch.compile(..., options=)`, backend "inductor". Where PyTorch has no such option: without it.

    Raises:
        TypeError: `cudagraphs` that is no bool.

    Examples:
        >>> model = torch.nn.Linear(8, 8)
        >>> step = torch.compile(model, options=wo.compile_options())
        >>> wo.compile_options(cudagraphs=True)["triton.cudagraphs"]
        True
    """
    if not isinstance(cudagraphs, bool):
        raise TypeError(f"cudagraphs: expected a bool, got {type(cudagraphs).__name__}")
    from torch import _inductor

    early = "triton.enable_pdl"
    options: dict[str, Any] = {early: True} if early in _inductor.list_options() else {}
    return options | {"triton.cudagraphs": True} if cudagraphs else options
