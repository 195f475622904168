"""What the constants of the cost model are. Their values are for an H200 (h200.py), fitted by tools/fit.

`fitted_to` of each says to what.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class WaveTimes(NamedTuple):
    """One kernel of `WaveConstants` for one format: a CTA on one SM of the H200.

    registers   of a thread
    k_tile_us   the SM's time for block_k of one CTA, when enough CTAs are resident to keep it busy
    latency_us  the time of block_k for a CTA that is alone: copy, barrier, conversion, one after another
    fixed_us    prologue and epilogue: filling the pipeline, storing the tile
    """

    registers: int
    k_tile_us: float
    latency_us: float
    fixed_us: float


@dataclass(frozen=True)
class WaveConstants:
    """The kernels before Hopper: their CTAs share SMs.

    launch_us         a launch
    reduce_launch_us  a launch of the kernel that adds the partials of split-K
    reduce_tb_s       fp32 partials, written and read
    kernels           (kernel, format) -> its times
    """

    fitted_to: str
    launch_us: float
    reduce_launch_us: float
    reduce_tb_s: float
    kernels: dict[tuple[str, str], WaveTimes]


class TileTimes(NamedTuple):
    """One kernel of Hopper for one format.

    k_tile_us  decode_sm90: one SM multiplies a k-tile (128 k of int4, 64 of int8) by 16 columns
               gemm_sm90: one SM multiplies block_k of a tile, while all SMs are busy
    end_us     the end of an output tile: the last sums, the stores; gemm_sm90: filling the pipeline, too
    """

    k_tile_us: float
    end_us: float


@dataclass(frozen=True)
class DecodeSm90Constants:
    """decode_sm90.

    fixed_us    launch, the first k-tiles on their way
    cluster_us  beyond it where two CTAs of a cluster share K
    cta_us      beyond that for each further CTA of the cluster
    tb_s        weights, scales, x and y, streamed by all SMs. Fitted together with `unhidden`, which adds time to that
                of the bytes: it is more than the memory reaches
    unhidden    part of the shorter of memory's and the SM's time that is not hidden behind the longer
    sm_kb_us    the most that one SM takes of the stream of weights, KB/us (10**3 bytes)
    x_kb_us     x on its way into the shared memory of one SM, KB/us
    token_us    the end of an output tile, beyond end_us, for each token
    kernels     (kernel, format) -> its times
    """

    fitted_to: str
    fixed_us: float
    cluster_us: float
    cta_us: float
    tb_s: float
    unhidden: float
    sm_kb_us: float
    x_kb_us: float
    token_us: float
    kernels: dict[tuple[str, str], TileTimes]


@dataclass(frozen=True)
class GemmSm90Constants:
    """gemm_sm90.

    fixed_us ... unhidden  as in DecodeSm90Constants
    idle                   part of an SM's time that is saved when all others are idle
    kernels                (kernel, format) -> its times
    """

    fitted_to: str
    fixed_us: float
    cluster_us: float
    cta_us: float
    tb_s: float
    unhidden: float
    idle: float
    kernels: dict[tuple[str, str], TileTimes]


@dataclass(frozen=True)
class UnfusedConstants:
    """For each slice of the weight's columns one kernel that dequantizes it, then cuBLAS.

    slice_us              launches, beginnings and ends of the two
    dequantize_bandwidth  part of the memory's bandwidth that the first reaches, reading and writing
    sm_tflop_s            what cuBLAS makes of one SM while all are busy
    unhidden_y            part of the time that the bytes of y take which is not hidden behind the product
    """

    fitted_to: str
    slice_us: float
    dequantize_bandwidth: float
    sm_tflop_s: float
    unhidden_y: float


class GroupedTimes(NamedTuple):
    """One grouped kernel of Hopper for one format.

    start_us  launch, the tiles counted, the first k_tiles on their way
    k_us      one SM multiplies 1024 k of a tile, with one row of x
    end_us    the end of a tile, and the beginning of the next
    row       the part of k_us that each further row of a tile adds
    """

    start_us: float
    k_us: float
    end_us: float
    row: float


@dataclass(frozen=True)
class GroupedConstants:
    """grouped_sm90 and grouped_decode_sm90.

    tb_s      of the memory: weights and scales of all experts that have rows
    unhidden  see DecodeSm90Constants
    kernels   (kernel, format) -> its times

    around_sorting_us  what a layer takes beyond its products, where their kernels sort the choices
    around_us          the same, where a kernel in front does. Neither is fitted
    other_kernel_us    what a layer takes longer if its products have different kernels: 1.9 to 2.8 us with one token
    """

    fitted_to: str
    tb_s: float
    unhidden: float
    around_sorting_us: float
    around_us: float
    other_kernel_us: float
    kernels: dict[tuple[str, str], GroupedTimes]
