"""The host's time of one call: what Python, the checks and the launch take before the GPU begins.

`python -m weightonly.bench host` times ways to call one linear at M = 1, beside others' calls of the same shape. Calls
are queued without waiting, fewer of them than the launch queue holds, so that the kernels' time stays out of it. The
ways take turns, and the GPU is waited for between two of them.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import time
from collections.abc import Callable, Iterable, Iterator

import pandas as pd
import torch
from tqdm import tqdm

import weightonly as wo

from . import command
from .devices import require_gpu
from .model.providers import torchao_int4
from .shapes import Shape, resolve
from .timing import Timing
from .weights import Weights

SHAPES = "4096x4096"
GROUP_SIZE = 128

_ROUNDS = 15
_CALLS = 200  # of a round; the launch queue holds some 1000
_WARM_CALLS = 50  # the first ones compile and plan

Call = Callable[[], object]


class _Linear(torch.nn.Module):
    """A weight as an engine's plug-in holds it: parameters, and a registered operator that is given their tensors."""

    def __init__(self, qweight: wo.PackedWeight, scales: torch.Tensor) -> None:
        super().__init__()
        self.qweight = torch.nn.Parameter(qweight.data, requires_grad=False)
        self.scales = torch.nn.Parameter(scales, requires_grad=False)
        _OPERATOR_WEIGHTS[self.qweight.data_ptr()] = qweight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.weightonly_bench.linear(x, self.qweight, self.scales)


_OPERATOR_WEIGHTS: dict[int, wo.PackedWeight] = {}  # address of the bytes -> the weight


def _linear(x: torch.Tensor, qweight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return wo.gemm(x, _OPERATOR_WEIGHTS[qweight.data_ptr()], scales)


def _linear_fake(x: torch.Tensor, qweight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], scales.shape[1]))


@contextlib.contextmanager
def registered_operator() -> Iterator[None]:
    """As vLLM registers its operators: a schema and a function, without `torch.library.custom_op` around them."""
    library = torch.library.Library("weightonly_bench", "FRAGMENT")
    try:
        library.define("linear(Tensor x, Tensor qweight, Tensor scales) -> Tensor")
        library.impl("linear", _linear, "CompositeExplicitAutograd")
        library._register_fake("linear", _linear_fake)
        yield
    finally:
        library._destroy()
        _OPERATOR_WEIGHTS.clear()


def ways(
    k: int, n: int, group_size: int, dtype: torch.dtype, device: torch.device, backend: str = "inductor"
) -> dict[str, Call]:
    """Name -> a call at M = 1 of int4 [k, n]; calls of packages that are not installed are left out.

    Each returns y [1, n]. backend: of torch.compile.
    """
    weights = Weights.random(k, n, bits=4, group_size=group_size, symmetric=True, dtype=dtype, device=device)
    qweight, scales, w = wo.preprocess(weights.q, 4), weights.scales, weights.dense
    x = torch.randn(1, k, device=device, dtype=dtype)  # [1, k]
    out = torch.empty(1, n, device=device, dtype=dtype)  # [1, n]
    linear = torch.nn.Linear(k, n, bias=False, device=device, dtype=dtype).requires_grad_(False)
    module = wo.nn.Linear.from_quantized(qweight, scales)
    operator = _Linear(qweight, scales)

    def gemm(x: torch.Tensor) -> torch.Tensor:
        return wo.gemm(x, qweight, scales)

    compiled: dict[str, Callable[[torch.Tensor], object]] = {
        "gemm in a compiled function": gemm,
        "wo.nn.Linear, compiled": module,
        "module with a registered operator, compiled": operator,
        "torch.nn.Linear, compiled": linear,
    }
    found: dict[str, Call] = {
        "gemm": lambda: wo.gemm(x, qweight, scales),
        "gemm, out=": lambda: wo.gemm(x, qweight, scales, out=out),
        "wo.nn.Linear": lambda: module(x),
        "module with a registered operator": lambda: operator(x),
        "x @ w": lambda: x @ w,
        "torch.mm, out=": lambda: torch.mm(x, w, out=out),
        "torch.nn.Linear": lambda: linear(x),
    }
    for name, function in compiled.items():
        run = torch.compile(function, fullgraph=True, backend=backend)
        found[name] = lambda run=run: run(x)  # type: ignore[misc]
    try:
        torchao = _torchao_linear(k, n, group_size, device)
    except Exception as error:  # it is not ours
        _leave_out("torchao", error)
        torchao = None
    if torchao is not None:
        x_bf16 = x.to(torch.bfloat16)
        found["torchao int4 Linear, bf16"] = lambda: torchao(x_bf16)
    return found


