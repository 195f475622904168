"""Providers of packages that are not installed here: what they would be given."""

from __future__ import annotations

import copy
import importlib.util
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from weightonly.bench.experts.measure import GROUP_SIZES
from weightonly.bench.experts.providers import EXPERTS_PROVIDERS
from weightonly.bench.experts.routing import Routing, topk_ids
from weightonly.bench.experts.weights import ExpertWeights, combined, gated
from weightonly.bench.providers import PROVIDERS, Provider
from weightonly.bench.shapes import MIXTURES
from weightonly.bench.weights import Weights


@pytest.fixture
def peers() -> Iterator[Any]:
    yield from _plug_in("tools.peers")


@pytest.fixture
def fp8_providers() -> Iterator[Any]:
    yield from _plug_in("tools.fp8_providers")


def _plug_in(name: str) -> Iterator[Any]:
    """A plug-in, imported anew; its providers are gone again after the test."""
    registries: list[dict[str, Any]] = [PROVIDERS, EXPERTS_PROVIDERS]
    before = [dict(registry) for registry in registries]
    sys.modules.pop(name, None)
    yield importlib.import_module(name)
    for registry, old in zip(registries, before, strict=True):
        registry.clear()
        registry.update(old)


@pytest.mark.parametrize("name", ["ours fp8", "dense fp8"])
def test_x_in_8_bits(fp8_providers: Any, name: str) -> None:
    weights = replace(_weights(4, 128), scales=_weights(4, 128).scales.bfloat16())
    weights = replace(weights, dense=weights.dense.bfloat16())
    provider = PROVIDERS[name]
    assert provider.unavailable(torch.device("cpu"), torch.bfloat16, "int4", 128) == "it runs on CUDA only"
    prepared = provider.prepare(weights)
    x, out = torch.randn(48, weights.k).bfloat16(), torch.empty(48, weights.n, dtype=torch.bfloat16)
    for operand in prepared.copies(2):
        error = (prepared.run(operand, x, out).float() - (x @ prepared.expected).float()).norm()
        assert error <= prepared.tolerance * (x @ prepared.expected).float().norm()


def _weights(bits: int, group_size: int, symmetric: bool = True) -> Weights:
    options: dict[str, Any] = {"bits": bits, "group_size": group_size, "symmetric": symmetric}
    return Weights.random(256, 512, dtype=torch.float16, device=torch.device("cpu"), **options)


