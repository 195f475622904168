"""Dequantizing for cuBLAS, without a GPU: slices, which problems it is for, when it is chosen, and its products.

The kernel that dequantizes is in test_dequantize_gpu.py; here PyTorch takes its place.
"""

from __future__ import annotations

import re
import sys
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import weightonly as wo
from weightonly import reference
from weightonly.args import GemmArgs
from weightonly.heuristics import Problem, candidates, legal, select, slices
from weightonly.heuristics.configs import CONFIGS, FAMILIES, FITTED_CONFIGS, TypeConfig
from weightonly.heuristics.constants import UnfusedConstants
from weightonly.heuristics.cost import total_us
from weightonly.heuristics.families.dequantize_cublas import MIN_M, Counts, DequantizeCublas, unfused_work
from weightonly.heuristics.launches import estimate_us
from weightonly.heuristics.machine import machine
from weightonly.heuristics.problem import layouts_of
from weightonly.heuristics.slices import WORKSPACE_BYTES, slice_columns
from weightonly.ops import dequantize
from weightonly.plan.unfused import UnfusedPlan

UNFUSED = {c.layout: c for c in FITTED_CONFIGS if c.unfused}
LONGEST_K = 1 << 19
PLAN = sys.modules["weightonly.plan.choose"]
KERNELS = sys.modules["weightonly.kernels"]  # `weightonly.kernels` is the function


def counts(problem: Problem) -> Counts:
    family = UNFUSED["tiled"].rules
    assert isinstance(family, DequantizeCublas)
    return family.counts(UNFUSED["tiled"], problem)


def problem(m: int, n: int = 4096, k: int = 4096, arch: int = 90, layout: str = "", format: str = "int4") -> Problem:
    return Problem(m, n, k, format, -1, arch, 132, layout)


# --- slices ------------------------------------------------------------------------------------------------


