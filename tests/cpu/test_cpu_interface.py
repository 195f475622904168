"""The C interface of libweightonly_cpu.so: what it refuses, and by what name."""

from __future__ import annotations

import ctypes
import re
import threading
from typing import Any

import pytest
import torch
from tests import ROOT

import weightonly as wo
from weightonly.cpu import library, native
from weightonly.cpu.blocks import order_of

HEADER = ROOT / "kernels/cpu/api.h"
LARGE = 1 << 62


class Call:
    """A product of [6, 128] and [128, 96] with all operands, whose parameters a test may change."""

    def __init__(self, backend: library.Backend, format: str = "int4", layout: str = "cpu") -> None:
        q = torch.randint(0, 7, (128, 96), dtype=torch.int8)
        self.qweight = wo.preprocess(q, 8 if format == "int8" else 4, layout=layout, format=format)
        self.operands = [torch.ones(6, 128), torch.ones(2, 96), torch.ones(2, 96), torch.ones(96), torch.zeros(6, 96)]
        x, scales, zeros, bias, self.y = self.operands
        self.library: Any = backend.library
        keeper = library.Backend(self, backend.level, "")
        native.gemm(keeper, x, self.qweight, scales, None if format == "nf4" else zeros, bias, "silu", self.y)

    def wo_cpu_gemm(self, params: library.Params) -> int:
        self.params = params
        return 0

    def status(self, **changes: int | None) -> int:
        for name, value in changes.items():
            setattr(self.params, name, value)
        result: int = self.library.wo_cpu_gemm(self.params)
        return result

    def error(self) -> str:
        text: bytes = self.library.wo_cpu_error()
        return text.decode()


REFUSED: list[tuple[str, int | None, str]] = [
    *((name, None, "a 4-byte aligned address") for name in ("x", "weight", "scales", "y")),
    *((name, 4098, "a 4-byte aligned address") for name in ("x", "weight", "scales", "zeros", "bias", "y")),
    *(("m", value, "1 to 2^48") for value in (0, -1, -(1 << 63), (1 << 48) + 1)),
    *((name, value, "1 to 2^31 - 4096") for name in ("n", "k") for value in (0, -1, (1 << 31) - 4095, LARGE)),
    *(("k_padded", value, "a multiple of 64 from k to 2^31 - 4096") for value in (0, -64, 64, 160, 1 << 31, LARGE)),
    *(("groups", value, "1 to 2^31 - 1") for value in (0, -1, 1 << 31, LARGE)),
    *(("group_size", value, "a multiple of 16 below 2^31") for value in (0, -16, 8, 40, 1 << 31, LARGE)),
    *(("group_size", value, "such that all groups are k to k_padded rows") for value in (16, 48, 80, 1 << 30)),
    *(("groups", value, "such that all groups are k to k_padded rows") for value in (3, (1 << 31) - 1)),
    ("groups", 1, "k_padded for one group"),
    *((name, -1, "at least the columns of a row") for name in ("ldx", "ldy", "ld_scales", "ld_zeros")),
    *((name, 95, "at least the columns of a row") for name in ("ldx", "ldy", "ld_scales", "ld_zeros")),
    *((name, LARGE, "such that all rows are within 2^56 elements") for name in ("ldx", "ldy", "ld_scales", "ld_zeros")),
    *(("type", value, "0 to 2") for value in (-1, 3, 9)),
    *(("format", value, "0 to 3") for value in (-1, 4)),
    *(("activation", value, "0 to 3") for value in (-1, 4)),
    *(("level", value, "0 to 3") for value in (-1, 4)),
    *(("invariant", value, "0 or 1") for value in (-1, 2)),
    *(("threads", value, "1 to 65536") for value in (0, -1, 65537, (1 << 31) - 1)),
]


@pytest.mark.parametrize(("name", "value", "expected"), REFUSED, ids=[f"{name} {value}" for name, value, _ in REFUSED])
def test_parameters_are_refused_by_name(backend: library.Backend, name: str, value: int | None, expected: str) -> None:
    """A number of groups that does not fit is told as a group_size that does not fit."""
    call = Call(backend)
    before = call.y.clone()
    said = "group_size" if name == "groups" and expected[0] in "sk" else name
    assert call.status(**{name: value}) == 2
    assert re.match(rf"{said} must be {re.escape(expected)}, got -?\d+$", call.error()), call.error()
    assert torch.equal(call.y, before), "it computed"


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        *(("segments", value, "1 to the bytes of a block") for value in (0, -1, 1 << 20)),
        *(("segment_bytes", value, "such that all segments are a block") for value in (0, -64, 2047, 4096, 1 << 30)),
        *(("block_stride_k", value, "at least 0, and all blocks within 2^56 bytes") for value in (-1, LARGE)),
        *(("block_stride_n", value, "at least 0, and all blocks within 2^56 bytes") for value in (-1, LARGE)),
        *(("segment_stride", value, "at least 0, and all blocks within 2^56 bytes") for value in (-1, LARGE)),
        ("block_order", 4097, "null or a 2-byte aligned address"),
    ],
    ids=lambda value: str(value) if isinstance(value, str | int) else "",
)
def test_blocks_of_gpus_are_refused_by_name(best: library.Backend, name: str, value: int, expected: str) -> None:
    call = Call(best, layout="tiled")
    assert call.status() == 0 and call.status(**{name: value}) == 2
    assert call.error() == f"{name} must be {expected}, got {value}"


