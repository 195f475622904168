"""What a plan hands to the compiled kernels: addresses, strides, sizes; no GPU runs them here (stand_in.py)."""

from __future__ import annotations

import ctypes
import math
import re
from typing import Any

import pytest
import torch
from tests import ROOT
from tests.ops.stand_in import SM_COUNT, STREAM, Module, declared

import weightonly as wo
from weightonly.activations import ACTIVATIONS
from weightonly.codebooks import codebook_on
from weightonly.heuristics import KernelConfig
from weightonly.heuristics.configs import CONFIGS
from weightonly.kernels import MAX_K
from weightonly.launch import PDL_MODES, LaunchOverlap
from weightonly.plan import cache
from weightonly.plan.kernel import KernelPlan


def operands(k: int, n: int, m: int, format: str = "int4", layout: str = "tiled", groups: int = 1) -> dict[str, Any]:
    bits = 8 if format == "int8" else 4
    q = torch.ones(k, n, dtype=torch.int8)
    return {
        "x": torch.ones(m, k).half(),
        "qweight": wo.preprocess(q, bits=bits, layout=layout, format=format),
        "scales": torch.ones(groups, n).half(),
    }


def config_of(family: str, tokens: int, format: str = "int4") -> KernelConfig:
    return next(c for c in CONFIGS if c.family == family and c.block_m == tokens and format in c.formats)


def test_sizes_and_addresses(module: Module) -> None:
    a = operands(256, 128, 3, groups=4)
    zeros, bias, out = torch.zeros(4, 128).half(), torch.zeros(128).half(), torch.empty(3, 128).half()
    assert wo.gemm(**a, zeros=zeros, bias=bias, activation="silu", out=out) is out
    (launch,) = module.launches
    expected = {
        "device": -1, "is_tail": False, "m": 3, "n": 128, "k": 256, "n_padded": 128, "k_padded": 256, "group_size": 64,
        "ld_scales": 128, "activation": ACTIVATIONS["silu"].number, "x": a["x"].data_ptr(),
        "weight": a["qweight"].data.data_ptr(), "scales": a["scales"].data_ptr(), "zeros": zeros.data_ptr(),
        "bias": bias.data_ptr(), "y": out.data_ptr(), "partials": 0, "ldx": 256, "ldy": 128, "stream": STREAM,
        "scales_in_place": True,
    }  # fmt: skip
    assert {name: launch[name] for name in expected} == expected
    assert launch.keys() - expected == {"kernel", "split_k", "clusters", "order"}


def test_later_calls_bring_their_own_addresses(module: Module) -> None:
    first, second = operands(256, 128, 1), operands(256, 128, 1)
    for a in (first, second, first):
        y = wo.gemm(**a)
        launch = module.launches[-1]
        assert (launch["x"], launch["weight"]) == (a["x"].data_ptr(), a["qweight"].data.data_ptr())
        assert (launch["scales"], launch["y"]) == (a["scales"].data_ptr(), y.data_ptr())
    assert module.plans == 1


def test_absent_operands_are_null_and_channels_have_one_group(module: Module) -> None:
    wo.gemm(**operands(200, 100, 2))
    (launch,) = module.launches
    assert (launch["zeros"], launch["bias"], launch["activation"]) == (0, 0, 0)
    assert (launch["k"], launch["k_padded"], launch["group_size"]) == (200, 256, 256)


@pytest.mark.parametrize(
    ("groups", "has_zeros", "mode"),
    [(1, False, "channel"), (4, False, "group"), (1, True, "group_zeros"), (4, True, "group_zeros")],
    ids=["per channel", "groups", "a group with zeros", "groups with zeros"],
)
def test_the_kernel_is_one_for_these_scales(module: Module, groups: int, has_zeros: bool, mode: str) -> None:
    a = operands(256, 128, 3, groups=groups)
    wo.gemm(**a, zeros=torch.zeros(groups, 128).half() if has_zeros else None)
    assert module.names[module.launches[0]["kernel"]].endswith(f"_f16_int4_{mode}")


