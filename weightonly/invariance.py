"""The batch-invariant mode: a row's result depends on that row alone, not on how many others there are."""

from __future__ import annotations

from .require import is_set

VARIABLE = "WEIGHTONLY_BATCH_INVARIANT"
"""Environment variable: "1" turns the mode on when weightonly is imported; "0", empty or not set: it is off."""

_on = is_set(VARIABLE)


def set_batch_invariant(on: bool) -> None:
    """Set whether the bits of a row of a result depend on that row alone; default: False.

    With it `gemm`, `grouped_gemm` and `fused_experts` give a row of x the same bits in every batch: alone or among
    others, at any place, whatever the other rows hold, NaN and Inf too, and whichever experts they go to. On a CPU the
    number of threads does not count either. A weight has kernels for that which add in one order for any number of
    rows; they are chosen for its shape, and cost time (docs/guides/batch_invariance.md). Bits of two devices, or of two
    versions of this library, are not the same, nor are those of `grouped_gemm` and of `gemm`.

    It holds for calls from now on, of all threads of this process; a call that runs meanwhile may have either mode.
    What is made of a call keeps the mode that it was made with: a CUDA graph, and an exported graph of torch.compile.
    Layers of experts that were exported without the mode follow it. A compiled function is compiled again for the other
    mode. Gradients are not invariant.

    The environment variable WEIGHTONLY_BATCH_INVARIANT=1 turns it on when weightonly is imported.

    Args:
        on: True or False.

    Raises:
        TypeError: anything but a bool.

    Examples:
        >>> q, scales, _ = wo.quantize(torch.randn(512, 768).half(), group_size=128)
        >>> w, x = wo.QuantizedWeight(wo.preprocess(q), scales), torch.randn(64, 512).half()
        >>> wo.set_batch_invariant(True)
        >>> torch.equal(wo.gemm(x, w)[7:8], wo.gemm(x[7:8], w))
        True
        >>> wo.set_batch_invariant(False)
    """
    global _on
    if not isinstance(on, bool):
        raise TypeError(f"on: expected a bool, got {type(on).__name__}")
    _on = on


def batch_invariant() -> bool:
    """Whether the batch-invariant mode is on: see `set_batch_invariant`.

    Examples:
        >>> wo.batch_invariant()
        False
    """
    return _on
