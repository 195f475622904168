"""What the kernels of Hopper need, without a GPU: names, clusters, shared memory, runs of work."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from weightonly.heuristics import KernelConfig, Problem
from weightonly.heuristics.configs import CONFIGS
from weightonly.heuristics.families.decode_sm90 import DecodeSm90, ends_of, work_unit
from weightonly.heuristics.families.gemm_sm90 import GemmSm90
from weightonly.heuristics.machine import machine, resident_clusters

decode_family, gemm_family = DecodeSm90(), GemmSm90()


def test_clusters_that_fit_on_an_h200() -> None:
    assert [resident_clusters(132, s) for s in range(1, 9)] == [132, 66, 39, 30, 22, 17, 15, 15]
    assert resident_clusters(4, 8) == 1


def test_names_and_sizes_of_the_hopper_kernels() -> None:
    decode = next(c for c in CONFIGS if c.kernel == "decode_sm90_8x32x2048_w8x32_s2")
    assert (decode.k_tile, decode.max_m, decode.max_split_k) == (128, 8, 8)
    assert decode_family.warps_k(decode) == 16
    assert decode.formats == ("int4", "code4")
    # three of 48 n-tiles on each of 22 clusters, 32 k-tiles each
    assert work_unit(1536, 32, 22, split_k=5, of_n_tile=32, warps_k=16)[0] == 20
    gemm = next(c for c in CONFIGS if c.kernel == "gemm_sm90_32x256x128_w32x64_s6")
    assert (gemm.k_tile, gemm.max_split_k, gemm_family.warpgroups_k(gemm)) == (128, 8, 1)
    shared = next(c for c in CONFIGS if c.kernel == "gemm_sm90_16x64x512_w16x64_s4")
    assert (shared.k_tile, shared.formats, gemm_family.warpgroups_k(shared)) == (512, ("code4", "int8"), 4)
    assert {c.block_m for c in CONFIGS if c.measured == c and c.family == "gemm_sm90" and c.max_split_k == 1} == {
        256
    }, "no room for sums"
    hopper = [c for c in CONFIGS if c.shares_cluster]
    assert {c.layout for c in hopper} == {"tiled"}
    builds = {arch: {c.family for c in hopper if c.rules.compiled_for(arch)} for arch in ("90a", "90", "100a")}
    assert builds == {"90a": {"decode_sm90", "gemm_sm90"}, "90": set(), "100a": set()}


@pytest.mark.parametrize(
    ("m", "k_padded", "group_size", "zeros", "split_k", "expected_bytes"),
    [
        # barriers + 2 stages of 16 warps (weights + rows of scales) + twice the accumulators (+ those sent) + x
        pytest.param(1, 4096, 128, False, 1, 128 + 32 * (2 * 1024 + 128) + 32 * 128 + 8192 + 16, id="group128"),
        pytest.param(8, 4096, 16, True, 1, 128 + 32 * (2 * 1024 + 16 * 128) + 8 * (32 * 128 + 8208), id="group16zeros"),
        pytest.param(8, 4096, 32, True, 1, 128 + 32 * (2 * 1024 + 8 * 128) + 8 * (32 * 128 + 8208), id="group32zeros"),
        pytest.param(1, 4224, 192, False, 1, 128 + 32 * (2 * 1024 + 2 * 128) + 32 * 128 + 33 * 256 + 16, id="group192"),
        pytest.param(1, 4160, -1, True, 1, 128 + 32 * (2 * 1024 + 4 * 128) + 32 * 128 + 33 * 256 + 16, id="odd K"),
        # one n-tile a cluster
        pytest.param(4, 4096, -1, False, 3, 128 + 32 * 2048 + 4 * (34 * 128 + 11 * 256 + 16), id="part of K"),
        # four of them: a work unit of 43 k-tiles meets all 32 of K
        pytest.param(4, 4096, -1, False, -3, 128 + 32 * 2048 + 4 * (34 * 128 + 32 * 256 + 16), id="all of K"),
    ],
)
def test_shared_memory_of_decode(
    m: int, k_padded: int, group_size: int, zeros: bool, split_k: int, expected_bytes: int
) -> None:
    kernel = "decode_sm90_8x32x2048_w8x32_s2" + ("_g16" if group_size == 16 else "")
    config = next(c for c in CONFIGS if c.kernel == kernel).with_split_k(abs(split_k))
    n = 39 * 32 * 4 if split_k < 0 else 38 * 32
    p = Problem(m, n, k_padded, "int4", group_size, 90, 132, "tiled", zeros)
    assert abs(split_k) == 1 or resident_clusters(132, abs(split_k)) == 39
    assert decode_family.smem_bytes(config, p) == expected_bytes
    if not zeros:
        codes = dataclasses.replace(p, format="nf4", group_size=128 if group_size == -1 else group_size)
        with_scales = dataclasses.replace(p, group_size=codes.group_size)
        expected_bytes = decode_family.smem_bytes(config, with_scales) + 256 * 256
        assert decode_family.smem_bytes(config, codes) == expected_bytes, "and the codebook"


BARRIERS_BYTES = 1024


def items(config: KernelConfig) -> int:
    """Of gemm_sm90: sums of 8 tokens and 64 columns, 2 KB each."""
    return config.block_m // 8 * (config.block_n // 64)


def stage_and_end_bytes(config: KernelConfig, format: str, scale_rows: int) -> tuple[int, int]:
    """Of gemm_sm90: all of its stages, and what takes their place at the end, the sums of all of its warpgroups.

    scale_rows: of scales and zero points, for the smallest groups.
    """
    weight_bytes = config.block_n * config.block_k * (8 if format == "int8" else 4) // 8
    scale_bytes = scale_rows * config.block_k // config.least_group * config.block_n * 2
    stages_bytes = config.stages * (config.block_k * config.block_m * 2 + weight_bytes + scale_bytes)
    if format == "code4":
        stages_bytes += (64 if config.block_m <= 32 else 32) * 1024
    return stages_bytes, items(config) * gemm_family.warpgroups_k(config) * 2048


def beside_bytes(config: KernelConfig) -> int:
    """Of a CTA alone with its K: chunks of y, and of tiles that follow another order the sum of parts."""
    sum_bytes = 192 * 128 * 4 if config.block_m == 192 and config.stages < 5 else 0
    return sum_bytes + (config.block_n // 64 * 2 * 16 * 144 if gemm_family.stages_y(config) else 0)


def test_the_table_of_codes_in_shared_memory() -> None:
    """Wide rows where x is small (cutlass_ext/convert/codebook.h): 64 KB, else 32."""
    for config in CONFIGS:
        if config.family == "gemm_sm90" and "code4" in config.formats:
            stages_bytes, end_bytes = stage_and_end_bytes(config, "code4", 1)
            chunk_bytes = beside_bytes(config)
            needed = gemm_family.cta_smem_bytes(config, "code4", per_channel=False, zeros=False)
            assert needed == BARRIERS_BYTES + max(stages_bytes, end_bytes) + chunk_bytes
            assert needed <= machine(90).smem_bytes


@pytest.mark.parametrize("format", ["int4", "int8"])
def test_shared_memory_of_the_hopper_gemm(format: str) -> None:
    """Every tile fits with the smallest groups and zero points, beside it sums of others or, where it loops, y."""
    for config in CONFIGS:
        if config.family != "gemm_sm90" or format not in config.formats:
            continue
        needed = gemm_family.cta_smem_bytes(config, format, per_channel=False, zeros=True)
        assert needed <= machine(90).smem_bytes
        assert gemm_family.cta_smem_bytes(config, format, per_channel=True, zeros=True) == needed
        bare = gemm_family.cta_smem_bytes(config, format, per_channel=True, zeros=False)
        assert gemm_family.loops(config) == (config.block_m >= 128 and config.block_n * config.block_m > 128 * 128)
        chunk_bytes = beside_bytes(config)
        assert bare == BARRIERS_BYTES + max(stage_and_end_bytes(config, format, 0)) + chunk_bytes
        assert needed == BARRIERS_BYTES + max(stage_and_end_bytes(config, format, 2)) + chunk_bytes
        # Of two CTAs one sends half of what it has.
        for split_k in (2, 4):
            shared = gemm_family.cta_smem_bytes(config.with_split_k(split_k), format, per_channel=True, zeros=False)
            sent = (split_k - 1) * gemm_family.warpgroups_k(config) * -(-items(config) // split_k)
            if config.max_split_k > 1:
                assert shared == bare - chunk_bytes + sent * 2048
            else:
                assert shared > machine(90).smem_bytes or gemm_family.sums_in_smem(config)


def test_sums_that_take_more_room_than_the_stages() -> None:
    """As they would in a kernel of one stage."""
    config = next(c for c in CONFIGS if c.family == "gemm_sm90" and (c.block_m, c.block_n) == (96, 192))
    config = dataclasses.replace(config, stages=1)
    stages_bytes, end_bytes = stage_and_end_bytes(config, "int4", 0)
    assert end_bytes > stages_bytes
    chunk_bytes = 3 * 2 * 16 * 144
    needed = gemm_family.cta_smem_bytes(config, "int4", per_channel=True, zeros=False)
    assert needed == BARRIERS_BYTES + end_bytes + chunk_bytes


@pytest.mark.parametrize("split_k", [1, 2, 3, 5, 8])
def test_ends_are_the_n_tiles_that_a_work_unit_has_parts_of(split_k: int) -> None:
    for pieces, count in itertools.product((1, 4, 7, 28, 40), range(1, 6)):
        run = -(-count * pieces // split_k)
        runs = [range(begin, min(begin + run, count * pieces)) for begin in range(0, count * pieces, run)]
        most = max(len({piece // pieces for piece in one}) for one in runs)
        found = ends_of(run, pieces, count)
        # Of a run longer than a unit, those inside it count, and one at its ends.
        assert found == most if run <= pieces else most - 1 <= found <= most
