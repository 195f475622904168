"""Random problems and configurations with exact sums: shapes and mixtures that no list of cases names."""

from __future__ import annotations

import random

import pytest
import torch
from gemm_cases import Case, check_exact, formats_of, own_layout, this_gpu

import weightonly as wo
from weightonly.heuristics import Problem, candidates
from weightonly.heuristics.configs import KernelConfig
from weightonly.kernels import sm_count
from weightonly.launch import LaunchOverlap

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fp32_sums", "launch_overlap")]

_MOST_PRODUCTS = 5e9  # of a problem: its reference is computed in fp64
_PROBLEMS = 12
_OVERLAPS: tuple[LaunchOverlap, ...] = (False, True, "constant_weights")


def draw_case(draw: random.Random) -> Case:
    """Any format, dtype and group size of this GPU's layout; K a multiple of the group, N anything."""
    format = draw.choice(formats_of(own_layout()))
    group_size = draw.choice([32, 64, 128] if format == "code4" else [-1, 32, 64, 128, 192, 256])
    longest = draw.choice([256, 1024, 3072])
    step = 8 if group_size == -1 else group_size
    k = step * draw.randint(1, max(1, longest // step))
    n = draw.choice([draw.randint(1, 300), draw.randint(300, 1500), 64 * draw.randint(1, 40), 8 * draw.randint(1, 300)])
    zeros = format != "code4" and draw.random() < 0.4
    return Case(k, n, format, draw.choice(["f16", "bf16"]), group_size, zeros)


def draw_config(draw: random.Random, m: int, case: Case) -> KernelConfig | None:
    """One of those that compute the problem, if it has a kernel of its own."""
    sms = sm_count(torch.cuda.current_device())
    problem = Problem(
        m, case.n, case.k, case.format, case.group_size, this_gpu(), sms, layout=own_layout(), zeros=case.zeros
    )
    compiled = {config.kernel for config in wo.kernels()}
    found = [c for c in candidates(problem) if not c.is_dense and c.kernel in compiled]
    return draw.choice(found) if found else None


@pytest.mark.parametrize("part", range(4))
def test_random_calls_are_exact(cuda_device: torch.device, seed: int, part: int) -> None:
    draw = random.Random(4 * seed + part)
    generator = torch.Generator().manual_seed(4 * seed + part)
    for _ in range(_PROBLEMS):
        case = draw_case(draw)
        few, many = draw.randint(1, 72), draw.randint(73, 2000)
        m = min(draw.choice([few, few, many]), max(1, int(_MOST_PRODUCTS / (case.n * case.k))))
        for config in (None, draw_config(draw, m, case)):
            overlap: LaunchOverlap = draw.choice(_OVERLAPS)
            print(m, case, config, overlap)  # shown where the check fails
            # Constant weights are promised: their copies from the host have ended when they return.
            wo.set_launch_overlap(overlap)
            check_exact(m, case, config, generator)
