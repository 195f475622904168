"""The A operand of kernels that take x in E4M3 (cutlass_ext/fragment/fp8_weight.h), compiled for a CPU: exact."""

from __future__ import annotations

import ctypes

import pytest
import torch
from tests.kernels.test_numeric_conversion import compile_header
from tests.packed_cases import random_q

import weightonly as wo

K = 128


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return ctypes.CDLL(str(compile_header(tmp_path_factory.mktemp("fp8"), "fp8_weight_host.cpp")))


def words_of(packed: wo.PackedWeight, lane: int) -> torch.Tensor:
    """Int32 [4, 2]: those of a lane of warp 0 for four k32 steps of the first panel."""
    blocks = packed.data.view(torch.int32).view(K // 64, 4, 32, 4)  # (k_block, warp, lane, word)
    return blocks[:, 0, lane].reshape(4, 2).contiguous()


def columns_of(a: torch.Tensor) -> torch.Tensor:
    """A registers [4, 4] -> fp64 [2, 32]: in the order of k, what a lane has of its two columns."""
    return a.view(torch.float8_e4m3fn).double().view(4, 2, 2, 4).permute(2, 0, 1, 3).reshape(2, 32)


def rows_of_lane(lane: int) -> torch.Tensor:
    """k of those 32 numbers."""
    halves = torch.arange(K // 16)[:, None] * 16
    return (halves + 4 * (lane % 4) + torch.arange(4)).flatten()


def fold(library: ctypes.CDLL, packed: wo.PackedWeight, lane: int, scales: torch.Tensor) -> tuple[torch.Tensor, int]:
    """(fp64 [2, 32], turns): the numbers that turns over 128 k add. scales: fp32 [2, 4], of the lane's columns."""
    words, left, turns = words_of(packed, lane), scales.clone(), 0
    total = torch.zeros(2, 32, dtype=torch.float64)
    while left.view(torch.int32).any():
        a, base = torch.full((4, 4), -1, dtype=torch.int32), torch.full((2,), float("nan"))
        library.wo_fold(*(ctypes.c_void_p(t.data_ptr()) for t in (words, left, a, base)))
        numbers = columns_of(a)
        assert numbers.isfinite().all()
        total += numbers * base.double()[:, None]
        turns += 1
        assert turns <= 4
    return total, turns


def check(library: ctypes.CDLL, g: torch.Generator, lane: int, scales: torch.Tensor) -> int:
    codes = random_q(K, 64, 4, g) + 8
    packed = wo.preprocess(codes, format="mxfp4", layout="tiled_fp8")
    got, turns = fold(library, packed, lane, scales)
    column = 8 * (lane // 4)  # of warp 0
    numbers = wo.codebooks.codebook("mxfp4").double()[codes.long()][:, column : column + 2].T  # [2, K]
    expected = numbers * scales.double().repeat_interleave(32, 1)
    assert torch.equal(got, expected[:, rows_of_lane(lane)])
    return turns


@pytest.mark.parametrize("lane", [0, 3, 17, 31])
def test_twelve_powers_of_two_fold_at_once(library: ctypes.CDLL, generator: torch.Generator, lane: int) -> None:
    for _ in range(200):
        lowest = torch.randint(-100, 90, (2, 1), generator=generator)
        exponents = lowest + torch.randint(0, 12, (2, 4), generator=generator)
        assert check(library, generator, lane, torch.exp2(exponents.float())) == 1


def test_any_scales_take_turns(library: ctypes.CDLL, generator: torch.Generator) -> None:
    """Powers of two far from each other, negative ones, zeros, other numbers, and numbers that are not normal."""
    for i in range(400):
        exponents = torch.randint(-133, 100, (2, 4), generator=generator)
        if i % 2:
            exponents = torch.randint(-16, 4, (2, 4), generator=generator)
        scales = torch.exp2(exponents.double()).float()
        scales *= torch.tensor([1.0, 1.0, 1.0, 1.5, 1.25, -1.0, 0.0])[torch.randint(7, (2, 4), generator=generator)]
        check(library, generator, i % 32, scales.bfloat16().float())
    for one in ([0.0] * 4, [2.0**-126, 2.0**-127, 2.0**-128, 2.0**-133], [2.0**-125, 2.0**-126, 3 * 2.0**-127, 0]):
        check(library, generator, 5, torch.tensor([one, one[::-1]]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_near_scales_fold_as_any_do(library: ctypes.CDLL, generator: torch.Generator, dtype: torch.dtype) -> None:
    """And others are not taken for near ones: too far apart, negative, not normal, no powers of two of each other."""
    library.wo_near.restype = ctypes.c_bool
    lowest = -14 if dtype == torch.float16 else -126
    taken = 0
    for i in range(600):
        low = torch.randint(lowest - 3, 5 if dtype == torch.float16 else 100, (1, 2), generator=generator)
        if i % 3 == 0:
            low = torch.randint(lowest, lowest + 3, (1, 2), generator=generator)
        exponents = low + torch.randint(0, 9 if i % 2 else 8, (4, 2), generator=generator)
        scales = torch.exp2(exponents.double())
        if i % 4 == 0:
            others = torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.5, -1.0, 0.0])
            scales *= others[torch.randint(9, (4, 2), generator=generator)]
        elif i % 4 == 1:
            scales *= 1.75
        scales = scales.to(dtype)
        words = words_of(wo.preprocess(random_q(K, 64, 4, generator) + 8, format="mxfp4", layout="tiled_fp8"), i % 32)
        a, most = torch.zeros(4, 4, dtype=torch.int32), torch.zeros(2, dtype=dtype)
        pairs = scales.contiguous().view(torch.int32)
        addresses = [ctypes.c_void_p(t.data_ptr()) for t in (words, pairs, a, most)]
        is_near = library.wo_near(addresses[0], addresses[1], 10 if dtype == torch.float16 else 7, *addresses[2:])
        wide, ends = scales.double(), scales.double().aminmax(dim=0)
        ratios = ends.max / wide
        assert is_near == bool(
            (wide >= torch.finfo(dtype).smallest_normal).all()
            and (ratios <= 2.0**7).all()
            and (torch.frexp(ratios).mantissa == 0.5).all()
        )
        if is_near:
            taken += 1
            b, base = torch.zeros(4, 4, dtype=torch.int32), torch.zeros(2)
            left = scales.float().T.contiguous()
            library.wo_fold(*(ctypes.c_void_p(t.data_ptr()) for t in (words, left, b, base)))
            assert torch.equal(a, b) and torch.equal(most.float() / 64, base) and not left.any()
    assert 100 < taken < 500
    pairs, a, most = torch.zeros(4, dtype=torch.int32), torch.full((4, 4), -1, dtype=torch.int32), torch.ones(2)
    addresses = [ctypes.c_void_p(t.data_ptr()) for t in (words, pairs, a, most)]
    assert library.wo_near(addresses[0], addresses[1], 7, *addresses[2:]) and most[0] == 0
    assert columns_of(a).isfinite().all(), "times 0 it is 0"


@pytest.mark.parametrize("lane", range(32))
def test_integers(library: ctypes.CDLL, generator: torch.Generator, lane: int) -> None:
    q = random_q(K, 64, 4, generator)
    words, a = words_of(wo.preprocess(q, layout="tiled_fp8"), lane), torch.zeros(4, 4, dtype=torch.int32)
    library.wo_integers(ctypes.c_void_p(words.data_ptr()), ctypes.c_void_p(a.data_ptr()))
    column = 8 * (lane // 4)
    assert torch.equal(columns_of(a) * 256, q[:, column : column + 2].T.double()[:, rows_of_lane(lane)])


@pytest.mark.parametrize("lane", range(32))
def test_codes_without_scales(library: ctypes.CDLL, generator: torch.Generator, lane: int) -> None:
    codes = random_q(K, 64, 4, generator) + 8
    packed, a = wo.preprocess(codes, format="mxfp4", layout="tiled_fp8"), torch.zeros(4, 4, dtype=torch.int32)
    words = words_of(packed, lane)
    library.wo_codes(ctypes.c_void_p(words.data_ptr()), ctypes.c_void_p(a.data_ptr()))
    column = 8 * (lane // 4)
    numbers = wo.codebooks.codebook("mxfp4").double()[codes.long()][:, column : column + 2].T  # [2, K]
    assert torch.equal(columns_of(a), numbers[:, rows_of_lane(lane)])