@given(st.integers(1, 1 << 18), st.integers(1, 1 << 20))
def test_slices_cover_n_within_the_workspace(n: int, k: int) -> None:
    columns = slice_columns(n, k)
    if k > LONGEST_K:
        assert columns == 0
        return
    assert columns > 0 and columns % 64 == 0
    assert 2 * k * columns <= WORKSPACE_BYTES
    count = -(-n // columns)
    fits = WORKSPACE_BYTES // (2 * k)
    fewest = -(-n // (fits // 64 * 64 if fits < 256 or n <= fits else fits // 256 * 256))
    assert count <= fewest


@pytest.mark.parametrize(
    ("n", "k", "expected"),
    [
        pytest.param(8192, 8192, 4096, id="two halves, 64 MiB each"),
        pytest.param(28672, 4096, 7168, id="four equal ones"),
        pytest.param(8192, 28672, 1024, id="eight"),
        pytest.param(4096, 4096, 4096, id="one"),
        pytest.param(77, 100, 128, id="one, rounded up"),
        pytest.param(4097, 8192, 2304, id="two of whole tiles"),
        pytest.param(200, 1 << 18, 128, id="narrower than a tile"),
        pytest.param(320, 100_000, 320, id="one, as wide as there is room"),
        pytest.param(200, LONGEST_K, 64, id="the longest K"),
        pytest.param(200, LONGEST_K + 1, 0, id="too long"),
    ],
)
def test_columns_of_a_slice(n: int, k: int, expected: int) -> None:
    assert slice_columns(n, k) == expected
    assert (k <= slices.longest_k()) == (expected > 0)


# --- what it is for, and when it is chosen -----------------------------------------------------------------


def test_one_configuration_for_each_layout() -> None:
    assert {layout: c.name for layout, c in UNFUSED.items()} == {
        "interleaved": "dequantize_cublas_sm75_k1",
        "tiled": "dequantize_cublas_sm90_k1",
    }
    for config in UNFUSED.values():
        assert (config.max_split_k, config.max_m, config.shares_cluster) == (1, 2**31 - 1, False)
        assert config.rules.smem_bytes(config, problem(1, layout=config.layout)) == 0
    assert all("code4" in config.formats for config in UNFUSED.values())


@pytest.mark.parametrize("arch", [70, 75, 80, 86, 89, 90, 100, 120])
def test_candidate_where_the_layout_has_it(arch: int) -> None:
    for layout in layouts_of(arch):
        expected = [] if layout == "row_major" else [UNFUSED[layout]]
        for m in (1, 100, 1 << 30):
            assert [c for c in candidates(problem(m, arch=arch, layout=layout)) if c.unfused] == expected
    if arch == 90:
        assert not legal(UNFUSED["tiled"], problem(1, arch=90, layout="interleaved"))
        assert legal(UNFUSED["tiled"], problem(1, 64, LONGEST_K))
        assert not legal(UNFUSED["tiled"], problem(1, 64, LONGEST_K + 1))


@pytest.mark.parametrize(("built", "runs_on"), [("70", []), ("75", [75, 80, 86, 90]), ("80", [80, 86]), ("90a", [90])])
def test_compiled_with_every_architecture(built: str, runs_on: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no unit of its own: the kernel that dequantizes is in every build."""
    monkeypatch.setattr(KERNELS, "built_archs", lambda: (built,))
    config = UNFUSED["interleaved"]
    assert KERNELS.is_compiled(config) == bool(runs_on)
    assert [a for a in (75, 80, 86, 90) if KERNELS.runs_on(config, a)] == runs_on
    assert KERNELS.is_compiled(UNFUSED["tiled"]) == (built == "90a")


@pytest.mark.parametrize(("k", "n"), [(4096, 4096), (4096, 6144), (4096, 28672)], ids=str)
def test_chosen_for_many_rows(k: int, n: int) -> None:
    """On an H200: not where the fused kernels are as quick as cuBLAS, but where the tensor cores wait for Ampere's."""
    for format, group_size in (("int4", 128), ("nf4", 64), ("int8", -1)):
        for m in (1, 16, 64, 256, 512, 2048, 8192):
            assert not select(m, n, k, format, group_size, 90, 132).unfused, m
    for format, group_size in (("int4", 128), ("int8", -1)):
        for m in (1, 16, 64, 128):
            assert not select(m, n, k, format, group_size, 90, 132, "interleaved").unfused, m
        for m in (1024, 4096):  # Ampere's kernels reach half of what cuBLAS makes of Hopper
            assert select(m, n, k, format, group_size, 90, 132, "interleaved") == UNFUSED["interleaved"]
            assert not select(m, n, k, format, group_size, 70, 80).unfused


def test_not_considered_for_few_rows() -> None:
    """However slow the others are: a column of few SMs."""
    p = Problem(MIN_M - 1, 1, 40000, "int4", -1, 90, 132, "interleaved")
    assert not select(p.m, p.n, p.k, p.format, p.group_size, p.arch, p.sm_count, p.layout).unfused


@pytest.mark.parametrize(
    ("m", "n", "k", "format", "group_size"),
    [
        (445, 247, 1440, "int4", 32),
        (1338, 670, 1792, "int4", 256),
        (1664, 186, 2688, "nf4", 64),
        (1024, 1000, 1000, "int4", -1),
        (300, 304, 1216, "int8", -1),
    ],
    ids=str,
)
def test_small_weights_go_to_hoppers_kernels(m: int, n: int, k: int, format: str, group_size: int) -> None:
    """Measured on an H200: dequantizing them for cuBLAS takes 1.4 to 2.2 times as long."""
    assert select(m, n, k, format, group_size, 90, 132).family == "gemm_sm90"


def test_formats_without_another_kernel(monkeypatch: pytest.MonkeyPatch, forgetful: None) -> None:
    """It computes whatever dequantizes, for one row too, as long as no kernel of Hopper reads the format."""
    without = tuple(c for c in CONFIGS if c.unfused or "code4" not in c.formats)
    for module in ("select", "legal"):
        monkeypatch.setattr(sys.modules[f"weightonly.heuristics.{module}"], "CONFIGS", without)
    for m in (1, 4, 100, 5000):
        assert select(m, 4032, 4096, "nf4", 64, 90, 132) == UNFUSED["tiled"]
        with pytest.raises(ValueError, match=f"^k: expected at most {LONGEST_K}, got {LONGEST_K + 64}$"):
            select(m, 64, LONGEST_K + 64, "nf4", 64, 90, 132)


def test_cost_grows_with_rows_and_slices() -> None:
    for config in UNFUSED.values():
        times = [
            estimate_us(config, problem(m, 8192, 8192, layout=config.layout)) for m in (1, 128, 129, 4096, 4097, 9000)
        ]
        assert times == sorted(times)
    one, two = (counts(problem(512, n, 8192)) for n in (4096, 8192))
    assert (one.slices, two.slices) == (1, 2)
    assert two.weight_mb == pytest.approx(2 * one.weight_mb)
    assert two.sm_tflops == pytest.approx(2 * one.sm_tflops)


def test_cost_of_a_problem() -> None:
    """M = 1000 and N = 4000, counted as 1024 and 4096, K = 16384, in two slices of which each keeps 100 SMs busy."""
    p = Problem(1000, 4000, 16384, "int8", -1, 90, 100, "tiled")
    assert slice_columns(4000, 16384) == 2048
    packed, dense, scales, y = 16384 * 4000, 2 * 16384 * 4000, 2 * 4000, 2 * 1000 * 4000
    tb_s = machine(90).tb_s
    expected_us = 2 * 3 + (packed + scales + dense) / (0.5 * tb_s) / 1e6 + 0.25 * y / tb_s / 1e6
    expected_us += 2 * 1024 * 4096 * 16384 / (100 * 4e6)
    constants = UnfusedConstants("", slice_us=3, dequantize_bandwidth=0.5, sm_tflop_s=4, unhidden_y=0.25)
    assert total_us(unfused_work(counts(p), 90, constants)) == pytest.approx(expected_us)
    few_rows = counts(Problem(1, 128, 16384, "int8", -1, 90, 100, "tiled"))
    assert few_rows.sm_tflops == pytest.approx(2 * 128 * 128 * 16384 / 8 / 1e12), "K is split in 8 at most"


BAD_CONFIGS: dict[str, tuple[Any, Problem, str]] = {
    "split_k": (
        UNFUSED["tiled"].with_split_k(2), problem(64),
        "config: expected split_k of 1 to 1, got 2"),
    "layout": (
        UNFUSED["interleaved"], problem(64),
        "config: dequantize_cublas_sm75_k1 reads layout 'interleaved', but qweight is packed as 'tiled'"),
    "row_major": (
        UNFUSED["interleaved"], problem(64, arch=70),
        "config: dequantize_cublas_sm75_k1 reads layout 'interleaved', but qweight is packed as 'row_major'"),
    "K": (
        UNFUSED["tiled"], problem(64, 128, LONGEST_K + 64),
        f"config: dequantize_cublas_sm90_k1 computes K of at most {LONGEST_K}, but qweight has {LONGEST_K + 64}"),
    "after hopper": (
        UNFUSED["tiled"], problem(64, arch=100, layout="tiled"),
        "config: dequantize_cublas_sm90_k1 runs on compute capability 9.0 alone, but the GPU has 10.0"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_CONFIGS)
def test_config_that_cannot_compute_this(name: str) -> None:
    config, asked, message = BAD_CONFIGS[name]
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        PLAN.choose(asked, TypeConfig("f16", asked.format, "channel"), config)


def test_bf16_before_ampere() -> None:
    with pytest.raises(TypeError, match=r"^x: expected dtype torch\.float16 on a GPU of compute capability 7\.5"):
        PLAN.choose(problem(512, arch=75), TypeConfig("bf16", "int4", "channel"), UNFUSED["interleaved"])


def test_not_in_the_build(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (KERNELS, PLAN):
        monkeypatch.setattr(module, "built_archs", lambda: ("80",))
    with pytest.raises(
        RuntimeError, match=r"^no kernel dequantize_cublas_sm90_f16_int4_channel .* built for 80; rebuild"
    ):
        PLAN.choose(problem(512), TypeConfig("f16", "int4", "channel"), UNFUSED["tiled"])


def test_families_have_no_units() -> None:
    dense = {name for name, family in FAMILIES.items() if family.unfused}
    assert {c.family for c in CONFIGS if c.unfused} == dense == {"dequantize_cublas_sm75", "dequantize_cublas_sm90"}


# --- the products ------------------------------------------------------------------------------------------

K, N = 192, 1000
EXACT: dict[str | None, Any] = {None: lambda y: y, "relu": torch.relu}


@pytest.fixture
def dequantized(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The slices of the kernel, made by PyTorch, in a workspace of 256 columns."""
    made: list[torch.Tensor] = []

    def columns(
        qweight: wo.PackedWeight,
        scales: torch.Tensor,
        zeros: torch.Tensor | None,
        begin: int,
        end: int,
        w: torch.Tensor,
    ) -> None:
        assert scales.shape[1] == qweight.n_padded and scales.is_contiguous() and begin % 64 == 0
        n = qweight.n
        w.copy_(reference.dequantize(qweight, scales[:, :n], None if zeros is None else zeros[:, :n])[:, begin:end])
        made.append(w)

    monkeypatch.setattr(dequantize, "dequantize_columns", columns)
    monkeypatch.setattr(slices, "WORKSPACE_BYTES", 2 * K * 256)
    return made


def operands(
    generator: torch.Generator, zeros: bool = True
) -> tuple[wo.PackedWeight, torch.Tensor, torch.Tensor | None]:
    q = torch.randint(-8, 8, (K, N), dtype=torch.int8, generator=generator)
    scales = torch.exp2(torch.randint(-2, 2, (3, N), generator=generator).double()).half()
    z = torch.randint(-4, 5, (3, N), generator=generator).half() if zeros else None
    return wo.preprocess(q, bits=4, layout="tiled"), scales, z


@pytest.mark.parametrize("zeros", [False, True], ids=["symmetric", "zeros"])
@pytest.mark.parametrize("with_bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("activation", ["relu", None], ids=str)
@pytest.mark.parametrize("lead", [(5,), (), (2, 3), (1,)], ids=str)
def test_products_are_exact_on_the_grid(
    zeros: bool,
    with_bias: bool,
    activation: str | None,
    lead: tuple[int, ...],
    dequantized: list[torch.Tensor],
    generator: torch.Generator,
) -> None:
    qweight, scales, z = operands(generator, zeros)
    x = torch.randint(-3, 4, (*lead, K), generator=generator).half()
    bias = torch.nn.Parameter(torch.randint(-8, 9, (N,), generator=generator).half()) if with_bias else None
    args = GemmArgs(x, wo.QuantizedWeight(qweight, scales, z), bias, activation)
    plan = UnfusedPlan(args, UNFUSED["tiled"])
    expected = x.double() @ reference.dequantize(qweight, scales, z).double()
    expected = EXACT[activation](expected + (0 if bias is None else bias.detach().double())).half()
    assert torch.equal(plan.run(args), expected)
    assert [w.shape[1] for w in dequantized] == [256, 256, 256, 232]
    assert len({w.data_ptr() for w in dequantized}) == 1
    assert dequantized[0].untyped_storage().nbytes() <= slices.WORKSPACE_BYTES

    frame = torch.full((8, N + 16), float("nan"), dtype=torch.float16)
    out = frame[1 : 1 + x.numel() // K, 8 : N + 8] if x.dim() == 2 else torch.full((*lead, N), float("nan")).half()
    args.out = out
    assert plan.run(args) is out
    assert torch.equal(out, expected)
    assert frame[:, :8].isnan().all() and frame[:, N + 8 :].isnan().all() and frame[0].isnan().all()


@pytest.mark.parametrize("activation", ["gelu", "silu", "identity"])
def test_activations(activation: str, dequantized: list[torch.Tensor], generator: torch.Generator) -> None:
    qweight, scales, z = operands(generator)
    x = torch.randn(5, K, generator=generator).half() / 64
    args = GemmArgs(x, wo.QuantizedWeight(qweight, scales, z), activation=activation)
    y = UnfusedPlan(args, UNFUSED["tiled"]).run(args)
    assert len(dequantized) == 4
    torch.testing.assert_close(y, reference.gemm(x, qweight, scales, z, None, activation), rtol=2e-3, atol=2e-3)


def test_strided_x_and_scales_that_are_views(dequantized: list[torch.Tensor], generator: torch.Generator) -> None:
    qweight, scales, z = operands(generator)
    wide = torch.randint(-3, 4, (6, 300), generator=generator).half()
    columns = scales.t().contiguous().t()
    for x in (wide[:, :K], wide[::2, 3 : K + 3], wide[:K, :5].expand(6, 5).repeat(K // 6, 1).t()):
        args = GemmArgs(x, wo.QuantizedWeight(qweight, columns, z))
        expected = (x.double() @ reference.dequantize(qweight, scales, z).double()).half()
        assert torch.equal(UnfusedPlan(args, UNFUSED["tiled"]).run(args), expected)
    assert len(dequantized) == 12
