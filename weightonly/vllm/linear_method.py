"""The linear layer of vLLM's quantization method "weightonly". folders.py has the form in which its tensors come."""

from __future__ import annotations

from typing import Any

import torch
from vllm.logger import init_logger
from vllm.model_executor.layers.linear import LinearMethodBase, register_weight_loader_v2_supported_method
from vllm.model_executor.layers.quantization.utils import replace_parameter
from vllm.model_executor.parameter import (
    BasevLLMParameter,
    ChannelQuantScaleParameter,
    GroupQuantScaleParameter,
)

from ..formats.groups import group_rows
from ..formats.layers import LayerShape
from ..fp8_product import gemm_in_fp8
from ..gemm import gemm
from ..heuristics.arch import Arch
from ..heuristics.legal import check_kernel_group_size
from ..heuristics.problem import CODE_FORMATS, FORMAT_GROUPS, FORMATS
from ..packed import PackedWeight
from ..packing import preprocess, repack, resolve_layout
from ..quantize_codes import check_scales_as
from .blocks import PackedRows, cuts_bytes, packed_blocks
from .rows import EXACT_SCALES, LOADED_FORMATS, unpack_rows
from .support import Held, why_not

logger = init_logger(f"vllm.{__name__}")

_CHUNK = 32
"""The smallest group that `gemm` takes: groups of several sizes are cut and padded to it."""


class RowGroups(BasevLLMParameter):
    """row_groups [parts, K], or [K] for one part: a row for each layer of the folder that vLLM merges into this one."""

    def load_row_parallel_weight(self, loaded_weight: torch.Tensor) -> None:
        begin = self.tp_rank * self.data.shape[-1]
        self._load(0, loaded_weight[begin : begin + self.data.shape[-1]])

    def load_column_parallel_weight(self, loaded_weight: torch.Tensor) -> None:
        self._load(0, loaded_weight)

    def load_merged_column_weight(self, loaded_weight: torch.Tensor, **kwargs: Any) -> None:
        self._load(self._shard_id_as_int(kwargs["shard_id"]), loaded_weight)

    load_qkv_weight = load_merged_column_weight

    def _load(self, part: int, rows: torch.Tensor) -> None:
        target = self.data.view(-1, self.data.shape[-1])[part]
        if rows.shape != target.shape:
            raise ValueError(f"row_groups: expected {list(target.shape)}, got {list(rows.shape)}")
        target.copy_(rows)


