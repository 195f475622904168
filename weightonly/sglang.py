"""The plug-in for SGLang, entry point group `sglang.srt.plugins`: linear layers and experts of GPTQ, AWQ and
compressed-tensors.

Layers that SGLang would give to Marlin are ours where our kernels compute them. They are packed when their weights have
been loaded; others stay with Marlin. Importing this module imports nothing of SGLang.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from .device import device_arch
from .formats import IntWeight, read_awq, read_compressed_tensors, read_gptq
from .gemm import gemm
from .kernels import arch_runs_on, built_archs
from .nn.linear import Linear
from .packing import preprocess
from .sglang_experts import Experts, Stored
from .vllm.support import why_not

_KERNELS = "sglang.srt.hardware_backend.gpu.quantization"
_SCHEMES = "sglang.srt.layers.quantization.compressed_tensors.schemes.compressed_tensors_wNa16"


def register() -> None:
    """Hooks six classes of SGLang, in processes of an installation that has kernels."""
    if not built_archs():
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target, apply, read in (
        (f"{_KERNELS}.gptq_kernels.GPTQMarlinLinearKernel", "apply", _gptq),
        (
            f"{_KERNELS}.awq_kernels.AWQMarlinLinearKernel",
            "apply",
            lambda _, layer: read_awq(layer.qweight.data, layer.scales.data, layer.qzeros.data),
        ),
        (f"{_SCHEMES}.CompressedTensorsWNA16", "apply_weights", _compressed_tensors),
    ):
        HookRegistry.register(f"{target}.process_weights_after_loading", _packing(read), HookType.AROUND)
        HookRegistry.register(f"{target}.{apply}", _multiply, HookType.AROUND)
    for target, apply, stored in (
        (f"{_KERNELS}.gptq_kernels.GPTQMarlinMoEKernel", "apply", Stored.gptq),
        (f"{_KERNELS}.awq_kernels.AWQMoEKernel", "apply", Stored.awq),
        (f"{_SCHEMES}_moe.CompressedTensorsWNA16MoE", "apply_weights", Stored.compressed_tensors),
    ):
        HookRegistry.register(f"{target}.process_weights_after_loading", _packing_experts(stored), HookType.AROUND)
        HookRegistry.register(f"{target}.{apply}", _run_experts, HookType.AROUND)


def _packing(read: Callable[[Any, Any], IntWeight]) -> Callable[..., None]:
    """read: (SGLang's kernel, layer with loaded weights) -> the weight [K, N] of this rank"""

    def pack(original: Callable[..., None], kernel: Any, layer: Any) -> None:
        weight = read(kernel, layer)
        (k, n), format, groups = weight.q.shape, f"int{weight.bits}", len(weight.scales)
        reason = why_not(k, n, format, k // groups, weight.zeros is not None, weight.scales.dtype)
        if _is_left(reason, weight.q.device):
            original(kernel, layer)
            return
        packed = Linear.from_quantized(preprocess(weight.q, weight.bits), weight.scales, weight.zeros, perm=weight.perm)
        _put(packed, layer)

    return pack


def _packing_experts(stored_by: Callable[[Any], Stored]) -> Callable[..., None]:
    """stored_by: SGLang's kernel -> how a layer of it holds its experts; raises ValueError for what is not ours"""

    def pack(original: Callable[..., None], kernel: Any, layer: Any) -> None:
        reason = None
        try:
            stored = stored_by(kernel)
            stored.check(layer)
        except ValueError as error:
            reason = str(error)
        if _is_left(reason, next(layer.parameters()).device):
            original(kernel, layer)
        else:
            _put(Experts(stored, layer), layer)

    return pack


def _is_left(reason: str | None, device: torch.device) -> bool:
    """Whether a layer is left to SGLang, for this reason or as there are no kernels for its GPU. Logs why."""
    if device.type == "cuda" and not any(arch_runs_on(a, device_arch(device.index)) for a in built_archs()):
        reason = "weightonly has no kernels for this GPU"
    if reason is not None:
        logging.getLogger(__name__).info("A layer is left to SGLang's kernels: %s", reason)
    return reason is not None


def _put(packed: torch.nn.Module, layer: Any) -> None:
    """The packed weight takes the place of what was loaded."""
    for name in [name for name, _ in layer.named_parameters(recurse=False) if name != "bias"]:
        delattr(layer, name)
    layer.weightonly = packed


def _run_experts(original: Callable[..., Any], kernel: Any, layer: Any, dispatched: Any) -> Any:
    """dispatched: rows and their experts, StandardDispatchOutput -> StandardCombineInput"""
    experts = getattr(layer, "weightonly", None)
    if experts is None:
        return original(kernel, layer, dispatched)
    from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput

    return StandardCombineInput(hidden_states=experts(dispatched.hidden_states, dispatched.topk_output))


def _multiply(
    original: Callable[..., torch.Tensor], kernel: Any, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x [..., K] -> [..., N]"""
    packed = getattr(layer, "weightonly", None)
    if packed is None:
        return original(kernel, layer, x, bias)
    return gemm(x, packed.operand, bias=bias)


def _gptq(kernel: Any, layer: Any) -> IntWeight:
    c = kernel.kernel_config
    g_idx, size = (layer.g_idx.data, None) if c.has_g_idx else (None, c.group_size)
    tensors = (layer.qweight.data, layer.scales.data, layer.qzeros.data, g_idx)
    return read_gptq(*tensors, bits=kernel.quant_config.weight_bits, group_size=size, symmetric=True)


def _compressed_tensors(scheme: Any, layer: Any) -> IntWeight:
    shape = torch.tensor(scheme.kernel_config.partition_weight_shape[::-1])  # (N, K)
    optional = (getattr(layer, f"weight_{name}", None) for name in ("zero_point", "g_idx"))
    zeros, g_idx = (None if tensor is None else tensor.data for tensor in optional)
    tensors = (layer.weight_packed.data, layer.weight_scale.data, shape, zeros, g_idx)
    size = None if g_idx is not None else scheme.kernel_config.group_size
    return read_compressed_tensors(*tensors, bits=32 // scheme.pack_factor, group_size=size)
