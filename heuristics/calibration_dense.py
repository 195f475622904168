"""Constants of the cost model of dequantizing and cuBLAS (cost.py), of an H200.

What follows the class is written by `python -m weightonly.heuristics.fit` (fit_dense.py).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DenseCost:
    """For each slice of the weight's columns one kernel that dequantizes it, then cuBLAS.

    slice_us    launches, beginnings and ends of the two
    stream      part of the memory's bandwidth that the first reaches, reading and writing
    sm_tflop_s  what cuBLAS makes of one SM while all are busy
    y_stream    part of the bandwidth at which y is written while nothing is multiplied
    """

    slice_us: float
    stream: float
    sm_tflop_s: float
    y_stream: float


# Constants: fitted to 149 times.

DENSE = DenseCost(slice_us=4.0, stream=0.8357, sm_tflop_s=5.421, y_stream=30.79)
