"""On a GPU: all configurations of a class give a row the same bits, for any M and at any place; and `--target rows`."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable

import pytest
import torch
from tests.gemm_cases import Case, make, own_layout, this_gpu

import weightonly as wo
from weightonly.device import sm_count
from weightonly.heuristics import KernelConfig, Problem, select
from weightonly.heuristics.configs import GROUPED_CONFIGS, TypeConfig
from weightonly.heuristics.grouped import why_not_grouped
from weightonly.heuristics.invariant import class_of, computes_class
from weightonly.heuristics.legal import considered, why_not
from weightonly.heuristics.problem import FP8_LAYOUT
from weightonly.kernels import is_compiled, runs_on
from weightonly.plan import cache, choose, kernel

pytestmark = pytest.mark.gpu

CASES = {
    "int4": Case(4096, 1160),
    "int4-zeros": Case(2048, 1160, dtype="bf16", zeros=True),
    "int4-64": Case(1024, 1160, group_size=64, dtype="bf16"),
    "int4-channel": Case(1024, 1160, group_size=-1),
    "int4-16": Case(512, 1160, group_size=16),
    "int8": Case(2112, 1160, "int8", "bf16", -1),
    "int8-128": Case(1024, 1160, "int8", group_size=128),
    "code4": Case(1024, 1160, "code4", group_size=128),
    "code4-64": Case(1024, 1160, "code4", "bf16", 64),
}
FP8_CASES = {
    "int4": Case(2048, 1160),
    "int4-32": Case(1024, 1160, group_size=32, dtype="bf16"),
    "int4-channel": Case(1024, 1160, group_size=-1),
    "mxfp4": Case(2048, 1160, "mxfp4", "bf16", 32),
}
ROWS = 300

Multiply = Callable[[int, int, KernelConfig], torch.Tensor]
"""(begin, end, config) -> the result of these rows."""


def problem(m: int, case: Case, layout: str) -> Problem:
    sms = sm_count(torch.cuda.current_device())
    return Problem(m, case.n, case.k, case.format, case.group_size, this_gpu(), sms, layout, case.zeros)


def by_class(configs: Iterable[KernelConfig], case: Case, layout: str) -> dict[Hashable, list[KernelConfig]]:
    """Those that this build has, by the classes that they compute."""
    types, p = TypeConfig(case.dtype, case.format, case.mode), problem(1, case, layout)
    built = [c for c in configs if is_compiled(c, types) and runs_on(c, this_gpu())]
    classes = {class_of(config, p) for config in built} - {None}
    return {of: [config for config in built if computes_class(config, p, of)] for of in classes}


def bits(y: torch.Tensor) -> torch.Tensor:
    return y.view(torch.int16)


def check_classes(case: Case, layout: str, multiply: Multiply, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each class gives a row one result, near that of the mode off, whatever its configuration, M, and place."""
    near = multiply(0, ROWS, select(problem(ROWS, case, layout))).float()
    classes = by_class(considered(problem(1, case, layout)), case, layout)
    assert classes, "nothing is compiled for this GPU"
    wo.set_batch_invariant(True)
    for of, configs in classes.items():
        cache.clear()  # a plan has the class that it was made for
        for module in (choose, kernel):  # as if it were the one of the weight
            monkeypatch.setattr(module, "invariant_class", lambda problem, of=of: of)
        expected: torch.Tensor | None = None  # of rows that some configuration has computed; others are NaN
        for config in sorted(configs, key=lambda c: -c.max_m):
            for m in (ROWS, 1, 2, 7, 8, 9, 17, 33, 65, config.block_m, config.block_m + 1, 2 * config.block_m - 3):
                if m > ROWS or why_not(config, problem(m, case, layout)) is not None:
                    continue
                for begin in {0, (ROWS - m) // 2, ROWS - m}:
                    y = multiply(begin, begin + m, config)
                    if expected is None:
                        expected = y.new_full((ROWS, case.n), float("nan"))
                    known = expected[begin : begin + m]
                    is_known = ~known.isnan().any(1)
                    assert torch.equal(bits(y)[is_known], bits(known)[is_known]), f"{of}: {config}, {m} from {begin}"
                    known.copy_(y)
        if expected is None:  # parts of K without work
            continue
        torch.testing.assert_close(expected.float(), near, rtol=0, atol=0.02 * float(near.abs().max()))


@pytest.mark.parametrize("activation", [None, "gelu", "silu"])
@pytest.mark.parametrize("name", CASES)
def test_each_class_has_one_result(
    cuda_device: torch.device,
    generator: torch.Generator,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    activation: str | None,
) -> None:
    case = CASES[name]
    o = make(case, generator, own_layout(), exact=False)
    x = torch.randn(ROWS, case.k, generator=generator).to(o.scales.dtype).cuda()
    bias = torch.randn(case.n, generator=generator).to(x.dtype).cuda()

    def multiply(begin: int, end: int, config: KernelConfig) -> torch.Tensor:
        given = {"zeros": o.zeros, "bias": bias, "activation": activation, "config": config}
        return wo.gemm(x[begin:end], o.qweight, o.scales, **given)  # type: ignore[arg-type]

    check_classes(case, own_layout(), multiply, monkeypatch)


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize(
    "case", [Case(2176, 8200), Case(2112, 8200, "int8", "bf16", -1), Case(1088, 8200, "code4", group_size=64)]
)
def test_tiles_one_after_another(
    cuda_device: torch.device,
    generator: torch.Generator,
    monkeypatch: pytest.MonkeyPatch,
    case: Case,
    activation: str | None,
) -> None:
    """Tiles that follow an order, of a CTA that has several, beside those of few tokens that have it themselves."""
    if this_gpu() != 90:
        pytest.skip("kernels of Hopper")
    o = make(case, generator, own_layout(), exact=False)
    x = torch.randn(900, case.k, generator=generator).to(o.scales.dtype).cuda()
    wo.set_batch_invariant(True)
    for of, configs in by_class(considered(problem(1, case, own_layout())), case, own_layout()).items():
        following = [config for config in configs if class_of(config, problem(1, case, own_layout())) != of]
        if not following:
            continue
        one = problem(33, case, own_layout())
        own = next((c for c in configs if c not in following and c.block_m <= 64 and why_not(c, one) is None), None)
        if own is None:  # parts of K without work
            continue
        cache.clear()
        for module in (choose, kernel):
            monkeypatch.setattr(module, "invariant_class", lambda problem, of=of: of)
        given = {"activation": activation, "bias": o.scales[0].contiguous()}
        expected = wo.gemm(x[-33:], o.qweight, o.scales, config=own, **given)  # type: ignore[arg-type]
        for config in following:
            for rows in (x, x[200:], x[-193:]):
                if why_not(config, problem(len(rows), case, own_layout())) is not None:
                    continue
                y = wo.gemm(rows, o.qweight, o.scales, config=config, **given)  # type: ignore[arg-type]
                assert torch.equal(bits(y[-33:]), bits(expected)), f"{of}: {config}, {own}, {len(rows)} rows"


@pytest.mark.parametrize("name", FP8_CASES)
def test_each_class_of_x_in_8_bits_has_one_result(
    cuda_device: torch.device, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    if this_gpu() != 90:
        pytest.skip("kernels of Hopper")
    case = FP8_CASES[name]
    o = make(case, generator, FP8_LAYOUT, exact=False)
    x8, x_scales = wo.quantize_activations(torch.randn(ROWS, case.k, generator=generator).cuda())

    def multiply(begin: int, end: int, config: KernelConfig) -> torch.Tensor:
        return wo.gemm(x8[begin:end], o.qweight, o.scales, x_scales=x_scales[begin:end], config=config)

    check_classes(case, FP8_LAYOUT, multiply, monkeypatch)


@pytest.mark.parametrize(
    "name", [name for name, case in CASES.items() if case.format != "code4" and case.group_size != 16]
)
def test_each_class_of_experts_has_one_result(cuda_device: torch.device, generator: torch.Generator, name: str) -> None:
    """The rows of an expert do not depend on those of the others, nor on how many it has itself."""
    case, experts = CASES[name], 3
    own = [make(case, generator, own_layout(), exact=False) for _ in range(experts)]
    w = wo.QuantizedWeight(
        wo.PackedWeight(
            torch.cat([o.qweight.data for o in own]), case.k, case.n, case.format, own_layout(), experts=experts
        ),
        torch.stack([o.scales for o in own]),
        torch.stack([o.zeros for o in own if o.zeros is not None]) if case.zeros else None,
    )
    x = torch.randn(ROWS, case.k, generator=generator).to(w.scales.dtype).cuda()
    classes = by_class((c for c in GROUPED_CONFIGS if c.is_verified), case, own_layout())
    for of, configs in classes.items():
        expected: torch.Tensor | None = None
        for config in configs:
            for before, m, after in ((0, 60, 0), (5, 1, 0), (0, 9, 80), (130, 33, 1), (7, 60, 233)):
                if why_not_grouped(config, problem(before + m + after, case, own_layout()), experts) is not None:
                    continue
                rows = torch.cat([x[:before], x[:m], x[:after]])
                offs = torch.tensor([before, before + m, before + m + after], dtype=torch.int32, device="cuda")
                y = wo.grouped_gemm(rows, w, offs=offs, config=config)[before : before + m]
                if expected is None:
                    expected = y
                known = min(len(expected), m)
                assert torch.equal(bits(y)[:known], bits(expected)[:known]), f"{of}: {config}, {before}, {m}, {after}"
                expected = y if m > len(expected) else expected


def test_nothing_is_found(cuda_device: torch.device, seed: int) -> None:
    pytest.importorskip("gguf")  # that other targets of the fuzz read
    from tools.fuzz import TARGETS, State, fuzz

    state = fuzz(TARGETS["rows"](cuda_device), State("rows", seed), calls=4000, say=pytest.fail)
    assert state.calls >= 4000 and not state.failed


def test_a_captured_graph_keeps_the_mode(cuda_device: torch.device, generator: torch.Generator) -> None:
    case = CASES["int4"]
    o = make(case, generator, own_layout(), exact=False)
    w = wo.QuantizedWeight(o.qweight, o.scales)
    x = torch.randn(16, case.k, generator=generator).half().cuda()
    before = wo.batch_invariant()
    try:
        wo.set_batch_invariant(True)
        expected = wo.gemm(x, w)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = wo.gemm(x, w)
        wo.set_batch_invariant(False)
        y.zero_()
        graph.replay()
        assert torch.equal(y, expected)
    finally:
        wo.set_batch_invariant(before)


def test_the_choice_is_of_the_class(cuda_device: torch.device, generator: torch.Generator) -> None:
    """As `gemm` runs it: rows among 1 to 300 others have the bits that they have alone."""
    for name in ("int4", "int8", "code4"):
        case = CASES[name]
        o = make(case, generator, own_layout(), exact=False)
        x = torch.randn(ROWS, case.k, generator=generator).to(o.scales.dtype).cuda()
        wo.set_batch_invariant(True)
        whole = wo.gemm(x, o.qweight, o.scales, zeros=o.zeros)
        for m in (1, 2, 8, 16, 31, 64, 100, 256):
            assert torch.equal(wo.gemm(x[7 : 7 + m], o.qweight, o.scales, zeros=o.zeros), whole[7 : 7 + m]), (name, m)
        wo.set_batch_invariant(False)
