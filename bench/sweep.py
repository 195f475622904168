"""`sweep`: every shape x batch x provider, timed, in one pandas DataFrame."""

from __future__ import annotations

import functools
import math
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import pandas as pd
import torch
from tqdm import tqdm

from weightonly.device import gpu_state
from weightonly.heuristics import Problem
from weightonly.heuristics.legal import check_kernel_group_size
from weightonly.heuristics.problem import CODE_FORMATS, FORMATS, check_format_groups, check_group_size
from weightonly.packing import format_of
from weightonly.plan.choose import DTYPE_NAMES, preferred
from weightonly.plan.tuned import table_of

from . import command
from . import providers as _providers
from .devices import default_device, gpu_facts
from .plot import plot
from .roofline import Ceilings, activation_bytes, ceilings, describe, roofline_us
from .shapes import Shape, resolve
from .timing import Call, CallTimer, Timing, copies_beyond_l2, host_us, overlapping, time_in_rounds
from .weights import Weights, dtype_name

BATCH: tuple[int, ...] = tuple(2**i for i in range(13))  # 1 ... 4096

_REST = 1.0  # idle time after a shape on a GPU, in lengths of its last M's rounds


def check_arguments(
    shapes: Sequence[Shape],
    batch: int | Iterable[int],
    format: str,
    group_size: int,
    symmetric: bool,
    dtype: torch.dtype,
    budget_ms: float,
    device: torch.device | None = None,
) -> list[int]:
    """The batch as a list. Raises ValueError for what the kernels' formats do not have. device: None for a GPU."""
    sizes = [batch] if isinstance(batch, int) else list(batch)
    if not sizes or not all(isinstance(m, int) and m > 0 for m in sizes):
        raise ValueError(f"batch: expected one or more positive integers, got {batch!r}")
    if format in CODE_FORMATS and not symmetric:
        raise ValueError(f"symmetric: expected True for {format}, which has no zero points, got False")
    if dtype_name(dtype) == "fp32" and (device is None or device.type == "cuda"):
        raise ValueError("dtype: expected torch.float16 or torch.bfloat16 on a GPU, got torch.float32")
    if not budget_ms > 0:
        raise ValueError(f"budget_ms: expected a positive number of milliseconds, got {budget_ms!r}")
    on_cpu = device is not None and device.type == "cpu"
    for k, _ in shapes:
        check_format_groups(format, group_size, k)
        (check_group_size if on_cpu else check_kernel_group_size)(group_size, k)
    return sizes


def _chosen_config(m: int, weights: Weights) -> str:
    """Name of the configuration that `gemm` runs; "cpu" on a CPU, which has one path."""
    device = weights.scales.device
    if device.type != "cuda":
        return "cpu"
    w = weights
    problem = Problem(m, w.n, w.k, w.format, w.group_size, *gpu_facts(device), zeros=w.zeros is not None)
    index = torch.cuda.current_device() if device.index is None else device.index
    return preferred(problem, DTYPE_NAMES[w.scales.dtype], table_of(index)).name


def sweep(
    shapes: str | Iterable[str | Shape] = "llama3-8b",
    batch: int | Iterable[int] = BATCH,
    providers: str | Sequence[str] = ("ours", "dense"),
    *,
    bits: int = 4,
    format: str | None = None,
    group_size: int = 128,
    dtype: torch.dtype = torch.float16,
    symmetric: bool = True,
    device: torch.device | str | None = None,
    budget_ms: float = 50.0,
    host: bool = False,
    progress: bool = True,
) -> pd.DataFrame:
    """Time `x [m, k] @ w [k, n]` for every shape, every m of `batch` and every provider.

    Data are random; before its timing each provider's product is compared with the dense one (RuntimeError). Calls of
    `gemm` do not overlap with each other here (`wo.set_launch_overlap`): that is `chain`.

    Args:
        shapes: a name ("llama3-8b", "llama3-70b", "table", "minilm"), "KxN", or a list of these and of (k, n) pairs.
        batch: rows of x, m.
        providers: names of `PROVIDERS`, or "all" for every one that can run these weights on this device; rows call
            them by what they are here ("dense": "cuBLAS fp16" or "torch bf16").
        bits: as for `wo.preprocess`.
        format: as for `wo.preprocess`.
        group_size: rows of w per scale; -1: per channel.
        dtype: of x; torch.float32 on a CPU alone.
        symmetric: without zero points.
        device: None: the GPU where there is one.
        budget_ms: device time per measurement, in three rounds: the providers of a shape and m one after another.
        host: also a column `host_us`, of an eager call.
        progress: whether to show a bar.

    Returns:
        One row per (k, n, m, provider): `us` (median per call, with `us_min`, `us_p10`, `us_p90`), `tb_s` (what the
        provider's own weights, x and y move, in 10**12 bytes/s), `tflop_s`, `x_dense` (how many times faster than the
        dense product of this run; NaN without it), `roofline_us` and `x_roofline` (how many times longer than it; NaN
        on a CPU), `config` (name of the kernel that `gemm` chose; empty for other providers), `sm_mhz` (clock of the
        SMs right after the measurement; NaN where the driver does not say).

    Raises:
        ValueError: naming the argument, unknown names, sizes below 1, a group size that `gemm` does not take or that is
            not the format's, and a provider that cannot run this.

    Examples:
        >>> frame = wo.bench.sweep("512x768", 1, device="cpu", dtype=torch.float32, budget_ms=1, progress=False)
        >>> frame["provider"].tolist()
        ['ours', 'torch fp32']
    """
    pairs = resolve(shapes)
    name = format_of(bits, format)
    where = default_device(device)
    sizes = check_arguments(pairs, batch, name, group_size, symmetric, dtype, budget_ms, where)
    chosen = _providers.named(providers, device=where, dtype=dtype, format=name, group_size=group_size, shapes=pairs)
    limits = ceilings(where)
    rows: list[dict[str, object]] = []
    with tqdm(total=len(pairs) * len(chosen) * len(sizes), disable=not progress, unit="cell") as bar:
        for k, n in pairs:
            weights = Weights.random(
                k, n, bits=bits, format=name, group_size=group_size, symmetric=symmetric, dtype=dtype, device=where
            )
            rows += _time_shape(weights, sizes, chosen, limits, budget_ms, host, bar)
    return _with_ratios(pd.DataFrame(rows))


