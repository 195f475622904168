"""Names out of files come to terminals and logs: none of them has anything that a terminal obeys."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.formats_layers import AWQ, CT, GPTQ, awq_layer, ct_layer, folder_of, gptq_layer

import weightonly as wo
from weightonly import __main__ as command
from weightonly.formats import convert
from weightonly.shown import shown

EVIL = "a\x1b]52;c;aGk=\x07\r\x1b[2J\x9b31m\u202eb\u2028\udc1bc"
ESCAPED = r"a\x1b]52;c;aGk=\x07\r\x1b[2J\x9b31m\u202eb\u2028\udc1bc"
TEXT = EVIL.replace("\udc1b", "")
"""Without half of a surrogate pair, which safetensors does not write."""


def test_what_is_shown() -> None:
    assert shown(EVIL) == ESCAPED
    assert shown("model.layers.0 'é' 層\\n") == "model.layers.0 'é' 層\\n"
    assert shown("a\nb\rc", keep="\n") == "a\nb\\rc"


def edit(folder: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    config = json.loads((folder / "config.json").read_text())
    change(config["quantization_config"])
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def awq(folder: Path, **more: torch.Tensor) -> Path:
    made = folder_of(folder, awq_layer, AWQ, torch.Generator())
    save_file(load_file(made / "model.safetensors") | more, made / "model.safetensors")
    return made


def index(folder: Path, weight_map: object, name: str = "model") -> Path:
    made = awq(folder)
    (made / f"{name}.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return made


def compressed(folder: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    return edit(folder_of(folder, ct_layer, CT, torch.Generator()), change)


def renamed(folder: Path, name: str) -> Path:
    made = awq(folder)
    (made / "model.safetensors").rename(made / name)
    return made


def two_indexes(folder: Path) -> Path:
    index(folder, {}, TEXT)
    return index(folder, {}, "b")


def scheme(**weights: object) -> dict[str, Any]:
    return {"targets": ["Linear"], "weights": {"num_bits": 4} | weights}


FOLDERS: dict[str, Callable[[Path], Path]] = {
    "tensor": lambda folder: awq(folder, **{TEXT: torch.ones(1)}),
    "layer": lambda folder: awq(folder, **{f"{TEXT}.qweight": torch.ones(1)}),
    "file": lambda folder: renamed(folder, f"{TEXT}.safetensors"),
    "pickle": lambda folder: renamed(folder, f"{TEXT}.bin"),
    "tensor of an index": lambda folder: index(folder, {EVIL: "gone.safetensors"}),
    "file of an index": lambda folder: index(folder, {"a": f"{EVIL}.safetensors"}),
    "folder of an index": lambda folder: index(folder, {"a": f"{EVIL}/b.safetensors"}),
    "index": lambda folder: index(folder, {}, TEXT),
    "two indexes": two_indexes,
    "no index": lambda folder: index(folder, EVIL),
    "folder": lambda folder: awq(folder, **{"a.up.qweight": torch.ones(1)}).rename(folder / TEXT),
    "method": lambda folder: edit(awq(folder), lambda options: options.update(quant_method=EVIL)),
    "version": lambda folder: edit(awq(folder), lambda options: options.update(version=EVIL)),
    "bits": lambda folder: edit(awq(folder), lambda options: options.update(bits=EVIL)),
    "pattern": lambda folder: edit(
        folder_of(folder, gptq_layer, GPTQ, torch.Generator()), lambda options: options.update(dynamic={EVIL: {}})
    ),
    "damaged pattern": lambda folder: edit(
        folder_of(folder, gptq_layer, GPTQ, torch.Generator()),
        lambda options: options.update(dynamic={"[z-\x1b]": {}}),
    ),
    "group": lambda folder: compressed(folder, lambda options: options.update(config_groups={EVIL: 3})),
    "format of a group": lambda folder: compressed(
        folder, lambda options: options.update(config_groups={EVIL: {"format": EVIL}})
    ),
    "type of a group": lambda folder: compressed(
        folder, lambda options: options.update(config_groups={"a": scheme(type=EVIL)})
    ),
    "target": lambda folder: compressed(
        folder, lambda options: options.update(config_groups={"a": scheme() | {"targets": [f"re:({EVIL}"]}})
    ),
    "rotation": lambda folder: compressed(folder, lambda options: options.update(transform_config={EVIL: EVIL})),
}


@pytest.mark.parametrize("case", FOLDERS)
@pytest.mark.parametrize("words", [["inspect"], ["convert", "OUT"]], ids=["inspect", "convert"])
def test_commands_print_no_name_as_it_is(
    words: list[str], case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = FOLDERS[case](tmp_path)
    arguments = [words[0], str(folder), *(str(tmp_path / word) for word in words[1:])]
    assert command.main(arguments) == 1
    out, err = capsys.readouterr()
    assert err.startswith("error: ") and (out + err).replace("\n", "").isprintable() and err.count("\n") == 1


@pytest.mark.parametrize("case", [case for case in FOLDERS if case != "folder"])
def test_errors_have_no_name_as_it_is(case: str, tmp_path: Path) -> None:
    """The folder is the caller's own."""
    with pytest.raises((ValueError, OSError)) as error:
        wo.load_checkpoint(FOLDERS[case](tmp_path))
    assert str(error.value).isprintable() and error.value.args