def test_a_codebook_takes_the_place_of_zeros(module: Module) -> None:
    a = operands(256, 128, 2, "nf4")
    wo.gemm(**a)
    codebook = codebook_on(a["qweight"].code, torch.device("cpu"), torch.float16)
    assert module.launches[0]["zeros"] == codebook.data_ptr()


def test_strides_of_x_and_out_reach_the_kernel(module: Module) -> None:
    a = operands(256, 128, 4)
    wide, frame = torch.ones(4, 264).half(), torch.empty(4, 200).half()
    a["x"] = wide[:, :256]
    wo.gemm(**a, out=frame[:, :128])
    (launch,) = module.launches
    assert (launch["x"], launch["ldx"], launch["ldy"]) == (wide.data_ptr(), 264, 200)


@pytest.mark.parametrize(
    "x",
    [
        pytest.param(torch.ones(4, 257).half()[:, 1:], id="address"),
        pytest.param(torch.ones(4, 260).half()[:, :256], id="distance of rows"),
        pytest.param(torch.ones(256, 4).half().t(), id="transposed"),
        pytest.param(torch.ones(1, 256).half().expand(4, 256), id="rows in one place"),
        pytest.param(torch.ones(2, 3, 256).half().transpose(0, 1), id="permuted batch"),
    ],
)
def test_x_is_copied_where_rows_are_not_aligned(module: Module, x: torch.Tensor) -> None:
    a = operands(256, 128, 4)
    a["x"] = x
    wo.gemm(**a)
    (launch,) = module.launches
    assert launch["x"] != x.data_ptr() and launch["x"] % 16 == 0
    assert launch["ldx"] == 256


def test_alignment_is_seen_at_each_call(module: Module) -> None:
    """One plan, whatever the addresses of its calls."""
    a = operands(256, 128, 1, groups=4)
    memory, rows = torch.ones(8 + 256).half(), torch.ones(8 + 4 * 128).half()
    for offset in (0, 1, 8):
        a["x"] = memory[offset : offset + 256].view(1, 256)
        a["scales"] = rows[offset : offset + 512].view(4, 128)
        wo.gemm(**a)
        launch = module.launches[-1]
        aligned = a["x"].data_ptr() % 16 == 0
        assert aligned == (a["scales"].data_ptr() % 16 == 0) == launch["scales_in_place"]
        assert (launch["x"] == a["x"].data_ptr()) == (launch["scales"] == a["scales"].data_ptr()) == aligned
        assert launch["x"] % 16 == launch["scales"] % 16 == 0
    assert {launch["scales_in_place"] for launch in module.launches} == {True, False}
    assert module.plans == 1


@pytest.mark.parametrize("name", ["scales", "zeros"])
def test_scales_and_zeros_that_are_not_aligned_are_copied(module: Module, name: str) -> None:
    a = operands(256, 128, 1, groups=4) | {"zeros": torch.zeros(4, 128).half()}
    a[name] = torch.ones(1 + 4 * 128).half()[1:].view(4, 128)
    wo.gemm(**a)
    (launch,) = module.launches
    assert launch["scales_in_place"] is False
    assert launch["scales"] % 16 == launch["zeros"] % 16 == 0
    assert launch[name] != a[name].data_ptr()


def memory(address: int, *shape: int) -> torch.Tensor:
    """A copy of the fp16 numbers at an address, row by row."""
    return torch.frombuffer(bytearray(ctypes.string_at(address, 2 * math.prod(shape))), dtype=torch.float16).view(shape)


def test_a_strided_bias_is_copied(module: Module) -> None:
    bias = torch.arange(256).half().view(128, 2)[:, 1]
    seen: list[torch.Tensor] = []
    module.at_launch = lambda launch: seen.append(memory(launch["bias"], 128))
    wo.gemm(**operands(256, 128, 1), bias=bias)
    assert torch.equal(seen[0], bias)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("k", [196, 199])