def _leave_out(way: str, error: Exception) -> None:
    first_line = (str(error).splitlines() or [""])[0]
    print(f"host: {way} is left out: {type(error).__name__}: {first_line}", file=sys.stderr)


def _torchao_linear(k: int, n: int, group_size: int, device: torch.device) -> torch.nn.Module | None:
    """torchao's int4 in the packing that PyTorch's own kernel reads, or None without the package."""
    if importlib.util.find_spec("torchao") is None:
        return None
    linear = torch.nn.Sequential(torch.nn.Linear(k, n, bias=False, device=device, dtype=torch.bfloat16))
    torchao_int4(linear, group_size)
    return linear[0].requires_grad_(False)


def host(
    shapes: str | Iterable[str | Shape] = SHAPES,
    *,
    group_size: int = GROUP_SIZE,
    dtype: torch.dtype = torch.float16,
    device: torch.device | str | None = None,
    progress: bool = True,
) -> pd.DataFrame:
    """One row per shape and way: `k`, `n`, `way`, `us` (the median of the rounds), `us_min`, `us_p90`.

    shapes: as `sweep` takes them. Raises RuntimeError without a GPU and its kernels.
    """
    where = require_gpu("host", device)
    rows = []
    with registered_operator(), torch.no_grad(), torch.cuda.device(where):
        for k, n in tqdm(resolve(shapes), disable=not progress, unit="shape"):
            for way, times in _measure(ways(k, n, group_size, dtype, where)).items():
                t = Timing.of(times)
                rows.append({"k": k, "n": n, "way": way, "us": t.us, "us_min": t.min_us, "us_p90": t.p90_us})
    return pd.DataFrame(rows)


def _measure(calls: dict[str, Call]) -> dict[str, list[float]]:
    """us per call in each round. What cannot be called at all is left out, with a line that says why."""
    ready = {}
    for name, call in calls.items():
        try:
            for _ in range(_WARM_CALLS):
                call()
            ready[name] = call
        except Exception as error:  # others' packages, and a compiler that may be missing
            _leave_out(name, error)
    samples: dict[str, list[float]] = {name: [] for name in ready}
    for _ in range(_ROUNDS):
        for name, call in ready.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(_CALLS):
                call()
            samples[name].append((time.perf_counter() - start) * 1e6 / _CALLS)
    torch.cuda.synchronize()
    return samples


def host_table(frame: pd.DataFrame) -> str:
    """Markdown: a line for each way, the host's us of each shape."""
    shape = [f"{k}x{n}" for k, n in zip(frame["k"], frame["n"], strict=True)]
    table = frame.assign(shape=shape).pivot_table(index="way", columns="shape", values="us", sort=False)
    return str(table.add_suffix(" host us").to_markdown(floatfmt=".2f"))


def _add_options(parser: command.Parser) -> None:
    command.add_shapes(parser, SHAPES)
    parser.add_argument(
        "--group-size", type=int, default=GROUP_SIZE, help=f"rows of w per scale (default {GROUP_SIZE})"
    )
    command.add_run(parser, budget=False)


COMMAND = command.frame_command(
    "time what a call at M = 1 costs the host: eager, out=, compiled, in modules, beside others' calls",
    _add_options,
    host,
    host_table,
)
