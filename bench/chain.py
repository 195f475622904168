"""The linears of a model's layers, one after another: what decoding costs when every weight is used once.

`python -m weightonly.bench chain --shapes llama3-8b --layers 32 --batch 1,16`

Single kernels are timed apart from each other (sweep.py). In a chain a kernel's launch, its first loads and its last
stores can hide behind its neighbours: with overlap of launches (programmatic dependent launch) they do, most of all
where weights are known to be constant (`wo.set_launch_overlap("constant_weights")`). Each linear reads the result of
the one before it, as in a model; what lies between them there (attention, norms) is left out.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from functools import partial

import pandas as pd
import torch
from tqdm import tqdm

import weightonly as wo
from weightonly.launch import LaunchOverlap
from weightonly.packing import format_of

from . import command
from .devices import default_device, require_gpu
from .providers import Packed
from .roofline import activation_bytes, ceilings, roofline_us
from .shapes import Shape, resolve
from .sweep import check_arguments
from .timing import overlapping, time_calls

OVERLAPS: tuple[LaunchOverlap, ...] = (False, True, "constant_weights")


def random_linear(
    shape: Shape, bits: int, group_size: int, symmetric: bool, dtype: torch.dtype, device: torch.device
) -> Packed:
    """Random values that keep the size of x, so that a long chain neither vanishes nor overflows."""
    k, n = shape
    limit = (1 << (bits - 1)) - 1
    # Without a mean: the sum of a row would grow by sqrt(k) times it from linear to linear.
    q = torch.randint(-limit, limit + 1, (k, n), dtype=torch.int8, device=device)  # [k, n]
    mean_square = limit * (limit + 1) / 3
    groups = 1 if group_size == -1 else k // group_size
    scales = torch.full((groups, n), (mean_square * k) ** -0.5, dtype=dtype, device=device)
    return Packed(wo.preprocess(q, bits=bits), scales, None if symmetric else torch.zeros_like(scales))


class Chain:
    """`layers` times the linears of `shapes`, all weights distinct, and the results between them for M = m."""

    def __init__(self, linears: Sequence[Packed], m: int) -> None:
        first = linears[0]
        self.linears = linears
        dtype, device = first.scales.dtype, first.scales.device
        self.x = torch.randn(m, first.qweight.k, dtype=dtype, device=device)  # [m, k] of the first
        # each [m, n]
        self.results = [torch.empty(m, linear.qweight.n, dtype=dtype, device=device) for linear in linears]

    def run(self) -> None:
        """One pass. A linear with fewer inputs than the one before it has outputs takes the first of them."""
        x = self.x
        for linear, out in zip(self.linears, self.results, strict=True):
            x = linear.multiply(x[:, : linear.qweight.k], out)

    def check(self) -> None:
        """RuntimeError unless the last result is that without overlap, bit for bit, and the first linear's is right."""
        last = []
        for overlap in OVERLAPS:
            with overlapping(overlap):
                self.run()
                last.append(self.results[-1].clone())
        if not all(torch.equal(y, last[0]) for y in last) or not last[0].isfinite().all():
            raise RuntimeError("chain: expected the same finite result with and without overlap of launches")
        first = self.linears[0]
        expected = self.x.float() @ first.dequantized().float()
        error = float((self.results[0].float() - expected).norm() / expected.norm())
        if not error < 0.01:
            raise RuntimeError(f"chain: relative error of the first linear is {error:.3g}, expected below 0.01")


def _chained(shapes: str | Iterable[str | Shape]) -> list[Shape]:
    """The linears of one layer, in order. Raises ValueError unless each has inputs enough from the one before it."""
    linears = resolve(shapes)
    for (_, n), (k, _) in itertools.pairwise([*linears, linears[0]]):
        if n < k:
            raise ValueError(f"shapes: expected a chain, but a linear of {k} inputs follows one of {n} outputs")
    return linears


