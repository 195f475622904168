"""A linear kernel for everything that vLLM routes through MPLinearKernel: GPTQ, AWQ, compressed-tensors.

vLLM brings each of these formats to one form, which a kernel then packs:

weight  int32 [K * bits / 32, N]: u, packed along K, lowest bits first
scales  [groups, N]
zeros   int32 [groups, N * bits / 32]: z, packed along N
g_idx   int32 [K]: the group of each row, for act-order; only before vLLM 0.30 (pull request 54809)

w = scales * (u - z); without zeros z is 2^(bits-1).

compressed-tensors' W4A8 with x in FP8 comes here, too: u as above, whatever vLLM calls its type, and x in 16 bits.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.kernels.linear import MPLinearKernel, MPLinearLayerConfig
from vllm.model_executor.layers.quantization.utils import replace_parameter
from vllm.model_executor.parameter import permute_param_layout_
from vllm.platforms import current_platform
from vllm.scalar_type import ScalarType, scalar_types

from ..activation_dtype import FP8
from ..formats.groups import group_rows
from ..formats.words import to_signed, unpack_words
from ..fp8_product import gemm_in_fp8
from ..gemm import gemm
from ..heuristics.arch import Arch
from ..heuristics.legal import check_kernel_group_size
from ..packing import preprocess, resolve_layout
from .support import Held, why_not

_TYPES: dict[tuple[ScalarType, bool], int] = {
    (scalar_types.uint4b8, False): 4,
    (scalar_types.uint8b128, False): 8,
    (scalar_types.uint4, True): 4,
    (scalar_types.uint8, True): 8,
}
"""(type of the weight, whether there are zero points) -> bits."""


class WeightOnlyLinearKernel(MPLinearKernel):
    """y = x @ w + bias by `weightonly.gemm`. After loading, the layer's parameters are what `gemm` reads:

    weight  uint8 [bytes], the data of the PackedWeight that `held` makes around the parameter
    scales  [groups, N]
    zeros   like scales, or None
    g_idx   int32 [K], the permutation `perm` of `gemm`, or None
    """

    arch: Arch | None = None
    """The GPU to pack for; None: that of the weight's device (see `preprocess`)."""

    held: Held

    @classmethod
    def get_min_capability(cls) -> int:
        return 70

    @classmethod
    def can_implement(cls, c: MPLinearLayerConfig) -> tuple[bool, str | None]:
        if not (current_platform.is_cuda() or current_platform.is_cpu()):
            return False, f"weightonly has no kernels for {current_platform.device_name}"
        activations = _activations(c)
        types = _TYPES if activations is None else {(scalar_types.int4, False): 4}
        bits = types.get((c.weight_type, c.zero_points))
        if bits is None:
            return False, f"weightonly has no kernels for {c.weight_type} with zero_points={c.zero_points}"
        k, n = c.partition_weight_shape
        if getattr(c, "has_g_idx", False) and k != c.full_weight_shape[0]:
            return False, "weightonly does not split K of act-order weights"
        reason = why_not(k, n, f"int{bits}", c.group_size, c.zero_points, _dtype(c), activations)
        return reason is None, reason

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Packs the weight of `layer`, in place of the one that was loaded.

        Raises ValueError for bad groups, and where vLLM has loaded no scales.
        """
        c = self.config
        k, n = c.partition_weight_shape
        bits = c.weight_type.size_bits
        words = _as_input_by_output(getattr(layer, self.w_q_name), packed_dim=0)
        q = to_signed(unpack_words(words, bits, dim=0)[:k], bits)
        scales = _as_input_by_output(getattr(layer, self.w_s_name)).to(_dtype(c))
        if len(scales) == 0:
            raise ValueError(
                f"{self.w_s_name}: expected scales for K = {k} of {c.full_weight_shape[0]}, got none: "
                "this method of vLLM does not cut weights along K whose scales are per channel"
            )
        zeros = None
        if c.zero_points:
            words = _as_input_by_output(getattr(layer, self.w_zp_name or ""), packed_dim=1)
            zeros = to_signed(unpack_words(words, bits, dim=1)[:, :n], bits).to(c.act_type)
        perm = None
        if getattr(c, "has_g_idx", False):
            grouping = group_rows(getattr(layer, self._g_idx_name).data, len(scales))
            check_kernel_group_size(grouping.rows, k)
            q, scales = grouping.sort(q), grouping.spread(scales)
            zeros = None if zeros is None else grouping.spread(zeros)
            # A kept identity: the model that is loaded next into this layer may have another order.
            perm = torch.arange(k, dtype=torch.int32, device=q.device) if grouping.perm is None else grouping.perm
        packed = preprocess(q, bits, layout=resolve_layout(f"int{bits}", self.arch, None, q.device, _activations(c)))
        self.held = Held(k, n, packed.format, packed.layout)
        _replace(layer, self.w_q_name, packed.data)
        _replace(layer, self.w_s_name, scales.contiguous())
        _replace(layer, self.w_zp_name, zeros)
        _replace(layer, self._g_idx_name, perm)

    def apply_weights(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [..., K] -> [..., N]"""
        names = (self.w_q_name, self.w_s_name, self.w_zp_name, self._g_idx_name)
        data, scales, zeros, perm = (getattr(layer, name, None) if name else None for name in names)
        assert data is not None and scales is not None
        product = gemm if _activations(self.config) is None else gemm_in_fp8
        return product(x, self.held.operand(data, scales, zeros, perm), bias=bias)

    @property
    def _g_idx_name(self) -> str:
        return getattr(self, "w_gidx_name", None) or ""


def _activations(c: MPLinearLayerConfig) -> str | None:
    return FP8 if c.act_type == torch.float8_e4m3fn else None


def _dtype(c: MPLinearLayerConfig) -> torch.dtype:
    """That of x as it comes, and of scales."""
    return c.act_type if _activations(c) is None else c.out_type or torch.bfloat16


def _as_input_by_output(parameter: Any, **packed_dim: int) -> torch.Tensor:
    """The data of a parameter as [K, N], whichever way it was loaded. The parameter stays as it is."""
    view = torch.Tensor._make_subclass(type(parameter), parameter.data, False)
    view.__dict__.update(parameter.__dict__)
    return permute_param_layout_(view, input_dim=0, output_dim=1, **packed_dim).data


def _replace(layer: torch.nn.Module, name: str | None, value: torch.Tensor | None) -> None:
    """Sets a parameter of the layer, or drops it."""
    if not name or not hasattr(layer, name):
        return
    if value is None:
        layer.register_parameter(name, None)
    else:
        replace_parameter(layer, name, torch.nn.Parameter(value, requires_grad=False))
