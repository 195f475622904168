"""The benchmark on a CPU: what it computes, writes and refuses. Its GPU half runs where there is a GPU."""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

import weightonly as wo
from weightonly.bench import PROVIDERS, Prepared, Provider, providers, register, roofline, shapes, timing
from weightonly.bench.__main__ import main
from weightonly.bench.sweep import gpu_facts
from weightonly.code_tables import code_table
from weightonly.heuristics import Problem, legal

chain = importlib.import_module("weightonly.bench.chain")  # `weightonly.bench.chain` is the function

TINY = [(128, 64), (256, 128)]


@pytest.fixture(scope="module")
def tiny() -> pd.DataFrame:
    return wo.bench.sweep(
        TINY, [1, 3, 16], "all", dtype=torch.bfloat16, device="cpu", budget_ms=1, host=True, progress=False
    )


def test_sweep_has_one_row_per_shape_batch_and_provider(tiny: pd.DataFrame) -> None:
    names = ["ours", "cublas", "dequantize+matmul", "tinygemm"]
    expected = [(k, n, m, name) for k, n in TINY for m in (1, 3, 16) for name in names]
    assert [tuple(row) for row in tiny[["k", "n", "m", "provider"]].itertuples(index=False)] == expected


def test_sweep_rates_follow_from_its_times(tiny: pd.DataFrame) -> None:
    row = tiny[(tiny["k"] == 256) & (tiny["m"] == 3) & (tiny["provider"] == "ours")].iloc[0]
    packed, scales, x, y = 256 * 128 // 2, 2 * 128 * 2, 3 * 256 * 2, 3 * 128 * 2
    assert row["tb_s"] == pytest.approx((packed + scales + x + y) / row["us"] / 1e6)
    assert row["tflop_s"] == pytest.approx(2 * 3 * 256 * 128 / row["us"] / 1e6)
    cublas = tiny[(tiny["k"] == 256) & (tiny["m"] == 3) & (tiny["provider"] == "cublas")].iloc[0]
    assert row["x_cublas"] == pytest.approx(cublas["us"] / row["us"])
    assert cublas["x_cublas"] == 1
    assert (tiny["us_min"] <= tiny["us_p10"]).all() and (tiny["us_p10"] <= tiny["us_p90"]).all()
    assert (tiny["host_us"] > 0).all()


def test_sweep_on_a_cpu_has_no_roofline_and_one_config(tiny: pd.DataFrame) -> None:
    assert tiny["roofline_us"].isna().all() and tiny["x_roofline"].isna().all()
    assert set(tiny.loc[tiny["provider"] == "ours", "config"]) == {"cpu"}


def test_sweep_without_cublas_has_no_ratio_to_it() -> None:
    frame = wo.bench.sweep([(128, 64)], 1, "ours", group_size=-1, bits=8, device="cpu", budget_ms=1, progress=False)
    assert frame["x_cublas"].isna().all()
    assert frame["us"].gt(0).all()


def test_markdown_names_shapes_providers_and_units(tiny: pd.DataFrame) -> None:
    lines = wo.bench.to_markdown(tiny).splitlines()
    assert len(lines) == 2 + 6
    for column in ("K x N", "M", "ours us", "tinygemm us", "x cuBLAS", "ours host us"):
        assert f" {column} " in lines[0]
    assert "roofline" not in lines[0]
    assert "256x128" in lines[-1]
    with_roofline = tiny.assign(roofline_us=0.5, x_roofline=tiny["us"] / 0.5)
    for column in ("x roofline", "TB/s", "TFLOP/s"):
        assert f" {column} " in wo.bench.to_markdown(with_roofline).splitlines()[0]


