"""What the choices of a model cost by measurements, quick enough for a random search."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


class Choices:
    """The measured configurations of many problems, of which a model takes the one it deems quickest.

    cell      number of the problem, of each measurement that may be chosen
    measured  us
    best      us, of the best configuration of the problem, for each measurement
    """

    def __init__(self, cell: NDArray, measured: NDArray, best: NDArray) -> None:
        self._order = np.argsort(cell, kind="stable")
        self._starts = np.flatnonzero(np.r_[True, np.diff(cell[self._order]) > 0])
        self._counts = np.diff(np.r_[self._starts, len(cell)])
        self._measured = measured[self._order]
        self._best = best[self._order][self._starts]
        self.cells = cell[self._order][self._starts]  # in the order of `regret`

    def regret(self, predicted: NDArray, tie: float = 0.0) -> NDArray:
        """Chosen / best - 1 of each cell, by predicted times; of configurations that tie the slowest counts.

        tie: how much more than the least a time may be, relative to it, to tie with it.
        """
        times = predicted[self._order]
        least = np.minimum.reduceat(times, self._starts) * (1 + tie)
        is_choice = times <= np.repeat(least, self._counts)
        return np.maximum.reduceat(np.where(is_choice, self._measured, 0.0), self._starts) / self._best - 1

    def loss(self, predicted: NDArray, moved: float) -> float:
        """What a search for constants minimizes: mean regret + 3 x mean squared regret, and 2% of mean regret for each
        e-fold that constants were moved from where they were fitted. moved: e-folds of a kernel's, summed; the mean.
        """
        regret = self.regret(predicted)
        return float(regret.mean() + 3 * (regret**2).mean() + 0.02 * moved)
