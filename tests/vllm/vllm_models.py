"""Folders as models of vLLM, and what each of their layers has to compute. Import this where vLLM is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.vllm import vllm_cases as cases
from vllm.config import ModelConfig, set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.reload import layerwise
from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading

import weightonly as wo
from weightonly.formats import QuantizedLayer
from weightonly.vllm import register
from weightonly.vllm.experts import WeightOnlyExpertsMethod
from weightonly.vllm.linear_method import WeightOnlyLinearMethod

MERGED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def built(folder: Path, **arguments: Any) -> tuple[torch.nn.Module, ModelConfig]:
    """vLLM's model of a folder, by its own configs and loader; its `load_model` wants an accelerator's allocator."""
    if not hasattr(QuantizationConfig, "get_checkpoint_weight_mapper"):
        pytest.skip("models of this vLLM need its compiled operators")
    register()
    arguments = {"quantization": "weightonly", "load_format": "weightonly", "dtype": "float16"} | arguments
    with cases.serving(getattr(torch, arguments["dtype"])):
        config = EngineArgs(
            model=str(folder), skip_tokenizer_init=True, enforce_eager=True, **arguments
        ).create_engine_config()
        with set_current_vllm_config(config):
            model = initialize_model(vllm_config=config)
            layerwise.record_metadata_for_reloading(model)
            get_model_loader(config.load_config).load_weights(model, config.model_config)
            process_weights_after_loading(model, config.model_config, torch.device("cpu"))
    return model, config.model_config


def load(folder: Path, **arguments: Any) -> torch.nn.Module:
    return built(folder, **arguments)[0]


def check(model: torch.nn.Module, folder: Path, g: torch.Generator) -> None:
    """Every layer that is quantized in the folder is ours, but for routers. Linear ones are `gemm` of its records,
    experts `fused_experts`, bit for bit, and near the dense weights in fp32."""
    read = wo.load_checkpoint(folder, progress=False)
    records = {r.name: r for r in read if isinstance(r, QuantizedLayer)}
    for name, module in model.named_modules():
        if isinstance(module, LinearBase):
            parent, _, last = name.rpartition(".")
            names = [f"{parent}.{part}" for part in MERGED.get(last, (last,))]
            if last in ("gate", "shared_expert_gate"):  # vLLM has it dense
                if name in records:
                    dense = records.pop(name).dequantize().t().to(module.weight.dtype)
                    assert torch.equal(module.weight, dense)
            elif names[0] in records:
                check_linear(module, [records.pop(part) for part in names], g)
        elif isinstance(getattr(module, "quant_method", None), WeightOnlyExpertsMethod):
            check_experts(module, name.removesuffix(".routed_experts"), records, g)
    assert not records, "quantized layers that are not ours"


def check_linear(layer: LinearBase, records: list[QuantizedLayer], g: torch.Generator) -> None:
    method: Any = layer.quant_method
    method = getattr(getattr(method, "scheme", None), "linear_method", method)  # of AutoRound
    owners = (method, getattr(layer, "scheme", None))
    kernels = [vars(owner).get(name) for owner in owners if owner for name in ("kernel", "fp8_linear", "linear_kernel")]
    is_kernel = any(type(kernel).__module__.startswith("weightonly.") for kernel in kernels)
    assert isinstance(method, WeightOnlyLinearMethod) or is_kernel
    x = torch.randn(3, layer.input_size, generator=g).half()
    y, _ = layer(x)
    bias = None if getattr(layer, "bias", None) is None else layer.bias.data
    assert torch.equal(y, torch.cat([record(x) for record in records], dim=1))
    dense = torch.cat([record.dequantize() for record in records], dim=1)
    expected = x.float() @ dense + (0 if bias is None else bias.float())
    torch.testing.assert_close(y.float(), expected, rtol=2e-3, atol=2e-3 * float(dense.abs().max()) * 12)


def check_experts(layer: Any, prefix: str, records: dict[str, QuantizedLayer], g: torch.Generator) -> None:
    experts, top_k = layer.moe_config.num_experts, layer.moe_config.experts_per_token
    projections = (layer.ckpt_gate_proj_name, layer.ckpt_up_proj_name, layer.ckpt_down_proj_name)
    parts = [[records.pop(f"{prefix}.{e}.{name}") for e in range(experts)] for name in projections]
    x = torch.randn(5, layer.hidden_size, generator=g).half()
    weights, ids = torch.randn(5, experts, generator=g).softmax(-1).topk(top_k)
    y = layer.forward_modular(x, weights, ids.int())
    gates = [_beside(*pair) for pair in zip(*parts[:2], strict=True)]
    assert torch.equal(y, wo.fused_experts(x, _stack(gates), _stack(parts[2]), ids, weights))
    expected = torch.zeros(x.shape)
    for e in range(experts):
        gate, up, down = (part[e].dequantize() for part in parts)
        inner = torch.nn.functional.silu(x.float() @ gate) * (x.float() @ up)
        expected += (weights * (ids == e)).sum(1, keepdim=True) * (inner @ down)
    assert (y - expected).abs().max() <= 8 * 2.0**-10 * expected.abs().max()


Plain = tuple[torch.Tensor, str, torch.Tensor, torch.Tensor | None]
"""(q or codes [K, N], format, scales, zeros or None)"""


def _plain(record: QuantizedLayer) -> Plain:
    zeros = None if record.zeros is None else record.zeros.half()
    return wo.unpack(record.weight), record.weight.format, record.scales.half(), zeros


def _beside(gate: QuantizedLayer, up: QuantizedLayer) -> Plain:
    (q, format, scales, zeros), (other, _, other_scales, other_zeros) = _plain(gate), _plain(up)
    joined = None
    if zeros is not None or other_zeros is not None:  # a reader drops zero points that are all 0
        parts = (zeros, scales), (other_zeros, other_scales)
        joined = torch.cat([torch.zeros_like(s) if z is None else z for z, s in parts], 1)
    return torch.cat([q, other], 1), format, torch.cat([scales, other_scales], 1), joined


def _stack(parts: list[Any]) -> tuple[wo.PackedWeight, torch.Tensor, torch.Tensor | None]:
    plain = [part if isinstance(part, tuple) else _plain(part) for part in parts]
    q, scales = torch.stack([p[0] for p in plain]), torch.stack([p[2] for p in plain])
    format, zeros = plain[0][1], None
    if any(p[3] is not None for p in plain):
        zeros = torch.stack([torch.zeros_like(p[2]) if p[3] is None else p[3] for p in plain])
    if format.startswith("int"):
        return wo.preprocess(q, int(format[3:])), scales, zeros
    return wo.preprocess(q, format=format), scales, zeros
