"""`python -m weightonly convert` and `inspect`: what they write and say, and runs that stop half-way."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import ROOT
from tests import formats_reference as ref
from tests.formats_layers import (
    AWQ,
    BNB,
    GPTQ,
    Layer,
    awq_layer,
    bnb_layer,
    folder_of,
    gptq_layer,
    model,
    names,
    own_codebook_layer,
)

import weightonly as wo
from weightonly import __main__ as command
from weightonly.formats import QuantizedLayer, convert, open_checkpoint
from weightonly.formats.converted import INCOMPLETE
from weightonly.formats.describe import readable
from weightonly.packing import record_code_layout
from weightonly.tensor_file import TensorWriter


def leftovers(folder: Path) -> list[Path]:
    return sorted(folder.glob(".*.tmp"))


def test_convert_and_inspect_from_the_command_line(tmp_path: Path, generator: torch.Generator) -> None:
    source = folder_of(tmp_path, gptq_layer, GPTQ, generator, shards=2)
    target = tmp_path / "packed"
    arguments = ["convert", str(source), str(target), "--arch", "sm90", "--shard-bytes", "1000"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    run = subprocess.run(
        [sys.executable, "-m", "weightonly", *arguments],
        capture_output=True, text=True, env=environment, cwd=tmp_path, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[0] == f"{target}: weightonly (from config.json)"
    config = json.loads((target / "config.json").read_text())["quantization_config"]
    assert config == {
        "quant_method": "weightonly",
        "format_version": 3,
        "arch": "sm90",
        "format": "int4",
        "group_size": 32,
        "symmetric": False,
        "act_order": True,
        "layout": "tiled",
        "layers": {},
        "modules_to_not_convert": ["embed"],
        "source": GPTQ,
    }
    files = {file.name for file in target.iterdir()} - {"config.json", "model.safetensors.index.json"}
    assert files == {f"model-{i:05}.safetensors" for i in range(1, len(files) + 1)}
    assert len(files) > 1
    assert names(target) == names(source)
    assert leftovers(tmp_path) == []


# Bytes of a layer: 512 of weights. AWQ and GPTQ: 16 of zero points and 64 of scales; GPTQ: 256 of g_idx. bitsandbytes:
# 128 or 88 of absmax, 64 of the codebook and 77 or 78 of JSON.
INSPECTED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "awq": (awq_layer, AWQ, "2  int4  32  yes  no  64 x 16  -  1.16 KiB"),
    "gptq": (gptq_layer, GPTQ, "2  int4  32  yes  yes  64 x 16  -  1.66 KiB"),
    "gptq sym": (gptq_layer, GPTQ | {"sym": True}, "2  int4  32  none  yes  64 x 16  -  1.66 KiB"),
    "bitsandbytes": (bnb_layer, BNB, "2  nf4  32  none  no  64 x 16  -  1.53 KiB"),
    "own codebook": (own_codebook_layer, BNB, "2  code4  16  none  no  64 x 16  -  1.45 KiB"),
}


@pytest.mark.parametrize("case", INSPECTED)
def test_inspect(case: str, tmp_path: Path, generator: torch.Generator, capsys: pytest.CaptureFixture[str]) -> None:
    layer, options, expected = INSPECTED[case]
    folder = folder_of(tmp_path, layer, options, generator, shards=2)
    assert command.main(["inspect", str(folder)]) == 0
    first, second, _, header, row, _, last = capsys.readouterr().out.splitlines()
    assert first == f"{folder}: {options['quant_method']} (from config.json)"
    assert second.startswith("2 quantized layers, 2 files, ")
    assert header.split() == ["layers", "format", "group", "zeros", "act", "order", "K", "x", "N", "layout", "bytes"]
    assert row.split() == expected.split()
    assert last == "2 other tensors (float32), 96 B"


def test_inspect_lists_each_kind_of_layer(
    tmp_path: Path, generator: torch.Generator, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = model(awq_layer, generator)
    for i in range(3):
        tensors |= {f"b{i}.{inside}": t for inside, t in awq_layer(generator, 128, 32).items()}
    folder = ref.write_checkpoint(tmp_path / "model", tensors, {"quantization_config": AWQ})
    convert(folder, tmp_path / "packed", arch="sm80")
    assert command.main(["inspect", str(tmp_path / "packed")]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[4:6]]
    assert [row[0] for row in rows] == ["3", "2"]
    assert {row[-3] for row in rows} == {wo.preprocess(torch.zeros(1, 1, dtype=torch.int8), arch="sm80").layout}


@pytest.mark.parametrize(("size", "text"), [(7, "7 B"), (1023, "1023 B"), (1536, "1.50 KiB"), (5 << 40, "5.00 TiB")])
def test_readable(size: int, text: str) -> None:
    assert readable(size) == text


@pytest.mark.parametrize("arguments", [["inspect", "nowhere"], ["convert", "nowhere", "out"]])
def test_errors_of_the_commands(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert command.main(arguments) == 1
    assert capsys.readouterr().err == "error: nowhere: expected the folder of a checkpoint, got none\n"
    assert list(tmp_path.iterdir()) == []


def test_a_gpu_that_is_not_there(
    tmp_path: Path,
    generator: torch.Generator,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    source = folder_of(tmp_path, awq_layer, AWQ, generator)
    assert command.main(["convert", str(source), str(tmp_path / "out"), "--device", "cuda"]) == 1
    message = "device: expected 'cpu', as no CUDA GPU is visible, got 'cuda'"
    assert capsys.readouterr().err == f"error: {message}\n"
    assert not (tmp_path / "out").exists()
    with pytest.raises(ValueError, match=f"^{message}$"):
        wo.load_checkpoint(source, device="cuda")


def test_companions_are_copied(tmp_path: Path, generator: torch.Generator) -> None:
    source = folder_of(tmp_path, awq_layer, None, generator)
    (source / "quant_config.json").write_text(json.dumps({"w_bit": 4, "q_group_size": 32}))
    (source / "config.json").write_text('{"model_type": "llama"}')
    for name in ("tokenizer.json", "tokenizer.model", "chat_template.jinja", "notes.md", "training.bin"):
        (source / name).write_text("text")
    convert(source, tmp_path / "packed")
    copied = {file.name for file in (tmp_path / "packed").iterdir()}
    assert {"tokenizer.json", "tokenizer.model", "chat_template.jinja", "config.json"} < copied
    assert not {"notes.md", "training.bin", "quant_config.json", INCOMPLETE} & copied
    config = json.loads((tmp_path / "packed" / "config.json").read_text())
    assert config["model_type"] == "llama"
    assert config["quantization_config"]["source"] == {"quant_method": "awq", "w_bit": 4, "q_group_size": 32}


def test_files_hold_about_as_much_as_asked(tmp_path: Path, generator: torch.Generator) -> None:
    source = folder_of(tmp_path, awq_layer, AWQ, generator)
    convert(source, tmp_path / "one", shard_bytes=1 << 20)
    convert(source, tmp_path / "four", shard_bytes=1)
    assert len(list((tmp_path / "one").glob("*.safetensors"))) == 1
    assert len(list((tmp_path / "four").glob("*.safetensors"))) == 4
    index = json.loads((tmp_path / "four" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {f"model-{i:05}.safetensors" for i in range(1, 5)}


def codebook_layer(g: torch.Generator) -> dict[str, torch.Tensor]:
    return own_codebook_layer(g, blocksize=32)


@pytest.mark.parametrize("arch", [None, "sm90"])
@pytest.mark.parametrize(("layer", "format"), [(bnb_layer, "nf4"), (codebook_layer, "code4")])
def test_codes_are_converted_exactly(
    layer: Layer, format: str, arch: str | None, tmp_path: Path, generator: torch.Generator
) -> None:
    """Scales stay in fp32, and the codebook is stored with the bytes."""
    source = folder_of(tmp_path, layer, BNB, generator)
    convert(source, tmp_path / "packed", arch=arch)
    checkpoint = open_checkpoint(tmp_path / "packed")
    assert checkpoint.methods == ("weightonly",)
    assert {shape.layout for shape in checkpoint.shapes.values()} == {record_code_layout(arch)}
    first = {r.name: r for r in wo.load_checkpoint(source, arch="sm80")}
    layers = [r for r in wo.load_checkpoint(tmp_path / "packed", arch="sm80") if isinstance(r, QuantizedLayer)]
    assert len(layers) == 2
    for record in layers:
        other = first[record.name]
        assert isinstance(other, QuantizedLayer)
        assert (record.weight.format, record.weight.layout) == (format, "interleaved")
        assert record.weight.code == other.weight.code
        assert torch.equal(record.weight.data, other.weight.data)
        assert record.scales.dtype == torch.float32 and torch.equal(record.scales, other.scales)


# --- runs that stop ----------------------------------------------------------------------------------------


def test_existing_target_is_left_alone(tmp_path: Path, generator: torch.Generator) -> None:
    source = folder_of(tmp_path, awq_layer, AWQ, generator)
    target = tmp_path / "packed"
    target.mkdir()
    with pytest.raises(FileExistsError, match="packed: expected a folder that does not exist yet"):
        convert(source, target)
    assert list(target.iterdir()) == [] and leftovers(tmp_path) == []


@pytest.mark.parametrize(("arguments", "message"), [({"shard_bytes": 0}, "shard_bytes"), ({"arch": "sm50"}, "arch")])
def test_wrong_arguments(arguments: dict[str, Any], message: str, tmp_path: Path, generator: torch.Generator) -> None:
    source = folder_of(tmp_path, awq_layer, AWQ, generator)
    with pytest.raises(ValueError, match=f"{message}: expected"):
        convert(source, tmp_path / "packed", **arguments)
    assert {path.name for path in tmp_path.iterdir()} == {"model"}


def test_names_that_meet_are_an_error(tmp_path: Path, generator: torch.Generator) -> None:
    """Experts of gpt-oss are `a.up_bias` in the file and `a.up.bias` after conversion, as another tensor is before."""
    tensors = {"a.up_blocks": torch.zeros(1, 64, 2, 16, dtype=torch.uint8), "a.up_bias": torch.zeros(1, 64)}
    tensors |= {"a.up_scales": torch.zeros(1, 64, 2, dtype=torch.uint8), "a.up.bias": torch.zeros(1, 64)}
    source = ref.write_checkpoint(tmp_path / "model", tensors, {"quantization_config": {"quant_method": "mxfp4"}})
    with pytest.raises(ValueError, match=r"a\.up\.bias: expected one tensor of this name after conversion, got two"):
        convert(source, tmp_path / "packed")
    assert {path.name for path in tmp_path.iterdir()} == {"model"}


@pytest.mark.parametrize("stop", [OSError("disk full"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_a_failed_run_leaves_nothing(
    stop: BaseException, tmp_path: Path, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = folder_of(tmp_path, awq_layer, AWQ, generator)
    close = TensorWriter.close
    written: list[Path] = []

    def fail_at_the_third(writer: TensorWriter) -> None:
        if len(written) == 2:
            raise stop
        written.append(writer.file)
        close(writer)

    monkeypatch.setattr(TensorWriter, "close", fail_at_the_third)
    with pytest.raises(type(stop)):
        convert(source, tmp_path / "packed", shard_bytes=1)
    assert len(written) == 2
    assert {path.name for path in tmp_path.iterdir()} == {"model"}


KILLED = """
import os, signal, sys
from pathlib import Path
import weightonly.formats
from weightonly.formats import convert, folder
from weightonly.tensor_file import TensorWriter
moment, source, target = sys.argv[1:]

