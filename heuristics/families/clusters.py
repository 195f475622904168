"""What the kernels of Hopper share: one CTA on an SM, and clusters of split_k CTAs that share K."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any

from ..constants import DecodeSm90Constants, GemmSm90Constants, TileTimes
from ..cost import Work, problem_bytes
from ..problem import Problem
from .base import Family, KernelConfig, Launch, measured

PANEL_COLUMNS = 64
"""Columns of layout "tiled" that are padded together: a column panel (weightonly/layout/shapes.py)."""

CLUSTERS = (1, 2, 3, 4, 5, 6, 8)
"""CTAs of a cluster that `select` considers: as many clusters of 8 run at once as of 7."""


class ClusterLaunch(Launch):
    """A launch of clusters. Its work is `counted_work` of its `counts`."""

    __slots__ = ("_family", "_times")

    def __init__(
        self, family: ClusterFamily, config: KernelConfig, problem: Problem, times: TileTimes | None = None
    ) -> None:
        """times: None: as measured."""
        self._family = family
        self._times = times or family.constants.kernels[measured(config, problem.format)]
        super().__init__(config, self._times.k_tile_us / (config.block_k * problem.sm_count))

    def counts(self, m: int, n: int, k: int, tiles: int, total_bytes: float) -> tuple[float, ...]:
        raise NotImplementedError

    def work(self, m: int, n: int, k: int, tiles: int, total_bytes: float) -> Work:
        counts = self.counts(m, n, k, tiles, total_bytes)
        return self._family.counted_work(counts, self._family.constants, self._times)


class ClusterFamily(Family):
    layout = "tiled"
    first_arch = last_arch = 90
    shares_cluster = True

    constants: DecodeSm90Constants | GemmSm90Constants

    def counts(self, config: KernelConfig, problem: Problem) -> tuple[float, ...]:
        """What `counted_work` needs of a launch."""
        p = problem
        return self.launch(config, p).counts(p.m, p.n, p.k, self.tiles(config, p.m, p.n), problem_bytes(p))

    def launch(self, config: KernelConfig, problem: Problem, order: Hashable = None) -> ClusterLaunch:
        raise NotImplementedError

    def counted_work(self, counts: Sequence[Any], constants: Any, times: TileTimes, maximum: Any = max) -> Work:
        """The work of a launch, or of many: counts and times may be arrays."""
        raise NotImplementedError

    def is_calibrated(self, config: KernelConfig, format: str) -> bool:
        return measured(config, format) in self.constants.kernels

    def splits(self, config: KernelConfig) -> Iterable[int]:
        return (s for s in CLUSTERS if s <= config.max_split_k)


def codebook_bytes(config: KernelConfig, format: str) -> int:
    """Pairs of codes, for each lane (cutlass_ext/convert/codebook.h)."""
    return 0 if format != "code4" else 256 * (256 if config.block_m <= 32 else 128)


def cluster_us(constants: DecodeSm90Constants | GemmSm90Constants, split_k: Any) -> Any:
    """What a cluster of split_k CTAs takes beyond a single CTA."""
    return (split_k > 1) * (constants.cluster_us + (split_k - 2) * constants.cta_us)
