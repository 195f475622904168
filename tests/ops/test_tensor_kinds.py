"""What is no plain tensor goes through the operator, or is refused by name; tracers and modes see the operator."""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.ops.gemm_arguments import K, M, N, good, integers
from tests.tensor_kinds import GONE, SUBCLASSES, Wrapper, freed, numbers
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import weightonly as wo
from weightonly.plan import cache
from weightonly.plan.base import Plan
from weightonly.plan.cpu import CpuPlan

OPERANDS = ("x", "qweight", "scales", "zeros", "bias", "perm")
FLOPS = 2 * M * K * N


def arguments() -> dict[str, Any]:
    return good() | {"perm": torch.arange(K), "out": None}


def with_kind(a: dict[str, Any], name: str, kind: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, Any]:
    """The arguments, one of which became another kind of tensor."""
    if name == "qweight":
        return a | {name: wo.PackedWeight(kind(a[name].data), **a[name].fields)}
    return a | {name: kind(a[name])}


@pytest.mark.parametrize("kind", SUBCLASSES)
@pytest.mark.parametrize("name", OPERANDS)
def test_subclasses_go_through_the_operator(name: str, kind: str) -> None:
    a = arguments()
    want = wo.gemm(**a)
    assert torch.equal(numbers(wo.gemm(**with_kind(a, name, SUBCLASSES[kind]))), want)


@pytest.mark.parametrize("name", ["x", "scales", "bias"])
def test_zero_tensors_are_zeros(name: str) -> None:
    """They are what forward-mode differentiation makes, and have no memory."""
    a = arguments()
    want = wo.gemm(**a | {name: torch.zeros_like(a[name])})
    zero = torch._efficientzerotensor((2, *a[name].shape), dtype=torch.float16)[1]
    assert torch.equal(wo.gemm(**a | {name: zero}), want)


def test_a_subclass_of_a_tensor_that_has_a_plan_is_seen() -> None:
    a = arguments()
    wo.gemm(**a)
    seen: list[str] = []

    class Logging(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(function))
            return super().__torch_function__(function, types, args, kwargs or {})

    wo.gemm(**a | {"scales": a["scales"].as_subclass(Logging)})
    wo.awq_dequantize(**_awq() | {"scales": _awq()["scales"].as_subclass(Logging)})
    operators = [name.removesuffix(".default") for name in seen if name.startswith("weightonly.")]
    assert operators == ["weightonly.gemm", "weightonly.awq_dequantize"]


@pytest.mark.parametrize("kind", GONE)
@pytest.mark.parametrize("name", [*OPERANDS, "out"])
@pytest.mark.parametrize("is_warm", [False, True], ids=["first call", "second call"])
def test_memory_that_is_gone_is_refused(name: str, kind: str, is_warm: bool) -> None:
    a = arguments() | {"out": torch.empty(M, N).half()}
    if is_warm:
        wo.gemm(**a)
    a = with_kind(a, name, GONE[kind])
    with pytest.raises(ValueError, match=f"^{name}: expected memory for shape .* freed, or cut"):
        wo.gemm(**a)


@pytest.mark.parametrize("check", [CpuPlan.holds, Plan.holds], ids=["CPU", "as on a GPU"])
def test_memory_that_is_freed_after_a_call_is_refused(check: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuPlan, "holds", check)
    a = arguments()
    for name in ("x", "scales", "zeros", "bias", "perm"):
        wo.gemm(**a)
        kept = a[name].clone()
        a[name].untyped_storage().resize_(0)
        with pytest.raises(ValueError, match=f"^{name}: expected memory"):
            wo.gemm(**a)
        a[name] = kept
    wo.gemm(**a)
    a["qweight"].data.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match=r"^qweight: expected memory"):
        wo.gemm(**a)


@pytest.mark.parametrize("name", [*OPERANDS, "out"])
def test_memory_that_comes_back_shorter_at_its_address_is_refused(name: str) -> None:
    row, kept = torch.ones(1, 1024).half(), []
    for _ in range(100):  # until the allocator gives the address again
        a: dict[str, Any] = {"x": torch.ones(M, 256).half(), "qweight": wo.preprocess(torch.ones(256, 1024).char())}
        a |= {"scales": row.clone(), "zeros": row.clone(), "bias": row[0].clone(), "perm": torch.arange(256)}
        a["out"] = torch.empty(M, 1024).half()
        wo.gemm(**a)
        tensor = a[name].data if name == "qweight" else a[name]
        address, memory = tensor.data_ptr(), tensor.untyped_storage()
        memory.resize_(0)
        kept += [a, torch.empty(tensor.nbytes - 256, dtype=torch.uint8)]  # what it gives first
        memory.resize_(tensor.nbytes - 256)
        if tensor.data_ptr() == address:
            break
    with pytest.raises(ValueError, match=f"^{name}: expected memory for shape .* freed, or cut"):
        wo.gemm(**a)


@pytest.mark.parametrize("kind", ["subclass", "wrapper", "of a collective"])
def test_out_is_a_plain_tensor(kind: str) -> None:
    out = SUBCLASSES[kind](torch.empty(M, N).half())
    with pytest.raises(TypeError, match=r"^out: expected a plain torch.Tensor, got "):
        wo.gemm(**arguments() | {"out": out})


