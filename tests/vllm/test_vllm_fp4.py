"""Linear layers of 4-bit floats of the plug-in in real layers of vLLM: compressed-tensors and ModelOpt."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("vllm")
pytest.importorskip("vllm.model_executor.kernels.linear.nvfp4")

from tests.vllm import vllm_cases as cases
from tests.vllm import vllm_fp4 as fp4
from vllm import envs
from vllm.model_executor.kernels import linear
from vllm.model_executor.layers.linear import ColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from vllm.model_executor.layers.quantization import get_quantization_config
from vllm.model_executor.model_loader.reload import layerwise
from vllm.platforms import current_platform

from weightonly.vllm.fp4_kernels import WeightOnlyMxFp4LinearKernel, WeightOnlyNvFp4LinearKernel

pytestmark = pytest.mark.skipif(
    not set(cases.LISTS_OF_FP4_KERNELS) <= vars(linear).keys(), reason="this vLLM has no choice of such kernels"
)

LAYERS = [
    pytest.param("compressed-tensors", "nvfp4", id="ct-nvfp4"),
    pytest.param("compressed-tensors", "mxfp4", id="ct-mxfp4"),
    pytest.param("modelopt_fp4", "nvfp4", id="modelopt"),
]
DTYPES = [pytest.param(torch.float16, id="fp16"), pytest.param(torch.bfloat16, id="bf16")]


def check(y: torch.Tensor, x: torch.Tensor, w: fp4.Fp4Weight, bias: torch.Tensor | None, arch: str | None) -> None:
    """Bit for bit what `gemm` gives, and near the dense product; scales of nvfp4 are rounded to the dtype of x."""
    assert torch.equal(y, w.gemm(x, bias, arch))
    dense = x.double() @ w.dense + (0 if bias is None else bias.double())
    step = {torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}[x.dtype]
    assert (y.double() - dense).abs().max() <= 2 * step * dense.abs().max()


def loaded(
    method: str, w: fp4.Fp4Weight, is_a16: bool = True, bias: torch.Tensor | None = None, **arguments: Any
) -> Any:
    k, n = w.codes.shape
    layer = cases.build(method, fp4.config(method, w.format, is_a16), k, n, bias=bias is not None, **arguments)
    load(layer, method, w, bias)
    cases.finish(layer)
    return layer


def load(layer: Any, method: str, w: fp4.Fp4Weight, bias: torch.Tensor | None = None) -> None:
    known = dict(layer.named_parameters())
    stored = fp4.tensors(method, w) | ({} if bias is None else {"bias": bias})
    cases.load(layer, {name: tensor for name, tensor in stored.items() if name in known})


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)], ids=["sm80", "sm90"])
@pytest.mark.parametrize("is_a16", [True, False], ids=["W4A16", "W4A4"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("method", "format"), LAYERS)
def test_layer_of_each_method(
    method: str,
    format: str,
    dtype: torch.dtype,
    is_a16: bool,
    capability: tuple[int, int],
    generator: torch.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """K and N that are no multiples of 64. vLLM has activations of 4 bits for these GPUs in no kernel, either."""
    arch = f"sm{capability[0]}{capability[1]}"
    fp4.take_place(monkeypatch, arch, capability)
    w = fp4.weight(generator, format, 160, 72)
    bias = torch.randn(72, generator=generator).to(dtype)
    x = torch.randn(3, 2, 160, generator=generator).to(dtype)
    with cases.serving(dtype):
        y, _ = loaded(method, w, is_a16, bias)(x)
    check(y, x, w, bias, arch)


@pytest.mark.parametrize(("method", "format"), LAYERS)
def test_ranks(method: str, format: str, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """What vLLM cuts for two ranks: K = 2 x 96 of a row-parallel layer, N = 2 x 72 of a column-parallel one."""
    fp4.take_place(monkeypatch, "sm90")
    w = fp4.weight(generator, format, 192, 144)
    x = torch.randn(5, 192, generator=generator).half()
    total, columns = torch.zeros(5, 144, dtype=torch.float64), []
    with cases.serving():
        for rank in range(2):
            cases.rank_of(monkeypatch, rank, 2)
            layer = loaded(method, w, kind=RowParallelLinear)
            total += layer.quant_method.apply(layer, x.chunk(2, 1)[rank].contiguous()).double()
            layer = loaded(method, w, kind=ColumnParallelLinear)
            columns.append(layer.quant_method.apply(layer, x))
    assert torch.equal(torch.cat(columns, 1), w.gemm(x, arch="sm90"))
    expected = x.double() @ w.dense
    assert (total - expected).abs().max() <= 4 * 2.0**-10 * expected.abs().max()


def test_merged_projections(generator: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """q, k and v of one layer of vLLM come from three layers of the checkpoint."""
    fp4.take_place(monkeypatch, "sm90")
    parts = {name: fp4.weight(generator, "nvfp4", 128, n) for name, n in (("q", 128), ("k", 32), ("v", 32))}
    x = torch.randn(4, 128, generator=generator).half()
    with cases.serving():
        options = fp4.config("compressed-tensors", "nvfp4")
        config = get_quantization_config("compressed-tensors").from_config(options)
        layer = QKVParallelLinear(128, 32, 4, 1, bias=False, quant_config=config, prefix="a.qkv_proj")
        parameters = dict(layer.named_parameters())
        for shard, w in parts.items():
            for name, tensor in fp4.tensors("compressed-tensors", w).items():
                if name in parameters:
                    parameters[name].weight_loader(parameters[name], tensor, shard)
        cases.finish(layer)
        y, _ = layer(x)
    assert torch.equal(y, torch.cat([w.gemm(x, arch="sm90") for w in parts.values()], dim=1))


@pytest.mark.parametrize(("method", "format"), LAYERS)
def test_reload(method: str, format: str, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that are loaded again run from the memory of the first ones, as a CUDA graph needs it."""
    fp4.take_place(monkeypatch, "sm90")
    first, second = (fp4.weight(generator, format, 128, 64, factor) for factor in (2.0**-9, 2.0**-8))
    x = torch.randn(3, 128, generator=generator).half()
    with cases.serving():
        layer = cases.build(method, fp4.config(method, format, False), 128, 64)
        model = torch.nn.Sequential(layer)
        layerwise.record_metadata_for_reloading(model)
        load(layer, method, first)
        cases.finish(layer)
        addresses = {name: p.data_ptr() for name, p in layer.named_parameters()}
        check(layer(x)[0], x, first, None, "sm90")
        layerwise.initialize_layerwise_reload(model)
        load(layer, method, second)
        layerwise.finalize_layerwise_reload(model, None)
        check(layer(x)[0], x, second, None, "sm90")
    assert {name: p.data_ptr() for name, p in layer.named_parameters()} == addresses


