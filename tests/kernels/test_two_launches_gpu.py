"""Two launches for one product, on the GPU: exact, as accurate as cuBLAS, in order with their neighbours."""

from __future__ import annotations

import pytest
import torch
from tests.gemm_cases import Case, check_exact, check_random, chosen, make, require, run, this_gpu

import weightonly as wo
from weightonly.device import sm_count
from weightonly.heuristics import Problem
from weightonly.heuristics.configs import KernelConfig
from weightonly.heuristics.launches import first_columns
from weightonly.heuristics.machine import resident_clusters

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fp32_sums")]

# Tile and split_k of both launches.
PAIRS = {
    "256x128+128x128k3": ((256, 128, 1), (128, 128, 3)),
    "128x192+16x64k2": ((128, 192, 1), (16, 64, 2)),
    "128x128k2+128x192": ((128, 128, 2), (128, 192, 1)),
    "128x192k2+96x128k3": ((128, 192, 2), (96, 128, 3)),
    "16x64k2+96x128": ((16, 64, 2), (96, 128, 1)),
}
CASES = {
    "int4": ("int4", "f16", 128, False),
    "int4-zeros": ("int4", "bf16", 32, True),
    "int8": ("int8", "bf16", -1, False),
    "code4": ("code4", "f16", 64, False),
}


def kernel(format: str, tokens: int, columns: int, split_k: int) -> KernelConfig:
    found = (c for c in wo.kernels() if c.family == "gemm_sm90" and format in c.formats and not c.groups_of_16)
    config = next((c for c in found if (c.block_m, c.block_n) == (tokens, columns)), None)
    if config is None:
        pytest.skip(f"gemm_sm90 of {tokens} x {columns} is not compiled for this GPU")
    return config.with_split_k(split_k)


def a_wave_and(tail_columns: int, m: int, config: KernelConfig) -> int:
    """Columns: one wave of a configuration's CTAs, and so many more."""
    slots = resident_clusters(sm_count(torch.cuda.current_device()), config.split_k)
    return slots // -(-m // config.block_m) * config.block_n + tail_columns


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("case", CASES)
def test_two_launches(cuda_device: torch.device, generator: torch.Generator, case: str, pair: str) -> None:
    format, dtype, group_size, zeros = CASES[case]
    first, tail = (kernel(format, *tile) for tile in PAIRS[pair])
    m = 2 * first.block_m - 3
    for tail_columns in (1, 200):
        c = Case(640, a_wave_and(tail_columns, m, first), format, dtype, group_size, zeros)
        require(first, c)
        require(tail, c)
        p = Problem(m, c.n, c.k, format, group_size, this_gpu(), sm_count(torch.cuda.current_device()), zeros=zeros)
        config = first.with_tail(tail)
        assert c.n - first_columns(config, p) == tail_columns
        check_exact(m, c, config, generator)
        check_random(m, c, config, generator, "silu")


def test_the_choice_of_two_launches(cuda_device: torch.device, generator: torch.Generator) -> None:
    kernel("int4", 128, 192, 1)
    case = Case(2048, 10240)
    if sm_count(torch.cuda.current_device()) == 132:
        assert chosen(512, case).tail is not None
    check_exact(512, case, None, generator)


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("overlap", [False, True], ids=["apart", "overlapping"])
def test_neighbours_of_two_launches(
    cuda_device: torch.device, generator: torch.Generator, overlap: bool, graph: bool
) -> None:
    """Others write x just before each call and read y just after it; the second launch of a call starts early."""
    first, tail = kernel("int4", 16, 64, 1), kernel("int4", 16, 64, 2)
    case = Case(1024, a_wave_and(136, 16, first))
    o = make(case, generator, "tiled", exact=True)
    xs = [torch.randint(-1, 2, (16, case.k), generator=generator).half().cuda() for _ in range(3)]
    expected = [(x.double() @ o.w64).half() for x in xs]
    x, y = torch.zeros_like(xs[0]), torch.empty_like(expected[0])
    results = [torch.full_like(y, float("nan")) for _ in range(12)]
    config = first.with_tail(tail)

    def calls() -> None:
        for i, result in enumerate(results):
            x.copy_(xs[i % 3])
            wo.gemm(x, o.qweight, o.scales, out=y, config=config)
            result.copy_(y)

    wo.set_launch_overlap(overlap)
    try:
        run(x, o, config=config)  # gemm makes its plan outside of the capture
        torch.cuda.synchronize()
        if graph:
            captured = torch.cuda.CUDAGraph()
            with torch.cuda.graph(captured):
                calls()
            captured.replay()
        else:
            calls()
        torch.cuda.synchronize()
    finally:
        wo.set_launch_overlap(True)
    for i, result in enumerate(results):
        assert torch.equal(result, expected[i % 3]), i