def test_functional_results_are_not_copied_to_another_out() -> None:
    a = with_kind(arguments() | {"out": torch.empty(M, N).half()}, "x", SUBCLASSES["functional"])
    with pytest.raises(ValueError, match=r"^out: expected a functional tensor"):
        wo.gemm(**a)


def _experts() -> dict[str, Any]:
    g = torch.Generator().manual_seed(0)
    q = torch.randint(-8, 8, (2, K, 64), generator=g, dtype=torch.int8)
    down = torch.randint(-8, 8, (2, 32, K), generator=g, dtype=torch.int8)
    return {
        "x": torch.randn(M, K, generator=g),
        "w13": wo.preprocess(q),
        "s13": torch.full((2, 3, 64), 0.01),
        "w2": wo.preprocess(down),
        "s2": torch.full((2, 1, K), 0.01),
        "topk_ids": torch.tensor([[0, 1]] * M),
        "topk_weights": torch.rand(M, 2, generator=g),
    }


def fused(x: Any, w13: Any, s13: Any, w2: Any, s2: Any, topk_ids: Any, topk_weights: Any) -> torch.Tensor:
    return wo.fused_experts(x, (w13, s13), (w2, s2), topk_ids, topk_weights)


def grouped(x: torch.Tensor, **changed: Any) -> torch.Tensor:
    e = _experts()
    return wo.grouped_gemm(x, e["w13"], e["s13"], **{"offs": torch.tensor([1, M], dtype=torch.int32), **changed})


@pytest.mark.parametrize("kind", ["subclass", "wrapper", "of a collective"])
@pytest.mark.parametrize("name", ["x", "s13", "topk_ids", "topk_weights"])
def test_experts_of_subclasses(name: str, kind: str) -> None:
    e = _experts()
    assert torch.equal(numbers(fused(**e | {name: SUBCLASSES[kind](e[name])})), fused(**e))


def _awq() -> dict[str, torch.Tensor]:
    words = {"qweight": torch.ones(K, 8, dtype=torch.int32), "qzeros": torch.ones(2, 8, dtype=torch.int32)}
    return words | {"scales": torch.ones(2, 64).half()}


def _reading_freed(name: str) -> Callable[[], object]:
    """A call whose argument of this name is in memory that was freed."""
    w = torch.randn(K, N)
    q, scales, _ = wo.quantize(w, 4, 64)
    packed, absmax = wo.quantize_4bit(w)
    gone = wo.PackedWeight(freed(wo.preprocess(q).data), **wo.preprocess(q).fields)
    awq = _awq()
    blocks: dict[str, Any] = {"packed": packed, "absmax": absmax, "blocksize": 64, "quant_type": "nf4"}
    e = _experts()
    what, argument = name.split(": ")
    calls: dict[str, Callable[[], object]] = {
        "quantize": lambda: wo.quantize(freed(w), 4, 64),
        "preprocess": lambda: wo.preprocess(freed(q)),
        "unpack": lambda: wo.unpack(gone),
        "repack": lambda: wo.repack(gone, "sm80"),
        "slice_k": lambda: gone.slice_k(0, 64),
        "dequantize": lambda: wo.dequantize(
            gone if argument == "qweight" else wo.preprocess(q), freed(scales) if argument == "scales" else scales
        ),
        "awq_dequantize": lambda: wo.awq_dequantize(**awq | {argument: freed(awq[argument])}),
        "quantize_4bit": lambda: wo.quantize_4bit(freed(w)),
        "dequantize_4bit": lambda: wo.dequantize_4bit(
            **blocks | {argument: freed(blocks[argument])}, shape=(K, N), dtype=torch.float16
        ),
        "grouped_gemm": lambda: grouped(
            freed(e["x"]) if argument == "x" else e["x"],
            **({} if argument == "x" else {argument: freed(torch.tensor([1, M], dtype=torch.int32))}),
        ),
        "fused_experts": lambda: fused(**e | {argument: freed(e[argument])}),
        "save": lambda: wo.save(Path("never"), {"w": gone}),
    }
    return calls[what]


@pytest.mark.parametrize(
    "name",
    [
        *("quantize: w", "preprocess: q", "unpack: qweight", "repack: qweight", "slice_k: qweight"),
        *("dequantize: qweight", "dequantize: scales", "quantize_4bit: w"),
        *(f"awq_dequantize: {name}" for name in ("qweight", "scales", "qzeros")),
        *("dequantize_4bit: packed", "dequantize_4bit: absmax", "grouped_gemm: x", "grouped_gemm: offs"),
        *("fused_experts: x", "fused_experts: topk_ids", "fused_experts: topk_weights", "save: entries['w']"),
    ],
)
def test_no_function_reads_freed_memory(name: str) -> None:
    argument = re.escape(name.split(": ")[1])
    with pytest.raises(ValueError, match=f"^{argument}: expected memory"):
        _reading_freed(name)()


# --- what watches ---------------------------------------------------------------------------------------------------


