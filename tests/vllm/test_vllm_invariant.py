"""Layers that vLLM dequantizes in its batch-invariant mode: ours are asked for a kernel there, too."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm.model_executor.layers.quantization.auto_awq")  # other names before vLLM 0.33

from tests.vllm import vllm_cases as cases
from vllm import envs
from vllm.model_executor.layers.quantization import auto_awq as awq
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import CompressedTensorsWNA16

from weightonly import invariance
from weightonly.vllm.invariant_layers import InvariantAwqMethod, take_invariant_layers
from weightonly.vllm.linear_kernel import WeightOnlyLinearKernel

K, N, GROUP = 256, 96, 64


@pytest.fixture(autouse=True)
def both_modes(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's and ours; what is put around vLLM's methods is gone when the test ends."""
    monkeypatch.setattr(envs, "VLLM_BATCH_INVARIANT", True, raising=False)
    monkeypatch.setattr(invariance, "_on", True)
    for owner, name in ((CompressedTensorsWNA16, "create_weights"), (awq.AutoAWQConfig, "get_quant_method")):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    cases.take_first(monkeypatch, "sm90")
    take_invariant_layers()
    take_invariant_layers()


def build(method: str, zeros: bool, generator: torch.Generator) -> tuple[Any, cases.Weight]:
    w = cases.weight(generator, K, N, bits=4, group=GROUP, zeros=zeros, dtype=torch.float16)
    layer = cases.build(method, cases.config(method, 4, GROUP, zeros), K, N)
    cases.load(layer, cases.tensors(method, w))
    return layer, w


def check(layer: Any, w: cases.Weight, generator: torch.Generator) -> None:
    x = torch.randn(5, K, generator=generator).half()
    y, _ = layer(x)
    assert torch.equal(y, w.gemm(x, None, "sm90")) and torch.equal(y[2:3], layer(x[2:3])[0])


def other_kernels_answer(monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    """None, or one that is not ours."""
    if why == "another":
        monkeypatch.setattr("weightonly.vllm.invariant_layers.WeightOnlyLinearKernel", type("Ours", (), {}))
    else:
        monkeypatch.setattr(WeightOnlyLinearKernel, "can_implement", classmethod(lambda cls, config: (False, why)))


@pytest.mark.parametrize("zeros", [False, True], ids=["symmetric", "zeros"])
def test_compressed_tensors(zeros: bool, generator: torch.Generator) -> None:
    with cases.serving():
        layer, w = build("compressed-tensors", zeros, generator)
        assert isinstance(layer.scheme.kernel, WeightOnlyLinearKernel) and not layer.scheme.use_batch_invariant
        cases.finish(layer)
        check(layer, w, generator)


@pytest.mark.parametrize("why", ["none", "another"])
def test_compressed_tensors_are_dequantized_as_before(
    why: str, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    other_kernels_answer(monkeypatch, why)
    with cases.serving():
        layer, _ = build("compressed-tensors", False, generator)
        cases.finish(layer)
    assert layer.scheme.kernel is None and layer.scheme.use_batch_invariant
    assert layer.weight_packed.dtype == torch.int32


def test_without_the_mode_nothing_is_dequantized(generator: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(envs, "VLLM_BATCH_INVARIANT", False, raising=False)
    monkeypatch.setattr("weightonly.vllm.invariant_layers.WeightOnlyLinearKernel", type("Ours", (), {}))
    with cases.serving():
        layer, _ = build("compressed-tensors", False, generator)
    assert isinstance(layer.scheme.kernel, WeightOnlyLinearKernel) and not layer.scheme.use_batch_invariant


@pytest.mark.parametrize("why", ["", "none", "another"], ids=["ours", "no kernel", "another kernel"])
def test_awq(why: str, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    if why:
        other_kernels_answer(monkeypatch, why)
    with cases.serving():
        with monkeypatch.context() as built:  # on a CPU vLLM's AWQ asks for a kernel in any case
            no = dict.fromkeys(("is_cpu", "is_xpu", "is_cuda"), lambda: False)
            built.setattr(awq, "current_platform", SimpleNamespace(**no))
            built.setattr(awq, "verify_marlin_supported", lambda **_: None)
            layer, w = build("awq", True, generator)
        if why:
            assert type(layer.quant_method) is awq.AutoAWQLinearMethod
            return
        assert isinstance(layer.quant_method, InvariantAwqMethod)
        cases.finish(layer)
        check(layer, w, generator)
