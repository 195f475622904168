"""FP8 and ModelOpt folders as running models, on every route, beside the dense model of their numbers."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tests import fp8_cases, hf_models
from tests.formats.test_formats_fp8 import MODELOPT
from tests.hf import gpt_oss_models
from transformers import AutoModelForCausalLM

from weightonly.formats import convert
from weightonly.hf import WeightOnlyConfig, load_model
from weightonly.nn import GroupedLinear, Linear

EXPERTS = {"num_experts_per_tok": 2}
BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}
CHANNEL = {"num_bits": 8, "type": "float", "strategy": "channel"}


def mixtral() -> Any:
    config = transformers.MixtralConfig(**hf_models.SIZES, **EXPERTS, num_local_experts=4)
    return transformers.MixtralForCausalLM(config)


def qwen3_moe() -> Any:
    config = transformers.Qwen3MoeConfig(**hf_models.SIZES, **EXPERTS, num_experts=4, moe_intermediate_size=64)
    return transformers.Qwen3MoeForCausalLM(config)


def deepseek_v3() -> Any:
    config = transformers.DeepseekV3Config(
        **hf_models.SIZES | {"num_key_value_heads": 4},
        **EXPERTS,
        n_routed_experts=4,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        n_shared_experts=1,
        moe_intermediate_size=64,
        q_lora_rank=64,
        kv_lora_rank=64,
        qk_rope_head_dim=16,
        qk_nope_head_dim=32,
        v_head_dim=32,
    )
    return transformers.DeepseekV3ForCausalLM(config)


FOLDERS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "fp8-llama-static": (
        hf_models.llama,
        {
            "options": BLOCKS | {"activation_scheme": "static", "weight_block_size": None},
            "block": (-1, -1),
            "scale_name": "weight_scale_inv",
            "form": lambda scale: scale.reshape(()),
            "beside": {"activation_scale": torch.tensor(0.1)},
        },
    ),
    "fp8-deepseek": (deepseek_v3, {"options": BLOCKS, "block": (128, 128), "scale_name": "weight_scale_inv"}),
    "fp8-qwen": (
        qwen3_moe,
        {"options": BLOCKS | {"weight_block_size": [32, 32]}, "block": (32, 32), "scale_name": "weight_scale_inv"},
    ),
    "fp8-scale": (deepseek_v3, {"options": BLOCKS, "block": (128, 128), "scale_name": "scale"}),
    "fp8-qscale": (hf_models.llama, {"options": BLOCKS, "block": (128, 128), "scale_name": "qscale_weight"}),
    "fbgemm-llama": (
        hf_models.llama,
        {
            "options": {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0},
            "block": (1, -1),
            "scale_name": "weight_scale",
            "beside": {"input_scale_ub": torch.tensor([1200.0])},
        },
    ),
    "compressed-tensors-mixtral": (
        mixtral,
        {
            "options": {
                "quant_method": "compressed-tensors",
                "format": "float-quantized",
                "config_groups": {"group_0": {"targets": ["Linear"], "weights": CHANNEL}},
            },
            "block": (1, -1),
            "scale_name": "weight_scale",
        },
    ),
    "modelopt-mixtral": (
        mixtral,
        {
            "options": {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head", "*.gate"]},
            "block": (-1, -1),
            "scale_name": "weight_scale",
            "form": lambda scale: scale.reshape(()),
            "beside": {"input_scale": torch.tensor(0.1)},
        },
    ),
}

LLAMA4 = {"intermediate_size_mlp": 96, "num_local_experts": 4, "num_experts_per_tok": 1, "head_dim": 32}


def llama4() -> Any:
    """Its experts are [E, K, N], and stay dense: they have another interface."""
    return transformers.Llama4ForCausalLM(transformers.Llama4TextConfig(**hf_models.SIZES, **LLAMA4))


def gpt_oss() -> Any:
    """Gates are in turns with what they are multiplied with; biases."""
    return transformers.GptOssForCausalLM(transformers.GptOssConfig(**gpt_oss_models.SIZES | {"hidden_size": 128}))


def pair(name: str) -> int:
    return 1 + name.endswith("gate_up_proj")


DYNAMIC = BLOCKS | {"weight_block_size": None}
STACKS: dict[str, tuple[Callable[[], Any], dict[str, Any], set[str]]] = {
    "fp8-blocks": (
        qwen3_moe,
        {
            "options": BLOCKS | {"weight_block_size": [32, 32]},
            "block": (32, 32),
            "scale_name": "weight_scale_inv",
            "stack": lambda name, w: fp8_cases.experts(w, (32, 32)),
        },
        {"fp8"},
    ),
    "fp8-blocks-of-halves": (  # of 64 columns each: blocks of 128 do not run over the end of one
        qwen3_moe,
        {
            "options": BLOCKS,
            "block": (128, 128),
            "scale_name": "weight_scale_inv",
            "stack": lambda name, w: fp8_cases.experts(w, (128, 128), halves=pair(name)),
        },
        {"fp8"},
    ),
    "fp8-static": (  # as FP8Experts of transformers has them: [E, 2, 1] and [E, 1, 1]
        mixtral,
        {
            "options": DYNAMIC | {"activation_scheme": "static"},
            "block": (-1, -1),
            "scale_name": "weight_scale_inv",
            "form": lambda scale: scale.reshape(()),
            "beside": {"activation_scale": torch.tensor(0.1)},
            "stack": lambda name, w: (
                (found := fp8_cases.experts(w, (-1, -1), halves=pair(name)))[0]
                | {"_activation_scale": torch.full((4,), 0.1)},
                found[1],
            ),
        },
        {"fp8"},
    ),
    "fbgemm-llama4": (
        llama4,
        {
            "options": {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0},
            "block": (1, -1),
            "scale_name": "weight_scale",
            "stack": lambda name, w: fp8_cases.experts(
                w,
                (1, -1),
                "_scale",
                lambda scale: scale.transpose(1, 2) if "gate_up" in name else scale,
                is_transposed=True,
            ),
        },
        {"fp8"},
    ),
    "modelopt-gpt-oss": (
        gpt_oss,
        {
            "options": {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head", "*.router"]},
            "block": (-1, -1),
            "scale_name": "weight_scale",
            "form": lambda scale: scale.reshape(()),
            "stack": lambda name, w: fp8_cases.experts(
                w, (-1, -1), "_weight_scale", lambda scale: scale.reshape(-1), is_transposed=True
            ),
        },
        {"fp8"},
    ),
}

ROUTES: dict[str, Callable[[Path], Any]] = {
    "load_model": lambda folder: load_model(folder, dtype=torch.float32),
    "from_pretrained": lambda folder: AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=WeightOnlyConfig(), dtype=torch.float32
    ),
    "converted": lambda folder: AutoModelForCausalLM.from_pretrained(converted(folder), dtype=torch.float32),
}


def converted(folder: Path) -> Path:
    packed = folder.parent / "packed"
    convert(folder, packed, progress=False)
    return packed


def check(folder: Path, dense: Any, tokens: torch.Tensor, formats: set[str], is_modelopt: bool = False) -> None:
    """transformers does not know ModelOpt: its `from_pretrained` asks for `load_model`."""
    expected = hf_models.logits(dense, tokens)
    for route, load in ROUTES.items():
        if is_modelopt and route == "from_pretrained":
            with pytest.raises(ValueError, match=r"got 'modelopt'; weightonly.hf.load_model reads .*modelopt"):
                load(folder)
            continue
        model = load(folder)
        found = {m.format for m in model.modules() if isinstance(m, Linear | GroupedLinear)}
        assert found == formats, route
        error = (hf_models.logits(model, tokens) - expected).norm()
        assert error <= 2e-5 * expected.norm(), route


@pytest.mark.parametrize("name", FOLDERS)
def test_logits(name: str, tmp_path: Path) -> None:
    make, how = FOLDERS[name]
    dense = write_both(make, how, tmp_path)
    check(tmp_path / "model", dense, hf_models.TOKENS, {"fp8"}, name.startswith("modelopt"))


def write_both(make: Callable[[], Any], how: dict[str, Any], folder: Path) -> Any:
    """A quantized model in folder / "model"; returns the dense one of its numbers."""
    model = hf_models.seeded(make)
    tensors = fp8_cases.write(folder / "model", model, **how)
    (folder / "dense").mkdir()
    model.save_pretrained(folder / "dense")
    save_file(tensors, folder / "dense" / "model.safetensors", metadata={"format": "pt"})
    return AutoModelForCausalLM.from_pretrained(folder / "dense", dtype=torch.float32)


@pytest.mark.parametrize("name", STACKS)
def test_logits_of_stacked_experts(name: str, tmp_path: Path) -> None:
    make, how, formats = STACKS[name]
    dense = write_both(make, how, tmp_path)
    check(tmp_path / "model", dense, hf_models.TOKENS, formats, name.startswith("modelopt"))
    model = ROUTES["load_model"](tmp_path / "model")
    assert any(isinstance(m, GroupedLinear) for m in model.modules()) == ("llama4" not in name)


def undone(layer: str) -> Callable[[fp8_cases.Tensors], None]:
    """The layer is dense in the files."""

    def edit(tensors: fp8_cases.Tensors) -> None:
        scale = tensors.pop(f"{layer}.weight_scale")
        tensors[f"{layer}.weight"] = tensors[f"{layer}.weight"].float() * scale
        tensors.pop(f"{layer}.input_scale", None)

    return edit


def cached(names: dict[str, str]) -> Callable[[fp8_cases.Tensors], None]:
    """Scales of a KV cache. names: of them, after that of the attention."""
    return lambda tensors: tensors.update(
        {f"model.layers.{layer}.self_attn.{name}": torch.tensor(1.0) for layer in (0, 1) for name in names.values()}
    )


FP8_LLAMA: dict[str, Any] = {
    "block": (-1, -1),
    "scale_name": "weight_scale",
    "form": lambda scale: scale.reshape(()),
    "beside": {"input_scale": torch.tensor(0.1)},
}
CACHE = {"dynamic": False, "num_bits": 8, "type": "float"}
DOWN = "model.layers.1.mlp.down_proj"
ODD: dict[str, tuple[dict[str, Any], list[Callable[[fp8_cases.Tensors], None]]]] = {
    "not converted": (DYNAMIC | {"modules_to_not_convert": ["lm_head", DOWN]}, [undone(DOWN)]),
    "AutoFP8": (DYNAMIC | {"activation_scheme": "static", "ignored_layers": ["lm_head", DOWN]}, [undone(DOWN)]),
    "KV cache": (DYNAMIC | {"kv_cache_scheme": "static"}, [cached({"k": "k_scale", "v": "v_scale"})]),
    "ModelOpt": (
        {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head", "model.layers.1.mlp.d*"]}
        | {"kv_cache_scheme": CACHE},
        [undone(DOWN), cached({"k": "k_proj.k_scale", "v": "v_proj.v_scale"})],
    ),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_folders(name: str, tmp_path: Path) -> None:
    options, edits = ODD[name]
    dense = write_both(hf_models.llama, FP8_LLAMA | {"options": options}, tmp_path)
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    for edit in edits:
        edit(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    check(tmp_path / "model", dense, hf_models.TOKENS, {"fp8"}, name == "ModelOpt")
    model = load_model(tmp_path / "model", torch.float32)
    assert isinstance(model.get_submodule(DOWN), Linear) == (name == "KV cache")


def dense_of_modelopt(folder: Path) -> Path:
    """The numbers of the folder that ModelOpt wrote, dense, in fp32."""
    tensors, dense = load_file(MODELOPT / "model.safetensors"), {}
    for name, tensor in tensors.items():
        scale, factor = tensors.get(f"{name}_scale"), tensors.get(f"{name}_scale_2")
        if "_scale" in name:
            continue
        dense[name] = tensor.float()
        if scale is not None and factor is None:
            dense[name] = fp8_cases.dequantize(tensor, scale, (-1, -1)).float()
        elif scale is not None and factor is not None:
            dense[name] = fp8_cases.dequantize_nvfp4(tensor, scale, factor).float()
    config = transformers.AutoConfig.from_pretrained(MODELOPT)
    del config.quantization_config
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    save_file(dense, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_logits_of_a_folder_of_modelopt(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(MODELOPT, folder)
    model = AutoModelForCausalLM.from_pretrained(dense_of_modelopt(tmp_path / "dense"), dtype=torch.float32)
    expected = hf_models.logits(model, hf_models.TOKENS % 32)
    for load in (ROUTES["load_model"], ROUTES["converted"]):
        loaded = load(folder)
        assert {m.format for m in loaded.modules() if isinstance(m, Linear | GroupedLinear)} == {"fp8", "nvfp4"}
        assert (hf_models.logits(loaded, hf_models.TOKENS % 32) - expected).norm() <= 2e-5 * expected.norm()


@torch.no_grad()
def routed(model: Any, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(logits fp64 [rows, columns, vocabulary], the experts that every layer chooses [rows, columns, choices])."""
    chosen = []
    routers = [module for module in model.modules() if type(module).__name__.endswith("TopKRouter")]
    hooks = [
        router.register_forward_hook(lambda _, args, out: chosen.append(out[-1].sort(-1).values)) for router in routers
    ]
    logits = model(tokens).logits.double()
    for hook in hooks:
        hook.remove()
    return logits, torch.cat(chosen, -1).view(*tokens.shape, -1)


