"""The linear kernel of the plug-in in real layers of vLLM: GPTQ, AWQ and compressed-tensors."""

from __future__ import annotations

import inspect
import logging
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

import vllm
from tests.vllm import vllm_cases as cases
from tests.vllm.vllm_experts import keep_configs
from vllm import envs
from vllm.config.utils import hash_factors
from vllm.model_executor.kernels import linear
from vllm.model_executor.kernels.linear import (
    _POSSIBLE_KERNELS,
    MPLinearKernel,
    MPLinearLayerConfig,
    choose_mp_linear_kernel,
    register_linear_kernel,
)
from vllm.model_executor.layers.linear import ColumnParallelLinear, RowParallelLinear
from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS
from vllm.platforms import PlatformEnum, current_platform
from vllm.platforms.interface import DeviceCapability
from vllm.scalar_type import scalar_types

import weightonly as wo
from weightonly import invariance
from weightonly.vllm import register
from weightonly.vllm.linear_kernel import WeightOnlyLinearKernel

DTYPES = [pytest.param(torch.float16, id="fp16"), pytest.param(torch.bfloat16, id="bf16")]
HAS_G_IDX = "has_g_idx" in inspect.signature(MPLinearLayerConfig).parameters


def check(y: torch.Tensor, x: torch.Tensor, w: cases.Weight, bias: torch.Tensor | None, arch: str | None) -> None:
    """Bit for bit what `gemm` gives, and near the dense product."""
    assert torch.equal(y, w.gemm(x, bias, arch))
    dense = x.double() @ w.dense + (0 if bias is None else bias.double())
    low = x.float() @ w.dense.to(x.dtype).float() + (0 if bias is None else bias.float())
    error = (low.to(x.dtype).double() - dense).abs().max()
    assert (y.double() - dense).abs().max() <= 2 * error + 1e-3


