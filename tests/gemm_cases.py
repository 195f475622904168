"""Weights to multiply by, and checks of one `gemm`, for the tests of the compiled kernels."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from tests.fp8_cases import random_e4m3

import weightonly as wo
from weightonly.codebooks import codebook
from weightonly.device import device_arch, sm_count
from weightonly.heuristics import Problem, select
from weightonly.heuristics.configs import KernelConfig, TypeConfig
from weightonly.heuristics.legal import why_not
from weightonly.heuristics.problem import CODE_LAYOUTS, CODEBOOK_FORMATS, FLOAT_FORMATS, layouts_of
from weightonly.kernels import is_compiled, runs_on

DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16}
ACTIVATIONS = {
    None: lambda y: y,
    "relu": torch.relu,
    "gelu": torch.nn.functional.gelu,
    "silu": torch.nn.functional.silu,
}


@dataclass(frozen=True)
class Case:
    """One weight: shape, types and how it is quantized. Format "code4": a table of its own, no zeros."""

    k: int
    n: int
    format: str = "int4"
    dtype: str = "f16"
    group_size: int = 128
    zeros: bool = False

    @property
    def mode(self) -> str:
        if self.zeros:
            return "group_zeros"
        return "channel" if self.group_size == -1 and self.format not in CODEBOOK_FORMATS else "group"

    @property
    def groups(self) -> int:
        return 1 if self.group_size == -1 else self.k // self.group_size


@dataclass
class Operands:
    """A packed weight with its scales and zeros, and the same weight in fp64."""

    qweight: wo.PackedWeight
    scales: torch.Tensor
    zeros: torch.Tensor | None
    w64: torch.Tensor  # [K, N]


def make(case: Case, g: torch.Generator, layout: str, *, exact: bool) -> Operands:
    """exact: scales are powers of two, zeros and codebooks integers, so that every product and sum is exact in fp32."""
    limit = 128 if case.format == "int8" else 8
    q = torch.randint(-limit, limit, (case.k, case.n), generator=g, dtype=torch.int8)
    values, table, dtype = q.double(), None, DTYPES[case.dtype]
    if case.format in FLOAT_FORMATS:
        q = random_e4m3((case.k, case.n), g, exact=exact)
        values = q.double()
    if case.format == "mxfp4":
        q = q + 8
        values = codebook("mxfp4").double()[q.int()]
    if case.format == "code4":
        q, order = q + 8, torch.randperm(16, generator=g)
        # Kernels hold the codebook in the dtype of x. 32 weights share each rounding, which does not average out.
        table = (order - 8).float() if exact else torch.randn(16, generator=g).to(dtype).float()
        values = table.double()[q.int()]
    shape = (case.groups, case.n)
    if exact:
        # Codes of E2M1 have halves, and tensor cores keep 14 bits of a sum.
        lowest = -1 if case.format == "mxfp4" else -2
        scales = torch.exp2(torch.randint(lowest, 2, shape, generator=g).double()).to(dtype)
        zeros = torch.randint(-limit // 2, limit // 2, shape, generator=g).to(dtype)
    else:
        scales = (torch.rand(shape, generator=g) * 0.02 + 0.001).to(dtype)
        zeros = (torch.rand(shape, generator=g) * limit - limit / 2).to(dtype)
    offset = zeros.double() if case.zeros else torch.zeros(shape, dtype=torch.float64)
    rows = case.k // case.groups
    w64 = (values.view(case.groups, rows, case.n) - offset[:, None]) * scales.double()[:, None]
    qweight = wo.preprocess(q, format=case.format, code=table, layout=layout)
    return Operands(
        qweight.to("cuda"),
        scales.cuda(),
        zeros.cuda() if case.zeros else None,
        w64.view(case.k, case.n).cuda(),
    )


def formats_of(layout: str) -> tuple[str, ...]:
    """The formats that there are in a layout; "code4" stands for every codebook."""
    return ("int4", "int8", "code4") if layout in CODE_LAYOUTS else ("int4", "int8")


def own_groups(config: KernelConfig, group_size: int) -> int:
    """The group size, or 16 where the configuration computes no others."""
    return 16 if config.groups_of_16 else group_size


def this_gpu() -> int:
    return device_arch(torch.cuda.current_device())


def own_layout() -> str:
    """The layout that `preprocess` makes for this GPU."""
    return layouts_of(this_gpu())[0]


def splits(config: KernelConfig, m: int, case: Case, wanted: tuple[int, ...]) -> list[KernelConfig]:
    """The configuration with those split_k of `wanted` that it can have for this problem."""
    problem = Problem(
        m, case.n, case.k, case.format, case.group_size, this_gpu(), 132, layout=config.layout, zeros=case.zeros
    )
    return [c for c in (config.with_split_k(s) for s in wanted) if why_not(c, problem) is None]


def chosen(m: int, case: Case) -> KernelConfig:
    """What `gemm` runs on weights in this GPU's own layout."""
    sms = sm_count(torch.cuda.current_device())
    return select(m, case.n, case.k, case.format, case.group_size, this_gpu(), sms, own_layout(), case.zeros)