@pytest.mark.parametrize(
    ("argument", "options"),
    [
        pytest.param("shapes", {"shapes": "llama9-8b"}, id="unknown-shape-name"),
        pytest.param("shapes", {"shapes": "128x0"}, id="shape-of-zero"),
        pytest.param("shapes", {"shapes": []}, id="no-shape"),
        pytest.param("shapes", {"shapes": [(128, 64, 1)]}, id="shape-of-three"),
        pytest.param("batch", {"batch": [1, 0]}, id="batch-of-zero"),
        pytest.param("batch", {"batch": []}, id="no-batch"),
        pytest.param("bits", {"bits": 3}, id="three-bits"),
        pytest.param("dtype", {"dtype": torch.float64}, id="double"),
        pytest.param("group_size", {"group_size": 100}, id="group-does-not-divide-k"),
        pytest.param("group_size", {"group_size": 0}, id="group-of-zero"),
        pytest.param("providers", {"providers": ["ours", "theirs"]}, id="unknown-provider"),
        pytest.param("providers", {"providers": []}, id="no-provider"),
        pytest.param("tinygemm", {"providers": "tinygemm", "dtype": torch.float16}, id="provider-cannot-fp16"),
        pytest.param("bitsandbytes", {"providers": "bitsandbytes"}, id="provider-cannot-cpu"),
        pytest.param("budget_ms", {"budget_ms": 0}, id="no-budget"),
        pytest.param("symmetric", {"format": "nf4", "symmetric": False}, id="codes-with-zeros"),
        pytest.param("bits", {"format": "nf4", "bits": 8}, id="codes-of-eight-bits"),
    ],
)
def test_sweep_refuses(argument: str, options: dict[str, Any]) -> None:
    arguments: dict[str, Any] = {
        "shapes": [(128, 64)],
        "batch": 1,
        "device": "cpu",
        "progress": False,
        **options,
    }
    with pytest.raises(ValueError, match=argument):
        wo.bench.sweep(**arguments)


def test_unknown_shape_name_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"llama3-8b, llama3-70b, table, minilm.*'llama9'"):
        shapes.resolve("llama9")


def test_shapes_come_by_name_by_size_and_as_pairs() -> None:
    assert shapes.resolve("minilm,64x32") == [(384, 384), (384, 1536), (1536, 384), (64, 32)]
    assert shapes.resolve([(64, 32), "64x32", "128x64"]) == [(64, 32), (128, 64)]
    assert len(shapes.resolve("table")) == 7


# From the measured comparison of this project: k, n, m, bits, group size, roofline in us on an H200.
@pytest.mark.parametrize(
    ("k", "n", "m", "bits", "group_size", "expected_us"),
    [
        pytest.param(4096, 4096, 1, 4, 128, 3.44, id="int4-decode"),
        pytest.param(8192, 8192, 4096, 4, 128, 706.32, id="int4-prefill"),
        pytest.param(28672, 8192, 16, 8, -1, 54.31, id="int8-per-channel"),
    ],
)
def test_roofline_of_an_h200(k: int, n: int, m: int, bits: int, group_size: int, expected_us: float) -> None:
    limits = roofline.CEILINGS["NVIDIA H200"]
    us = roofline.roofline_us(m, k, n, bits=bits, group_size=group_size, symmetric=True, limits=limits)
    assert us == pytest.approx(expected_us, abs=0.005)


def test_zero_points_count_as_bytes() -> None:
    assert roofline.weight_bytes(256, 64, 4, 128, symmetric=True) == 256 * 64 // 2 + 2 * 64 * 2
    assert roofline.weight_bytes(256, 64, 4, 128, symmetric=False) == 256 * 64 // 2 + 2 * 2 * 64 * 2


@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "zeros"])
@pytest.mark.parametrize("group_size", [32, 128])
def test_providers_on_a_cpu_compute_the_same_product(symmetric: bool, group_size: int) -> None:
    weights = _weights(group_size, symmetric)
    x = torch.randn(5, weights.k, dtype=torch.bfloat16)
    for name in ("ours", "cublas", "dequantize+matmul", "tinygemm"):
        prepared = providers.PROVIDERS[name].prepare(weights)
        copies = prepared.copies(2)
        assert len(copies) == 2
        providers.check_product(name, prepared, copies, x, torch.empty(5, weights.n, dtype=torch.bfloat16))


@pytest.mark.parametrize("format", ["nf4", "fp4"])
def test_providers_multiply_by_codes_of_a_table(format: str) -> None:
    weights = _weights(64, True, format)
    assert weights.q.min() >= 0 and weights.q.max() <= 15
    x = torch.randn(5, weights.k, dtype=torch.bfloat16)
    for name in ("ours", "cublas", "dequantize+matmul"):
        prepared = providers.PROVIDERS[name].prepare(weights)
        providers.check_product(name, prepared, prepared.copies(2), x, torch.empty(5, weights.n, dtype=torch.bfloat16))


