"""Which experts of vLLM the plug-in takes, the switch, and what it registers."""

from __future__ import annotations

import copy
import inspect
import pickle
import sys
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from tests.vllm import vllm_cases as cases
from tests.vllm import vllm_experts as moe
from tests.vllm.vllm_experts import HIDDEN, INNER, fake_layer, needs_cpu_experts, needs_vllms_experts
from vllm import envs
from vllm.model_executor.layers import quantization
from vllm.model_executor.layers.fused_moe import FusedMoEConfig, FusedMoEMethodBase, RoutedExperts
from vllm.model_executor.layers.fused_moe.config import FusedMoEParallelConfig
from vllm.model_executor.layers.quantization.auto_awq import AutoAWQConfig
from vllm.model_executor.layers.quantization.auto_gptq import AutoGPTQConfig
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
from vllm.platforms import PlatformEnum, current_platform
from vllm.platforms.interface import DeviceCapability

from weightonly.vllm import experts as experts_module
from weightonly.vllm import register, support
from weightonly.vllm.expert_layer import why_no_experts
from weightonly.vllm.expert_tensors import of_rows
from weightonly.vllm.experts import WeightOnlyExpertsMethod
from weightonly.vllm.support import VARIABLE, experts_wanted, is_asked_for


@pytest.mark.parametrize(
    ("changes", "group", "reason"),
    [
        ({"activation": "swigluoai"}, 64, "activation: expected swigluoai for experts of gpt-oss, and for no others"),
        ({"activation": "gelu", "swiglu_limit": 7.0}, 64, "activation: expected gelu without alpha, beta and limit"),
        ({"swiglu_limit": 0.0}, 64, "limit: expected a finite number above 0, got 0.0"),
        ({"apply_router_weight_on_input": True}, 64, "no experts with router weights on the input"),
        ({}, 16, "w13: group_size must be .* got 16"),
        ({"tp_size": 4}, 64, "w2: group_size must be .* got 16"),  # rows 48 .. 95 of 192: 16 of group 0, 32 of group 1
    ],
    ids=[
        "swigluoai",
        "a limit of gelu",
        "a limit of 0",
        "weights of several experts on the input",
        "group 16",
        "cut to 16",
    ],
)
def test_refused(
    changes: dict[str, Any], group: int, reason: str, no_groups_of_16: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with cases.serving(), moe.rank_of(monkeypatch, 1, expert_parallel=False):
        layer = moe.build(None, {}, HIDDEN, INNER, **changes).routed_experts
        with pytest.raises(ValueError, match=f"a layer: .*{reason}"):
            WeightOnlyExpertsMethod("a layer", layer, of_rows("int4", group, group, False))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"is_lora_enabled": True}, "LoRA"),
        ({"enable_eplb": True}, "load balancing of experts"),
        ({"use_all2all_kernels": True}, "all-to-all kernels"),
        ({"apply_router_weight_on_input": True}, "router weights on the input with top_k above 1"),
        ({"moe_backend": "marlin"}, "a --moe-backend of vLLM"),
    ],
    ids=["LoRA", "EPLB", "all-to-all", "weights of two experts on the input", "the user's choice"],
)
def test_what_experts_do_not_have(changes: dict[str, Any], reason: str) -> None:
    tensors = of_rows("int4", 64, 64, False)
    assert why_no_experts(fake_layer(), tensors) is None
    assert str(why_no_experts(fake_layer(**changes), tensors)).startswith(f"weightonly has no experts with {reason}")


def test_asked_for_experts_are_no_choice_of_vllms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "on")
    assert why_no_experts(fake_layer(moe_backend="marlin"), of_rows("int4", 64, 64, False)) is None


def test_batch_invariant_experts_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(envs, "VLLM_BATCH_INVARIANT", True, raising=False)
    assert why_no_experts(fake_layer(), of_rows("int4", 64, 64, False)) is None


