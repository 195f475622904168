"""What the kernels of Hopper need, without a GPU: names, clusters, shared memory, runs of work."""

from __future__ import annotations

import itertools

import pytest

from weightonly.heuristics import KernelConfig
from weightonly.heuristics.configs import CONFIGS
from weightonly.heuristics.cost import cluster_slots, decode_turns, machine


def test_clusters_that_fit_on_an_h200() -> None:
    assert [cluster_slots(132, s) for s in range(1, 9)] == [132, 66, 39, 30, 22, 17, 15, 15]
    assert cluster_slots(4, 8) == 1


def test_names_and_sizes_of_the_hopper_kernels() -> None:
    decode = next(c for c in CONFIGS if c.kernel == "decode_sm90_8x32x2048_w8x32_s2")
    assert (decode.warps, decode.piece_k, decode.max_m, decode.max_split_k) == (16, 128, 8, 8)
    assert decode.formats == ("int4", "code4")
    # three of 48 units of columns on each of 22 clusters, 32 pieces of K each
    assert decode.with_split_k(5).decode_run_pieces(1536, 4096, 22) == 20
    gemm = next(c for c in CONFIGS if c.kernel == "gemm_sm90_32x256x128_w32x64_s6")
    assert (gemm.warps, gemm.piece_k, gemm.max_split_k, gemm.warpgroups_k) == (16, 128, 8, 1)
    shared = next(c for c in CONFIGS if c.kernel == "gemm_sm90_16x64x512_w16x64_s4")
    assert (shared.warps, shared.piece_k, shared.formats, shared.warpgroups_k) == (16, 512, ("code4", "int8"), 4)
    assert {c.block_m for c in CONFIGS if c.family == "gemm_sm90" and c.max_split_k == 1} == {256}, "no room for sums"
    hopper = [c for c in CONFIGS if c.shares_cluster]
    assert {c.layout for c in hopper} == {"tiled"}
    assert all(c.compiled_for("90a") and not c.compiled_for("90") and not c.compiled_for("100a") for c in hopper)


@pytest.mark.parametrize(
    ("m", "k_padded", "group_size", "zeros", "split_k", "expected_bytes"),
    [
        # barriers + 2 slots of 16 warps (weights + rows of scales) + twice the sums of the warps (+ those sent) + x
        pytest.param(1, 4096, 128, False, 1, 128 + 32 * (2 * 1024 + 128) + 32 * 128 + 8192 + 16, id="group128"),
        pytest.param(8, 4096, 32, True, 1, 128 + 32 * (2 * 1024 + 8 * 128) + 8 * (32 * 128 + 8208), id="group32zeros"),
        pytest.param(1, 4096, 192, False, 1, 128 + 32 * (2 * 1024 + 2 * 128) + 32 * 128 + 8208, id="group192"),
        pytest.param(1, 4160, -1, True, 1, 128 + 32 * (2 * 1024 + 4 * 128) + 32 * 128 + 33 * 256 + 16, id="odd K"),
        # one unit of columns a cluster
        pytest.param(4, 4096, -1, False, 3, 128 + 32 * 2048 + 4 * (34 * 128 + 11 * 256 + 16), id="part of K"),
        # four of them: a run of 43 pieces meets all 32 of K
        pytest.param(4, 4096, -1, False, -3, 128 + 32 * 2048 + 4 * (34 * 128 + 32 * 256 + 16), id="all of K"),
    ],
)
def test_shared_memory_of_decode(
    m: int, k_padded: int, group_size: int, zeros: bool, split_k: int, expected_bytes: int
) -> None:
    config = next(c for c in CONFIGS if c.kernel == "decode_sm90_8x32x2048_w8x32_s2").with_split_k(abs(split_k))
    n = 39 * 32 * 4 if split_k < 0 else 38 * 32
    assert config.decode_smem_bytes("int4", m, n, k_padded, group_size, zeros, clusters=39) == expected_bytes
    with_table = config.decode_smem_bytes("code4", m, n, k_padded, group_size, zeros, clusters=39)
    assert with_table == expected_bytes + 256 * 256


