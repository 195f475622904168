"""`bench parallel`: pieces that ranks compute together, its rows and its tables; over gloo on the CPU."""

from __future__ import annotations

import copy
import re
import time
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

pytest.importorskip("torch.distributed.tensor", reason="needs PyTorch with torch.distributed")

from tests.parallel import parallel_ranks
from torch import distributed

import weightonly as wo
from weightonly.bench.__main__ import main
from weightonly.bench.kept import read
from weightonly.bench.model.providers import MODEL_PROVIDERS
from weightonly.bench.parallel import PIECES
from weightonly.bench.parallel import measure as measure_module
from weightonly.bench.parallel import rows as rows_module
from weightonly.bench.parallel.decode import STEP, DecodeRows
from weightonly.bench.parallel.experts import ExpertsPiece
from weightonly.bench.parallel.measure import COLUMNS, ParallelBench
from weightonly.bench.parallel.pieces import EXPERTS, LAYER, LINEARS, Piece, check_ranks, local_product
from weightonly.bench.parallel.ranks import Ranks, RanksApart, run
from weightonly.bench.parallel.rows import Cell, PieceRows
from weightonly.bench.parallel.tables import markdown, reductions, scaling, times_dense, tokens, write
from weightonly.bench.report.results import Results
from weightonly.bench.shapes import LLAMAS, MODELS
from weightonly.bench.timing import CallTimer, time_in_rounds

CPU = torch.device("cpu")
TINY = LLAMAS["tiny"]
ALONE = Ranks(0, 1, CPU, None, None)

over_gloo = pytest.mark.skipif(not parallel_ranks.has_loopback(), reason="no network, not even 127.0.0.1")


def command(folder: Path, *more: str) -> list[str]:
    line = "parallel --shapes tiny --providers ours-int4,dense --batch 1,6 --device cpu --budget-ms 0.1"
    return [*line.split(), "--quiet", "--out", str(folder), *more]


