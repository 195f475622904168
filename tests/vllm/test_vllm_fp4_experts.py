"""Experts of 4-bit floats of the plug-in in real fused MoE layers of vLLM: NVFP4, MXFP4 and gpt-oss."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")
pytest.importorskip("vllm.model_executor.kernels.linear.nvfp4")

from safetensors.torch import save_file
from tests.vllm import vllm_cases as cases
from tests.vllm import vllm_experts as moe
from tests.vllm import vllm_fp4 as fp4
from tests.vllm.vllm_experts import HIDDEN, INNER
from vllm.config import set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.quantization import get_quantization_config
from vllm.model_executor.model_loader import DefaultModelLoader, get_model_loader
from vllm.model_executor.model_loader.reload import layerwise
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.model_executor.models import gpt_oss as model
from vllm.platforms import current_platform
from vllm.platforms.interface import DeviceCapability

import weightonly as wo
from weightonly.gate import Gate
from weightonly.vllm.expert_tensors import CONFIGS, ExpertTensors
from weightonly.vllm.experts import WeightOnlyExpertsMethod

pytestmark = pytest.mark.skipif(
    not hasattr(model, "GptOssRoutedExperts"), reason="this vLLM loads experts of gpt-oss in another way"
)

FORMATS = [
    pytest.param("compressed-tensors", "nvfp4", id="ct-nvfp4"),
    pytest.param("compressed-tensors", "mxfp4", id="ct-mxfp4"),
    pytest.param("modelopt_fp4", "nvfp4", id="modelopt"),
    pytest.param("mxfp4", "mxfp4", id="mxfp4"),
]
DTYPES = [pytest.param(torch.float16, id="fp16"), pytest.param(torch.bfloat16, id="bf16")]


def near(y: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    step = {torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}[dtype]
    assert (y.double() - expected).abs().max() <= 8 * step * expected.abs().max()


def inputs(g: torch.Generator, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, the router's logits, and the weights and experts that it chooses"""
    x, logits = torch.randn(7, HIDDEN, generator=g).to(dtype), torch.randn(7, moe.E, generator=g).to(dtype)
    return x, logits, *moe.route(x, logits, moe.TOP_K, True)