def test_an_order_of_elements_beyond_a_block_is_refused(best: library.Backend) -> None:
    call = Call(best, layout="tiled")
    order = order_of(4, "tiled", False).clone()
    order[-1] = 4096
    assert call.status(block_order=order.data_ptr()) == 2
    assert call.error() == "block_order must be numbers below 4096, got 4096"


def test_codes_need_their_numbers_and_have_no_zeros(best: library.Backend) -> None:
    call = Call(best, "nf4")
    codebook = call.params.codebook
    for value in (None, codebook + 2):
        assert call.status(codebook=value) == 2
        assert call.error() == f"codebook must be a 4-byte aligned address, got {value or 0}"
    assert call.status(codebook=codebook, zeros=call.params.scales, ld_zeros=96) == 2
    assert call.error() == f"zeros must be null, as codes have none, got {call.params.scales}"
    assert call.status(zeros=None) == 0


def test_sixteen_bits_need_two_bytes(best: library.Backend) -> None:
    """What 4 bytes align is more than they ask for; an odd address is less."""
    call = Call(best)
    assert call.status(type=0, bias=call.params.bias + 2) == 0
    assert call.status(bias=call.params.bias + 1) == 2
    assert call.error().startswith("bias must be a 2-byte aligned address, got ")


@pytest.mark.parametrize("function", ["wo_cpu_gemm", "wo_cpu_kernel"])
def test_parameters_that_are_not_there_are_refused(best: library.Backend, function: str) -> None:
    raw = ctypes.CDLL(str(library._PATH))
    raw.wo_cpu_error.restype = ctypes.c_char_p
    place = ctypes.create_string_buffer(ctypes.sizeof(library.Params) + 8)
    for address in (0, (ctypes.addressof(place) & ~7) + 4):
        assert getattr(raw, function)(ctypes.c_void_p(address)) in (2, -1)
        assert raw.wo_cpu_error() == b"params must be an 8-byte aligned address, got %d" % address
    zeros = library.Params()
    assert getattr(raw, function)(ctypes.byref(zeros)) in (2, -1)
    assert raw.wo_cpu_error() == b"m must be 1 to 2^48, got 0"


def test_an_error_is_that_of_its_thread(best: library.Backend) -> None:
    call = Call(best)
    assert call.status(n=-5) == 2
    found: list[tuple[int, str]] = []
    thread = threading.Thread(target=lambda: found.append((Call(best).status(k=-7), "")))
    thread.start()
    thread.join()
    assert found[0][0] == 2 and call.error() == "n must be 1 to 2^31 - 4096, got -5"


def at_an_odd_address(tensor: torch.Tensor) -> torch.Tensor:
    """As PyTorch makes tensors of memory that is not its own."""
    memory = bytearray(tensor.numel() * tensor.element_size() + 1)
    copy = torch.frombuffer(memory, dtype=tensor.dtype, offset=1, count=tensor.numel()).view(tensor.shape)
    return copy.copy_(tensor)


@pytest.mark.parametrize("layout", ["cpu", "tiled"])
def test_operands_at_odd_addresses_are_copied(backend: library.Backend, layout: str) -> None:
    call = Call(backend, layout=layout)
    x, scales, zeros, bias, y = call.operands
    w = call.qweight
    expected = native.gemm(backend, x, w, scales, zeros, bias)
    packed = wo.PackedWeight(at_an_odd_address(w.data), w.k, w.n, w.format, w.layout)
    x, scales, zeros, bias = map(at_an_odd_address, (x, scales, zeros, bias))
    assert torch.equal(native.gemm(backend, x, packed, scales, zeros, bias), expected)
    with pytest.raises(ValueError, match=r"^gemm: y must be a 4-byte aligned address, got \d+$"):
        native.gemm(backend, x, packed, scales, zeros, bias, out=at_an_odd_address(y))


def test_a_row_of_its_own_needs_no_distance(backend: library.Backend) -> None:
    assert Call(backend).status(m=1, ldx=0, ldy=0) == 0


def test_sizes_are_not_cut_to_32_bits(best: library.Backend) -> None:
    """2^32 + 1 rows are not one row."""
    for level in (0, 1, 2):
        params = library.Params(m=(1 << 32) + 1, type=2, groups=1, group_size=64, level=level)
        assert best.library.wo_cpu_kernel(params) == 1


def test_a_caller_can_compare_versions_and_sizes(best: library.Backend) -> None:
    (version,) = re.findall(r"#define WEIGHTONLY_CPU_ABI_VERSION (\d+)", HEADER.read_text())
    assert best.library.wo_cpu_abi_version() == int(version) == library._ABI_VERSION
    assert best.library.wo_cpu_params_bytes() == ctypes.sizeof(library.Params)