@over_gloo
def test_the_command_measures_one_rank_and_two_and_then_has_nothing_to_do(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(command(tmp_path)) == 0
    printed = capfd.readouterr()
    assert printed.out.splitlines() == [str(tmp_path / name) for name in ("results.csv", "parallel.md")]
    assert "unwaited" not in printed.err
    rows = read(tmp_path / "results.csv", "parallel", COLUMNS).rows
    assert len(rows) == 2 * 2 * 5 * 2 and (rows["note"] == "").all()  # ranks, providers, pieces, M
    assert set(rows["provider"]) == {"ours int4", "torch bf16"} and set(rows["ranks"]) == {1, 2}
    assert (rows[["product_us", "us"]] > 0).all().all() and rows["roofline_us"].isna().all()
    has_sums = (rows["ranks"] == 2) & rows["piece"].isin(["o", "down", LAYER])
    assert rows["sums_us"].notna().equals(has_sums)
    errors = rows["eager_error_percent"]
    assert (errors[rows["ranks"] == 1] == 0).all() and (errors <= 2).all()
    assert (errors[has_sums] > 0).all()  # terms are rounded: the sum is really one of two
    text = (tmp_path / "parallel.md").read_text()
    assert "## tiny, bf16" in text and "2 of ideal" in text and "gloo" in text

    monkeypatch.setattr(measure_module, "run", lambda *arguments: pytest.fail("it began to work"))
    assert main(command(tmp_path)) == 0
    pd.testing.assert_frame_equal(read(tmp_path / "results.csv", "parallel", COLUMNS).rows, rows)

    assert main(["parallel", "--from", str(tmp_path / "results.csv"), "--out", str(tmp_path / "again")]) == 0
    assert (tmp_path / "again" / "parallel.md").read_text() == text


def _compiled(ranks: Ranks) -> None:
    """A row under torch.compile, too; what `_errors` is to notice."""
    cell = Cell("tiny", "ours int4", "fp32", ranks.count, LAYER, 5, True)
    rows = PieceRows("tiny", LAYER, MODEL_PROVIDERS["ours-int4"], 5, torch.float32, ranks, None, 0.1)
    row = rows.row(cell, backend="aot_eager")
    assert 0 < row["compiled_error_percent"] < 1e-3 and 0 < row["eager_error_percent"] < 1e-3, row
    rows.expected[0, 0] = torch.nan
    with pytest.raises(RuntimeError, match=r"^eager: error of inf% against one rank, expected at most 2.0%$"):
        rows.row(cell)
    ranks.most(0)


def _unequal(ranks: Ranks) -> None:
    """Ranks whose own clocks differ repeat calls that wait for each other equally often."""
    calls = 0

    def call() -> None:
        nonlocal calls
        calls += 1
        if calls % 5 == ranks.rank:
            torch.arange(300_000).sort()
        ranks.most(0)

    time_in_rounds([CallTimer([call], CPU, ranks.most)], 3.0)
    assert ranks.most(calls) == -ranks.most(-calls)
    assert ranks.most(float(ranks.rank)) == ranks.count - 1


def _apart(ranks: Ranks) -> None:
    """A rank that has failed does not take the others' numbers for its own."""
    with pytest.raises(RanksApart, match=r"^ranks are apart, at steps 0 and 1$"):
        ranks.most(7.0, step=ranks.rank)


def _agree(ranks: Ranks) -> None:
    """All ranks know that one has failed, and it alone knows why."""
    error = ValueError("no memory") if ranks.rank else None
    found = ranks.agree(error)
    assert found is error if ranks.rank else str(found) == "on another rank"
    assert ranks.agree(None) is None


def _greedy(ranks: Ranks) -> None:
    """Models whose layers are cut write the tokens of the whole ones, compiled, too."""
    for name in ("ours-int4", "dense"):
        provider = MODEL_PROVIDERS[name]
        whole = DecodeRows("tiny", 2, provider, torch.float32, ALONE, 0.1).decoder(2, 40)
        part = DecodeRows("tiny", 2, provider, torch.float32, ranks, 0.1)
        prompt = whole.random_tokens(7)
        expected = whole.greedy(prompt, 9)
        assert torch.equal(part.decoder(2, 40).greedy(prompt, 9), expected), name
        assert part.decoder(2, 40).caches[0].keys.shape[1] == TINY.kv_heads // 2
        if name != "dense":
            assert part.built.weight_bytes < sum(p.nbytes for p in whole.model.parameters())
            assert torch.equal(part.decoder(2, 40, True, "aot_eager").greedy(prompt, 9), expected)


def _terms_of_experts(ranks: Ranks) -> None:
    """The terms of all ranks are the whole, and none of them is."""
    assert ranks.mesh is not None
    torch.manual_seed(0)
    sizes: Any = MODELS["tiny-qwen3-moe"]
    whole = ExpertsPiece(sizes, 5, torch.float32, CPU)
    MODEL_PROVIDERS["ours-int4"].quantize(whole)
    part = copy.deepcopy(whole).cut(ranks.mesh)
    x = torch.randn(5, sizes.hidden)
    expected, term = whole(x), part.products(x)
    assert torch.equal(whole.products(x), expected)
    assert not torch.allclose(term, expected, atol=1e-3 * float(expected.abs().max()))
    distributed.all_reduce(term)
    for y in (term, part(x)):
        assert torch.allclose(y, expected, atol=1e-5 * float(expected.abs().max()))


@over_gloo
@pytest.mark.parametrize(
    "work",
    [_compiled, _unequal, _apart, _agree, _greedy, _terms_of_experts],
    ids=["compiled", "unequal ranks", "apart", "one has failed", "greedy tokens", "terms of experts"],
)
def test_on_two_ranks(work: Any) -> None:
    run(2, "cpu", work)


def _fails(text: str, ranks: Ranks) -> None:
    if ranks.rank == 1:
        raise ValueError(text)
    time.sleep(600)  # in no call that would notice by itself


@over_gloo
def test_a_rank_that_fails_stops_the_others() -> None:
    with pytest.raises(RuntimeError, match=r"^2 ranks: ValueError: no such thing$"):
        run(2, "cpu", partial(_fails, "no such thing"))


@pytest.mark.parametrize("provider", ["ours-int4", "dense"])
def test_products_of_one_rank_are_the_layer(provider: str) -> None:
    piece: Any = Piece(TINY, LAYER, torch.float32, CPU)
    MODEL_PROVIDERS[provider].quantize(piece)
    assert [name for name, _ in piece.named_children()] == list(LINEARS)
    assert piece.rowwise == ["o", "down"]
    x = torch.randn(3, TINY.hidden)
    assert torch.equal(piece(x), piece.products(x))
    y = local_product(piece.qkv, x)[:, : TINY.hidden]
    gate, up = piece.gate_up(piece.o(y)).chunk(2, -1)
    assert torch.equal(piece(x), piece.down(torch.nn.functional.silu(gate) * up))
    assert isinstance(piece.qkv, wo.nn.Linear if provider != "dense" else torch.nn.Linear)


def test_what_fails_says_why_and_is_tried_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure_module, "run", lambda count, device, work: work(ALONE))  # in this process
    monkeypatch.setattr(rows_module, "_MOST_PERCENT", -1.0)
    arguments = command(tmp_path, "--ranks", "1", "--batch", "3", "--providers", "dense")
    assert main(arguments) == 1
    expected = "failed: RuntimeError: eager: error of 0% against one rank, expected at most -1.0%"
    assert f"parallel: tiny torch bf16 qkv M = 3, 1 ranks: {expected}" in capsys.readouterr().err.splitlines()
    rows = read(tmp_path / "results.csv", "parallel", COLUMNS).rows
    assert (rows["note"] == expected).all() and rows["us"].isna().all()
    assert f"- torch bf16, qkv, M = 3, 1 ranks: {expected}" in (tmp_path / "parallel.md").read_text().splitlines()
    monkeypatch.undo()
    assert main([*arguments, "--time-budget", "1e-9"]) == 1  # the rows are those of before
    monkeypatch.setattr(measure_module, "run", lambda count, device, work: work(ALONE))
    assert main(arguments) == 0
    assert (read(tmp_path / "results.csv", "parallel", COLUMNS).rows["note"] == "").all()


