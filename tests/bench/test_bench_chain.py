"""The benchmark of a chain of linears."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

import weightonly as wo
from weightonly.bench.__main__ import main

chain = importlib.import_module("weightonly.bench.chain")  # `weightonly.bench.chain` is the function


def test_chain_goes_through_every_linear() -> None:
    options: dict[str, Any] = {"group_size": 32, "device": "cpu", "budget_ms": 1, "progress": False}
    frame = wo.bench.chain("minilm", 2, [1, 3], **options)
    lines = chain.chain_table(frame).splitlines()
    assert len(lines) == 2 + 2  # a CPU has no launches that could overlap
    for column in ("M", "overlap", "ms per pass", "us per linear", "TB/s"):
        assert f" {column} " in lines[0]
    assert "roofline" not in lines[0]
    assert list(frame["m"]) == [1, 3] and set(frame["overlap"]) == {"False"}
    assert set(frame["shapes"]) == {"384x384,384x1536,1536x384"}
    assert list(frame["us_per_linear"]) == pytest.approx(list(frame["ms"] * 1e3 / 6), rel=1e-2, abs=0.2)


def test_the_command_prints_the_table_and_writes_the_rows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """On a pretended GPU, with the times of a CPU."""
    asked: list[str] = []

    def default_device(device: str) -> torch.device:
        asked.append(device)
        monkeypatch.undo()
        return torch.device("cpu")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(chain, "default_device", default_device)
    csv = tmp_path / "chain.csv"
    arguments = "chain --shapes minilm --layers 2 --batch 1,3 --device cuda --group-size 32 --budget-ms 1 --quiet"
    assert main([*arguments.split(), "--csv", str(csv)]) == 0
    assert asked == ["cuda"]
    assert len(capsys.readouterr().out.splitlines()) == 2 + 2
    assert list(pd.read_csv(csv)["m"]) == [1, 3]


def test_chain_needs_a_gpu_unless_a_cpu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match=r"^chain needs a CUDA GPU: none is visible here$"):
        wo.bench.chain()


@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "zeros"])
@pytest.mark.parametrize("bits", [4, 8])
def test_a_long_chain_keeps_the_size_of_its_values(bits: int, symmetric: bool) -> None:
    shapes_of_two = [(128, 256), (192, 128)]  # the second takes the first 192 of 256
    linears = [
        chain.random_linear(shape, bits, 64, symmetric, torch.float16, torch.device("cpu"))
        for _ in range(10)
        for shape in shapes_of_two
    ]
    calls = chain.Chain(linears, 3)
    calls.check()
    assert 0.1 < calls.results[-1].float().std() < 10
    assert wo.launch_overlap()


@pytest.mark.parametrize(
    ("argument", "options"),
    [
        ("shapes: expected one of llama3-8b", {"shapes": "llama9-8b"}),
        ("shapes: expected a chain", {"shapes": "table"}),
        ("layers", {"layers": 0}),
        ("batch", {"batch": ()}),
        ("group_size", {"group_size": 100}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_chain_refuses(argument: str, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=argument):
        wo.bench.chain(**{"shapes": "minilm", "layers": 1, "device": "cpu", "progress": False, **options})


def test_a_broken_chain_raises() -> None:
    linear = chain.random_linear((64, 64), 4, 64, True, torch.float16, torch.device("cpu"))
    linear.scales.fill_(float("nan"))
    with pytest.raises(RuntimeError, match="chain: expected the same finite result"):
        chain.Chain([linear], 1).check()


@pytest.mark.gpu
def test_chain_on_a_gpu(cuda_device: torch.device) -> None:
    frame = wo.bench.chain("llama3-8b", 2, [1, 16], device=cuda_device, budget_ms=5, progress=False)
    assert list(frame["overlap"]) == ["False", "True", "constant_weights"] * 2
    assert (frame["x_roofline"] > 0.8).all()
