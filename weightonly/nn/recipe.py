"""Recipe: how `quantize_model` and `Linear.from_linear` quantize a weight, and which weights they can."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..formats.words import unpack_nibbles
from ..heuristics.arch import Arch
from ..heuristics.problem import CODE_FORMATS, check_group_size
from ..ops.blocks_4bit import BLOCKSIZES, quantize_4bit
from ..packed import PackedWeight, format_bits
from ..packing import code_layout, format_of, layout_for_arch, preprocess
from ..quantize import WEIGHT_DTYPES, quantize_for, resolve_group_size

DEFAULT_GROUP_SIZE = {"int4": 128, "int8": 128, "nf4": 64, "fp4": 64}
"""Format -> rows that share a scale. Codes have the blocks that bitsandbytes has."""


@dataclass(frozen=True)
class Recipe:
    """What becomes of a weight.

    format: "int4", "int8", "nf4" or "fp4".
    group_size: rows of K that share a scale; -1: all of them.
    symmetric: False adds zero points, which codes do not have.
    dtype: of scales, zeros, bias and x; None: that of the weight.
    arch: the GPU to pack for; None: see `preprocess`.
    layout: the byte order, instead of an arch.
    """

    format: str
    group_size: int
    symmetric: bool = True
    dtype: torch.dtype | None = None
    arch: Arch | None = None
    layout: str | None = None

    def __post_init__(self) -> None:
        if self.format not in DEFAULT_GROUP_SIZE:
            known = ", ".join(DEFAULT_GROUP_SIZE)
            raise ValueError(f"format: expected one of {known} to quantize to, got {self.format!r}")
        if not isinstance(self.symmetric, bool):
            raise TypeError(f"symmetric: expected True or False, got {type(self.symmetric).__name__}")
        if self.is_code and not self.symmetric:
            raise ValueError(f"symmetric: expected True for {self.format}, which has no zero points, got False")
        if self.dtype is not None and self.dtype not in WEIGHT_DTYPES:
            raise TypeError(f"dtype: expected one of {', '.join(map(str, WEIGHT_DTYPES))}, got {self.dtype}")
        if self.is_code:
            code_layout(self.format, self.arch)
        elif self.arch is not None:
            layout_for_arch(self.arch)
        if isinstance(self.group_size, bool) or not isinstance(self.group_size, int):
            raise TypeError(f"group_size: expected an int, got {type(self.group_size).__name__}")

    @classmethod
    def of(
        cls,
        bits: int | None,
        format: str | None,
        group_size: int | None,
        symmetric: bool,
        dtype: torch.dtype | None,
        arch: Arch | None,
    ) -> Recipe:
        """From the arguments of `quantize_model`; see there."""
        format = format_of(bits, format)
        size = DEFAULT_GROUP_SIZE.get(format, 128) if group_size is None else group_size
        return cls(format, size, symmetric, dtype, arch)

    @property
    def is_code(self) -> bool:
        return self.format in CODE_FORMATS

    @property
    def bits(self) -> int:
        return format_bits(self.format)

    def check_k(self, k: int) -> None:
        """Raises ValueError unless a weight of K rows can be cut into the groups, and kernels take them."""
        rows = resolve_group_size(self.group_size, k)
        check_group_size(rows, k)
        if self.is_code and rows not in BLOCKSIZES:
            sizes = ", ".join(map(str, BLOCKSIZES))
            raise ValueError(f"group_size: expected one of {sizes} for {self.format}, got {rows}")

    def quantize(
        self, w: torch.Tensor, perm: torch.Tensor | None = None
    ) -> tuple[PackedWeight, torch.Tensor, torch.Tensor | None]:
        """A weight [K, N] of floats -> (packed weight, scales [K / g, N], zeros like them or None).

        Integers are those of `quantize`; codes those of `quantize_4bit` on blocks of a column, whose absmax is rounded
        to the dtype. perm: the order of the rows to quantize, w[perm]; see `gemm`. Raises what those and `preprocess`
        raise.
        """
        w = w if perm is None else w[perm.long()]
        self.check_k(w.shape[0])
        dtype = w.dtype if self.dtype is None else self.dtype
        if not self.is_code:
            q, scales, zeros = quantize_for(w, dtype, self.bits, self.group_size, self.symmetric)
            return self._pack(q, perm is not None), scales, zeros
        k, n = w.shape
        packed, absmax = quantize_4bit(w.t(), resolve_group_size(self.group_size, k), self.format)
        limit = torch.finfo(dtype).max
        if absmax.max() > limit:
            raise ValueError(f"w: expected values within +-{limit:g}, the range of {dtype}, got {absmax.max():g}")
        codes = unpack_nibbles(packed.view(-1), k * n).view(n, k).t()  # [K, N]
        scales = absmax.view(n, -1).t().to(dtype).contiguous()
        return self._pack(codes.contiguous(), perm is not None), scales, None

    def _pack(self, q: torch.Tensor, has_perm: bool) -> PackedWeight:
        return preprocess(
            q,
            self.bits,
            arch=self.arch,
            layout=self.layout,
            format=self.format,
            group_size=self.group_size,
            zeros=not self.symmetric,
            perm=has_perm,
        )