@pytest.mark.parametrize("arch", ["sm80", "sm90"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [-1, 32, 64, 128])
@pytest.mark.parametrize(("method", "bits", "zeros"), cases.METHODS)
def test_layer_of_each_method(
    method: str,
    bits: int,
    zeros: bool,
    group: int,
    dtype: torch.dtype,
    arch: str,
    generator: torch.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cases.take_first(monkeypatch, arch)
    k, n = 256, 96
    w = cases.weight(generator, k, n, bits=bits, group=group, zeros=zeros, dtype=dtype)
    bias = torch.randn(n, generator=generator).to(dtype)
    with cases.serving(dtype):
        layer = cases.build(method, cases.config(method, bits, group, zeros), k, n, bias=True)
        cases.load(layer, cases.tensors(method, w) | {"bias": bias})
        cases.finish(layer)
        x = torch.randn(3, 2, k, generator=generator).to(dtype)
        y, _ = layer(x)
    check(y, x, w, bias, arch)
    held = sum(p.numel() * p.element_size() for p in layer.parameters())
    packed = wo.preprocess(torch.zeros(k, n, dtype=torch.int8), bits, arch=arch)
    assert held <= packed.data.numel() + (2 + 2 * zeros) * w.scales.numel() + 2 * n + 16, "the weight is held twice"


@pytest.mark.parametrize(("k", "n"), [(96, 40), (160, 200), (320, 8), (32, 1000)])
@pytest.mark.parametrize(("method", "bits", "zeros"), cases.METHODS)
def test_shards_of_any_alignment(
    method: str, bits: int, zeros: bool, k: int, n: int, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither K nor N is a multiple of 64 or 128."""
    cases.take_first(monkeypatch, "sm90")
    w = cases.weight(generator, k, n, bits=bits, group=32, zeros=zeros, dtype=torch.float16)
    with cases.serving():
        layer = cases.build(method, cases.config(method, bits, 32, zeros), k, n)
        cases.load(layer, cases.tensors(method, w))
        cases.finish(layer)
        x = torch.randn(5, k, generator=generator).half()
        y, _ = layer(x)
    check(y, x, w, None, "sm90")


@pytest.mark.parametrize("group", [-1, 32])
@pytest.mark.parametrize(("method", "bits", "zeros"), cases.METHODS)
def test_ranks(
    method: str, bits: int, zeros: bool, group: int, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What vLLM cuts for two ranks: K = 2 x 96 of a row-parallel layer, N = 2 x 72 of a column-parallel one."""
    cases.take_first(monkeypatch, "sm90")
    k, n = 192, 144
    w = cases.weight(generator, k, n, bits=bits, group=group, zeros=zeros, dtype=torch.float16)
    x = torch.randn(5, k, generator=generator).half()
    total, columns = torch.zeros(5, n, dtype=torch.float64), []
    with cases.serving():
        for rank in range(2):
            cases.rank_of(monkeypatch, rank, 2)
            for kind, part in ((RowParallelLinear, x.chunk(2, 1)[rank].contiguous()), (ColumnParallelLinear, x)):
                layer = cases.build(method, cases.config(method, bits, group, zeros), k, n, kind=kind)
                cases.load(layer, cases.tensors(method, w))
                if method == "awq" and group == -1 and kind is RowParallelLinear:
                    with pytest.raises(ValueError, match="expected scales for K = 96 of 192, got none"):
                        cases.finish(layer)  # vLLM's AWQ gives this rank 96 // 192 groups
                    return
                cases.finish(layer)
                y = layer.quant_method.apply(layer, part)
                if kind is RowParallelLinear:
                    total += y.double()
                else:
                    columns.append(y)
    expected = x.double() @ w.dense
    assert torch.equal(torch.cat(columns, 1), w.gemm(x, arch="sm90"))
    assert (total - expected).abs().max() <= 4 * 2.0**-10 * expected.abs().max()


@pytest.mark.parametrize("group", [16, 192])
def test_groups_of_other_sizes(group: int, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    cases.take_first(monkeypatch, "sm90")
    w = cases.weight(generator, 384, 64, bits=4, group=group, zeros=True, dtype=torch.float16)
    with cases.serving():
        layer = cases.build("compressed-tensors", cases.config("compressed-tensors", 4, group, True), 384, 64)
        cases.load(layer, cases.tensors("compressed-tensors", w))
        cases.finish(layer)
        x = torch.randn(3, 384, generator=generator).half()
        check(layer(x)[0], x, w, None, "sm90")


def test_merged_projections(generator: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """q, k and v of one layer of vLLM come from three layers of the checkpoint."""
    from vllm.model_executor.layers.linear import QKVParallelLinear
    from vllm.model_executor.layers.quantization import get_quantization_config

    cases.take_first(monkeypatch, "sm90")
    k, sizes = 128, {"q": 128, "k": 32, "v": 32}
    parts = {
        name: cases.weight(generator, k, n, bits=4, group=64, zeros=True, dtype=torch.float16)
        for name, n in sizes.items()
    }
    with cases.serving():
        quantization = get_quantization_config("awq").from_config(cases.config("awq", 4, 64, True))
        layer = QKVParallelLinear(k, 32, 4, 1, bias=False, quant_config=quantization, prefix="a.qkv_proj")
        parameters = dict(layer.named_parameters())
        for shard, w in parts.items():
            for name, tensor in cases.tensors("awq", w).items():
                parameters[name].weight_loader(parameters[name], tensor, shard)
        cases.finish(layer)
        x = torch.randn(4, k, generator=generator).half()
        y, _ = layer(x)
    assert torch.equal(y, torch.cat([w.gemm(x, arch="sm90") for w in parts.values()], dim=1))


def test_reload(generator: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that are loaded again run from the memory of the first ones, as a CUDA graph needs it."""
    from vllm.model_executor.model_loader.reload import layerwise

    cases.take_first(monkeypatch, "sm90")
    first, second = (
        cases.weight(generator, 128, 64, bits=4, group=64, zeros=True, dtype=torch.float16) for _ in range(2)
    )
    with cases.serving():
        layer = cases.build("compressed-tensors", cases.config("compressed-tensors", 4, 64, True), 128, 64)
        model = torch.nn.Sequential(layer)
        layerwise.record_metadata_for_reloading(model)
        cases.load(layer, cases.tensors("compressed-tensors", first))
        cases.finish(layer)
        addresses = {name: p.data_ptr() for name, p in layer.named_parameters() if name != "weight_shape"}
        x = torch.randn(3, 128, generator=generator).half()
        check(layer(x)[0], x, first, None, "sm90")

        layerwise.initialize_layerwise_reload(model)
        cases.load(layer, cases.tensors("compressed-tensors", second))
        layerwise.finalize_layerwise_reload(model, None)
        check(layer(x)[0], x, second, None, "sm90")
    assert {name: p.data_ptr() for name, p in layer.named_parameters() if name != "weight_shape"} == addresses


def test_compiled(generator: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    cases.take_first(monkeypatch, "sm90")
    w = cases.weight(generator, 128, 72, bits=4, group=64, zeros=True, dtype=torch.bfloat16)
    with cases.serving(torch.bfloat16):
        layer = cases.build("awq", cases.config("awq", 4, 64, True), 128, 72)
        cases.load(layer, cases.tensors("awq", w))
        cases.finish(layer)
        compiled = torch.compile(lambda x: layer(x)[0] * 2, fullgraph=True, dynamic=True, backend="aot_eager")
        for m in (1, 7, 33):
            x = torch.randn(m, 128, generator=generator).bfloat16()
            assert torch.equal(compiled(x), w.gemm(x, arch="sm90") * 2)


@pytest.mark.skipif(not HAS_G_IDX, reason="this vLLM gives kernels no g_idx (pull request 54809)")
def test_act_order_of_older_versions(generator: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    cases.take_first(monkeypatch, "sm90")
    w = cases.weight(generator, 128, 64, bits=4, group=32, zeros=False, dtype=torch.float16, act_order=True)
    with cases.serving():
        layer = cases.build("gptq", cases.config("gptq", 4, 32, False, act_order=True), 128, 64)
        cases.load(layer, cases.tensors("gptq", w))
        cases.finish(layer)
        x = torch.randn(3, 128, generator=generator).half()
        check(layer(x)[0], x, w, None, "sm90")


# --- which kernel vLLM takes ----------------------------------------------------------------------------------


def layer_config(**changes: Any) -> MPLinearLayerConfig:
    fields: dict[str, Any] = {
        "full_weight_shape": (256, 128),
        "partition_weight_shape": (256, 128),
        "weight_type": scalar_types.uint4b8,
        "act_type": torch.float16,
        "group_size": 128,
        "zero_points": False,
    }
    return MPLinearLayerConfig(**fields | ({"has_g_idx": False} if HAS_G_IDX else {}) | changes)


def test_disabled_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    cases.take_first(monkeypatch)
    assert choose_mp_linear_kernel(layer_config()) is WeightOnlyLinearKernel
    monkeypatch.setattr(envs, "VLLM_DISABLED_KERNELS", [WeightOnlyLinearKernel.__name__], raising=False)
    with pytest.raises(ValueError, match="WeightOnlyLinearKernel disabled by environment variable"):
        choose_mp_linear_kernel(layer_config())


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"group_size": 48}, "group_size must be"),
        ({"group_size": 96}, "group_size must"),
        ({"weight_type": scalar_types.uint4}, "no kernels for"),
        ({"weight_type": scalar_types.uint8b128, "zero_points": True}, "no kernels for"),
        ({"act_type": torch.float8_e4m3fn}, "no kernels for"),
    ],
    ids=["group 48", "group 96", "uint4 without zeros", "uint8b128 with zeros", "fp8 activations"],
)
def test_left_to_other_kernels(changes: dict[str, Any], reason: str) -> None:
    able, why = WeightOnlyLinearKernel.can_implement(layer_config(**changes))
    assert not able and reason in str(why)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> list[type[MPLinearKernel]]:
    """A platform that says it is a Hopper GPU. Returns a copy of the list of its kernels, which `register` changes."""
    cases.keep_kernels(monkeypatch)
    keep_configs(monkeypatch)
    platform = type(current_platform)
    monkeypatch.setattr(platform, "_enum", PlatformEnum.CUDA)
    monkeypatch.setattr(platform, "is_cuda", lambda _: True)
    monkeypatch.setattr(platform, "get_device_capability", lambda *_, **__: DeviceCapability(9, 0))
    return linear._POSSIBLE_KERNELS[PlatformEnum.CUDA]


@pytest.mark.parametrize(
    ("archs", "is_first"), [(("80", "90a"), True), (("80",), False), ((), False)], ids=["90a", "80 alone", "no kernels"]
)
def test_register(
    archs: tuple[str, ...], is_first: bool, cuda: list[type[MPLinearKernel]], monkeypatch: pytest.MonkeyPatch
) -> None:
    others = list(cuda)
    monkeypatch.setattr("weightonly.vllm.built_archs", lambda: archs)
    register()
    register()
    assert cuda == ([WeightOnlyLinearKernel] if is_first else []) + others
    for name in filter(linear.__dict__.get, cases.LISTS_OF_FP4_KERNELS):  # older versions have no such lists
        assert getattr(linear, name)[PlatformEnum.CUDA][0].__name__.startswith("WeightOnly") == is_first
    for name in cases.LISTS_OF_FP8_KERNELS:  # the one directly before vLLM's own weight-only kernels
        names = [kernel.__name__ for kernel in getattr(linear, name)[PlatformEnum.CUDA]]
        weight_only = [i for i, name in enumerate(names) if name.startswith(("Marlin", "Humming"))]
        ours = [i for i, name in enumerate(names) if name.startswith("WeightOnly")]
        assert ours == ([weight_only[0] - 1] if is_first else [])


def test_the_batch_invariant_mode(cuda: list[type[MPLinearKernel]], monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's variable turns ours on."""
    others = list(cuda)
    monkeypatch.setattr("weightonly.vllm.built_archs", lambda: ("90a",))
    monkeypatch.setattr(envs, "compile_factors", envs.compile_factors)
    monkeypatch.setattr(envs, "VLLM_BATCH_INVARIANT", True, raising=False)
    monkeypatch.setattr(invariance, "_on", False)
    register()
    register()
    assert wo.batch_invariant() and cuda == [WeightOnlyLinearKernel, *others]


def test_graphs_that_vllm_keeps_know_the_plugin(cuda: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled without us, with us, with all experts, with none, with our kernel disabled: none is another's."""
    monkeypatch.setattr(envs, "compile_factors", inspect.unwrap(envs.compile_factors))
    monkeypatch.setattr("weightonly.vllm.built_archs", lambda: ("90a",))
    keys = [hash_factors(envs.compile_factors())]
    register()
    keys.append(hash_factors(envs.compile_factors()))
    register()
    assert hash_factors(envs.compile_factors()) == keys[-1]
    for experts in ("on", "off"):
        monkeypatch.setenv("WEIGHTONLY_VLLM_EXPERTS", experts)
        keys.append(hash_factors(envs.compile_factors()))
    monkeypatch.setenv("VLLM_DISABLED_KERNELS", "WeightOnlyLinearKernel")
    keys.append(hash_factors(envs.compile_factors()))
    assert len(set(keys)) == 5


def test_register_is_silent_on_a_cpu() -> None:
    before = {platform: list(kernels) for platform, kernels in _POSSIBLE_KERNELS.items()}
    register()
    assert before == _POSSIBLE_KERNELS


@pytest.mark.parametrize("missing", ["name", "attribute"])
def test_another_version_of_vllm(
    missing: str, cuda: list[type[MPLinearKernel]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One that lacks what a part of the plug-in needs: the log says so, the rest works, vLLM is as before."""
    monkeypatch.setattr("weightonly.vllm.built_archs", lambda: ("90a",))
    if missing == "name":
        monkeypatch.delitem(sys.modules, "weightonly.vllm.linear_kernel")
        monkeypatch.delattr("vllm.model_executor.kernels.linear.MPLinearLayerConfig")
    else:
        monkeypatch.setattr("vllm.platforms.current_platform", SimpleNamespace(is_cuda=lambda: True))
        monkeypatch.setattr("weightonly.vllm._runs_here", lambda: True)
    others = list(cuda)
    logger = logging.getLogger("vllm.weightonly")
    caplog.set_level(logging.WARNING, logger=logger.name)  # VLLM_LOGGING_LEVEL may be ERROR
    logger.addHandler(caplog.handler)
    try:
        register()
    finally:
        logger.removeHandler(caplog.handler)
    assert cuda == others
    assert f"weightonly has no linear kernel for vLLM {vllm.__version__}" in caplog.text
    assert "weightonly" in QUANTIZATION_METHODS


def test_entry_point() -> None:
    """vLLM finds the plug-in of an installed package, and importing it imports nothing of vLLM."""
    code = """
import sys, weightonly.vllm
assert "vllm" not in sys.modules
from vllm.plugins import load_plugins_by_group
assert load_plugins_by_group("vllm.general_plugins")["weightonly"] is weightonly.vllm.register
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_signatures() -> None:
    """What the plug-in relies on."""
    assert {"c", "w_q_param_name", "w_s_param_name", "w_zp_param_name"} <= set(
        inspect.signature(MPLinearKernel.__init__).parameters
    )
    assert list(inspect.signature(MPLinearKernel.apply_weights).parameters) == ["self", "layer", "x", "bias"]
    assert list(inspect.signature(MPLinearKernel.can_implement).parameters) == ["c"]
    assert list(inspect.signature(register_linear_kernel).parameters) == ["kernel_class", "platform", "kernel_type"]
    assert MPLinearKernel.__abstractmethods__ == {
        "get_min_capability",
        "can_implement",
        "process_weights_after_loading",
        "apply_weights",
    }