class _Layer(torch.nn.Module):
    """Stands for humming's layer: keeps what it is given."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__()
        self.arguments = arguments
        self.called: list[str | None] = []
        self.humming_config = "its config"

    def load_from_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors
        self.weight = torch.nn.Parameter(tensors["weight"], requires_grad=False)

    def transform(self) -> None:
        self.called.append("transform")

    def forward(self, x: torch.Tensor, outputs: torch.Tensor, tuning_config: str | None) -> torch.Tensor:
        self.called.append(tuning_config)
        return outputs


def _module(name: str, **names: Any) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(names)
    return module


@pytest.mark.parametrize(("bits", "group_size"), [(4, 128), (8, -1)])
def test_humming_is_given_our_numbers(peers: Any, monkeypatch: pytest.MonkeyPatch, bits: int, group_size: int) -> None:
    ranges = [[0, 8, {"tile": 1}], [8, 16, {"tile": 2}], [16, 24, {"tile": 3}], [24, 8192, {"tile": 4}]]
    monkeypatch.setitem(sys.modules, "humming.layer", _module("humming.layer", HummingLayer=_Layer))
    tune = _module("humming.tune", get_heuristics_config=lambda config: ranges)
    monkeypatch.setitem(sys.modules, "humming.tune", tune)
    weights = _weights(bits, group_size)
    prepared = PROVIDERS["humming"].prepare(weights)
    layer = prepared.operand
    arguments = {"dtype": f"uint{bits}", "group_size": max(group_size, 0)}
    assert layer.arguments["weight_config"] == arguments
    assert (layer.arguments["shape_n"], layer.arguments["shape_k"]) == (512, 256)
    words = layer.tensors["weight"]  # [n, k * bits / 32], the first number in the lowest bits
    numbers = torch.stack([words >> bits * i & (1 << bits) - 1 for i in range(32 // bits)], -1).view(512, 256)
    assert torch.equal(numbers.t() - (1 << bits - 1), weights.q.int())
    assert torch.equal(layer.tensors["weight_scale"], weights.scales.t())
    out = torch.empty(16, 512)
    assert prepared.run(layer, torch.empty(16, 256), out) is out
    prepared.run(layer, torch.empty(7, 256), out)
    assert layer.called == ["transform", layer.called[1], None]
    assert '"tile": 2' in layer.called[1] and '"tile": 3' not in layer.called[1]


def test_marlin_is_given_our_numbers(peers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, torch.Tensor] = {}

    class Layer(torch.nn.Module):
        def __init__(self, k: int, n: int, groupsize: int) -> None:
            super().__init__()
            self.shape = (k, n, groupsize)
            self.B, self.s = torch.zeros(k // 16, n * 2, dtype=torch.int32), torch.zeros(k // groupsize, n)

        def pack(self, linear: torch.nn.Linear, scales: torch.Tensor) -> None:
            seen.update(w=linear.weight.data, scales=scales)

    calls: list[Any] = []
    marlin = _module("marlin", Layer=Layer, mul=lambda *operands, **options: calls.append((operands, options)))
    monkeypatch.setitem(sys.modules, "marlin", marlin)
    weights = _weights(4, 128)
    prepared = PROVIDERS["marlin"].prepare(weights)
    values = seen["w"].t().view(2, 128, 512) / seen["scales"].t()[:, None]
    assert torch.equal(values.round().view(256, 512), weights.q.half())
    x, out = torch.empty(3, 256), torch.empty(3, 512)
    assert prepared.run(prepared.operand, x, out) is out
    (operands, options) = calls[0]
    assert operands[0] is x and operands[2] is out
    assert operands[4].numel() >= 512 // 128 * options["max_par"] and not operands[4].any()


@pytest.mark.parametrize("name", ["humming", "marlin"])
def test_zero_points_are_refused(peers: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for module in ("humming.layer", "humming.tune", "marlin"):
        names = {"HummingLayer": _Layer, "get_heuristics_config": None}
        monkeypatch.setitem(sys.modules, module, _module(module, **names))
    with pytest.raises(ValueError, match=f"{name}: expected weights without zero points"):
        PROVIDERS[name].prepare(_weights(4, 128, symmetric=False))


def test_reasons_not_to_run(peers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = SimpleNamespace(type="cuda")
    humming: Provider = PROVIDERS["humming"]
    marlin: Provider = PROVIDERS["marlin"]

    def reason(provider: Provider, device: Any, dtype: torch.dtype, format: str, group_size: int) -> str:
        return provider.unavailable(device, dtype, format, group_size) or ""

    monkeypatch.setattr(importlib.util, "find_spec", lambda package: None)
    assert reason(humming, cuda, torch.float16, "int4", 128) == "the package humming is not installed"
    assert reason(marlin, cuda, torch.float16, "int4", 128) == "the package marlin is not installed"
    assert "not nf4" in reason(humming, cuda, torch.float16, "nf4", 64)
    assert "CUDA only" in reason(humming, torch.device("cpu"), torch.float16, "int4", 128)
    assert "not int8" in reason(marlin, cuda, torch.float16, "int8", -1)
    assert "not torch.bfloat16" in reason(marlin, cuda, torch.bfloat16, "int4", 128)
    assert "not 64" in reason(marlin, cuda, torch.float16, "int4", 64)
    assert "CUDA only" in reason(marlin, torch.device("cpu"), torch.float16, "int4", 128)
    monkeypatch.setattr(importlib.util, "find_spec", lambda package: package)
    assert humming.unavailable(cuda, torch.float16, "int8", -1) is None  # type: ignore[arg-type]
    assert marlin.unavailable(cuda, torch.float16, "int4", -1) is None  # type: ignore[arg-type]


# --- stacked experts -----------------------------------------------------------------------------------------------

TINY = MIXTURES["tiny"]
CPU = torch.device("cpu")


@dataclass(frozen=True)
class _Schema:
    """Stands for humming's HummingWeightSchema."""

    b_dtype: str
    weight_scale_group_size: int
    bs_dtype: str | None = None

    def convert_symmetric_integer_weight(self, tensors: dict[str, Any]) -> tuple[_Schema, dict[str, Any]]:
        return replace(self, b_dtype=f"without lowest {self.b_dtype}"), dict(tensors)


