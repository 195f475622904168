"""Times single configurations of `gemm` on one random weight: for the regret, the fit of the cost model, and `tune`."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Sequence

import torch

import weightonly as wo
from weightonly.heuristics import KernelConfig
from weightonly.heuristics.problem import FP8_LAYOUT

from .providers import Packed
from .timing import CallTimer, Timing, copies_beyond_l2, overlapping, time_calls, time_in_rounds
from .weights import Weights


class ConfigTimer:
    """Copies of a packed weight beyond the L2 cache, and rows of x to multiply by them."""

    def __init__(self, weights: Weights, max_m: int, layout: str | None = None) -> None:
        """max_m: the most rows that will be asked for. layout: of the packed weight, None for the GPU's own."""
        self.device = weights.q.device
        packed = Packed.of(weights, layout)
        copies = copies_beyond_l2(packed.nbytes, self.device)
        self._weights = [packed, *(copy.deepcopy(packed) for _ in range(copies - 1))]
        self._x = torch.randn(max_m, weights.k, device=self.device, dtype=weights.scales.dtype)  # [max_m, k]
        self._x_scales: torch.Tensor | None = None  # [max_m]
        if layout == FP8_LAYOUT:
            self._x, self._x_scales = wo.quantize_activations(self._x)
        self._out = torch.empty(max_m, weights.n, device=self.device, dtype=weights.scales.dtype)  # [max_m, n]

    def __call__(self, m: int, config: KernelConfig, *, budget_ms: float, give_up_us: float = math.inf) -> Timing:
        """`time_calls` of m rows, without overlap of calls."""
        with overlapping(False):
            return time_calls(self._calls(m, config), self.device, budget_ms=budget_ms, give_up_us=give_up_us)

    def in_rounds(self, m: int, configs: Sequence[KernelConfig], *, budget_ms: float) -> list[Timing]:
        """The same of several, with `time_in_rounds`."""
        timers = [CallTimer(self._calls(m, config), self.device) for config in configs]
        with overlapping(False):
            return time_in_rounds(timers, budget_ms)

    def _calls(self, m: int, config: KernelConfig) -> list[Callable[[], object]]:
        x, out = self._x[:m], self._out[:m]
        count = copies_beyond_l2(self._weights[0].nbytes, self.device, x.nbytes + out.nbytes)
        x_scales = None if self._x_scales is None else self._x_scales[:m]
        return [functools.partial(w.multiply, x, out, config, x_scales) for w in self._weights[:count]]
