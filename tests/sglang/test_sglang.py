"""The plug-in in real linear layers of SGLang: GPTQ, AWQ and compressed-tensors."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")

from sglang.srt.layers.linear import LinearBase, ReplicatedLinear
from sglang.srt.layers.quantization import get_quantization_config, marlin_utils
from sglang.srt.plugins import load_plugins_by_group
from sglang.srt.plugins.hook_registry import HookRegistry
from tests import quantized_cases as cases

import weightonly as wo
from weightonly import sglang as adapter

DTYPES = [pytest.param(torch.float16, id="fp16"), pytest.param(torch.bfloat16, id="bf16")]
CONFIGS = {"gptq": "gptq_marlin", "awq": "awq_marlin", "compressed-tensors": "compressed-tensors"}


def apply_hooks(patch: pytest.MonkeyPatch) -> None:
    """What SGLang does in each of its processes, on a machine with kernels."""
    patch.setattr(adapter, "built_archs", lambda: ("90a",))
    adapter.register()
    HookRegistry.apply_hooks()


def say_hopper(patch: pytest.MonkeyPatch) -> None:
    """A CPU that says it is a Hopper GPU where SGLang asks."""
    for module in (marlin_utils, torch.cuda):
        patch.setattr(module, "get_device_capability", lambda *_: (9, 0))


@pytest.fixture(scope="module", autouse=True)
def hooks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        apply_hooks(patch)
        yield


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    say_hopper(monkeypatch)


def build(
    method: str,
    bits: int,
    group: int,
    zeros: bool,
    k: int,
    n: int,
    bias: bool = False,
    dtype: torch.dtype = torch.float16,
    act_order: bool = False,
) -> LinearBase:
    """A linear layer of SGLang with the quantization method of a checkpoint, its tensors not yet loaded."""
    config = get_quantization_config(CONFIGS[method]).from_config(cases.config(method, bits, group, zeros, act_order))
    prefix = "model.layers.0.mlp.up_proj"
    return ReplicatedLinear(k, n, bias=bias, params_dtype=dtype, quant_config=config, prefix=prefix)


def load(layer: LinearBase, stored: dict[str, torch.Tensor]) -> None:
    parameters: dict[str, Any] = dict(layer.named_parameters())
    for name, tensor in stored.items():
        parameters[name].weight_loader(parameters[name], tensor)
    layer.quant_method.process_weights_after_loading(layer)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [-1, 32, 64, 128])
@pytest.mark.parametrize(("method", "bits", "zeros"), cases.METHODS)
def test_layer_of_each_method(
    method: str, bits: int, zeros: bool, group: int, dtype: torch.dtype, generator: torch.Generator
) -> None:
    """Bit for bit what `gemm` gives; the weight is held once."""
    k, n = 256, 192
    w = cases.weight(generator, k, n, bits=bits, group=group, zeros=zeros, dtype=dtype)
    bias = torch.randn(n, generator=generator).to(dtype)
    layer = build(method, bits, group, zeros, k, n, bias=True, dtype=dtype)
    load(layer, cases.tensors(method, w) | {"bias": bias})
    x = torch.randn(3, 2, k, generator=generator).to(dtype)
    y, _ = layer(x)
    assert torch.equal(y, w.gemm(x, bias))
    dense = x.double() @ w.dense + bias.double()
    step = {torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}[dtype]
    assert (y.double() - dense).abs().max() <= 4 * step * dense.abs().max()
    held = sum(p.numel() * p.element_size() for p in layer.parameters())
    packed = wo.preprocess(torch.zeros(k, n, dtype=torch.int8), bits)
    assert held == packed.data.numel() + (1 + zeros) * w.scales.numel() * 2 + 2 * n


def test_act_order(generator: torch.Generator) -> None:
    w = cases.weight(generator, 256, 128, bits=4, group=64, zeros=False, dtype=torch.float16, act_order=True)
    layer = build("gptq", 4, 64, False, 256, 128, act_order=True)
    load(layer, cases.tensors("gptq", w))
    x = torch.randn(3, 256, generator=generator).half()
    assert torch.equal(layer(x)[0], w.gemm(x))


def test_compiled(generator: torch.Generator) -> None:
    w = cases.weight(generator, 256, 128, bits=4, group=64, zeros=True, dtype=torch.float16)
    layer = build("awq", 4, 64, True, 256, 128)
    load(layer, cases.tensors("awq", w))
    compiled = torch.compile(lambda x: layer(x)[0] * 2, fullgraph=True, dynamic=True, backend="aot_eager")
    for m in (1, 7, 33):
        x = torch.randn(m, 256, generator=generator).half()
        assert torch.equal(compiled(x), w.gemm(x) * 2)


def test_left_to_sglang(generator: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer that the kernels do not compute comes to Marlin, which a CPU does not have."""
    monkeypatch.setattr(adapter, "why_not", lambda *_: "a reason")
    w = cases.weight(generator, 256, 128, bits=4, group=64, zeros=False, dtype=torch.float16)
    layer = build("gptq", 4, 64, False, 256, 128)
    with pytest.raises(Exception, match=r"(?i)cuda|nvidia"):
        load(layer, cases.tensors("gptq", w))
    assert not hasattr(layer, "weightonly")


def test_entry_point() -> None:
    """SGLang finds the plug-in of an installed package, and importing it imports nothing of SGLang."""
    code = "import sys, weightonly.sglang; assert 'sglang' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert load_plugins_by_group("sglang.srt.plugins")["weightonly"][0] is adapter.register
