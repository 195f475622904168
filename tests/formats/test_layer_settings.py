"""Settings of single layers: `dynamic` of GPTQModel, and AutoRound's folders with their `extra_config`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import formats_llama
from tests.formats_llama import Packer, awq, gptq
from tests.formats_reference import write_checkpoint

import weightonly as wo
from weightonly import __main__ as command
from weightonly.formats import QuantizedLayer, open_checkpoint

K, N = 128, 32
NAMES = ("model.layers.0.q_proj", "model.layers.0.down_proj", "model.layers.10.q_proj", "lm_head")


def packer(
    bits: int = 4, version: int = 1, sym: bool = False, act_order: bool = False, rows: int = 32, keep: bool = True
) -> Packer:
    """GPTQ's in groups of `rows`. keep: the g_idx."""

    def pack(k: int, n: int, g: torch.Generator) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(formats_llama, "GROUP", rows)
            tensors, w = gptq(bits, version, sym, act_order)(k, n, g)
        return {name: t for name, t in tensors.items() if keep or name != "g_idx"}, w

    return pack


def folder_of(
    path: Path, options: Mapping[str, Any], pack: Callable[[str], Packer], g: torch.Generator
) -> tuple[Path, dict[str, torch.Tensor]]:
    """A folder of NAMES, and their weights."""
    tensors: dict[str, torch.Tensor] = {}
    dense: dict[str, torch.Tensor] = {}
    for name in NAMES:
        packed, dense[name] = pack(name)(K, N, g)
        tensors |= {f"{name}.{inside}": tensor for inside, tensor in packed.items()}
    return write_checkpoint(path / "model", tensors, {"quantization_config": options}), dense


def reads(folder: Path, dense: Mapping[str, torch.Tensor]) -> None:
    for record in wo.load_checkpoint(folder, progress=False):
        assert isinstance(record, QuantizedLayer)
        assert torch.equal(record.dequantize(), dense[record.name])


def refused(path: Path, options: Mapping[str, Any], pack: Callable[[str], Packer], message: str) -> None:
    folder, _ = folder_of(path, options, pack, torch.Generator().manual_seed(0))
    with pytest.raises(ValueError, match=message):
        open_checkpoint(folder)


# --- dynamic ------------------------------------------------------------------------------------------------

GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": False}
DOWN = r"+:.*down_proj"


def of_down(other: Packer, rest: Packer) -> Callable[[str], Packer]:
    return lambda name: other if name.endswith("down_proj") else rest


@pytest.mark.parametrize("is_ordered", [True, False])
def test_dynamic_desc_act(is_ordered: bool, tmp_path: Path, generator: torch.Generator) -> None:
    options = GPTQ | {"desc_act": not is_ordered, "dynamic": {DOWN: {"desc_act": is_ordered}}}
    pack = of_down(packer(act_order=is_ordered), packer(act_order=not is_ordered))
    folder, dense = folder_of(tmp_path, options, pack, generator)
    reads(folder, dense)
    orders = {name: shape.act_order for name, shape in open_checkpoint(folder).shapes.items()}
    assert orders == {name: name.endswith("down_proj") is is_ordered for name in NAMES}


def test_dynamic_desc_act_counts(tmp_path: Path) -> None:
    options = GPTQ | {"desc_act": True, "dynamic": {DOWN: {"desc_act": False}}}
    refused(tmp_path, options, lambda _: packer(act_order=True), r"down_proj\.g_idx: expected the groups in order")


def test_dynamic_desc_act_needs_an_order(tmp_path: Path) -> None:
    options = GPTQ | {"dynamic": {DOWN: {"desc_act": True}}}
    refused(tmp_path, options, lambda _: packer(keep=False), r"down_proj\.g_idx: expected one, .* desc_act")


@pytest.mark.parametrize("is_symmetric", [True, False])
def test_dynamic_sym(is_symmetric: bool, tmp_path: Path, generator: torch.Generator) -> None:
    """Also of a layer that stores the middle as version 2 does, which `sym` tells."""
    options = GPTQ | {"sym": not is_symmetric, "dynamic": {DOWN: {"sym": is_symmetric}}}
    pack = of_down(packer(sym=is_symmetric, version=1 + is_symmetric), packer(sym=not is_symmetric))
    folder, dense = folder_of(tmp_path, options, pack, generator)
    told = {name: shape.symmetric for name, shape in open_checkpoint(folder).shapes.items()}
    assert told == {name: name.endswith("down_proj") is is_symmetric for name in NAMES}
    if is_symmetric:
        with pytest.warns(UserWarning, match="read as version 2"):
            reads(folder, dense)
    else:
        reads(folder, dense)


def test_the_first_pattern_counts(tmp_path: Path, generator: torch.Generator) -> None:
    options = GPTQ | {
        "dynamic": {r"model\.layers\.0\.": {"bits": 8}, r"-:.*\.0\.down": {}, r"+:.*0\.down": {"bits": 3}}
    }
    pack = of_down(packer(8), packer())
    reads(*folder_of(tmp_path, options, lambda name: packer(8) if ".0." in name else pack(name), generator))


def test_a_layer_that_a_negative_pattern_names(tmp_path: Path) -> None:
    options = GPTQ | {"dynamic": {r"-:.*down_proj": {}}}
    refused(tmp_path, options, lambda _: packer(), r"down_proj\.qweight: dynamic: expected no quantized layer")


