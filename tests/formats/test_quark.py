"""Quark: integers by their formula, the samples of the package, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.data import HERE
from tests.formats_layers import GROUP, K, N

import weightonly as wo
from weightonly import __main__ as command
from weightonly.formats import QuantizedLayer, open_checkpoint

Tensors = dict[str, torch.Tensor]
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def config(dtype: str, kind: str, order: str = "reorder", **more: Any) -> dict[str, Any]:
    weight = {"dtype": dtype, "qscheme": kind, "ch_axis": 0 if kind == "per_channel" else -1, "group_size": GROUP}
    options = {"quant_method": "quark", "global_quant_config": {"weight": weight, "input_tensors": None}}
    return options | {"export": {"pack_method": order}, "exclude": ["lm_head"]} | more


def write(folder: Path, tensors: Tensors, options: dict[str, Any]) -> Path:
    """One layer, "a"."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"quantization_config": options}))
    named = {f"a.{name}": tensor.contiguous() for name, tensor in tensors.items()}
    save_file(named | {"norm.weight": torch.ones(4)}, folder / "model.safetensors")
    return folder


def read(folder: Path) -> QuantizedLayer:
    (record,) = (record for record in wo.load_checkpoint(folder) if isinstance(record, QuantizedLayer))
    return record


def words(values: torch.Tensor, order: str) -> torch.Tensor:
    """Values of 4 bits [rows, columns] -> int32 [rows, columns / 8]; the last word is filled up with 0."""
    rows = []
    for row in values.tolist():
        padded = row + [0] * (-len(row) % 8)
        packed = []
        for begin in range(0, len(padded), 8):
            word = 0
            for place, column in enumerate(ORDER if order == "reorder" else range(8)):
                word |= (padded[begin + column] & 15) << (4 * place)
            packed.append(word - (1 << 32) if word >= 1 << 31 else word)
        rows.append(packed)
    return torch.tensor(rows, dtype=torch.int32)


