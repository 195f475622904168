"""Target "calls": random calls of `gemm` and `dequantize`, each twice, against the oracle.

Every result is written into memory full of NaN, with more of it around: what is not written, written beside the result,
wrong, or other bits at the second time is a failure.
"""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

import torch

import weightonly as wo
from weightonly.bench.timing import overlapping
from weightonly.codebooks import CODEBOOKS
from weightonly.heuristics.problem import CODE_FORMATS, FLOAT_FORMATS, FORMATS

from .draw import DTYPES, Call, Drawer, Weight
from .loop import Outcome, Target
from .oracle import Grid, Sums, dense

_NAN = float("nan")
_WHOLE_BITS = {torch.float16: torch.int16, torch.bfloat16: torch.int16, torch.float32: torch.int32}


@dataclass(frozen=True)
class Operands:
    """A drawn weight on its device, packed, and the rows of x of all its calls."""

    qweight: wo.PackedWeight
    scales: torch.Tensor  # [K / g, N]
    zeros: torch.Tensor | None  # [K / g, N]
    bias: torch.Tensor  # [N]
    perm: torch.Tensor | None  # [K]
    x: torch.Tensor  # [rows, K]
    sums: Sums  # of all rows
    w64: torch.Tensor  # [K, N]


class Calls(Target):
    """Weights of every format, layout, type, group size and shape, and some calls with each."""

    name = "calls"

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.drawer = Drawer(device)

    def to_cover(self) -> set[str]:
        return self.drawer.kernel_names()

    def run(self, seed: int, index: int) -> Outcome:
        draw = random.Random(f"{seed}:{index}")
        weight = self.drawer.weight(draw)
        calls = self.drawer.calls(draw, weight)
        outcome = Outcome()
        wrong: list[torch.Tensor] = []  # bool: those of _CHECKS, of one call after another
        results: list[tuple[Call, torch.Tensor]] = []
        with fp32_sums(), torch.no_grad():
            try:
                rows = max(call.begin + call.m for call in calls)
                operands = make(weight, rows, draw.getrandbits(63), self.device)
                for call in calls:
                    y, flags = check(operands, call)
                    results.append((call, y))
                    wrong.append(flags)
                    outcome.covered |= kernel_names(call, weight)
                wrong.append(check_dequantize(operands))
                found = torch.stack(wrong).cpu()
            except Exception as error:  # whatever a random call makes the library raise is a finding
                what = str(results[-1][0]) if results else "the weight"
                outcome.failures += [f"{type(error).__name__}: {error}", f"{weight}", f"after {what}"]
                outcome.fatal = "CUDA error" in str(error)
                return outcome
        outcome.calls = len(calls)
        for (call, y), flags in zip(results, found[:-1].tolist(), strict=True):
            if any(flags):
                failed = [name for name, bad in zip(_CHECKS, flags, strict=True) if bad]
                outcome.failures.append(f"{call}: {', '.join(failed)}")
                outcome.failures.append(first_difference(operands, call, y))
        if any(found[-1].tolist()):
            outcome.failures.append("dequantize: another weight")
        if outcome.failures:
            outcome.failures.append(str(weight))
        return outcome


def kernel_names(call: Call, weight: Weight) -> set[str]:
    """The kernels that a call runs, as `Drawer.kernel_names` names them."""
    chosen = call.chosen
    parts = [part for part in (chosen, chosen and chosen.tail) if part is not None]
    return {f"{part.kernel}_{weight.types.name}" for part in parts}


_CHECKS = ("not the right numbers", "wrote outside of out", "other bits at the second call")


@contextlib.contextmanager
def fp32_sums() -> Iterator[None]:
    """cuBLAS may add the parts of a split K in 16 bits unless it is told not to: then sums are exact on the grid."""
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_fp16_reduced_precision_reduction, matmul.allow_bf16_reduced_precision_reduction
    matmul.allow_fp16_reduced_precision_reduction = matmul.allow_bf16_reduced_precision_reduction = False
    try:
        yield
    finally:
        matmul.allow_fp16_reduced_precision_reduction, matmul.allow_bf16_reduced_precision_reduction = before


