"""What the heuristic leaves on the table: every compiled configuration timed, its choice beside the best.

`python -m tools.regret --shapes table --batch 1,16,256 --csv configs.csv`
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from tqdm import tqdm

import weightonly as wo
from weightonly.bench import command
from weightonly.bench.config_timer import ConfigTimer
from weightonly.bench.devices import gpu_facts, require_gpu
from weightonly.bench.shapes import Shape, resolve
from weightonly.bench.sweep import check_arguments
from weightonly.bench.timing import Timing
from weightonly.bench.weights import Weights
from weightonly.heuristics import KernelConfig, Problem, candidates, select
from weightonly.heuristics.problem import FP8_LAYOUT, LAYOUTS, is_read
from weightonly.heuristics.select import likely_pairs
from weightonly.packing import format_of

# A configuration this many times slower than the best so far, after one quick measurement, is not measured
# further.
_HOPELESS = 1.6

# While calls that take so long are measured, clocks drift: the best and what is so close are measured again, in rounds.
_DRIFTS_US = 100.0
_CLOSE = 1.3
_MOST_CLOSE = 10

CELL = ["k", "n", "m", "format", "group_size", "arch", "sm_count", "layout", "zeros"]


def measure_configs(
    shapes: str | Iterable[str | Shape] = "table",
    batch: int | Iterable[int] = (1, 4, 16, 64, 256, 1024, 4096),
    *,
    bits: int = 4,
    format: str | None = None,
    group_size: int = 128,
    dtype: torch.dtype = torch.float16,
    symmetric: bool = True,
    layout: str | None = None,
    device: torch.device | str | None = None,
    budget_ms: float = 8.0,
    progress: bool = True,
) -> pd.DataFrame:
    """Time every compiled configuration that is legal for each (shape, m), without overlap of calls.

    Of pairs of launches only the few likely ones. Arguments as `sweep`; `budget_ms` is device time per
    configuration, `layout` is of the weights (default: the GPU's own; Hopper reads "interleaved" too). Returns one
    row per (cell, configuration): the columns of `CELL`, `config`, `family`, `block_m`, `block_n`, `stages`, `split_k`,
    `us` and `coarse` (True: so slow that it was measured once only, or not again where clocks drift). Raises
    RuntimeError without a GPU, ValueError as `sweep` and for a layout that the GPU does not read.
    """
    pairs = resolve(shapes)
    name = format_of(bits, format)
    sizes = check_arguments(pairs, batch, name, group_size, symmetric, dtype, budget_ms)
    where = require_gpu("regret", device)
    arch, sm_count = gpu_facts(where)
    if layout is not None and not is_read(layout, arch):
        known = ", ".join(name for name in (*LAYOUTS, FP8_LAYOUT) if is_read(name, arch))
        raise ValueError(f"layout: expected one of {known}, which the GPU reads, got {layout!r}")
    compiled = {config.kernel for config in (*wo.kernels(where.index), *wo.fp8_kernels(where.index))}
    rows: list[dict[str, object]] = []
    with tqdm(total=len(pairs) * len(sizes), disable=not progress, unit="cell") as bar:
        for k, n in pairs:
            weights = Weights.random(
                k, n, bits=bits, format=name, group_size=group_size, symmetric=symmetric, dtype=dtype, device=where
            )
            timer = ConfigTimer(weights, max(sizes), layout)
            for m in sizes:
                problem = Problem(m, n, k, name, group_size, arch, sm_count, layout or "", not symmetric)
                legal = [c for c in (*candidates(problem), *likely_pairs(problem)) if c.kernels() <= compiled]
                # The heuristic's choice first: near the best, it lets the hopeless ones be given up early.
                chosen = heuristic_choice(problem)
                legal.sort(key=lambda config: config.name != chosen)
                best_us = math.inf
                times: dict[KernelConfig, Timing] = {}
                for config in legal:
                    bar.set_postfix_str(f"{k}x{n} m={m} {config.name}")
                    times[config] = timer(m, config, budget_ms=budget_ms, give_up_us=_HOPELESS * best_us)
                    best_us = min(best_us, times[config].us)
                if best_us > _DRIFTS_US:
                    close = sorted((c for c in times if times[c].us <= _CLOSE * best_us), key=lambda c: times[c].us)
                    close = list(dict.fromkeys([*close[:_MOST_CLOSE], legal[0]]))
                    again = dict(zip(close, timer.in_rounds(m, close, budget_ms=budget_ms), strict=True))
                    # What the clocks make of the others is estimated.
                    slower = statistics.median(timing.us / times[config].us for config, timing in again.items())
                    times = {config: Timing.of([t.us * slower], coarse=True) for config, t in times.items()} | again
                rows += [_row(problem, config, timing.us, timing.coarse) for config, timing in times.items()]
                bar.update()
    return pd.DataFrame(rows)


def _row(problem: Problem, config: KernelConfig, us: float, coarse: bool) -> dict[str, object]:
    return {
        **{column: getattr(problem, column) for column in CELL},
        "config": config.name,
        "family": config.family,
        "block_m": config.block_m,
        "block_n": config.block_n,
        "stages": config.stages,
        "split_k": config.split_k,
        "us": us,
        "coarse": coarse,
    }


def heuristic_choice(problem: Problem) -> str:
    """Name of the configuration that `gemm` runs."""
    return select(problem).name


@dataclass(frozen=True)
class Regret:
    """`cells`: per cell `best`, `best_us`, `chosen`, `chosen_us` and `regret` = chosen_us / best_us - 1."""

    cells: pd.DataFrame
    mean: float
    worst: float


def regret(frame: pd.DataFrame, choose: Callable[[Problem], str] = heuristic_choice) -> Regret:
    """What the choices of `choose` cost by measurements of `measure_configs`, fresh or from a file (no GPU).

    Files of before there was a column for them have symmetric weights in the layout of Ampere.
    Raises ValueError for an empty frame, and for a choice that was not measured: the measurements are then
    older than the list of configurations.
    """
    missing = {"layout": "interleaved", "zeros": False}
    frame = frame.assign(**{name: value for name, value in missing.items() if name not in frame})
    return judge(frame, CELL, lambda cell: choose(Problem(**{**cell, "zeros": bool(cell["zeros"])})))


def judge(frame: pd.DataFrame, cell_columns: Sequence[str], choose: Callable[[dict[str, Any]], str]) -> Regret:
    """The regret of what `choose` says of each cell, by the columns `config` and `us`. Errors as of `regret`."""
    if frame.empty:
        raise ValueError("frame: expected the rows of measure_configs, got none")
    rows: list[dict[str, object]] = []
    for key, configs in frame.groupby(list(cell_columns), sort=False):
        cell = dict(zip(cell_columns, key, strict=True))
        chosen, times_us = choose(cell), configs.set_index("config")["us"]
        if chosen not in times_us.index:
            where = f"k={cell['k']}, n={cell['n']}, m={cell['m']}"
            raise ValueError(f"frame: expected a row of the chosen configuration {chosen} at {where}")
        best = times_us.idxmin()
        found = {"best": best, "best_us": times_us[best], "chosen": chosen, "chosen_us": times_us[chosen]}
        rows.append(cell | found | {"regret": times_us[chosen] / times_us[best] - 1})
    cells = pd.DataFrame(rows)
    return Regret(cells, float(cells["regret"].mean()), float(cells["regret"].max()))


# --- the command line ------------------------------------------------------------------------------------------


def regret_command(
    help: str,
    add_options: Callable[[command.Parser], None],
    measure: Callable[..., pd.DataFrame],
    judge: Callable[[pd.DataFrame], Regret],
) -> command.Command:
    """Times configurations, or reads their times, and prints the regret."""

    def add_all(parser: command.Parser) -> None:
        add_options(parser)
        command.add_csv(parser)
        parser.add_argument("--read", metavar="FILE", help="judge the measurements of an earlier --csv; no GPU needed")

    def run(options: command.Options) -> int:
        if options.read:
            frame = pd.read_csv(options.read)
        else:
            command.note_on_overlap()
            frame = measure(**command.keywords(options, measure))
        command.write_csv(frame, options)
        result = judge(frame)
        print(result.cells.to_markdown(index=False, floatfmt=".3f"))
        print(f"regret: mean {result.mean:.1%}, worst {result.worst:.1%} of {len(result.cells)} cells")
        return 0

    return command.Command(help, add_all, run, lambda options: options.read is None)


def _add_options(parser: command.Parser) -> None:
    command.add_shapes(parser, "table")
    command.add_batch(parser, (1, 4, 16, 64, 256, 1024, 4096))
    command.add_weights(parser)
    command.add_run(parser)
    parser.add_argument("--layout", help="of the weights (default: the GPU's own; Hopper reads interleaved, too)")


COMMAND = regret_command(
    "time every compiled configuration beside the heuristic's choice", _add_options, measure_configs, regret
)


def main(argv: Sequence[str] | None = None) -> int:
    return command.run_command(COMMAND, "python -m tools.regret", argv)


if __name__ == "__main__":
    sys.exit(main())
