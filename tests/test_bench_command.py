"""The command of the benchmark's sweep: the files it writes, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from weightonly.bench.__main__ import main


def test_command_line_writes_table_csv_and_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    csv, markdown, png = (tmp_path / name for name in ("s.csv", "s.md", "s.png"))
    arguments = (
        "--shapes 128x64 --batch 1,8 --device cpu --group-size 64 --dtype bf16 --providers ours,cublas "
        f"--quiet --budget-ms 1 --asymmetric --host --csv {csv} --markdown {markdown} --plot {png}"
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
    [
        pytest.param("--shapes nowhere --device cpu", "llama3-8b", id="shape"),
        pytest.param("--batch 1,x", "1,x", id="batch"),
        pytest.param("--providers nobody --device cpu --shapes 128x64", "nobody", id="provider"),
        pytest.param("sweep --bits 5", "--bits", id="bits"),
        pytest.param("--plugin no_such_module --device cpu", "no_such_module", id="plugin"),
    ],
)
def test_command_line_refuses(arguments: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments.split())
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
