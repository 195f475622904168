"""The C interface, called by ctypes without a GPU: what it refuses is refused with a reason, before any launch.

`wo_gemm` and `wo_grouped_gemm` are tested from kernels/api/, compiled here for the host with kernels that launch
nothing; all functions are tested from the kernels library where that is built.
"""

from __future__ import annotations

import ctypes
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
from tests import ROOT
from tests.kernels.test_numeric_conversion import built_library, compile_header

POINTERS = ("x", "weight", "scales", "zeros", "bias", "y", "partials")
_TYPES: dict[str, Any] = {"int64_t": ctypes.c_int64, "int32_t": ctypes.c_int32, "GroupIndex": ctypes.c_uint32 * 2}
_TYPES |= {"uint16_t": ctypes.c_uint16, "uint8_t": ctypes.c_uint8, "uint32_t": ctypes.c_uint32}
_NUMBERS = {"kMaxRanks": 8}


def struct_of(header: str, name: str) -> type[ctypes.Structure]:
    """A struct of a header: a line for each field."""
    text = (ROOT / header).read_text(encoding="utf-8")
    body = re.search(rf"struct {name} (?:: (\w+) )?{{(.*?)\n}};", text, re.DOTALL)
    assert body
    fields: list[tuple[str, Any]] = [*_TYPES[body[1]]._fields_] if body[1] else []
    for kind, field, count in re.findall(r"^  ([\w ]+?[\w*])\s+(\w+)(?:\[(\w+)\])?;", body[2], re.MULTILINE):
        made = ctypes.c_void_p if kind.endswith("*") else ctypes.c_float if kind == "float" else _TYPES[kind]
        fields.append((field, made * int(_NUMBERS.get(count, count)) if count else made))
    return type(name, (ctypes.Structure,), {"_fields_": fields})


GemmParams = struct_of("cutlass_ext/gemm_params.h", "GemmParams")
_TYPES["GemmParams"] = GemmParams
_TYPES["Gate"] = struct_of("cutlass_ext/grouped_params.h", "Gate")
Fp8GemmParams = struct_of("cutlass_ext/gemm_params.h", "Fp8GemmParams")
GroupedGemmParams = struct_of("cutlass_ext/grouped_params.h", "GroupedGemmParams")
_TYPES["GroupedGemmParams"] = GroupedGemmParams
Fp8GroupedGemmParams = struct_of("cutlass_ext/grouped_params.h", "Fp8GroupedGemmParams")
STRUCTS = [
    GemmParams,
    struct_of("kernels/convert/conversions.h", "AwqDequantizeParams"),
    struct_of("kernels/convert/conversions.h", "Blocks4bitParams"),
    struct_of("kernels/convert/dequantize.h", "DequantizeParams"),
    GroupedGemmParams,
    *(struct_of("kernels/experts/experts.h", name) for name in ("RouteParams", "GatherParams", "CombineParams")),
    Fp8GemmParams,
    struct_of("kernels/convert/conversions.h", "QuantizeActivationsParams"),
    Fp8GroupedGemmParams,
    struct_of("kernels/experts/experts.h", "SpreadParams"),
]
"""In the order of wo_struct_bytes."""

GEMV, GEMM, DECODE, OF_16, FP8, ORDERED = range(6)
TILED, INTERLEAVED, SORTING, GROUPED_FP8 = range(4)
"""Kernels of interface_host.cpp, and its grouped ones."""


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return ctypes.CDLL(str(compile_header(tmp_path_factory.mktemp("interface"), "interface_host.cpp")))


def params(**changed: int) -> ctypes.Structure:
    """What every kernel of the host library takes: one row, K = N = 128, groups of 64."""
    sizes = dict.fromkeys(POINTERS, 4096) | {"ldx": 128, "ldy": 128, "ld_scales": 128}
    sizes |= {"m": 1, "n": 128, "k": 128, "n_padded": 128, "k_padded": 128, "group_size": 64}
    sizes |= {"split_k": 1, "activation": 0, "clusters": 1, "pdl_mode": 0}
    return GemmParams(**(sizes | changed))


def gemm(library: ctypes.CDLL, kernel: int, given: ctypes.Structure | None, device: int = 0) -> tuple[int, str]:
    message = ctypes.create_string_buffer(b"\x7f" * 511, 512)
    address = None if given is None else ctypes.byref(given)
    function = library.wo_gemm_fp8 if isinstance(given, Fp8GemmParams) else library.wo_gemm
    status = function(kernel, address, device, None, message, len(message))
    return status, message.value.decode()


def fp8_params(**changed: int) -> ctypes.Structure:
    """What the host library's kernel with x in 8 bits takes: groups of 128."""
    fields = {"x_scales": 4100, "group_size": 128} | changed
    x_scales = fields.pop("x_scales")
    given = params(**fields)
    return Fp8GemmParams(*(getattr(given, field[0]) for field in GemmParams._fields_), x_scales)


