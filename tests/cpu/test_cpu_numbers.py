"""Products at the ends of fp32, where weights are zero, and after an activation, whatever kernel computes them."""

from __future__ import annotations

import pytest
import torch
from tests.cpu.cpu_cases import Case

import weightonly as wo
from weightonly.cpu import library, native

ROWS = (1, 2, 3, 7, 16, 40)
ACTIVATIONS = {
    None: lambda y: y,
    "relu": torch.relu,
    "gelu": lambda y: y * torch.special.erfc(-y / 2**0.5) / 2,
    "silu": lambda y: y / (1 + torch.exp(-y)),
}

activations = pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
dtypes = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
integers = pytest.mark.parametrize("format", ["int4", "int8"])


def weight(q: torch.Tensor, format: str = "int4") -> wo.PackedWeight:
    return wo.preprocess(q, 8 if format == "int8" else 4, layout="cpu")


def passed_on(backend: library.Backend, values: torch.Tensor, activation: str | None) -> torch.Tensor:
    """act of each value, by a product with ones."""
    q = torch.zeros(64, 77, dtype=torch.int8)
    q[0] = 1
    x = torch.zeros(len(values), 64, dtype=values.dtype)
    x[:, 0] = values
    y = native.gemm(backend, x, weight(q), torch.ones(1, 77, dtype=x.dtype), activation=activation)
    assert torch.equal(y.nan_to_num(7), y[:, :1].nan_to_num(7).expand(y.shape)), "columns differ"
    return y[:, 0]


@activations
@dtypes
def test_activations_against_fp64(backend: library.Backend, dtype: torch.dtype, activation: str | None) -> None:
    near_zero = torch.logspace(-6, 1, 99)
    values = torch.cat((torch.linspace(-12, 12, 1201), torch.linspace(-105, -12, 301), near_zero, -near_zero)).to(dtype)
    y, expected = passed_on(backend, values, activation).double(), ACTIVATIONS[activation](values.double())
    ulp = 2**-23 * (0 if activation in (None, "relu") else 64 if backend.level == 0 else 4)
    smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps + 128 * 2**-149  # 105 times one of e^x
    rounding = 0.51 * torch.finfo(dtype).eps * (dtype != torch.float32)
    assert ((y - expected).abs() <= expected.abs() * (ulp + rounding) + smallest).all()


def test_nan_without_its_last_bits_is_no_inf(backend: library.Backend) -> None:
    values = torch.full((40,), 0x7F800001, dtype=torch.int32).view(torch.float32)
    assert all(passed_on(backend, values[:m], None).isnan().all() for m in ROWS)


@activations
def test_activations_of_numbers_at_the_ends(backend: library.Backend, activation: str | None) -> None:
    """ReLU of NaN is NaN."""
    values = torch.tensor([float("inf"), float("nan"), 3e38, -3e38, 1e-40, 0.0])
    expected = torch.tensor([float("inf"), float("nan"), 3e38, -3e38 if activation is None else -0.0, 1e-40, 0.0])
    if activation in ("gelu", "silu"):
        expected[4] /= 2
    for m in (1, 6):
        torch.testing.assert_close(
            torch.cat([passed_on(backend, part, activation) for part in values.split(m)]),
            expected,
            rtol=0,
            atol=0 if backend.level < 3 or m == 1 else 1e-40,  # tiles take numbers below the normal ones for zeros
            equal_nan=True,
        )


@activations
def test_threads_do_not_change_an_activation(
    backend: library.Backend, activation: str | None, generator: torch.Generator
) -> None:
    before = torch.get_num_threads()
    for m, n in ((513, 77), (64, 200), (3, 1500)):
        case = Case.make(64, n, "int4", torch.float32, generator, zeros=True)
        x = torch.randn(m, 64, generator=generator)
        try:
            found = []
            for threads in (1, 2, 3):
                torch.set_num_threads(threads)
                found.append(native.gemm(backend, x, case.qweight, case.scales, case.zeros, activation=activation))
        finally:
            torch.set_num_threads(before)
        assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@integers
@dtypes
def test_a_weight_of_zeros_gives_zero(
    backend: library.Backend, dtype: torch.dtype, format: str, generator: torch.Generator
) -> None:
    limit = 128 if format == "int8" else 8
    z = torch.randint(-limit, limit, (32, 96), generator=generator)
    qweight = weight(z.repeat_interleave(128, 0).to(torch.int8), format)
    scales = torch.rand(32, 96, generator=generator).to(dtype) + 0.5
    for m in ROWS:
        x = (torch.randn(m, 4096, generator=generator) * 1000).to(dtype)
        assert (native.gemm(backend, x, qweight, scales, z.to(dtype)) == 0).all()


@integers
@dtypes
def test_zero_points_of_any_size(
    backend: library.Backend, dtype: torch.dtype, format: str, generator: torch.Generator
) -> None:
    """Integers beyond the weight's, and numbers between them."""
    q = torch.randint(-8, 8, (128, 40), generator=generator, dtype=torch.int8)
    x = torch.randint(-2, 3, (16, 128), generator=generator).to(dtype)
    for z in (8.0, -9.0, 17.0, -16.5, 127.0, 128.0, -129.0, 200.0, -0.25, 7.5, -8.5):
        zeros = torch.full((2, 40), z, dtype=dtype)
        expected = (x.double() @ (q.double() - z)).to(dtype)
        for m in ROWS:
            y = native.gemm(backend, x[:m], weight(q, format), torch.ones(2, 40, dtype=dtype), zeros)
            assert torch.equal(y, expected[:m])


@integers
@pytest.mark.parametrize("zeros", [False, True], ids=["no zeros", "zeros"])
def test_sums_that_leave_the_range_on_the_way(backend: library.Backend, zeros: bool, format: str) -> None:
    """The weight is scaled before the sum where that keeps it in fp32; so does the equation."""
    q = torch.full((64, 40), -8, dtype=torch.int8)
    scales, z = torch.full((1, 40), 1e-3), torch.full((1, 40), 2.5) if zeros else None
    expected = 1e38 * ((-8 - 2.5 * zeros) * scales.double())
    for m in ROWS:
        x = torch.zeros(m, 64)
        x[:, 3] = 1e38
        y = native.gemm(backend, x, weight(q, format), scales, z)
        torch.testing.assert_close(y.double(), expected.expand(m, 40), rtol=1e-6, atol=0)


@integers
@dtypes
def test_infinity_meets_zero_points(backend: library.Backend, dtype: torch.dtype, format: str) -> None:
    q = torch.tensor([-8, -1, 0, 3, 7], dtype=torch.int8).repeat(64, 8)
    zeros = torch.full((1, 40), 2.5, dtype=dtype)
    expected = (q[:1].double() - 2.5).sign() * float("inf")
    for m in ROWS:
        x = torch.ones(m, 64, dtype=dtype)
        x[0, 5] = float("inf")
        y = native.gemm(backend, x, weight(q, format), torch.ones(1, 40, dtype=dtype), zeros)
        assert torch.equal(y[:1].double(), expected) and y[1:].isfinite().all()
