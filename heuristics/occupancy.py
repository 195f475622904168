"""FasterTransformer's occupancy rule, for comparison with the cost model.

Source: FasterTransformer, `cutlass_heuristic.cc` (estimate_best_config_from_occupancies), restated. It knows
nothing of time: it scores a configuration by the part of the last wave that stays idle, and breaks near-ties
by taste.
"""

from __future__ import annotations

from .configs import KernelConfig
from .families.waves import WaveFamily, ctas_per_sm
from .legal import candidates
from .machine import resident_clusters
from .problem import Problem


def last_wave(config: KernelConfig, problem: Problem) -> tuple[float, int]:
    """(idle part of the last wave: 0 when CTAs fill it, towards 1 when they leave it empty; waves)."""
    family = config.rules
    ctas = family.tiles(config, problem.m, problem.n) * config.split_k
    if isinstance(family, WaveFamily):
        registers = family.times(config, problem.format, problem.arch).registers
        per_wave = ctas_per_sm(config, problem.format, problem.arch, registers) * problem.sm_count
    else:
        per_wave = resident_clusters(problem.sm_count, config.split_k) * config.split_k  # one CTA on an SM
    waves = -(-ctas // per_wave)
    return waves - ctas / per_wave, waves


def occupancy_rule(problem: Problem) -> KernelConfig:
    """The GEMM configuration that the rule picks: the least idle part of the last wave, and preferences:

    - Small tiles along M: once a tile holds all rows of x, no taller one is considered.
    - Fewer waves: a configuration of fewer waves wins with a score that is up to 0.1 worse.
    - At equal scores: more stages, then smaller split-K.
    """
    best: KernelConfig | None = None
    best_score, best_waves = float("inf"), 2**31
    ordered = sorted(candidates(problem), key=lambda c: (c.block_m, c.block_n, c.stages, c.split_k))
    for config in ordered:
        if config.max_m == config.block_m or config.unfused:
            continue  # no GEMM: it takes the tokens of one tile
        if best is not None and problem.m <= best.block_m < config.block_m:
            continue
        score, waves = last_wave(config, problem)
        fewer_waves = waves < best_waves and score < best_score + 0.1
        preferred = (
            best is not None and score == best_score and (config.stages > best.stages or config.split_k < best.split_k)
        )
        if score < best_score or fewer_waves or preferred:
            best, best_score, best_waves = config, score, waves
    assert best is not None, f"no GEMM for {problem}"  # every architecture has a GEMM of 16 rows
    return best
