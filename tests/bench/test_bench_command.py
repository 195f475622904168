"""The command of the benchmark's sweep: the files it writes, and what it refuses."""

from __future__ import annotations

import re
from pathlib import Path

import pandas as pd
import pytest
import torch

from tools import conversions, regret, regret_experts
from weightonly.bench.__main__ import COMMANDS, main
from weightonly.bench.command import Command, run_command

TOOLS: dict[str, Command] = {
    "conversions": conversions.COMMAND,
    "regret": regret.COMMAND,
    "regret_experts": regret_experts.COMMAND,
}
ALL = COMMANDS | TOOLS


def test_command_line_writes_table_csv_and_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    csv, markdown, png = (tmp_path / name for name in ("s.csv", "s.md", "s.png"))
    arguments = (
        "--shapes 128x64 --batch 1,8 --device cpu --group-size 64 --dtype bf16 --providers ours,dense "
        f"--quiet --budget-ms 1 --zeros --host --csv {csv} --markdown {markdown} --plot {png}"
    )
    assert main(arguments.split()) == 0
    captured = capsys.readouterr()
    printed = captured.out
    assert "overlap of launches is off" in captured.err
    assert printed == markdown.read_text()
    assert "128x64" in printed and "ours host us" in printed
    frame = pd.read_csv(csv)
    assert list(frame["m"]) == [1, 1, 8, 8]
    assert set(frame["dtype"]) == {"bf16"} and set(frame["group_size"]) == {64}
    assert png.stat().st_size > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [pytest.param("--batch 1,x", "1,x", id="batch"), pytest.param("sweep --bits 5", "--bits", id="bits")],
)
def test_options_are_parsed(arguments: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments.split())
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param("--shapes nowhere --device cpu", "llama3-8b", id="shape"),
        pytest.param("--providers nobody --device cpu --shapes 128x64", "nobody", id="provider"),
        pytest.param("--plugin no_such_module --device cpu", "no_such_module", id="plugin"),
    ],
)
def test_command_line_refuses_in_one_line(arguments: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments.split()) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("error: ") and message in line


@pytest.mark.parametrize("device", ["", " --device cpu", " --device cuda"])
@pytest.mark.parametrize("command", ["chain", "tune", "host", *TOOLS])
def test_what_measures_a_gpu_refuses_without_one(
    command: str, device: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(ALL[command], "run", lambda options: pytest.fail("it began to work"))
    assert run_command(ALL[command], f"python -m tools.{command}", device.split()) == 2
    captured = capsys.readouterr()
    assert captured.err == f"error: {command} needs a CUDA GPU: none is visible here\n" and not captured.out


def test_a_gpu_asked_for_must_be_there(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["sweep", "--device", "cuda"]) == 2
    assert capsys.readouterr().err == "error: sweep needs a CUDA GPU: none is visible here\n"


@pytest.mark.parametrize("command", [name for name in ALL if name != "serve"])  # vLLM has its own progress and device
def test_commands_share_the_names_of_options(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        run_command(ALL[command], command, ["--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    shared = {"--shapes", "--dtype", "--device", "--quiet"}
    if command not in ("accuracy", "activations", "conversions", "host"):
        shared.add("--batch")
    assert all(f"{option} " in text or f"{option}]" in text for option in shared)
    assert not re.search(r"--(m|model|models|asymmetric)\b", text)