def _time_shape(
    weights: Weights,
    batch: Sequence[int],
    providers: Sequence[_providers.Provider],
    limits: Ceilings | None,
    budget_ms: float,
    host: bool,
    bar: tqdm,
) -> list[dict[str, object]]:
    """The rows of one shape. Weights are copied once for all of `batch`."""
    k, n, dtype, device = weights.k, weights.n, weights.scales.dtype, weights.scales.device
    x = torch.randn(max(batch), k, device=device, dtype=dtype)  # [m, k]
    prepared = {provider.label(device, dtype): provider.prepare(weights) for provider in providers}
    operands = {label: p.copies(copies_beyond_l2(p.weight_bytes, device)) for label, p in prepared.items()}
    rows: list[dict[str, object]] = []
    took_s = 0.0
    for m in batch:
        bar.set_postfix_str(f"{k}x{n} m={m}")
        out = torch.empty(m, n, device=device, dtype=dtype)  # [m, n]
        calls: dict[str, list[Call]] = {}
        for label, copies in operands.items():
            _providers.check_product(label, prepared[label], copies, x[:m], out)
            count = copies_beyond_l2(prepared[label].weight_bytes, device, activation_bytes(m, k, n, dtype))
            calls[label] = [functools.partial(prepared[label].run, w, x[:m], out) for w in copies[:count]]
        started = time.perf_counter()
        timings, clocks = _in_rounds(list(calls.values()), device, budget_ms)
        took_s = time.perf_counter() - started
        for label, timing, sm_mhz in zip(calls, timings, clocks, strict=True):
            moved = prepared[label].weight_bytes + activation_bytes(m, k, n, dtype)
            row = _row(m, weights, label, timing, moved, limits) | {"sm_mhz": sm_mhz}
            if host:
                # An eager call on a CPU is all host time, and has just been measured.
                row["host_us"] = host_us(calls[label][0], device) if device.type == "cuda" else timing.us
            rows.append(row)
            bar.update()
    if device.type == "cuda":
        # The small M of a shape were up to 26% slower right after the large M of another one than alone.
        time.sleep(_REST * took_s)
    return rows


def _in_rounds(
    calls: Sequence[Sequence[Call]], device: torch.device, budget_ms: float
) -> tuple[list[Timing], list[float]]:
    """`time_in_rounds` without overlap of launches, and the clock of the SMs in MHz after each (NaN: not known)."""
    clocks = [math.nan] * len(calls)

    def read_clock(i: int) -> None:
        state = gpu_state(device)
        clocks[i] = math.nan if state is None or state.sm_mhz is None else state.sm_mhz

    with overlapping(False):
        timings = time_in_rounds([CallTimer(of_one, device) for of_one in calls], budget_ms, read_clock)
    return timings, clocks


