"""The generated units: what is compiled, for which architectures, and the constants that the kernels read."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import generate
import pytest
from tests import ROOT

from weightonly.heuristics.configs import CONFIGS, FP8_CONFIGS, GROUPED_CONFIGS, GROUPED_FP8_CONFIGS, kernel_types


def constants(symbol: str) -> dict[str, int]:
    text = next(k for k in generate.all_kernels(unverified=True) if k.symbol == symbol).text()
    return {name: int(value) for name, value in re.findall(r"static constexpr int (\w+) = (\d+);", text)}


@pytest.mark.parametrize(
    ("symbol", "expected"),
    [
        (
            "decode_sm90_8x32x2048_w8x32_s2_f16_int4_group",
            {"kRowTiles": 2, "kWarpsK": 16, "kStages": 2, "kLeastGroup": 32},
        ),
        (
            "decode_sm90_8x64x512_w8x64_s2_bf16_int8_channel",
            {"kRowTiles": 4, "kWarpsK": 8, "kStages": 2, "kLeastGroup": 32},
        ),
        (
            "gemm_sm90_32x256x128_w32x64_s6_f16_int4_group_zeros",
            {"kTileM": 32, "kWarpgroupsN": 4, "kWarpgroupsK": 1, "kStages": 6, "kLeastGroup": 32},
        ),
        (
            "gemm_sm90_16x64x512_w16x64_s4_bf16_int8_group",
            {"kTileM": 16, "kWarpgroupsN": 1, "kWarpgroupsK": 4, "kStages": 4, "kLeastGroup": 32},
        ),
        (
            "gemm_sm80_16x64x64_w16x32_s4_f16_int4_group",
            {"kBlockM": 16, "kBlockN": 64, "kWarpM": 16, "kWarpN": 32, "kStages": 4, "kLeastGroup": 32},
        ),
        ("gemv_1x16x1024_f16_int4_channel", {"kTokens": 1, "kLines": 4, "kWarps": 4, "kLeastGroup": 32}),
        (
            "decode_sm90_8x32x1024_w8x32_s2_g16_f16_int8_group",
            {"kRowTiles": 2, "kWarpsK": 16, "kStages": 2, "kLeastGroup": 16},
        ),
    ],
)
def test_constants_of_a_unit(symbol: str, expected: dict[str, int]) -> None:
    assert constants(symbol) == expected


def test_a_unit_defines_a_function_for_each_kernel() -> None:
    unit = {k.symbol: k.text() for k in generate.all_kernels()}
    decode = unit["decode_sm90_8x64x1024_w8x64_s2_bf16_int4_group_zeros"]
    assert "return launch_decode_sm90<decode_sm90_8x64x1024_w8x64_s2::Bf16Int4GroupZeros>(params, stream);" in decode
    assert "using Element = cutlass::bfloat16_t;" in decode
    assert "ScaleMode::kGroupZeros" in decode
    for symbol, text in unit.items():
        params = "GroupedGemmParams" if symbol.startswith("grouped") else "GemmParams"
        assert f"cudaError_t {symbol}({params} const& params, cudaStream_t stream) {{" in text


@pytest.mark.parametrize(
    ("symbol", "facts", "flags"),
    [
        # rows, CTAs of a cluster, whether it reads zeros, the smallest groups, bytes of x, whether it takes an order
        ("gemm_sm90_32x256x128_w32x64_s6_f16_int4_group", "2097120, 8, false, 32, 2, true", ""),
        ("gemm_sm90_256x128x64_w256x64_s5_bf16_int8_group_zeros", "16776960, 1, true, 32, 2, true", ""),
        ("gemm_sm80_16x64x64_w16x32_s4_f16_code4_group", "2147483647, 0, true, 32, 2, false", ""),
        ("gemv_1x16x1024_f16_int4_channel", "1, 0, false, 32, 2, false", ""),
        ("gemv_1x16x2048_g16_f16_int4_group", "1, 0, false, 16, 2, false", ""),
        ("gemm_sm90_fp8_192x128x128_w192x64_s5_bf16_int4_group", "12582720, 8, false, 128, 1, false", ""),
        ("gemm_sm90_fp8_192x128x128_w192x64_s5_bf16_int4_channel", "12582720, 8, false, 32, 1, false", ""),
        # and whether it sorts, and may be in a layer, with gates
        ("grouped_sm90_64x256x128_w64x64_s4_f16_int4_group", "2147483647, 1, false, 32, 2, false", ", false, true"),
        ("grouped_sm90_32x256x128_w32x64_s5_f16_code4_group", "2147483647, 1, true, 32, 2, false", ", false, true"),
        ("grouped_decode_sm90_8x64x512_w8x64_s2_f16_int4_group", "2147483647, 1, false, 32, 2, false", ", true, true"),
        ("grouped_sm80_16x64x64_w16x32_s4_f16_int4_group", "2147483647, 0, false, 32, 2, false", ", false, false"),
    ],
)
def test_facts_of_a_kernel_stand_in_the_registry(symbol: str, facts: str, flags: str, tmp_path: Path) -> None:
    generate.generate(tmp_path, ["75", "80", "90a"], unverified=True)
    registry = (tmp_path / "registry.cu").read_text()
    assert f'    {{{{"{symbol}", {facts}}}, &{symbol}{flags}}},\n' in registry


def test_a_unit_has_the_kernels_of_one_configuration() -> None:
    kernels = [k for k in generate.all_kernels() if k.unit == "decode_sm90_8x64x1024_w8x64_s2.cu"]
    text = generate.unit_text(kernels)
    assert text.count('#include "kernels/gemm/sm90_decode/arguments.h"') == 1
    weights = ("Int4Channel", "Int4Group", "Int4GroupZeros", "Code4Group")
    types = {dtype + weight for dtype in ("F16", "Bf16") for weight in weights}
    assert set(re.findall(r"^struct (\w+) {", text, re.MULTILINE)) == types
    assert all(k.text() in text for k in kernels) and len(kernels) == 8


def test_unusual_wgmma_shapes_are_asked_for_where_they_are_needed() -> None:
    """Of 48 tokens, and where the MMA of a tile is as wide as its rows need."""
    asks: dict[tuple[str, int], set[bool]] = {}
    for kernel in generate.all_kernels():
        asked = "EXTENDED_MMA_SHAPES" in generate.unit_text([kernel])
        asks.setdefault((kernel.config.family, kernel.config.block_m), set()).add(asked)
    assert {tokens: asks["gemm_sm90", tokens] for tokens in (48, 64, 96)} == {48: {True}, 64: {False}, 96: {False}}
    assert all(asks["grouped_sm90", tokens] == {True} for tokens in (64, 128, 256))


@pytest.mark.parametrize(
    ("archs", "families"),
    [
        (["70"], {"gemm_sm70"}),
        (["75"], {"gemm_sm75", "gemv"}),
        (["80"], {"gemm_sm80", "decode_sm80", "gemv", "grouped_sm80"}),
        # Without "a" there is no wgmma, and such code would run on later GPUs.
        (["90"], {"gemm_sm80", "decode_sm80", "gemv", "grouped_sm80"}),
        (
            ["90a"],
            {"gemm_sm80", "decode_sm80", "gemv", "grouped_sm80"}
            | {"decode_sm90", "gemm_sm90", "gemm_sm90_fp8", "gemm_sm90_fp8_mx"}
            | {"grouped_sm90", "grouped_sm90_fp8", "grouped_sm90_fp8_mx", "grouped_decode_sm90"},
        ),
        (["100a"], {"gemm_sm80", "decode_sm80", "gemv", "grouped_sm80"}),
    ],
)
def test_families_of_a_build(archs: list[str], families: set[str]) -> None:
    assert {k.config.family for k in generate.all_kernels(unverified=True) if k.archs(archs)} == families


def test_options_of_targets() -> None:
    assert generate.gencode(generate.parse_archs("120+PTX,75,80,90a"))[1::2] == [
        "arch=compute_75,code=[sm_75,compute_75]",
        "arch=compute_80,code=sm_80",
        "arch=compute_90a,code=sm_90a",
        "arch=compute_120,code=[sm_120,compute_120]",
    ]


@pytest.mark.parametrize("arch", ["61", "80b", "+PTX", "120+ptx", "sm_80"])
def test_other_targets_are_refused(arch: str) -> None:
    with pytest.raises(ValueError, match=f"archs: expected compute .* got '{re.escape(arch)}'"):
        generate.parse_archs(f"80,{arch}")


@pytest.mark.parametrize("unverified", [False, True], ids=["verified", "all"])
def test_a_build_has_kernels_of_groups_of_16(tmp_path: Path, unverified: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """No GPU has run them: only a build that asks for them."""
    # The build's list is one of its own: generate.py imports heuristics/ without the package.
    for family in sys.modules["heuristics.families"].FAMILIES.values():
        monkeypatch.setattr(family, "groups_of_16_verified", False)
    kernels = generate.generate(tmp_path, ["80", "90a"], unverified)
    families = {k.config.family for k in kernels if k.config.groups_of_16}
    expected = {"decode_sm90", "gemm_sm90", "gemv", "decode_sm80", "gemm_sm80", "grouped_decode_sm90", "grouped_sm90"}
    assert families == (expected if unverified else set())
    (line,) = (line for line in (tmp_path / "units.cmake").read_text().splitlines() if "convert/dequantize.cu" in line)
    assert ("-DWEIGHTONLY_GROUPS_OF_16" in line) == unverified
    source = (ROOT / "kernels" / "convert" / "dequantize.cu").read_text()
    assert source.count("#if defined(WEIGHTONLY_GROUPS_OF_16)") == 2


def test_files_of_a_build(tmp_path: Path) -> None:
    stale = tmp_path / "gemm_of_yesterday.cu"
    stale.touch()
    kernels = generate.generate(tmp_path, ["80", "90a"])
    expected = {
        f"{c.kernel}_{t.name}"
        for c in (*CONFIGS, *FP8_CONFIGS)
        for t in kernel_types(c)
        if (c.rules.first_arch >= 80 or c.family == "gemv") and not c.unfused and c.is_verified
    }
    of_experts = [c for c in (*GROUPED_CONFIGS, *GROUPED_FP8_CONFIGS) if c.is_verified]
    grouped = {f"{c.kernel}_{t.name}" for c in of_experts for t in kernel_types(c)}
    assert {k.symbol for k in kernels} == expected | grouped
    assert {path.name for path in tmp_path.glob("*.cu")} == {k.unit for k in kernels} | {"registry.cu"}
    units = (tmp_path / "units.cmake").read_text()
    on_hopper = units[units.index('decode_sm90_8x32x2048_w8x32_s2.cu" PROPERTIES') :].splitlines()[0]
    assert "sm_90a" in on_hopper and "sm_80" not in on_hopper
    registry = (tmp_path / "registry.cu").read_text()
    assert f"kKernelCount = {len(expected)};" in registry
    assert f"kGroupedKernelCount = {len(grouped)};" in registry
    before = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    generate.generate(tmp_path, ["80", "90a"])
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before
