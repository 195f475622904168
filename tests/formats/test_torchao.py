"""torchao: its numbers by the formulas of its classes, the samples of the package, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.data import HERE
from tests.formats_layers import GROUP, K, N, awq_layer

import weightonly as wo
from weightonly import __main__ as command
from weightonly.formats import QuantizedLayer, open_checkpoint

Tensors = dict[str, torch.Tensor]
INT4 = {"_type": "Int4Tensor", "_data": {"block_size": [1, GROUP], "shape": [N, K]}}
TILES = {"_type": "Int4TilePackedTo4dTensor", "_data": {"block_size": [1, GROUP], "shape": [16, 256]}}
INT8 = {"_type": "Int8Tensor", "_data": {"block_size": [1, K]}}
FLOAT8 = {"_type": "Float8Tensor", "_data": {"block_size": [1, K]}}
INTX: dict[str, Any] = {
    "_type": "IntxUnpackedToInt8Tensor",
    "_data": {"block_size": [1, GROUP], "target_dtype": {"_type": "torch.dtype", "_data": "int4"}},
}


def write(folder: Path, tensors: Tensors, metadata: Any) -> Path:
    """One layer, "a". metadata: of its weight, an object or text."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "torchao"}}))
    text = metadata if isinstance(metadata, str) else json.dumps(metadata)
    named = {f"a.{name}": tensor.contiguous() for name, tensor in tensors.items()} | {"norm.weight": torch.ones(4)}
    save_file(named, folder / "model.safetensors", {"format": "pt", "a.weight": text, "tensor_names": '["a.weight"]'})
    return folder


def read(folder: Path) -> QuantizedLayer:
    (record,) = (record for record in wo.load_checkpoint(folder) if isinstance(record, QuantizedLayer))
    return record


