"""The kernels' conversion of int4 and int8 to fp16 and bf16, on the CPU: all values in all places of a word.

The host path runs the same sequence of operations as the device path (cutlass_ext/convert/packed_math.h). It is
tested from the header, compiled here, and from the kernels library where that is built.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from tests import ROOT

from weightonly_build import cutlass, library, target

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}

# Element i of a word -> its field there, counted from the low bits (cutlass_ext/convert/numeric_conversion.h).
FIELD = {4: (0, 4, 1, 5, 2, 6, 3, 7), 8: (0, 2, 1, 3)}

Convert = Callable[[int, str, np.ndarray], torch.Tensor]


def toolkit_includes(nvcc: Path) -> list[str]:
    """The folders with cuda_fp16.h and what it includes, as nvcc itself passes them to the host compiler."""
    command = [str(nvcc), "--dryrun", "-E", "-x", "cu", os.devnull]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    variables = re.findall(r"^#\$ (?:SYSTEM_)?INCLUDES=(.*)$", text, re.MULTILINE)
    return [word.removeprefix("-I") for word in shlex.split(" ".join(variables)) if word != "-isystem"]


def compile_header(folder: Path, source: str = "convert_host.cpp") -> Path:
    """A file of this folder as a shared object; skips without a CUDA toolkit, a compiler or CUTLASS."""
    nvcc = target.find_nvcc()
    if nvcc is None:
        pytest.skip("nvcc, whose toolkit has cuda_fp16.h, was not found")
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    if shutil.which(compiler[0]) is None:
        pytest.skip(f"the host compiler {compiler[0]} was not found")
    try:
        cutlass_include = cutlass.find_headers(library.BUILD)
    except RuntimeError as error:
        pytest.skip(str(error))
    includes = [f"-isystem{path}" for path in (cutlass_include, *toolkit_includes(nvcc))]
    output = folder / f"{source}.so"
    options = ["-O1", "-std=c++17", "-shared", "-fPIC", f"-I{ROOT}", *includes]
    subprocess.run([*compiler, *options, ROOT / "tests/kernels" / source, "-o", output], check=True)
    return output


def built_library() -> Path:
    if not library.LIBRARY.is_file():
        pytest.skip("the kernels library is not built")
    return library.LIBRARY


@pytest.fixture(scope="module", params=["header", "library"])
def interface(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """A shared object with wo_convert_host (kernels/api/api.h)."""
    if request.param == "header":
        return ctypes.CDLL(str(compile_header(tmp_path_factory.mktemp("convert"))))
    return ctypes.CDLL(str(built_library()))


@pytest.fixture
def convert(interface: ctypes.CDLL) -> Convert:
    """(bits, dtype name, uint32 words) -> [words, 32 / bits] in that dtype."""

    def call(bits: int, dtype: str, words: np.ndarray) -> torch.Tensor:
        words = np.ascontiguousarray(words, dtype=np.uint32)
        out = np.full(len(words) * (32 // bits), 0x7FFF, dtype=np.uint16)  # NaN in both dtypes
        status = interface.wo_convert_host(
            bits,
            int(dtype == "bf16"),
            words.ctypes.data_as(ctypes.c_void_p),
            len(words),
            out.ctypes.data_as(ctypes.c_void_p),
        )
        assert status == 0
        return torch.from_numpy(out.view(np.int16)).view(DTYPES[dtype]).view(len(words), -1)

    return call


def pack(u: np.ndarray, bits: int) -> np.ndarray:
    """Unsigned values [words, 32 / bits], in natural order -> uint32 words in the kernels' order."""
    words = np.zeros(len(u), dtype=np.uint32)
    for element, field in enumerate(FIELD[bits]):
        words |= u[:, element].astype(np.uint32) << np.uint32(bits * field)
    return words


def check(convert: Convert, bits: int, dtype: str, u: np.ndarray) -> None:
    q = torch.from_numpy(u.astype(np.int32) - (1 << (bits - 1)))
    result = convert(bits, dtype, pack(u, bits))
    # Every q of eight bits is a number of both dtypes, so equal means the same number, not a rounded one.
    assert torch.equal(result.double(), q.double())
    assert not torch.signbit(result[q == 0]).any(), "zero came out as -0"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", FIELD, ids="int{}".format)
def test_every_value_in_every_position(convert: Convert, seed: int, bits: int, dtype: str) -> None:
    """Alone among equal neighbours at either end of their range, and among random ones."""
    levels, elements = 1 << bits, 32 // bits
    rng = np.random.default_rng(seed)
    for position in range(elements):
        for neighbours in (
            np.zeros((levels, elements)),
            np.full((levels, elements), levels - 1),
            *(rng.integers(0, levels, (levels, elements)) for _ in range(16)),
        ):
            u = neighbours.astype(np.uint32)
            u[:, position] = np.arange(levels)
            check(convert, bits, dtype, u)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", FIELD, ids="int{}".format)
def test_every_pair_of_values_in_every_pair_of_positions(convert: Convert, seed: int, bits: int, dtype: str) -> None:
    levels, elements = 1 << bits, 32 // bits
    first, second = (axis.ravel() for axis in np.mgrid[:levels, :levels])
    rng = np.random.default_rng(seed)
    for positions in itertools.combinations(range(elements), 2):
        u = rng.integers(0, levels, (levels * levels, elements), dtype=np.uint32)
        u[:, positions[0]], u[:, positions[1]] = first, second
        check(convert, bits, dtype, u)


@pytest.mark.parametrize("bits", FIELD, ids="int{}".format)
def test_order_is_that_of_the_interleaved_layout(convert: Convert, generator: torch.Generator, bits: int) -> None:
    """The words that `preprocess` leaves: the last pass of the layout and the conversion undo each other."""
    from weightonly.layout.words import add_bias_and_interleave

    limit = 1 << (bits - 1)
    q = torch.randint(-limit, limit, (64, 32), generator=generator, dtype=torch.int8)
    words = add_bias_and_interleave(q, bits)
    result = convert(bits, "fp16", words.numpy().ravel().view(np.uint32))
    assert torch.equal(result.view(q.shape).to(torch.int8), q)


@pytest.mark.parametrize("bits", [0, 2, 3, 5, 16, -4], ids="{}bits".format)
def test_other_bits_are_refused(interface: ctypes.CDLL, bits: int) -> None:
    word, out = ctypes.c_uint32(0), (ctypes.c_uint16 * 8)(*[0x7FFF] * 8)
    for bf16 in (0, 1):
        assert interface.wo_convert_host(bits, bf16, ctypes.byref(word), 1, out) != 0
    assert list(out) == [0x7FFF] * 8