def test_a_time_budget_leaves_cells_for_the_next_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command(tmp_path, "--time-budget", "1e-9")) == 0
    captured = capsys.readouterr()
    assert captured.err.splitlines()[-1] == "40 cells are left: the same command measures them" and not captured.out


def test_decode_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure_module, "run", lambda count, device, work: work(ALONE))  # in this process
    options = "--ranks 1 --batch 1 --providers dense --decode 3 --context 20 --layers 1"
    assert main(command(tmp_path, *options.split())) == 0
    rows = read(tmp_path / "results.csv", "parallel", COLUMNS).rows
    (step,) = rows[rows["piece"] == "decode"].to_dict("records")
    assert (step["m"], step["layers"], step["context"]) == (3, 1, 20) and pd.isna(step["product_us"])
    assert step["tokens_s"] == pytest.approx(3e6 / step["us"], rel=0.01)
    assert set(rows["layers"]) == {0, 1} and len(rows) == 6
    text = (tmp_path / "parallel.md").read_text()
    assert "## tiny, bf16, 1 layers: tokens/s of decode steps after 20 tokens" in text
    two = pd.concat([rows, rows.assign(ranks=2, tokens_s=2 * rows["tokens_s"])])
    assert tokens(two[two["piece"] == "decode"])["2 x 1 rank"].to_list() == [2.0]


@over_gloo
def test_experts(tmp_path: Path) -> None:
    """A rank has some of them; of dense ones there are no rows, and of a mixture none of its linears."""
    assert main(command(tmp_path, "--shapes", "tiny-qwen3-moe", "--dtype", "fp32")) == 0
    rows = read(tmp_path / "results.csv", "parallel", COLUMNS).rows
    assert len(rows) == 2 * 2 and set(rows["piece"]) == {EXPERTS} and set(rows["provider"]) == {"ours int4"}
    assert (
        (rows["note"] == "").all() and (rows["us"] > 0).all() and (rows["ranks"] == 2).equals(rows["sums_us"].notna())
    )
    assert (rows["eager_error_percent"] < 1e-3).all()
    assert "| experts |" in (tmp_path / "parallel.md").read_text()


def made_up() -> pd.DataFrame:
    """Products that scale to 80% of ideal on two ranks, sums of 10 us."""
    rows = []
    for provider, us in (("ours int4", 100.0), ("cuBLAS bf16", 300.0)):
        for ranks in (1, 2):
            for m in (1, 16):
                product = us if ranks == 1 else us / 2 / 0.8
                both = product if ranks == 1 else product + 10
                row: dict[str, Any] = {
                    "model": "m",
                    "provider": provider,
                    "dtype": "bf16",
                    "ranks": ranks,
                    "piece": "down",
                    "m": m,
                }
                row |= {
                    "layers": 0,
                    "context": 0,
                    "compiled": False,
                    "product_us": product,
                    "us": both,
                }
                row |= {"sums_us": float("nan") if ranks == 1 else 9.0, "roofline_us": product / 2, "note": ""}
                rows.append(row | {"eager_error_percent": 0.25, "graph_error_percent": 0.5})
    return pd.DataFrame(rows, columns=COLUMNS)


