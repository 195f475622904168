"""The benchmark's sweep: the shapes it takes, its rows, table and picture, and what it refuses."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

import weightonly as wo
from weightonly.bench import shapes
from weightonly.bench.sweep import check_arguments, times_faster

TINY = [(128, 64), (256, 128)]
BF16: dict[str, Any] = {"dtype": torch.bfloat16}


@pytest.fixture(scope="module")
def tiny() -> pd.DataFrame:
    return wo.bench.sweep(
        TINY, [1, 3, 16], "all", dtype=torch.bfloat16, device="cpu", budget_ms=1, host=True, progress=False
    )


def test_sweep_has_one_row_per_shape_batch_and_provider(tiny: pd.DataFrame) -> None:
    names = ["ours", "torch bf16", "dequantize+matmul", "torch int4"]
    names += ["bitsandbytes NF4"] if importlib.util.find_spec("bitsandbytes") else []
    expected = [(k, n, m, name) for k, n in TINY for m in (1, 3, 16) for name in names]
    assert [tuple(row) for row in tiny[["k", "n", "m", "provider"]].itertuples(index=False)] == expected


def test_sweep_rates_follow_from_its_times(tiny: pd.DataFrame) -> None:
    row = tiny[(tiny["k"] == 256) & (tiny["m"] == 3) & (tiny["provider"] == "ours")].iloc[0]
    packed, scales, x, y = 256 * 128 // 2, 2 * 128 * 2, 3 * 256 * 2, 3 * 128 * 2
    assert row["tb_s"] == pytest.approx((packed + scales + x + y) / row["us"] / 1e6)
    assert row["tflop_s"] == pytest.approx(2 * 3 * 256 * 128 / row["us"] / 1e6)
    dense = tiny[(tiny["k"] == 256) & (tiny["m"] == 3) & (tiny["provider"] == "torch bf16")].iloc[0]
    assert row["x_dense"] == pytest.approx(dense["us"] / row["us"])
    assert dense["x_dense"] == 1
    assert (tiny["us_min"] <= tiny["us_p10"]).all() and (tiny["us_p10"] <= tiny["us_p90"]).all()
    assert (tiny["host_us"] > 0).all()


def test_sweep_on_a_cpu_has_no_roofline_and_one_config(tiny: pd.DataFrame) -> None:
    assert tiny["roofline_us"].isna().all() and tiny["x_roofline"].isna().all()
    assert set(tiny.loc[tiny["provider"] == "ours", "config"]) == {"cpu"}


def test_sweep_without_the_dense_product_has_no_ratio_to_it() -> None:
    frame = wo.bench.sweep([(128, 64)], 1, "ours", group_size=-1, bits=8, device="cpu", budget_ms=1, progress=False)
    assert frame["x_dense"].isna().all()
    assert frame["us"].gt(0).all()


def test_a_cpu_multiplies_in_fp32_too() -> None:
    options: dict[str, Any] = {"dtype": torch.float32, "device": "cpu", "budget_ms": 1, "progress": False}
    frame = wo.bench.sweep([(128, 64)], 2, **options)
    assert list(frame["provider"]) == ["ours", "torch fp32"] and set(frame["dtype"]) == {"fp32"}
    ours = frame.iloc[0]
    packed, scales, x, y = 128 * 64 // 2, 64 * 4, 2 * 128 * 4, 2 * 64 * 4
    assert ours["tb_s"] == pytest.approx((packed + scales + x + y) / ours["us"] / 1e6)


def test_all_leaves_out_who_cannot_run_a_shape() -> None:
    options: dict[str, Any] = {"device": "cpu", "budget_ms": 1, "progress": False}
    frame = wo.bench.sweep([(128, 64), (128, 77)], 1, "all", **options, **BF16)
    assert list(dict.fromkeys(frame["provider"])) == ["ours", "torch bf16", "dequantize+matmul"]


@pytest.mark.parametrize(
    ("ratio", "words"), [(1.8, "1.80 times faster"), (0.02, "50.0 times slower"), (1.0, "1.00 times faster")]
)
def test_a_speedup_in_words(ratio: float, words: str) -> None:
    assert times_faster(ratio) == words


def test_markdown_names_shapes_providers_and_units(tiny: pd.DataFrame) -> None:
    lines = wo.bench.to_markdown(tiny).splitlines()
    assert len(lines) == 2 + 6
    for column in ("K x N", "M", "ours us", "torch int4 us", "torch bf16 us", "ours beside torch bf16", "ours host us"):
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
        pytest.param("group_size must be 16", {"format": "nvfp4", "group_size": 32}, id="group-of-another-format"),
        pytest.param("providers", {"providers": ["ours", "theirs"]}, id="unknown-provider"),
        pytest.param("providers", {"providers": []}, id="no-provider"),
        pytest.param("tinygemm", {"providers": "tinygemm", "dtype": torch.float16}, id="provider-cannot-fp16"),
        pytest.param("bitsandbytes", {"providers": "bitsandbytes", "bits": 8}, id="provider-cannot-int8"),
        pytest.param(
            "tinygemm .*not 77", {"providers": "tinygemm", "shapes": "128x77"} | BF16, id="provider-cannot-77"
        ),
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


def test_a_gpu_has_no_fp32() -> None:
    with pytest.raises(ValueError, match=r"^dtype: expected torch.float16 or torch.bfloat16 on a GPU"):
        check_arguments([(128, 64)], 1, "int4", 64, True, torch.float32, 1.0, torch.device("cuda"))


def test_unknown_shape_name_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"llama3-8b, llama3-70b, .*table, minilm.*'llama9'"):
        shapes.resolve("llama9")


def test_shapes_come_by_name_by_size_and_as_pairs() -> None:
    assert shapes.resolve("minilm,64x32") == [(384, 384), (384, 1536), (1536, 384), (64, 32)]
    assert shapes.resolve([(64, 32), "64x32", "128x64"]) == [(64, 32), (128, 64)]
    assert len(shapes.resolve("table")) == 7


def test_plot_writes_a_picture(tiny: pd.DataFrame, tmp_path: Path) -> None:
    frame = tiny.assign(roofline_us=tiny["m"] * 0.5)
    wo.bench.plot(frame, str(tmp_path / "sweep.png"))
    header = (tmp_path / "sweep.png").read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = int.from_bytes(header[16:20], "big"), int.from_bytes(header[20:24], "big")
    assert width > height > 300  # two panels side by side
    with pytest.raises(ValueError, match="frame"):
        wo.bench.plot(frame.iloc[:0], str(tmp_path / "none.png"))


@pytest.mark.gpu
def test_sweep_on_a_gpu_stays_above_the_roofline(cuda_device: torch.device) -> None:
    frame = wo.bench.sweep([(4096, 4096)], [1, 256], "all", device=cuda_device, budget_ms=5, progress=False)
    assert (frame["x_roofline"] > 0.8).all()  # less than 1 only as far as the ceilings were measured too low
    assert math.isfinite(frame["x_dense"].max())
    assert frame.loc[frame["provider"] == "ours", "config"].ne("").all()
