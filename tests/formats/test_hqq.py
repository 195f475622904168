"""HQQ: its numbers by a loop over the formula, the samples of the package, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests import formats_reference as ref
from tests.data import HERE
from tests.formats_layers import AWQ, K, N, awq_layer, folder_of

import weightonly as wo
from weightonly import __main__ as command
from weightonly.formats import QuantizedLayer, open_checkpoint, read_hqq

HQQ = {"quant_method": "hqq", "quant_config": {"weight_quant_params": {"nbits": 4, "group_size": 64, "axis": 1}}}
Tensors = dict[str, torch.Tensor]


def layer(g: torch.Generator, bits: int = 4, rows: int = 32, dtype: torch.dtype = torch.float16) -> Tensors:
    groups = N * K // rows
    text = torch.tensor(list(f"{bits}bit_u8".encode()), dtype=torch.uint8)
    return {
        "W_q": torch.randint(0, 256, (groups * bits // 8, rows), generator=g).to(torch.uint8),
        "scale": (torch.rand(groups, 1, generator=g) + 0.1).to(dtype),
        "zero": (torch.rand(groups, 1, generator=g) * 2**bits).to(dtype),
        "shape": torch.tensor([N, K]),
        "nbits": torch.tensor(bits, dtype=torch.int32),
        "group_size": torch.tensor(rows, dtype=torch.int32),
        "axis": torch.tensor(1, dtype=torch.int32),
        "packing": text,
        "view_as_float": torch.tensor(0, dtype=torch.uint8),
        "quant_scale": torch.tensor(0, dtype=torch.uint8),
        "encoded_state_dict": torch.tensor(1, dtype=torch.uint8),
    }


def by_the_formula(tensors: Tensors, bits: int, rows: int) -> torch.Tensor:
    """[K, N] in fp32, one number after another."""
    words, w = tensors["W_q"].view(torch.uint8).tolist(), torch.empty(N * K)
    for i in range(N * K):
        group, place = divmod(i, rows)
        if bits == 8:
            u = words[group][place]
        else:
            half = len(words)
            u = words[group][place] >> 4 if group < half else words[group - half][place] & 15
        w[i] = (u - tensors["zero"][group, 0].float()) * tensors["scale"][group, 0].float()
    return w.view(N, K).t()


@pytest.mark.parametrize("config", [HQQ, None], ids=["config", "names"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("bits", "rows"), [(4, 32), (8, 32), (4, 64), (4, 128), (8, 128)])
def test_numbers(
    bits: int, rows: int, dtype: torch.dtype, config: Any, tmp_path: Path, generator: torch.Generator
) -> None:
    """Groups of 128 run over the ends of rows of 64."""
    tensors = layer(generator, bits, rows, dtype)
    named = {f"a.{name}": tensor for name, tensor in tensors.items()} | {"norm.weight": torch.ones(4)}
    folder = ref.write_checkpoint(
        tmp_path / "model", named, None if config is None else {"quantization_config": config}
    )
    record, _ = wo.load_checkpoint(folder)
    assert isinstance(record, QuantizedLayer)
    assert torch.equal(record.dequantize(), by_the_formula(tensors, bits, rows))
    x = torch.randn(3, K, generator=generator)
    torch.testing.assert_close(record(x), x @ record.dequantize(), rtol=1e-4, atol=1e-4)


def test_words_that_are_viewed_as_floats(tmp_path: Path, generator: torch.Generator) -> None:
    tensors = layer(generator)
    floats = tensors | {"W_q": tensors["W_q"].view(torch.bfloat16), "view_as_float": torch.tensor(1)}
    for i, inside in enumerate((tensors, floats)):
        (tmp_path / str(i)).mkdir()
        folder_of(tmp_path / str(i), lambda _, inside=inside: {k: x.clone() for k, x in inside.items()}, HQQ, generator)  # type: ignore[misc]
    records = [
        r
        for i in range(2)
        for r in wo.load_checkpoint(tmp_path / str(i) / "model")
        if isinstance(r, QuantizedLayer) and r.name == "a.up"
    ]
    assert torch.equal(records[0].dequantize(), records[1].dequantize())


@pytest.mark.parametrize("name", ["hqq_int4", "hqq_int8"])
def test_samples(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["inspect", str(HERE / name)]) == 0
    out = capsys.readouterr().out
    assert "hqq (from config.json)" in out and "14 quantized layers" in out and name.removeprefix("hqq_") in out
    shapes = open_checkpoint(HERE / name).shapes
    assert shapes["model.layers.0.mlp.down_proj"].group_size == 32  # of 64, cut at the ends of rows of 96; of 32
    biases = load_file(HERE / name / "model.safetensors")
    layers = {r.name: r for r in wo.load_checkpoint(HERE / name) if isinstance(r, QuantizedLayer)}
    bias = layers["model.layers.1.self_attn.q_proj"].bias
    assert bias is not None and torch.equal(bias, biases["model.layers.1.self_attn.q_proj.bias"])


WRONG: dict[str, tuple[dict[str, torch.Tensor | None], str]] = {
    "axis 0": ({"axis": torch.tensor(0)}, r"a\.\w+\.axis: expected 1, groups along K, got 0; quantize the original"),
    "3 bits": ({"nbits": torch.tensor(3)}, r"a\.\w+\.nbits: expected 4 or 8 for HQQ, got 3"),
    "packing": ({"packing": torch.tensor([51], dtype=torch.uint8)}, r"a\.\w+\.packing: expected '4bit_u8' for 4 bits"),
    "packing of another dtype": ({"packing": torch.ones(7)}, r"a\.\w+\.packing: expected uint8 \[characters\]"),
    "quantized scales": ({"quant_scale": torch.tensor(1)}, r"a\.\w+\.quant_scale: expected 0, scales and zeros that"),
    "groups": ({"group_size": torch.tensor(0)}, r"a\.\w+\.group_size: expected at least 1, got 0"),
    "groups that do not fit": (
        {"group_size": torch.tensor(33)},
        r"a\.\w+\.group_size: expected an even number of whole",
    ),
    "groups of other tensors": ({"group_size": torch.tensor(64)}, r"a\.\w+\.W_q: expected uint8 \[8, 64\]"),
    "size": ({"shape": torch.tensor([N, 0])}, r"a\.\w+\.shape: expected N, K >= 1, got 16, 0"),
    "size of another layer": ({"shape": torch.tensor([N, 2 * K])}, r"a\.\w+\.W_q: expected uint8 \[32, 32\]"),
    "a row of scales": ({"scale": torch.ones(1, N * K // 32)}, r"a\.\w+\.scale: expected .* \[32, 1\]"),
    "zeros of another dtype": ({"zero": torch.ones(32, 1).int()}, r"a\.\w+\.zero: expected float16 or"),
    "words of another dtype": ({"W_q": torch.ones(16, 32).int()}, r"a\.\w+\.W_q: expected uint8 \[16, 32\]"),
    "a number that is a row": ({"nbits": torch.tensor([4])}, r"a\.\w+\.nbits: expected uint8 or .* \[\], got"),
    "bias": ({"bias": torch.ones(N + 1)}, r"a\.\w+\.bias: expected .* \[16\], got float32 \[17\]"),
    "scales missing": ({"scale": None}, r"a\.(\w+)\.W_q needs a\.\1\.scale, which is not in the checkpoint"),
    "words missing": ({"W_q": None}, r"a\.(\w+)\.encoded_state_dict needs a\.\1\.W_q"),
    "two methods": (
        {"qweight": torch.ones(8, 16).int()},
        r"a\.\w+\.qweight: expected floats, got .* it looks like AWQ or GPTQ",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_refused(case: str, tmp_path: Path, generator: torch.Generator) -> None:
    changes, message = WRONG[case]

    def wrong(g: torch.Generator) -> Tensors:
        return {name: x.clone() for name, x in (layer(g) | changes).items() if x is not None}

    folder = folder_of(tmp_path, wrong, HQQ, generator)
    with pytest.raises(ValueError, match=message):
        wo.load_checkpoint(folder)


def test_two_methods_in_two_layers(tmp_path: Path, generator: torch.Generator) -> None:
    tensors = {f"a.{name}": x for name, x in layer(generator).items()}
    tensors |= {f"b.{name}": x for name, x in awq_layer(generator).items()}
    for i, (options, message) in enumerate(
        ((HQQ, "b.qweight: .* it looks like AWQ"), (AWQ, "a.W_q: .* it looks like HQQ"))
    ):
        folder = ref.write_checkpoint(tmp_path / str(i), tensors, {"quantization_config": options})
        with pytest.raises(ValueError, match=message):
            wo.load_checkpoint(folder)


def test_bits() -> None:
    with pytest.raises(ValueError, match="bits: expected 4 or 8 for HQQ, got 2"):
        read_hqq(torch.ones(1, 1), torch.ones(1, 1), torch.ones(1, 1), shape=(1, 1), bits=2, group_size=1)


@pytest.mark.parametrize(("method", "cure"), [("eetq", "format='int8'")])
def test_methods_that_are_not_read_say_the_way_round(
    method: str, cure: str, tmp_path: Path, generator: torch.Generator
) -> None:
    folder = folder_of(tmp_path, layer, {"quant_method": method}, generator)
    with pytest.raises(ValueError, match=rf"config\.json: quant_method: expected one of .*, got '{method}'; .*{cure}"):
        wo.load_checkpoint(folder)