GROUPS_OF_TWO_KINDS = {
    "gate": {"targets": ["re:.*gate_proj"], "weights": {"num_bits": 8, "group_size": 64, "strategy": "group"}},
    "rest": {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 64, "strategy": "group"}},
}
CONFIGS: dict[str, tuple[str, dict[str, Any], str | None]] = {
    "act-order": ("gptq", {"desc_act": True}, None),
    "act-order per channel": ("gptq", {"desc_act": True, "group_size": -1}, "int4"),
    "bits of these experts": ("gptq", {"dynamic": {r"+:.*\.experts": {"bits": 8}}}, "int8"),
    "order of compressed-tensors": ("compressed-tensors", {"actorder": "group"}, None),
    "projections of two kinds": ("compressed-tensors", {"config_groups": GROUPS_OF_TWO_KINDS}, None),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_whose_experts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are not for us are left to vLLM's config, which is not asked for the others."""
    method, changes, format = CONFIGS[name]
    options = cases.config(method, 4, 64, False)
    if "actorder" in changes:
        options["config_groups"]["group_0"]["weights"] |= changes
    else:
        options |= changes
    theirs = object()
    for config in (AutoGPTQConfig, CompressedTensorsConfig):
        monkeypatch.setattr(config, "get_quant_method", lambda self, layer, prefix: theirs)
    moe.take_ours(monkeypatch)
    with cases.serving():
        layer = moe.build(None, {}, HIDDEN, INNER).routed_experts
        try:
            found = quantization.get_quantization_config(method).from_config(options)
        except ValueError as error:
            pytest.skip(f"vLLM refuses it itself: {error}")
        chosen = found.get_quant_method(layer, "model.layers.0.mlp.experts")
    if format is None:
        assert chosen is theirs
    else:
        assert isinstance(chosen, WeightOnlyExpertsMethod) and chosen.tensors.format == format


def test_one_line_says_why_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[tuple[str, ...]] = []
    monkeypatch.setattr(AutoGPTQConfig, "get_quant_method", lambda *_: None)
    monkeypatch.setattr(experts_module.logger, "warning_once", lambda *words: said.append(words))
    moe.take_ours(monkeypatch)
    config: Any = quantization.get_quantization_config("gptq").from_config(cases.config("gptq", 4, 64, False))
    with cases.serving():
        layer = moe.build(None, {}, HIDDEN, INNER, swiglu_limit=0.0).routed_experts  # no Gate has such a limit
        for number in range(2):
            config.get_quant_method(layer, f"model.layers.{number}.experts")
    assert said == [("Experts are left to vLLM's kernels: %s", "limit: expected a finite number above 0, got 0.0")] * 2


@needs_cpu_experts
@needs_vllms_experts
def test_refused_experts_are_vllms(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the plug-in was not there."""
    moe.take_ours(monkeypatch)
    with cases.serving():
        config = cases.config("gptq", 4, 64, False)
        layer = moe.build("gptq", config, HIDDEN, INNER, swiglu_limit=0.0).routed_experts  # no Gate has such a limit
    assert type(layer.quant_method).__name__ == "AutoGPTQMoEMethod"


def test_skipped_layers_stay_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rules of the config that leave out experts are vLLM's."""
    moe.take_ours(monkeypatch)
    gptq = cases.config("gptq", 4, 64, False) | {"dynamic": {r"-:.*\.experts": {}}}
    awq = cases.config("awq", 4, 64, True) | {"modules_to_not_convert": ["experts"]}
    ct = cases.config("compressed-tensors", 4, 64, False) | {"ignore": [r"re:.*experts.*"]}
    with cases.serving():
        for method, options in (("gptq", gptq), ("awq", awq), ("compressed-tensors", ct)):
            runner = moe.build(method, options, HIDDEN, INNER)
            assert type(runner.routed_experts.quant_method).__name__ == "UnquantizedFusedMoEMethod"


def test_on_unless_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert experts_wanted() and not is_asked_for()
    monkeypatch.setenv(VARIABLE, "on")
    assert experts_wanted() and is_asked_for()
    monkeypatch.setenv(VARIABLE, "off")
    assert not experts_wanted() and not is_asked_for()
    monkeypatch.setenv(VARIABLE, "yes")
    with pytest.raises(ValueError, match=f"{VARIABLE}: expected on or off, got 'yes'"):
        experts_wanted()


@pytest.mark.parametrize(
    ("arch", "group", "is_one"),
    [(75, 64, False), (80, 64, True), (80, 16, False), (86, 32, True), (90, 16, True), (90, -1, True)],
    ids=["sm75", "sm80", "sm80 in groups of 16", "sm86", "sm90 in groups of 16", "sm90 per channel"],
)
def test_by_default_one_launch(arch: int, group: int, is_one: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts that are a `gemm` each, for which the host waits, are taken only where they are asked for."""
    built = (str(arch) if arch < 90 else "90a",)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(support, "device_arch", lambda _: arch)
    monkeypatch.setattr(support, "sm_count", lambda _: 132)
    choose = sys.modules["weightonly.plan.choose"]
    monkeypatch.setattr(sys.modules["weightonly.kernels"], "built_archs", lambda: built)
    for module in (support, choose):
        monkeypatch.setattr(module, "is_compiled", lambda config, types: True)
    tensors = of_rows("int4", group, group, False)
    monkeypatch.delenv(VARIABLE, raising=False)
    reason = why_no_experts(fake_layer(), tensors)
    assert reason is None if is_one else f"w13: no kernel has all experts in one launch; {VARIABLE}=on" in str(reason)
    monkeypatch.setenv(VARIABLE, "on")
    assert why_no_experts(fake_layer(), tensors) is None


@pytest.mark.parametrize(
    ("method", "bits", "zeros"), [("gptq", 4, False), ("awq", 4, True), ("compressed-tensors", 8, True)]
)
def test_configs_are_sent_to_processes(method: str, bits: int, zeros: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """To one that has not registered ours yet; a copy is one of ours, too."""
    moe.take_ours(monkeypatch)
    config = quantization.get_quantization_config(method).from_config(cases.config(method, bits, 64, zeros))
    for other in (pickle.loads(pickle.dumps(config)), copy.deepcopy(config)):
        assert type(other) is type(config) and repr(vars(other)) == repr(vars(config))


def test_experts_that_vllm_quantizes_again_are_its(monkeypatch: pytest.MonkeyPatch) -> None:
    """`--quantization-config` asks for it."""
    theirs = object()
    monkeypatch.setattr(AutoAWQConfig, "get_quant_method", lambda *_: theirs)
    moe.take_ours(monkeypatch)
    config: Any = quantization.get_quantization_config("awq").from_config(cases.config("awq", 4, 64, True))
    with cases.serving():
        layer = moe.build(None, {}, HIDDEN, INNER).routed_experts
        assert isinstance(config.get_quant_method(layer, "experts"), WeightOnlyExpertsMethod)
        config.online_quantization_config = object()
        assert config.get_quant_method(layer, "experts") is theirs


def test_other_methods_are_vllms(monkeypatch: pytest.MonkeyPatch) -> None:
    before = {name: quantization.get_quantization_config(name) for name in ("gptq", "awq", "fp8", "moe_wna16")}
    moe.take_ours(monkeypatch)
    after = {name: quantization.get_quantization_config(name) for name in before}
    assert [name for name in before if before[name] is not after[name]] == ["gptq", "awq"]
    assert issubclass(after["gptq"], before["gptq"]) and after["gptq"].get_name() == before["gptq"].get_name()


@pytest.mark.parametrize(
    "asked",
    [pytest.param(False, id="off", marks=[needs_cpu_experts, needs_vllms_experts]), pytest.param(True, id="on")],
)
def test_register(asked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU that our kernels are built for."""
    platform = type(current_platform)
    moe.keep_configs(monkeypatch)
    cases.keep_kernels(monkeypatch)
    monkeypatch.setattr("weightonly.vllm.built_archs", lambda: ("90a",))
    monkeypatch.setenv(VARIABLE, "on" if asked else "off")
    with monkeypatch.context() as gpu:
        gpu.setattr(platform, "_enum", PlatformEnum.CUDA)
        gpu.setattr(platform, "is_cuda", lambda _: True)
        gpu.setattr(platform, "get_device_capability", lambda *_, **__: DeviceCapability(9, 0))
        register()
        register()
    with cases.serving():
        layer = moe.build("gptq", cases.config("gptq", 4, 64, False), HIDDEN, INNER).routed_experts
    assert isinstance(layer.quant_method, WeightOnlyExpertsMethod) == asked


def test_signatures() -> None:
    """What the plug-in relies on."""
    arguments = inspect.signature(FusedMoEMethodBase.apply).parameters
    assert list(arguments)[:5] == ["self", "layer", "x", "topk_weights", "topk_ids"]
    assert list(inspect.signature(WeightOnlyExpertsMethod.apply).parameters) == list(arguments)
    assert FusedMoEMethodBase.__abstractmethods__ == {"create_weights", "get_fused_moe_quant_config"}
    loader = inspect.signature(RoutedExperts.weight_loader).parameters
    assert list(inspect.signature(WeightOnlyExpertsMethod.load).parameters) == list(loader)
    config = {"hidden_dim", "intermediate_size_per_partition", "moe_parallel_config", "activation", "in_dtype"}
    assert config | {"swiglu_limit", "is_lora_enabled", "num_experts"} <= set(FusedMoEConfig.__dataclass_fields__)
    assert {"tp_size", "tp_rank", "enable_eplb"} <= set(FusedMoEParallelConfig.__dataclass_fields__)
    assert callable(CompressedTensorsConfig._add_fused_moe_to_target_scheme_map)
    for cls in (AutoGPTQConfig, AutoAWQConfig, CompressedTensorsConfig):
        assert list(inspect.signature(cls.get_quant_method).parameters) == ["self", "layer", "prefix"]
