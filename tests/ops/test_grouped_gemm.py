"""grouped_gemm on the CPU: numbers, experts without rows, every check, torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.expert_cases import Stack, ends, exact_stack, kinds, pack, random_stack

import weightonly as wo
from weightonly.heuristics.configs import GROUPED_CONFIGS

INTEGERS = pytest.mark.parametrize("format", ["int4", "int8"])
COUNTS = {
    "some each": [3, 1, 4, 2],
    "empty experts": [0, 5, 0, 3],
    "all in the first": [7, 0, 0, 0],
    "all in the last": [0, 0, 0, 7],
    "one row": [0, 1, 0, 0],
    "none": [0, 0, 0, 0],
    "one expert": [5],
}


def expected(x: torch.Tensor, w64: torch.Tensor, counts: list[int], bias: torch.Tensor | None = None) -> torch.Tensor:
    """fp64 [T, N]"""
    expert = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    y = torch.stack([row @ w64[e] for row, e in zip(x.double(), expert, strict=True)]) if len(x) else None
    if y is None:
        return x.new_zeros(0, w64.shape[2], dtype=torch.float64)
    return y if bias is None else y + bias.double()[expert]


@INTEGERS
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("case", COUNTS)
def test_exact(case: str, dtype: torch.dtype, format: str, generator: torch.Generator) -> None:
    """Inputs on a grid: every sum is exact in fp32, and the result is rounded once."""
    counts = COUNTS[case]
    stack = exact_stack(len(counts), 128, 70, generator, format, dtype=dtype)
    x = torch.randint(-2, 3, (sum(counts), 128), generator=generator).to(dtype)
    bias = torch.randint(-8, 9, (len(counts), 70), generator=generator).to(dtype)
    out = torch.full((sum(counts), 70), torch.nan, dtype=dtype)
    y = wo.grouped_gemm(
        x, stack.qweight, stack.scales, ends(counts), zeros=stack.zeros, bias=bias, activation="relu", out=out
    )
    assert y is out
    assert torch.equal(y, expected(x, stack.w64, counts, bias).relu().to(dtype))
    plain = wo.grouped_gemm(x, stack.qweight, stack.scales, ends(counts), zeros=stack.zeros)
    assert torch.equal(plain, expected(x, stack.w64, counts).to(dtype))


@kinds
def test_each_expert_is_a_gemm(format: str, layout: str, generator: torch.Generator) -> None:
    """Bit for bit, in every format and layout, with shapes that are padded, and every argument."""
    counts = [2, 0, 5]
    qweight = pack(random_stack(3, 96, 75, format, generator), format, layout)
    scales = torch.rand(3, 3, 75, generator=generator).half()
    zeros = torch.randn(3, 3, 75, generator=generator).half() if format.startswith("int") else None
    bias = torch.randn(3, 75, generator=generator).half()
    perm = torch.stack([torch.randperm(96, generator=generator) for _ in range(3)])
    x = torch.randn(7, 200, generator=generator).half()[:, 4:100]  # rows with a distance
    y = wo.grouped_gemm(x, qweight, scales, ends(counts), zeros=zeros, bias=bias, activation="gelu", perm=perm)
    for e, begin, end in ((0, 0, 2), (2, 2, 7)):
        one = wo.gemm(
            x[begin:end],
            qweight[e],
            scales[e],
            zeros=None if zeros is None else zeros[e],
            bias=bias[e],
            activation="gelu",
            perm=perm[e],
        )
        assert torch.equal(y[begin:end], one)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_error_beside_dense_products(dtype: torch.dtype, generator: torch.Generator) -> None:
    """At most twice the error that the dense product in 16 bits has against fp64."""
    counts = [9, 0, 16, 1]
    w = torch.randn(4, 256, 192, generator=generator).to(dtype)
    q, scales, zeros = zip(*(wo.quantize(m, group_size=64, symmetric=False) for m in w), strict=True)
    weight = wo.preprocess(torch.stack(q)), torch.stack(scales), torch.stack(zeros)
    x = torch.randn(26, 256, generator=generator).to(dtype)
    y = wo.grouped_gemm(x, *weight[:2], ends(counts), zeros=weight[2])
    dense = wo.dequantize(*weight)
    exact = expected(x, dense.double(), counts)
    peer = torch.cat([part @ dense[e] for e, part in enumerate(x.split(counts))])
    assert (y.double() - exact).norm() <= 2 * (peer.double() - exact).norm()
    assert (y.double() - exact).abs().max() <= 2 * (peer.double() - exact).abs().max()


def test_no_kernel_computes_cpu_tensors(generator: torch.Generator) -> None:
    stack = exact_stack(2, 64, 16, generator)
    x = torch.ones(3, 64)
    with pytest.raises(
        ValueError, match=r"config: expected None for CPU tensors, which no kernel computes, got grouped_"
    ):
        wo.grouped_gemm(x, stack.qweight, stack.scales, ends([1, 2]), config=GROUPED_CONFIGS[0])
    with pytest.raises(TypeError, match=r"config: expected a KernelConfig of weightonly.grouped_kernels\(\), got str"):
        wo.grouped_gemm(x, stack.qweight, stack.scales, ends([1, 2]), config="quick")  # type: ignore[arg-type]


def test_many_experts_and_few_rows(generator: torch.Generator) -> None:
    counts = [0] * 512
    for e in (0, 77, 300, 511):
        counts[e] = 2
    stack = exact_stack(512, 64, 16, generator)
    x = torch.randint(-2, 3, (8, 64), generator=generator).float()
    y = wo.grouped_gemm(x, stack.qweight, stack.scales, ends(counts), zeros=stack.zeros)
    assert torch.equal(y, expected(x, stack.w64, counts).float())


def test_writes_into_columns_of_a_tensor(generator: torch.Generator) -> None:
    stack = exact_stack(3, 64, 40, generator)
    x = torch.randint(-2, 3, (6, 64), generator=generator).float()
    whole = torch.full((6, 100), torch.nan)
    wo.grouped_gemm(x, stack.qweight, stack.scales, ends([1, 2, 3]), zeros=stack.zeros, out=whole[:, 30:70])
    assert torch.equal(whole[:, 30:70], expected(x, stack.w64, [1, 2, 3]).float())
    assert whole[:, :30].isnan().all() and whole[:, 70:].isnan().all()


def test_the_same_bits_again(generator: torch.Generator) -> None:
    stack = exact_stack(4, 128, 96, generator)
    x = torch.randn(10, 128, generator=generator)
    runs = [wo.grouped_gemm(x, stack.qweight, stack.scales, ends([3, 0, 4, 3])) for _ in range(3)]
    assert torch.equal(runs[0], runs[1]) and torch.equal(runs[0], runs[2])


def test_compiled_with_changing_rows(generator: torch.Generator) -> None:
    stack = exact_stack(3, 64, 40, generator)

    @torch.compile(fullgraph=True, dynamic=True)
    def run(x: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        return wo.grouped_gemm(x, stack.qweight, stack.scales, offs, zeros=stack.zeros) + 1

    for counts in ([1, 2, 3], [0, 9, 0], [4, 0, 1]):
        x = torch.randint(-2, 3, (sum(counts), 64), generator=generator).float()
        assert torch.equal(run(x, ends(counts)), expected(x, stack.w64, counts).float() + 1)
    with pytest.raises(ValueError, match=r"offs: expected T = 6"):
        run(torch.zeros(6, 64), ends([1, 1, 1]))


# --- what is refused ----------------------------------------------------------------------------------------


@pytest.fixture
def good(generator: torch.Generator) -> dict[str, Any]:
    stack: Stack = exact_stack(3, 128, 70, generator)
    return {
        "x": torch.ones(6, 128),
        "qweight": stack.qweight,
        "scales": stack.scales,
        "offs": ends([1, 2, 3]),
        "zeros": stack.zeros,
        "bias": torch.zeros(3, 70),
        "perm": torch.arange(128).repeat(3, 1),
        "out": torch.zeros(6, 70),
    }


Change = Callable[[dict[str, Any]], object]
REFUSED: dict[str, tuple[str, Change, type[Exception], str]] = {
    "one weight": ("qweight", lambda a: a["qweight"][0], ValueError, "expected stacked experts.*gemm multiplies by it"),
    "bytes": ("qweight", lambda a: a["qweight"].data, TypeError, "expected the PackedWeight .*got Tensor"),
    "x of rank 3": ("x", lambda a: a["x"][None], ValueError, r"expected shape \[T, K\], .*got \[1, 6, 128\]"),
    "x of a list": ("x", lambda a: [1.0], TypeError, "expected a tensor, got list"),
    "K": ("x", lambda a: a["x"][:, :64], ValueError, r"expected \[\.\.\., K\] with K = 128"),
    "fp64": ("x", lambda a: a["x"].double(), TypeError, "expected dtype float16, bfloat16, float32 on cpu"),
    "scales of one": (
        "scales",
        lambda a: a["scales"][0],
        ValueError,
        r"expected shape \[E = 3, K / group_size, N = 70\], got \[2, 70",
    ),
    "scales of two": (
        "scales",
        lambda a: a["scales"][:2],
        ValueError,
        r"expected shape \[E = 3, K / group_size, N = 70\], got \[2, 2",
    ),
    "scales of four": (
        "scales",
        lambda a: torch.ones(4, 2, 70),
        ValueError,
        r"expected shape \[E = 3, K / group_size, N = 70\], got \[4, 2, 70",
    ),
    "no scales": ("scales", lambda a: None, TypeError, "expected a tensor, got NoneType"),
    "N of scales": (
        "scales",
        lambda a: a["scales"][..., 1:],
        ValueError,
        r"expected shape .*N = 70\], got \[3, 2, 69\]",
    ),
    "dtype of scales": ("scales", lambda a: a["scales"].half(), TypeError, "expected dtype torch.float32 as x has"),
    "groups": (
        "scales",
        lambda a: a.update(zeros=None) or torch.ones(3, 16, 70),
        ValueError,
        "group size that is not supported",
    ),
    "zeros": ("zeros", lambda a: a["zeros"][:, :1], ValueError, r"expected shape \[3, 2, 70\] as scales, got"),
    "zeros of two": (
        "zeros",
        lambda a: a["zeros"][:2],
        ValueError,
        r"expected shape \[E = 3, K / group_size, N = 70\]",
    ),
    "bias of one": ("bias", lambda a: a["bias"][0], ValueError, r"expected shape \[E, N\] = \[3, 70\], got \[70\]"),
    "bias of rank 3": (
        "bias",
        lambda a: a["bias"][:, None],
        ValueError,
        r"expected shape \[E, N\] = \[3, 70\], got \[3, 1, 70\]",
    ),
    "N of bias": (
        "bias",
        lambda a: a["bias"][:, 1:],
        ValueError,
        r"expected shape \[E, N\] = \[3, 70\], got \[3, 69\]",
    ),
    "perm of one": ("perm", lambda a: a["perm"][0], ValueError, r"expected shape \[E, K\] = \[3, 128\], got \[128\]"),
    "numbers of perm": ("perm", lambda a: a["perm"] + 1, ValueError, r"expected a permutation of 0\.\.127"),
    "activation": ("activation", lambda a: "swish", ValueError, "expected one of None, 'identity'"),
    "int64 ends": ("offs", lambda a: a["offs"].long(), TypeError, "expected dtype torch.int32, got torch.int64"),
    "ends elsewhere": ("offs", lambda a: a["offs"].to("meta"), ValueError, "expected on cpu as x is, got meta"),
    "list of ends": ("offs", lambda a: [1, 3, 6], TypeError, "expected a tensor, got list"),
    "too few ends": ("offs", lambda a: a["offs"][1:], ValueError, r"expected shape \[E\] = \[3\], got \[2\]"),
    "ends of rank 2": ("offs", lambda a: a["offs"][None], ValueError, r"expected shape \[E\] = \[3\], got \[1, 3\]"),
    "descending": (
        "offs",
        lambda a: torch.tensor([4, 3, 6]).int(),
        ValueError,
        "ascending ends .*got 3 after 4 for exp",
    ),
    "negative": (
        "offs",
        lambda a: torch.tensor([-1, 3, 6]).int(),
        ValueError,
        "ascending ends .*got -1 after 0 for exp",
    ),
    "rows left": (
        "offs",
        lambda a: ends([1, 2, 2]),
        ValueError,
        "expected T = 6, the rows of x, as the last end, got 5",
    ),
    "rows missing": ("offs", lambda a: ends([1, 2, 4]), ValueError, "expected T = 6, .*, got 7"),
    "shape of out": ("out", lambda a: a["out"][1:], ValueError, r"expected shape \[6, 70\], got \[5, 70\]"),
    "dtype of out": ("out", lambda a: a["out"].half(), TypeError, "expected dtype torch.float32 as x has"),
    "out over bias": ("out", lambda a: a["bias"].as_strided((6, 70), (0, 1)), ValueError, "rows that do not overlap"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str, good: dict[str, Any]) -> None:
    wo.grouped_gemm(**good)
    name, change, error, message = REFUSED[case]
    good["out"].fill_(torch.nan)
    with pytest.raises(error, match=rf"^{name}: .*{message}"):
        wo.grouped_gemm(**good | {name: change(good)})


@pytest.mark.parametrize("shape", [(), (70,), (1, 5, 70)], ids=["a scalar", "one row", "rank 3"])
def test_out_of_another_rank_is_refused_by_a_first_call(shape: tuple[int, ...], good: dict[str, Any]) -> None:
    five = {"x": torch.ones(5, 128), "offs": ends([1, 2, 2]), "out": torch.zeros(shape)}
    with pytest.raises(ValueError, match=rf"^out: expected shape \[T, N\], got \[{', '.join(map(str, shape))}\]$"):
        wo.grouped_gemm(**good | five)


def test_out_must_not_overlap_an_input(good: dict[str, Any]) -> None:
    memory = torch.zeros(6, 200)
    with pytest.raises(ValueError, match="out: expected memory of its own, got a tensor that overlaps x"):
        wo.grouped_gemm(**good | {"x": memory[:, :128], "out": memory[:, 100:170]})


def test_codes_have_no_zeros(generator: torch.Generator) -> None:
    qweight = pack(random_stack(2, 64, 64, "nf4", generator), "nf4", "tiled")
    scales = torch.ones(2, 1, 64)
    with pytest.raises(ValueError, match="zeros: expected None for a weight of format nf4"):
        wo.grouped_gemm(torch.ones(2, 64), qweight, scales, ends([1, 1]), zeros=scales)