def _row(
    m: int, weights: Weights, label: str, timing: Timing, moved_bytes: int, limits: Ceilings | None
) -> dict[str, object]:
    """A row of `sweep`, without clocks and ratios."""
    w = weights
    symmetric = w.zeros is None
    return {
        "k": w.k,
        "n": w.n,
        "m": m,
        "format": w.format,
        "group_size": w.group_size,
        "zeros": not symmetric,
        "dtype": dtype_name(w.scales.dtype),
        "provider": label,
        "us": timing.us,
        "us_min": timing.min_us,
        "us_p10": timing.p10_us,
        "us_p90": timing.p90_us,
        "tb_s": moved_bytes / timing.us / 1e6,
        "tflop_s": 2 * m * w.n * w.k / timing.us / 1e6,
        "roofline_us": roofline_us(
            m, w.k, w.n, bits=FORMATS[w.format], group_size=w.group_size, symmetric=symmetric, limits=limits
        ),
        "config": _chosen_config(m, w) if label == "ours" else "",
    }


def _with_ratios(frame: pd.DataFrame) -> pd.DataFrame:
    """Adds `x_dense` and `x_roofline`, and puts the providers of one (k, n, m) side by side."""
    cell = ["k", "n", "m"]
    dense = frame[frame["provider"].map(_providers.is_dense)].set_index(cell)["us"]
    frame["x_dense"] = dense.reindex(pd.MultiIndex.from_frame(frame[cell])).to_numpy() / frame["us"]
    frame["x_roofline"] = frame["us"] / frame["roofline_us"]
    place = {pair: i for i, pair in enumerate(dict.fromkeys(zip(frame["k"], frame["n"], strict=True)))}
    order = [(place[k, n], m) for k, n, m in frame[cell].itertuples(index=False)]
    return frame.iloc[sorted(range(len(frame)), key=order.__getitem__)].reset_index(drop=True)


def to_markdown(frame: pd.DataFrame) -> str:
    """A table: per (shape, m) the us of each provider, and "ours" beside the dense product and the roofline.

    Host times, where measured, follow in us per eager call. Needs the package tabulate.

    Args:
        frame: what `sweep` returned.

    Examples:
        >>> frame = wo.bench.sweep("512x768", 1, device="cpu", dtype=torch.float32, budget_ms=1, progress=False)
        >>> "ours us" in wo.bench.to_markdown(frame)
        True
    """
    table = frame.assign(shape=[f"{k}x{n}" for k, n in zip(frame["k"], frame["n"], strict=True)])
    lines: list[dict[str, object]] = []
    dense = next(filter(_providers.is_dense, frame["provider"]), None)
    for (shape, m), cell in table.groupby(["shape", "m"], sort=False):
        line: dict[str, object] = {"K x N": shape, "M": m}
        for row in cell.to_dict("records"):
            line[f"{row['provider']} us"] = row["us"]
        for row in cell.to_dict("records"):
            if row["provider"] != "ours":
                continue
            if dense is not None:
                line[f"ours beside {dense}"] = "" if math.isnan(row["x_dense"]) else times_faster(row["x_dense"])
            line["x roofline"] = row["x_roofline"]
            if not math.isnan(row["roofline_us"]):  # in these units a CPU's rates are 0.00
                line["TB/s"] = row["tb_s"]
                line["TFLOP/s"] = row["tflop_s"]
            line["config"] = row["config"]
        for row in cell.to_dict("records"):
            if "host_us" in row:
                line[f"{row['provider']} host us"] = row["host_us"]
        lines.append(line)
    return str(pd.DataFrame(lines).dropna(axis=1, how="all").to_markdown(index=False, floatfmt=".2f"))


def times_faster(ratio: float) -> str:
    """A speedup in words: "1.80 times faster", "50.0 times slower"."""
    factor = max(ratio, 1 / ratio)
    return f"{factor:.{2 if factor < 10 else 1}f} times {'faster' if ratio >= 1 else 'slower'}"


def _add_options(parser: command.Parser) -> None:
    command.add_shapes(parser, "llama3-8b")
    command.add_batch(parser, BATCH)
    command.add_weights(parser)
    command.add_providers(parser, "ours,dense")
    command.add_run(parser)
    command.add_csv(parser)
    parser.add_argument("--host", action="store_true", help="also the host time of an eager call")
    parser.add_argument("--markdown", metavar="FILE", help="write the printed table")
    parser.add_argument("--plot", metavar="FILE", help="write a picture (PNG)")


def _run(options: command.Options) -> int:
    command.note_on_overlap()
    frame = sweep(**command.keywords(options, sweep))
    table = to_markdown(frame)
    print(table)
    if limits := ceilings(default_device(options.device)):
        print(f"roofline: {describe(limits)}", file=sys.stderr)
    command.write_csv(frame, options)
    if options.markdown:
        Path(options.markdown).write_text(table + "\n", encoding="utf-8")
    if options.plot:
        plot(frame, options.plot)
    return 0


COMMAND = command.Command(
    "time shapes x batch x providers (the default command)", _add_options, _run, lambda options: False
)
