"""`arch=`: the same spellings at every entry point, and one message for what is not known."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.formats_layers import GPTQ, folder_of, gptq_layer

import weightonly as wo
from weightonly import __main__ as command
from weightonly.formats import QuantizedLayer, convert, open_checkpoint
from weightonly.heuristics import Problem, select
from weightonly.heuristics.arch import ARCHS, parse_arch
from weightonly.kernels import arch_runs_on
from weightonly.packing import layout_for_arch

SPELLINGS: list[Any] = [90, "90", "sm90", "sm_90", "SM90", "90a", "sm90a", "sm_90a", "90f", (9, 0)]
UNKNOWN: list[Any] = [
    91, 61, 900, -80, True, 90.0, None, "91", "sm60", "sm900", "hopper", "", "sm", "8.0", "90b", "sm-90", " 90",
    (9, 1), (9,), (9, 0, 0), (8, 10), (9.0, 0), (9, False), "cpu",
]  # fmt: skip
MESSAGE = (
    "arch: expected one of sm70, sm72, sm75, sm80, sm86, sm87, sm89, sm90, sm100, sm101, sm103, sm110, sm120, sm121, "
    "got {!r}"
)


@pytest.mark.parametrize("arch", SPELLINGS, ids=repr)
def test_every_spelling_is_the_same_gpu(arch: Any) -> None:
    assert parse_arch(arch) == 90
    assert type(parse_arch(arch)) is int


@pytest.mark.parametrize("arch", ARCHS)
def test_every_known_arch(arch: int) -> None:
    for spelling in (arch, str(arch), f"sm{arch}", f"sm_{arch}a", divmod(arch, 10)):
        assert parse_arch(spelling) == arch
    expected = {70: "row_major", 72: "row_major", 90: "tiled"}.get(arch, "interleaved")
    assert layout_for_arch(arch) == expected
    assert wo.preprocess(torch.ones(64, 64, dtype=torch.int8), arch=arch).layout == expected
    assert select(1, 64, 64, "int4", 64, arch, 100).layout == expected


@pytest.mark.parametrize("arch", UNKNOWN, ids=repr)
def test_what_is_not_known_has_one_message(arch: Any) -> None:
    with pytest.raises(ValueError, match=r"^arch: ") as error:
        parse_arch(arch)
    assert str(error.value) == MESSAGE.format(arch)


@pytest.mark.parametrize(
    ("built", "runs_on"),
    [
        ("75", {75, 80, 86, 87, 89, 90, 100, 101, 103, 110, 120, 121}),  # as PTX
        ("80", {80, 86, 87, 89}),
        ("86", {86, 87, 89}),
        ("89", {89}),
        ("90a", {90}),
        ("100", {100, 101, 103}),
        ("120", {120, 121}),
        ("100+PTX", {100, 101, 103, 110, 120, 121}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_gpus_that_the_code_of_a_target_runs_on(built: str, runs_on: set[int]) -> None:
    assert {arch for arch in ARCHS if arch_runs_on(built, arch)} == runs_on


# --- entry points: each returns something that tells which GPU it took `arch` for --------------------------------


def _linear() -> torch.nn.Linear:
    return torch.nn.Linear(64, 64, dtype=torch.float16)


def _source(folder: Path) -> Path:
    return folder_of(folder, gptq_layer, GPTQ, torch.Generator().manual_seed(0))


def _first_layout(records: Any) -> str:
    return next(record.weight.layout for record in records if isinstance(record, QuantizedLayer))


def _convert(arch: Any, folder: Path) -> tuple[str, str]:
    convert(_source(folder), folder / "packed", arch, progress=False)
    return _converted(folder)


def _converted(folder: Path) -> tuple[str, str]:
    config = json.loads((folder / "packed" / "config.json").read_text())["quantization_config"]
    return config["arch"], _first_layout(open_checkpoint(folder / "packed").records(progress=False))


def _checkpoint(arch: Any, folder: Path) -> str:
    return _first_layout(wo.load_checkpoint(_source(folder), arch, progress=False))


def _records(arch: Any, folder: Path) -> str:
    return _first_layout(open_checkpoint(_source(folder)).records(arch, progress=False))


ENTRY_POINTS: dict[str, Callable[[Any, Path], Any]] = {
    "preprocess": lambda arch, _: wo.preprocess(torch.ones(64, 64, dtype=torch.int8), arch=arch).layout,
    "preprocess nf4": lambda arch, _: (
        wo.preprocess(torch.ones(64, 64, dtype=torch.int8), arch=arch, format="nf4").layout
    ),
    "preprocess layout": lambda arch, _: (
        wo.preprocess(torch.ones(64, 64, dtype=torch.int8), arch=arch, layout="tiled").layout
    ),
    "select": lambda arch, _: select(16, 6144, 4096, "int4", 128, arch, 132),
    "Problem": lambda arch, _: Problem(16, 6144, 4096, "int4", 128, arch, 132),
    "Linear": lambda arch, _: wo.nn.Linear(64, 64, group_size=64, arch=arch).packed.layout,
    "Linear.from_linear": lambda arch, _: wo.nn.Linear.from_linear(_linear(), group_size=64, arch=arch).packed.layout,
    "quantize_model": lambda arch, _: wo.nn.quantize_model(_linear(), group_size=64, arch=arch).packed.layout,
    "load_checkpoint": _checkpoint,
    "Checkpoint.records": _records,
    "convert": _convert,
}


@pytest.mark.parametrize("entry_point", ENTRY_POINTS)
def test_every_entry_point_takes_every_spelling(entry_point: str, tmp_path: Path) -> None:
    call = ENTRY_POINTS[entry_point]
    results = []
    for number, arch in enumerate(SPELLINGS):
        folder = tmp_path / str(number)
        folder.mkdir()
        results.append(call(arch, folder))
    assert results == [results[0]] * len(SPELLINGS)
    if entry_point not in ("preprocess nf4", "preprocess layout"):  # those are for Hopper alone
        folder = tmp_path / "80"
        folder.mkdir()
        assert call("sm80", folder) != results[0]


@pytest.mark.parametrize("arch", [91, "sm91", (9, 1)], ids=repr)
@pytest.mark.parametrize("entry_point", ENTRY_POINTS)
def test_every_entry_point_refuses_alike(entry_point: str, arch: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="arch: ") as error:
        ENTRY_POINTS[entry_point](arch, tmp_path)
    assert MESSAGE.format(arch) in str(error.value).replace("one of cpu, ", "one of ")  # where CPUs are targets, too
    assert not (tmp_path / "packed").exists()


@pytest.mark.parametrize("arch", [arch for arch in SPELLINGS if isinstance(arch, str)])
def test_command_line_takes_every_spelling(arch: str, tmp_path: Path) -> None:
    source, target = _source(tmp_path), tmp_path / "packed"
    assert command.main(["convert", str(source), str(target), "--arch", arch]) == 0
    assert _converted(tmp_path) == ("sm90", "tiled")


def test_command_line_refuses_alike(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["convert", str(_source(tmp_path)), str(tmp_path / "packed"), "--arch", "sm91"]) == 1
    assert capsys.readouterr().err == f"error: {MESSAGE.format('sm91')}\n".replace("one of ", "one of cpu, ")