def test_ratios() -> None:
    rows = made_up()
    found = scaling(rows[rows["provider"] == "ours int4"])
    assert list(found["M"]) == [1, 16, ""]
    assert found["2 of ideal"].to_list() == pytest.approx([0.8] * 3)
    assert found["1 x roofline"].to_list() == pytest.approx([2.0] * 3)
    sums = reductions(rows[rows["sums_us"].notna()]).set_index(["provider", "M"])
    assert sums.loc[("ours int4", 1), "share"] == pytest.approx(10 / 72.5)
    assert "times NCCL" not in sums
    shared = rows[rows["sums_us"].notna()].assign(nccl_us=rows["us"] * 2, shared_us=3.0)
    assert reductions(shared)["times NCCL"].to_list() == pytest.approx([2.0] * len(shared))
    assert (reductions(shared)["over shared memory"] == 3).all()
    beside = times_dense(rows).set_index(["piece", "M"])
    assert beside.loc[("down", 16)].to_dict() == pytest.approx(
        {"ours int4, 1 rank": 3.0, "ours int4, 2 ranks": (187.5 + 10) / (62.5 + 10)}
    )
    assert times_dense(rows[rows["provider"] == "ours int4"]).empty
    again = rows.assign(compiled=True, compiled_error_percent=0.75)
    assert "compiled, %" in markdown(Results(pd.concat([rows, again]), {}))
    text = markdown(Results(rows, {"GPU": "G"}))
    assert "# Tensor parallel: G" in text and "graph, %" in text and "compiled, %" not in text
    assert text.count("geometric mean, M >= 16") == 2


def test_no_rows_no_tables(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="rows: expected measurements, got none"):
        write(Results(pd.DataFrame(columns=COLUMNS)), tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--shapes llama9", "shapes: expected models, some of llama3-8b, .*, got 'llama9'"),
        ("--providers nobody", "providers: expected .*, got 'nobody'"),
        ("--providers torchao", "providers: expected .*, got 'torchao'"),
        ("--batch 0", r"batch: expected integers from 1 on, got \[0\]"),
        ("--ranks 0", r"ranks: expected integers from 1 on, got \[0\]"),
        ("--ranks 3", "ranks: expected a divisor of 128, of qkv of tiny, got 3"),
        ("--shapes tiny-qwen3-moe --ranks 3", "ranks: expected a divisor of 4, the experts of tiny-qwen3-moe, got 3"),
        ("--pieces head", f"pieces: expected some of {', '.join(PIECES)}, got 'head'"),
        ("--decode 0", r"decode: expected integers from 1 on, got \[0\]"),
        ("--context 0", "context: expected a positive number, got 0"),
        ("--layers 0", "layers: expected a positive number, got 0"),
        ("--budget-ms 0", "budget_ms: expected a positive number, got 0.0"),
        ("--time-budget -1", "time_budget_s: expected a positive number, got -1.0"),
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


def test_more_ranks_than_gpus(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    out = str(tmp_path / "out")
    assert main(["parallel", "--ranks", "1,4", "--out", out]) == 2
    expected = "error: parallel needs a GPU for each rank: 2 are visible, and 4 ranks were asked for"
    assert capsys.readouterr().err.splitlines()[-1] == expected
    assert main(["parallel", "--device", "cuda:1", "--out", out]) == 2
    assert "device: expected cuda or cpu" in capsys.readouterr().err


def test_torchrun_says_how_many_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"TORCHELASTIC_RUN_ID": "1", "WORLD_SIZE": "2", "RANK": "1"}.items():
        monkeypatch.setenv(name, value)

    def numbers(ranks: list[int] | None) -> list[int]:
        return ParallelBench(shapes=["tiny"], out=Path(), ranks=ranks, device="cpu").numbers()

    assert numbers(None) == [2] == numbers([2])
    with pytest.raises(ValueError, match=r"ranks: expected 2, the processes of torchrun, got \[1, 2\]"):
        numbers([1, 2])


def test_pieces() -> None:
    assert (LAYER, *LINEARS, EXPERTS, STEP) == PIECES


def test_ranks_that_cut_a_model() -> None:
    for ranks in (1, 2, 4, 8):
        check_ranks(LLAMAS["llama3-70b"], "llama3-70b", ranks)
    with pytest.raises(ValueError, match="expected a divisor of 8192, of qkv of llama3-70b, got 6"):
        check_ranks(LLAMAS["llama3-70b"], "llama3-70b", 6)


# --- on GPUs -------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_on_gpus(cuda_device: torch.device, tmp_path: Path, ranks: int) -> None:
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"{torch.cuda.device_count()} GPUs")
    sizes: dict[str, Any] = {"shapes": ["tiny"], "batch": (1, 6), "ranks": [ranks], "providers": "all"}
    found = ParallelBench(out=tmp_path, device="cuda", budget_ms=5, progress=False, **sizes).measure()
    rows = found.results.rows
    assert (rows["note"] == "").all() and (rows["us"] > 0).all() and (rows["graph_error_percent"] <= 2).all()
    assert (rows[(rows["piece"] == LAYER) & (rows["m"] == 6)]["compiled_error_percent"] <= 2).all()