def test_x_ends_in_zeros_where_k_is_no_multiple_of_8(
    module: Module, monkeypatch: pytest.MonkeyPatch, k: int, rows: int
) -> None:
    """Kernels load 16 bytes at a time. What is beyond K meets zeros of the weight, which NaN would outlast."""
    a = operands(k, 128, rows)
    a["x"] = x = torch.randn(rows, k).half()
    seen: list[torch.Tensor] = []
    module.at_launch = lambda launch: seen.append(memory(launch["x"], rows, launch["ldx"]))
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda t, *shape, **_: t.new_full(_size(shape), torch.nan))
    wo.gemm(**a)
    assert (module.launches[0]["k"], module.launches[0]["ldx"]) == (200, 200)
    assert torch.equal(seen[0], torch.nn.functional.pad(x, (0, 200 - k)))


def _size(shape: tuple[Any, ...]) -> tuple[int, ...]:
    return shape[0] if isinstance(shape[0], tuple) else shape


def test_scales_are_padded_where_n_is(module: Module) -> None:
    a = operands(256, 100, 1, groups=4)
    wo.gemm(**a)
    (launch,) = module.launches
    assert (launch["n"], launch["n_padded"], launch["ld_scales"], launch["scales_in_place"]) == (100, 128, 128, False)


def test_gathered_x_has_the_rows_of_a_contiguous_one(module: Module) -> None:
    a = operands(256, 128, 4)
    a["x"] = torch.ones(4, 300).half()[:, :256]
    wo.gemm(**a, perm=torch.arange(256))
    (launch,) = module.launches
    assert launch["ldx"] == 256 and launch["x"] != a["x"].data_ptr()


def test_split_k_in_memory_has_partials(module: Module) -> None:
    a = operands(1024, 100, 20, layout="interleaved")
    config = config_of("gemm_sm80", 32)
    for split_k, has_partials in ((1, False), (2, True), (3, True)):
        wo.gemm(**a, config=config.with_split_k(split_k))
        launch = module.launches[-1]
        assert launch["split_k"] == split_k and (launch["partials"] != 0) == has_partials
    elements = [plan.partials for plan in cache.plans() if isinstance(plan, KernelPlan)]
    assert elements == [0, 2 * 20 * 128, 3 * 20 * 128]


@pytest.mark.parametrize("extras", [False, True], ids=["plain", "zeros and bias"])
def test_a_tail_begins_where_the_first_launch_ends(module: Module, extras: bool) -> None:
    """128 x 192 tiles: of 66 for N = 12608 and 256 tokens a wave of 132 CTAs takes all but the last columns."""
    n, m, k = 66 * 192 + 320, 256, 256
    a = operands(k, n, m, groups=2)
    zeros, bias = (torch.zeros(2, n).half(), torch.zeros(n).half()) if extras else (None, None)
    first = next(c for c in CONFIGS if c.family == "gemm_sm90" and (c.block_m, c.block_n) == (128, 192))
    second = next(c for c in CONFIGS if c.family == "gemm_sm90" and (c.block_m, c.block_n) == (128, 128))
    y = wo.gemm(**a, zeros=zeros, bias=bias, config=first.with_tail(second))
    main, tail = module.launches
    columns = main["n"]
    assert columns == main["n_padded"] == 66 * 192
    assert (tail["n"], tail["n_padded"]) == (320, a["qweight"].n_padded - columns)
    assert (main["is_tail"], tail["is_tail"]) == (False, True)
    assert main["kernel"] != tail["kernel"]
    assert tail["x"] == main["x"]
    assert tail["weight"] - main["weight"] == columns * k // 2  # int4, tiled: whole panels of 64 columns
    assert tail["scales"] - a["scales"].data_ptr() == 2 * columns
    assert tail["y"] - y.data_ptr() == 2 * columns
    for name, tensor in (("zeros", zeros), ("bias", bias)):
        assert tail[name] == (0 if tensor is None else tensor.data_ptr() + 2 * columns)
    for name in ("m", "k", "k_padded", "group_size", "ld_scales", "ldx", "ldy", "stream", "scales_in_place"):
        assert main[name] == tail[name], name