@pytest.mark.parametrize("kernel", [GEMV, GEMM, DECODE], ids=["gemv", "gemm", "decode"])
def test_what_is_right_is_launched(kernel: int, host: ctypes.CDLL) -> None:
    before = host.launches_so_far()
    assert gemm(host, kernel, params()) == (0, "")
    assert host.launches_so_far() == before + 1


# (kernel, changed fields, what the message says)
REFUSED: list[tuple[int, dict[str, int], str]] = [
    (GEMV, {"x": 0}, "x must be a 16-byte aligned address, got 0"),
    (GEMV, {"x": 4104}, "x must be a 16-byte aligned address, got 4104"),
    (GEMV, {"weight": 0}, "weight must be"),
    (GEMV, {"weight": 4104}, "weight must be"),
    (GEMV, {"scales": 0}, "scales must be"),
    (GEMV, {"scales": 4098}, "scales must be"),
    (GEMV, {"zeros": 4098}, "zeros must be null or a 16-byte aligned address"),
    (GEMM, {"zeros": 0}, "zeros must be an address, as this kernel reads it"),
    (DECODE, {"zeros": 0}, "zeros must be an address, as this kernel reads it"),
    (GEMV, {"y": 0}, "y must be an even address"),
    (GEMV, {"y": 4097}, "y must be an even address"),
    (GEMV, {"bias": 4097}, "bias must be null or an even address"),
    (GEMV, {"m": 0}, "m must be within the kernel's tokens, got 0"),
    (GEMV, {"m": 5}, "m must be within the kernel's tokens, got 5"),
    (GEMM, {"m": -1}, "m must be at least 1, got -1"),
    (GEMV, {"n": 0}, "n_padded must be"),
    (GEMV, {"n": 129}, "n_padded must be a multiple of 32 from n on"),
    (GEMV, {"n_padded": 120, "n": 100}, "n_padded must be a multiple of 32"),
    (DECODE, {"n_padded": 96, "n": 96}, "n_padded must be a multiple of 64 for tiled weights"),
    (GEMM, {"n_padded": 2**31 - 64, "n": 128, "ld_scales": 2**31}, "n_padded must be less than 2"),
    (GEMM, {"m": 1 << 30, "n_padded": 1 << 20, "ld_scales": 1 << 20}, "m . n_padded must be at most 2"),
    (GEMM, {"k_padded": 1 << 20, "n_padded": 1 << 23, "ld_scales": 1 << 23}, "k_padded . n_padded must be at most 2"),
    (GEMV, {"k": 0}, "k must be a multiple of 8, got 0"),
    (GEMV, {"k": 124}, "k must be a multiple of 8, got 124"),
    (GEMV, {"k": 136, "ldx": 136}, "k_padded must be a multiple of 64 from k on"),
    (GEMV, {"k_padded": 160}, "k_padded must be a multiple of 64"),
    (GEMV, {"k_padded": 2**20 + 64}, "k_padded must be at most 2"),
    (GEMV, {"ldx": 120}, "ldx must be a multiple of 8 from k on"),
    (GEMV, {"ldx": 132}, "ldx must be a multiple of 8"),
    (GEMV, {"ldx": 2**60}, "ldx must be such that all rows are within 2"),
    (GEMV, {"m": 2, "ldy": 127}, "ldy must be at least n"),
    (GEMV, {"m": 2, "ldy": 2**60}, "ldy must be such that"),
    (GEMV, {"ld_scales": 120}, "ld_scales must be a multiple of 8 from n_padded on"),
    (GEMV, {"ld_scales": 2**60}, "ld_scales must be such that"),
    (DECODE, {"ld_scales": 2**30}, "ld_scales must be less than 2"),
    (GEMV, {"group_size": 0}, "group_size must be 32 or a multiple of 64, got 0"),
    (GEMV, {"group_size": -64}, "group_size must be"),
    (GEMV, {"group_size": 96}, "group_size must be"),
    (GEMV, {"group_size": 16}, "group_size must be 32 or a multiple of 64, got 16"),
    (DECODE, {"group_size": 16}, "group_size must be 32 or a multiple of 64, got 16"),
    (OF_16, {"group_size": 32}, "group_size must be 16, got 32"),
    (OF_16, {"group_size": 16, "ld_scales": 2**56}, "ld_scales must be such that"),
    (GEMV, {"split_k": 0}, "split_k must be 1 to 65535"),
    (GEMV, {"split_k": 65536}, "split_k must be 1 to 65535"),
    (GEMV, {"split_k": 2, "partials": 0}, "partials must be a 16-byte aligned address when split_k > 1"),
    (GEMV, {"split_k": 2, "partials": 4104}, "partials must be"),
    (DECODE, {"split_k": 9}, "split_k must be at most the CTAs of the kernel's cluster"),
    (DECODE, {"clusters": 0}, "clusters must be 1 to 65535"),
    (DECODE, {"clusters": 65536}, "clusters must be 1 to 65535"),
    (DECODE, {"pdl_mode": 3}, "pdl_mode must be 0 to 2"),
    (DECODE, {"pdl_mode": -1}, "pdl_mode must be 0 to 2"),
    (GEMV, {"order_split": 1}, "order_split must be 0 for this kernel, got 1"),
    (DECODE, {"order_warpgroups": 2}, "order_warpgroups must be 0 for this kernel, got 2"),
    (ORDERED, {"order_split": 9, "order_warpgroups": 1}, "order_split must be 0 to 8, got 9"),
    (ORDERED, {"order_split": 1, "order_warpgroups": 5}, "order_warpgroups must be 1 to 4, .*, got 5"),
    (ORDERED, {"order_split": 1}, "order_warpgroups must be 1 to 4, or 0 with an order_split of 0, got 0"),
    (ORDERED, {"order_warpgroups": 1}, "order_warpgroups must be"),
    (GEMV, {"activation": 4}, "activation must be 0 to 3"),
    (GEMV, {"activation": -1}, "activation must be 0 to 3"),
]