def test_weights_of_codes_are_the_nearest() -> None:
    weights = _weights(64, True, "fp4")
    normal = torch.randn(256, 64, generator=torch.Generator().manual_seed(0)).mul_(256**-0.5).to(torch.bfloat16)
    table = code_table("fp4")
    scales = weights.scales.float().repeat_interleave(64, 0)  # [k, n]
    distances = (normal.float()[..., None] - scales[..., None] * table).abs()  # [k, n, 16]
    chosen = distances.gather(-1, weights.q.long()[..., None])[..., 0]
    assert torch.allclose(chosen, distances.amin(-1), atol=1e-3 * float(scales.max()))


def test_copies_of_a_weight_have_memory_of_their_own() -> None:
    first, second = providers.PROVIDERS["ours"].prepare(_weights(64, False)).copies(2)
    pairs = [(first.qweight.data, second.qweight.data), (first.scales, second.scales), (first.zeros, second.zeros)]
    for one, other in pairs:
        assert torch.equal(one, other) and one.data_ptr() != other.data_ptr()


@pytest.mark.parametrize("wrong", ["one-wrong-copy", "unwritten-output"])
def test_a_wrong_provider_raises(wrong: str) -> None:
    weights = _weights(64, True)
    ring = [weights.dense, weights.dense * (1.1 if wrong == "one-wrong-copy" else 1.0)]

    def run(w: torch.Tensor, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        rows = len(x) - 1 if wrong == "unwritten-output" else len(x)
        torch.matmul(x[:rows], w, out=out[:rows])
        return out

    prepared = providers.Prepared(ring[0], run, 1, weights.dense)
    x = torch.randn(4, weights.k, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match="provider wrong: relative error"):
        providers.check_product("wrong", prepared, ring, x, torch.empty(4, weights.n, dtype=torch.bfloat16))


@pytest.fixture
def dummy() -> Iterator[None]:
    """A provider of a few lines, as providers.py shows how to write one."""

    class Doubled(Provider):
        name = "doubled"

        def unavailable(self, device: torch.device, dtype: torch.dtype, format: str, group_size: int) -> str | None:
            return None if group_size == 64 else "it has groups of 64 alone"

        def prepare(self, weights: providers.Weights) -> Prepared[torch.Tensor]:
            w = 2 * weights.dense
            return Prepared(w, lambda w, x, out: torch.mm(x, w, out=out), w.nbytes, w)

    register(Doubled())
    yield
    del PROVIDERS["doubled"]


@pytest.mark.usefixtures("dummy")
def test_a_registered_provider_is_compared() -> None:
    options: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cpu", "budget_ms": 1, "progress": False}
    frame = wo.bench.sweep([(128, 64)], 1, ["ours", "doubled"], group_size=64, **options)
    assert list(frame["provider"]) == ["ours", "doubled"]
    everything = wo.bench.sweep([(128, 64)], 1, "all", group_size=32, **options)
    assert "doubled" not in set(everything["provider"])
    with pytest.raises(ValueError, match="doubled cannot run this: it has groups of 64 alone"):
        wo.bench.sweep([(128, 64)], 1, "doubled", group_size=32, **options)


@pytest.mark.usefixtures("dummy")
def test_a_provider_needs_a_name_of_its_own() -> None:
    with pytest.raises(ValueError, match="expected a new name, got 'doubled'"):
        register(PROVIDERS["doubled"])


PLUG_IN = """
from weightonly.bench import Prepared, Provider, register


class Mine(Provider):
    name = "mine"

    def prepare(self, weights):
        return Prepared(weights.dense, lambda w, x, out: x @ w, weights.dense.nbytes, weights.dense)


register(Mine())
"""


def test_a_plug_in_module_is_imported_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_provider.py").write_text(PLUG_IN)
    monkeypatch.syspath_prepend(tmp_path)
    arguments = "--shapes 128x64 --batch 1 --device cpu --group-size 64 --quiet --budget-ms 1 --plugin my_provider"
    try:
        assert main([*arguments.split(), "--providers", "ours,mine", "--csv", str(tmp_path / "s.csv")]) == 0
    finally:
        PROVIDERS.pop("mine", None)
    assert list(pd.read_csv(tmp_path / "s.csv")["provider"]) == ["ours", "mine"]


def _weights(group_size: int, symmetric: bool, format: str = "int4") -> providers.Weights:
    return providers.Weights.random(
        256,
        64,
        bits=4,
        format=format,
        group_size=group_size,
        symmetric=symmetric,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )


def test_timing_is_the_median_and_goes_through_every_call() -> None:
    seen: list[int] = []
    result = timing.time_calls([functools.partial(seen.append, i) for i in range(4)], torch.device("cpu"), budget_ms=5)
    assert set(seen) == {0, 1, 2, 3}
    assert 0 < result.min_us <= result.p10_us <= result.us <= result.p90_us
    assert not result.coarse
    assert timing.Timing.of([3.0, 1.0, 2.0, 50.0, 4.0]) == timing.Timing(3.0, 1.0, 1.0, 50.0)


def test_timing_gives_up_on_a_slow_call_after_one_measurement() -> None:
    seen: list[int] = []
    result = timing.time_calls([lambda: seen.append(1)], torch.device("cpu"), give_up_us=0.0)
    assert result.coarse and len(seen) == 2  # the warm-up and the measurement


def test_host_us_is_per_call() -> None:
    seen: list[int] = []
    assert 0 < timing.host_us(lambda: seen.append(1), torch.device("cpu"), calls=10, rounds=3) < 1e5
    assert len(seen) == 10 + 3 * 10


def _measured(times_us: dict[str, float], m: int, layout: str = "") -> list[dict[str, object]]:
    cell: dict[str, object] = {
        "k": 64,
        "n": 64,
        "m": m,
        "format": "int4",
        "group_size": 64,
        "arch": 90,
        "sm_count": 132,
    }
    if layout:
        cell |= {"layout": layout, "zeros": True}
    return [{**cell, "config": name, "us": us} for name, us in times_us.items()]


def test_regret_is_the_choice_over_the_best_minus_one() -> None:
    frame = pd.DataFrame(_measured({"a": 10.0, "b": 8.0, "c": 9.0}, m=1) + _measured({"a": 20.0, "b": 30.0}, m=64))
    result = wo.bench.regret(frame, lambda problem: "a" if problem.m == 1 else "b")
    assert list(result.cells["best"]) == ["b", "a"]
    assert list(result.cells["regret"]) == pytest.approx([0.25, 0.5])
    assert result.mean == pytest.approx(0.375)
    assert result.worst == pytest.approx(0.5)


def test_regret_hands_the_problem_over_as_measured() -> None:
    seen: list[Problem] = []

    def choose(problem: Problem) -> str:
        seen.append(problem)
        return "a"

    wo.bench.regret(pd.DataFrame(_measured({"a": 1.0}, m=7, layout="tiled")), choose)
    wo.bench.regret(pd.DataFrame(_measured({"a": 1.0}, m=7)), choose)  # a file of before there were two layouts
    assert seen == [
        Problem(7, 64, 64, "int4", 64, 90, 132, "tiled", True),
        Problem(7, 64, 64, "int4", 64, 90, 132, "interleaved", False),
    ]


def test_regret_refuses_measurements_without_the_choice() -> None:
    with pytest.raises(ValueError, match="chosen configuration z at k=64, n=64, m=1"):
        wo.bench.regret(pd.DataFrame(_measured({"a": 1.0}, m=1)), lambda problem: "z")
    with pytest.raises(ValueError, match="frame"):
        wo.bench.regret(pd.DataFrame())


def test_measure_configs_needs_a_gpu() -> None:
    with pytest.raises(RuntimeError, match="CUDA"):
        wo.bench.measure_configs([(128, 64)], 1, device="cpu")


def test_chain_goes_through_every_linear(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    csv = tmp_path / "chain.csv"
    arguments = (
        f"chain --model minilm --layers 2 --m 1 3 --device cpu --group-size 32 --budget-ms 1 --quiet --csv {csv}"
    )
    assert main(arguments.split()) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + 2  # a CPU has no launches that could overlap
    for column in ("M", "overlap", "ms per pass", "us per linear", "TB/s"):
        assert f" {column} " in lines[0]
    assert "roofline" not in lines[0]
    frame = pd.read_csv(csv)
    assert list(frame["m"]) == [1, 3] and not frame["overlap"].any()
    assert list(frame["us_per_linear"]) == pytest.approx(list(frame["ms"] * 1e3 / 6), rel=1e-2, abs=0.2)


@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "zeros"])
@pytest.mark.parametrize("bits", [4, 8])
def test_a_long_chain_keeps_the_size_of_its_values(bits: int, symmetric: bool) -> None:
    shapes_of_two = [(128, 256), (192, 128)]  # the second takes the first 192 of 256
    linears = [
        chain.Linear.random(shape, bits, 64, symmetric, torch.float16, torch.device("cpu"))
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
        ("model: expected one of llama3-8b", {"model": "llama9-8b"}),
        ("model: expected a chain", {"model": "table"}),
        ("layers", {"layers": 0}),
        ("batch", {"batch": ()}),
        ("group_size", {"group_size": 100}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_chain_refuses(argument: str, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=argument):
        wo.bench.chain(**{"model": "minilm", "layers": 1, "device": "cpu", "progress": False, **options})


def test_a_broken_chain_raises() -> None:
    linear = chain.Linear.random((64, 64), 4, 64, True, torch.float16, torch.device("cpu"))
    linear.scales.fill_(float("nan"))
    with pytest.raises(RuntimeError, match="chain: expected the same finite result"):
        chain.Chain([linear], 1).check()


def test_overlap_is_what_it_was_after_a_measurement() -> None:
    def fail() -> None:
        with timing.overlapping(False):
            assert not wo.launch_overlap()
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        fail()
    assert wo.launch_overlap()


def test_plot_writes_a_picture(tiny: pd.DataFrame, tmp_path: Path) -> None:
    frame = tiny.assign(roofline_us=tiny["m"] * 0.5)
    wo.bench.plot(frame, str(tmp_path / "sweep.png"))
    header = (tmp_path / "sweep.png").read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = int.from_bytes(header[16:20], "big"), int.from_bytes(header[20:24], "big")
    assert width > height > 300  # two panels side by side
    with pytest.raises(ValueError, match="frame"):
        wo.bench.plot(frame.iloc[:0], str(tmp_path / "none.png"))


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


def test_command_line_reports_the_regret_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    problem = Problem(16, 4096, 4096, "int4", 128, 80, 108)
    chosen = wo.bench.heuristic_choice(problem)
    rows = [
        {
            "k": 4096,
            "n": 4096,
            "m": 16,
            "format": "int4",
            "group_size": 128,
            "arch": 80,
            "sm_count": 108,
            **timed,
        }
        for timed in ({"config": chosen, "us": 12.0}, {"config": "another", "us": 10.0})
    ]
    pd.DataFrame(rows).to_csv(tmp_path / "configs.csv", index=False)
    assert main(["regret", "--read", str(tmp_path / "configs.csv")]) == 0
    assert "regret: mean 20.0%, worst 20.0% of 1 cells" in capsys.readouterr().out


@pytest.mark.gpu
def test_sweep_on_a_gpu_stays_above_the_roofline(cuda_device: torch.device) -> None:
    frame = wo.bench.sweep([(4096, 4096)], [1, 256], "all", device=cuda_device, budget_ms=5, progress=False)
    assert (frame["x_roofline"] > 0.8).all()  # less than 1 only as far as the ceilings were measured too low
    assert math.isfinite(frame["x_cublas"].max())
    assert frame.loc[frame["provider"] == "ours", "config"].ne("").all()


@pytest.mark.gpu
def test_rotated_weights_pass_the_l2(cuda_device: torch.device) -> None:
    l2_bytes = torch.cuda.get_device_properties(cuda_device).L2_cache_size
    assert (timing.copies_beyond_l2(1 << 20, cuda_device) - 1) << 20 >= 3 * l2_bytes
    assert timing.copies_beyond_l2(1 << 32, cuda_device) == 2


@pytest.mark.gpu
def test_chain_on_a_gpu(cuda_device: torch.device) -> None:
    frame = wo.bench.chain("llama3-8b", 2, [1, 16], device=cuda_device, budget_ms=5, progress=False)
    assert list(frame["overlap"]) == [False, True] * 2
    assert (frame["x_roofline"] > 0.8).all()


@pytest.mark.gpu
def test_every_configuration_is_measured(cuda_device: torch.device) -> None:
    frame = wo.bench.measure_configs([(4096, 4096)], [1, 64], device=cuda_device, budget_ms=2, progress=False)
    assert (frame["us"] > 0).all()
    arch, sm_count = gpu_facts(cuda_device)
    problems = [Problem(m, 4096, 4096, "int4", 128, arch, sm_count) for m in (1, 64)]
    runnable = {c.kernel for c in wo.kernels() if any(legal(c, problem) for problem in problems)}
    assert {name.rpartition("_k")[0] for name in frame["config"]} == runnable
    assert wo.bench.regret(frame).worst >= 0
