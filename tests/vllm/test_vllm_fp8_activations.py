"""int4 weights that meet x in FP8, in real layers of vLLM: its own scheme for compressed-tensors, and our method."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from tests.vllm import vllm_cases as cases
from tests.vllm import vllm_experts as moe
from tests.vllm.test_vllm_folders import integers, write
from tests.vllm.vllm_models import load
from vllm.model_executor.kernels.linear import MPLinearLayerConfig
from vllm.model_executor.layers.quantization.compressed_tensors import schemes
from vllm.scalar_type import scalar_types

import weightonly as wo
from weightonly.vllm import linear_method
from weightonly.vllm.experts import WeightOnlyExpertsMethod
from weightonly.vllm.linear_kernel import WeightOnlyLinearKernel

METHOD = "compressed-tensors"

has_scheme = pytest.mark.skipif(not hasattr(schemes, "CompressedTensorsW4A8Fp8"), reason="this vLLM has no W4A8")


def config(group: int = 128) -> dict[str, Any]:
    options = cases.config(METHOD, 4, group, False)
    for scheme in options["config_groups"].values():
        scheme["input_activations"] = {
            "num_bits": 8,
            "type": "float",
            "symmetric": True,
            "strategy": "token",
            "dynamic": True,
        }
    return options


def product(w: cases.Weight, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    packed = wo.preprocess((w.u - 8).to(torch.int8), layout="tiled_fp8")
    x8, x_scales = wo.quantize_activations(x)
    return wo.gemm(x8, packed, w.scales, x_scales=x_scales, bias=bias)


@has_scheme
@pytest.mark.parametrize("arch", ["sm90", "cpu"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_layer_of_vllms_scheme(
    dtype: torch.dtype, arch: str, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases.take_first(monkeypatch, arch)
    k, n = 256, 96
    w = cases.weight(generator, k, n, bits=4, group=128, zeros=False, dtype=dtype)
    bias = torch.randn(n, generator=generator).to(dtype)
    with cases.serving(dtype):
        layer = cases.build(METHOD, config(), k, n, bias=True)
        assert type(layer.scheme).__name__ == "CompressedTensorsW4A8Fp8"
        assert type(layer.scheme.kernel) is WeightOnlyLinearKernel
        cases.load(layer, cases.tensors(METHOD, w) | {"bias": bias})
        cases.finish(layer)
        x = torch.randn(3, 2, k, generator=generator).to(dtype)
        y, _ = layer(x)
        compiled = torch.compile(lambda x: layer(x)[0], fullgraph=True, dynamic=True, backend="aot_eager")
        assert torch.equal(compiled(x), y)
    assert y.dtype == dtype and torch.equal(y, product(w, x, bias))


@pytest.mark.parametrize("arch", ["sm90", "cpu"])
def test_experts_that_ask_for_it(arch: str, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit what `fused_experts` gives for x that is rounded."""
    moe.take_ours(monkeypatch, arch)
    experts = moe.random_experts(generator, moe.HIDDEN, moe.INNER, group=64, dtype=torch.bfloat16)
    x = torch.randn(7, moe.HIDDEN, generator=generator).bfloat16()
    logits = torch.randn(7, moe.E, generator=generator).bfloat16()
    with cases.serving(torch.bfloat16):
        runner = moe.build(METHOD, config(64), moe.HIDDEN, moe.INNER)
        assert type(runner.routed_experts.quant_method) is WeightOnlyExpertsMethod
        moe.load(runner, experts.tensors(METHOD))
        y = moe.forward(runner, x, logits)
    weights, ids = moe.route(x, logits, moe.TOP_K, True)
    w13, w2 = [(wo.repack(w, layout="tiled_fp8"), scales) for w, scales, _, _ in experts.stacks("cpu")]
    x8, x_scales = wo.quantize_activations(x)
    assert torch.equal(y, wo.fused_experts(x8, w13, w2, ids, weights, x_scales=x_scales))


def test_what_the_kernel_is_not_for() -> None:
    def why(**changed: Any) -> str | None:
        fields = {
            "full_weight_shape": (256, 96),
            "partition_weight_shape": (256, 96),
            "weight_type": scalar_types.int4,
            "act_type": torch.float8_e4m3fn,
            "group_size": 128,
            "zero_points": False,
            "out_type": torch.bfloat16,
        }
        return WeightOnlyLinearKernel.can_implement(MPLinearLayerConfig(**fields | changed))[1]

    assert why() is None and why(group_size=32) is None and why(group_size=-1) is None
    assert "group_size must be" in str(why(group_size=16))
    assert "no kernels for" in str(why(zero_points=True))
    assert "no kernels for" in str(why(weight_type=scalar_types.uint8b128))
    assert "no kernels for" in str(why(act_type=torch.bfloat16))


@pytest.mark.parametrize("has_kernels", [True, False])
def test_our_method_takes_what_a_folder_asks_for(
    has_kernels: bool, tmp_path: Path, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_kernels:
        why_not = linear_method.why_not
        monkeypatch.setattr(
            linear_method, "why_not", lambda *a, **k: "no kernel" if len(a) > 6 and a[6] else why_not(*a, **k)
        )
    folder = write(tmp_path / "folder", integers(METHOD, 4, False, False), config(32), generator)
    layer: Any = dict(load(folder).named_modules())["model.layers.0.mlp.gate_up_proj"]
    method = layer.quant_method
    assert method.activations == ("fp8" if has_kernels else None)
    x = torch.randn(5, method.k, generator=generator).half()
    y, _ = layer(x)
    w = method.held.operand(layer.qweight, layer.scales, None, None)
    x8, x_scales = wo.quantize_activations(x)
    rounded = wo.gemm(x8, w, x_scales=x_scales)
    assert torch.equal(y, rounded if has_kernels else wo.gemm(x, w)) and not torch.equal(rounded, wo.gemm(x, w))