# --- AutoRound ----------------------------------------------------------------------------------------------

AUTO_ROUND: dict[str, Any] = {
    "quant_method": "auto-round",
    "bits": 4,
    "group_size": 32,
    "sym": False,
    "block_name_to_quantize": "model.layers",
    "autoround_version": "0.9.0",
}
V1, V2 = packer(keep=False), packer(version=2, keep=False)
PACKINGS: dict[str | None, Packer] = {
    "auto_round:auto_gptq": V1,
    "auto_round:gptq": V1,
    "auto_round:auto_gptq:exllamav2": packer(),
    "auto": V1,
    None: V1,
    "auto_round": V2,
    "auto_round:gptqmodel": packer(version=2),
    "auto_round:tritonv2": V2,
    "auto_round:auto_awq": awq,
    "auto_round:awq": awq,
}


@pytest.mark.parametrize("packing", PACKINGS, ids=str)
def test_packing_formats(
    packing: str | None, tmp_path: Path, generator: torch.Generator, capsys: pytest.CaptureFixture[str]
) -> None:
    options = AUTO_ROUND | ({} if packing is None else {"packing_format": packing})
    folder, dense = folder_of(tmp_path, options, lambda _: PACKINGS[packing], generator)
    reads(folder, dense)
    assert command.main(["inspect", str(folder)]) == 0
    assert "auto-round (from config.json)" in capsys.readouterr().out


def test_a_folder_of_an_old_version(tmp_path: Path, generator: torch.Generator) -> None:
    options = AUTO_ROUND | {"quant_method": "intel/auto-round", "backend": "auto_round:exllamav2"}
    reads(*folder_of(tmp_path, options, lambda _: V2, generator))


EXTRA: dict[str, Any] = {
    "lm_head": {"bits": 8, "group_size": 64, "sym": None, "act_bits": 16},
    "model.layers.1": {"bits": 2},
    ".*down_proj.*": {"bits": 8},
    "layers.0": {"group_size": 64},
    "self_attn.*": {"bits": 16},
}
"""The first that matches counts: a name, a module that the layer is in (not layers.1 of layers.10), a pattern."""


def test_extra_config(tmp_path: Path, generator: torch.Generator) -> None:
    own = {
        "lm_head": packer(8, rows=64),
        "model.layers.0.down_proj": packer(8),
        "model.layers.0.q_proj": packer(rows=64),
        "model.layers.10.q_proj": packer(),
    }
    folder, dense = folder_of(tmp_path, AUTO_ROUND | {"extra_config": EXTRA}, own.__getitem__, generator)
    reads(folder, dense)


def test_extra_config_of_awq(tmp_path: Path, generator: torch.Generator) -> None:
    options = AUTO_ROUND | {"group_size": 64, "packing_format": "auto_round:auto_awq"}
    reads(*folder_of(tmp_path, options | {"extra_config": {"proj|head": {"group_size": 32}}}, lambda _: awq, generator))


@pytest.mark.parametrize("method", ["auto_round:auto_gptq", "auto_round:auto_awq"])
def test_a_layer_of_16_bits_that_is_quantized(method: str, tmp_path: Path) -> None:
    options = AUTO_ROUND | {"packing_format": method, "extra_config": {"down_proj": {"bits": 16}}}
    refused(tmp_path, options, lambda _: PACKINGS[method], r"down_proj\.qweight: bits: expected 4.* got 16")


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "packing": (
        {"packing_format": "auto_round:fp8"},
        "packing_format: expected one of .*got 'auto_round:fp8'",
    ),
    "activations": ({"act_bits": 8}, "act_bits: expected 16, of weights alone, got 8"),
    "floats": ({"data_type": "mx_fp"}, "data_type: expected int, got 'mx_fp'"),
    "rotations": ({"rotation_config": {"hadamard_type": "quarot"}}, "rotation_config: expected none, got"),
    "bits": ({"bits": 3}, "bits: expected 4 or 8 for GPTQ, got 3"),
    "settings": ({"extra_config": {"lm_head": 8}}, "lm_head: expected dict, got 8"),
    "pattern": ({"extra_config": {"(": {}}}, r"extra_config: expected regular expressions, got '\('"),
    "group size": ({"extra_config": {"lm_head": {"group_size": 128}}}, r"lm_head\.scales: expected 1 groups of 128"),
    "kind": ({"extra_config": {"lm_head": {"bits": "8"}}}, r"lm_head\.qweight: extra_config: bits: expected int"),
}


@pytest.mark.parametrize("case", WRONG)
def test_configs_that_are_not_read(case: str, tmp_path: Path) -> None:
    refused(tmp_path, AUTO_ROUND | WRONG[case][0], lambda _: V1, WRONG[case][1])


def test_thousands_of_names(tmp_path: Path, generator: torch.Generator) -> None:
    """As a mixture of experts has them: names are no patterns, of which there may not be so many."""
    names = {f"model.layers.{i}.mlp.experts.{j}.down_proj": {"bits": 8} for i in range(48) for j in range(128)}
    assert len(json.dumps(names)) > 300_000
    reads(*folder_of(tmp_path, AUTO_ROUND | {"extra_config": names}, lambda _: V1, generator))
