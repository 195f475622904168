"""The command that measures, reports and compares, on a CPU and on a GPU."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
import torch
from tests.bench.report_cases import FACTS, Page, made_up

from weightonly.bench.__main__ import main
from weightonly.bench.report import Report, measure, results
from weightonly.bench.report.results import Results, cells, read


def test_command_makes_a_report_of_files(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main(["report", "--from", str(file), "--out", str(out), "--note", "commit 123"]) == 0
    printed = [Path(line) for line in capsys.readouterr().out.splitlines()]
    assert printed == [out / name for name in ("report.html", "report.md", "times.csv", "results.csv")]
    assert all(path.stat().st_size for path in printed)
    again = read(out / "results.csv")
    assert again.facts == FACTS | {"note": "commit 123"}
    pd.testing.assert_frame_equal(again.rows, read(file).rows)


@pytest.mark.parametrize(("factor", "code"), [(1.2, 1), (1.0, 0), (0.8, 0)])
def test_command_exits_by_regressions(
    factor: float, code: int, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Results(made_up(factor)).write(tmp_path / "new.csv")
    arguments = ["report", "--from", str(tmp_path / "new.csv"), "--out", str(tmp_path / "out"), "--compare", str(file)]
    assert main(arguments) == code
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("regression: ") for line in lines) == (15 if factor > 1 else 0)
    assert sum(line.startswith("improvement: ") for line in lines) == (15 if factor < 1 else 0)


def test_command_measures_on_a_cpu(tmp_path: Path) -> None:
    arguments = (
        "report --shapes 256x64 --batch 1,8 --formats int4,int8 --providers ours,dense --dtype bf16 --device cpu "
        f"--runs 2 --budget-ms 1 --quiet --out {tmp_path}"
    )
    assert main(arguments.split()) == 0
    found = read(tmp_path / "results.csv")
    assert set(found.rows["format"]) == {"int4", "int8"} and len(found.rows) == 2 * 2 * 2 * 2
    assert found.facts["command"] == f"python -m weightonly.bench {arguments}"
    assert set(found.rows["provider"]) == {"ours", "torch bf16"}
    assert {"CPU", "torch", "weightonly", "commit", "Python", "method"} <= set(found.facts)
    assert set(cells(found.rows)["runs"]) == {2}
    assert Page((tmp_path / "report.html").read_text()).headings[1:3] == ["256x64", "int4, group 128, bf16"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--from nowhere.csv", "nowhere.csv"),
        ("--formats int4,int3 --device cpu", "formats: expected some of int4, int8, nf4, got 'int3'"),
        ("--runs 0 --device cpu", "runs: expected at least 1, got 0"),
        ("--shapes llama9 --device cpu", "llama9"),
    ],
)
def test_command_refuses(
    arguments: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["report", *arguments.split()]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and message in line


@pytest.mark.gpu
def test_report_of_a_gpu(cuda_device: torch.device, tmp_path: Path) -> None:
    found = measure(["4096x4096"], [1, 64], ["int4"], ["ours", "dense"], runs=2, budget_ms=2, progress=False)
    for name in ("GPU", "driver", "CUDA", "roofline", "GPU before", "GPU after", "method"):
        assert found.facts[name] not in ("", "not known", "None")
    assert (found.rows["sm_mhz"] > 100).all()
    Report(found, ("4096x4096",)).write(tmp_path)
    assert Page((tmp_path / "report.html").read_text()).headings[1] == "4096x4096"
    assert results.read(tmp_path / "results.csv").facts == found.facts
