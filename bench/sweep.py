"""`sweep`: every shape x batch x provider, timed, in one pandas DataFrame."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Iterable, Sequence

import pandas as pd
import torch
from tqdm import tqdm

from weightonly.heuristics import Problem
from weightonly.heuristics.problem import CODE_FORMATS
from weightonly.nvml import gpu_state
from weightonly.packed import format_of
from weightonly.plan import DTYPE_NAMES, preferred
from weightonly.tuned import table_of

from . import providers as _providers
from .roofline import activation_bytes, ceilings, roofline_us
from .shapes import Shape, resolve
from .timing import Stopwatch, copies_beyond_l2, host_us, overlapping, time_in_turns

BATCH: tuple[int, ...] = tuple(2**i for i in range(13))  # 1 ... 4096

_REST = 1.0  # idle time after a shape on a GPU, in lengths of its last M's turns

_DTYPE_NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16"}


def check_arguments(
    shapes: Sequence[Shape],
    batch: int | Iterable[int],
    format: str,
    group_size: int,
    symmetric: bool,
    dtype: torch.dtype,
    budget_ms: float,
) -> list[int]:
    """The batch as a list. Raises ValueError for what the kernels' formats do not have."""
    sizes = [batch] if isinstance(batch, int) else list(batch)
    if not sizes or not all(isinstance(m, int) and m > 0 for m in sizes):
        raise ValueError(f"batch: expected one or more positive integers, got {batch!r}")
    if format in CODE_FORMATS and not symmetric:
        raise ValueError(f"symmetric: expected True for {format}, which has no zero points, got False")
    if dtype not in _DTYPE_NAMES:
        raise ValueError(f"dtype: expected torch.float16 or torch.bfloat16, got {dtype!r}")
    if not budget_ms > 0:
        raise ValueError(f"budget_ms: expected a positive number of milliseconds, got {budget_ms!r}")
    if group_size != -1 and group_size < 1:
        raise ValueError(f"group_size: expected -1 (per channel) or a positive integer, got {group_size!r}")
    for k, n in shapes:
        if group_size != -1 and k % group_size:
            raise ValueError(f"group_size: expected a divisor of k = {k} (shape {k}x{n}), got {group_size}")
    return sizes


def default_device(device: torch.device | str | None) -> torch.device:
    """`device`, or the current GPU where PyTorch sees one, else the CPU."""
    return torch.device(device if device is not None else "cuda" if torch.cuda.is_available() else "cpu")


def gpu_facts(device: torch.device) -> tuple[int, int]:
    """(arch, such as 90; number of SMs), as the heuristics take them."""
    facts = torch.cuda.get_device_properties(device)
    return facts.major * 10 + facts.minor, facts.multi_processor_count


def _chosen_config(
    m: int, k: int, n: int, format: str, group_size: int, symmetric: bool, dtype: torch.dtype, device: torch.device
) -> str:
    """Name of the configuration that `gemm` runs; "cpu" on a CPU, which has one path."""
    if device.type != "cuda":
        return "cpu"
    problem = Problem(m, n, k, format, group_size, *gpu_facts(device), zeros=not symmetric)
    index = torch.cuda.current_device() if device.index is None else device.index
    return preferred(problem, DTYPE_NAMES[dtype], table_of(index)).name


