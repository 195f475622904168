"""Every grouped configuration timed on the products of mixtures: for the fit of their cost model, and its regret.

python -m tools.regret_experts --csv grouped.csv
python -m tools.regret_experts --csv grouped_fp8.csv --formats int4,mxfp4 --layout tiled_fp8
python -m tools.regret_experts --read grouped.csv
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from tqdm import tqdm

import weightonly as wo
from weightonly.bench import command
from weightonly.bench.devices import gpu_facts, require_gpu
from weightonly.bench.experts.measure import BATCH
from weightonly.bench.experts.routing import Routing, topk_ids
from weightonly.bench.experts.weights import PRODUCTS
from weightonly.bench.runner import check_some
from weightonly.bench.shapes import MIXTURES
from weightonly.bench.timing import overlapping, time_calls
from weightonly.heuristics import KernelConfig, Problem
from weightonly.heuristics.grouped import select_grouped, why_not_grouped
from weightonly.heuristics.problem import FP8_LAYOUT
from weightonly.kernels import is_compiled
from weightonly.layout import TILED
from weightonly.plan.choose import types_of

from .regret import Regret, judge, regret_command

CELL = ["model", "k", "n", "m", "format", "group_size", "routing", "skew", "dtype", "arch", "sm_count", "layout"]
"""m: tokens, each with top_k rows."""

ROUTINGS = (("even", 0.0), ("skewed", 0.0), ("skewed", 1.0))
"""Names and skews: in turns, by chance, with favourites."""

GROUP_SIZES = {"int4": (128, 64), "int8": (-1,), "nf4": (64,), "mxfp4": (32,)}
"""Format -> the groups it is measured with: the first that divides K."""

_HOPELESS = 3.0
"""A configuration that many times slower than the best, in its first quick measurement, is not measured further."""


def routings_of(cell: Mapping[str, Any]) -> list[torch.Tensor]:
    """int32 [M, top_k] for each of the calls that are timed one after another: so many that small ones do not find
    their weights in the L2 cache."""
    sizes, tokens = MIXTURES[cell["model"]], int(cell["m"])
    calls = 8 if tokens * sizes.top_k < sizes.experts else 2
    of_cell = cell["routing"], tokens, sizes.experts, sizes.top_k, torch.device("cpu"), float(cell["skew"])
    return [topk_ids(*of_cell, seed) for seed in range(calls)]


def rows_of_experts(cell: Mapping[str, Any]) -> list[np.ndarray]:
    """int64 [E] for each of these calls: the rows of each expert."""
    experts = MIXTURES[cell["model"]].experts
    return [torch.bincount(ids.flatten().long(), minlength=experts).numpy() for ids in routings_of(cell)]


def measure_configs(
    shapes: Sequence[str],
    batch: Sequence[int],
    formats: Sequence[str] = ("int4",),
    routings: Sequence[tuple[str, float]] = ROUTINGS,
    *,
    layout: str = TILED,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str | None = None,
    budget_ms: float = 6.0,
    progress: bool = True,
) -> pd.DataFrame:
    """One row per cell (`CELL`) and configuration: `family`, `config` and `us`. Weights are random bytes; x is in E4M3
    for those in layout "tiled_fp8".

    Raises RuntimeError without a GPU, ValueError naming the argument for models, formats and layouts there are not.
    """
    check_some("shapes", shapes, MIXTURES, "models, ")
    check_some("formats", formats, GROUP_SIZES)
    check_some("layout", [layout], (TILED, FP8_LAYOUT))
    where = require_gpu("regret_experts", device)
    rows: list[dict[str, object]] = []
    weights = list(itertools.product(shapes, formats, PRODUCTS))
    arch, sm_count = gpu_facts(where)
    of_run = {"dtype": str(dtype).removeprefix("torch."), "arch": arch, "sm_count": sm_count, "layout": layout}
    with tqdm(total=len(weights) * len(batch) * len(routings), disable=not progress, unit="cell") as bar:
        for model, format, product in weights:
            k, n = MIXTURES[model].shape(product)
            group_size = next(g for g in GROUP_SIZES[format] if g == -1 or k % g == 0)
            qweight, scales = _random(MIXTURES[model].experts, k, n, format, group_size, layout, dtype, where)
            of_weight = {"model": model, "k": k, "n": n, "format": format, "group_size": group_size}
            for tokens, (routing, skew) in itertools.product(batch, routings):
                bar.set_postfix_str(f"{model} {format} {k}x{n} M = {tokens}, {routing} {skew}")
                cell = of_weight | of_run | {"m": tokens, "routing": routing, "skew": skew}
                cell = {name: cell[name] for name in CELL}
                times = _times(cell, qweight, scales, dtype, where, budget_ms)
                rows += [cell | {"family": c.family, "config": c.kernel, "us": us} for c, us in times.items()]
                bar.update()
    return pd.DataFrame(rows)


def _random(
    experts: int, k: int, n: int, format: str, group_size: int, layout: str, dtype: torch.dtype, device: torch.device
) -> tuple[wo.PackedWeight, torch.Tensor]:
    bits, columns, rows = (8 if format == "int8" else 4), -(-n // 64) * 64, -(-k // 64) * 64
    data = torch.randint(0, 256, (experts * rows * columns * bits // 8,), dtype=torch.uint8, device=device)
    groups = 1 if group_size == -1 else k // group_size
    scales = torch.rand(experts, groups, columns, device=device).mul_(0.01).to(dtype)[:, :, :n]
    if format == "mxfp4":  # as near each other as those of random weights
        scales = torch.exp2(torch.randint(-9, -6, scales.shape, device=device).float()).to(dtype)
    return wo.PackedWeight(data, k, n, format, layout, experts=experts), scales


def with_layouts(frame: pd.DataFrame) -> pd.DataFrame:
    """Files of before there was a column for them have weights in layout "tiled"."""
    return frame.assign(layout=frame.layout.fillna(TILED) if "layout" in frame else TILED)


def problem_of(cell: Mapping[str, Any]) -> tuple[Problem, int]:
    """The problem, and the experts."""
    sizes = MIXTURES[cell["model"]]
    k, n, m, group_size, arch, sm_count = (
        int(cell[name]) for name in ("k", "n", "m", "group_size", "arch", "sm_count")
    )
    return Problem(m * sizes.top_k, n, k, cell["format"], group_size, arch, sm_count, cell["layout"]), sizes.experts


def _times(
    cell: Mapping[str, Any],
    qweight: wo.PackedWeight,
    scales: torch.Tensor,
    dtype: torch.dtype,
    device: torch.device,
    budget_ms: float,
) -> dict[KernelConfig, float]:
    problem, experts = problem_of(cell)
    offs = [Routing.of(ids.to(device), experts).offs for ids in routings_of(cell)]
    x = [torch.randn(problem.m, problem.k, device=device, dtype=dtype) for _ in offs]  # (T, K) each
    out = [torch.empty(problem.m, problem.n, device=device, dtype=dtype) for _ in offs]  # (T, N) each
    given: list[dict[str, Any]] = [{"x": one} for one in x]
    if problem.layout == FP8_LAYOUT:
        given = [dict(zip(("x", "x_scales"), wo.quantize_activations(one), strict=True)) for one in x]
    types = types_of(problem, dtype)
    found: dict[KernelConfig, float] = {}
    for config in (*wo.grouped_kernels(device.index or 0), *wo.grouped_fp8_kernels(device.index or 0)):
        if not is_compiled(config, types) or why_not_grouped(config, problem, experts) is not None:
            continue
        calls = [
            functools.partial(wo.grouped_gemm, qweight=qweight, scales=scales, offs=ends, out=to, config=config, **of)
            for of, to, ends in zip(given, out, offs, strict=True)
        ]
        give_up_us = _HOPELESS * min(found.values(), default=float("inf"))
        with overlapping(False):
            found[config] = time_calls(calls, device, budget_ms=budget_ms, give_up_us=give_up_us).us
    return found


def regret(frame: pd.DataFrame) -> Regret:
    """What the choices cost by measurements of `measure_configs`.

    Raises ValueError for a frame without rows, and for a choice that was not measured.
    """

    def choose(cell: dict[str, Any]) -> str:
        chosen = select_grouped(*problem_of(cell))
        return "none" if chosen is None else chosen.kernel

    return judge(with_layouts(frame), CELL, choose)


def _add_options(parser: command.Parser) -> None:
    known = [name for name in MIXTURES if name != "tiny"]
    parser.add_argument(
        "--shapes", type=command.names, default=known, help=f"models, by commas (default {','.join(known)})"
    )
    command.add_batch(parser, BATCH, "tokens")
    parser.add_argument(
        "--formats", type=command.names, default=list(GROUP_SIZES), help=f"some of {','.join(GROUP_SIZES)}"
    )
    parser.add_argument("--layout", default=TILED, help=f"of the weights, {TILED} or {FP8_LAYOUT} (default {TILED})")
    command.add_run(parser, dtype="bf16")


COMMAND = regret_command(
    "time every grouped configuration beside the choice, on products of mixtures of experts",
    _add_options,
    measure_configs,
    regret,
)


def main(argv: Sequence[str] | None = None) -> int:
    return command.run_command(COMMAND, "python -m tools.regret_experts", argv)


if __name__ == "__main__":
    sys.exit(main())
