"""The random weights that providers multiply by."""

from __future__ import annotations

from dataclasses import dataclass

import torch

import weightonly as wo
from weightonly.codebooks import CODEBOOKS, codebook
from weightonly.heuristics.problem import FLOAT_FORMATS, FORMAT_GROUPS
from weightonly.packing import format_of

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
"""Of x and y. A CPU alone has fp32."""


def dtype_name(dtype: torch.dtype) -> str:
    """Its key in `DTYPES`. Raises ValueError for any other."""
    for name, known in DTYPES.items():
        if known == dtype:
            return name
    raise ValueError(f"dtype: expected torch.float16 or torch.bfloat16 (on a CPU also torch.float32), got {dtype!r}")


@dataclass(frozen=True)
class Weights:
    """One random weight, quantized: w[k, n] = scales[k // g, n] * (q[k, n] - zeros[k // g, n]), or, where q are the
    codes of a codebook, scales[k // g, n] * table[q[k, n]]."""

    k: int
    n: int
    format: str  # "int4", "int8", a codebook's, "nf4" or "fp4", or "fp8"
    group_size: int  # -1: per channel
    q: torch.Tensor  # [k, n] int8, of "fp8" the numbers
    scales: torch.Tensor  # [k/g, n]
    zeros: torch.Tensor | None  # [k/g, n]
    dense: torch.Tensor  # [k, n], dtype of scales: the values that q stands for

    @classmethod
    def random(
        cls,
        k: int,
        n: int,
        *,
        bits: int,
        group_size: int,
        symmetric: bool,
        dtype: torch.dtype,
        device: torch.device,
        format: str | None = None,
        seed: int = 0,
    ) -> Weights:
        """Normal values of variance 1/k, for y of the size of x, quantized. bits, format: as for `preprocess`."""
        generator = torch.Generator(device).manual_seed(seed)
        w = torch.randn(k, n, generator=generator, device=device).mul_(k**-0.5).to(dtype)  # [k, n]
        name = format_of(bits, format)
        zeros = None
        if name in FORMAT_GROUPS or name in FLOAT_FORMATS:
            q, scales, _ = wo.quantize(w, format=name, group_size=group_size)
        elif name in CODEBOOKS:
            q, scales = _quantize_to_codes(w, k if group_size == -1 else group_size, name)
        else:
            # Integers of which none is the lowest: Humming has quicker kernels for them.
            q, scales, zeros = wo.quantize(w, bits, group_size, symmetric, search=False)
        groups = scales.shape[0]
        values = codebook(name, device)[q.int()] if name in CODEBOOKS else q.float()  # [k, n]
        values = values.view(groups, k // groups, n)  # [k/g, g, n]
        if zeros is not None:
            values -= zeros[:, None].float()
        values *= scales[:, None].float()
        return cls(k, n, name, group_size, q, scales, zeros, values.view(k, n).to(dtype))


def _quantize_to_codes(w: torch.Tensor, group_size: int, format: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(nearest codes of the table [k, n] int8, largest magnitude of each group as its scale [k/g, n])."""
    k, n = w.shape
    blocks = w.float().view(k // group_size, group_size, n)  # [k/g, g, n]
    scales = blocks.abs().amax(1)  # [k/g, n]
    table, order = codebook(format, w.device).sort()
    places = torch.bucketize(blocks / scales[:, None], (table[1:] + table[:-1]) / 2, out_int32=True)
    return order.to(torch.int8)[places].view(k, n), scales.to(w.dtype)