def _transform(tensors: dict[str, Any], **arguments: Any) -> tuple[SimpleNamespace, dict[str, Any]]:
    assert arguments["num_experts"] == 1 and arguments["torch_dtype"] == torch.bfloat16
    return _config(**arguments), tensors


def _config(weight_schema: _Schema, num_experts: int, **arguments: Any) -> SimpleNamespace:
    return SimpleNamespace(schema=weight_schema, experts=num_experts, k=arguments["shape_k"], n=arguments["shape_n"])


def _values(config: SimpleNamespace, weight: torch.Tensor, weight_scale: torch.Tensor) -> torch.Tensor:
    """What the numbers mean, by humming's documents: [E, n, k]."""
    kind = config.schema.b_dtype.removeprefix("without lowest ")
    bits = 8 if kind == "uint8" else 4
    codes = torch.stack([weight >> bits * i & (1 << bits) - 1 for i in range(32 // bits)], -1).flatten(2)
    values = (codes - (1 << bits - 1)).float()
    if kind == "float4e2m1":
        magnitudes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
        values = torch.where(codes > 7, -magnitudes[codes & 7], magnitudes[codes & 7])
        assert weight_scale.dtype == torch.float8_e8m0fnu and config.schema.bs_dtype == "float8e8m0"
    group_size = config.schema.weight_scale_group_size or config.k
    assert weight_scale.shape == (config.experts, config.n, config.k // group_size)
    return values * weight_scale.float().repeat_interleave(group_size, -1)


_BLOCK = 8


def _heuristics(config: Any, rows: int, gemm_type: str, **options: bool) -> dict[str, Any]:
    assert not any(options.values())
    return {"block_shape": (_BLOCK, 128, 64), "for": rows}


def _forward(config: Any, inputs: torch.Tensor, **arguments: Any) -> torch.Tensor:
    """Stands for humming's humming_forward: reads routing as its kernels do."""
    values = _values(config, arguments["weight"], arguments["weight_scale"])
    compute, top_k = json.loads(arguments["compute_config"]), arguments["top_k"]
    y = inputs.new_full((inputs.shape[0] * top_k, config.n), torch.nan)
    kernels = [one for begin, end, one in json.loads(arguments["tuning_config"]) if begin < y.shape[0] <= end]
    assert kernels == [{"block_shape": [_BLOCK, 128, 64], "for": y.shape[0]}] and arguments["locks"].numel() == 2048
    assert any(begin < 1 <= end for begin, end, _ in json.loads(arguments["tuning_config"]))
    if compute["gemm_type"] == "grouped_contiguous":
        starts = arguments["expert_layout"].tolist()
        assert len(starts) == config.experts + 1
        rows_of = {expert: list(range(*starts[expert : expert + 2])) for expert in range(config.experts)}
    else:
        assert compute["gemm_type"] == "indexed"
        ids, experts = arguments["sorted_ids"].view(-1, _BLOCK), arguments["expert_ids"].tolist()
        assert arguments["num_tokens_padded"].tolist() == [ids.numel()] and len(experts) == len(ids)
        rows_of = {expert: [] for expert in experts}
        for expert, block in zip(experts, ids.tolist(), strict=True):
            rows_of[expert] += [row for row in block if row != y.shape[0]]
    for expert, rows in rows_of.items():
        at = torch.tensor(rows, dtype=torch.long)
        y[at] = (inputs[at // top_k].float() @ values[expert].t()).to(y.dtype)
    return y


def _process(config: Any, inputs: torch.Tensor, activation_type: str, activation_impl: str) -> tuple[Any, ...]:
    assert activation_type == "binary_split" and activation_impl == "(a / (1.f + expf(-a))) * b"
    return gated(inputs), None, None


@pytest.fixture
def stand_in(peers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    modules: dict[str, dict[str, Any]] = {
        "schema": {"HummingWeightSchema": _Schema},
        "transform": {"prepare_and_transform_humming_tensors": _transform, "prepare_layer_config": _config},
        "tune": {"get_heuristics_config": _heuristics},
        "forward": {"humming_forward": _forward, "may_process_input": _process},
    }
    for name, names in modules.items():
        monkeypatch.setitem(sys.modules, f"humming.{name}", _module(f"humming.{name}", **names))


@pytest.mark.parametrize("format", ["int4", "int8", "mxfp4"])
@pytest.mark.parametrize("name", ["humming", "humming_grouped"])
@pytest.mark.parametrize("tokens", [1, 32], ids="M={}".format)
def test_humming_multiplies_by_our_experts(stand_in: None, name: str, format: str, tokens: int) -> None:
    provider, dtype = EXPERTS_PROVIDERS[name], torch.bfloat16
    weights = [
        ExpertWeights.random(TINY, product, format, GROUP_SIZES[format], dtype, CPU) for product in ("w13", "w2")
    ]
    w13, w2 = (copy.deepcopy(provider.prepare(of_one)) for of_one in weights)
    routing = Routing.of(topk_ids("skewed", tokens, TINY.experts, TINY.top_k, CPU), TINY.experts)
    x = torch.randn(tokens, TINY.hidden, dtype=dtype)
    rows = x[routing.order // TINY.top_k]
    first = weights[0].expected(rows, routing)
    assert (provider.product(w13, rows, routing) - first).float().norm() < 0.01 * first.float().norm()
    y = combined(weights[1].expected(gated(first), routing), routing)
    assert (provider.layer(w13, w2, x, routing) - y).float().norm() < 0.01 * y.float().norm()
    scales = sum(weights.scales.numel() for weights in weights)
    numbers = sum(weights.dense.numel() for weights in weights) * (8 if format == "int8" else 4) // 8
    bytes_of_all = sum(map(provider.weight_bytes, (w13, w2)))
    assert bytes_of_all == numbers + scales * (1 if format == "mxfp4" else 2)


@pytest.mark.parametrize("lowest", [False, True])
def test_all_experts_have_the_lowest_integer_or_none(stand_in: None, lowest: bool) -> None:
    weights = ExpertWeights.random(TINY, "w2", "int4", 128, torch.bfloat16, CPU)
    if lowest:
        weights.q[3, 5, 7] = -8
    schema = EXPERTS_PROVIDERS["humming"].prepare(weights).config.schema
    assert schema.b_dtype == ("uint4" if lowest else "without lowest uint4")


def test_other_rows_than_those_that_are_timed_compile_one_kernel(stand_in: None, peers: Any) -> None:
    provider = peers.HummingExperts("mine", "indexed")
    assert provider._kernels(None, 7) == [(0, 7, _heuristics(None, 7, "indexed"))]
    ends = [end for _, end, _ in provider._kernels(None, 64)]
    assert ends == [1 << i for i in range(16)]


def test_reasons_not_to_multiply_by_experts(peers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    provider, cuda = EXPERTS_PROVIDERS["humming_grouped"], torch.device("cuda")
    monkeypatch.setattr(importlib.util, "find_spec", lambda package: None)
    assert provider.unavailable(cuda, torch.bfloat16) == "the package humming is not installed"
    assert provider.unavailable(cuda, torch.float16) == "it takes torch.bfloat16 only, not torch.float16"
    assert provider.unavailable(CPU, torch.bfloat16) == "it runs on CUDA only"
    with pytest.raises(ValueError, match="humming: expected one of int4, int8, mxfp4, got nf4"):
        provider.prepare(ExpertWeights.random(TINY, "w2", "nf4", 64, torch.bfloat16, CPU))
