"""Products on CPUs beside fp64."""

from __future__ import annotations

from dataclasses import dataclass

import torch

import weightonly as wo
from weightonly.cpu import library, native


@dataclass
class Case:
    """A weight with its operands, and the weight in fp64."""

    qweight: wo.PackedWeight
    scales: torch.Tensor
    zeros: torch.Tensor | None
    w64: torch.Tensor

    @classmethod
    def make(
        cls,
        k: int,
        n: int,
        format: str,
        dtype: torch.dtype,
        g: torch.Generator,
        *,
        groups: int = 1,
        zeros: bool = False,
        exact: bool = False,
        layout: str = "cpu",
    ) -> Case:
        """exact: scales are powers of two, zeros and codebooks small integers: every product and sum is exact."""
        limit = 128 if format == "int8" else 8
        q = torch.randint(-limit, limit, (k, n), generator=g, dtype=torch.int8)
        code, values = None, q.double()
        if not format.startswith("int"):
            q = q + 8
            code = torch.randn(16, generator=g) if format == "code4" else None
            if exact:
                format, code = "code4", (torch.randperm(16, generator=g) - 8).float()
        qweight = wo.preprocess(q, 8 if format == "int8" else 4, layout=layout, format=format, code=code)
        if qweight.code is not None:
            values = torch.tensor(qweight.code, dtype=torch.float64)[q.int()]
        shape = (groups, n)
        if exact:
            scales = torch.exp2(torch.randint(-2, 2, shape, generator=g).double()).to(dtype)
            z = torch.randint(-4, 5, shape, generator=g).to(dtype)
        else:
            scales = (torch.rand(shape, generator=g) + 0.5).to(dtype)
            z = (torch.rand(shape, generator=g) * 8 - 4).to(dtype)
        offset = z.double() if zeros else torch.zeros(shape, dtype=torch.float64)
        w64 = (values.view(groups, -1, n) - offset[:, None]) * scales.double()[:, None]
        return cls(qweight, scales, z if zeros else None, w64.view(k, n))


def run(
    backend: library.Backend,
    x: torch.Tensor,
    case: Case,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
) -> torch.Tensor:
    """The product into a NaN-filled tensor inside of a guard band, which must come back untouched."""
    m, n = x.shape[0], case.qweight.n
    frame = torch.full((m + 2, n + 16), float("nan"), dtype=x.dtype)
    out = frame[1 : m + 1, 8 : n + 8]
    assert native.gemm(backend, x, case.qweight, case.scales, case.zeros, bias, activation, out) is out
    guard = torch.ones_like(frame, dtype=torch.bool)
    guard[1 : m + 1, 8 : n + 8] = False
    assert frame[guard].isnan().all(), "wrote outside of out"
    assert not out.isnan().any(), "left elements unwritten"
    return out


def check(backend: library.Backend, m: int, case: Case, dtype: torch.dtype, g: torch.Generator, exact: bool) -> None:
    k, n = case.w64.shape
    x = torch.randint(-2, 3, (m, k), generator=g).to(dtype) if exact else torch.randn(m, k, generator=g).to(dtype)
    bias = torch.randint(-4, 5, (n,), generator=g).to(dtype) if exact else torch.randn(n, generator=g).to(dtype)
    y = run(backend, x, case, bias)
    expected = x.double() @ case.w64 + bias.double()
    if exact:
        assert torch.equal(y, expected.to(dtype))
        return
    # As in test_reference.py: an fp32 sum of products without an error, and one rounding.
    magnitude = x.double().abs() @ case.w64.abs() + bias.double().abs()
    tolerance = 1.2 * magnitude * max(k, 128) * 2**-24 + expected.abs() * torch.finfo(dtype).eps * 0.51
    tolerance += torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    assert ((y.double() - expected).abs() <= tolerance).all()


def backends() -> list[library.Backend]:
    """The native kernels at every level that this CPU has."""
    highest = library.choose("auto", library._PATH).level
    return [library.choose(level, library._PATH) for level in library.LEVELS[: highest + 1]]