@pytest.mark.parametrize(("kernel", "changed", "message"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_is_wrong_is_refused(kernel: int, changed: dict[str, int], message: str, host: ctypes.CDLL) -> None:
    before = host.launches_so_far()
    status, text = gemm(host, kernel, params(**changed))
    assert status != 0 and re.search(message, text), text
    assert text.startswith(host_name(host, kernel))
    assert host.launches_so_far() == before


def host_name(library: ctypes.CDLL, kernel: int) -> str:
    library.wo_kernel_name.restype = ctypes.c_char_p
    name: bytes = library.wo_kernel_name(kernel)
    return name.decode()


@pytest.mark.parametrize(
    ("kernel", "changed"),
    [
        (GEMV, {"m": 4}),
        (GEMV, {"zeros": 0, "bias": 0}),
        (GEMV, {"k_padded": 1 << 20}),
        (GEMV, {"m": 1, "ldy": 0}),
        (GEMV, {"group_size": 32}),
        (GEMV, {"ld_scales": 2**56}),  # four rows of groups of 32
        (OF_16, {"group_size": 16, "ld_scales": 2**55}),
        (GEMV, {"split_k": 65535}),
        (GEMM, {"m": 1 << 20}),
        (GEMM, {"split_k": 1, "partials": 0}),
        (DECODE, {"split_k": 8, "partials": 0}),
        (DECODE, {"pdl_mode": 2, "activation": 3, "clusters": 65535}),
        (DECODE, {"ld_scales": 2**30 - 8}),
        (ORDERED, {"order_split": 8, "order_warpgroups": 4}),
    ],
    ids=str,
)
def test_what_is_at_the_limit_is_launched(kernel: int, changed: dict[str, int], host: ctypes.CDLL) -> None:
    assert gemm(host, kernel, params(**changed)) == (0, "")


def grouped(library: ctypes.CDLL, kernel: int = 0, **changed: Any) -> tuple[int, str]:
    """By wo_grouped_gemm_fp8 where x_scales are given."""
    struct, function = GroupedGemmParams, library.wo_grouped_gemm
    if "x_scales" in changed:
        struct, function = Fp8GroupedGemmParams, library.wo_grouped_gemm_fp8
    names = {field[0] for field in struct._fields_} - {"gemm"}
    fields = {"offs": 4096, "experts": 8} | {name: changed.pop(name) for name in names if name in changed}
    fields["gate"] = _TYPES["Gate"](*fields.get("gate", (0, 1.0, math.inf, 0.0)))
    given = struct(gemm=params(**changed), **fields)
    message = ctypes.create_string_buffer(512)
    status = function(kernel, ctypes.byref(given), 0, None, message, len(message))
    return status, message.value.decode()


GATED = {"is_gated": 1, "n": 256, "n_padded": 256, "ld_scales": 256, "ldy": 128, "gate": (3, 1.0, math.inf, 0.0)}


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"offs": 0}, "offs must be an address of 32-bit integers, got 0"),
        ({"offs": 4098}, "offs must be"),
        ({"experts": 0}, "experts must be 1 to 1024, got 0"),
        ({"experts": 1025}, "experts must be 1 to 1024, got 1025"),
        ({"activation": 3}, "activation must be 0, got 3"),
        ({"offs": 0, "ids": 4096}, "ids must be null for this kernel, got 4096"),
        ({"is_in_layer": 2}, "is_in_layer must be 0 or 1, got 2"),
        ({"gate": (-1, 1.0, math.inf, 0.0)}, "gate.function must be 0 to 6, got -1"),
        ({"gate": (7, 1.0, math.inf, 0.0)}, "gate.function must be 0 to 6, got 7"),
        ({"gate": (3, 0.0, math.inf, 0.0)}, "gate must be of an alpha that is not 0 and a limit above 0"),
        ({"gate": (3, 1.0, 0.0, 0.0)}, "gate must be of an alpha"),
        ({"gate": (3, 1.0, math.nan, 0.0)}, "gate must be of an alpha"),
        (GATED | {"gate": (0, 0.0, math.inf, 0.0)}, "gate must be of an alpha"),
        (GATED | {"is_gated": 2}, "is_gated must be 0 or 1, got 2"),
        (GATED | {"n": 192, "n_padded": 192}, "n must be a multiple of 128 of a gated product, and n_padded, got 192"),
        (GATED | {"n": 128}, "n must be a multiple of 128 of a gated product, and n_padded, got 128"),
        (GATED | {"ldy": 56, "m": 2}, "ldy must be at least n"),
        (GATED | {"ldy": 132}, "ldy must be a multiple of 8 of a gated product, got 132"),
        (GATED | {"y": 4104}, "y must be a 16-byte aligned address of a gated product, got 4104"),
        ({"split_k": 2}, "split_k must be at most"),
        ({"x": 8}, "x must be a 16-byte aligned address, got 8"),
        ({"m": 1 << 30, "n_padded": 1 << 10, "ld_scales": 1 << 10}, "m must be such that there are at most 2^30 tiles"),
        (
            {"k_padded": 1 << 20, "n_padded": 1 << 20, "ld_scales": 1 << 20, "experts": 65},
            "experts must be such that all are within 2^46 numbers, got 65",
        ),
    ],
    ids=str,
)
def test_what_is_wrong_with_a_grouped_product_is_refused(
    changed: dict[str, Any], reason: str, host: ctypes.CDLL
) -> None:
    before = host.launches_so_far()
    status, text = grouped(host, **changed)
    assert status == 1 and text.startswith(f"grouped_sm90_f16_int4_group: {reason}"), text
    assert host.launches_so_far() == before


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"split_k": 2, "partials": 0}, "partials must be"),
        ({"split_k": 2}, "split_k must be 1, got 2"),
        (GATED, "is_gated must be 0 for this kernel, got 1"),
        ({"gate": (2, 1.0, math.inf, 0.0)}, "gate.function must be 0 for this kernel, got 2"),
        ({"is_in_layer": 1}, "is_in_layer must be 0 for this kernel, got 1"),
        ({"offs": 0, "ids": 4096}, "ids must be null for this kernel, got 4096"),
        ({"clusters": 0}, "clusters must be 1 to 65535, got 0"),
        ({"clusters": 65536}, "clusters must be"),
        ({"n_padded": 144, "ld_scales": 144}, "n_padded must be a multiple of 32"),
        ({"m": (1 << 31) - 4096, "n": 1, "n_padded": 288, "ld_scales": 288}, "m must be such that there are at most"),
    ],
    ids=str,
)
def test_what_is_wrong_with_interleaved_experts_is_refused(
    changed: dict[str, Any], reason: str, host: ctypes.CDLL
) -> None:
    before = host.launches_so_far()
    status, text = grouped(host, INTERLEAVED, **changed)
    assert status == 1 and text.startswith(f"grouped_sm80_f16_int8_channel: {reason}"), text
    assert host.launches_so_far() == before


