"""About the least time: memory traffic or arithmetic, whichever takes longer, plus a launch.

    roofline_us = max(bytes / read bandwidth, 2 m n k / matmul rate) + launch

bytes = packed weights + scales (+ zeros) + x + y, each moved once. The matmul rate is of a long product: a GPU
that has rested multiplies a few percent faster for a while.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch

_COPY_BYTES = 1 << 30
_MATMUL_SIZE = 8192
_LAUNCH_US = 1.5


@dataclass(frozen=True)
class Ceilings:
    """What one GPU reaches: TB/s (10**12 bytes) of reads, dense fp16 TFLOP/s, us for launch and drain."""

    tb_s: float
    tflop_s: float
    launch_us: float = _LAUNCH_US


# Measured. tb_s: a kernel that only reads; tflop_s: cuBLAS fp16 at 8192^3 on random data (not the data
# sheet's rate).
CEILINGS: dict[str, Ceilings] = {"NVIDIA H200": Ceilings(tb_s=4.47, tflop_s=780.0)}


@functools.cache
def _measured(device_index: int) -> Ceilings:
    """Ceilings of a GPU that the table lacks: a device copy (bytes read + written) and a large matmul."""
    device = torch.device("cuda", device_index)

    def best_ms(run: functools.partial[torch.Tensor]) -> float:
        times: list[float] = []
        for _ in range(8):  # the first ones are the warm-up: the minimum drops them
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            run()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        return min(times)

    with torch.cuda.device(device):
        source = torch.randint(0, 256, (_COPY_BYTES,), dtype=torch.uint8, device=device)  # [bytes]
        copy_ms = best_ms(functools.partial(torch.empty_like(source).copy_, source))
        del source
        a = torch.randn(_MATMUL_SIZE, _MATMUL_SIZE, dtype=torch.float16, device=device)  # [m, k]
        b = torch.randn(_MATMUL_SIZE, _MATMUL_SIZE, dtype=torch.float16, device=device)  # [k, n]
        matmul_ms = best_ms(functools.partial(torch.matmul, a, b, out=torch.empty_like(a)))
    return Ceilings(tb_s=2 * _COPY_BYTES / copy_ms / 1e9, tflop_s=2 * _MATMUL_SIZE**3 / matmul_ms / 1e9)


def ceilings(device: torch.device) -> Ceilings | None:
    """From `CEILINGS` by the GPU's name, else measured, once per process; None for a CPU."""
    if device.type != "cuda":
        return None
    index = torch.cuda.current_device() if device.index is None else device.index
    return CEILINGS.get(torch.cuda.get_device_name(index)) or _measured(index)


def weight_bytes(k: int, n: int, bits: int, group_size: int, symmetric: bool) -> int:
    """Packed weights, their 2-byte scales and, unless `symmetric`, their 2-byte zeros; no padding."""
    groups = 1 if group_size == -1 else k // group_size
    return k * n * bits // 8 + groups * n * 2 * (1 if symmetric else 2)


def activation_bytes(m: int, k: int, n: int, dtype: torch.dtype = torch.float16) -> int:
    """Bytes of x [m, k] and y [m, n]."""
    return dtype.itemsize * m * (k + n)


def roofline_us(
    m: int,
    k: int,
    n: int,
    *,
    bits: int,
    group_size: int,
    symmetric: bool = True,
    limits: Ceilings | None,
    weights: int = 1,
    x_rows: int | None = None,
    y_rows: int | None = None,
) -> float:
    """The roofline of one call in us.

    Args:
        m: rows; of a grouped product those of all experts.
        k: rows of w.
        n: columns of w.
        bits: 4 or 8.
        group_size: rows of w per scale; -1: per channel.
        symmetric: without zero points.
        limits: of the GPU, a value of `CEILINGS`; None: a CPU, which has no entry.
        weights: of a grouped product how many experts have rows; the weights of the others are not read.
        x_rows: rows of x that are moved, fewer than m where each token is read once for all of its experts; None: m.
        y_rows: rows of y that are moved, likewise.

    Returns:
        us; NaN where `limits` is None.

    Examples:
        >>> h200 = wo.bench.CEILINGS["NVIDIA H200"]
        >>> round(wo.bench.roofline_us(1, 4096, 4096, bits=4, group_size=128, limits=h200), 1)
        3.4
    """
    if limits is None:
        return math.nan
    moved = weights * weight_bytes(k, n, bits, group_size, symmetric)
    moved += 2 * ((m if x_rows is None else x_rows) * k + (m if y_rows is None else y_rows) * n)
    return least_us(moved, 2 * m * n * k, limits) + limits.launch_us


def least_us(moved_bytes: float, operations: float, limits: Ceilings) -> float:
    """The longer of memory traffic and arithmetic, in us, without a launch."""
    return max(moved_bytes / limits.tb_s, operations / limits.tflop_s) / 1e6


def describe(limits: Ceilings) -> str:
    """What the roofline is on this GPU."""
    return (
        f"the longer of bytes / {limits.tb_s:.2f} TB/s and operations / {limits.tflop_s:.0f} TFLOP/s, "
        f"plus {limits.launch_us} us for a launch; bytes: the quantized weight, scales, x and y, each once"
    )
