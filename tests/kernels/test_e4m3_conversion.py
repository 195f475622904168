"""The kernels' conversion of E4M3 to fp16 and bf16, on the CPU: all bytes in all places of a word."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np
import pytest
import torch

from weightonly.layout.words import pack_codes

from .test_numeric_conversion import DTYPES, compile_header

FACTORS = {"fp16": 2.0**-8, "bf16": 2.0**-120}
Convert = Callable[..., torch.Tensor]


@pytest.fixture(scope="module")
def convert(tmp_path_factory: pytest.TempPathFactory) -> Convert:
    """(uint8 [words, 4] in natural order, dtype name, factored) -> [words, 4] in that dtype."""
    interface = ctypes.CDLL(str(compile_header(tmp_path_factory.mktemp("e4m3"))))

    def call(codes: torch.Tensor, dtype: str, factored: bool = False) -> torch.Tensor:
        words = pack_codes(codes.view(torch.int8), 8).numpy()
        out = np.full(codes.numel(), 0x7FFF, dtype=np.uint16)  # NaN in both dtypes
        addresses = [array.ctypes.data_as(ctypes.c_void_p) for array in (words, out)]
        interface.wo_convert_e4m3_host(int(dtype == "bf16"), int(factored), addresses[0], len(codes), addresses[1])
        return torch.from_numpy(out.view(np.int16)).view(DTYPES[dtype]).view(codes.shape)

    return call


def cases(generator: torch.Generator) -> torch.Tensor:
    """uint8 [words, 4]: every byte in every place, among zeros, sets of all bits, and random ones."""
    found = []
    for place in range(4):
        for fill in (0, 255, *[None] * 16):
            words = torch.randint(0, 256, (256, 4), generator=generator, dtype=torch.uint8)
            if fill is not None:
                words.fill_(fill)
            words[:, place] = torch.arange(256, dtype=torch.uint8)
            found.append(words)
    return torch.cat(found)


@pytest.mark.parametrize("factored", [False, True], ids=["exact", "factored"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_byte_in_every_place(convert: Convert, generator: torch.Generator, dtype: str, factored: bool) -> None:
    codes = cases(generator)
    expected = codes.view(torch.float8_e4m3fn).double()
    result = convert(codes, dtype, factored).double()
    if factored:
        expected = expected * FACTORS[dtype]
    finite = ~expected.isnan()
    assert int(finite.sum()) > 0.95 * finite.numel()
    assert torch.equal(result[finite], expected[finite])
    assert torch.equal(torch.signbit(result), torch.signbit(expected)), "-0 is a number of E4M3"


@pytest.mark.parametrize("dtype", DTYPES)
def test_codes_that_preprocess_refuses_are_no_nan(convert: Convert, dtype: str) -> None:
    codes = torch.tensor([[0x7F, 0xFF, 0, 0x38]], dtype=torch.uint8)
    assert convert(codes, dtype).tolist() == [[480.0, -480.0, 0.0, 1.0]]
