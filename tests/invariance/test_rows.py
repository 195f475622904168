"""A row alone and in batches, on this CPU: `tools.fuzz --target rows`, for every backend, and with planted faults."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest
import torch

import weightonly as wo
from tools.fuzz import TARGETS, State, fuzz, rows
from weightonly import activations, gate, reference
from weightonly.cpu import library
from weightonly.cpu.library import Backend

CPU = torch.device("cpu")


@pytest.fixture(params=("pytorch", *library.LEVELS))
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Backend:
    """Each that this machine has."""
    if request.param != "pytorch":
        found, problem = library._load(library._PATH)
        if found is None or library.LEVELS.index(request.param) > found.wo_cpu_level():
            pytest.skip(problem or f"this CPU lacks {request.param}")
    chosen = library.choose(request.param, library._PATH)
    monkeypatch.setattr(library, "backend", lambda: chosen)
    return chosen


def test_nothing_is_found(backend: Backend, seed: int) -> None:
    calls = 40 if backend.library is None else 80 if backend.level == 0 else 300
    state = fuzz(TARGETS["rows"](CPU), State("rows", seed), calls=calls, say=pytest.fail)
    assert state.calls >= calls and not state.failed


def found(cases: int, seed: int = 53) -> str:
    target = TARGETS["rows"](CPU)
    return "\n".join(text for index in range(cases) for text in target.run(seed, index).failures)


def test_every_kind_of_product_is_found_where_the_mode_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextlib.contextmanager
    def off() -> Iterator[None]:
        yield

    monkeypatch.setattr(rows, "invariant", off)
    text = found(40)
    for kind in ("gemm", "gemm of x in 8 bits", "grouped_gemm", "fused_experts"):
        assert f"{kind}: " in text, kind


def test_rows_of_many_kinds_in_one_batch() -> None:
    """Of each format: one row alone, in the last place, and before and behind rows that are no numbers."""
    g = torch.Generator().manual_seed(7)
    for format, dtype in (("int4", torch.bfloat16), ("int8", torch.float16), ("nf4", torch.float32)):
        codes = format == "nf4"
        limit = 128 if format == "int8" else 8
        q = torch.randint(-limit, limit, (256, 200), generator=g, dtype=torch.int8) + (8 if codes else 0)
        w = wo.QuantizedWeight(wo.preprocess(q, format=format), torch.rand(4, 200, generator=g).to(dtype))
        x = torch.randn(33, 256, generator=g).to(dtype)
        x[:16], x[17:30] = float("nan"), float("inf")
        wo.set_batch_invariant(True)
        alone, together = wo.gemm(x[16:17], w), wo.gemm(x, w)
        assert torch.equal(together[16:17], alone)
        assert torch.equal(wo.gemm(x[30:], w), together[30:])
        wo.set_batch_invariant(False)
        exact = x[16:17].double() @ wo.dequantize(w.packed, w.scales).double()
        assert (alone.double() - exact).norm() < 0.01 * exact.norm()


def test_gates_do_not_depend_on_the_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's own formulas do, where a register is not full."""
    z = torch.randn(3, 2 * 4099, generator=torch.Generator().manual_seed(1))
    wo.set_batch_invariant(True)
    for name in ("silu", "gelu", "gelu_tanh", "situ", "swigluoai", "relu2", None):
        of = gate.Gate.of(name)
        whole = of(z)
        assert torch.equal(whole[1:2], of(z[1:2])), name
        assert torch.equal(whole[:, 5:6], of(torch.cat([z[:, 5:6], z[:, 4099 + 5 : 4099 + 6]], dim=1))), name


@pytest.mark.parametrize("size", [0, 1, activations.PIECE, 2 * activations.PIECE + 1])
def test_pieces_are_the_whole(size: int) -> None:
    a, b = torch.randn(2, size).unbind()
    assert torch.equal(activations.in_pieces(torch.sub, a, b), a - b)


def test_sums_of_pytorch_are_those_of_the_equation() -> None:
    x, w = torch.randint(-4, 5, (3, 70)).float(), torch.randint(-4, 5, (70, 9)).float()
    assert torch.equal(reference._in_order(x, w), x @ w)


@pytest.mark.parametrize("activation", [None, "silu"])
def test_x_in_8_bits_is_what_it_is_without_the_mode(activation: str | None) -> None:
    """To rounding: the native kernels compute it then."""
    g = torch.Generator().manual_seed(3)
    q, scales, zeros = wo.quantize(torch.randn(256, 72, generator=g).bfloat16(), group_size=64, symmetric=False)
    w = wo.QuantizedWeight(wo.preprocess(q), scales, zeros)
    x8, x_scales = wo.quantize_activations(torch.randn(5, 256, generator=g))
    bias, out = torch.randn(72, generator=g).bfloat16(), torch.empty(5, 72, dtype=torch.bfloat16)
    calls: list[Callable[[], torch.Tensor]] = [
        lambda: wo.gemm(x8, w, x_scales=x_scales, bias=bias, activation=activation),
        lambda: wo.gemm(x8, w, x_scales=x_scales, bias=bias, activation=activation, out=out),
    ]
    expected = calls[0]()
    wo.set_batch_invariant(True)
    for call in calls:
        assert (call().float() - expected.float()).abs().max() <= 0.02 * expected.float().abs().max()
