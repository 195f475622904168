"""`bench experts`: routing, the results that it compares with, its rows, its roofline and its tables."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

import weightonly as wo
from weightonly.bench.__main__ import main
from weightonly.bench.experts import measure as measure_module
from weightonly.bench.experts import mixture as mixture_module
from weightonly.bench.experts.measure import COLUMNS, GROUP_SIZES, ExpertsBench
from weightonly.bench.experts.providers import EXPERTS_PROVIDERS, ExpertsProvider, Grouped, register
from weightonly.bench.experts.routing import Routing, topk_ids
from weightonly.bench.experts.tables import markdown, over_roofline, times_faster, with_means, write
from weightonly.bench.experts.weights import ExpertWeights, combined, gated
from weightonly.bench.kept import read
from weightonly.bench.report.results import Results
from weightonly.bench.roofline import CEILINGS, roofline_us
from weightonly.bench.shapes import MIXTURES

CPU = torch.device("cpu")
TINY = MIXTURES["tiny"]


def command(folder: Path, *more: str) -> list[str]:
    line = "experts --shapes tiny --batch 1,6 --device cpu --budget-ms 0.1"
    return [*line.split(), "--quiet", "--out", str(folder), *more]


@pytest.fixture
def providers() -> Iterator[dict[str, ExpertsProvider]]:
    """`EXPERTS_PROVIDERS`, as it was before when the test has ended."""
    before = dict(EXPERTS_PROVIDERS)
    yield EXPERTS_PROVIDERS
    EXPERTS_PROVIDERS.clear()
    EXPERTS_PROVIDERS.update(before)


# --- routing -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["even", "skewed"])
@pytest.mark.parametrize("sizes", MIXTURES.values(), ids=list(MIXTURES))
def test_each_token_has_different_experts(name: str, sizes: Any) -> None:
    ids = topk_ids(name, 300, sizes.experts, sizes.top_k, CPU)
    assert ids.dtype == torch.int32 and ids.shape == (300, sizes.top_k)
    assert int(ids.min()) >= 0 and int(ids.max()) < sizes.experts
    assert all(len(set(row)) == sizes.top_k for row in ids.tolist())
    assert torch.equal(ids[:40], topk_ids(name, 40, sizes.experts, sizes.top_k, CPU))
    counts = torch.tensor(Routing.of(ids, sizes.experts).counts)
    if name == "even":
        assert int(counts.max() - counts.min()) <= 1
    else:
        assert counts.max() > 2 * counts.float().mean() or sizes.experts <= 8


def test_skew_is_that_of_the_ranks() -> None:
    ids = topk_ids("skewed", 20_000, 16, 1, CPU, skew=1.0)
    counts = ids.flatten().bincount(minlength=16).sort(descending=True).values
    chances = 1 / torch.arange(1, 17)
    assert torch.allclose(counts / 20_000, chances / chances.sum(), atol=0.01)


def test_rows_are_sorted_by_expert() -> None:
    ids = torch.tensor([[3, 1], [1, 0], [3, 0]], dtype=torch.int32)
    routing = Routing.of(ids, 5)
    assert routing.order.tolist() == [3, 5, 1, 2, 0, 4] and routing.counts == [2, 2, 0, 2, 0]
    assert routing.offs.tolist() == [2, 4, 4, 6, 6] and routing.offs.dtype == torch.int32
    assert routing.rows == 6 and routing.with_rows == 3
    assert torch.equal(routing.order[routing.inverse], torch.arange(6))
    assert torch.allclose(routing.weights.sum(1), torch.ones(3))


# --- results -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", list(GROUP_SIZES))
@pytest.mark.parametrize("name", list(EXPERTS_PROVIDERS))
def test_providers_multiply_by_the_same_numbers(name: str, format: str) -> None:
    provider, dtype = EXPERTS_PROVIDERS[name], torch.bfloat16
    if provider.unavailable(CPU, dtype):
        pytest.skip("not with this PyTorch")
    weights = [
        ExpertWeights.random(TINY, product, format, GROUP_SIZES[format], dtype, CPU) for product in ("w13", "w2")
    ]
    operands = [provider.prepare(of_one) for of_one in weights]
    routing = Routing.of(topk_ids("skewed", 7, TINY.experts, TINY.top_k, CPU), TINY.experts)
    x = torch.randn(7, TINY.hidden, dtype=dtype)
    y = torch.zeros(7, TINY.hidden, dtype=torch.float64)
    for token, experts in enumerate(routing.ids.tolist()):
        for choice, expert in enumerate(experts):
            gate, up = (x[token].double() @ weights[0].dense[expert].double()).chunk(2)
            between = torch.nn.functional.silu(gate) * up
            y[token] += routing.weights[token, choice] * (between @ weights[1].dense[expert].double())
    assert (provider.layer(operands[0], operands[1], x, routing).double() - y).norm() < 0.01 * y.norm()
    rows = x[routing.order // TINY.top_k]
    first = provider.product(operands[0], rows, routing)
    assert (first.float() - weights[0].expected(rows, routing).float()).norm() < 0.01 * first.float().norm()
    second = weights[1].expected(gated(first), routing)
    assert (combined(second, routing).double() - y).norm() < 0.01 * y.norm()
    dense = sum(of_one.dense.nbytes for of_one in weights)
    assert (sum(map(provider.weight_bytes, operands)) == dense) == (name == "grouped_mm")


# --- the roofline --------------------------------------------------------------------------------------------------


def test_the_roofline_of_experts_reads_the_weights_of_those_with_rows() -> None:
    limits = CEILINGS["NVIDIA H200"]
    k, n = MIXTURES["qwen3-30b-a3b"].shape("w13")
    assert (k, n) == (2048, 1536)
    many = roofline_us(8, k, n, bits=4, group_size=128, weights=8, x_rows=1, y_rows=8, limits=limits)
    weights = 8 * (k * n // 2 + k // 128 * n * 2)
    assert many == pytest.approx((weights + 2 * (k + 8 * n)) / 4.47e6 + 1.5)
    assert pd.isna(roofline_us(1, k, n, bits=4, group_size=-1, limits=None))


# --- rows and files ------------------------------------------------------------------------------------------------


def test_the_command_writes_rows_and_tables_and_then_has_nothing_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(command(tmp_path)) == 0
    assert capsys.readouterr().out.splitlines() == [str(tmp_path / name) for name in ("results.csv", "experts.md")]
    rows = read(tmp_path / "results.csv", "experts", COLUMNS).rows
    labels = ["ours", "one gemm each", "torch grouped_mm bf16"]
    labels = labels[:2] if EXPERTS_PROVIDERS["grouped_mm"].unavailable(CPU, torch.bfloat16) else labels
    assert len(rows) == 2 * 3 * 2 * len(labels)  # routings, measures, M
    assert list(rows["provider"][: len(labels)]) == labels
    assert (rows["note"] == "").all() and (rows["us"] > 0).all() and rows["roofline_us"].isna().all()
    even = rows[(rows["routing"] == "even") & (rows["m"] == 6)]
    assert set(even["with_rows"]) == {8} and set(even["most_rows"]) == {2}
    text = (tmp_path / "experts.md").read_text()
    assert "## fused_experts, bf16" in text and "time of one gemm each / time of ours" in text and "skew 1.0" in text

    monkeypatch.setattr(measure_module, "Mixture", lambda *arguments: pytest.fail("it began to work"))
    assert main(command(tmp_path)) == 0
    pd.testing.assert_frame_equal(read(tmp_path / "results.csv", "experts", COLUMNS).rows, rows)
    assert main(["experts", "--from", str(tmp_path / "results.csv"), "--out", str(tmp_path / "again")]) == 0
    assert (tmp_path / "again" / "experts.md").read_text() == text


def test_a_time_budget_leaves_rows_for_the_next_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = command(tmp_path, "--providers", "gemms", "--measures", "w2", "--routings", "even")
    assert main([*arguments, "--time-budget", "1e-9"]) == 0
    captured = capsys.readouterr()
    assert captured.err.splitlines()[-1] == "2 cells are left: the same command measures them" and not captured.out
    assert main(arguments) == 0
    assert len(read(tmp_path / "results.csv", "experts", COLUMNS).rows) == 2


class Broken(Grouped):
    name = "broken"
    wrong = True

    def product(self, operand: Any, x: torch.Tensor, routing: Routing) -> torch.Tensor:
        y = super().product(operand, x, routing)
        return y.roll(1, 0) if self.wrong else y


def test_what_is_wrong_is_not_timed_and_is_tried_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], providers: dict[str, ExpertsProvider]
) -> None:
    broken = Broken()
    register(broken)
    with pytest.raises(ValueError, match="provider: expected a new name, got 'broken', which is registered"):
        register(broken)
    arguments = command(tmp_path, "--providers", "broken,ours", "--measures", "w13", "--routings", "even")
    assert main([*arguments, "--batch", "6"]) == 1
    notes = read(tmp_path / "results.csv", "experts", COLUMNS).rows.set_index("provider")["note"]
    assert re.match("failed: RuntimeError: relative error .* against dense weights", notes["broken"])
    assert notes["ours"] == ""
    assert "experts: tiny broken w13 M = 6, even: failed" in capsys.readouterr().err
    assert "- tiny, broken, w13, M = 6, even: failed" in (tmp_path / "experts.md").read_text()
    broken.wrong = False
    assert main([*arguments, "--batch", "6"]) == 0
    assert (read(tmp_path / "results.csv", "experts", COLUMNS).rows["note"] == "").all()


@pytest.mark.parametrize("fails", ["prepare", "timed"])
def test_one_that_fails_leaves_the_others(
    tmp_path: Path, providers: dict[str, ExpertsProvider], monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    """In packing, or in the calls after the two that are checked, as what a CUDA graph cannot capture."""
    broken, calls = Broken(), iter(range(100))
    broken.holds, broken.wrong = "its own", False

    def fail(*arguments: Any) -> Any:
        if fails == "prepare" or next(calls) >= 2:
            raise RuntimeError("no kernel")
        return Grouped.product(broken, *arguments)

    monkeypatch.setattr(broken, "prepare" if fails == "prepare" else "product", fail)
    register(broken)
    arguments = command(tmp_path, "--providers", "broken,ours", "--measures", "w13", "--routings", "even")
    assert main([*arguments, "--batch", "6"]) == 1
    notes = read(tmp_path / "results.csv", "experts", COLUMNS).rows.set_index("provider")["note"]
    assert notes["ours"] == "" and notes["broken"] == "failed: RuntimeError: no kernel"


def test_copies_that_do_not_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mixture_module, "copies_beyond_l2", lambda *arguments: 4)
    monkeypatch.setattr(mixture_module, "free_memory", lambda device: 1000)
    arguments = command(tmp_path, "--providers", "ours", "--measures", "w13", "--routings", "even", "--batch", "6")
    assert main(arguments) == 0
    assert re.search(r"does not fit: 3 copies are .* GB, and 0\.0 GB are free", capsys.readouterr().err)
    monkeypatch.setattr(mixture_module, "free_memory", lambda device: 1 << 40)
    assert main([*arguments, "--batch", "5"]) == 0  # each of the copies is used
    rows = read(tmp_path / "results.csv", "experts", COLUMNS).rows.set_index("m")
    assert rows.loc[5, "us"] > 0 and rows.loc[6, "note"].startswith("does not fit")


# --- tables --------------------------------------------------------------------------------------------------------


def made_up() -> pd.DataFrame:
    """Two models: ours takes 1.5 and 1.2 rooflines, and is 2 and 8 times as fast as one gemm each."""
    rows = []
    for model, over, faster in (("a", 1.5, 2.0), ("b", 1.2, 8.0)):
        for provider, us in (("ours", 10 * over), ("one gemm each", 10 * over * faster)):
            row = {"model": model, "format": "int4", "group_size": 128, "dtype": "bf16", "routing": "even", "skew": 0.0}
            row |= {"measure": "layer", "m": 16, "provider": provider, "us": us, "roofline_us": 10.0, "note": ""}
            rows.append(row | {"captured": provider == "ours"})
    return pd.DataFrame(rows, columns=COLUMNS)


def test_ratios_and_their_means() -> None:
    rows = made_up()
    assert with_means(over_roofline(rows))[16].to_list() == pytest.approx([1.5, 1.2, (1.5 * 1.2) ** 0.5])
    assert with_means(times_faster(rows, "one gemm each"))[16].to_list() == pytest.approx([2.0, 8.0, 4.0])
    text = markdown(Results(rows, {"GPU": "G"}))
    assert "# Mixtures of experts: G" in text and "time of ours / roofline" in text and "single calls" not in text
    eager = markdown(Results(rows.assign(captured=False), {}))
    assert "2 times of ours are of single calls" in eager
    without = rows[(rows["model"] == "a") | (rows["provider"] == "ours")]
    assert with_means(times_faster(without, "one gemm each"))[16].isna().to_list() == [False, True, True]


def test_no_rows_no_tables(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="rows: expected measurements, got none"):
        write(Results(pd.DataFrame(columns=COLUMNS)), tmp_path)


# --- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--shapes llama3-8b", "shapes: expected models, some of mixtral-8x7b, .*, got 'llama3-8b'"),
        ("--measures w1", "measures: expected some of w13, w2, layer, got 'w1'"),
        ("--routings odd", "routings: expected some of even, skewed, got 'odd'"),
        ("--providers nobody", "providers: expected .*, got 'nobody'"),
        (
            "--dtype fp16 --providers grouped_mm",
            "providers: grouped_mm cannot run this: it takes torch.bfloat16 only.*",
        ),
        ("--batch 0", r"batch: expected integers from 1 on, got \[0\]"),
        ("--skew 0", "skew: expected a positive number, got 0.0"),
        ("--budget-ms 0", "budget_ms: expected a positive number, got 0.0"),
        ("--time-budget -1", "time_budget_s: expected a positive number, got -1.0"),
        (
            "--shapes gpt-oss-120b --format int4",
            "format: expected groups that divide K = 2880 of gpt-oss-120b, got int4, groups of 128",
        ),
        ("--from nowhere.csv", ".*nowhere.csv.*"),
    ],
    ids=lambda value: value if value.startswith("--") else "",
)
def test_the_command_refuses_in_one_line(
    options: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(tmp_path / "out", *options.split())) == 2
    assert re.fullmatch(f"error: {message}", capsys.readouterr().err.splitlines()[-1])
    assert not (tmp_path / "out").exists()


# --- on a GPU ------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_mixtures_on_a_gpu(cuda_device: torch.device, tmp_path: Path) -> None:
    found = ExpertsBench(
        shapes=["tiny"], out=tmp_path, batch=(1, 6, 300), device=cuda_device, budget_ms=5, progress=False
    ).measure()
    rows = found.results.rows
    assert (rows["note"] == "").all() and (rows["us"] > 0).all() and (rows["roofline_us"] > 0).all()
    assert rows["captured"][rows["provider"] != "ours"].all()
    assert wo.launch_overlap() is True
