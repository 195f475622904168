"""The benchmark of the conversions of whole weights: what it computes and refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

import weightonly as wo
from tools import conversions as module

TINY: dict[str, Any] = {
    "shapes": "256x64",
    "elements": [1000, 4099],
    "device": "cpu",
    "budget_ms": 1,
    "progress": False,
}


def test_one_row_per_conversion_with_its_bytes() -> None:
    frame = module.conversions(**TINY)
    packed = [f"dequantize int{bits} {layout}" for bits in (4, 8) for layout in ("tiled", "interleaved")]
    operations = ["awq_dequantize", *packed]
    for direction in ("quantize_4bit", "dequantize_4bit"):
        operations += [f"{direction} {kind}" for _ in TINY["elements"] for kind in ("nf4", "fp4")]
    assert list(frame["operation"]) == operations
    awq = frame.iloc[0]
    assert awq["bytes"] == 256 * 64 // 2 + 2 * 64 * 2 + 2 * 64 // 2 + 256 * 64 * 2
    assert set(frame["bytes"][frame["operation"].str.contains("int8")]) == {256 * 64 * 3 + 2 * 64 * 2}
    blocks = frame[frame["size"] == "4099"]
    assert set(blocks["bytes"]) == {4099 * 2 + 2050 + 65 * 4}
    assert frame["tb_s"].tolist() == pytest.approx((frame["bytes"] / frame["us"] / 1e6).tolist())
    assert frame["share_of_copy"].tolist() == pytest.approx((frame["tb_s"] / frame["copy_tb_s"]).tolist())


def test_a_wrong_result_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    dequantize = wo.dequantize_4bit
    calls = iter(range(100))
    monkeypatch.setattr(wo, "dequantize_4bit", lambda *a: dequantize(*a) + next(calls))
    with pytest.raises(RuntimeError, match=r"^dequantize_4bit nf4 1000: expected the CPU's result, got another one$"):
        module.conversions(**TINY)


@pytest.mark.parametrize(
    ("argument", "options"),
    [
        pytest.param("shapes", {"shapes": "256x60"}, id="columns"),
        pytest.param("shapes", {"shapes": "llama9-8b"}, id="unknown shape"),
        pytest.param("group_size", {"group_size": 100}, id="group size"),
        pytest.param("elements", {"elements": [0]}, id="no elements"),
        pytest.param("blocksize", {"blocksize": 100}, id="blocksize"),
        pytest.param("budget_ms", {"budget_ms": 0}, id="no budget"),
    ],
)
def test_refused(argument: str, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"^{argument}: "):
        module.conversions(**TINY | options)


def test_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """On a pretended GPU, with the times of a CPU."""

    asked: list[str] = []

    def default_device(device: str) -> torch.device:
        asked.append(device)
        return torch.device("cpu")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(module, "default_device", default_device)
    options = "--shapes 128x64 --elements 999 --group-size -1 --blocksize 32 --dtype bf16 --device cuda --budget-ms 1"
    assert module.main([*options.split(), "--quiet", "--csv", str(tmp_path / "rates.csv")]) == 0
    assert asked == ["cuda"]
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + 9 and " of the copy " in lines[0]
    frame = pd.read_csv(tmp_path / "rates.csv")
    assert list(frame["block"]) == [128] * 5 + [32] * 4 and set(frame["dtype"]) == {"bfloat16"}


def test_conversions_need_a_gpu_unless_a_cpu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match=r"^conversions needs a CUDA GPU: none is visible here$"):
        module.conversions()


@pytest.mark.gpu
def test_on_the_gpu(cuda_device: torch.device) -> None:
    frame = module.conversions("1024x1024", [1 << 20], budget_ms=1, device=cuda_device, progress=False)
    assert len(frame) == 9 and (frame["us"] > 0).all() and (frame["copy_us"] > 0).all()