CHOICES = {"offs": 0, "ids": 4096, "places": 4096, "rows": 4096, "top_k": 2, "m": 4}


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"offs": 4096}, "offs must be null where there are ids, got 4096"),
        ({"ids": 0}, "offs must be an address of 32-bit integers, got 0"),
        ({"ids": 4098}, "ids must be an address of 32-bit or 64-bit integers, got 4098"),
        ({"ids": 4100, "is_int64": 1}, "ids must be an address of 32-bit or 64-bit integers, got 4100"),
        ({"places": 0}, "rows must be null where places are, got 4096"),
        ({"rows": 0}, "rows must be null where places are, got 0"),
        ({"places": 4097}, "places must be null or an address of 32-bit integers, got 4097"),
        ({"rows": 4097}, "rows must be null or an address of a 32-bit integer, got 4097"),
        ({"is_int64": 2}, "is_int64 must be 0 or 1, got 2"),
        ({"top_k": 0}, "top_k must be a divisor of m, got 0"),
        ({"top_k": 3}, "top_k must be a divisor of m, got 3"),
        ({"m": 130}, "m must be at most 128 where there are ids, got 130"),
        ({"is_gated": 1, "n": 192, "n_padded": 192}, "n must be a multiple of 128 of a gated product"),
        ({"ids": 0, "offs": 4096, "m": 8200}, "m must be such that there are at most 1024 tiles of 8 rows"),
    ],
    ids=str,
)
def test_what_is_wrong_with_choices_is_refused(changed: dict[str, Any], reason: str, host: ctypes.CDLL) -> None:
    before = host.launches_so_far()
    status, text = grouped(host, SORTING, **CHOICES | {"ld_scales": 256} | changed)
    assert status == 1 and text.startswith(f"grouped_decode_sm90_f16_int4_group: {reason}"), text
    assert host.launches_so_far() == before


