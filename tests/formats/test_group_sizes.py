"""The group size of the config counts: a short last group is read as it is meant, and no count of groups is guessed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests import formats_reference as ref
from tests.formats_layers import AWQ, GPTQ

import weightonly as wo
from weightonly.formats import QuantizedLayer, convert, open_checkpoint, read_awq, read_compressed_tensors, read_gptq
from weightonly.formats.parts import read_part

K, N = 768, 64


def ct(group_size: int | None, bits: int = 4, **weights: Any) -> dict[str, Any]:
    args = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": "group", "group_size": group_size} | weights
    groups = {"group_0": {"targets": ["Linear"], "weights": args}}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}


def ct_layer(groups: int, bits: int = 4, k: int = K) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """(tensors, scales [N, groups]); each weight is 1."""
    u = torch.full((N, k), (1 << bits - 1) + 1)
    scales = torch.arange(1, 1 + N * groups).view(N, groups).half() / 64
    packed = ref.pack_rows(u.t().numpy(), bits).t().contiguous()
    return {"weight_packed": packed, "weight_scale": scales, "weight_shape": torch.tensor([N, k])}, scales


def gptq_layer(groups: int, k: int = K) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    scales = torch.arange(1, 1 + N * groups).view(N, groups).half() / 64
    qweight, qzeros = (
        ref.pack_rows(torch.full((k, N), 9).numpy(), 4),
        ref.pack_columns(torch.full((groups, N), 7).numpy(), 4),
    )
    return {"qweight": qweight, "qzeros": qzeros, "scales": scales.t().contiguous()}, scales


def awq_layer(groups: int, k: int = K) -> dict[str, torch.Tensor]:
    scales = torch.arange(1, 1 + N * groups).view(groups, N).half() / 64
    return {"qweight": ref.awq_words(torch.full((k, N), 9).numpy()), "scales": scales} | {
        "qzeros": ref.awq_words(torch.full((groups, N), 8).numpy())
    }


def write(path: Path, layer: dict[str, torch.Tensor], options: dict[str, Any] | None) -> Path:
    tensors = {f"a.{name}": tensor for name, tensor in layer.items()}
    return ref.write_checkpoint(path / "model", tensors, options and {"quantization_config": options})


def only(folder: Path) -> QuantizedLayer:
    [record] = wo.load_checkpoint(folder, arch="cpu", progress=False)
    assert isinstance(record, QuantizedLayer)
    return record


def spread(scales: torch.Tensor, rows: int, k: int = K) -> torch.Tensor:
    """[K, N]: the scale of each row of a weight of ones."""
    return scales.float()[:, torch.arange(k) // rows].t()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(
    ("rows", "groups", "cut"), [(512, 2, 256), (640, 2, 128), (320, 3, 64), (500, 2, 4), (1024, 1, K)]
)
def test_a_short_last_group_of_compressed_tensors(rows: int, groups: int, cut: int, bits: int, tmp_path: Path) -> None:
    layer, scales = ct_layer(groups, bits)
    folder = write(tmp_path, layer, ct(rows, bits))
    assert open_checkpoint(folder).shapes["a"].group_size == cut
    assert torch.equal(only(folder).dequantize(), spread(scales, rows))
    weight = read_compressed_tensors(**layer, bits=bits, group_size=rows)
    assert torch.equal(weight.dequantize(), spread(scales, rows))


@pytest.mark.parametrize("options", [ct(512), GPTQ | {"group_size": 512, "desc_act": False}], ids=["ct", "gptq"])
def test_routes_of_a_short_last_group(options: dict[str, Any], tmp_path: Path) -> None:
    layer, scales = (ct_layer if "format" in options else gptq_layer)(2)
    folder = write(tmp_path, layer, options)
    convert(folder, tmp_path / "packed", arch="cpu", progress=False)
    assert torch.equal(only(tmp_path / "packed").dequantize(), spread(scales, 512))
    checkpoint = open_checkpoint(folder)
    for rows in ((0, 256), (256, 768), (512, 768)):
        part = read_part(checkpoint, "a", "cpu", rows, [(0, 32)])
        assert torch.equal(part.dequantize(), spread(scales, 512)[slice(*rows), :32])


@pytest.mark.parametrize("rows", [64, 128])
def test_groups_of_gptq(rows: int, tmp_path: Path) -> None:
    layer, scales = gptq_layer(-(-320 // rows), 320)
    folder = write(tmp_path, layer, GPTQ | {"group_size": rows, "desc_act": False})
    assert torch.equal(only(folder).dequantize(), spread(scales, rows, 320))


WRONG: dict[str, tuple[dict[str, torch.Tensor], dict[str, Any] | None, str]] = {
    "ct: a count that the group size does not give": (
        ct_layer(3)[0],
        ct(512),
        "expected 2 groups of 512 rows for K = 768",
    ),
    "ct: a group size that is not said": (ct_layer(2)[0], ct(None), "K = 768 a power of two rows in each.*got 2"),
    "ct: no config": (
        ct_layer(2)[0],
        None,
        "K = 768 a power of two rows in each, or a config with the group_size, got 2",
    ),
    "ct: a count that does not divide K": (ct_layer(5)[0], None, "K = 768 a power of two rows in each.*got 5"),
    "awq: a short group": (
        awq_layer(2),
        AWQ | {"group_size": 512},
        "expected groups of 512 rows as the config says, got 384",
    ),
    "awq: a group size that is not said": (awq_layer(2), AWQ | {"group_size": None}, "K = 768 a power of two.*got 2"),
    "awq: no config": (awq_layer(2), None, "K = 768 a power of two rows in each.*got 2"),
    "gptq: a count that the group size does not give": (
        gptq_layer(3)[0],
        GPTQ | {"group_size": 512, "desc_act": False},
        "expected 2 groups of 512 rows for K = 768, got 3",
    ),
    "gptq: a group size that is not said": (
        gptq_layer(2)[0],
        GPTQ | {"group_size": None, "desc_act": False},
        "K = 768 a power of two rows in each.*got 2",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_groups_that_are_refused(case: str, tmp_path: Path) -> None:
    layer, options, message = WRONG[case]
    with pytest.raises(ValueError, match=rf"a\.(weight_scale|scales): .*{message}"):
        open_checkpoint(write(tmp_path, layer, options))


def test_two_group_sizes_of_one_count(tmp_path: Path) -> None:
    options = ct(512)
    options["config_groups"]["group_1"] = ct(384)["config_groups"]["group_0"]
    with pytest.raises(
        ValueError, match=r"weight_scale: expected one group_size for it in the config, got \[384, 512\]"
    ):
        open_checkpoint(write(tmp_path, ct_layer(2)[0], options))


@pytest.mark.parametrize(
    ("layer", "options"),
    [(ct_layer(6)[0], None), (ct_layer(1)[0], None), (awq_layer(6), None)],
    ids=["ct", "one", "awq"],
)
def test_powers_of_two_need_no_config(layer: dict[str, torch.Tensor], options: None, tmp_path: Path) -> None:
    groups = 1 if "weight_scale" in layer and layer["weight_scale"].shape[1] == 1 else 6
    assert open_checkpoint(write(tmp_path, layer, options)).shapes["a"].group_size == K // groups


def test_readers_do_not_guess() -> None:
    cases: list[tuple[Any, dict[str, Any]]] = [
        (read_awq, awq_layer(2)),
        (read_compressed_tensors, ct_layer(2)[0]),
        (read_gptq, gptq_layer(2)[0]),
    ]
    for read, layer in cases:
        with pytest.raises(ValueError, match="expected a number of groups that gives K = 768 a power of two"):
            read(**layer)
        read(**layer, group_size=384)