def test_compiled(generator: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    fp4.take_place(monkeypatch, "sm90")
    w = fp4.weight(generator, "nvfp4", 128, 72)
    with cases.serving(torch.bfloat16):
        layer = loaded("modelopt_fp4", w)
        compiled = torch.compile(lambda x: layer(x)[0] * 2, fullgraph=True, dynamic=True, backend="aot_eager")
        for m in (1, 7, 33):
            x = torch.randn(m, 128, generator=generator).bfloat16()
            assert torch.equal(compiled(x), w.gemm(x, arch="sm90") * 2)


def test_left_to_marlin(generator: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `gemm` does not compute is Marlin's, as vLLM loads it."""
    fp4.take_place(monkeypatch, "sm90")
    w = fp4.weight(generator, "mxfp4", 64, 64)
    w.raw[1, 5] = 200  # a scale beyond fp16
    calls: list[str] = []
    for name in ("process_weights_after_loading", "apply_weights"):
        monkeypatch.setattr(linear.MarlinMxFp4LinearKernel, name, lambda *_, name=name, **__: calls.append(name))
    with cases.serving():
        layer = loaded("compressed-tensors", w)
        layer.quant_method.apply(layer, torch.ones(1, 64).half())
    assert calls == ["process_weights_after_loading", "apply_weights"]
    assert torch.equal(layer.weight, fp4.tensors("compressed-tensors", w)["weight_packed"])


@pytest.mark.parametrize("capability", [(7, 5), (10, 0), (12, 0)], ids=str)
def test_gpus_that_are_vllms(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Blackwell multiplies 4-bit floats itself; our kernels for Turing dequantize the weight first."""
    marlin = linear.MarlinNvFp4LinearKernel
    fp4.take_place(monkeypatch, capability=capability)
    platform = current_platform._enum
    assert linear._POSSIBLE_NVFP4_KERNELS[platform] == linear._POSSIBLE_MXFP4_KERNELS[platform] == []
    assert linear.MarlinNvFp4LinearKernel is marlin


@pytest.mark.parametrize("disabled", [WeightOnlyNvFp4LinearKernel, WeightOnlyMxFp4LinearKernel])
def test_disabled_by_the_environment(disabled: type, monkeypatch: pytest.MonkeyPatch) -> None:
    marlin = linear.MarlinNvFp4LinearKernel
    monkeypatch.setattr(envs, "VLLM_DISABLED_KERNELS", [disabled.__name__], raising=False)
    fp4.take_place(monkeypatch)
    found = {
        kernel
        for lists in (linear._POSSIBLE_NVFP4_KERNELS, linear._POSSIBLE_MXFP4_KERNELS)
        for kernel in lists[current_platform._enum]
    }
    assert found == {WeightOnlyNvFp4LinearKernel, WeightOnlyMxFp4LinearKernel} - {disabled}
    assert (linear.MarlinNvFp4LinearKernel is marlin) == (disabled is WeightOnlyNvFp4LinearKernel)