@pytest.mark.parametrize("changed", [{}, GATED, {"gate": (6, 4.0, 7.0, 0.5)}, {"is_in_layer": 1, "m": 8200}], ids=str)
def test_kernels_of_layers_take_what_is_right(changed: dict[str, Any], host: ctypes.CDLL) -> None:
    assert grouped(host, TILED, **changed) == (0, "")


@pytest.mark.parametrize(
    "changed", [{}, GATED, {"places": 0, "rows": 0, "is_in_layer": 1}, {"m": 128, "is_int64": 1, "ids": 4104}], ids=str
)
def test_kernels_that_sort_take_choices(changed: dict[str, Any], host: ctypes.CDLL) -> None:
    assert grouped(host, SORTING, **CHOICES | changed) == (0, "")
    assert grouped(host, SORTING, m=8, **{name: GATED[name] for name in changed if name in GATED}) == (0, "")


def test_columns_of_experts_are_padded_as_their_layout_has_it(host: ctypes.CDLL) -> None:
    narrow = {"n": 90, "n_padded": 96, "ld_scales": 96}
    assert grouped(host, INTERLEAVED, **narrow) == (0, "")
    assert "n_padded must be a multiple of 64 for tiled weights" in grouped(host, TILED, **narrow)[1]


def test_grouped_kernels_have_numbers_of_their_own(host: ctypes.CDLL) -> None:
    host.wo_grouped_kernel_name.restype = ctypes.c_char_p
    assert host.wo_grouped_kernel_count() == 4
    assert host.wo_grouped_kernel_name(0) == b"grouped_sm90_f16_int4_group"
    assert host.wo_grouped_kernel_name(1) == b"grouped_sm80_f16_int8_channel"
    assert host.wo_grouped_kernel_name(2) == b"grouped_decode_sm90_f16_int4_group"
    assert host.wo_grouped_kernel_name(3) == b"grouped_sm90_fp8_f16_int4_group"
    assert host.wo_grouped_kernel_name(4) is None
    before = host.launches_so_far()
    assert grouped(host, experts=1024, m=1 << 20) == (0, "")
    assert host.launches_so_far() == before + 1
    assert grouped(host, kernel=4) == (1, "kernel must be 0 to 3, got 4")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"x_scales": 0}, "x_scales must be a 4-byte aligned address, got 0"),
        ({"x_scales": 4098}, "x_scales must be a 4-byte aligned address, got 4098"),
        ({"x": 4104}, "x must be a 16-byte aligned address, got 4104"),
        ({"k": 120}, "k must be a multiple of 16, got 120"),
        ({"ldx": 136}, "ldx must be a multiple of 16 from k on, got 136"),
        ({"ldx": 112}, "ldx must be a multiple of 16 from k on, got 112"),
        ({"group_size": 64}, "group_size must be a multiple of 128 for this kernel, got 64"),
    ],
    ids=str,
)
def test_what_is_wrong_with_x_in_8_bits_is_refused(changed: dict[str, int], message: str, host: ctypes.CDLL) -> None:
    before = host.launches_so_far()
    assert gemm(host, FP8, fp8_params(**changed)) == (1, f"gemm_sm90_fp8_f16_int4_group: {message}")
    assert host.launches_so_far() == before


def test_kernels_take_x_in_the_bits_that_they_are_for(host: ctypes.CDLL) -> None:
    before = host.launches_so_far()
    assert gemm(host, FP8, fp8_params(k=112, ldx=112)) == (0, "")
    assert host.launches_so_far() == before + 1
    refused = "gemm_sm90_fp8_f16_int4_group: kernel must be one that takes x in 16 bits"
    assert gemm(host, FP8, params(group_size=128)) == (1, refused)
    refused = "gemv_f16_int4_group: kernel must be one that takes x in 8 bits"
    assert gemm(host, GEMV, fp8_params()) == (1, refused)
    assert host.launches_so_far() == before + 1


