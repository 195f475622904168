"""Codebooks: the 16 numbers that the 4-bit codes of a weight stand for.

w[k, n] = scales[k // g, n] * codebook[code[k, n]]. Named formats have fixed codebooks, the caller
brings one for "code4": a tuple of 16 floats, each exact in fp32. A device keeps one copy for each dtype in use.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from .require import require_numbers, require_tensor

CODEBOOK_LENGTH = 16

_LIMIT = torch.finfo(torch.float16).max


def _in_fp32(numbers: Sequence[float]) -> tuple[float, ...]:
    return tuple(torch.tensor(numbers, dtype=torch.float32, device="cpu").tolist())


E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of the 4-bit floats of OCP's Microscaling Formats (MX) 1.0, of codes 0 to 7. Bit 3 is the sign."""

_E2M1 = tuple(sign * magnitude for sign in (1.0, -1.0) for magnitude in E2M1)

CODEBOOKS: dict[str, tuple[float, ...]] = {
    # Quantiles of the normal distribution: Dettmers et al., QLoRA, https://arxiv.org/abs/2305.14314, appendix E.
    "nf4": (
        -1.0,
        -0.6961928009986877,
        -0.5250730514526367,
        -0.39491748809814453,
        -0.28444138169288635,
        -0.18477343022823334,
        -0.09105003625154495,
        0.0,
        0.07958029955625534,
        0.16093020141124725,
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    ),
    # bitsandbytes' FP4: multiples of 1/192, the largest 1. Bit 3 is the sign, but of 0, which is there twice.
    "fp4": _in_fp32([sign * m / 192 + 0.0 for sign in (1, -1) for m in (0, 1, 128, 192, 64, 96, 32, 48)]),
    "mxfp4": _E2M1,
    "nvfp4": _E2M1,
}
"""Format -> its codebook."""

BLOCK_FORMATS = ("nf4", "fp4")
"""Formats of bitsandbytes: a scale is the largest magnitude of a block."""


def codebook(format: str, device: torch.device | str = "cpu") -> torch.Tensor:
    """The codebook of a format of CODEBOOKS: a new tensor, fp32 [16]."""
    return torch.tensor(CODEBOOKS[format], dtype=torch.float32, device=device)


def codebook_values(code: torch.Tensor | Sequence[float]) -> tuple[float, ...]:
    """The caller's codebook as the library keeps it: 16 floats, rounded to fp32.

    code: a tensor of floats [16] or a sequence of 16 numbers, within the range of fp16: kernels hold it in the dtype
    of x. Raises TypeError for anything else, ValueError for another length or for values out of range.
    """
    try:
        numbers = code if isinstance(code, torch.Tensor) else torch.tensor(code, dtype=torch.float32, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"code: expected {CODEBOOK_LENGTH} numbers, got {type(code).__name__} ({error})") from error
    require_tensor("code", numbers)
    require_numbers("code", numbers)
    if not numbers.is_floating_point():
        raise TypeError(f"code: expected floats, got {numbers.dtype}")
    if numbers.shape != (CODEBOOK_LENGTH,):
        raise ValueError(f"code: expected {CODEBOOK_LENGTH} numbers, got shape {list(numbers.shape)}")
    values = _in_fp32(numbers.tolist())
    if not all(abs(value) <= _LIMIT for value in values):  # NaN is not, either
        raise ValueError(f"code: expected finite values within +-{_LIMIT:g}, got {list(values)}")
    return values


def codebook_of(format: str, code: torch.Tensor | Sequence[float] | None) -> tuple[float, ...] | None:
    """The codebook of a weight, None for integers. Raises ValueError or TypeError for a `code` that does not fit."""
    if format == "code4":
        if code is None:
            raise ValueError("code: expected the codebook of a code4 weight, got None")
        return codebook_values(code)
    if code is not None:
        raise ValueError(f"code: expected None for {format}, got a codebook; only code4 takes one")
    return CODEBOOKS.get(format)


@functools.cache
def codebook_on(values: tuple[float, ...], device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """A codebook [16] in `dtype` on `device`. All weights share this copy. It is never freed: plans and
    captured CUDA graphs hold its address.

    The first call for a CUDA device copies from the host, which a CUDA graph cannot capture.
    """
    return torch.tensor(values, dtype=torch.float32, device="cpu").to(dtype).to(device)
