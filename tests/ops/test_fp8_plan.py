"""What a plan hands to the compiled kernels for x in 8 bits; no GPU runs them here (stand_in.py)."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
from tests.ops.stand_in import STREAM, Module

import weightonly as wo
from weightonly.activations import ACTIVATIONS
from weightonly.heuristics.configs import FP8_CONFIGS

FP8 = torch.float8_e4m3fn


def operands(k: int, n: int, m: int, groups: int = 1) -> dict[str, Any]:
    return {
        "x": torch.ones(m, k).to(FP8),
        "qweight": wo.preprocess(torch.ones(k, n, dtype=torch.int8), layout="tiled_fp8"),
        "scales": torch.ones(groups, n).bfloat16(),
        "x_scales": torch.ones(m),
        "config": FP8_CONFIGS[1],
    }


def test_sizes_and_addresses(module: Module) -> None:
    a = operands(256, 128, 3, groups=4)
    bias, out = torch.zeros(128).bfloat16(), torch.empty(3, 200).bfloat16()[:, :128]
    assert wo.gemm(**a, bias=bias, activation="silu", out=out) is out
    (launch,) = module.launches
    expected = {
        "device": -1, "is_tail": False, "m": 3, "n": 128, "k": 256, "n_padded": 128, "k_padded": 256, "group_size": 64,
        "ld_scales": 128, "activation": ACTIVATIONS["silu"].number, "x": a["x"].data_ptr(),
        "x_scales": a["x_scales"].data_ptr(), "weight": a["qweight"].data.data_ptr(), "scales": a["scales"].data_ptr(),
        "bias": bias.data_ptr(), "y": out.data_ptr(), "ldx": 256, "ldy": 200, "stream": STREAM,
        "scales_in_place": True, "split_k": 1,
    }  # fmt: skip
    assert {name: launch[name] for name in expected} == expected
    assert module.names[launch["kernel"]] == f"{FP8_CONFIGS[1].kernel}_bf16_int4_group"


def test_the_result_has_the_dtype_of_the_scales(module: Module) -> None:
    a = operands(256, 128, 6)
    for dtype, name in ((torch.float16, "f16"), (torch.bfloat16, "bf16")):
        y = wo.gemm(**a | {"scales": torch.ones(1, 128, dtype=dtype), "x": a["x"].view(2, 3, 256)}
                    | {"x_scales": a["x_scales"].view(2, 3)})  # fmt: skip
        assert y.dtype == dtype and y.shape == (2, 3, 128) and module.launches[-1]["y"] == y.data_ptr()
        assert module.names[module.launches[-1]["kernel"]].endswith(f"_{name}_int4_channel")


@pytest.mark.parametrize(("k", "ldx"), [(256, 264), (200, 200), (40, 48)], ids=["distance", "K", "both"])
def test_rows_are_copied_where_they_are_not_aligned(module: Module, k: int, ldx: int) -> None:
    """16 elements: K and rows that would do in 16 bits do not here. The columns that are added are zeros."""
    a = operands(k, 128, 5)
    a["x"] = torch.full((5, ldx), 2.0).to(FP8)[:, :k]
    seen = []

    def read(launch: dict[str, Any]) -> None:
        assert launch["k"] == launch["ldx"] == -(-k // 16) * 16 and launch["x"] % 16 == 0
        seen.append(ctypes.string_at(launch["x"], 5 * launch["k"]))

    module.at_launch = read
    wo.gemm(**a)
    rows = torch.frombuffer(bytearray(seen[0]), dtype=torch.uint8).view(5, -1).view(FP8).float()
    assert (rows[:, :k] == 2).all() and (rows[:, k:] == 0).all()


def test_operands_that_are_not_contiguous_are_copied(module: Module) -> None:
    a = operands(256, 100, 3, groups=2)
    a["x_scales"] = torch.tensor([1.0, 9, 2, 9, 3, 9])[::2]
    seen = []

    def read(launch: dict[str, Any]) -> None:
        seen.append([ctypes.c_float.from_address(launch["x_scales"] + 4 * i).value for i in range(3)])

    module.at_launch = read
    wo.gemm(**a)
    (launch,) = module.launches
    assert seen == [[1, 2, 3]]
    assert launch["scales"] != a["scales"].data_ptr() and launch["ld_scales"] == 128
    assert launch["scales_in_place"] is False


def test_later_calls_share_the_plan_and_bring_their_x_scales(module: Module) -> None:
    a = operands(256, 128, 2)
    for x_scales in (torch.ones(2), torch.zeros(2)):
        wo.gemm(**a | {"x_scales": x_scales})
        assert module.launches[-1]["x_scales"] == x_scales.data_ptr()
    assert module.plans == 1
    wo.gemm(**a | {"config": FP8_CONFIGS[2]})
    assert module.plans == 2


def test_one_group_of_mxfp4_is_a_group(module: Module) -> None:
    """Not all rows with the padding, as one group of integers is: kernels would read scales that nothing wrote."""
    config = next(c for c in FP8_CONFIGS if "mxfp4" in c.formats)
    w = wo.preprocess(torch.ones(32, 64, dtype=torch.int8), format="mxfp4", layout="tiled_fp8")
    wo.gemm(torch.ones(3, 32).to(FP8), w, torch.ones(1, 64).half(), x_scales=torch.ones(3), config=config)
    (launch,) = module.launches
    assert launch["group_size"] == 32 and launch["k_padded"] == 64