def test_grouped_kernels_take_x_in_the_bits_that_they_are_for(host: ctypes.CDLL) -> None:
    name, before = "grouped_sm90_fp8_f16_int4_group", host.launches_so_far()
    assert grouped(host, GROUPED_FP8, x_scales=4096, k=112, ldx=112) == (0, "")
    assert host.launches_so_far() == before + 1
    assert grouped(host, GROUPED_FP8) == (1, f"{name}: kernel must be one that takes x in 16 bits")
    of_16_bits = "grouped_sm90_f16_int4_group: kernel must be one that takes x in 8 bits"
    assert grouped(host, TILED, x_scales=4096) == (1, of_16_bits)
    for address in (0, 4098):
        refused = f"{name}: x_scales must be a 4-byte aligned address, got {address}"
        assert grouped(host, GROUPED_FP8, x_scales=address) == (1, refused)
    assert grouped(host, GROUPED_FP8, x_scales=4096, k=120) == (1, f"{name}: k must be a multiple of 16, got 120")
    assert host.launches_so_far() == before + 1


@pytest.mark.parametrize("kernel", [-1, 6, 2**31 - 1])
def test_other_kernels_are_refused(kernel: int, host: ctypes.CDLL) -> None:
    status, text = gemm(host, kernel, params())
    assert status != 0 and text == f"kernel must be 0 to 5, got {kernel}"
    host.wo_kernel_name.restype = ctypes.c_char_p
    assert host.wo_kernel_name(kernel) is None


def test_null_parameters_are_refused(host: ctypes.CDLL) -> None:
    assert gemm(host, GEMV, None) == (1, "gemv_f16_int4_group: params must be an address, got null")


@pytest.mark.parametrize("given", [None, params(x=0)], ids=["null", "wrong"])
@pytest.mark.parametrize("kernel", [GEMV, 99])
def test_a_reason_that_nobody_wants_is_not_written(
    kernel: int, given: ctypes.Structure | None, host: ctypes.CDLL
) -> None:
    address = None if given is None else ctypes.byref(given)
    assert host.wo_gemm(kernel, address, 0, None, None, 512) != 0
    assert host.wo_gemm(kernel, address, 0, None, None, 0) != 0
    untouched = ctypes.create_string_buffer(b"abc")
    for size in (0, -5):
        assert host.wo_gemm(kernel, address, 0, None, untouched, size) != 0
    assert untouched.value == b"abc"


def test_a_short_place_gets_the_beginning_of_the_reason(host: ctypes.CDLL) -> None:
    message = ctypes.create_string_buffer(b"\x7f" * 20)
    assert host.wo_gemm(GEMV, ctypes.byref(params(x=0)), 0, None, message, 10) == 1
    assert message.raw[:10] == b"gemv_f16_\0" and message.raw[10:20] == b"\x7f" * 10


def test_an_error_of_the_driver_is_a_reason(host: ctypes.CDLL) -> None:
    status, text = gemm(host, GEMV, params(), device=7)
    assert status != 0 and "on device 7: invalid device ordinal" in text and "built for 80,90a" in text


def test_a_driver_that_is_too_old_is_a_reason_of_its_own(host: ctypes.CDLL) -> None:
    status, text = gemm(host, GEMV, params(), device=35)
    expected = r"on device 35: the driver supports CUDA 12\.4, but the library is built with CUDA \d+\.\d: update"
    assert status != 0 and re.search(expected, text), text


def test_the_host_conversion_refuses_null(host: ctypes.CDLL) -> None:
    word, out = ctypes.c_uint32(), (ctypes.c_uint16 * 8)()
    assert host.wo_convert_host(4, 0, None, 1, out) != 0
    assert host.wo_convert_host(4, 0, ctypes.byref(word), 1, None) != 0
    assert host.wo_convert_host(4, 0, ctypes.byref(word), -1, out) != 0
    assert host.wo_convert_host(4, 0, ctypes.byref(word), 1, out) == 0


@pytest.mark.parametrize("where", ["host", "library"])
def test_a_caller_can_compare_versions_and_sizes(where: str, request: pytest.FixtureRequest) -> None:
    library = request.getfixturevalue("host") if where == "host" else ctypes.CDLL(str(built_library()))
    (version,) = re.findall(r"#define WEIGHTONLY_ABI_VERSION (\d+)", (ROOT / "kernels/api/api.h").read_text())
    assert library.wo_abi_version() == int(version)
    assert [library.wo_struct_bytes(i) for i in range(len(STRUCTS))] == [ctypes.sizeof(struct) for struct in STRUCTS]
    assert library.wo_struct_bytes(len(STRUCTS)) == library.wo_struct_bytes(-1) == 0