def integers(
    dtype: str, kind: str, g: torch.Generator, order: str = "reorder", has_zeros: bool = True, n: int = N
) -> tuple[Tensors, torch.Tensor]:
    """(the tensors of a layer, its weight [K, N] in fp64)."""
    bits, low = int(dtype[-1]), 0 if dtype.startswith("u") else -(1 << int(dtype[-1]) - 1)
    groups = {"per_group": K // GROUP, "per_channel": 1, "per_tensor": 1}[kind]
    q = torch.randint(low, low + (1 << bits), (K, n), generator=g)
    zeros = (
        torch.randint(low, low + (1 << bits), (groups, n), generator=g) if has_zeros else torch.zeros(groups, n).long()
    )
    scales = (torch.rand(groups, n, generator=g) + 0.1).bfloat16()
    if kind == "per_tensor":
        zeros, scales = zeros[:, :1].expand(1, n), scales[:, :1].expand(1, n)
    w = scales.double().repeat_interleave(K // groups, 0) * (q - zeros.repeat_interleave(K // groups, 0))

    def stored(values: torch.Tensor) -> torch.Tensor:
        return words(values, order) if bits == 4 else values.to(torch.int8 if low else torch.uint8)

    if kind == "per_group":
        return {"weight": stored(q), "weight_scale": scales, "weight_zero_point": stored(zeros)}, w
    tensors = {"weight": stored(q.t()), "weight_scale": scales[0], "weight_zero_point": stored(zeros)[0]}
    if kind == "per_tensor":
        whole = torch.int32 if bits == 4 else tensors["weight"].dtype
        tensors |= {"weight_scale": scales[0, 0], "weight_zero_point": zeros[0, 0].to(whole)}
    return tensors, w


@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize("order", ["reorder", "order"])
@pytest.mark.parametrize("kind", ["per_group", "per_channel", "per_tensor"])
@pytest.mark.parametrize("dtype", ["int4", "uint4", "int8", "uint8"])
def test_integers(
    dtype: str, kind: str, order: str, has_zeros: bool, tmp_path: Path, generator: torch.Generator
) -> None:
    tensors, w = integers(dtype, kind, generator, order, has_zeros)
    record = read(write(tmp_path / "model", tensors | {"bias": torch.ones(N)}, config(dtype, kind, order)))
    assert torch.equal(record.dequantize().double(), w)
    assert record.weight.format == f"int{dtype[-1]}" and record.bias is not None
    if not has_zeros and not dtype.startswith("u"):
        assert record.zeros is None
        del tensors["weight_zero_point"]
        assert torch.equal(read(write(tmp_path / "none", tensors, config(dtype, kind, order))).dequantize().double(), w)


def test_columns_that_fill_no_word(tmp_path: Path, generator: torch.Generator) -> None:
    tensors, w = integers("uint4", "per_group", generator, n=13)
    assert tensors["weight"].shape == (K, 2)
    assert torch.equal(read(write(tmp_path / "model", tensors, config("uint4", "per_group"))).dequantize().double(), w)


@pytest.mark.parametrize(("kind", "size", "block"), [("per_group", GROUP, (1, GROUP)), ("per_block", [8, 16], (8, 16))])
def test_fp8_in_blocks(
    kind: str, size: Any, block: tuple[int, int], tmp_path: Path, generator: torch.Generator
) -> None:
    q = torch.randn(N, K, generator=generator).to(torch.float8_e4m3fn)
    scale = torch.rand(N // block[0], K // block[1], generator=generator)
    options = config("fp8_e4m3", kind)
    options["global_quant_config"]["weight"] |= {"block_size": size if kind == "per_block" else None}
    record = read(write(tmp_path / "model", {"weight": q, "weight_scale": scale}, options))
    expected = q.float() * scale.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    assert torch.equal(record.dequantize(), expected.t())


def test_layers_with_a_config_of_their_own(tmp_path: Path, generator: torch.Generator) -> None:
    tensors, w = integers("int8", "per_channel", generator)
    own = {"b*": {"weight": None}, "a*": config("int8", "per_channel")["global_quant_config"]}
    options = config("uint4", "per_group", layer_quant_config=own)
    assert torch.equal(read(write(tmp_path / "model", tensors, options)).dequantize().double(), w)
    options["layer_quant_config"] = {"a*": {"weight": None}}
    with pytest.raises(ValueError, match=r"a\.weight: expected a dense layer, as the config says, got a quantized one"):
        read(write(tmp_path / "model", tensors, options))


@pytest.mark.parametrize("name", ["fp8", "mxfp4", "uint4", "int4", "uint8"])
def test_samples(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Scales of activations and of a KV cache are in quark_fp8."""
    assert command.main(["inspect", str(HERE / f"quark_{name}")]) == 0
    out = capsys.readouterr().out
    assert "quark (from config.json)" in out and "14 quantized layers" in out
    assert f" {name.removeprefix('u')} " in out


G = torch.Generator().manual_seed(0)
GROUPS = integers("uint4", "per_group", G)[0]
CHANNELS = integers("int8", "per_channel", G)[0]
U4, I8 = config("uint4", "per_group"), config("int8", "per_channel")


def with_weight(**change: Any) -> dict[str, Any]:
    return U4 | {"global_quant_config": {"weight": U4["global_quant_config"]["weight"] | change}}


WRONG: dict[str, tuple[Tensors, dict[str, Any], str]] = {
    "dtype": (GROUPS, with_weight(dtype="int3"), "config.json: global_quant_config: weight: dtype: expected fp8_e4m3,"),
    "no dtype": (GROUPS, with_weight(dtype=None), "global_quant_config: weight: dtype: .*got None"),
    "scheme": (GROUPS, with_weight(qscheme="per_row"), "weight: qscheme: expected one of per_tensor, .*'per_row'"),
    "blocks of integers": (GROUPS, with_weight(qscheme="per_block"), "weight: qscheme: expected one of .*'per_block'"),
    "axis": (CHANNELS, with_weight(qscheme="per_channel", ch_axis=1), "weight: ch_axis: expected 0, .*got 1"),
    "no group": (GROUPS, with_weight(group_size=None), "weight: group_size: expected 1 to .*got None"),
    "large group": (GROUPS, with_weight(group_size=10**40), "weight: group_size: expected 1 to 2.31 - 1, got 1000"),
    "fp4": (GROUPS, with_weight(dtype="fp4", scale_format="e4m3"), "weight: scale_format: expected groups of 32 with"),
    "no blocks": (GROUPS, with_weight(dtype="fp8_e4m3", qscheme="per_block"), "block_size: expected two sizes for per"),
    "several": (GROUPS, U4 | {"global_quant_config": {"weight": [{}]}}, "global_quant_config: weight: expected dict"),
    "of a layer": (GROUPS, U4 | {"layer_quant_config": {"a": {"weight": {"dtype": "x"}}}}, "layer_quant_config.a: wei"),
    "types": (GROUPS, U4 | {"layer_type_quant_config": {"Linear": {}}}, "layer_type_quant_config: expected none"),
    "exclude": (GROUPS, U4 | {"exclude": [3]}, r"exclude: expected names and patterns, got \[3\]"),
    "excluded": (GROUPS, U4 | {"exclude": ["*a"]}, r"a\.weight: expected no quantized layer, as exclude says \('\*a'"),
    "order": (GROUPS, U4 | {"export": {"pack_method": "x"}}, "export.pack_method: expected 'reorder' or 'order', got"),
    "other groups": (GROUPS, with_weight(group_size=16), r"a\.weight_scale: expected .* \[4, 16\], got"),
    "short group": (GROUPS | {"weight_scale": torch.ones(2, N)}, with_weight(group_size=48), "weight: expected K to b"),
    "columns": (GROUPS | {"weight_scale": torch.ones(2, 99)}, U4, "weight: expected K to .* 13 columns for N = 99"),
    "bytes": (CHANNELS, U4, r"a\.weight: expected int32 \[K, N\], got int8"),
    "floats": (CHANNELS | {"weight": torch.zeros(N, K).to(torch.float8_e4m3fn)}, I8, "weight: expected int8, as the c"),
    "integers": (CHANNELS, with_weight(dtype="fp8_e4m3", qscheme="per_channel", ch_axis=0), "weight: expected float8_"),
    "zero points": (GROUPS | {"weight_zero_point": torch.zeros(2, N)}, U4, "a.weight_zero_point: expected int32"),
    "no scale": ({"weight_zero_point": GROUPS["weight_zero_point"]}, U4, "weight_zero_point needs a.weight_scale"),
    "rotated x": (GROUPS | {"input_rotation": torch.ones(2, 2)}, U4, "a.input_rotation: expected none beside the tens"),
    "bias": (GROUPS | {"bias": torch.ones(3)}, U4, r"a\.bias: expected .* \[16\]"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_is_refused(case: str, tmp_path: Path) -> None:
    tensors, options, message = WRONG[case]
    folder = write(tmp_path / "model", tensors, options)
    with pytest.raises(ValueError, match=rf"^{folder}/.*{message}"):
        open_checkpoint(folder)
