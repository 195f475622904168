"""`weightonly quantize`: its options, what it refuses, and how it ends."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests import ROOT
from tests.hf_models import llama, logits, quantized, saved, write_model

import weightonly as wo
from weightonly import __main__ as command
from weightonly.hf import WeightOnlyConfig, load_model
from weightonly.nn.recipe import Recipe


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense Llama, with files of a tokenizer that nobody opens."""
    folder = saved(tmp_path_factory.mktemp("model") / "dense", llama)
    (folder / "tokenizer.json").write_text('{"a": 1}')
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


def test_options_reach_the_folder(dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = (
        "--format int4 --group-size 32 --asymmetric --layer down_proj=int8:64 --layer *.0.*.o_proj=nf4 --skip k_proj"
    )
    more = "--dtype bfloat16 --arch sm90 --shard-size 100K"
    assert command.main(["quantize", str(dense), str(tmp_path / "out"), *words.split(), *more.split()]) == 0
    out, error = capsys.readouterr()
    assert "MB before" in out and "%" not in error  # no bar where there is no terminal
    assert re.search(r"down_proj +2 layers +int8, groups of 64, zero points +error 0\.\d\d%", out)
    assert re.search(r"k_proj.*\(Linear: skip\)", out)
    shapes = wo.formats.open_checkpoint(tmp_path / "out").shapes
    kinds = {name.removeprefix("model.layers."): (s.format, s.group_size, s.symmetric) for name, s in shapes.items()}
    assert kinds["1.mlp.down_proj"] == ("int8", 64, False) and kinds["1.self_attn.o_proj"] == ("int4", 32, False)
    assert kinds["0.self_attn.o_proj"] == ("nf4", 64, True) and "0.self_attn.k_proj" not in kinds
    assert {shape.layout for shape in shapes.values() if shape.format != "nf4"} == {"tiled"}
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (tmp_path / "out" / name).read_text() == (dense / name).read_text()
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    assert load_model(tmp_path / "out").dtype == torch.bfloat16


@pytest.mark.parametrize("option", ["--whole-zeros", "--asymmetric"])
def test_whole_zeros_can_be_exported(
    option: str, dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--group-size", "32", "--dtype", "float16", "--arch", "cpu", option]
    assert command.main(["quantize", str(dense), str(tmp_path / "ours"), *words]) == 0
    assert not any(shape.symmetric for shape in wo.formats.open_checkpoint(tmp_path / "ours").shapes.values())
    for to in ("gptq", "awq", "compressed-tensors"):
        failed = command.main(["export", str(tmp_path / "ours"), str(tmp_path / to), "--to", to])
        assert failed == (option == "--asymmetric")
        assert failed == ("--whole-zeros" in capsys.readouterr().err)


def test_one_default_for_all() -> None:
    by_command, by_config = command._parser().parse_args(["quantize", "a", "b"]), WeightOnlyConfig().recipe(None)
    assert (by_command.format, by_command.group_size, by_command.asymmetric) == (None, None, False)
    assert by_config == Recipe.of(None, None, None, True, None, None)
    assert (by_config.format, by_config.group_size, by_config.symmetric) == ("int4", 128, True)


def test_defaults_and_an_empty_folder(dense: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    assert command.main(["quantize", str(dense), str(tmp_path / "out"), "--group-size", "64", "--arch", "cpu"]) == 0
    assert torch.equal(logits(load_model(tmp_path / "out")), logits(quantized(dense, arch="cpu")))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


WRONG: dict[str, tuple[str, str]] = {
    "a format": ("{dense} {out} --format int3", "format: expected one of int4, .*, got 'int3'"),
    "a group size": ("{dense} {out} --group-size 100", "group_size must be .*100"),
    "a group size of a format": ("{dense} {out} --format mxfp4 --group-size 64", "group_size.*64"),
    "zero points of codes": ("{dense} {out} --format nf4 --asymmetric", "symmetric: expected True for nf4"),
    "a layer's format": ("{dense} {out} --layer down_proj=int3", r"layers\['down_proj'\]: format: expected one of"),
    "a layer's group size": ("{dense} {out} --layer a=nf4:48", r"layers\['a'\]: .*48"),
    "a layer that is not there": ("{dense} {out} --layer dwn=int8", "layers: expected names of layers, got 'dwn'"),
    "skip of nothing": ("{dense} {out} --skip dwn_proj", "skip: expected names of layers, got 'dwn_proj'"),
    "only of nothing": ("{dense} {out} --only dwn_proj", "only: expected names of layers, got 'dwn_proj'"),
    "only of the head": ("{dense} {out} --only lm_head", "only: expected layers that .* 'lm_head': an output emb"),
    "only of the head, beside others": (
        "{dense} {out} --group-size 64 --only lm_head --only down_proj",
        "only: expected layers that can be quantized, got layer 'lm_head': an output embedding",
    ),
    "a dtype": ("{dense} {out} --dtype int8", "dtype: expected one of float16, bfloat16, float32, got int8"),
    "a device": ("{dense} {out} --device banana", "device: expected the name of a dev"),
    "meta": ("{dense} {out} --device meta", "device: expected one that holds numbers"),
    "an arch": ("{dense} {out} --arch sm50", "arch: expected one of cpu, sm70"),
    "a revision of a folder": ("{dense} {out} --revision main", "revision: expected none of a folder, got 'main'"),
    "no size": ("{dense} {out} --shard-size 0", "shard_bytes: expected at least 1, got 0"),
    "something there": ("{dense} {dense}", "dense: expected a folder that does not exist yet, or an empty one, got"),
    "nothing to read": ("{tmp}/nothing {out}", "nothing: expected the folder of a checkpoint, got none"),
    "a quantized model": ("{awq} {out}", "config.json: expected a dense model, got .* awq .*`weightonly convert`"),
    "pickles": ("{bin} {out}", r"got pickles \(pytorch_model.bin\).*use_safetensors=False\)\.save_pretrained\(OUT\)"),
    "no config": ("{bare} {out}", "bare: expected config.json, which says what the model is, got none"),
    "a tensor that is missing": ("{short} {out}", "expected every tensor of Llama.*model.norm.weight"),
    "a layer that is missing": ("{less} {out} --group-size 64", "less: expected model.layers.1.mlp.up_proj.weight, as"),
    "numbers that are none": ("{nan} {out} --group-size 64", r"layers\.0\.mlp\.up_proj: w: expected finite values"),
    "another size": ("{wide} {out} --group-size 64", r"layers\.0\.mlp\.up_proj\.weight: expected \[192, 128\], got"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_one_line_and_leaves_nothing(
    case: str, dense: Path, tmp_path: Path, generator: torch.Generator, capsys: pytest.CaptureFixture[str]
) -> None:
    words, message = WRONG[case]
    tensors = load_file(dense / "model.safetensors")
    places = {"dense": dense, "out": tmp_path / "out", "tmp": tmp_path}
    if "{awq}" in words:
        places["awq"] = write_model(tmp_path / "awq", "awq", generator)
    for name in ("bin", "bare", "short", "less", "nan", "wide"):
        if f"{{{name}}}" not in words:
            continue
        places[name] = tmp_path / name
        (tmp_path / name).mkdir()
        if name != "bare":
            (tmp_path / name / "config.json").write_text((dense / "config.json").read_text())
        if name == "bin":
            (tmp_path / name / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
            continue
        changed = dict(tensors)
        up = "model.layers.0.mlp.up_proj.weight"
        if name == "short":
            del changed["model.norm.weight"]
        elif name == "less":
            del changed["model.layers.1.mlp.up_proj.weight"]
        elif name == "nan":
            changed[up] = torch.full_like(changed[up], torch.nan)
        elif name == "wide":
            changed[up] = torch.zeros(192, 256)
        save_file(changed, tmp_path / name / "model.safetensors", {"format": "pt"})
    before = sorted(path.name for path in tmp_path.iterdir())
    assert command.main(["quantize", *(word.format(**places) for word in words.split())]) == 1
    out, error = capsys.readouterr()
    last = error.splitlines()[-1]
    assert last.startswith("error: ") and re.search(message, last) and "Traceback" not in error and out == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == before


@pytest.mark.parametrize("word", ["down_proj", "=int8", "down_proj=", "down_proj=int8:x", "--shard-size=2X"])
def test_options_that_argparse_refuses(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = [word] if word.startswith("--") else ["--layer", word]
    with pytest.raises(SystemExit):
        command.main(["quantize", "a", "b", *words])
    assert "expected a " in capsys.readouterr().err


def test_ctrl_c_is_one_line_and_leaves_nothing(dense: Path, tmp_path: Path) -> None:
    code = (
        f"import signal, sys, time; sys.path.insert(0, {str(ROOT)!r})\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from weightonly.__main__ import main\n"
        "from weightonly.tensor_file import TensorWriter\n"
        "add, count = TensorWriter.add, []\n"
        "def slow(*args, **kwargs):\n"
        "    add(*args, **kwargs)\n"
        "    count.append(1)\n"
        "    if len(count) == 5:\n"
        "        print('writing', flush=True)\n"
        "        time.sleep(60)\n"
        "TensorWriter.add = slow\n"
        f"sys.exit(main(['quantize', {str(dense)!r}, {str(tmp_path / 'out')!r}, '--group-size', '64']))"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "writing\n"
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130 and error.splitlines()[-1] == "interrupted" and "Traceback" not in error
    assert list(tmp_path.iterdir()) == []


def test_transformers_of_any_message_level_says_no_more(dense: Path, tmp_path: Path) -> None:
    """In a process of its own: one summary on stdout, and no bars of transformers on stderr."""
    words = [sys.executable, "-m", "weightonly", "quantize", str(dense), str(tmp_path / "out"), "--group-size", "64"]
    run = subprocess.run(words, capture_output=True, text=True, check=False, cwd=ROOT)
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith(f"{tmp_path / 'out'}: ") and "weights" not in run.stderr and "it/s" not in run.stderr
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "weightonly"
