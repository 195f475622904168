"""Which tiles the CTAs of a grouped GEMM find: cutlass_ext/grouped_schedule.h, compiled for the host, beside Python."""

from __future__ import annotations

import ctypes
import itertools
import random

import pytest
from tests.kernels.test_numeric_conversion import compile_header

SWIZZLE = 8

COUNTS = {
    "one row": [1],
    "one expert": [1000],
    "empty ends": [0, 0, 5, 0],
    "all in the last": [0] * 511 + [70],
    "all in the first": [70] + [0] * 511,
    "none": [0] * 40,
    "a row each": [1] * 1024,
    "full tiles": [64, 128, 0, 8],
    "many tiles": [3000, 7, 1200],
    "33 experts": list(range(33)),
}


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    library = ctypes.CDLL(str(compile_header(tmp_path_factory.mktemp("schedule"), "grouped_schedule_host.cpp")))
    library.wo_most_m_tiles.restype = ctypes.c_longlong
    library.wo_most_m_tiles.argtypes = [ctypes.c_longlong, ctypes.c_longlong, ctypes.c_int]
    return library


Tile = tuple[int, int, int, int]


def tiles_of(host: ctypes.CDLL, offs: list[int], rows: int, tile_m: int, n_tiles: int) -> list[Tile]:
    """(expert, row_begin, row_end, n_tile) in the order of their numbers."""
    experts = len(offs)
    numbers = ctypes.c_int * experts
    row_ends, tile_ends = numbers(), numbers()
    m_tiles = host.wo_schedule(numbers(*offs), experts, rows, tile_m, row_ends, tile_ends)
    found = (ctypes.c_int * 4 * (m_tiles * n_tiles))()
    host.wo_tiles(row_ends, tile_ends, experts, n_tiles, tile_m, found)
    return [(t[0], t[1], t[2], t[3]) for t in found]


def expected(counts: list[int], tile_m: int, n_tiles: int) -> list[Tile]:
    """Expert by expert, in swizzles of tiles along M, column by column."""
    tiles: list[Tile] = []
    begin = 0
    for expert, count in enumerate(counts):
        rows = [(begin + r, begin + min(count, r + tile_m)) for r in range(0, count, tile_m)]
        for first in range(0, len(rows), SWIZZLE):
            tiles += [(expert, *row, n) for n in range(n_tiles) for row in rows[first : first + SWIZZLE]]
        begin += count
    return tiles


@pytest.mark.parametrize("tile_m", [8, 16, 32, 64, 128, 256])
@pytest.mark.parametrize("n_tiles", [1, 3, 45])
@pytest.mark.parametrize("case", COUNTS)
def test_tiles(case: str, n_tiles: int, tile_m: int, host: ctypes.CDLL) -> None:
    counts = COUNTS[case]
    offs = list(itertools.accumulate(counts))
    assert tiles_of(host, offs, offs[-1], tile_m, n_tiles) == expected(counts, tile_m, n_tiles)


def test_random_routing(host: ctypes.CDLL) -> None:
    numbers = random.Random(3)
    for _ in range(300):
        experts, tile_m, n_tiles = numbers.randint(1, 1024), numbers.choice([8, 16, 32, 128]), numbers.randint(1, 9)
        counts = [numbers.choice([0, 0, 1, 2, 9, 40, 300]) for _ in range(experts)]
        offs = list(itertools.accumulate(counts))
        found = tiles_of(host, offs, offs[-1], tile_m, n_tiles)
        assert found == expected(counts, tile_m, n_tiles)
        assert len(found) <= n_tiles * host.wo_most_m_tiles(offs[-1], experts, tile_m)


def test_most_tiles(host: ctypes.CDLL) -> None:
    """As many as the worst routing makes: each expert has one row in its last tile."""
    assert host.wo_most_m_tiles(8, 128, 16) == 8
    assert host.wo_most_m_tiles(1000, 1, 64) == 16
    for rows, experts, tile_m in ((100, 4, 8), (4096, 128, 64), (7, 9, 8), (2**31 - 4096, 512, 8)):
        with_rows = min(rows, experts)
        full = (rows - with_rows) // tile_m
        assert with_rows + full == host.wo_most_m_tiles(rows, experts, tile_m)


@pytest.mark.parametrize(
    "offs", [[-3, 5, 4, 9], [100, 100, 100, 100], [9, 8, 7, 6], [2**31 - 1, -(2**31), 0, 3]], ids=str
)
def test_wrong_ends_stay_within_the_rows(offs: list[int], host: ctypes.CDLL) -> None:
    """Whatever `offs` holds, no tile has rows outside of x."""
    for _, begin, end, n_tile in tiles_of(host, offs, 10, 8, 3):
        assert 0 <= begin < end <= 10 and 0 <= n_tile < 3
