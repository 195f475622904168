"""Linear layers of FP8 weights of the plug-in in real layers of vLLM, where vLLM leaves activations in 16 bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from tests import fp8_cases
from tests.vllm import vllm_cases as cases
from tests.vllm import vllm_fp8 as fp8
from tests.vllm import vllm_models
from transformers import LlamaConfig, LlamaForCausalLM
from vllm import envs
from vllm.model_executor.kernels import linear
from vllm.model_executor.kernels.linear import MarlinFP8ScaledMMLinearKernel
from vllm.model_executor.layers.linear import ColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from vllm.model_executor.layers.quantization import fbgemm_fp8, get_quantization_config
from vllm.model_executor.layers.quantization.utils.quant_utils import get_and_maybe_dequant_weights
from vllm.model_executor.model_loader.reload import layerwise
from vllm.platforms import PlatformEnum

from weightonly.vllm.fp8_kernels import WeightOnlyFp8LinearKernel, take_fp8

DTYPES = [pytest.param(torch.float16, id="fp16"), pytest.param(torch.bfloat16, id="bf16")]


def check(y: torch.Tensor, x: torch.Tensor, w: fp8.Fp8Weight, bias: torch.Tensor | None, arch: str | None) -> None:
    """Bit for bit what `gemm` gives, and near the dense product; scales are rounded to the dtype of x."""
    assert torch.equal(y, w.gemm(x, bias, arch))
    dense = x.double() @ w.dense + (0 if bias is None else bias.double())
    step = {torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}[x.dtype]
    assert (y.double() - dense).abs().max() <= 2 * step * dense.abs().max()


def loaded(method: str, w: fp8.Fp8Weight, scales: str, bias: torch.Tensor | None = None, **arguments: Any) -> Any:
    k, n = w.q.t().shape
    layer = fp8.build(method, scales, k, n, bias=bias is not None, **arguments)
    fp8.load(layer, method, w, bias)
    cases.finish(layer)
    return layer


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("method", "scales", "activations"),
    [
        *((*case, "dynamic") for case in fp8.METHODS),
        ("fp8", "tensor", "static"),
        ("compressed-tensors", "tensor", "static"),
        ("compressed-tensors", "tensor", None),  # vLLM refuses blocks here itself
        ("compressed-tensors", "channel", None),
    ],
)
def test_layer_of_each_method(
    method: str,
    scales: str,
    activations: str | None,
    dtype: torch.dtype,
    generator: torch.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """K and N that are no multiples of 128."""
    fp8.take_place(monkeypatch, "sm80")
    w = fp8.weight(generator, scales, 320, 200)
    bias = torch.randn(200, generator=generator).to(dtype)
    x = torch.randn(3, 2, 320, generator=generator).to(dtype)
    with fp8.serving(dtype):
        layer = loaded(method, w, scales, bias, activations=activations)
        y, _ = layer(x)
    check(y, x, w, bias, "sm80")
    held = sum(p.numel() * p.element_size() for p in layer.parameters())
    assert held <= 320 * 256 + 2 * 200 * (5 + 1), "the weight is held twice"


@pytest.mark.parametrize("scales", fp8.BLOCKS)
def test_modelopt(scales: str, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM wants K in whole blocks here, and pads N; of merged layers it takes one scale for the tensor."""
    fp8.take_place(monkeypatch, "sm80")
    w = fp8.weight(generator, scales, 384, 200)
    x = torch.randn(5, 384, generator=generator).half()
    with fp8.serving():
        check(loaded("modelopt", w, scales)(x)[0], x, w, None, "sm80")