@pytest.mark.parametrize(
    "function",
    [
        "wo_gemm",
        "wo_gemm_fp8",
        "wo_quantize_activations",
        "wo_awq_dequantize",
        "wo_quantize_4bit",
        "wo_dequantize_4bit",
        "wo_dequantize",
        "wo_route",
        "wo_gather",
        "wo_combine",
        "wo_spread",
        "wo_sum_over_ranks",
    ],
)
def test_every_function_of_the_library_refuses_null_and_zeros(function: str) -> None:
    library = ctypes.CDLL(str(built_library()))
    call: Callable[..., int] = getattr(library, function)
    first = (0,) if function in ("wo_gemm", "wo_gemm_fp8") else ()
    message = ctypes.create_string_buffer(512)
    assert call(*first, None, 0, None, message, 512) == 1
    assert message.value.endswith(b"params must be an address, got null")
    assert call(*first, None, 0, None, None, 0) == 1
    nothing = ctypes.create_string_buffer(max(map(ctypes.sizeof, STRUCTS)))
    assert call(*first, nothing, 0, None, message, 512) == 1
    assert b" must be " in message.value


AROUND_EXPERTS: dict[str, dict[str, int]] = {
    "route": {"ids": 4096, "offs": 4096, "places": 4096, "choices": 8, "experts": 4},
    "gather": {"x": 4096, "sorted": 4096, "offs": 4096, "places": 4096}
    | {"ldx": 72, "tokens": 4, "top_k": 2, "experts": 4, "columns": 64},
    "combine": {"rows": 4096, "weights": 4096, "places": 4096, "rows_end": 4096, "y": 4096}
    | {"tokens": 4, "top_k": 2, "columns": 64},
    "spread": {"grad": 4096, "rows": 4096, "weights": 4096, "places": 4096, "rows_end": 4096}
    | {"of_rows": 4096, "of_weights": 4096, "tokens": 4, "top_k": 2, "columns": 64},
}
"""What wo_route, wo_gather, wo_combine and wo_spread take."""


@pytest.mark.parametrize(
    ("function", "changed", "reason"),
    [
        ("route", {"ids": 4098}, "ids must be a 4-byte aligned address, got 4098"),
        ("route", {"ids": 4100, "is_int64": 1}, "ids must be an 8-byte aligned address, got 4100"),
        ("route", {"is_int64": 2}, "is_int64 must be 0 or 1, got 2"),
        ("route", {"offs": 0}, "offs must be a 4-byte aligned address, got 0"),
        ("route", {"places": 4097}, "places must be a 4-byte aligned address, got 4097"),
        ("route", {"experts": 1025}, "experts must be 1 to 1024, got 1025"),
        ("route", {"choices": 0}, "choices must be 1 to 2097152, got 0"),
        ("route", {"choices": (1 << 21) + 1}, "choices must be 1 to 2097152, got 2097153"),
        ("route", {"pdl_mode": 3}, "pdl_mode must be 0 to 2, got 3"),
        ("gather", {"x": 4104}, "x must be a 16-byte aligned address, got 4104"),
        ("gather", {"sorted": 0}, "sorted must be a 16-byte aligned address, got 0"),
        ("gather", {"offs": 4097}, "offs must be"),
        ("gather", {"places": 0}, "places must be"),
        ("gather", {"columns": 60}, "columns must be a multiple of 8, got 60"),
        ("gather", {"columns": 0}, "columns must be a multiple of 8, got 0"),
        ("gather", {"experts": 0}, "experts must be 1 to 1024, got 0"),
        ("gather", {"top_k": 0}, "top_k must be 1 to 2097152, got 0"),
        ("gather", {"tokens": 1 << 20, "top_k": 3}, "tokens must be such that tokens . top_k is 1 to 2097152"),
        ("gather", {"ldx": 68}, "ldx must be a multiple of 8, got 68"),
        ("gather", {"ldx": 56}, "ldx must be at least columns, got 56"),
        ("gather", {"scales": 4098, "sorted_scales": 4096}, "scales must be a 4-byte aligned address, got 4098"),
        ("gather", {"scales": 4096}, "sorted_scales must be there if scales are, else null, got 0"),
        ("gather", {"sorted_scales": 4096}, "sorted_scales must be there if scales are, else null, got 1"),
        ("combine", {"rows": 4104}, "rows must be a 16-byte aligned address"),
        ("combine", {"y": 0}, "y must be a 16-byte aligned address"),
        ("combine", {"weights": 4098}, "weights must be a 4-byte aligned address"),
        ("combine", {"places": 4098}, "places must be"),
        ("combine", {"rows_end": 0}, "rows_end must be a 4-byte aligned address, got 0"),
        ("combine", {"columns": 4}, "columns must be a multiple of 8, got 4"),
        ("combine", {"type": 2}, "type must be 0 .fp16. or 1 .bf16., got 2"),
        ("combine", {"tokens": 0}, "tokens must be"),
        ("spread", {"grad": 4104}, "grad must be a 16-byte aligned address"),
        ("spread", {"rows": 0}, "rows must be a 16-byte aligned address, got 0"),
        ("spread", {"rows": 4104}, "rows must be a 16-byte aligned address"),
        ("spread", {"weights": 0}, "weights must be a 4-byte aligned address, got 0"),
        ("spread", {"places": 4098}, "places must be"),
        ("spread", {"rows_end": 0}, "rows_end must be a 4-byte aligned address, got 0"),
        ("spread", {"of_rows": 4104}, "of_rows must be a 16-byte aligned address"),
        ("spread", {"of_rows": 0, "of_weights": 0}, "of_rows must be a 16-byte aligned address, got 0"),
        ("spread", {"of_weights": 4098}, "of_weights must be a 4-byte aligned address"),
        ("spread", {"columns": 4}, "columns must be a multiple of 8, got 4"),
        ("spread", {"type": 2}, "type must be 0 .fp16. or 1 .bf16., got 2"),
        ("spread", {"top_k": 0}, "top_k must be"),
    ],
    ids=str,
)
def test_what_is_wrong_around_experts_is_refused(function: str, changed: dict[str, int], reason: str) -> None:
    call: Callable[..., int] = getattr(ctypes.CDLL(str(built_library())), f"wo_{function}")
    struct = next(struct for struct in STRUCTS if struct.__name__ == f"{function.capitalize()}Params")
    message = ctypes.create_string_buffer(512)
    given = struct(**AROUND_EXPERTS[function] | changed)
    assert call(ctypes.byref(given), 0, None, message, len(message)) == 1
    text = message.value.decode()
    assert re.match(f"{function}: {reason}", text), text