def make(weight: Weight, rows: int, seed: int, device: torch.device) -> Operands:
    """Random operands on the oracle's grid."""
    g = torch.Generator(device).manual_seed(seed)
    k, n, dtype = weight.k, weight.n, DTYPES[weight.dtype]

    def integers(low: int, high: int, shape: tuple[int, ...]) -> torch.Tensor:
        """low ... high, both of them"""
        return torch.randint(low, high + 1, shape, generator=g, device=device)

    table, slack = None, False
    if weight.format in FLOAT_FORMATS:  # fp8 has all integers up to 16
        q = integers(-15, 15, (k, n)).to(torch.int8)
        grid = Grid(1.0, 15.0)
    elif weight.format in CODE_FORMATS:
        q = integers(0, 15, (k, n)).to(torch.int8)
        if weight.format == "code4":
            table = integers(-127, 127, (16,)).double()
            table[0] = 127  # one of them is not 0
        else:
            table = torch.tensor(CODEBOOKS[weight.format], device=device)
            # A GPU rounds the table to the dtype of x. The CPU does not: off the grid, its sums round.
            slack = device.type == "cpu"
            table = table.double() if slack else table.to(dtype).double()
        grid = Grid.of(table.tolist())
    else:
        limit = 1 << (FORMATS[weight.format] - 1)
        q = integers(-limit, limit - 1, (k, n)).to(torch.int8)
        grid = Grid(0.5 if weight.zeros == "half" else 1.0, 1.5 * limit)

    exponents = (-1, 0)  # of scales: products with small numbers of a table stay normal in fp16
    if grid.unit >= 0.5:
        size = math.log2(0.7 * grid.largest * math.sqrt(k))  # of a sum, before it is scaled
        low = max(-13, round(integers(-1, 6, ()).item() - size))
        exponents = (low, low + 2)
    grid = grid.scaled(exponents)
    shape = (1 if weight.group_size == -1 else k // weight.group_size, n)
    scales = placed(torch.exp2(integers(*exponents, shape).double()).to(dtype), weight.scales_form)
    zeros = None
    if weight.zeros != "none":
        step = 2 if weight.zeros == "half" else 1
        values = integers(-limit // 2 * step, limit // 2 * step, shape).double() / step
        zeros = placed(values.to(dtype), weight.zeros_form)
    bias = placed((integers(-8, 8, (1, n)).double() * 2.0 ** exponents[0]).to(dtype), weight.bias_form)[0]
    perm = torch.randperm(k, generator=g, device=device) if weight.perm else None

    terms = 16 if slack else grid.terms
    x = random_x(min(terms, k), 3 if 3 * k <= terms else 1, (rows, k), g).to(dtype)
    qweight = packed(weight, q, table)
    w64 = dense(q, scales, zeros, table)
    x64 = x.double() if perm is None else x.double()[:, perm]
    sums = Sums.of(x64, w64, terms if slack else None)
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # from here on the weights are constant, as one of the overlaps promises
    return Operands(qweight, scales, zeros, bias, perm, x, sums, w64)


def random_x(terms: int, largest: int, shape: tuple[int, int], g: torch.Generator) -> torch.Tensor:
    """Integers up to `largest`; in each row at most `terms` are not zero."""
    rows, k = shape
    if terms >= k:
        return torch.randint(-largest, largest + 1, shape, generator=g, device=g.device)
    signs = 2 * torch.randint(2, (k,), generator=g, device=g.device) - 1
    places = torch.randint(k, (rows, terms), generator=g, device=g.device)  # some of them twice: with one sign
    return torch.zeros(shape, dtype=torch.int64, device=g.device).scatter_(1, places, signs[places])


def packed(weight: Weight, q: torch.Tensor, table: torch.Tensor | None) -> wo.PackedWeight:
    if weight.format not in CODE_FORMATS:
        return wo.preprocess(q, FORMATS[weight.format], layout=weight.layout)
    if weight.format in FLOAT_FORMATS:
        return wo.preprocess(q.to(torch.float8_e4m3fn), format=weight.format, layout=weight.layout)
    code = table.float() if table is not None and weight.format == "code4" else None
    return wo.preprocess(q, format=weight.format, code=code, layout=weight.layout)


def placed(values: torch.Tensor, form: str) -> torch.Tensor:
    """The same [rows, columns] in another place, with NaN around it: one of FORMS."""
    rows, n = values.shape

    def nan(*shape: int) -> torch.Tensor:
        return values.new_full(shape, _NAN)

    views = {
        "plain": lambda: values,
        "shifted": lambda: nan(rows * n + 1)[1:].view(rows, n),
        "wide": lambda: nan(rows, n + 3)[:, :n],
        "columns": lambda: nan(rows, n + 24)[:, 16 : n + 16],
        "every other row": lambda: nan(2 * rows, n)[::2],
        "every other column": lambda: nan(rows, 2 * n)[:, ::2],
        "transposed": lambda: nan(n, rows).t(),
    }
    return views[form]().copy_(values)


def arranged(x: torch.Tensor, form: str) -> torch.Tensor:
    """The same rows [M, K] in another place or shape: one of X_FORMS."""
    m, k = x.shape
    if form == "aligned columns":
        return x.new_full((m, -(-k // 8) * 8 + 8), _NAN)[:, :k].copy_(x)
    if form == "batched":
        inner = next(size for size in (5, 3, 2, 1) if m % size == 0)
        return x.reshape(m // inner, inner, k)
    return x[0] if form == "vector" else placed(x, form)


def frame_for(shape: tuple[int, ...], form: str, like: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """(memory full of NaN, `out` in the middle of it), or None twice where `gemm` is to make the result."""
    if form == "none":
        return None, None
    if form != "line" and len(shape) == 2:
        m, n = shape
        if form == "every other row":
            frame = like.new_full((2 * m + 1, n), _NAN)
            return frame, frame[1::2]
        margin = 8 if form == "frame" else 3
        frame = like.new_full((m + 2, n + 2 * margin), _NAN)
        return frame, frame[1 : m + 1, margin : n + margin]
    size = math.prod(shape)
    frame = like.new_full((size + 14,), _NAN)
    return frame, frame[7 : 7 + size].view(shape)


def check(o: Operands, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """(y [M, N] of the first of two calls, bool: those of _CHECKS that failed). Does not wait for the GPU."""
    x = arranged(o.x[call.begin : call.begin + call.m], call.x_form)
    shape = (*x.shape[:-1], o.qweight.n)
    results, outside = [], torch.zeros((), dtype=torch.bool, device=x.device)
    with overlapping(call.overlap):
        for _ in range(2):
            frame, out = frame_for(shape, call.out_form, x)
            y = wo.gemm(
                x,
                o.qweight,
                o.scales,
                zeros=o.zeros,
                bias=o.bias if call.bias else None,
                activation=call.activation,
                out=out,
                config=call.config,
                perm=o.perm,
            )
            if y.shape != shape or y.dtype != x.dtype or (out is not None and y is not out):
                raise AssertionError(f"{call}: expected {x.dtype} {list(shape)}, got {y.dtype} {list(y.shape)}")
            if frame is not None:
                outside = outside | (frame.isnan().sum() != frame.numel() - y.numel())
            results.append(y.view(call.m, o.qweight.n))
    first, second = results
    bits = _WHOLE_BITS[x.dtype]
    repeats = (first.view(bits) == second.view(bits)).all()
    return first, torch.stack([differs(o, call, first).any(), outside, ~repeats])


def differs(o: Operands, call: Call, y: torch.Tensor) -> torch.Tensor:
    """bool [M, N]: where y is wrong."""
    rounds_early = call.chosen is not None and call.chosen.unfused
    sums = o.sums.rows(call.begin, call.begin + call.m)
    return sums.differs(y, o.bias if call.bias else None, call.activation, rounds_early)


def check_dequantize(o: Operands) -> torch.Tensor:
    """bool, as many as there are _CHECKS: whether `dequantize` gives another weight, nothing, other bits."""
    first, second = (wo.dequantize(o.qweight, o.scales, o.zeros) for _ in range(2))
    wrong = (first != o.w64.float().to(first.dtype)).any()
    return torch.stack([wrong, torch.zeros_like(wrong), (first != second).any()])


def first_difference(o: Operands, call: Call, y: torch.Tensor) -> str:
    wrong = differs(o, call, y).nonzero()
    if not len(wrong):
        return "  all numbers are right"
    row, column = wrong[0].tolist()
    total = o.sums.exact[call.begin + row, column].item()
    return (
        f"  {len(wrong)} of {y.numel()} numbers, first [{row}, {column}]: {y[row, column].item():g}; "
        f"its sum is {total:g}, the bias {o.bias[column].item():g}"
    )