@pytest.mark.parametrize("name", ["blocks", "mixed"])
def test_bfloat16_where_routing_is_equal(name: str, tmp_path: Path, generator: torch.Generator) -> None:
    """Numbers that round otherwise let a router choose another expert where two are close: for a few tokens, and those
    after them, the result is then another one, of the dense model as well as of the packed one."""
    if name == "mixed":
        folder, vocabulary = MODELOPT, 32
        dense_of_modelopt(tmp_path / "dense")
    else:
        weights = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [32, 32]}
        make, how = FOLDERS["compressed-tensors-mixtral"]
        groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
        write_both(make, how | {"options": how["options"] | {"config_groups": groups}, "block": (32, 32)}, tmp_path)
        folder, vocabulary = tmp_path / "model", hf_models.VOCABULARY
    tokens = torch.randint(0, vocabulary, (4, 32), generator=generator)

    def dense(dtype: torch.dtype) -> Any:
        options = {"experts_implementation": "eager"}  # the others do not take fp64
        return AutoModelForCausalLM.from_pretrained(tmp_path / "dense", dtype=dtype, **options)

    expected, choices = routed(dense(torch.float64), tokens)
    found = [routed(model, tokens) for model in (load_model(folder, torch.bfloat16), dense(torch.bfloat16))]
    same = torch.stack([(others == choices).all(-1) for _, others in found]).all(0).cummin(1).values
    assert same.sum() >= 0.3 * same.numel()
    packed, plain = ((logits - expected)[same].norm() / expected[same].norm() for logits, _ in found)
    assert packed <= 1.5 * plain <= 0.02