@register_weight_loader_v2_supported_method
class WeightOnlyLinearMethod(LinearMethodBase):
    """y = x[..., perm] @ w + bias for one layer. After loading its parameters are what `gemm` reads:

    qweight  uint8 [bytes]; scales, zeros [groups, N]; perm int32 [K'], columns of x in the order of the weight's rows
    """

    arch: Arch | None = None
    """The GPU to pack for; None: that of the weight's device (see `preprocess`)."""

    held: Held

    def __init__(self, name: str, shape: LayerShape) -> None:
        self.name = name
        self.shape = shape
        self.k = self.n = self.k_packed = 0
        self.is_whole = True
        self.activations: str | None = None
        """ "fp8" where the folder asks for it, and the GPU has kernels for it."""
        self.takes_blocks = False
        """Whether qweight is loaded as the packed bytes of the folder, in blocks of its layout (see blocks.py)."""
        self.folder: Any = None
        """The WeightOnlyConfig that made this; layers: names in the folder of the layers that vLLM merges here."""
        self.layers: tuple[str, ...] = ()

    def create_weights(
        self,
        layer: torch.nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Parameters for one shard. Raises ValueError for what the kernels do not compute."""
        shape, k, n = self.shape, input_size_per_partition, sum(output_partition_sizes)
        has_zeros, bits = shape.symmetric is not True, FORMATS[shape.format]
        has_zeros = has_zeros and shape.format not in CODE_FORMATS
        if input_size != shape.k:
            raise ValueError(f"{self.name}: expected K = {input_size} as the model has, got {shape.k} in the folder")
        if shape.format not in LOADED_FORMATS:
            hint = "; vLLM serves it without --quantization weightonly" if shape.format == "fp8" else ""
            raise ValueError(f"{self.name}: expected one of {', '.join(LOADED_FORMATS)}, got {shape.format}{hint}")
        # Whole groups lie in this shard, side by side: scales are cut as the weight is.
        self.is_whole = not shape.act_order and k % shape.group_size == 0
        if not self.is_whole and shape.format in FORMAT_GROUPS:
            raise ValueError(f"{self.name}: expected K of a rank in whole groups of {shape.group_size}, got {k}")
        group_size = shape.group_size if self.is_whole or k == input_size else _CHUNK
        k_padded = -(-k // group_size) * group_size if group_size == _CHUNK else k
        reason = why_not(k_padded, n, shape.format, group_size, has_zeros, params_dtype)
        if reason is not None:
            raise ValueError(f"{self.name}: {reason}")
        self.k, self.n, self.k_packed, self.dtype = k, n, k, params_dtype
        if shape.activations is not None:
            reason = why_not(k_padded, n, shape.format, group_size, has_zeros, params_dtype, shape.activations)
            self.activations = None if reason else shape.activations
            if reason:
                logger.warning_once("Activations of %s stay in 16 bits: %s", self.name, reason)
        loader = extra_weight_attrs["weight_loader"]
        self.takes_blocks = self.is_whole and cuts_bytes(shape, k, output_partition_sizes, (input_size, output_size))
        if self.takes_blocks:
            layer.register_parameter("qweight", packed_blocks(shape, k, n, loader))
        else:
            rows = torch.empty(n, k * bits // 8, dtype=torch.uint8)
            layer.register_parameter("qweight", PackedRows(data=rows, input_dim=1, output_dim=0, weight_loader=loader))
        groups = (k if self.is_whole else shape.k) // shape.group_size
        for name in ("scales", "zeros") if has_zeros else ("scales",):
            data = torch.empty(n, groups, dtype=EXACT_SCALES.get(shape.format, params_dtype))
            parameter = (
                GroupQuantScaleParameter(data=data, input_dim=1, output_dim=0, weight_loader=loader)
                if self.is_whole
                else ChannelQuantScaleParameter(data=data, output_dim=0, weight_loader=loader)
            )
            layer.register_parameter(name, parameter)
        if shape.act_order:
            parts = len(output_partition_sizes)
            row_groups = torch.empty((parts, k) if parts > 1 else (k,), dtype=torch.int32)
            layer.register_parameter("row_groups", RowGroups(data=row_groups, weight_loader=loader))
        self.tp_rank = int(getattr(layer, "tp_rank", 0))

    def process_weights_after_loading(self, layer: Any) -> None:
        """Packs the weight, in place of what was loaded.

        Raises ValueError for merged layers of different act-order, and for scales that do not fit the dtype of x.
        """
        shape, bits = self.shape, FORMATS[self.shape.format]
        try:
            check_scales_as(layer.scales.data, self.dtype, shape.format)
        except ValueError as error:
            raise ValueError(f"{self.name}.{error}") from error
        scales = layer.scales.data.t().to(self.dtype).contiguous()
        zeros = layer.zeros.data.t().contiguous() if hasattr(layer, "zeros") else None
        perm = None
        if self.takes_blocks:
            assert shape.layout is not None
            packed = PackedWeight(layer.qweight.data.view(-1), self.k, self.n, shape.format, shape.layout)
            packed = repack(packed, layout=self._layout(packed.device))
        else:
            rows = unpack_rows(layer.qweight.data, shape.format)  # (K, N)
            if not self.is_whole:
                rows, source, perm = self._grouped(layer, rows, len(scales))
                scales, zeros = scales[source], None if zeros is None else zeros[source]
            packed = preprocess(rows, bits, layout=self._layout(rows.device), format=shape.format)
        self.held, self.k_packed = Held(packed.k, self.n, shape.format, packed.layout), packed.k
        for name, value in (("qweight", packed.data), ("scales", scales), ("zeros", zeros)):
            if value is not None:
                replace_parameter(layer, name, torch.nn.Parameter(value, requires_grad=False))
        if perm is not None:
            layer.register_parameter("perm", torch.nn.Parameter(perm, requires_grad=False))
            layer.register_parameter("row_groups", None)

    def _layout(self, device: torch.device) -> str:
        return resolve_layout(self.shape.format, self.arch, None, device, self.activations)

    def _grouped(
        self, layer: Any, rows: torch.Tensor, groups: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """(rows in groups of one size, the group of the folder of each, the column of x of each row)."""
        if self.shape.act_order:
            parts = layer.row_groups.data.view(-1, self.k)
            if not bool((parts == parts[0]).all()):
                raise ValueError(f"{self.name}: expected one act-order for its {len(parts)} merged layers, got several")
            row_groups = parts[0].long()
        else:
            first = self.tp_rank * self.k
            row_groups = torch.arange(first, first + self.k, device=rows.device) // self.shape.group_size
        grouping = group_rows(row_groups, groups)
        try:
            check_kernel_group_size(grouping.rows, self.k)
        except ValueError:
            return _padded(rows, row_groups, groups)
        counts = torch.bincount(row_groups, minlength=groups) // grouping.rows
        source = torch.arange(groups, device=rows.device).repeat_interleave(counts)
        perm = grouping.perm
        if perm is None and self.shape.act_order:  # kept: the weights that are loaded next may have another order
            perm = torch.arange(self.k, dtype=torch.int32, device=rows.device)
        return grouping.sort(rows), source, perm

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [..., K] -> [..., N]"""
        perm = getattr(layer, "perm", None)
        if self.k_packed != self.k:  # padded groups: their rows of the weight meet a column of zeros
            assert perm is not None
            x = torch.nn.functional.pad(x, (0, 1)).index_select(-1, perm.data)
            perm = None
        w = self.held.operand(layer.qweight, layer.scales, getattr(layer, "zeros", None), perm)
        return (gemm if self.activations is None else gemm_in_fp8)(x, w, bias=bias)


def _padded(
    rows: torch.Tensor, row_groups: torch.Tensor, groups: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows sorted by group, each group filled up with zeros to a multiple of _CHUNK rows, which meet column K of x."""
    k = len(rows)
    order = torch.argsort(row_groups, stable=True)
    counts = torch.bincount(row_groups, minlength=groups)
    chunks = -(-counts // _CHUNK)
    group = row_groups[order]
    place = torch.arange(k, device=rows.device) - (counts.cumsum(0) - counts)[group]
    place += ((chunks.cumsum(0) - chunks) * _CHUNK)[group]
    total = int(chunks.sum()) * _CHUNK
    perm = torch.full((total,), k, dtype=torch.int32, device=rows.device)
    perm[place] = order.int()
    padded = rows.new_zeros(total, rows.shape[1])
    padded[place] = rows[order]
    return padded, torch.arange(groups, device=rows.device).repeat_interleave(chunks), perm
