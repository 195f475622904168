"""The conversions of whole weights beside a copy of as many bytes: no kernel that reads and writes them is quicker.

`python -m tools.conversions --shapes 8192x8192 --elements 67108864`
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import pandas as pd
import torch
from tqdm import tqdm

import weightonly as wo
from weightonly.bench import command
from weightonly.bench.devices import default_device, require_gpu
from weightonly.bench.providers import nbytes
from weightonly.bench.shapes import Shape, resolve
from weightonly.bench.timing import copies_beyond_l2, time_calls
from weightonly.codebooks import BLOCK_FORMATS
from weightonly.layout import INTERLEAVED, TILED
from weightonly.ops.blocks_4bit import BLOCKSIZES

SHAPES: tuple[str, ...] = ("8192x8192", "8192x28672")
ELEMENTS: tuple[int, ...] = (64 << 20, 256 << 20)

_SAMPLE_ELEMS = 1 << 16  # of a result, compared with the CPU's before anything is timed

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class _Case:
    """One conversion of random data."""

    operation: str
    size: str
    block: int  # elements that share a scale
    inputs: Tensors
    convert: Callable[..., torch.Tensor | Tensors]
    sample: Callable[[Tensors], Tensors]  # a part of the result
    expected: Callable[[], torch.Tensor | Tensors]  # the same part by the CPU

    def run(self, *inputs: torch.Tensor) -> Tensors:
        return _as_tuple(self.convert(*inputs))

    def check(self, result: Tensors) -> None:
        """Raises RuntimeError unless a part of the result is the CPU's."""
        for mine, expected in zip(self.sample(result), _as_tuple(self.expected()), strict=True):
            if not torch.equal(mine.cpu(), expected):
                raise RuntimeError(f"{self.operation} {self.size}: expected the CPU's result, got another one")


def _as_tuple(result: torch.Tensor | Tensors) -> Tensors:
    return (result,) if isinstance(result, torch.Tensor) else result


class _Call:
    """Converts one copy of the inputs; keeps the result, so that the next copies write elsewhere."""

    def __init__(self, case: _Case) -> None:
        self.case = case
        self.inputs = tuple(tensor.clone() for tensor in case.inputs)
        self.result: Tensors = ()

    def __call__(self) -> None:
        self.result = self.case.run(*self.inputs)