def test_the_codebook_of_a_tail_is_the_first_launchs(module: Module) -> None:
    n = 66 * 192 + 320
    a = operands(256, n, 256, "nf4", groups=4)
    kernels = [c for c in CONFIGS if c.family == "gemm_sm90" and "code4" in c.formats]
    first = next(c for c in kernels if (c.block_m, c.block_n) == (128, 192))
    second = next(c for c in kernels if (c.block_m, c.block_n) == (128, 128))
    wo.gemm(**a, config=first.with_tail(second))
    main, tail = module.launches
    assert main["zeros"] == tail["zeros"] != 0


@pytest.mark.parametrize("split_k", [1, 2, 8])
def test_clusters_that_share_k_need_no_partials(module: Module, split_k: int) -> None:
    """The plan says how many clusters run at once: no more than an H200's SMs hold."""
    config = config_of("decode_sm90", 8).with_split_k(split_k)
    wo.gemm(**operands(1024, 128, 4), config=config)
    (launch,) = module.launches
    assert (launch["split_k"], launch["partials"]) == (split_k, 0)
    assert 1 <= launch["clusters"] <= SM_COUNT // split_k


# --- facts that C++ and Python share -----------------------------------------------------------------------


def test_activations_have_the_numbers_of_the_kernels() -> None:
    text = (ROOT / "cutlass_ext" / "epilogue" / "activation.h").read_text()
    enum = re.search(r"enum class Activation : int \{(.*?)\}", text, re.DOTALL)
    assert enum
    numbers = {name.lower(): int(value) for name, value in re.findall(r"k(\w+) = (\d+)", enum[1])}
    assert {name: activation.number for name, activation in ACTIVATIONS.items()} == numbers


def test_pdl_modes_have_the_numbers_of_the_kernels() -> None:
    text = (ROOT / "cutlass_ext" / "gemm_params.h").read_text()
    enum = re.search(r"enum class PdlMode : int \{(.*?)\}", text, re.DOTALL)
    assert enum
    numbers = {name: int(value) for name, value in re.findall(r"k(\w+) = (\d+)", enum[1])}
    names: dict[LaunchOverlap, str] = {False: "None", True: "Prefetch", "constant_weights": "ConstantWeights"}
    assert {names[overlap]: number for overlap, number in PDL_MODES.items()} == numbers


@pytest.mark.parametrize("file", ["kernels/api/checks.h", "kernels/convert/dequantize.cu"])
def test_the_longest_k_is_that_of_the_kernels(file: str) -> None:
    (limit,) = re.findall(r"k_padded > \(1 << (\d+)\)", (ROOT / file).read_text())
    assert 1 << int(limit) == MAX_K


def test_the_stub_declares_what_the_binding_defines() -> None:
    text = (ROOT / "kernels" / "api" / "bindings.cpp").read_text()
    defined = text[text.index("PYBIND11_MODULE") :]
    stub = declared()
    names = set(re.findall(r'(?:module\.def\(\s*|def_blocks_4bit\()"(\w+)"', defined))
    assert names == {name for name in stub if "." not in name}
    for name in sorted(names):
        of_name = defined[defined.index(f'"{name}"') :]
        statement = of_name[: of_name.index(";\n")]
        if "def_blocks" in defined[defined.index(f'"{name}"') - 40 : defined.index(f'"{name}"')]:
            statement = defined[defined.index("def_blocks_4bit =") : defined.index("};")]
        named = re.findall(r'py::arg\("(\w+)"\)', statement)
        assert (named or _parameters(rf"\w+ {name}\(", text)) == stub[name], name
    for name in ("Plan", "GroupedPlan"):
        plan = defined[defined.index(f"py::class_<{name}>") :]
        plan = plan[: plan.index(";\n")]
        assert re.findall(r'py::arg\("(\w+)"\)', plan) == stub[f"{name}.__init__"]
        of_class = text[text.index(f"class {name} {{") :]
        assert _parameters(r"void launch\(", of_class) == stub[f"{name}.launch"]


def _parameters(signature: str, text: str) -> list[str]:
    """The names of a C++ function's parameters; signature: a pattern of what stands before them."""
    found = re.search(signature + r"(.*?)\)", text, re.DOTALL)
    return re.findall(r"(\w+)(?:,|$)", found[1]) if found else []