def _layer() -> wo.nn.Linear:
    a = good()
    return wo.nn.Linear.from_quantized(a["qweight"], a["scales"], a["zeros"], a["bias"], "gelu")


def _products() -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    a = arguments()
    del a["x"]
    e = _experts()
    del e["x"]
    offs = torch.tensor([1, M], dtype=torch.int32)
    return {
        "gemm": lambda x: wo.gemm(x, **a),
        "gemm with out": lambda x: wo.gemm(x, **a | {"out": torch.empty(M, N).half()}),
        "Linear": _layer(),
        "Linear that was cast": _layer().bfloat16().half(),
        "grouped_gemm": lambda x: wo.grouped_gemm(x, e["w13"], e["s13"], offs),
        "fused_experts": lambda x: fused(x, **e),
    }


@pytest.fixture(params=_products())
def product(request: pytest.FixtureRequest) -> Iterator[tuple[Callable[[torch.Tensor], torch.Tensor], torch.Tensor]]:
    """(x -> y, x), which was called before: there are plans."""
    x = integers(M, K)
    if request.param in ("grouped_gemm", "fused_experts"):
        x = x.float()
    function = _products()[request.param]
    with torch.no_grad():
        function(x)
        yield function, x


def test_jit_trace_records_the_operator(product: Any) -> None:
    function, x = product
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(function, x, check_trace=False)
    assert torch.equal(traced(x + 1), function(x + 1))
    assert "weightonly::" in str(traced.inlined_graph)


def test_jit_trace_holds_for_other_rows_without_a_warning() -> None:
    a = arguments()
    x = a.pop("x")
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error", torch.jit.TracerWarning)
        traced = torch.jit.trace(lambda x: wo.gemm(x, **a), x)
    assert torch.equal(traced(integers(7, K)), wo.gemm(integers(7, K), **a))


@pytest.mark.parametrize("pre_dispatch", [False, True], ids=["after autograd", "before autograd"])
def test_make_fx_records_the_operator(product: Any, pre_dispatch: bool) -> None:
    function, x = product
    graph = make_fx(function, pre_dispatch=pre_dispatch)(x)
    assert torch.equal(graph(x + 1), function(x + 1))
    assert "torch.ops.weightonly." in graph.code


@pytest.mark.parametrize("name", ["gemm", "gemm with out", "Linear", "grouped_gemm"])
def test_functionalize_passes_the_operator_on(name: str) -> None:
    function, x = _products()[name], integers(M, K)
    x = x.float() if name == "grouped_gemm" else x
    with torch.no_grad():
        graph = make_fx(torch.func.functionalize(function))(x)
        assert torch.equal(graph(x + 1), function(x + 1))
    assert "torch.ops.weightonly." in graph.code


def test_modes_see_the_operator(product: Any) -> None:
    function, x = product
    want, seen = function(x), []

    class OfOperators(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(f"operators: {function}")
            return function(*args, **kwargs or {})

    class OfFunctions(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(f"functions: {function}")
            return function(*args, **kwargs or {})

    for kind, mode in (("operators", OfOperators()), ("functions", OfFunctions())):
        with mode:
            assert torch.equal(function(x), want)
        assert any(text.startswith(f"{kind}: weightonly.") for text in seen)


def test_a_default_device_is_no_mode_that_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator costs the host some 0.2 ms."""
    a = arguments()
    monkeypatch.setattr(sys.modules["weightonly.gemm"], "_gemm_op", lambda *args: pytest.fail("it was called"))
    with torch.device("cpu"):
        wo.gemm(**a)


def test_fake_tensors_need_no_plan() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    a = arguments() | {"out": torch.empty(M, N).half()}
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        y = wo.gemm(**a | {"x": mode.from_tensor(a["x"]), "out": mode.from_tensor(a["out"])})
    assert (type(y).__name__, tuple(y.shape)) == ("FakeTensor", (M, N))
    assert not cache.plans()


@pytest.mark.parametrize(
    ("name", "backward"), [("gemm", 1), ("Linear", 2), ("grouped_gemm", 1)], ids=["gemm", "gelu", "grouped"]
)
def test_flops_are_counted(name: str, backward: int) -> None:
    """backward: products; GELU needs what it was applied to, which is computed again."""
    function, x = _products()[name], integers(M, K)
    x = (x.float() if name == "grouped_gemm" else x).requires_grad_()
    flops = 2 * M * K * 64 if name == "grouped_gemm" else FLOPS
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        function(x)
    assert counter.get_total_flops() == flops
    y = function(x)
    with FlopCounterMode(display=False) as counter:
        y.sum().backward()
    assert counter.get_total_flops() == backward * flops


def test_the_gradient_of_a_wrapper(generator: torch.Generator) -> None:
    a = arguments() | {"activation": "relu"}
    x = a["x"].clone().requires_grad_()
    wo.gemm(**a | {"x": x}).sum().backward()
    wrapped = Wrapper(a["x"]).requires_grad_()
    y = wo.gemm(**a | {"x": wrapped})
    (gradient,) = torch.autograd.grad(y.sum(), wrapped)
    assert x.grad is not None and torch.equal(numbers(gradient), x.grad)
