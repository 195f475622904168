"""Providers of packages that are not installed here: what they would be given."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from weightonly.bench.providers import PROVIDERS, Provider
from weightonly.bench.weights import Weights


@pytest.fixture
def peers() -> Iterator[Any]:
    """The plug-in, imported anew; its providers are gone again after the test."""
    before = dict(PROVIDERS)
    sys.modules.pop("weightonly.bench.peers", None)
    yield importlib.import_module("weightonly.bench.peers")
    PROVIDERS.clear()
    PROVIDERS.update(before)


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
