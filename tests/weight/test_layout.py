"""The layout passes: FasterTransformer's bytes, the closed form, and the inverse of each pass."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.packed_cases import bits_4_and_8, random_q

from weightonly import layout
from weightonly.layout import interleaved, tiled, words

GOLDEN = Path(__file__).parent / "golden" / "ft_layout_sm80.npz"
GOLDEN_SHAPES = [(64, 64), (128, 192), (256, 128), (192, 320)]
PADDED_SHAPES = [(64, 64), (128, 192), (320, 64)]
WORD_ORDER = {8: [0, 2, 1, 3], 4: [0, 2, 4, 6, 1, 3, 5, 7]}  # element of each slot, low to high


def random_codes(k: int, n: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(0, 16, (k, n), dtype=torch.int8, generator=generator)


def permuted_row(t: int, bits: int) -> int:
    """The row that permute_rows moves to place t of its block, in scalar form."""
    word = 32 // bits
    return 8 * ((t % word) // 2) + t % 2 + 2 * (t // word)


def brute_force(q: torch.Tensor, bits: int, name: str) -> torch.Tensor:
    """The bytes of `q` in layout `name`, one element at a time from the closed form."""
    if name == layout.TILED:
        return brute_force_tiled(q, bits)
    if name == layout.TILED_FP8:
        return brute_force_tiled_fp8(q)
    if name == layout.CPU:
        return brute_force_cpu(q + (1 << (bits - 1)) if bits == 4 else q.short() + 128, bits)
    k_size, n_size = q.shape
    block, interleave, word = 128 // bits, 16 // bits, 32 // bits
    out = [0] * (k_size * n_size * bits // 8)
    for k in range(k_size):
        for n in range(n_size):
            if name == layout.ROW_MAJOR:
                source_row, address = k, k * n_size + n
            else:
                source_row = k // block * block + permuted_row(k % block, bits)
                address = (n // interleave) * k_size * interleave + (k // 64) * 64 * interleave + (n % interleave) * 64
                address += k % 64
            slot = WORD_ORDER[bits].index(address % word)
            position_bits = (address // word * word + slot) * bits
            value = int(q[source_row, n]) + (1 << (bits - 1))
            out[position_bits // 8] |= value << (position_bits % 8)
    return torch.tensor(out, dtype=torch.uint8)


def brute_force_tiled(q: torch.Tensor, bits: int) -> torch.Tensor:
    """The bytes of "tiled", one element at a time from the formulas of a lane's weights."""
    values = q.numpy()
    k_size, n_size = values.shape
    out = np.zeros(k_size * n_size * bits // 8, dtype=np.uint8)
    written = np.zeros((out.size, 8 // bits), dtype=bool)
    fragment_bytes = 128 * bits
    for panel, block, w in np.ndindex(n_size // 64, k_size // 64, 4):
        fragment = ((panel * (k_size // 64) + block) * 4 + w) * fragment_bytes
        for g, t, j, i, e, h in np.ndindex(8, 4, 4, 2, 2, 2):
            n = 64 * panel + 8 * g + 2 * w + h
            k = 64 * block + 16 * j + 8 * i + 2 * t + e
            lane = 4 * g + t
            if bits == 4:
                nibble = h + 2 * i + 4 * e
                offset, part = fragment + 16 * lane + 4 * j + nibble // 2, nibble % 2
            else:
                offset, part = fragment + 512 * (j // 2) + 16 * lane + 8 * (j % 2) + 4 * i + h + 2 * e, 0
            out[offset] |= (int(values[k, n]) + (1 << (bits - 1))) << (4 * part)
            assert not written[offset, part]
            written[offset, part] = True
    assert written.all()
    return torch.from_numpy(out)


def brute_force_tiled_fp8(q: torch.Tensor) -> torch.Tensor:
    """The bytes of "tiled_fp8", one element at a time: the column and the rows of each half of a byte."""
    values = q.numpy()
    k_size, n_size = values.shape
    out = np.zeros(k_size * n_size // 2, dtype=np.uint8)
    for address in range(out.size):
        block, inside = divmod(address, 2048)
        panel, block = divmod(block, k_size // 64)
        w, inside = divmod(inside, 512)
        lane, in_lane = divmod(inside, 16)
        k = 64 * block + 16 * (in_lane // 4) + 4 * (lane % 4) + in_lane % 4
        for h in range(2):
            value = int(values[k, 64 * panel + 8 * (lane // 4) + 2 * w + h])
            out[address] |= (2 * value if value >= 0 else -2 * value - 1) << 4 * h
    return torch.from_numpy(out)


def brute_force_cpu(unsigned: torch.Tensor, bits: int) -> torch.Tensor:
    """The bytes of "cpu", one element of values from 0 on at a time: panels of 32 columns, words along k."""
    k_size, n_size = unsigned.shape
    count = 32 // bits
    words = np.zeros((n_size // 32, k_size // count, 32), dtype="<u4")
    for k, n in np.ndindex(k_size, n_size):
        place = {4: "02461357", 8: "0213"}[bits].index(str(k % count))
        words[n // 32, k // count, n % 32] |= np.uint32(int(unsigned[k, n]) << (bits * place))
    return torch.from_numpy(words.view(np.uint8).reshape(-1))


def brute_force_codes(codes: torch.Tensor) -> torch.Tensor:
    """The bytes of "tiled" for codes, one element of the bytes at a time: which (k, n) a nibble holds."""
    values = codes.numpy()
    k_size, n_size = values.shape
    out = np.zeros(k_size * n_size // 2, dtype=np.uint8)
    blocks = k_size // 64
    for address in range(out.size):
        fragment, inside = divmod(address, 512)
        panel, block, w = fragment // 4 // blocks, fragment // 4 % blocks, fragment % 4
        lane, in_lane = divmod(inside, 16)
        g, t = divmod(lane, 4)
        j, byte = divmod(in_lane, 4)
        i, h = divmod(byte, 2)
        n = 64 * panel + 8 * g + 2 * w + h
        k = 64 * block + 16 * j + 8 * i + 2 * t
        out[address] = int(values[k, n]) + 16 * int(values[k + 1, n])
    return torch.from_numpy(out)


@bits_4_and_8
@pytest.mark.parametrize("shape", GOLDEN_SHAPES, ids=lambda s: f"{s[0]}x{s[1]}")
def test_interleaved_is_fastertransformer_byte_for_byte(bits: int, shape: tuple[int, int]) -> None:
    golden = np.load(GOLDEN)
    name = f"int{bits}_{shape[0]}x{shape[1]}"
    q = torch.from_numpy(golden[f"{name}_q"])
    data = layout.pack_bytes(q, bits, layout.INTERLEAVED)
    assert np.array_equal(data.numpy(), golden[f"{name}_sm80"])
    assert torch.equal(layout.unpack_bytes(data, *shape, bits, layout.INTERLEAVED), q)


@bits_4_and_8
@pytest.mark.parametrize("name", layout.LAYOUTS)
@pytest.mark.parametrize("shape", PADDED_SHAPES, ids=lambda s: f"{s[0]}x{s[1]}")
def test_closed_form(bits: int, name: str, shape: tuple[int, int], generator: torch.Generator) -> None:
    q = random_q(*shape, bits, generator)
    assert torch.equal(layout.pack_bytes(q, bits, name), brute_force(q, bits, name))


@pytest.mark.parametrize("shape", PADDED_SHAPES, ids=lambda s: f"{s[0]}x{s[1]}")
def test_closed_form_for_x_in_8_bits(shape: tuple[int, int], generator: torch.Generator) -> None:
    q = random_q(*shape, 4, generator)
    before = q.clone()
    data = layout.pack_bytes(q, 4, layout.TILED_FP8)
    assert torch.equal(q, before)
    assert torch.equal(data, brute_force(q, 4, layout.TILED_FP8))
    assert torch.equal(layout.unpack_bytes(data, *shape, 4, layout.TILED_FP8), q)
    last = shape[1] - 64
    got = layout.unpack_bytes(data, *shape, 4, layout.TILED_FP8, (last, shape[1]))
    assert torch.equal(got, q[:, last:])


def test_words_for_x_in_8_bits_are_numbers_of_e4m3() -> None:
    """What cutlass_ext/fragment/fp8_weight.h computes of a half of a byte: 2q * 2^-9."""
    q = torch.arange(-8, 8, dtype=torch.int8).view(16, 1).repeat(4, 64)
    data = layout.pack_bytes(q, 4, layout.TILED_FP8)
    for half in (data & 15, data >> 4):
        numbers = (half + (half & 1) * 0x81).view(torch.float8_e4m3fn).double() * 256
        assert numbers.unique().tolist() == list(range(-8, 8))


@pytest.mark.parametrize("shape", PADDED_SHAPES, ids=lambda s: f"{s[0]}x{s[1]}")
def test_codes_for_x_in_8_bits(shape: tuple[int, int], generator: torch.Generator) -> None:
    """What load_e2m1_fragment of cutlass_ext/fragment/fp8_weight.h reads: of integers the words tell the places."""
    codes = random_codes(*shape, generator)
    data = layout.pack_bytes(codes, 4, layout.TILED_FP8, codes=True)
    assert torch.equal(layout.unpack_bytes(data, *shape, 4, layout.TILED_FP8, codes=True), codes)
    of_magnitudes = layout.pack_bytes(codes & 7, 4, layout.TILED_FP8)  # nibble 2c + h is twice the number of (c, h)
    of_signs = layout.pack_bytes(codes >> 3, 4, layout.TILED_FP8)
    words, magnitudes, signs = (t.view(torch.int32).long() & 0xFFFFFFFF for t in (data, of_magnitudes, of_signs))
    for c, h in itertools.product(range(4), range(2)):
        of_column, sign_bit = words >> (16 * h), 8 * c + 7 - 4 * h
        assert torch.equal(of_column >> (4 * c) & 7, magnitudes >> (8 * c + 4 * h + 1) & 7)
        assert torch.equal(words >> sign_bit & 1, signs >> (8 * c + 4 * h + 1) & 1)


@pytest.mark.parametrize("shape", PADDED_SHAPES, ids=lambda s: f"{s[0]}x{s[1]}")
def test_closed_form_of_codes(shape: tuple[int, int], generator: torch.Generator) -> None:
    codes = random_codes(*shape, generator)
    data = layout.pack_bytes(codes, 4, layout.TILED, codes=True)
    assert torch.equal(data, brute_force_codes(codes))
    assert torch.equal(layout.unpack_bytes(data, *shape, 4, layout.TILED, codes=True), codes)
    data = layout.pack_bytes(codes, 4, layout.CPU, codes=True)
    assert torch.equal(data, brute_force_cpu(codes, 4))
    assert torch.equal(layout.unpack_bytes(data, *shape, 4, layout.CPU, codes=True), codes)


def test_first_bytes_of_codes() -> None:
    """Lane 0 of the first fragment, by hand: bytes of rows (0, 1) and (8, 9) of columns 0 and 1, then 16 rows on."""
    k, n = torch.arange(64)[:, None], torch.arange(64)[None, :]
    data = layout.pack_bytes(((k + 5 * n) % 16).to(torch.int8), 4, layout.TILED, codes=True)
    assert [f"{byte:02x}" for byte in data[:8].tolist()] == ["10", "65", "98", "ed", "10", "65", "98", "ed"]
    # lane 1 begins at row 2, lane 4 at column 8, the next fragment at column 2
    assert [f"{int(data[at]):02x}" for at in (16, 64, 512)] == ["32", "98", "ba"]


@bits_4_and_8
@pytest.mark.parametrize("name", layout.LAYOUTS)
def test_round_trip_of_every_pass_and_layout(bits: int, name: str, generator: torch.Generator) -> None:
    q = random_q(192, 320, bits, generator)
    assert torch.equal(interleaved.unpermute_rows(interleaved.permute_rows(q, bits), bits), q)
    assert torch.equal(interleaved.untranspose(interleaved.transpose(q)), q)
    assert torch.equal(interleaved.deinterleave_columns(interleaved.interleave_columns(q.t(), bits), bits), q.t())
    assert torch.equal(tiled.untile_fragments(tiled.tile_fragments(q, bits), bits), q)
    assert torch.equal(words.remove_bias_and_deinterleave(words.add_bias_and_interleave(q, bits), bits), q)
    assert torch.equal(layout.unpack_bytes(layout.pack_bytes(q, bits, name), 192, 320, bits, name), q)


@bits_4_and_8
def test_permute_rows_table(bits: int) -> None:
    block = 128 // bits
    q = torch.arange(128, dtype=torch.int8)[:, None].expand(128, 32)
    rows = interleaved.permute_rows(q, bits)[:, 0].tolist()
    assert rows == [base + permuted_row(t, bits) for base in range(0, 128, block) for t in range(block)]
    assert rows[:8] == {8: [0, 1, 8, 9, 2, 3, 10, 11], 4: [0, 1, 8, 9, 16, 17, 24, 25]}[bits]


def tiled_words(q: torch.Tensor, bits: int) -> np.ndarray:
    """The 32-bit words of a tiled weight as kernels see them: [panel, block, w, g, t, j], int8 [.., j, i]."""
    k, n = q.shape
    words = layout.pack_bytes(q, bits, layout.TILED).numpy().view("<u4")
    if bits == 4:
        return words.reshape(n // 64, k // 64, 4, 8, 4, 4)
    halves = words.reshape(n // 64, k // 64, 4, 2, 8, 4, 2, 2)  # (panel, block, w, j / 2, g, t, j % 2, i)
    return np.moveaxis(halves, 3, 5).reshape(n // 64, k // 64, 4, 8, 4, 4, 2)


def a_registers(q: torch.Tensor, bits: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Registers 0..3 of m16n8k16's A (the PTX manual's rows and columns) as (low, high) values, unsigned."""
    u = q.numpy().astype(np.int64) + (1 << (bits - 1))
    panel, block, w, g, t, j = np.ix_(*map(range, (q.shape[1] // 64, q.shape[0] // 64, 4, 8, 4, 4)))
    registers = []
    for register in range(4):
        row, column = g + 8 * (register % 2), 2 * t + 8 * (register // 2)  # in the 16 x 16 of A
        n = 64 * panel + 8 * (row % 8) + 2 * w + row // 8
        k = 64 * block + 16 * j + column
        registers.append((u[k, n], u[k + 1, n]))
    return registers


def test_masks_of_an_int4_word_are_the_a_registers(generator: torch.Generator) -> None:
    q = random_q(128, 192, 4, generator)
    words = tiled_words(q, 4)
    for register, (low, high) in enumerate(a_registers(q, 4)):
        shifted = words >> (8 * (register // 2))
        masked = shifted & 0x00F000F0 if register % 2 else shifted & 0x000F000F
        unit = 16 if register % 2 else 1
        assert np.array_equal(masked, unit * (low + (high << 16)))


def test_bytes_of_an_int8_word_are_the_a_registers(generator: torch.Generator) -> None:
    q = random_q(128, 192, 8, generator)
    words = tiled_words(q, 8)
    for register, (low, high) in enumerate(a_registers(q, 8)):
        masked = words[..., register // 2] >> (8 * (register % 2)) & 0x00FF00FF
        assert np.array_equal(masked, low + (high << 16))


def test_bytes_of_a_word_of_codes_are_the_a_registers(generator: torch.Generator) -> None:
    codes = random_codes(128, 192, generator)
    data = layout.pack_bytes(codes, 4, layout.TILED, codes=True).numpy()
    registers = data.reshape(3, 2, 4, 8, 4, 4, 4)  # (panel, block, w, g, t, j, register)
    for register, (low, high) in enumerate(a_registers(codes - 8, 4)):
        assert np.array_equal(registers[..., register], low + 16 * high)


@pytest.mark.parametrize("name", layout.LAYOUTS)
def test_passes_leave_their_input_alone(name: str, generator: torch.Generator) -> None:
    q = random_q(64, 64, 4, generator)
    before = q.clone()
    layout.pack_bytes(q, 4, name)
    assert torch.equal(q, before)


def test_packing_codes_leaves_them_alone(generator: torch.Generator) -> None:
    codes = random_codes(64, 64, generator)
    before = codes.clone()
    layout.pack_bytes(codes, 4, layout.TILED, codes=True)
    assert torch.equal(codes, before)
    for view in (codes.t(), codes.repeat(1, 2)[:, 3:67], codes.repeat(2, 1)[::2]):
        packed = layout.pack_bytes(view, 4, layout.TILED, codes=True)
        assert torch.equal(packed, layout.pack_bytes(view.contiguous(), 4, layout.TILED, codes=True))


@bits_4_and_8
@pytest.mark.parametrize("name", layout.LAYOUTS)
def test_strided_input(bits: int, name: str, generator: torch.Generator) -> None:
    q = random_q(128, 64, bits, generator)
    for view in (q.t(), q.repeat(1, 2)[:, 3:67], q.repeat(2, 1)[::2]):
        assert torch.equal(layout.pack_bytes(view, bits, name), layout.pack_bytes(view.contiguous(), bits, name))


@bits_4_and_8
@pytest.mark.parametrize(
    ("name", "columns"),
    [
        *((name, c) for name in layout.LAYOUTS for c in ((0, 64), (64, 192), (128, 192), (0, 192))),
        *((name, c) for name in ("row_major", "interleaved") for c in ((0, 8), (8, 24), (56, 64))),
    ],
    ids=str,
)
def test_unpack_some_columns(bits: int, name: str, columns: tuple[int, int], generator: torch.Generator) -> None:
    q = random_q(128, 192, bits, generator)
    got = layout.unpack_bytes(layout.pack_bytes(q, bits, name), 128, 192, bits, name, columns)
    assert torch.equal(got, q[:, columns[0] : columns[1]])


@pytest.mark.parametrize("columns", [(0, 64), (64, 192), (0, 192)], ids=str)
def test_unpack_some_columns_of_codes(columns: tuple[int, int], generator: torch.Generator) -> None:
    codes = random_codes(128, 192, generator)
    data = layout.pack_bytes(codes, 4, layout.TILED, codes=True)
    got = layout.unpack_bytes(data, 128, 192, 4, layout.TILED, columns, codes=True)
    assert torch.equal(got, codes[:, columns[0] : columns[1]])


BAD_CALLS: dict[str, tuple[Callable[[torch.Tensor], object], type[Exception], str]] = {
    "bits": (lambda q: interleaved.permute_rows(q, 5), ValueError, "bits: expected 4 or 8, got 5"),
    "dtype": (
        lambda q: interleaved.permute_rows(q.int(), 4),
        TypeError,
        "q: expected dtype torch.int8, got torch.int32",
    ),
    "not a tensor": (
        lambda q: interleaved.transpose(q.tolist()),  # type: ignore[arg-type]
        TypeError,
        "q: expected a tensor, got list",
    ),
    "rank": (lambda q: interleaved.permute_rows(q[None], 4), ValueError, r"got shape \[1, 64, 64\]"),
    "rows": (lambda q: interleaved.permute_rows(q[:40], 4), ValueError, "multiple of 32, got 40"),
    "inverse rows": (lambda q: interleaved.unpermute_rows(q[:40], 4), ValueError, "multiple of 32, got 40"),
    "interleaved k": (
        lambda q: interleaved.interleave_columns(q[:, :32], 8),
        ValueError,
        "multiple of 64, got 32",
    ),
    "interleaved n": (lambda q: interleaved.interleave_columns(q[:2], 4), ValueError, "multiple of 4, got 2"),
    "tiled k": (lambda q: tiled.tile_fragments(q[:48], 4), ValueError, "rows of q: expected a multiple of 64, got 48"),
    "tiled n": (lambda q: tiled.tile_fragments(q[:, :32], 8), ValueError, "columns of q: .* of 64, got 32"),
    "tiled bits": (lambda q: tiled.tile_fragments(q, 2), ValueError, "bits: expected 4 or 8, got 2"),
    "panel": (lambda q: tiled.untile_fragments(q, 4), ValueError, "columns of q: .* of 4096, got 64"),
    "line": (lambda q: interleaved.deinterleave_columns(q, 8), ValueError, "multiple of 128, got 64"),
    "word": (lambda q: words.add_bias_and_interleave(q[:, :12], 4), ValueError, "multiple of 8, got 12"),
    "bytes": (lambda q: words.remove_bias_and_deinterleave(q, 4), ValueError, "expected uint8"),
    "odd codes": (lambda q: words.pack_codes(q[:, :3]), ValueError, "columns of q: expected a multiple of 2, got 3"),
    "large code": (lambda q: words.pack_codes(q + 16), ValueError, r"q: expected codes in 0\.\.15, got 16\.\.16"),
    "negative code": (
        lambda q: layout.pack_bytes(q - 1, 4, "tiled", codes=True),
        ValueError,
        r"q: expected codes in 0\.\.15, got -1\.\.-1",
    ),
    "layout of codes": (
        lambda q: layout.pack_bytes(q, 4, "row_major", codes=True),
        ValueError,
        "layout: expected 'interleaved' or 'tiled' or 'cpu' for codes of a codebook, got 'row_major'",
    ),
    "bits of codes": (
        lambda q: layout.unpack_bytes(q.view(torch.uint8), 64, 64, 2, "tiled", codes=True),
        ValueError,
        "bits: expected 4 or 8, got 2",
    ),
    "bytes of codes": (words.unpack_codes, ValueError, r"data: expected uint8 \[rows, bytes\], got torch.int8"),
    "too large": (
        lambda q: words.add_bias_and_interleave(q + 8, 4),
        ValueError,
        r"-8\.\.7 for bits=4, got 8\.\.8",
    ),
    "too small": (
        lambda q: layout.pack_bytes(q - 9, 4, "row_major"),
        ValueError,
        r"-8\.\.7 for bits=4, got -9\.\.-9",
    ),
    "unpadded": (lambda q: layout.pack_bytes(q[:, :32], 4, "row_major"), ValueError, r"got \[64, 32\]"),
    "unpadded int8": (
        lambda q: layout.pack_bytes(q[:, :32], 8, "tiled"),
        ValueError,
        r"q: expected K a multiple of 64 and N of 64, got \[64, 32\]",
    ),
    "padding of a layout": (
        lambda q: layout.padded_shape(1, 1, 4, "tiles"),
        ValueError,
        "layout: expected one of row_major, interleaved, tiled, cpu, tiled_fp8, got 'tiles'",
    ),
    "layout": (
        lambda q: layout.pack_bytes(q, 4, "tiles"),
        ValueError,
        "layout: expected one of row_major, interleaved, tiled, cpu, tiled_fp8, got 'tiles'",
    ),
    "8 bits for x in 8 bits": (
        lambda q: layout.pack_bytes(q, 8, layout.TILED_FP8),
        ValueError,
        "layout: expected one of row_major, interleaved, tiled, cpu for 8 bits, got 'tiled_fp8'",
    ),
    "codes for x in 8 bits": (
        lambda q: layout.pack_bytes(q * 0 + 16, 4, layout.TILED_FP8, codes=True),
        ValueError,
        r"q: expected codes in 0\.\.15, got 16\.\.16",
    ),
    "range for x in 8 bits": (
        lambda q: layout.pack_bytes(q * 0 + 9, 4, layout.TILED_FP8),
        ValueError,
        r"-8\.\.7 for bits=4, got 9\.\.9",
    ),
    "columns": (
        lambda q: layout.unpack_bytes(layout.pack_bytes(q, 4, "row_major"), 64, 64, 4, "row_major", (0, 12)),
        ValueError,
        r"columns: expected multiples of 8 within 0..64, got \(0, 12\)",
    ),
    "tiled columns": (
        lambda q: layout.unpack_bytes(layout.pack_bytes(q, 8, "tiled"), 64, 64, 8, "tiled", (0, 32)),
        ValueError,
        r"columns: expected multiples of 64 within 0..64, got \(0, 32\)",
    ),
    "no columns": (
        lambda q: layout.unpack_bytes(layout.pack_bytes(q, 4, "tiled"), 64, 64, 4, "tiled", (64, 64)),
        ValueError,
        r"columns: expected multiples of 64 within 0..64, got \(64, 64\)",
    ),
    "columns beyond N": (
        lambda q: layout.unpack_bytes(layout.pack_bytes(q, 4, "tiled"), 64, 64, 4, "tiled", (0, 128)),
        ValueError,
        r"columns: expected multiples of 64 within 0..64, got \(0, 128\)",
    ),
}


@pytest.mark.parametrize("case", BAD_CALLS)
def test_bad_input(case: str) -> None:
    call, error, message = BAD_CALLS[case]
    with pytest.raises(error, match=message):
        call(torch.zeros(64, 64, dtype=torch.int8))


@pytest.mark.gpu
@bits_4_and_8
@pytest.mark.parametrize("name", layout.LAYOUTS)
def test_same_bytes_on_the_gpu(bits: int, name: str, cuda_device: torch.device, generator: torch.Generator) -> None:
    q = random_q(256, 320, bits, generator)
    data = layout.pack_bytes(q.to(cuda_device), bits, name)
    assert data.device == cuda_device
    assert torch.equal(data.cpu(), layout.pack_bytes(q, bits, name))
    assert torch.equal(layout.unpack_bytes(data, 256, 320, bits, name).cpu(), q)


@pytest.mark.gpu
def test_same_bytes_of_codes_on_the_gpu(cuda_device: torch.device, generator: torch.Generator) -> None:
    codes = random_codes(256, 320, generator)
    data = layout.pack_bytes(codes.to(cuda_device), 4, layout.TILED, codes=True)
    assert torch.equal(data.cpu(), layout.pack_bytes(codes, 4, layout.TILED, codes=True))
    assert torch.equal(layout.unpack_bytes(data, 256, 320, 4, layout.TILED, codes=True).cpu(), codes)