def int4(g: torch.Generator) -> Tensors:
    return {
        "_weight_qdata": torch.randint(-128, 128, (N, K // 2), generator=g).to(torch.int8),
        "_weight_scale": (torch.rand(K // GROUP, N, generator=g) + 0.1).bfloat16(),
        "_weight_zero_point": torch.randn(K // GROUP, N, generator=g).bfloat16(),
    }


def int8(g: torch.Generator, rows: int = K, low: int = -128, high: int = 127) -> Tensors:
    return {
        "_weight_qdata": torch.randint(low, high + 1, (N, K), generator=g).to(torch.int8),
        "_weight_scale": torch.rand(N, K // rows, generator=g) + 0.1,
    }


def float8(block: tuple[int, int] = (1, K)) -> Tensors:
    g = torch.Generator().manual_seed(3)
    scale = torch.rand(N // block[0], K // block[1], generator=g) + 0.1
    return {
        "_weight_qdata": torch.randn(N, K, generator=g).to(torch.float8_e4m3fn),
        "_weight_scale": scale.reshape(()) if block == (N, K) else scale,
    }


def zero_point(g: torch.Generator, rows: int = K) -> Tensors:
    return {"_weight_zero_point": torch.randint(-8, 8, (N, K // rows), generator=g).to(torch.int8)}


def test_int4(tmp_path: Path, generator: torch.Generator) -> None:
    tensors = int4(generator)
    q = [
        [(byte >> 4 * half & 15 ^ 8) - 8 for byte in row for half in (0, 1)]
        for row in tensors["_weight_qdata"].tolist()
    ]
    scale, shift = (tensors[f"_weight_{x}"].float().repeat_interleave(GROUP, 0) for x in ("scale", "zero_point"))
    expected = scale * torch.tensor(q).t() + shift
    record = read(write(tmp_path / "model", tensors | {"bias": torch.ones(N)}, INT4))
    torch.testing.assert_close(record.dequantize(), expected, rtol=1e-6, atol=1e-6)
    assert record.weight.format == "int4" and record.bias is not None and torch.equal(record.bias, torch.ones(N))
    tensors["_weight_zero_point"].zero_()
    record = read(write(tmp_path / "symmetric", tensors, INT4))
    assert record.zeros is None and torch.equal(record.dequantize(), expected - shift)


def test_tiles_of_pytorch(tmp_path: Path) -> None:
    """What an H100 made of these numbers, and its product with the unit matrix, in bfloat16."""
    golden = load_file(HERE / "tinygemm.safetensors")
    n, k = torch.arange(16)[:, None], torch.arange(256)
    u = (n * 7 + k * k * 3 + k // 5 + n * k) % 16
    tensors = {f"_weight_{name}": golden[name] for name in ("qdata", "scale_and_zero")}
    record = read(write(tmp_path / "model", tensors, TILES))
    assert torch.equal(wo.unpack(record.weight).t(), u.to(torch.int8) - 8)
    torch.testing.assert_close(record.dequantize(), golden["product"].float(), rtol=2**-8, atol=1e-2)


def test_tiles_that_are_padded(tmp_path: Path) -> None:
    golden = load_file(HERE / "tinygemm.safetensors")
    tensors = {f"_weight_{name}": golden[name] for name in ("qdata", "scale_and_zero")}
    whole = read(write(tmp_path / "whole", tensors, TILES)).dequantize()
    part = read(write(tmp_path / "part", tensors, TILES | {"_data": {"block_size": [1, GROUP], "shape": [11, 160]}}))
    assert torch.equal(part.dequantize(), whole[:160, :11])


@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize("block", [[1, K], [1, GROUP], [N, K]], ids=str)
def test_int8(block: list[int], has_zeros: bool, tmp_path: Path, generator: torch.Generator) -> None:
    tensors = int8(generator, block[1]) | (zero_point(generator, block[1]) if has_zeros else {})
    tensors |= {name: x[: N // block[0]] for name, x in tensors.items() if "qdata" not in name}
    scale, zero = (
        tensors.get(f"_weight_{x}", torch.zeros(1, K // block[1])).float().repeat_interleave(block[1], 1)
        for x in ("scale", "zero_point")
    )
    q = tensors["_weight_qdata"].float()
    kwargs = {"act_quant_kwargs": {"_type": "QuantizeTensorToInt8Kwargs", "_data": {}}}  # of x: not quantized here
    record = read(write(tmp_path / "model", tensors, INT8 | {"_data": {"block_size": block} | kwargs}))
    assert torch.equal(record.dequantize(), (scale * (q - zero)).expand(N, K).t())
    assert (record.zeros is not None) == bool(zero.any()) and record.weight.format == "int8"


@pytest.mark.parametrize(("target", "bits"), [("int2", 4), ("int4", 4), ("int6", 8), ("int8", 8)])
@pytest.mark.parametrize("zeros", [torch.int8, torch.bfloat16], ids=str)
def test_intx(target: str, bits: int, zeros: torch.dtype, tmp_path: Path, generator: torch.Generator) -> None:
    most = 1 << (int(target[3:]) - 1)
    tensors = int8(generator, GROUP, -most, most - 1)
    tensors["_weight_zero_point"] = zero_point(generator, GROUP)["_weight_zero_point"].to(zeros)
    fields = INTX["_data"] | {"target_dtype": {"_type": "torch.dtype", "_data": target}}
    record = read(write(tmp_path / "model", tensors, INTX | {"_data": fields}))
    scale, zero = (tensors[f"_weight_{x}"].float().repeat_interleave(GROUP, 1) for x in ("scale", "zero_point"))
    assert torch.equal(record.dequantize(), (scale * (tensors["_weight_qdata"] - zero)).t())
    assert record.weight.format == f"int{bits}"


@pytest.mark.parametrize("block", [(1, K), (8, GROUP), (N, K)], ids=str)
def test_float8(block: tuple[int, int], tmp_path: Path) -> None:
    tensors = float8(block)
    size = {} if block == (N, K) else {"block_size": list(block)}
    record = read(write(tmp_path / "model", tensors, {"_type": "Float8Tensor", "_data": size}))
    scale = tensors["_weight_scale"].reshape(N // block[0], -1).repeat_interleave(block[0], 0)
    expected = tensors["_weight_qdata"].float() * scale.repeat_interleave(block[1], 1)
    assert torch.equal(record.dequantize(), expected.t()) and record.weight.format == "fp8"


@pytest.mark.parametrize("name", ["int4", "int8", "intx4", "tiles"])
def test_samples(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["inspect", str(HERE / f"torchao_{name}")]) == 0
    out = capsys.readouterr().out
    assert "torchao (from config.json)" in out and f"{4 if name == 'tiles' else 14} quantized layers" in out
    assert ("int8" if name == "int8" else "int4") in out


def without(tensors: Tensors, name: str) -> Tensors:
    return {key: x for key, x in tensors.items() if key != name}


def changed(fields: dict[str, Any], **data: Any) -> dict[str, Any]:
    return fields | {"_data": fields["_data"] | data}


G = torch.Generator().manual_seed(0)
FAR = {"_weight_scale": torch.full((2, N), 1e-6), "_weight_zero_point": torch.ones(2, N)}
WRONG: dict[str, tuple[Tensors, Any, str]] = {
    "NVFP4": (int8(G), {"_type": "NVFP4Tensor", "_data": {}}, "one of Int4Tensor, .*'NVFP4Tensor"),
    "integers for float8": (int8(G), {"_type": "Float8Tensor", "_data": {}}, r"qdata: expected float8_e4m3fn \[N, K\]"),
    "zeros of float8": (float8() | zero_point(G), FLOAT8, "_zero_point: expected none for Float8Tensor, got it"),
    "blocks of float8": (float8(), changed(FLOAT8, block_size=[1, 48]), "block_size: expected sizes that divide N, K"),
    "scales of float8": (float8(), changed(FLOAT8, block_size=[1, GROUP]), r"_scale: expected .* \[16, 2\], got"),
    "XPU": (int4(G), INT4 | {"_type": "Int4PlainInt32Tensor"}, "got 'Int4PlainInt32Tensor'; quantize the original"),
    "no class": (int4(G), {}, "_type: expected one of Int4Tensor, .*got None"),
    "no JSON": (int4(G), "{", r"metadata of a\.weight: "),
    "a list": (int4(G), [], "metadata of a.weight: expected a JSON object, got"),
    "blocks": (int4(G), changed(INT4, block_size=[GROUP]), "block_size: expected two sizes, got"),
    "a block of 0": (int4(G), changed(INT4, block_size=[1, 0]), "block_size: expected two sizes, got"),
    "a block beyond K": (int4(G), changed(INT4, block_size=[1, 48]), "expected sizes that divide N, K = 16, 64"),
    "blocks of N": (int4(G), changed(INT4, block_size=[2, GROUP]), "block_size: expected sizes that divide"),
    "blocks of other tensors": (int4(G), changed(INT4, block_size=[1, 64]), r"_weight_scale: expected .* \[1, 16\]"),
    "size": (int4(G), changed(INT4, shape=[N, 2 * K]), r"_weight_qdata: expected int8 \[16, 64\], got int8 \[16, 32\]"),
    "size of tiles": ({"_weight_qdata": torch.ones(1, 1, 32, 4).int(), "_weight_scale_and_zero": torch.ones(4, 8, 2)},
                      TILES, r"_weight_qdata: expected tiles of 8 x 128 for N, K = 16, 256"),
    "scales of tiles": ({"_weight_qdata": torch.ones(2, 2, 32, 4).int(), "_weight_scale_and_zero": torch.ones(8, 16)},
                        TILES, r"_weight_scale_and_zero: expected .* \[8, 16, 2\]"),
    "target": (int8(G, GROUP) | zero_point(G, GROUP),
               changed(INTX, target_dtype={"_data": "uint4"}), "target_dtype: expected int1"),
    "no scales": (without(int4(G), "_weight_scale"), INT4, "_weight_scale: expected it for Int4Tensor, got none"),
    "no zeros": (without(int4(G), "_weight_zero_point"), INT4, "_weight_zero_point: expected it for Int4Tensor"),
    "no words": (without(int4(G), "_weight_qdata"), INT4, "_weight_zero_point needs a._weight_qdata, which"),
    "scaled x": (int8(G) | {"_weight_act_pre_scale": torch.ones(1)}, INT8, "_act_pre_scale: expected none for"),
    "words of another dtype": (int4(G) | {"_weight_qdata": torch.ones(N, K // 8).int()}, INT4, "qdata: expected int8"),
    "integer zeros": (int4(G) | {"_weight_zero_point": torch.ones(2, N).int()}, INT4, "_zero_point: expected float16"),
    "bias": (int8(G) | {"bias": torch.ones(N, 1)}, INT8, r"bias: expected .* \[16\]"),
    "values beyond 4 bits": (int8(G, GROUP) | zero_point(G, GROUP), INTX, "values of target_dtype, within -8 .. 7"),
    "far from 0": (int4(G) | FAR, INT4, "_weight_qdata: expected zero points within 65504 scales"),
    "two methods": (int4(G) | awq_layer(G), INT4, "expected .* it looks like"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_is_refused(case: str, tmp_path: Path) -> None:
    tensors, metadata, message = WRONG[case]
    folder = write(tmp_path / "model", tensors, metadata)
    with pytest.raises(ValueError, match=rf"model\.safetensors: a\..*{message}"):
        [*wo.load_checkpoint(folder)]


def test_experts_are_no_linear_layers(tmp_path: Path, generator: torch.Generator) -> None:
    """Weights of another name than "weight"."""
    tensors = int8(generator) | {"_gate_up_proj_qdata": torch.ones(2, N, K, dtype=torch.int8)}
    with pytest.raises(ValueError, match=r"a\._gate_up_proj_qdata: expected"):
        open_checkpoint(write(tmp_path / "model", tensors, INT8))
