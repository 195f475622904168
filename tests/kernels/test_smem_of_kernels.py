"""Shared memory, limits and orders of K, of the Hopper and the grouped kernels: in Python, beside C++."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import generate
import pytest
from tests import ROOT

from weightonly.gate import Gate
from weightonly.heuristics.families import FAMILIES
from weightonly.heuristics.families.grouped_decode_sm90 import GATED_COLUMNS, MAX_ROW_TILES, MAX_SORTED_CHOICES
from weightonly.heuristics.families.grouped_sm80 import MAX_EXPERTS as MAX_INTERLEAVED
from weightonly.heuristics.families.grouped_sm90 import MAX_EXPERTS
from weightonly.heuristics.problem import FORMAT_GROUPS, Problem
from weightonly.ops.around_experts import MAX_CHOICES
from weightonly_build import cutlass, library, target

CLUSTERS = {1: 132, 2: 66, 3: 39, 8: 15}
"""split_k -> clusters of so many CTAs that are resident on an H200."""

HEAD = """\
#include "kernels/experts/experts.h"
#include "kernels/gemm/sm80_grouped.cuh"
#include "kernels/gemm/sm90/grouped_traits.h"
#include "kernels/gemm/sm90/mainloop.h"
#include "kernels/gemm/sm90/traits.h"
#include "kernels/gemm/sm90_decode/arguments.h"
#include "kernels/gemm/sm90_decode/grouped.cuh"
#include "kernels/gemm/sm90_fp8/grouped.cuh"
#include "cutlass_ext/fragment/e4m3_weight.h"
namespace weightonly {
constexpr GemmParams gemm(int m, int n_padded, int k_padded, int group_size, int split_k, int clusters) {
  GemmParams p{};
  p.m = m;
  p.n_padded = n_padded;
  p.k_padded = k_padded;
  p.group_size = group_size;
  p.split_k = split_k;
  p.clusters = clusters;
  return p;
}
template <class Traits>
constexpr int decode_bytes(GemmParams const& p) {
  sm90_decode::Params const d = sm90_decode::make_params<Traits>(p);
  return Traits::smem_bytes(d.m, d.split_k, d.groups_per_k_tile, d.x_row_bytes);
}
"""


def problems(kernel: generate.Kernel) -> Iterator[Problem]:
    """Sizes that meet every case of the formulas: few and many tokens, n-tiles cut by N, K cut by its padding."""
    zeros = kernel.types.scale_mode == "group_zeros"
    group_sizes = [-1] if kernel.types.scale_mode == "channel" else [32, 64, 128, 192] + [-1] * zeros
    if kernel.config.groups_of_16:
        group_sizes = [16]
    if kernel.types.format in FORMAT_GROUPS:
        group_sizes = [FORMAT_GROUPS[kernel.types.format]]
    for m, n, k in ((1, 4096, 4096), (5, 6144, 4160), (8, 28672, 768)):
        for group_size in group_sizes:
            if group_size == -1 or k % group_size == 0:
                yield Problem(m, n, k, kernel.types.format, group_size, 90, 132, kernel.config.layout, zeros)


def assertions(kernel: generate.Kernel, name: str) -> Iterator[str]:
    """static_asserts that the C++ formula for the configuration `name` gives Python's number."""
    config: Any = kernel.config  # generate imports heuristics by another name
    if config.family == "grouped_sm80":
        # Python counts zeros for every kernel, C++ for those that have some.
        compare = "==" if kernel.types.scale_mode == "group_zeros" else "<="
        bytes = config.rules.smem_bytes(config, next(problems(kernel)))
        yield f"static_assert(GroupedTiles<{name}>::smem_bytes({MAX_INTERLEAVED}) {compare} {bytes});"
        yield f"static_assert(GroupedTiles<{name}>::kMaxExperts == {MAX_INTERLEAVED});"
        return
    if config.family == "gemm_sm90":
        order = config.rules.bits_class(config, next(problems(kernel)))._replace(split_k=8, warpgroups=4)
        follows = str(config.rules.may_follow(config, order)).lower()
        yield f"static_assert(sm90::Traits<{name}>::kMayFollow == {follows});"
    for split_k, clusters in CLUSTERS.items():
        if split_k > kernel.config.max_split_k:
            continue
        config = kernel.config.with_split_k(split_k)
        for p in problems(kernel):
            expected = config.rules.smem_bytes(config, p)
            if config.family.startswith("grouped_sm90"):
                traits = f"sm90{'_fp8' if config.rules.x_bytes == 1 else ''}::GroupedTraits<{name}>"
                yield f"static_assert({traits}::smem_bytes({MAX_EXPERTS}) == {expected});"
                break  # the same for every problem
            if config.family.startswith("gemm_sm90"):
                traits = f"sm90{'_fp8' if config.rules.x_bytes == 1 else ''}::Traits<{name}>"
                yield f"static_assert({traits}::smem_bytes({split_k}) == {expected});"
                break  # the same for every problem
            if config.family == "grouped_decode_sm90":
                groups = max(1, config.k_tile // p.group_step)
                yield f"static_assert(sm90_decode::GroupedTraits<{name}>::kSmemBytes<{groups}> == {expected});"
                continue
            n_padded = -(-p.n // 64) * 64
            group_size = p.k_padded if p.group_size == -1 else p.group_size
            arguments = f"{p.m}, {n_padded}, {p.k_padded}, {group_size}, {split_k}, {clusters}"
            yield f"static_assert(decode_bytes<sm90_decode::Traits<{name}>>(gemm({arguments})) == {expected});"


def compiles(folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    nvcc = target.find_nvcc()
    if nvcc is None:
        pytest.skip("nvcc was not found")
    try:
        include = cutlass.find_headers(library.BUILD)
    except RuntimeError as error:
        pytest.skip(str(error))
    source = folder / "smem.cu"
    source.write_text(text)
    options = ["-std=c++17", "--expt-relaxed-constexpr", "-arch=sm_90a", "--ptx", "-o", str(folder / "smem.ptx")]
    includes = [f"-I{ROOT}", "-isystem", str(include)]
    command = [str(nvcc), *options, *includes, str(source)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_python_and_cpp_agree(tmp_path: Path) -> None:
    lines = [HEAD]
    count = 0
    families = {"gemm_sm90", "decode_sm90", "grouped_sm90", "grouped_decode_sm90", "grouped_sm80"}
    families |= {name for name, family in FAMILIES.items() if family.x_bytes == 1}
    for i, kernel in enumerate(k for k in generate.all_kernels(unverified=True) if k.config.family in families):
        if kernel.types.dtype == "bf16":
            continue  # the same sizes as fp16
        (struct,) = re.findall(r"^struct (\w+ \{.*?^\};)", kernel.text(), re.MULTILINE | re.DOTALL)
        found = list(assertions(kernel, f"Config{i}"))
        lines += [f"struct Config{i} " + struct.partition(" ")[2], *found]
        count += len(found)
    assert count > 500, "every configuration is compared"
    result = compiles(tmp_path, "\n".join([*lines, "}"]))
    assert result.returncode == 0, result.stderr[:3000]


GATES = {"identity": "Identity", "relu": "Relu", "gelu": "Gelu", "silu": "Silu", "gelu_tanh": "GeluTanh"}
GATES |= {"relu2": "ReluSquared", "situ": "Situ"}


def test_limits_and_numbers_of_gates_agree(tmp_path: Path) -> None:
    limits = {"kMaxGroupedExperts": MAX_EXPERTS, "kMaxRowTiles": MAX_ROW_TILES, "kMaxSortedChoices": MAX_SORTED_CHOICES}
    limits |= {"kGatedColumns": GATED_COLUMNS, "kMaxChoices": MAX_CHOICES, "kGateFunctions": len(GATES)}
    limits |= {f"int(GateFunction::k{name})": Gate(activation).numbers[0] for activation, name in GATES.items()}
    lines = [f"static_assert({name} == {number});" for name, number in limits.items()]
    result = compiles(tmp_path, "\n".join([HEAD, *lines, "}"]))
    assert result.returncode == 0, result.stderr[:3000]


def test_a_wrong_number_does_not_compile(tmp_path: Path) -> None:
    kernel = next(k for k in generate.all_kernels() if k.config.family == "decode_sm90")
    (struct,) = re.findall(r"^struct (\w+ \{.*?^\};)", kernel.text(), re.MULTILINE | re.DOTALL)
    text = next(assertions(kernel, "Config0")).replace(" == ", " == 1 + ")
    result = compiles(tmp_path, "\n".join([HEAD, "struct Config0 " + struct.partition(" ")[2], text, "}"]))
    assert result.returncode != 0 and "static assertion" in result.stderr