def _awq_dequantize(shape: Shape, group_size: int, dtype: torch.dtype, device: torch.device) -> _Case:
    k, n = shape
    words = partial(torch.randint, -(2**31), 2**31 - 1, dtype=torch.int32, device=device)
    scales = torch.rand(k // group_size, n, device=device).to(dtype)
    inputs = (words(size=(k, n // 8)), scales, words(size=(k // group_size, n // 8)))
    last = [tensor[-rows:].cpu() for tensor, rows in zip(inputs, (group_size, 1, 1), strict=True)]
    size = f"{k}x{n}"
    return _Case(
        *("awq_dequantize", size, group_size, inputs, wo.awq_dequantize),
        sample=lambda result: (result[0][-group_size:],),
        expected=lambda: wo.awq_dequantize(*last),
    )


def _dequantize(
    shape: Shape, bits: int, layout: str, group_size: int, dtype: torch.dtype, device: torch.device
) -> _Case:
    k, n = shape
    limit = 1 << (bits - 1)
    q = torch.randint(-limit, limit, (k, n), dtype=torch.int8, device=device)
    scales = torch.rand(k // group_size, n, device=device).to(dtype)
    qweight = wo.preprocess(q, bits=bits, layout=layout)
    few = wo.preprocess(q[:, -8:].cpu(), bits=bits, layout=layout)
    name, size = f"dequantize int{bits} {layout}", f"{k}x{n}"
    return _Case(
        *(name, size, group_size, (qweight.data, scales)),
        convert=lambda data, scales: wo.dequantize(wo.PackedWeight(data, **qweight.fields), scales),
        sample=lambda result: (result[0][:, -8:],),
        expected=lambda: wo.dequantize(few, scales[:, -8:].cpu()),
    )


def _quantize_4bit(count: int, blocksize: int, quant_type: str, dtype: torch.dtype, device: torch.device) -> _Case:
    w = torch.randn(count, dtype=dtype, device=device)
    part = min(count, _SAMPLE_ELEMS)
    return _Case(
        *(f"quantize_4bit {quant_type}", str(count), blocksize, (w,)),
        convert=lambda w: wo.quantize_4bit(w, blocksize, quant_type),
        sample=lambda result: (result[0][: (part + 1) // 2], result[1][: -(-part // blocksize)]),
        expected=lambda: wo.quantize_4bit(w[:part].cpu(), blocksize, quant_type),
    )


def _dequantize_4bit(count: int, blocksize: int, quant_type: str, dtype: torch.dtype, device: torch.device) -> _Case:
    packed = torch.randint(0, 256, ((count + 1) // 2, 1), dtype=torch.uint8, device=device)
    absmax = torch.rand(-(-count // blocksize), device=device)
    part = min(count, _SAMPLE_ELEMS)
    first = packed[: (part + 1) // 2].cpu(), absmax[: -(-part // blocksize)].cpu()
    return _Case(
        *(f"dequantize_4bit {quant_type}", str(count), blocksize, (packed, absmax)),
        convert=lambda packed, absmax: wo.dequantize_4bit(packed, absmax, blocksize, quant_type, (count,), dtype),
        sample=lambda result: (result[0][:part],),
        expected=lambda: wo.dequantize_4bit(*first, blocksize, quant_type, (part,), dtype),
    )


def _cases(
    shapes: Sequence[Shape],
    counts: Sequence[int],
    group_size: int,
    blocksize: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Iterator[Callable[[], _Case]]:
    """One after another, so that the data of one at a time is in memory."""
    for shape in shapes:
        group = shape[0] if group_size == -1 else group_size
        yield partial(_awq_dequantize, shape, group, dtype, device)
        for bits in (4, 8):
            for layout in (TILED, INTERLEAVED):
                yield partial(_dequantize, shape, bits, layout, group, dtype, device)
    for make in (_quantize_4bit, _dequantize_4bit):
        for count in counts:
            for quant_type in BLOCK_FORMATS:
                yield partial(make, count, blocksize, quant_type, dtype, device)


def conversions(
    shapes: str | Iterable[str | Shape] = SHAPES,
    elements: Iterable[int] = ELEMENTS,
    *,
    group_size: int = 128,
    blocksize: int = 64,
    dtype: torch.dtype = torch.float16,
    device: torch.device | str | None = None,
    budget_ms: float = 50.0,
    progress: bool = True,
) -> pd.DataFrame:
    """Time `awq_dequantize` and `dequantize` of [K, N] weights, and `quantize_4bit` and `dequantize_4bit`.

    shapes: "KxN" or names (see `sweep`); N a multiple of 8. elements: of what is quantized in 4-bit blocks. group_size:
    of the weights, -1 is all of K; blocksize: of the blocks. dtype: of scales and results, of what is quantized.
    device: a GPU; a CPU is measured only where it is named.
    A part of each result is compared with the CPU's first (RuntimeError). Inputs and results rotate beyond the L2.

    Returns one row per conversion: `us` (median, with `us_min`), `bytes` (inputs and results, each moved once), `tb_s`
    (10**12 bytes/s), `copy_us` and `copy_tb_s` of PyTorch's copy of half the bytes, which moves as many, in the same
    run, and `share_of_copy`, their ratio. Raises ValueError naming the argument for sizes that do not fit,
    RuntimeError without a GPU.
    """
    pairs, counts = resolve(shapes), list(elements)
    _check(pairs, counts, group_size, blocksize, budget_ms)
    where = require_gpu("conversions") if device is None else default_device(device)
    rows: list[dict[str, object]] = []
    makers = list(_cases(pairs, counts, group_size, blocksize, dtype, where))
    for make in tqdm(makers, disable=not progress, unit="conversion"):
        case = make()
        result = case.run(*case.inputs)
        case.check(result)
        moved = nbytes(*case.inputs, *result)
        del result
        calls = [_Call(case) for _ in range(copies_beyond_l2(moved, where))]
        timing = time_calls(calls, where, budget_ms=budget_ms)
        del calls
        copy = time_calls(_copies(moved, where), where, budget_ms=budget_ms)
        rows.append(
            {
                "operation": case.operation,
                "size": case.size,
                "block": case.block,
                "dtype": str(dtype).removeprefix("torch."),
                "us": timing.us,
                "us_min": timing.min_us,
                "bytes": moved,
                "tb_s": moved / timing.us / 1e6,
                "copy_us": copy.us,
                "copy_tb_s": moved / copy.us / 1e6,
                "share_of_copy": copy.us / timing.us,
            }
        )
    return pd.DataFrame(rows)


def _check(shapes: Sequence[Shape], counts: Sequence[int], group_size: int, blocksize: int, budget_ms: float) -> None:
    for k, n in shapes:
        if n % 8:
            raise ValueError(f"shapes: expected N of a multiple of 8, got {k}x{n}")
        if group_size != -1 and (group_size < 1 or k % group_size):
            raise ValueError(f"group_size: expected -1 or a divisor of k = {k} (shape {k}x{n}), got {group_size}")
    if not all(isinstance(count, int) and count > 0 for count in counts):
        raise ValueError(f"elements: expected positive integers, got {counts}")
    if blocksize not in BLOCKSIZES:
        raise ValueError(f"blocksize: expected one of {', '.join(map(str, BLOCKSIZES))}, got {blocksize}")
    if not budget_ms > 0:
        raise ValueError(f"budget_ms: expected a positive number of milliseconds, got {budget_ms!r}")


def _copies(moved_bytes: int, device: torch.device) -> list[Callable[[], torch.Tensor]]:
    """Copies that read and write `moved_bytes` together, on as many buffers as pass through the L2."""
    half = math.ceil(moved_bytes / 2)
    sources = [
        torch.randint(0, 256, (half,), dtype=torch.uint8, device=device)
        for _ in range(copies_beyond_l2(moved_bytes, device))
    ]
    return [partial(torch.empty_like(source).copy_, source) for source in sources]


def conversions_table(frame: pd.DataFrame) -> str:
    """The rows of `conversions` as a table. Needs the package tabulate."""
    titles = {"operation": "conversion", "size": "size", "block": "block", "us": "us", "bytes": "MB", "tb_s": "TB/s"}
    titles |= {"copy_tb_s": "copy TB/s", "share_of_copy": "of the copy"}
    table = frame.assign(bytes=frame["bytes"] / 1e6)[list(titles)].rename(columns=titles)
    formats = {"us": "{:.1f}", "MB": "{:.1f}", "TB/s": "{:.3f}", "copy TB/s": "{:.3f}", "of the copy": "{:.1%}"}
    table = table.assign(**{title: table[title].map(form.format) for title, form in formats.items()})
    return str(table.to_markdown(index=False, disable_numparse=True))


def _add_options(parser: command.Parser) -> None:
    command.add_shapes(parser, ",".join(SHAPES), "of packed and of AWQ weights")
    elements = ",".join(map(str, ELEMENTS))
    parser.add_argument(
        "--elements", type=command.integers, default=list(ELEMENTS), help=f"of 4-bit blocks (default {elements})"
    )
    parser.add_argument("--group-size", type=int, default=128, help="of the weights; -1: per channel (default 128)")
    parser.add_argument("--blocksize", type=int, default=64, help="of 4-bit blocks (default 64)")
    command.add_run(parser)


COMMAND = command.frame_command(
    "time dequantize, awq_dequantize and 4-bit blocks, both ways", _add_options, conversions, conversions_table
)


def main(argv: Sequence[str] | None = None) -> int:
    return command.run_command(COMMAND, "python -m tools.conversions", argv)


if __name__ == "__main__":
    sys.exit(main())