BARRIERS_BYTES = 1024


def items(config: KernelConfig) -> int:
    """Of gemm_sm90: sums of 8 tokens and 64 columns, 2 KB each."""
    return config.block_m // 8 * (config.block_n // 64)


def stage_and_end_bytes(config: KernelConfig, format: str, scale_rows: int) -> tuple[int, int]:
    """Of gemm_sm90: all of its stages, and what takes their place at the end, the sums of all of its warpgroups.

    scale_rows: of scales and zero points, for 32 k.
    """
    weight_bytes = config.block_n * config.block_k * (8 if format == "int8" else 4) // 8
    scale_bytes = scale_rows * config.block_k // 32 * config.block_n * 2
    stages_bytes = config.stages * (config.block_k * config.block_m * 2 + weight_bytes + scale_bytes)
    if format == "code4":
        stages_bytes += (64 if config.block_m <= 32 else 32) * 1024
    return stages_bytes, items(config) * config.warpgroups_k * 2048


def test_the_table_of_codes_in_shared_memory() -> None:
    """Wide rows where x is small (cutlass_ext/code_table.h): 64 KB, else 32."""
    for config in CONFIGS:
        if config.family == "gemm_sm90" and "code4" in config.formats:
            stages_bytes, end_bytes = stage_and_end_bytes(config, "code4", 1)
            chunk_bytes = config.block_n // 64 * 2 * 16 * 144 if config.stores_chunks else 0
            needed = config.gemm_sm90_smem_bytes("code4", per_channel=False, zeros=False)
            assert needed == BARRIERS_BYTES + max(stages_bytes, end_bytes) + chunk_bytes
            assert needed <= machine(90).smem_bytes


@pytest.mark.parametrize("format", ["int4", "int8"])
def test_shared_memory_of_the_hopper_gemm(format: str) -> None:
    """Every tile fits with the smallest groups and zero points, beside it sums of others or, where it loops, y."""
    for config in CONFIGS:
        if config.family != "gemm_sm90" or format not in config.formats:
            continue
        needed = config.gemm_sm90_smem_bytes(format, per_channel=False, zeros=True)
        assert needed <= machine(90).smem_bytes
        bare = config.gemm_sm90_smem_bytes(format, per_channel=True, zeros=False)
        assert config.loops == (config.block_m >= 128 and config.block_n * config.block_m > 128 * 128)
        chunk_bytes = config.block_n // 64 * 2 * 16 * 144 if config.stores_chunks else 0
        assert bare == BARRIERS_BYTES + max(stage_and_end_bytes(config, format, 0)) + chunk_bytes
        assert needed == BARRIERS_BYTES + max(stage_and_end_bytes(config, format, 2)) + chunk_bytes
        # Of two CTAs one sends half of what it has.
        for split_k in (2, 4):
            shared = config.with_split_k(split_k).gemm_sm90_smem_bytes(format, per_channel=True, zeros=False)
            sent = (split_k - 1) * config.warpgroups_k * -(-items(config) // split_k)
            if config.max_split_k > 1:
                assert shared == bare - chunk_bytes + sent * 2048
            else:
                assert shared > machine(90).smem_bytes


@pytest.mark.parametrize("split_k", [1, 2, 3, 5, 8])
def test_turns_are_the_units_that_a_run_has_parts_of(split_k: int) -> None:
    for pieces, count in itertools.product((1, 4, 7, 28, 40), range(1, 6)):
        run = -(-count * pieces // split_k)
        runs = [range(begin, min(begin + run, count * pieces)) for begin in range(0, count * pieces, run)]
        most = max(len({piece // pieces for piece in one}) for one in runs)
        found = decode_turns(run, pieces, count)
        # Of a run longer than a unit, those inside it count, and one at its ends.
        assert found == most if run <= pieces else most - 1 <= found <= most
