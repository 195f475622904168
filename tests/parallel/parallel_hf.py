"""Cases of transformers' tensor parallel models: each rank loads its part. See parallel_ranks.py."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.expert_models import make as make_experts
from tests.formats_llama import FFN, HEADS, HIDDEN, LAYERS, VOCABULARY
from tests.formats_llama import MODELS as QUANTIZED
from tests.hf_models import gpt2, llama, logits, packed_layers, phi3, qwen2, saved
from tests.parallel.parallel_linear import error
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from weightonly.formats import convert
from weightonly.hf import WeightOnlyConfig, load_model
from weightonly.parallel import ParallelLinear

logging.disable_progress_bar()

Plan = str | dict[str, str]
"""What transformers takes as `tp_plan`."""

WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 4}
"""Cut by 2 and 4 at multiples of 64."""

ODD = {"hidden_size": 128, "intermediate_size": 384, "num_attention_heads": 4, "num_key_value_heads": 4}
"""Cut by 4 at multiples of 32 and 96."""

FUSED = {"model.layers.*.mlp.gate_up_proj": "packed_colwise", "model.layers.*.mlp.down_proj": "rowwise"}
"""Of Phi-3: each rank has columns of the gate and of the rest."""

CONV1D = {
    "transformer.h.*.attn.c_attn": "colwise_gather_output",
    "transformer.h.*.attn.c_proj": "rowwise_split_input",
    "transformer.h.*.mlp.c_fc": "colwise",
    "transformer.h.*.mlp.c_proj": "rowwise",
}
"""Of GPT-2, which transformers has no plan for."""


@contextmanager
def folder(mesh: DeviceMesh, make: Callable[[Path], Any]) -> Iterator[Path]:
    """A folder that the first rank makes and all read."""
    path = Path.cwd() / f"model_of_{mesh.size()}"
    if mesh.get_local_rank() == 0:
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir()
        make(path)
    distributed.barrier()
    yield path
    distributed.barrier()


def check(mesh: DeviceMesh, path: Path, load: Callable[..., PreTrainedModel], plan: Plan = "auto") -> float:
    """The logits of the parallel model, and its file, are those of the model of one process."""
    whole = load()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = load(tp_plan=plan)
    parts = [layer for layer in packed_layers(model).values() if isinstance(layer, ParallelLinear)]
    assert len(parts) == len(packed_layers(whole))
    total = sum(layer.qweight.numel() for layer in packed_layers(whole).values())
    assert mesh.size() == 1 or sum(layer.qweight.numel() for layer in parts) < total
    model.save_pretrained(path / "parallel")
    if mesh.get_local_rank() == 0:
        whole.save_pretrained(path / "whole")
        expected, got = (load_file(path / kind / "model.safetensors") for kind in ("whole", "parallel"))
        assert expected.keys() == got.keys(), expected.keys() ^ got.keys()
        for name, tensor in expected.items():
            assert tensor.dtype == got[name].dtype and torch.equal(tensor, got[name]), name
        configs = [json.loads((path / kind / "config.json").read_text()) for kind in ("whole", "parallel")]
        assert configs[0]["quantization_config"] == configs[1]["quantization_config"]
        again = AutoModelForCausalLM.from_pretrained(path / "parallel", dtype=torch.float32)
        assert torch.equal(logits(again), logits(whole))
    distributed.barrier()
    return error(logits(model), logits(whole))


def quantized(mesh: DeviceMesh, make: Callable[[], PreTrainedModel], plan: Plan = "auto", **options: Any) -> float:
    """A dense model, quantized while each rank reads its part."""
    with folder(mesh, lambda path: saved(path, make)) as path:
        config = WeightOnlyConfig(**options)
        load = partial(AutoModelForCausalLM.from_pretrained, path, quantization_config=config, dtype=torch.float32)
        return check(mesh, path, load, plan)


def packed(mesh: DeviceMesh, make: Callable[[], PreTrainedModel], plan: Plan = "auto", **options: Any) -> float:
    """A folder that save_pretrained wrote."""

    def save(path: Path) -> None:
        dense, config = saved(path / "dense", make), WeightOnlyConfig(**options)
        model = AutoModelForCausalLM.from_pretrained(dense, quantization_config=config, dtype=torch.float32)
        model.save_pretrained(path)

    with folder(mesh, save) as path:
        return check(mesh, path, partial(AutoModelForCausalLM.from_pretrained, path, dtype=torch.float32), plan)


def experts(mesh: DeviceMesh) -> float:
    """A mixture: its attention is packed and cut; transformers cuts the experts, which stay dense."""
    with folder(mesh, lambda path: make_experts("mixtral").save_pretrained(path)) as path:
        load = partial(AutoModelForCausalLM.from_pretrained, path, dtype=torch.float32)
        whole = load(quantization_config=WeightOnlyConfig(group_size=32, modules_to_not_convert=["experts"]))
        model = load(quantization_config=WeightOnlyConfig(group_size=32), tp_plan="auto")
        assert packed_layers(model).keys() == packed_layers(whole).keys()
        return error(logits(model), logits(whole))


def groups_that_no_kernel_takes(mesh: DeviceMesh) -> None:
    """The error names the layer."""
    message = r"layer 'model\.layers\.0\.mlp\.down_proj': in_features: expected a K that 2 ranks can cut into groups"
    with pytest.raises(ValueError, match=message):
        quantized(mesh, partial(llama, intermediate_size=80), group_size=16)
    distributed.barrier()  # the folder's own was left out


def folder_of_others(mesh: DeviceMesh) -> None:
    """Only load_model cuts the layers of another quantizer."""
    message = "tp_plan: expected none for the folder of another quantizer; load_model"
    with folder(mesh, lambda path: write(path, "awq")) as path, pytest.raises(ValueError, match=message):
        AutoModelForCausalLM.from_pretrained(path, quantization_config=WeightOnlyConfig(), tp_plan="auto")


def write(path: Path, case: str) -> None:
    """A checkpoint of formats_llama.py."""
    model = QUANTIZED[case](torch.Generator().manual_seed(1))
    options = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    }
    save_file({name: tensor.contiguous() for name, tensor in model.tensors.items()}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(options | {"quantization_config": model.config}))


def checkpoint(mesh: DeviceMesh, case: str, arch: int, is_converted: bool = False) -> float:
    """A folder of another quantizer, or what `convert` made of it."""

    def make(path: Path) -> None:
        write(path, case)
        if is_converted:
            convert(path, path / "converted", arch=arch)

    with folder(mesh, make) as path:
        source = path / "converted" if is_converted else path
        packed_for = None if is_converted else arch
        return check(mesh, path, partial(load_model, source, dtype=torch.float32, arch=packed_for))


CASES: dict[str, Callable[[DeviceMesh], float | None]] = {
    "quantized while loading, int4": partial(quantized, make=partial(llama, **WIDE), group_size=64, arch="sm90"),
    "quantized while loading, cuts inside of tiles": partial(
        quantized, make=partial(llama, **ODD), group_size=64, symmetric=False, arch="sm90"
    ),
    "quantized while loading, nf4, biases": partial(
        quantized, make=partial(qwen2, **WIDE), format="nf4", group_size=32
    ),
    "quantized while loading, int8 per channel": partial(
        quantized, make=partial(llama, **WIDE), format="int8", group_size=-1, arch="sm80"
    ),
    "quantized while loading, a rank without columns": partial(
        quantized, make=partial(llama, **WIDE | {"intermediate_size": 9}), format="int8", group_size=64
    ),
    "quantized while loading, fused layers": partial(quantized, make=phi3, plan=FUSED, group_size=32),
    "quantized while loading, Conv1D": partial(quantized, make=gpt2, plan=CONV1D, group_size=32, symmetric=False),
    "experts of a mixture stay dense": experts,
    "groups that no kernel takes": groups_that_no_kernel_takes,
    "the folder of another quantizer": folder_of_others,
    "packed": partial(packed, make=partial(llama, **WIDE), group_size=64, arch="sm90"),
    "packed, cuts inside of tiles": partial(
        packed, make=partial(llama, **ODD), group_size=32, symmetric=False, arch=80
    ),
    "packed, fused layers": partial(packed, make=phi3, plan=FUSED, group_size=32),
    "packed, row_major, biases": partial(packed, make=partial(qwen2, **WIDE), group_size=64, arch=70),
    **{
        f"{case}, {arch}": partial(checkpoint, case=case, arch=arch)
        for case, arch in (
            ("awq", 90),
            ("gptq-4bit-v1-sym", 80),
            ("gptq-4bit-v1-act_order", 90),
            ("gptq-8bit-v2", 90),
            ("compressed_tensors-4bit", 90),
            ("compressed_tensors-8bit-sym-channel", 80),
            ("bitsandbytes-nf4-nested", 90),
        )
    },
    "converted, act-order": partial(checkpoint, case="gptq-4bit-v1-act_order", arch=90, is_converted=True),
    "converted, interleaved": partial(checkpoint, case="awq", arch=80, is_converted=True),
}
RANKS = {name: (2, 4) if name.startswith(("quantized", "packed")) else (2,) for name in CASES}
"""The quantizers' models have two heads of keys."""