def sweep(
    shapes: str | Iterable[str | Shape] = "llama3-8b",
    batch: int | Iterable[int] = BATCH,
    providers: str | Sequence[str] = ("ours", "cublas"),
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
    """Time x [m, k] @ w [k, n] for every shape, every m of `batch` and every provider.

    `shapes`: a name ("llama3-8b", "llama3-70b", "table", "minilm"), "KxN", or a list of these and of (k, n)
    pairs. `providers`: names of `PROVIDERS`, or "all" for every one that can run these weights on this
    device. `bits`, `format`: as `wo.preprocess`. `group_size`: -1 is one scale per channel. `device`: the GPU
    where there is one, unless given.
    `budget_ms`: device time per measurement, in three turns: the providers of a shape and m one after another.
    `host`: also a column `host_us`, of an eager call. Data are random; before its timing each provider's product is
    compared with the dense one (RuntimeError). Calls of `gemm` do not overlap with each other here
    (`wo.set_launch_overlap`): that is `chain`.

    Returns one row per (k, n, m, provider): `us` (median per call, with `us_min`, `us_p10`, `us_p90`), `tb_s`
    (what the provider's own weights, x and y move, in 10**12 bytes/s), `tflop_s`, `x_cublas` (how many times
    faster than provider "cublas" of this run; NaN without it), `roofline_us` and `x_roofline` (how many times
    longer than it; NaN on a CPU), `config` (name of the kernel that `gemm` chose; empty for other providers), `sm_mhz`
    (clock of the SMs right after the measurement; NaN where the driver does not say).

    Raises ValueError naming the argument for unknown names, sizes below 1, a group size that does not divide
    k, and a provider that cannot run this.
    """
    pairs = resolve(shapes)
    name = format_of(bits, format)
    sizes = check_arguments(pairs, batch, name, group_size, symmetric, dtype, budget_ms)
    where = default_device(device)
    chosen = _providers.named(providers, device=where, dtype=dtype, format=name, group_size=group_size)
    limits = ceilings(where)
    rows: list[dict[str, object]] = []
    with tqdm(total=len(pairs) * len(chosen) * len(sizes), disable=not progress, unit="cell") as bar:
        for k, n in pairs:
            weights = _providers.Weights.random(
                k, n, bits=bits, format=name, group_size=group_size, symmetric=symmetric, dtype=dtype, device=where
            )
            x = torch.randn(max(sizes), k, device=where, dtype=dtype)  # [m, k]
            prepared = {provider.name: provider.prepare(weights) for provider in chosen}
            rings = {who: p.copies(copies_beyond_l2(p.weight_bytes, where)) for who, p in prepared.items()}
            for m in sizes:
                bar.set_postfix_str(f"{k}x{n} m={m}")
                out = torch.empty(m, n, device=where, dtype=dtype)  # [m, n]
                calls_of = {}
                for provider, ring in rings.items():
                    _providers.check_product(provider, prepared[provider], ring, x[:m], out)
                    run, weight_bytes = prepared[provider].run, prepared[provider].weight_bytes
                    count = copies_beyond_l2(weight_bytes, where, activation_bytes(m, k, n))
                    calls_of[provider] = [functools.partial(run, operand, x[:m], out) for operand in ring[:count]]
                mhz: list[float] = [math.nan] * len(calls_of)

                def read_clock(i: int, mhz: list[float] = mhz) -> None:
                    state = gpu_state(where)
                    mhz[i] = math.nan if state is None or state.sm_mhz is None else state.sm_mhz

                started = time.perf_counter()
                with overlapping(False):
                    watches = [Stopwatch(calls, where) for calls in calls_of.values()]
                    timings = time_in_turns(watches, budget_ms, read_clock)
                took_s = time.perf_counter() - started
                for (provider, calls), timing, sm_mhz in zip(calls_of.items(), timings, mhz, strict=True):
                    row: dict[str, object] = {
                        "k": k,
                        "n": n,
                        "m": m,
                        "format": name,
                        "group_size": group_size,
                        "zeros": not symmetric,
                        "dtype": _DTYPE_NAMES[dtype],
                        "provider": provider,
                        "us": timing.us,
                        "us_min": timing.min_us,
                        "us_p10": timing.p10_us,
                        "us_p90": timing.p90_us,
                        "tb_s": (prepared[provider].weight_bytes + activation_bytes(m, k, n)) / timing.us / 1e6,
                        "tflop_s": 2 * m * n * k / timing.us / 1e6,
                        "roofline_us": roofline_us(
                            m, k, n, bits=bits, group_size=group_size, symmetric=symmetric, limits=limits
                        ),
                        "config": _chosen_config(m, k, n, name, group_size, symmetric, dtype, where)
                        if provider == "ours"
                        else "",
                        "sm_mhz": sm_mhz,
                    }
                    if host:
                        # An eager call on a CPU is all host time, and has just been measured.
                        row["host_us"] = host_us(calls[0], where) if where.type == "cuda" else timing.us
                    rows.append(row)
                    bar.update()
            del prepared, rings  # memory, before the next shape's
            if where.type == "cuda":
                # The small M of a shape were up to 26% slower right after the large M of another one than alone.
                time.sleep(_REST * took_s)
    return _with_ratios(pd.DataFrame(rows))


def _with_ratios(frame: pd.DataFrame) -> pd.DataFrame:
    """Adds `x_cublas` and `x_roofline`, and puts the providers of one (k, n, m) side by side."""
    cell = ["k", "n", "m"]
    cublas = frame[frame["provider"] == "cublas"].set_index(cell)["us"]
    frame["x_cublas"] = cublas.reindex(pd.MultiIndex.from_frame(frame[cell])).to_numpy() / frame["us"]
    frame["x_roofline"] = frame["us"] / frame["roofline_us"]
    place = {pair: i for i, pair in enumerate(dict.fromkeys(zip(frame["k"], frame["n"], strict=True)))}
    order = [(place[k, n], m) for k, n, m in frame[cell].itertuples(index=False)]
    return frame.iloc[sorted(range(len(frame)), key=order.__getitem__)].reset_index(drop=True)


def to_markdown(frame: pd.DataFrame) -> str:
    """A table: per (shape, m) the us of each provider, and "ours" beside cuBLAS and the roofline.

    Host times, where measured, follow in us per eager call. Needs the package tabulate.
    """
    table = frame.assign(shape=[f"{k}x{n}" for k, n in zip(frame["k"], frame["n"], strict=True)])
    lines: list[dict[str, object]] = []
    for (shape, m), cell in table.groupby(["shape", "m"], sort=False):
        line: dict[str, object] = {"K x N": shape, "M": m}
        for row in cell.to_dict("records"):
            line[f"{row['provider']} us"] = row["us"]
        for row in cell.to_dict("records"):
            if row["provider"] != "ours":
                continue
            line["x cuBLAS"] = row["x_cublas"]
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


def to_csv(frame: pd.DataFrame, path: str) -> None:
    """Every column, times in us with three decimals."""
    frame.to_csv(path, index=False, float_format="%.3f")