def chain(
    shapes: str | Iterable[str | Shape] = "llama3-8b",
    layers: int = 32,
    batch: int | Iterable[int] = (1, 16),
    *,
    bits: int = 4,
    group_size: int = 128,
    dtype: torch.dtype = torch.float16,
    symmetric: bool = True,
    device: torch.device | str | None = None,
    budget_ms: float = 200.0,
    progress: bool = True,
) -> pd.DataFrame:
    """Time `layers` times the linears of one layer, as one CUDA graph (on a CPU: one call after another).

    Every weight is there once, so that all come from memory as far as together they are larger than the L2 cache.
    Before the timing the results with and without overlap of launches are compared bit for bit (RuntimeError).

    Args:
        shapes: the linears of the layer, "llama3-8b", "llama3-70b" or others that follow each other.
        layers: times the linears of one layer.
        batch: as for `sweep`.
        bits: as for `sweep`.
        group_size: as for `sweep`.
        dtype: as for `sweep`.
        symmetric: as for `sweep`.
        device: as for `sweep`, but that a CPU is measured only where this names it.
        budget_ms: device time per measurement.
        progress: as for `sweep`.

    Returns:
        One row per m and `overlap` (a str, as in `wo.set_launch_overlap`; on a CPU only "False"): `ms` per pass
        (median, with `ms_min`), `us_per_linear`, `tb_s` (weights, x and y of all linears, 10**12 bytes/s),
        `roofline_ms` (sum of the rooflines of the linears) and `x_roofline` (how many times longer; NaN on a CPU).

    Raises:
        ValueError: naming the argument, as for `sweep`.
        RuntimeError: no GPU, where `device` names none.

    Examples:
        >>> frame = wo.bench.chain(["512x768", "768x512"], 2, 1, device="cpu", dtype=torch.bfloat16, progress=False)
        >>> print(wo.bench.chain_table(frame).splitlines()[0])
        |   M | overlap   |   ms per pass |   us per linear |...
    """
    pairs = _chained(shapes)
    sizes = check_arguments(pairs, batch, format_of(bits, None), group_size, symmetric, dtype, budget_ms)
    if not isinstance(layers, int) or layers < 1:
        raise ValueError(f"layers: expected a positive integer, got {layers!r}")
    where = require_gpu("chain") if device is None else default_device(device)
    limits = ceilings(where)
    linears = [
        random_linear(shape, bits, group_size, symmetric, dtype, where)
        for _ in tqdm(range(layers), disable=not progress, unit="layer", desc="weights")
        for shape in pairs
    ]
    weight_bytes = sum(linear.nbytes for linear in linears)
    rows: list[dict[str, object]] = []
    for m in sizes:
        calls = Chain(linears, m)
        calls.check()
        moved = weight_bytes + layers * sum(activation_bytes(m, k, n) for k, n in pairs)
        least_us = partial(roofline_us, bits=bits, group_size=group_size, symmetric=symmetric, limits=limits)
        roofline_ms = layers * math.fsum(least_us(m, k, n) for k, n in pairs) / 1e3
        for overlap in OVERLAPS if where.type == "cuda" else OVERLAPS[:1]:
            with overlapping(overlap):
                timing = time_calls([calls.run], where, budget_ms=budget_ms)
            rows.append(
                {
                    "shapes": ",".join(f"{k}x{n}" for k, n in pairs),
                    "layers": layers,
                    "m": m,
                    "format": f"int{bits}",
                    "group_size": group_size,
                    "overlap": str(overlap),
                    "ms": timing.us / 1e3,
                    "ms_min": timing.min_us / 1e3,
                    "us_per_linear": timing.us / len(linears),
                    "tb_s": moved / timing.us / 1e6,
                    "roofline_ms": roofline_ms,
                    "x_roofline": timing.us / 1e3 / roofline_ms,
                }
            )
    return pd.DataFrame(rows)


def chain_table(frame: pd.DataFrame) -> str:
    """The rows of `chain` as a table. Needs the package tabulate.

    Args:
        frame: what `chain` returned.

    Examples:
        >>> frame = wo.bench.chain(["512x768", "768x512"], 1, 1, device="cpu", dtype=torch.bfloat16, progress=False)
        >>> "us per linear" in wo.bench.chain_table(frame)
        True
    """
    titles = {"m": "M", "overlap": "overlap", "ms": "ms per pass", "us_per_linear": "us per linear", "tb_s": "TB/s"}
    titles |= {"x_roofline": "x sum of rooflines"}
    table = frame[list(titles)].rename(columns=titles).dropna(axis=1, how="all")
    return str(table.to_markdown(index=False, floatfmt=".3f"))


def _add_options(parser: command.Parser) -> None:
    command.add_shapes(parser, "llama3-8b", "of the linears of one layer, in order")
    command.add_batch(parser, (1, 16))
    parser.add_argument("--layers", type=int, default=32, help="times the linears of one layer (default 32)")
    command.add_weights(parser, format=False)
    command.add_run(parser)


COMMAND = command.frame_command(
    "time the linears of a model's layers in one CUDA graph", _add_options, chain, chain_table
)
