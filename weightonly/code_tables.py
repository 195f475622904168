"""Code tables: the number that each 4-bit code of a weight stands for. All of the library takes them from here.

w[k, n] = scales[k // g, n] * table[code[k, n]]: NF4 and FP4, whose tables are fixed, and tables of one's own ("code4").
A table is a tuple of 16 floats, exact in fp32; a device has a copy of each in each dtype that asked for it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch

TABLE_LENGTH = 16

_LIMIT = torch.finfo(torch.float16).max


def _in_fp32(numbers: Sequence[float]) -> tuple[float, ...]:
    return tuple(torch.tensor(numbers, dtype=torch.float32).tolist())


CODE_TABLES: dict[str, tuple[float, ...]] = {
    # The quantiles of a normal distribution: Dettmers et al., QLoRA, https://arxiv.org/abs/2305.14314, appendix E.
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
    # bitsandbytes' FP4: bit 3 is the sign, of all but 0. Multiples of 1/192, the largest is 1.
    "fp4": _in_fp32([sign * m / 192 + 0.0 for sign in (1, -1) for m in (0, 1, 128, 192, 64, 96, 32, 48)]),
}
"""Format -> its table."""


def code_table(format: str, device: torch.device | str = "cpu") -> torch.Tensor:
    """The table of "nf4" or "fp4", fp32 [16]; the caller's own copy."""
    return torch.tensor(CODE_TABLES[format], dtype=torch.float32, device=device)


def table_values(code: torch.Tensor | Sequence[float]) -> tuple[float, ...]:
    """A table of one's own as the library keeps it, rounded to fp32.

    code: 16 numbers, a tensor of floats [16] or a sequence. Within the range of fp16, as the kernels hold it in the
    dtype of x. Raises TypeError for something else, ValueError for another length or for values out of range.
    """
    try:
        table = code if isinstance(code, torch.Tensor) else torch.tensor(code, dtype=torch.float32)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"code: expected {TABLE_LENGTH} numbers, got {type(code).__name__} ({error})") from error
    if not table.is_floating_point():
        raise TypeError(f"code: expected floats, got {table.dtype}")
    if table.shape != (TABLE_LENGTH,):
        raise ValueError(f"code: expected {TABLE_LENGTH} numbers, got shape {list(table.shape)}")
    values = _in_fp32(table.tolist())
    if not all(math.isfinite(value) and abs(value) <= _LIMIT for value in values):
        raise ValueError(f"code: expected finite values within +-{_LIMIT:g}, got {list(values)}")
    return values


@functools.cache
def table_on(values: tuple[float, ...], device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """A table in `dtype`, [16] on `device`: one copy for all weights that have it, which stays there for good.

    The first call for a CUDA device copies from the host, which a CUDA graph cannot capture.
    """
    return torch.tensor(values, dtype=torch.float32).to(dtype).to(device)