def test_scale_dtype_of_a_config(tmp_path: Path) -> None:
    from weightonly.formats.expect import TensorError

    assert str(TensorError("weight_scale", f"expected {EVIL} as the config says")).isprintable()


def test_a_fault_of_a_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(folder: str) -> None:
        raise TypeError(EVIL)

    monkeypatch.setattr("weightonly.commands.open_checkpoint", fail)
    assert command.main(["inspect", "folder"]) == 1
    assert f"TypeError: {ESCAPED} (" in capsys.readouterr().err


def test_what_commands_say_of_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = awq(tmp_path).rename(tmp_path / TEXT)
    assert command.main(["inspect", str(folder)]) == 0
    assert command.main(["convert", str(folder), str(tmp_path / f"{TEXT}2")]) == 0
    for line in capsys.readouterr().out.splitlines():
        assert line.isprintable()


def test_a_small_file_that_is_a_link(tmp_path: Path) -> None:
    folder = awq(tmp_path)
    (tmp_path / TEXT).touch()
    (folder / f"{TEXT}.txt").symlink_to(tmp_path / TEXT)
    with pytest.raises(ValueError, match="expected a file of this folder") as error:
        convert(folder, tmp_path / "packed")
    assert str(error.value).isprintable()


@pytest.mark.parametrize("field", ["name", "field", "header"])
def test_errors_of_load(field: str, tmp_path: Path) -> None:
    packed = {EVIL: {}} if field == "name" else {"w": {EVIL: 1}}
    metadata = {"weightonly.file_version": "1", "weightonly.packed": json.dumps(packed)}
    save_file({"w": torch.ones(3)}, tmp_path / "w.safetensors", metadata)
    if field == "header":
        header = json.dumps({TEXT: {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}, ensure_ascii=False).encode()
        (tmp_path / "w.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(ValueError, match=r"w\.safetensors: ") as error:
        wo.load(tmp_path / "w.safetensors")
    assert str(error.value).isprintable()


def test_modules_of_quantize_model(caplog: pytest.LogCaptureFixture) -> None:
    model = torch.nn.Sequential()
    model.add_module(TEXT, torch.nn.Linear(64, 64))
    model.add_module("b", torch.nn.Linear(64, 64))
    with caplog.at_level(logging.INFO, "weightonly"):
        wo.nn.quantize_model(model, group_size=64, only=["b"])
    assert caplog.messages and all(text.replace("\n", "").isprintable() for text in caplog.messages)
    with pytest.raises(ValueError, match="can be quantized, got layer") as error:
        wo.nn.quantize_model(model, group_size=128, only=[TEXT])
    assert str(error.value).isprintable()


def test_modules_of_transformers() -> None:
    """Some models name modules as config.json says."""
    from weightonly.hf import WeightOnlyConfig
    from weightonly.hf.modules import check_names

    model = torch.nn.ModuleDict({TEXT: torch.nn.Linear(64, 64)})
    with pytest.raises(ValueError, match="expected printable names of modules") as error:
        check_names(model)
    assert str(error.value).isprintable()
    with pytest.raises(ValueError, match="unknown entries") as error:
        WeightOnlyConfig(layout="tiled", **{TEXT: 1})  # type: ignore[arg-type]
    assert str(error.value).isprintable()