@pytest.mark.parametrize(("method", "scales"), fp8.METHODS)
def test_ranks(method: str, scales: str, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """What vLLM cuts for two ranks: K = 2 x 128 of a row-parallel layer, N = 2 x 128 of a column-parallel one."""
    fp8.take_place(monkeypatch, "sm80")
    w = fp8.weight(generator, scales, 256, 256)
    x = torch.randn(5, 256, generator=generator).half()
    total, columns = torch.zeros(5, 256, dtype=torch.float64), []
    with fp8.serving():
        for rank in range(2):
            cases.rank_of(monkeypatch, rank, 2)
            layer = loaded(method, w, scales, kind=RowParallelLinear)
            total += layer.quant_method.apply(layer, x.chunk(2, 1)[rank].contiguous()).double()
            layer = loaded(method, w, scales, kind=ColumnParallelLinear)
            columns.append(layer.quant_method.apply(layer, x))
    assert torch.equal(torch.cat(columns, 1), w.gemm(x, arch="sm80"))
    expected = x.double() @ w.dense
    assert (total - expected).abs().max() <= 4 * 2.0**-10 * expected.abs().max()


def merged(method: str, scales: str) -> Any:
    quantization = get_quantization_config(method).from_config(fp8.config(method, scales))
    return QKVParallelLinear(128, 128, 4, 1, bias=False, quant_config=quantization, prefix="a.qkv_proj")


@pytest.mark.parametrize(("method", "scales"), fp8.METHODS)
def test_merged_projections(
    method: str, scales: str, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """q, k and v of one layer of vLLM come from three layers of the checkpoint, with scales of their own."""
    fp8.take_place(monkeypatch, "sm80")
    parts = {
        name: fp8.weight(generator, scales, 128, n, factor)
        for name, n, factor in (("q", 512, 0.02), ("k", 128, 0.3), ("v", 128, 0.05))
    }
    x = torch.randn(4, 128, generator=generator).half()
    with fp8.serving():
        layer = merged(method, scales)
        parameters = dict(layer.named_parameters())
        for shard, w in parts.items():
            for name, tensor in fp8.tensors(method, w).items():
                if name in parameters:
                    parameters[name].weight_loader(parameters[name], tensor, shard)
        cases.finish(layer)
        y, _ = layer(x)
    assert torch.equal(y, torch.cat([w.gemm(x, arch="sm80") for w in parts.values()], dim=1))


def test_projections_that_the_file_has_merged(generator: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """One scale for q, k and v: vLLM loads it for each of them."""
    fp8.take_place(monkeypatch, "sm80")
    w = fp8.weight(generator, "tensor", 128, 768)
    x = torch.randn(4, 128, generator=generator).half()
    with fp8.serving():
        layer = merged("fp8", "tensor")
        fp8.load(layer, "fp8", w)
        cases.finish(layer)
        check(layer(x)[0], x, w, None, "sm80")


@pytest.mark.parametrize(
    ("method", "scales", "activations"),
    [*((*case, "dynamic") for case in fp8.METHODS), ("fp8", "tensor", "static")],
)
def test_reload(
    method: str, scales: str, activations: str, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights that are loaded again run from the memory of the first ones, as a CUDA graph needs it."""
    fp8.take_place(monkeypatch, "sm80")
    first, second = (fp8.weight(generator, scales, 128, 256, factor) for factor in (0.02, 0.05))
    x = torch.randn(3, 128, generator=generator).half()
    with fp8.serving():
        layer = fp8.build(method, scales, 128, 256, activations)
        model = torch.nn.Sequential(layer)
        layerwise.record_metadata_for_reloading(model)
        fp8.load(layer, method, first)
        cases.finish(layer)
        addresses = {name: p.data_ptr() for name, p in layer.named_parameters()}
        check(layer(x)[0], x, first, None, "sm80")
        layerwise.initialize_layerwise_reload(model)
        fp8.load(layer, method, second)
        layerwise.finalize_layerwise_reload(model, None)
        check(layer(x)[0], x, second, None, "sm80")
    assert {name: p.data_ptr() for name, p in layer.named_parameters()} == addresses


@pytest.mark.parametrize("scales", ["tensor", "block"])
def test_compiled(scales: str, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    fp8.take_place(monkeypatch, "sm80")
    w = fp8.weight(generator, scales, 128, 72)
    with fp8.serving(torch.bfloat16):
        layer = loaded("fp8", w, scales)
        compiled = torch.compile(lambda x: layer(x)[0] * 2, fullgraph=True, dynamic=True, backend="aot_eager")
        for m in (1, 7, 33):
            x = torch.randn(m, 128, generator=generator).bfloat16()
            assert torch.equal(compiled(x), w.gemm(x, arch="sm80") * 2)


def test_dequantized_by_vllm(generator: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """As its multi-head latent attention (DeepSeek) has it of kv_b_proj."""
    fp8.take_place(monkeypatch, "sm80")
    w = fp8.weight(generator, "block", 128, 256)
    with fp8.serving(torch.bfloat16):
        found = get_and_maybe_dequant_weights(loaded("fp8", w, "block"), torch.bfloat16)
    assert torch.equal(found, w.gemm(torch.eye(128, dtype=torch.bfloat16), arch="sm80").t())


# --- what is left to vLLM -------------------------------------------------------------------------------------


@pytest.mark.parametrize("why", ["NaN", "scales beyond fp16"])
@pytest.mark.parametrize("method", ["fp8", "fbgemm_fp8"])
def test_left_to_marlin(method: str, why: str, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `gemm` does not compute is Marlin's, as vLLM loads it, and is prepared for it once."""
    fp8.take_place(monkeypatch, "sm80")
    scales = "channel" if method == "fbgemm_fp8" else "tensor"
    w = fp8.weight(generator, scales, 128, 64)
    if why == "NaN":
        w.q.view(torch.uint8)[3, 5] = 0x7F
    else:
        w.scales[0] = 1e5
    calls: list[str] = []
    for name in ("process_weights_after_loading", "apply_weights"):
        monkeypatch.setattr(MarlinFP8ScaledMMLinearKernel, name, lambda *_, name=name, **__: calls.append(name))
    with fp8.serving():
        layer = loaded(method, w, scales)
        layer.quant_method.apply(layer, torch.ones(1, 128).half())
    assert calls == ["process_weights_after_loading", "apply_weights"]
    assert torch.equal(layer.weight.t().view(torch.uint8), w.q.view(torch.uint8))


def chosen(layer: Any) -> type:
    return type(layer.quant_method.fp8_linear)


def on_a_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    """Kernels of GPUs in vLLM's order: CUTLASS's, which quantize x and are able from 8.9 on, and weight-only ones."""
    of_gpus = {name: getattr(linear, name)[PlatformEnum.CUDA] for name in cases.LISTS_OF_FP8_KERNELS}
    fp8.take_place(monkeypatch, "sm80", (7, 5))  # registers nothing
    for name, kernels in of_gpus.items():
        found = [kernel for kernel in kernels if kernel.__name__.startswith(("Cutlass", "Marlin", "Humming"))]
        getattr(linear, name)[PlatformEnum.CPU] = found
    for kernel in (linear.CutlassFP8ScaledMMLinearKernel, linear.CutlassFp8BlockScaledMMKernel):
        able = capability >= (8, 9), "no FP8 tensor cores"
        monkeypatch.setattr(kernel, "is_supported", classmethod(lambda *_, able=able: able))
    fp8.set_capability(monkeypatch, capability)
    take_fp8()


@pytest.mark.parametrize(
    ("capability", "expected"),
    [((7, 5), "Marlin"), ((8, 0), "WeightOnly"), ((8, 6), "WeightOnly"), ((8, 9), "Cutlass"), ((9, 0), "Cutlass")],
    ids=str,
)
@pytest.mark.parametrize("scales", ["tensor", "block"])
def test_gpus_that_are_vllms(
    scales: str, capability: tuple[int, int], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ada and Hopper multiply FP8 themselves; our kernels for Turing dequantize the weight first."""
    on_a_gpu(monkeypatch, capability)
    with fp8.serving():
        assert chosen(fp8.build("fp8", scales, 128, 128)).__name__.startswith(expected)


@pytest.mark.parametrize("disabled", ["WeightOnlyFp8LinearKernel", "CutlassFP8ScaledMMLinearKernel"])
def test_disabled_by_the_environment(disabled: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without ours it is Marlin's, and without those that quantize x ours runs on Hopper, too."""
    is_ours = disabled.startswith("WeightOnly")
    on_a_gpu(monkeypatch, (8, 0) if is_ours else (9, 0))
    monkeypatch.setattr(envs, "VLLM_DISABLED_KERNELS", [disabled], raising=False)
    with fp8.serving():
        kernel = chosen(fp8.build("fp8", "tensor", 128, 128))
    assert kernel is (MarlinFP8ScaledMMLinearKernel if is_ours else WeightOnlyFp8LinearKernel)


def test_registered_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    fp8.take_place(monkeypatch)
    first = [list(getattr(linear, name)[PlatformEnum.CPU]) for name in cases.LISTS_OF_FP8_KERNELS]
    prepare = fbgemm_fp8.prepare_fp8_layer_for_marlin
    take_fp8()
    assert first == [getattr(linear, name)[PlatformEnum.CPU] for name in cases.LISTS_OF_FP8_KERNELS]
    assert fbgemm_fp8.prepare_fp8_layer_for_marlin is prepare


def test_activations_of_16_bits_on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_gpu(monkeypatch, (9, 0))
    with fp8.serving():
        layer = fp8.build("compressed-tensors", "channel", 128, 128, activations=None)
    assert type(layer.scheme.linear_kernel) is WeightOnlyFp8LinearKernel


def test_batch_invariant_is_left_to_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    fp8.take_place(monkeypatch)
    monkeypatch.setattr(envs, "VLLM_BATCH_INVARIANT", True, raising=False)
    assert not WeightOnlyFp8LinearKernel.is_supported()[0]


def test_a_weight_that_another_process_packed(generator: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's weight cache brings it, and asks no kernel."""
    fp8.take_place(monkeypatch, "sm80")
    w = fp8.weight(generator, "tensor", 128, 64)
    with fp8.serving():
        packed = loaded("fp8", w, "tensor")
        layer = fp8.build("fp8", "tensor", 128, 64)
        layer.weight.data = packed.weight.data
        with pytest.raises(RuntimeError, match="weight: expected one that this process packed"):
            layer(torch.ones(1, 128).half())


# --- whole models ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "scales"), fp8.METHODS)
def test_models(
    method: str, scales: str, tmp_path: Path, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read by vLLM's own loader, with merged layers, which our reader of folders has apart."""
    fp8.take_place(monkeypatch)
    name = "weight_scale_inv" if (method, scales) == ("fp8", "block") else "weight_scale"
    form = torch.flatten if scales == "tensor" else torch.Tensor.contiguous
    sizes = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 2, "vocab_size": 96}
    llama = LlamaForCausalLM(LlamaConfig(hidden_size=256, intermediate_size=384, **sizes))
    fp8_cases.write(tmp_path / "model", llama, fp8.config(method, scales), fp8.BLOCKS[scales], name, form)
    model = vllm_models.load(
        tmp_path / "model", quantization=None, load_format="auto", allow_deprecated_quantization=True
    )
    vllm_models.check(model, tmp_path / "model", generator)
