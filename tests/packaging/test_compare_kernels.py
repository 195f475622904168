"""`python -m weightonly_build compare`: pairs of kernels, and what counts as a difference."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests import ROOT

from weightonly_build import compare, cubin, target
from weightonly_build.cubin import Kernel

HASHES = ("11111111", "22222222")


def _mangled(function: str, unit: str, types: str, hash_: str = HASHES[0], rest: str = "") -> str:
    namespace = f"_GLOBAL__N__{hash_}_{len(unit) + 3}_{unit}_cu_{hash_}"
    template = f"NS_{len(namespace)}{namespace}{len(types)}{types}E"
    return f"_ZN10weightonly{len(function)}{function}I{template}{rest}EEvi"


def _mangled_named(function: str, unit: str, types: str) -> str:
    """As `_mangled`, of a unit whose configurations are in a namespace of its name."""
    return f"_ZN10weightonly{len(function)}{function}INS_{len(unit)}{unit}{len(types)}{types}EEEvi"


def _kernel(name: str, code: str = "a", arch: str = "sm_90a", registers: int = 32) -> Kernel:
    return Kernel(arch, name, Path("unit.sm_90a.cubin"), code, 128, {"registers": registers})


def _match(old: list[Kernel], new: list[Kernel]) -> compare.Comparison:
    return compare.match(
        compare.name_kernels(old), compare.name_kernels(new), same=lambda *_: False, is_reordered=lambda *_: False
    )


def _counts(result: compare.Comparison) -> tuple[int, int, int, int]:
    return len(result.equal), len(result.different), len(result.only_old), len(result.only_new)


UNIT = "gemm_sm80_16x128x64_w16x32_s2"


def test_generated_kernels_are_matched_by_configuration_and_types_whatever_their_function() -> None:
    old = [
        _kernel(_mangled("gemm_kernel", UNIT, types), code)
        for types, code in (("F16Int4Group", "a"), ("F16Int8Group", "b"))
    ]
    new = [
        _kernel(_mangled("tile_loop", UNIT, types, HASHES[1]), code)
        for types, code in (("F16Int8Group", "b"), ("F16Int4Group", "c"))
    ]
    result = _match(old, new)
    assert _counts(result) == (1, 1, 0, 0)
    (pair,) = result.different
    assert [str(one) for one in pair] == [f"sm_90a {UNIT} F16Int4Group"] * 2


def test_units_with_a_namespace_of_their_name_are_matched_with_those_that_have_none() -> None:
    every = [("F16Int4Group", "a"), ("Bf16Int8GroupZeros", "b")]
    old = [_kernel(_mangled("gemm_kernel", UNIT, types), code) for types, code in every]
    new = [_kernel(_mangled_named("gemm_kernel", UNIT, types), code) for types, code in every]
    assert _counts(_match(old, new)) == _counts(_match(new, new)) == (2, 0, 0, 0)
    assert [str(old) for old, _ in _match(old, new).equal] == [str(new) for _, new in _match(old, new).equal]


def test_kernels_of_one_type_are_told_apart_by_the_numbers_in_their_names() -> None:
    old = [_kernel(_mangled("decode", UNIT, "F16Int4Group", rest=f"Li{n}E"), code) for n, code in ((1, "a"), (2, "b"))]
    new = [_kernel(_mangled("decode", UNIT, "F16Int4Group", rest=f"Li{n}E"), code) for n, code in ((1, "b"), (2, "a"))]
    assert _counts(_match(old, new)) == (0, 2, 0, 0)


def test_new_template_arguments_do_not_hide_equal_kernels() -> None:
    old = [_kernel(_mangled("decode", UNIT, "F16Int4Group", rest=f"Li{n}E"), str(n)) for n in (1, 2, 4)]
    new = [_kernel(_mangled("decode", UNIT, "F16Int4Group", rest=f"Li{n}ELb1E"), str(n)) for n in (4, 2, 1)]
    assert _counts(_match(old, new)) == (3, 0, 0, 0)


def test_a_kernel_without_configuration_is_matched_by_its_function() -> None:
    old = _kernel("_ZN10weightonly6reduceI6__halfEEvi", "a")
    assert _counts(_match([old], [_kernel("_ZN10weightonly5other6reduceI6__halfEEvi", "a")])) == (1, 0, 0, 0)
    assert _counts(_match([old], [_kernel("_ZN10weightonly6reduceI6__halfEEvi", "b")])) == (0, 1, 0, 0)


def test_renamed_functions_are_matched_by_equal_code_within_a_target() -> None:
    old = _kernel("_ZN10weightonly6reduceI6__halfEEvi", "a")
    renamed = "_ZN10weightonly4sumsI6__halfEEvi"
    assert _counts(_match([old], [_kernel(renamed, "a")])) == (1, 0, 0, 0)
    assert _counts(_match([old], [_kernel(renamed, "b")])) == (0, 0, 1, 1)
    assert _counts(_match([old], [_kernel(renamed, "a", arch="sm_80")])) == (0, 0, 1, 1)


def test_missing_and_added_kernels_are_reported() -> None:
    kernel = _kernel(_mangled("gemm_kernel", UNIT, "F16Int4Group"))
    added = _kernel(_mangled("gemm_kernel", "gemv_1x16x1024", "F16Int4Group"), "z")
    result = _match([kernel], [kernel, added])
    assert _counts(result) == (1, 0, 0, 1)
    assert not result.all_equal
    text = compare.report(result)
    assert "only in NEW: sm_90a gemv_1x16x1024 F16Int4Group" in text
    assert "the builds differ" in text


def test_other_resources_are_a_difference() -> None:
    old, new = (_kernel(_mangled("gemm_kernel", UNIT, "F16Int4Group"), registers=n) for n in (32, 40))
    result = _match([old], [new])
    assert _counts(result) == (0, 1, 0, 0)
    assert "registers: 32 -> 40" in compare.report(result)


def test_listing_without_addresses_and_numbers_of_names() -> None:
    listing = """
        Function : _Z1fv
        /*0000*/                   LDC R1, c[0x4][0x28] ;     /* 0x00000a00ff017624 */
                                                              /* 0x000fe400078e00ff */
        /*0010*/                   CALL.REL `($_Z1fv$sqrt) ;  /* 0x00006c0000067ab9 */
                                                              /* 0x000fe20000000a00 */
"""
    assert cubin.normalize(listing) == ["LDC R1, c[0x4][?]  # 0007f2", "CALL.REL ?  # 0007f1"]
    moved = listing.replace("0x28", "0x30").replace("_Z1f", "_Z1g").replace("0x0000", "0x1111")
    assert cubin.normalize(moved) == cubin.normalize(listing)
    assert cubin.normalize(listing.replace("0x000fe4", "0x000fc4")) != cubin.normalize(listing)


def _move(to: str, source: str, bits: str = "0007f2") -> str:
    return f"IMAD.MOV.U32 {to}, RZ, RZ, {source}  # {bits}"


def test_copies_whose_order_changes_nothing() -> None:
    one, other = _move("R18", "R0"), _move("R21", "R2")
    first, last = "UMOV UR4, URZ  # 0007f1", "LDC R8, c[0x0][0x508]  # 000731"
    assert cubin.with_sorted_moves([first, one, other, last]) == cubin.with_sorted_moves([first, other, one, last])
    assert cubin.with_sorted_moves([one, first, other]) != cubin.with_sorted_moves([other, first, one])


@pytest.mark.parametrize(
    "other",
    [
        _move("R18", "R2"),
        _move("R0", "R2"),
        _move("R21", "R18"),
        _move("R21", "R2", "0007f1"),
        "MOV R21, 0x2  # 0007f2",
    ],
    ids=["writes the same", "writes what it reads", "reads what it writes", "other scheduling bits", "no register"],
)
def test_copies_whose_order_counts(other: str) -> None:
    lines = [_move("R18", "R0"), other]
    assert cubin.with_sorted_moves(lines) == lines
    assert cubin.with_sorted_moves(lines[::-1]) == lines[::-1]


def test_reordered_kernels_are_no_difference_and_are_counted() -> None:
    old, new = (compare.name_kernels([_kernel(_mangled("gemm_kernel", UNIT, "F16Int4Group"), code)]) for code in "ab")
    result = compare.match(old, new, same=lambda *_: False, is_reordered=lambda *_: True)
    assert _counts(result) == (0, 0, 0, 0) and len(result.reordered) == 1 and result.all_equal
    assert compare.report(result).endswith("all kernels are equal, but for the order of copies")


def test_a_missing_tool_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm"):
        cubin.find_tool("no-such-disassembler")


SOURCE = """
namespace {namespace} {{
namespace {{ struct F16Int4Group {{ static constexpr int kScale = {scale}; }}; }}
template <class Types> __global__ void {function}(int* x) {{
  __shared__ int shared[64];
  shared[threadIdx.x] = x[threadIdx.x] * Types::kScale;
  __syncthreads();
  x[threadIdx.x] = shared[63 - threadIdx.x];
}}
template __global__ void {function}<F16Int4Group>(int*);
}}
"""


@pytest.fixture(scope="module")
def builds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Objects of one small unit: as it was, with every name changed, with another constant."""
    nvcc = target.find_nvcc()
    if nvcc is None:
        pytest.skip("needs nvcc")
    try:
        cubin.find_tool("cuobjdump")
        cubin.find_tool("nvdisasm")
    except RuntimeError as error:
        pytest.skip(str(error))
    objects = {}
    variants = {"old": ("a", "first", 3), "renamed": ("other", "second", 3), "changed": ("a", "first", 5)}
    for name, (namespace, function, scale) in variants.items():
        folder = tmp_path_factory.mktemp(name)
        source = folder / f"{UNIT}.cu"
        source.write_text(SOURCE.format(namespace=namespace, function=function, scale=scale))
        objects[name] = source.with_suffix(".o")
        codes = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in (80, 90)]
        subprocess.run([nvcc, "-c", *codes, source, "-o", objects[name]], check=True)
    return objects


def _run(old: Path, new: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "weightonly_build", "compare", str(old), str(new)]
    env = {**os.environ, "PYTHONPATH": str(ROOT / "kernels")}
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


def test_a_unit_with_other_names_is_equal(builds: dict[str, Path]) -> None:
    done = _run(builds["old"], builds["renamed"].parent)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-2:] == [
        f"{'all':>8}" + "".join(f"{n:>11}" for n in (2, 2, 2, 0, 0, 0, 0)),
        "all kernels are equal",
    ]


def test_a_changed_constant_is_named_and_shown(builds: dict[str, Path]) -> None:
    done = _run(builds["old"], builds["changed"])
    assert done.returncode == 1, done.stderr
    for arch in ("sm_80", "sm_90"):
        assert f"different: {arch} {UNIT} F16Int4Group" in done.stdout
    assert "0x3" in done.stdout
    assert "0x5" in done.stdout


def test_resources_are_read(builds: dict[str, Path], tmp_path: Path) -> None:
    for kernel in cubin.read_kernels(builds["old"], tmp_path):
        assert kernel.resources["registers"] in range(4, 33)
        # Hopper's CTAs reserve 1024 bytes.
        assert kernel.resources["static shared bytes"] in (256, 256 + 1024)
        assert kernel.resources["parameter bytes"] == 8


def test_a_file_without_machine_code_is_an_error(tmp_path: Path, builds: dict[str, Path]) -> None:
    (tmp_path / "empty.o").write_bytes(b"")
    done = _run(tmp_path, builds["old"])
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    done = _run(tmp_path / "none.so", tmp_path / "none.so")
    assert (done.returncode, done.stderr) == (1, f"error: {tmp_path / 'none.so'} does not exist\n")
