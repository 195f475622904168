"""mxfp4 and nvfp4 with transformers: quantized while they load, saved, and the records of gpt-oss' experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests import formats_reference as ref
from tests.hf_models import llama, logits, packed_layers, saved
from transformers import AutoModelForCausalLM, GptOssConfig
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

import weightonly as wo
import weightonly.hf
from weightonly.formats import QuantizedLayer
from weightonly.nn import Experts

EXPERTS, HIDDEN, INNER = 4, 64, 96


@pytest.mark.parametrize(("format", "group_size"), [("mxfp4", 32), ("nvfp4", 16)])
def test_quantized_while_it_loads(format: str, group_size: int, tmp_path: Path) -> None:
    folder = saved(tmp_path / "dense", llama)
    config = weightonly.hf.WeightOnlyConfig(format=format)
    assert config.group_size == group_size
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype=torch.bfloat16)
    dense = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    assert packed_layers(model)
    for name, layer in packed_layers(model).items():
        q, scales, _ = wo.quantize(dense.get_submodule(name).weight.detach().t(), format=format)
        assert torch.equal(wo.unpack(layer.packed), q) and torch.equal(layer.scales, scales)
    model.save_pretrained(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.bfloat16)
    assert torch.equal(logits(again), logits(model))


def test_other_groups_are_refused(no_groups_of_16: None) -> None:
    with pytest.raises(ValueError, match="group_size must be 32 for mxfp4, got 64"):
        weightonly.hf.WeightOnlyConfig(format="mxfp4", group_size=64)
    with pytest.raises(ValueError, match=r"group_size must be .* on a GPU; got 16"):
        weightonly.hf.WeightOnlyConfig(format="nvfp4", arch="sm90")


def gpt_oss_tensors(generator: torch.Generator) -> dict[str, torch.Tensor]:
    """The experts of one layer, by their names in it."""
    tensors = {}
    for name, (k, n) in {"gate_up_proj": (HIDDEN, 2 * INNER), "down_proj": (INNER, HIDDEN)}.items():
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (EXPERTS, n, k // 32, 16), generator=generator).to(
            torch.uint8
        )
        tensors[f"{name}_scales"] = torch.randint(118, 124, (EXPERTS, n, k // 32), generator=generator).to(torch.uint8)
        tensors[f"{name}_bias"] = torch.randn(EXPERTS, n, generator=generator).bfloat16()
    return tensors


def gpt_oss(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    config: dict[str, Any] = {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "num_hidden_layers": 1}
    config |= {
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_local_experts": EXPERTS,
        "head_dim": 16,
        "vocab_size": 32,
    }
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_experts_per_tok": 2}
    named = {f"model.layers.0.mlp.experts.{name}": tensor for name, tensor in tensors.items()}
    return ref.write_checkpoint(folder, named, config | {"quantization_config": {"quant_method": "mxfp4"}})


def test_experts_of_gpt_oss_compute_what_transformers_computes(tmp_path: Path, generator: torch.Generator) -> None:
    tensors = gpt_oss_tensors(generator)
    dense = GptOssExperts(GptOssConfig(hidden_size=HIDDEN, intermediate_size=INNER, num_local_experts=EXPERTS)).eval()
    parts = {}
    for record in wo.load_checkpoint(gpt_oss(tmp_path / "model", tensors)):
        assert isinstance(record, QuantizedLayer) and record.bias is not None
        name = record.name.rpartition(".")[2]
        w = convert_moe_packed_tensors(tensors[f"{name}_blocks"], tensors[f"{name}_scales"], dtype=torch.float32)
        assert torch.equal(record.dequantize(), w)
        setattr(dense, name, torch.nn.Parameter(w, requires_grad=False))
        setattr(dense, f"{name}_bias", torch.nn.Parameter(record.bias.float(), requires_grad=False))
        parts[name] = [
            QuantizedLayer(name, weight, scales, bias=bias)
            for weight, scales, bias in zip(record.weight, record.scales, record.bias, strict=True)
        ]
    packed = Experts.from_quantized(parts["gate_up_proj"], parts["down_proj"], module=dense, dtype=torch.float32)
    x = torch.randn(7, HIDDEN, generator=generator)
    ids = torch.stack([torch.randperm(EXPERTS, generator=generator)[:2] for _ in range(7)])
    weights = torch.rand(7, 2, generator=generator)
    expected = dense(x, ids, weights)
    torch.testing.assert_close(packed(x, ids, weights), expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