@pytest.mark.parametrize("function", AROUND_EXPERTS)
def test_what_is_right_around_experts_comes_to_the_device(function: str) -> None:
    """Device 99 is none: nothing before it was wrong."""
    call: Callable[..., int] = getattr(ctypes.CDLL(str(built_library())), f"wo_{function}")
    struct = next(struct for struct in STRUCTS if struct.__name__ == f"{function.capitalize()}Params")
    message = ctypes.create_string_buffer(512)
    assert call(ctypes.byref(struct(**AROUND_EXPERTS[function])), 99, None, message, len(message)) == 1
    assert b" on device 99: " in message.value


SumOverRanksParams = struct_of("kernels/parallel/sum_over_ranks.h", "SumOverRanksParams")


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({}, ".* on device 99: "),
        ({"y": 4104}, "y must be a 16-byte aligned address, got 4104"),
        ({"state": 0}, "state must be a 4-byte aligned address, got 0"),
        ({"ranks": 1}, "ranks must be 2 to 8, got 1"),
        ({"ranks": 9}, "ranks must be 2 to 8, got 9"),
        ({"rank": 2}, "rank must be one of the ranks, got 2"),
        ({"ranks": 3}, "memory must be 16-byte aligned addresses, got 0"),
        ({"capacity": 120}, "capacity must be a multiple of 16 up to 2.32, got 120"),
        ({"count": 0}, "count must be 1 to what capacity holds, got 0"),
        ({"count": 65}, "count must be 1 to what capacity holds, got 65"),
        ({"type": 2}, "type must be 0 or 1, got 2"),
        ({"pdl_mode": 3}, "pdl_mode must be 0 to 2, got 3"),
    ],
    ids=str,
)
def test_what_is_wrong_of_sums_over_ranks_is_refused(changed: dict[str, int], reason: str) -> None:
    """What is right comes to the device, of which there is no 99."""
    given = SumOverRanksParams(**{"y": 4096, "state": 4096, "count": 64, "capacity": 128, "ranks": 2} | changed)
    given.memory[:2] = (4096, 8192)
    message = ctypes.create_string_buffer(512)
    call: Callable[..., int] = ctypes.CDLL(str(built_library())).wo_sum_over_ranks
    assert call(ctypes.byref(given), 99, None, message, len(message)) == 1
    text = message.value.decode()
    assert re.match(f"sum_over_ranks:? ?{reason}", text), text


def test_the_module_compares_itself_with_the_library_when_it_is_imported() -> None:
    text = (ROOT / "kernels" / "api" / "bindings.cpp").read_text(encoding="utf-8")
    begin = text.index("PYBIND11_MODULE")
    assert "check_library();" in text[begin : text.index("module.def", begin)]
    compared = text[text.index("void check_library") : begin]
    names = re.findall(r"sizeof\((?:weightonly::)?(\w+)\)", compared)
    assert names == [struct.__name__ for struct in STRUCTS]
