"""Recipe: how `quantize_model` and `Linear.from_linear` quantize a weight, and which weights they can."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ..activation_dtype import activations_of, check_fp8_format, check_fp8_groups
from ..args import CUDA_DTYPES
from ..dense import DEFAULT_GROUP_SIZE, check_weight_dtype, default_group_size, resolve_group_size
from ..heuristics.arch import Arch
from ..heuristics.legal import check_kernel_group_size
from ..heuristics.problem import CODE_FORMATS, check_group_size
from ..least_squares import SearchFor, require_search
from ..packed import format_bits
from ..packing import format_of, preprocess, resolve_layout
from ..quantize import quantize_for
from ..quantize_codes import check_code_groups
from ..require import require_bool, require_int
from ..weight import QuantizedWeight


@dataclass(frozen=True)
class Recipe:
    """What becomes of a weight.

    format: one of DEFAULT_GROUP_SIZE.
    group_size: rows of K that share a scale; -1: all of them.
    symmetric: False adds zero points, which codes do not have.
    dtype: of scales, zeros, bias and x; None: that of the weight.
    arch: the GPU to pack for; None: see `preprocess`.
    search: as for `quantize`.
    activations: "fp8", or None: what the layer makes of x; see `Linear`.
    """

    format: str
    group_size: int
    symmetric: bool = True
    dtype: torch.dtype | None = None
    arch: Arch | None = None
    search: SearchFor = True
    activations: str | None = None

    def __post_init__(self) -> None:
        if self.format not in DEFAULT_GROUP_SIZE:
            known = ", ".join(DEFAULT_GROUP_SIZE)
            raise ValueError(f"format: expected one of {known} to quantize to, got {self.format!r}")
        require_bool("symmetric", self.symmetric)
        require_search(self.search)
        if self.is_code and not self.symmetric:
            raise ValueError(f"symmetric: expected True for {self.format}, which has no zero points, got False")
        if self.dtype is not None:
            check_weight_dtype(self.dtype)
        if self.activations is not None:
            check_fp8_format(self.format, self.symmetric)
        resolve_layout(self.format, self.arch, activations=self.activations)
        require_int("group_size", self.group_size)

    @classmethod
    def of(
        cls,
        bits: int | None,
        format: str | None,
        group_size: int | None,
        symmetric: bool,
        dtype: torch.dtype | None,
        arch: Arch | None,
        search: SearchFor = True,
        activations: str | None = None,
    ) -> Recipe:
        """From the arguments of `quantize_model`; see there."""
        format = format_of(bits, format)
        size = default_group_size(format) if group_size is None else group_size
        return cls(format, size, symmetric, dtype, arch, search, activations_of(activations))

    def with_own(
        self,
        format: str | None = None,
        group_size: int | None = None,
        symmetric: bool | None = None,
        activations: str | None = None,
    ) -> Recipe:
        """The recipe of layers that have some things otherwise. activations: "16bit" is None of a recipe.

        Where one of both formats is a codebook, the group size is the usual one of the new format.
        """
        format = self.format if format is None else format
        if group_size is None:
            is_near = format == self.format or not (self.is_code or format in CODE_FORMATS)
            group_size = self.group_size if is_near else default_group_size(format)
        if symmetric is None:
            symmetric = self.symmetric or format in CODE_FORMATS
        activations = self.activations if activations is None else activations_of(activations)
        return replace(self, format=format, group_size=group_size, symmetric=symmetric, activations=activations)

    @property
    def is_code(self) -> bool:
        return self.format in CODE_FORMATS

    @property
    def bits(self) -> int:
        return format_bits(self.format)

    def check_k(self, k: int, on_gpu: bool = False) -> None:
        """Raises ValueError unless a weight of K rows can be cut into the groups, and what is to compute takes them.

        on_gpu: whether the weight is on a GPU.
        """
        rows = resolve_group_size(self.group_size, k)
        if self.is_code:
            check_code_groups(self.format, rows)
        if self.arch not in (None, "cpu"):
            check_kernel_group_size(rows, k, self.arch)
        else:
            (check_kernel_group_size if on_gpu else check_group_size)(rows, k)
        if self.activations is not None:
            check_fp8_groups(rows, k)

    def check_dtype(self, dtype: torch.dtype, on_gpu: bool = False) -> None:
        """Raises ValueError for scales that x in E4M3 does not meet on a GPU.

        dtype: of the weight. on_gpu: whether it is on a GPU, or packed for one.
        """
        dtype = dtype if self.dtype is None else self.dtype
        if self.activations is not None and dtype not in CUDA_DTYPES and (on_gpu or self.arch not in (None, "cpu")):
            raise ValueError(
                f"activations: expected scales in float16 or bfloat16 for {self.activations!r} on a GPU, got {dtype}; "
                "dtype= says theirs"
            )

    def quantize(self, w: torch.Tensor) -> QuantizedWeight:
        """A weight [K, N] of floats, quantized and packed: what `weightonly.quantize` makes.

        Raises what that and `preprocess` raise.
        """
        self.check_k(w.shape[0], w.is_cuda)
        self.check_dtype(w.dtype, w.is_cuda)
        dtype = w.dtype if self.dtype is None else self.dtype
        q, scales, zeros = quantize_for(w, dtype, self.format, self.group_size, self.symmetric, self.search)
        packed = preprocess(
            q,
            self.bits,
            layout=resolve_layout(self.format, self.arch, device=w.device, activations=self.activations),
            format=self.format,
            group_size=self.group_size,
            zeros=not self.symmetric,
            perm=False,
        )
        return QuantizedWeight(packed, scales, zeros)