@pytest.mark.parametrize("is_a16", [True, False], ids=["W4A16", "W4A4"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("method", "format"), FORMATS)
def test_layer_of_each_method(
    method: str,
    format: str,
    dtype: torch.dtype,
    is_a16: bool,
    generator: torch.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Bit for bit what `fused_experts` gives, gate and up having factors of their own, and near the dense layer."""
    moe.take_ours(monkeypatch, "sm90")
    experts = fp4.experts(generator, format, HIDDEN, INNER)
    x, logits, weights, ids = inputs(generator, dtype)
    with cases.serving(dtype):
        runner = moe.build(method, fp4.config(method, format, is_a16), HIDDEN, INNER)
        moe.load(runner, experts.tensors(method))
        y = moe.forward(runner, x, logits)
    stacks = experts.stacks("sm90", dtype)
    assert torch.equal(y, wo.fused_experts(x, *stacks, ids, weights))
    near(y, experts.dense(x, ids, weights), dtype)
    held = sum(p.numel() * p.element_size() for p in runner.routed_experts.parameters())
    assert held == sum(s[0].data.numel() + 2 * s[1].numel() for s in stacks), "more is held than what is read"


@pytest.mark.parametrize("expert_parallel", [True, False], ids=["experts", "shards"])
@pytest.mark.parametrize(("method", "format"), FORMATS)
def test_ranks(
    method: str, format: str, expert_parallel: bool, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    moe.take_ours(monkeypatch)
    experts = fp4.experts(generator, format, HIDDEN, INNER)
    x, logits, weights, ids = inputs(generator, torch.float16)
    total = torch.zeros(x.shape, dtype=torch.float64)
    with cases.serving():
        for rank in range(2):
            with moe.rank_of(monkeypatch, rank, expert_parallel):
                runner = moe.build(method, fp4.config(method, format), HIDDEN, INNER, tp_size=2)
                moe.load(runner, experts.tensors(method))
                total += moe.forward(runner, x, logits).double()
    near(total, experts.dense(x, ids, weights), torch.float16)


@pytest.mark.parametrize(("method", "format"), FORMATS)
def test_reload(method: str, format: str, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that are loaded again run from the memory of the first ones."""
    moe.take_ours(monkeypatch, "sm90")
    first, second = (fp4.experts(generator, format, HIDDEN, INNER) for _ in range(2))
    x, logits, weights, ids = inputs(generator, torch.float16)
    with cases.serving():
        runner = moe.build(method, fp4.config(method, format), HIDDEN, INNER)
        layer = runner.routed_experts
        layerwise.record_metadata_for_reloading(layer)
        moe.load(runner, first.tensors(method))
        addresses = {name: p.data_ptr() for name, p in layer.named_parameters()}
        moe.forward(runner, x, logits)
        layerwise.initialize_layerwise_reload(layer)
        list(layer.load_weights(second.tensors(method)))
        assert not layerwise.get_layerwise_info(layer).can_load(), "kept until all layers are loaded"
        layerwise.finalize_layerwise_reload(layer, None)
        assert torch.equal(moe.forward(runner, x, logits), wo.fused_experts(x, *second.stacks("sm90"), ids, weights))
    assert {name: p.data_ptr() for name, p in layer.named_parameters()} == addresses


# --- gpt-oss ---------------------------------------------------------------------------------------------------


def gpt_oss(inner: int = INNER, **arguments: Any) -> Any:
    """Its layer as its model builds it."""
    layer = {"activation": "swigluoai", "has_bias": True, "routed_experts_cls": model.GptOssRoutedExperts}
    return moe.build("gpt_oss_mxfp4", fp4.config("gpt_oss_mxfp4", "mxfp4"), HIDDEN, inner, **layer, **arguments)


def load(layer: Any, tensors: dict[str, torch.Tensor], begin: int = 0, end: int = INNER) -> None:
    """As the model does: tensors of all experts, cut for a rank with rows `begin`..`end` of the second product."""
    for name, tensor in tensors.items():
        if name.startswith("w13"):
            tensor = tensor[:, 2 * begin : 2 * end]
        elif name == "w2_bias":
            tensor = tensor * (begin == 0)
        else:
            rows = {"w2_weight": 2, "w2_weight_scale": 32}[name]
            tensor = tensor[..., begin // rows : end // rows]
        parameter = getattr(layer, name)
        parameter.weight_loader(parameter, tensor, weight_name=f"experts.{name}", shard_id=None, expert_id=None)


def oai(z: torch.Tensor) -> torch.Tensor:
    return Gate.of("swigluoai")(z)


def dense(experts: fp4.Fp4Experts, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """In fp64."""
    assert experts.bias is not None
    y = torch.zeros(x.shape, dtype=torch.float64)
    for e in range(moe.E):
        gate, up, down = (experts.weights[name][e].dense for name in moe.PROJECTIONS)
        b = [experts.bias[name][e].double() for name in moe.PROJECTIONS]
        inner = oai(torch.cat([x.double() @ gate + b[0], x.double() @ up + b[1]], 1))
        y += (weights.double() * (ids == e)).sum(1, keepdim=True) * (inner @ down + b[2])
    return y


@pytest.mark.parametrize("one_by_one", [False, True], ids=["all experts", "one by one"])
def test_gpt_oss(one_by_one: bool, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """With biases, its gate, and columns of gate and up that alternate in the file."""
    moe.take_ours(monkeypatch, "sm90")
    experts = fp4.experts(generator, "mxfp4", HIDDEN, INNER, has_bias=True)
    x, logits, weights, ids = inputs(generator, torch.bfloat16)
    with cases.serving(torch.bfloat16):
        runner = gpt_oss()
        layer = runner.routed_experts
        if one_by_one:
            load_one_by_one(layer, experts.of_gpt_oss())
        else:
            load(layer, experts.of_gpt_oss())
        layer.quant_method.process_weights_after_loading(layer)
        y = moe.forward(runner, x, logits)
    assert torch.equal(y, wo.fused_experts(x, *experts.stacks("sm90", torch.bfloat16), ids, weights, "swigluoai"))
    near(y, dense(experts, x, ids, weights), torch.bfloat16)


def load_one_by_one(layer: Any, tensors: dict[str, torch.Tensor]) -> None:
    """As the model does with a checkpoint of single experts; their codes may come in blocks of 16 bytes."""
    for name, tensor in tensors.items():
        parameter, shard = getattr(layer, name), f"gpt_oss_{name.partition('_')[0]}"
        for expert, one in enumerate(tensor):
            one = one.unflatten(1, (-1, 16)) if name.endswith("weight") else one
            parameter.weight_loader(
                parameter, one, weight_name=f"experts.{name}", shard_id=shard, expert_id=expert, return_success=True
            )


@pytest.mark.parametrize("one_by_one", [False, True], ids=["all experts", "one by one"])
def test_ranks_of_gpt_oss(one_by_one: bool, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """160 rows are 5 groups: the loader gives two groups to each of four ranks, while there are some."""
    moe.take_ours(monkeypatch)
    experts = fp4.experts(generator, "mxfp4", HIDDEN, 160, has_bias=True)
    x, logits, weights, ids = inputs(generator, torch.bfloat16)
    total = torch.zeros(x.shape, dtype=torch.float64)
    with cases.serving(torch.bfloat16):
        for rank in range(4):
            with moe.rank_of(monkeypatch, rank, expert_parallel=False):
                runner = gpt_oss(160, tp_size=4)
                layer = runner.routed_experts
                assert layer.intermediate_size_per_partition == 64
                if one_by_one:
                    load_one_by_one(layer, experts.of_gpt_oss())
                else:
                    load(layer, experts.of_gpt_oss(), 64 * rank, min(64 * rank + 64, 160))
                layer.quant_method.process_weights_after_loading(layer)
                total += moe.forward(runner, x, logits).double()
    near(total, dense(experts, x, ids, weights), torch.bfloat16)


def test_experts_of_gpt_oss_on_other_ranks(generator: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    moe.take_ours(monkeypatch)
    experts = fp4.experts(generator, "mxfp4", HIDDEN, INNER, has_bias=True)
    x, logits, weights, ids = inputs(generator, torch.bfloat16)
    total, half = torch.zeros(x.shape, dtype=torch.float64), moe.E // 2
    with cases.serving(torch.bfloat16):
        for rank in range(2):
            with moe.rank_of(monkeypatch, rank, expert_parallel=True):
                runner = gpt_oss(tp_size=2)
                layer = runner.routed_experts
                if rank:
                    load_one_by_one(layer, experts.of_gpt_oss())
                else:
                    load(layer, {name: t[:half] for name, t in experts.of_gpt_oss().items()})
                layer.quant_method.process_weights_after_loading(layer)
                total += moe.forward(runner, x, logits).double()
    near(total, dense(experts, x, ids, weights), torch.bfloat16)


GPT_OSS = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_local_experts": moe.E,
    "num_experts_per_tok": moe.TOP_K,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 64,
    "torch_dtype": "bfloat16",
    "quantization_config": {"quant_method": "mxfp4"},
}


def test_folder_of_gpt_oss(tmp_path: Path, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """As its own quantizer writes it, by vLLM's config, model and loader; without attention, which CPUs do not have."""
    moe.take_ours(monkeypatch, "sm90")
    monkeypatch.setattr(model, "Attention", lambda *_, **__: torch.nn.Module())
    layers = [fp4.experts(generator, "mxfp4", HIDDEN, INNER, has_bias=True) for _ in range(2)]
    names = {"w13": "gate_up_proj", "w2": "down_proj"}
    tensors = {}
    for number, experts in enumerate(layers):
        for name, tensor in experts.of_gpt_oss().items():
            stem, _, kind = name.partition("_")
            kind = {"weight": "blocks", "weight_scale": "scales", "bias": "bias"}[kind]
            tensor = tensor.unflatten(2, (-1, 16)) if kind == "blocks" else tensor
            tensors[f"model.layers.{number}.mlp.experts.{names[stem]}_{kind}"] = tensor.contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(GPT_OSS))
    x, _, weights, ids = inputs(generator, torch.bfloat16)
    with cases.serving(torch.bfloat16):
        arguments = EngineArgs(model=str(tmp_path), skip_tokenizer_init=True, dtype="bfloat16", enforce_eager=True)
        config = arguments.create_engine_config()
        with set_current_vllm_config(config):
            built: Any = initialize_model(vllm_config=config)
        # The rest of the model is not there.
        monkeypatch.setattr(DefaultModelLoader, "track_weights_loading", lambda *_: None, raising=False)
        get_model_loader(config.load_config).load_weights(built, config.model_config)
        for number, experts in enumerate(layers):
            layer = built.model.layers[number].mlp.experts.routed_experts
            layer.quant_method.process_weights_after_loading(layer)
            y = layer.forward_modular(x, weights, ids.int())
            assert torch.equal(
                y, wo.fused_experts(x, *experts.stacks("sm90", torch.bfloat16), ids, weights, "swigluoai")
            )


def test_reload_of_gpt_oss(generator: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank's padding is 0, too, where its memory was not."""
    moe.take_ours(monkeypatch)
    first, second = (fp4.experts(generator, "mxfp4", HIDDEN, 160, has_bias=True).of_gpt_oss() for _ in range(2))
    x, logits, _, _ = inputs(generator, torch.bfloat16)
    empty = torch.empty_strided
    with cases.serving(torch.bfloat16), moe.rank_of(monkeypatch, 2, expert_parallel=False):
        fresh, runner = gpt_oss(160, tp_size=4), gpt_oss(160, tp_size=4)
        layer = runner.routed_experts
        layerwise.record_metadata_for_reloading(layer)
        for each, tensors in ((fresh.routed_experts, second), (layer, first)):
            load(each, tensors, 128, 160)
            each.quant_method.process_weights_after_loading(each)
        addresses = {name: p.data_ptr() for name, p in layer.named_parameters()}
        layerwise.initialize_layerwise_reload(layer)
        load(layer, second, 128, 160)
        monkeypatch.setattr(torch, "empty_strided", lambda *sizes, **options: empty(*sizes, **options).fill_(119))
        layerwise.finalize_layerwise_reload(layer, None)
        assert torch.equal(moe.forward(runner, x, logits), moe.forward(fresh, x, logits))
    assert {name: p.data_ptr() for name, p in layer.named_parameters()} == addresses


@pytest.mark.parametrize("wrong", ["w13_weight", "w2_weight_scale"])
def test_tensors_that_do_not_fit(wrong: str, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    moe.take_ours(monkeypatch)
    tensors = fp4.experts(generator, "mxfp4", HIDDEN, INNER, has_bias=True).of_gpt_oss()
    with cases.serving(torch.bfloat16):
        layer = gpt_oss().routed_experts
        with pytest.raises(ValueError, match=r"experts\.weight.*: expected \[6, .*\] at most, got \[6, "):
            load(layer, {wrong: torch.cat([tensors[wrong], tensors[wrong]], 2)}, 0, 2 * INNER)
        with pytest.raises(ValueError, match=r"weight.*: expected uint8.*, got float32"):
            load(layer, {wrong: tensors[wrong].float()})


# --- what is left to vLLM --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "format", "change", "reason"),
    [
        ("compressed-tensors", "nvfp4", "Blackwell", "a GPU that multiplies them itself"),
        ("mxfp4", "mxfp4", "Blackwell", "a GPU that multiplies them itself"),
        ("gpt_oss_mxfp4", "mxfp4", "Blackwell", "a GPU that multiplies them itself"),
        ("compressed-tensors", "mxfp4", "fp8", "activations of 8 bits"),
        ("modelopt_fp4", "nvfp4", "group_size", "groups of another size than 16"),
    ],
    ids=["nvfp4 on Blackwell", "mxfp4 on Blackwell", "gpt-oss on Blackwell", "fp8 activations", "groups of 32"],
)
def test_left_to_vllm(method: str, format: str, change: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options = fp4.config(method, format, is_a16=False)
    if change == "fp8":
        args = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True, "symmetric": True}
        options["config_groups"]["group_0"]["input_activations"] = args
    elif change == "group_size":
        options["group_size"] = 32
    else:
        blackwell = DeviceCapability(10, 0)
        monkeypatch.setattr(type(current_platform), "get_device_capability", lambda *_, **__: blackwell)
    moe.take_ours(monkeypatch)
    with cases.serving():
        layer = moe.build(None, {}, HIDDEN, INNER).routed_experts
        config = get_quantization_config(method).from_config(options)
        tensors_of = next(of for place, (methods, of) in CONFIGS.items() if method in methods)
        assert reason in str(tensors_of(config, layer, "model.layers.0.mlp.experts"))


def test_blackwell_keeps_activations_of_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(current_platform), "get_device_capability", lambda *_, **__: DeviceCapability(10, 0))
    moe.take_ours(monkeypatch)
    with cases.serving():
        layer = moe.build("modelopt_fp4", fp4.config("modelopt_fp4", "nvfp4"), HIDDEN, INNER).routed_experts
    assert isinstance(layer.quant_method, WeightOnlyExpertsMethod)


@pytest.mark.parametrize("algorithm", ["NVFP4", "W4A16_NVFP4", "MXFP8"])
def test_layers_of_several_algorithms(algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """ModelOpt's mixed checkpoints name one for each layer."""
    layers = {"a.mlp.experts.0.up_proj": {"quant_algo": algorithm}, "b.mlp": {"quant_algo": "FP8"}}
    options = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    config: Any = get_quantization_config("modelopt_mixed").from_config(options)
    _, tensors_of = CONFIGS["modelopt.ModelOptMixedPrecisionConfig"]
    found = tensors_of(config, None, "a.mlp.experts")
    assert (found is None) if algorithm == "MXFP8" else isinstance(found, ExpertTensors) and found.format == "nvfp4"
    config.exclude_modules = ["a.mlp.experts"]
    assert tensors_of(config, None, "a.mlp.experts") is None


def test_experts_without_a_gate(generator: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in Nemotron, of ModelOpt: one first projection with one factor."""
    moe.take_ours(monkeypatch)
    monkeypatch.setattr(type(current_platform), "is_xpu", lambda _: True)  # vLLM has none on CPUs
    experts = fp4.experts(generator, "nvfp4", HIDDEN, INNER)
    x, _, weights, ids = inputs(generator, torch.float16)
    with cases.serving():
        names = {"ckpt_names": ("up_proj", "down_proj", None), "activation": "relu2_no_mul"}
        layer = moe.build("modelopt_fp4", fp4.config("modelopt_fp4", "nvfp4"), HIDDEN, INNER, **names).routed_experts
        monkeypatch.undo()
        list(layer.load_weights((name, t) for name, t in experts.tensors("modelopt_fp4") if "gate" not in name))
        layer.quant_method.process_weights_after_loading(layer)
        y = layer.quant_method.apply(layer, x, weights, ids)
    up, down = (experts.weights[name] for name in ("up_proj", "down_proj"))
    first, second = (fp4.stack([(w,) for w in each], None, torch.float16, None) for each in (up, down))
    assert torch.equal(y, wo.fused_experts(x, first, second, ids, weights, "relu2"))


def test_excluded_experts_stay_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    moe.take_ours(monkeypatch)
    options = fp4.config("modelopt_fp4", "nvfp4") | {"ignore": ["*experts*"]}
    with cases.serving():
        layer = moe.build("modelopt_fp4", options, HIDDEN, INNER).routed_experts
    assert type(layer.quant_method).__name__ == "UnquantizedFusedMoEMethod"


def test_scales_that_do_not_fit(generator: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """A factor of 0 that compressed-tensors divides by, and powers of two beyond float16."""
    moe.take_ours(monkeypatch)
    for format, tensor, value in (("nvfp4", "weight_global_scale", 0), ("mxfp4", "weight_scale", 200)):
        experts = fp4.experts(generator, format, HIDDEN, INNER)
        stored = (
            (name, t.clone().fill_(value) if tensor in name else t) for name, t in experts.tensors("compressed-tensors")
        )
        with cases.serving():
            runner = moe.build("compressed-tensors", fp4.config("compressed-tensors", format), HIDDEN, INNER)
            with pytest.raises(ValueError, match=r"experts\.w13_weight_scale: scales: expected "):
                moe.load(runner, stored)
