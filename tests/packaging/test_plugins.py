"""The plug-ins for vLLM and SGLang on a machine that has neither."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import weightonly as wo
from weightonly import sglang
from weightonly.formats import IntWeight
from weightonly.vllm.support import Held


@pytest.mark.parametrize("module", ["weightonly", "weightonly.vllm", "weightonly.sglang"])
def test_importing_it_asks_for_nothing(module: str) -> None:
    """Neither vLLM nor SGLang is needed, and CUDA is not initialized: vLLM forks its workers after the import."""
    code = f"""
import sys, torch
sys.modules["vllm"] = sys.modules["sglang"] = None
import {module}
assert not torch.cuda.is_initialized()
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("module", ["vllm", "sglang"])
def test_registering_it_there_says_what_is_missing(module: str) -> None:
    code = f"""
import sys
sys.modules["{module}"] = None
import weightonly.{module} as plugin
plugin.built_archs = lambda: ("90a",)
try:
    plugin.register()
except ModuleNotFoundError as error:
    assert error.name and error.name.split(".")[0] == "{module}", error
else:
    raise AssertionError("no error")
"""
    subprocess.run([sys.executable, "-c", code], check=True)


class Layer(torch.nn.Module):
    """A linear layer as vLLM leaves it: its Parameters are what `gemm` reads."""

    def __init__(self, w: wo.QuantizedWeight) -> None:
        super().__init__()
        self.qweight, self.scales = (torch.nn.Parameter(t, requires_grad=False) for t in (w.packed.data, w.scales))
        self.held = Held(w.k, w.n, w.format, w.packed.layout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return wo.gemm(x, self.held.operand(self.qweight, self.scales, None, None))


def a_weight(generator: torch.Generator) -> wo.QuantizedWeight:
    q, scales, _ = wo.quantize(torch.randn(128, 64, generator=generator), 4, 64)
    return wo.QuantizedWeight(wo.preprocess(q, 4), scales)


def test_a_layer_of_vllm_makes_its_weight_once(generator: torch.Generator) -> None:
    w, other, x = a_weight(generator), a_weight(generator), torch.randn(3, 128, generator=generator)
    layer = Layer(w)
    made = [layer.held.operand(layer.qweight, layer.scales, None, None) for _ in range(2)]
    assert made[0] is made[1] and torch.equal(layer(x), wo.gemm(x, w))
    layer.scales.data = other.scales  # as a reload does it
    expected = wo.gemm(x, wo.QuantizedWeight(w.packed, other.scales))
    assert torch.equal(layer(x), expected)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), expected)


def test_a_layer_of_sglang_holds_its_weight(generator: torch.Generator) -> None:
    w, x = a_weight(generator), torch.randn(3, 128, generator=generator)
    layer = torch.nn.Module()
    layer.register_parameter("qweight", torch.nn.Parameter(torch.zeros(1)))
    loaded = IntWeight(wo.unpack(w.packed), 4, w.scales, w.zeros, None)
    sglang._packing(lambda kernel, layer: loaded)(lambda *_: None, None, layer)
    assert not hasattr(layer, "qweight")
    assert torch.equal(sglang._multiply(lambda *_: x, None, layer, x), wo.gemm(x, w))
    compiled = torch.compile(
        lambda x: sglang._multiply(lambda *_: x, None, layer, x), backend="aot_eager", fullgraph=True
    )
    assert torch.equal(compiled(x), wo.gemm(x, w))
