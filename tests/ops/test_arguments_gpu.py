"""The checks of `gemm` on a GPU: tensors on two devices, weights and configurations for another GPU."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable

import pytest
import torch
from tests.ops.gemm_arguments import (
    Arguments,
    Change,
    K,
    M,
    N,
    convert,
    expected,
    good,
    groups_of,
    integers,
    overlapping,
    setting,
    zeros_of,
)
from tests.tensor_kinds import GONE, SUBCLASSES, numbers
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

import weightonly as wo
from weightonly.device import device_arch
from weightonly.heuristics.configs import CONFIGS
from weightonly.heuristics.problem import layouts_of

pytestmark = pytest.mark.gpu

KERNELS = sys.modules["weightonly.kernels"]  # `weightonly.kernels` is the function


def packed_for_this_gpu() -> str:
    return layouts_of(device_arch(torch.cuda.current_device()))[0]


BETWEEN_DEVICES = {
    "x on the CPU": (convert("x", "cpu"), r"^qweight: expected on cpu as x is, got cuda:\d"),
    "qweight on the CPU": (convert("qweight", "cpu"), r"^qweight: expected on cuda:\d as x is, got cpu"),
    "scales on the CPU": (convert("scales", "cpu"), r"^scales: expected on cuda:\d as x is, got cpu"),
    "zeros on the CPU": (convert("zeros", "cpu"), r"^zeros: expected on cuda:\d as x is, got cpu"),
    "bias on the CPU": (convert("bias", "cpu"), r"^bias: expected on cuda:\d as x is, got cpu"),
    "out on the CPU": (convert("out", "cpu"), r"^out: expected on cuda:\d as x is, got cpu"),
}


@pytest.mark.parametrize("after_a_good_call", [False, True], ids=["first call", "later call"])
@pytest.mark.parametrize("name", BETWEEN_DEVICES)
def test_mixed_devices(cuda_device: torch.device, name: str, after_a_good_call: bool) -> None:
    a = good(cuda_device, packed_for_this_gpu())
    if after_a_good_call:
        wo.gemm(**a)
    change, message = BETWEEN_DEVICES[name]
    change(a)
    with pytest.raises(ValueError, match=message):
        wo.gemm(**a)


def test_float32_on_the_gpu(cuda_device: torch.device) -> None:
    a = good(cuda_device, packed_for_this_gpu())
    convert("x", torch.float32)(a)
    with pytest.raises(TypeError, match=r"^x: expected dtype float16, bfloat16 on cuda, got"):
        wo.gemm(**a)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(zeros_of("bias", N + 1), "bias: expected", id="bias"),
        pytest.param(groups_of(96), "scales: shape [2, 40] means a group size", id="group size"),
        pytest.param(setting(activation="tanh"), "activation: expected one of", id="activation"),
        pytest.param(zeros_of("out", M, N + 1), "out: expected shape [3, 40], got [3, 41]", id="out shape"),
        pytest.param(overlapping("scales"), "out: expected memory of its own", id="out overlaps"),
    ],
)
def test_refused_after_a_good_call(cuda_device: torch.device, change: Change, message: str) -> None:
    """The plan of an earlier call must not hide what is wrong with a later one."""
    a = good(cuda_device, packed_for_this_gpu())
    wo.gemm(**a)
    change(a)
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        wo.gemm(**a)


def test_weight_of_the_other_layout(cuda_device: torch.device) -> None:
    read = layouts_of(device_arch(torch.cuda.current_device()))
    packed = "row_major" if "row_major" not in read else "interleaved"
    named = " or ".join(repr(layout) for layout in read)
    message = f"^qweight: packed in layout '{packed}', but a GPU of .* reads {named}; call repack"
    with pytest.raises(ValueError, match=message):
        wo.gemm(**good(cuda_device, packed))


@pytest.mark.parametrize("split_k", [-1, 0, 9, 65536])
def test_split_k_out_of_range(cuda_device: torch.device, split_k: int) -> None:
    a = good(cuda_device, packed_for_this_gpu())
    config = next(c for c in wo.kernels() if c.layout == a["qweight"].layout and c.max_m >= M)
    with pytest.raises(ValueError, match=f"^config: expected split_k of 1 to {config.max_split_k}, got {split_k}$"):
        wo.gemm(**a, config=config.with_split_k(split_k))


def test_config_of_the_other_layout(cuda_device: torch.device) -> None:
    a = good(cuda_device, packed_for_this_gpu())
    other = next(c for c in CONFIGS if c.layout != a["qweight"].layout)
    with pytest.raises(ValueError, match=f"^config: {other} reads layout '{other.layout}', but qweight is"):
        wo.gemm(**a, config=other)


def test_config_for_fewer_rows(cuda_device: torch.device) -> None:
    a = good(cuda_device)
    config = next(c for c in CONFIGS if c.max_m == 1 and "int4" in c.formats)
    with pytest.raises(ValueError, match=f"^config: {config} computes at most 1 rows, but x has 3$"):
        wo.gemm(**a, config=config)


def test_config_of_turing_with_bf16(cuda_device: torch.device) -> None:
    a = good(cuda_device)
    for name in ("x", "scales", "zeros", "bias", "out"):
        convert(name, torch.bfloat16)(a)
    config = next(c for c in CONFIGS if c.family == "gemm_sm75")
    with pytest.raises(ValueError, match=f"^config: {config} computes fp16 alone, but x is bf16$"):
        wo.gemm(**a, config=config)


@pytest.mark.parametrize("m", [0, M], ids="{}rows".format)
def test_config_of_another_type(cuda_device: torch.device, m: int) -> None:
    a = good(cuda_device, packed_for_this_gpu())
    a.update(x=a["x"][:m], out=None)
    with pytest.raises(TypeError, match=r"^config: expected a KernelConfig of weightonly\.kernels\(\), got"):
        wo.gemm(**a, config="gemv")  # type: ignore[arg-type]


def test_cuda_tensor_without_kernels(cuda_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KERNELS, "cuda_built", lambda: False)
    with pytest.raises(RuntimeError, match=r"^x: is a CUDA tensor, .* WEIGHTONLY_CUDA=on WEIGHTONLY_ARCHS="):
        wo.gemm(**good(cuda_device, packed_for_this_gpu()))


@pytest.mark.parametrize("lead", [(0,), (2, 0)], ids=str)
def test_no_rows_on_the_gpu(cuda_device: torch.device, lead: tuple[int, ...]) -> None:
    a = good(cuda_device, packed_for_this_gpu())
    a.update(x=torch.empty(*lead, K, dtype=torch.float16, device=cuda_device), out=None)
    y = wo.gemm(**a)
    assert y.shape == (*lead, N)
    assert y.device == cuda_device


def test_out_beside_x_on_the_gpu(cuda_device: torch.device) -> None:
    a = good(cuda_device, packed_for_this_gpu())
    memory = integers(M, K + N).to(cuda_device)
    a.update(x=memory[:, :K], out=memory[:, K:])
    want = expected(a["x"], a)
    assert torch.equal(wo.gemm(**a), want)


# --- what is no plain tensor, what watches the calls, autograd ---

OPERANDS = ("x", "qweight", "scales", "zeros", "bias", "perm")


def with_kind(a: Arguments, name: str, kind: Callable[[torch.Tensor], torch.Tensor]) -> Arguments:
    """The arguments, one of which became another kind of tensor."""
    if name == "qweight":
        return a | {name: wo.PackedWeight(kind(a[name].data), **a[name].fields)}
    return a | {name: kind(a[name])}


def with_perm(device: torch.device) -> Arguments:
    return good(device, packed_for_this_gpu()) | {"perm": torch.arange(K, device=device)}


@pytest.mark.parametrize("kind", GONE)
@pytest.mark.parametrize("name", [*OPERANDS, "out"])
@pytest.mark.parametrize("is_warm", [False, True], ids=["first call", "second call"])
def test_memory_that_is_gone_is_refused(cuda_device: torch.device, name: str, kind: str, is_warm: bool) -> None:
    a = with_perm(cuda_device)
    if is_warm:
        wo.gemm(**a)
    with pytest.raises(ValueError, match=f"^{name}: expected memory for shape .* freed, or cut"):
        wo.gemm(**with_kind(a, name, GONE[kind]))
    torch.cuda.synchronize()


@pytest.mark.parametrize("kind", SUBCLASSES)
@pytest.mark.parametrize("name", OPERANDS)
def test_subclasses_go_through_the_operator(cuda_device: torch.device, name: str, kind: str) -> None:
    a = with_perm(cuda_device) | {"out": None}
    want = wo.gemm(**a)
    assert torch.equal(numbers(wo.gemm(**with_kind(a, name, SUBCLASSES[kind]))), want)


def test_tracers_record_the_operator(cuda_device: torch.device) -> None:
    a = good(cuda_device, packed_for_this_gpu()) | {"out": None}
    x = a.pop("x")
    with torch.no_grad():
        wo.gemm(x, **a)
        traced = torch.jit.trace(lambda x: wo.gemm(x, **a), x)
        graph = make_fx(lambda x: wo.gemm(x, **a))(x)
        with FlopCounterMode(display=False) as counter:
            want = wo.gemm(x + 1, **a)
    assert torch.equal(traced(x + 1), want) and torch.equal(graph(x + 1), want)
    assert counter.get_total_flops() == 2 * M * K * N


def test_out_is_autograds(cuda_device: torch.device) -> None:
    a = good(cuda_device, packed_for_this_gpu())
    for _ in range(2):  # without a plan, and with one
        w = torch.ones_like(a["out"]).requires_grad_()
        y = (w * a["out"]).sum()
        wo.gemm(**a)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.backward()
        with pytest.raises(ValueError, match=r"^out: expected a tensor that requires no gradient"):
            wo.gemm(**a | {"out": torch.nn.Parameter(a["out"])})


@pytest.mark.parametrize("place", ["columns", "every other column", "transposed"])
@pytest.mark.parametrize("name", ["scales", "zeros", "bias"])
def test_operands_have_strides_of_their_own(cuda_device: torch.device, name: str, place: str) -> None:
    a = good(cuda_device, packed_for_this_gpu())
    want = expected(a["x"], a)
    t = a[name]
    a[name] = {
        "columns": lambda: torch.cat([t, t], -1)[..., t.shape[-1] :],
        "every other column": lambda: torch.stack([t, t], -1)[..., 0],
        "transposed": lambda: t.t().contiguous().t(),
    }[place]()
    assert torch.equal(wo.gemm(**a), want)


def test_conversions_leave_what_watches_to_operators(cuda_device: torch.device) -> None:
    """The same bits as their kernels give, and a graph that computes."""
    w = torch.randn(K, 64, device=cuda_device).half()
    packed, absmax = wo.quantize_4bit(w)
    words = torch.arange(K * 8, dtype=torch.int32, device=cuda_device).view(K, 8) * 1000003
    scales, qzeros = torch.rand(2, 64, device=cuda_device).half(), words[:2].contiguous()
    weight = wo.preprocess(wo.quantize(w, 4, 64)[0])
    calls = [
        lambda w: wo.quantize_4bit(w)[0],
        lambda absmax: wo.dequantize_4bit(packed, absmax, 64, "nf4", (K, 64), torch.float16),
        lambda scales: wo.awq_dequantize(words, scales, qzeros),
        lambda scales: wo.dequantize(weight, scales),
    ]
    for call, operand in zip(calls, (w, absmax, scales, torch.rand(3, 64, device=cuda_device).half()), strict=True):
        other = operand.flip(0)
        assert torch.equal(make_fx(call)(operand)(other), call(other))


@pytest.mark.parametrize("name", ["x", "scales", "offs", "bias"])
def test_grouped_gemm_reads_no_freed_memory(cuda_device: torch.device, name: str) -> None:
    a = good(cuda_device, packed_for_this_gpu())
    q = wo.unpack(a["qweight"])
    g = {
        "x": a["x"],
        "qweight": wo.preprocess(torch.stack([q, q])),
        "scales": torch.stack([a["scales"]] * 2),
        "offs": torch.tensor([1, M], dtype=torch.int32, device=cuda_device),
        "bias": torch.stack([a["bias"]] * 2),
    }
    for _ in range(2):
        with pytest.raises(ValueError, match=f"^{name}: expected memory"):
            wo.grouped_gemm(**with_kind(g, name, GONE["freed"]))
        y = wo.grouped_gemm(**g)
    graph = make_fx(lambda x: wo.grouped_gemm(**g | {"x": x}))(g["x"])
    assert torch.equal(graph(g["x"]), y) and "torch.ops.weightonly.grouped_gemm" in graph.code


def test_rows_beyond_32_bits_are_refused(cuda_device: torch.device) -> None:
    a = good(cuda_device, packed_for_this_gpu()) | {"out": None}
    with pytest.raises(ValueError, match=r"^x: expected M of at most \d+ on a GPU, got 2147483653$"):
        wo.gemm(**a | {"x": a["x"][:1].expand((1 << 31) + 5, K)})