def run(x: torch.Tensor, o: Operands, **arguments: object) -> torch.Tensor:
    """gemm into a NaN-filled tensor inside a guard band, which must come back untouched."""
    m, n = x.shape[0], o.qweight.n
    frame = torch.full((m + 2, n + 16), float("nan"), dtype=o.scales.dtype, device=x.device)
    out = frame[1 : m + 1, 8 : n + 8]
    result = wo.gemm(x, o.qweight, o.scales, zeros=o.zeros, out=out, **arguments)  # type: ignore[arg-type]
    assert result is out
    guard = torch.ones_like(frame, dtype=torch.bool)
    guard[1 : m + 1, 8 : n + 8] = False
    assert frame[guard].isnan().all(), "wrote outside of out"
    assert not out.isnan().any(), "left elements unwritten"
    return out


def check_exact(m: int, case: Case, config: KernelConfig | None, g: torch.Generator) -> None:
    o = make(case, g, own_layout() if config is None else config.layout, exact=True)
    x = torch.randint(-3, 4, (m, case.k), generator=g).to(DTYPES[case.dtype]).cuda()
    bias = torch.randint(-8, 9, (case.n,), generator=g).to(x.dtype).cuda()
    expected = x.double() @ o.w64 + bias.double()
    y = run(x, o, bias=bias, config=config)
    assert torch.equal(run(x, o, bias=bias, config=config), y)
    if (config or chosen(m, case)).unfused:
        # PyTorch's addmm adds the bias to fp32 sums or to rounded ones, as it likes; without one there is one rounding.
        assert torch.equal(run(x, o, config=config), (expected - bias.double()).to(x.dtype))
        twice = ((expected - bias.double()).to(x.dtype).double() + bias.double()).to(x.dtype)
        assert ((y == expected.to(x.dtype)) | (y == twice)).all()
    else:
        assert torch.equal(y, expected.to(x.dtype))


def check_random(
    m: int,
    case: Case,
    config: KernelConfig | None,
    g: torch.Generator,
    activation: str | None,
) -> None:
    """The error against fp64 is at most twice that of cuBLAS on the dequantized weight in the same dtype."""
    o = make(case, g, own_layout() if config is None else config.layout, exact=False)
    x = torch.randn(m, case.k, generator=g).to(DTYPES[case.dtype]).cuda()
    act = ACTIVATIONS[activation]
    expected = act(x.double() @ o.w64)
    peer = act((x @ wo.dequantize(o.qweight, o.scales, o.zeros)).float()).to(x.dtype)
    y = run(x, o, activation=activation, config=config)
    scale = expected.abs().max()
    error = (y.double() - expected).norm() / expected.norm()
    peer_error = (peer.double() - expected).norm() / expected.norm()
    assert error <= 2 * peer_error + 1e-6
    worst = (y.double() - expected).abs().max()
    peer_worst = (peer.double() - expected).abs().max()
    eps = torch.finfo(x.dtype).eps
    assert worst <= 2 * peer_worst + eps * scale


def require(config: KernelConfig, case: Case) -> None:
    """Skips where this build or this GPU lacks the kernel; fails nowhere else."""
    if not is_compiled(config, TypeConfig(case.dtype, case.format, case.mode)):
        pytest.skip(f"{config.kernel} is not compiled for {case.dtype} {case.format} {case.mode}")
    if not runs_on(config, this_gpu()):
        pytest.skip(f"{config.kernel} does not run on this GPU with this build")