def kill_at(name, owner, count):
    original, calls = getattr(owner, name), []
    def wrapped(*arguments, **keywords):
        calls.append(name)
        if len(calls) == count:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*arguments, **keywords)
    setattr(owner, name, wrapped)

kill_at(*{"shard": ("close", TensorWriter, 3), "index": ("write_json", folder, 1),
          "config": ("write_json", sys.modules["weightonly.formats.convert"], 1), "marker": ("unlink", Path, 1),
          "rename": ("publish", folder, 1)}[moment])
convert(source, target, shard_bytes=1, progress=False)
"""


@pytest.mark.parametrize("moment", ["shard", "index", "config", "marker", "rename"])
def test_a_killed_run_leaves_nothing_that_loads(moment: str, tmp_path: Path, generator: torch.Generator) -> None:
    source = folder_of(tmp_path, awq_layer, AWQ, generator)
    target = tmp_path / "packed"
    run = subprocess.run(
        [sys.executable, "-c", KILLED, moment, str(source), str(target)],
        capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=False,
    )  # fmt: skip
    assert run.returncode == -signal.SIGKILL, run.stderr
    assert not target.exists()
    (left,) = leftovers(tmp_path)
    if moment == "rename":  # all files are complete then, but still under the hidden name
        assert names(left) == names(source)
    else:
        assert list(left.glob("*.safetensors"))
        with pytest.raises(ValueError, match="expected a complete checkpoint, got one whose conversion was stopped"):
            wo.load_checkpoint(left)
    convert(source, target)  # removes what was left
    assert names(target) == names(source)
    assert leftovers(tmp_path) == []


# --- what cannot run ---------------------------------------------------------------------------------------

CANNOT_RUN: dict[str, tuple[Layer, dict[str, Any], str | None, str]] = {
    "group 16": (
        own_codebook_layer,
        BNB,
        "sm90",
        r"a\.down: group_size must be .* on a GPU; got 16, .* 2 of 2 layers .* group_size 32, 64",
    ),
    "nf4 on sm70": (
        bnb_layer,
        BNB,
        "sm70",
        r"a\.down: arch: expected sm75.* for nf4.* got 'sm70'.*quantize .* to int4",
    ),
}


@pytest.mark.parametrize("case", CANNOT_RUN)
def test_what_cannot_run_is_not_converted(
    case: str,
    tmp_path: Path,
    generator: torch.Generator,
    capsys: pytest.CaptureFixture[str],
    no_groups_of_16: None,
) -> None:
    layer, options, arch, message = CANNOT_RUN[case]
    source = folder_of(tmp_path, layer, options, generator)
    with pytest.raises(ValueError, match=message):
        convert(source, tmp_path / "packed", arch=arch)
    words = ["convert", str(source), str(tmp_path / "packed"), *([] if arch is None else ["--arch", arch])]
    assert command.main(words) == 1
    assert capsys.readouterr().err.startswith("error: a.down: ")
    assert {path.name for path in tmp_path.iterdir()} == {"model"}
    assert len(list(wo.load_checkpoint(source))) == 4  # it can still be read


# --- damaged conversions -----------------------------------------------------------------------------------


BAD_CONVERTED: dict[str, tuple[dict[str, torch.Tensor], str]] = {
    "scales": ({"a.up.scales": torch.ones(2, 15).half()}, r"a.up.\S+: expected \w+ \[.*\], got"),
    "groups": ({"a.up.scales": torch.ones(3, 16).half()}, r"a.up.qweight: expected uint8 \[16, 256\], got .*128\]"),
    "no bytes": ({"a.up.scales": torch.ones(0, 16).half()}, r"a.up.scales: expected .*\[groups, N\], got float16"),
    "zeros": (
        {"a.up.zeros": torch.ones(1, 16).half()},
        r"a.up.zeros: expected float16 \[2, 16\], got float16 \[1, 16\]",
    ),
    "perm": ({"a.up.perm": torch.ones(63).int()}, r"a.up.perm: expected int32 \[64\], got int32 \[63\]"),
    "bytes": ({"a.up.qweight": torch.ones(63).byte()}, r"a.up.qweight: expected uint8 \[16, 128\], got uint8 \[63\]"),
}


@pytest.mark.parametrize("case", BAD_CONVERTED)
def test_damaged_conversions(case: str, tmp_path: Path, generator: torch.Generator) -> None:
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    change, message = BAD_CONVERTED[case]
    convert(folder_of(tmp_path, gptq_layer, GPTQ, generator), tmp_path / "packed", arch="sm80")
    file = tmp_path / "packed" / "model-00001.safetensors"
    with safe_open(file, framework="pt") as opened:
        metadata = opened.metadata()
    save_file(load_file(file) | change, file, metadata)
    with pytest.raises(ValueError, match=rf"model-00001\.safetensors: {message}"):
        wo.load_checkpoint(tmp_path / "packed")


def test_a_permutation_is_one(tmp_path: Path, generator: torch.Generator) -> None:
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    convert(folder_of(tmp_path, gptq_layer, GPTQ, generator), tmp_path / "packed", arch="sm80")
    file = tmp_path / "packed" / "model-00001.safetensors"
    with safe_open(file, framework="pt") as opened:
        metadata = opened.metadata()
    save_file(load_file(file) | {"a.up.perm": torch.zeros(64).int()}, file, metadata)
    with pytest.raises(ValueError, match=r"a\.up\.perm: expected a permutation of 0\.\.63"):
        list(wo.load_checkpoint(tmp_path / "packed"))
