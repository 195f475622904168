"""Damaged GGUF files, and such that are not read: errors by name, in little time and memory."""

from __future__ import annotations

import resource
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import pytest
from tests.gguf_files import tiny_model, write_gguf

from weightonly import __main__ as command
from weightonly.formats import open_checkpoint
from weightonly.formats.gguf_header import read_gguf_header
from weightonly.hf import load_model

HUGE = 1 << 60

Tensor = tuple[str, tuple[int, ...], int, int]
"""Name, dimensions with the fastest first, number of the type, offset."""


def text(value: str | bytes, length: int | None = None) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data) if length is None else length) + data


def entry(tensor: Tensor) -> bytes:
    name, dims, kind, offset = tensor
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def header(
    values: list[bytes],
    tensors: list[Tensor],
    version: int = 3,
    tensor_count: int | None = None,
    value_count: int | None = None,
    magic: bytes = b"GGUF",
) -> bytes:
    counts = (
        len(tensors) if tensor_count is None else tensor_count,
        len(values) if value_count is None else value_count,
    )
    return magic + struct.pack("<IQQ", version, *counts) + b"".join(values) + b"".join(map(entry, tensors))


ARCH = text("general.architecture") + struct.pack("<I", 8) + text("llama")
A: Tensor = ("token_embd.weight", (32, 4), 0, 0)
B: Tensor = ("output_norm.weight", (32,), 0, 512)

HEADERS: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "its first bytes: expected 4 more bytes of the header, got 0 of at most"),
    "another file": (header([ARCH], [A], magic=b"PK\3\4"), "expected a GGUF file, got other first bytes"),
    "version 1": (header([ARCH], [A], version=1), "expected GGUF of version 2 or 3, little endian, got version 1"),
    "big endian": (header([ARCH], [A], version=3 << 24), "little endian, got version 50331648"),
    "tensor count": (
        header([ARCH], [A], tensor_count=HUGE),
        f"expected a header of at most 65536 .*got {HUGE} tensors",
    ),
    "value count": (header([ARCH], [A], value_count=HUGE), f"expected a header of at most 65536 .*and {HUGE} values"),
    "more tensors": (header([ARCH], [A], tensor_count=9), "expected printable names of keys and tensors, got ''"),
    "more values": (header([ARCH], [], value_count=9), "expected printable names of keys and tensors, got ''"),
    "long key": (header([text("x", HUGE)], [A]), f"key 0 of 1: expected {HUGE} more bytes of the header"),
    "long text": (header([text("x") + struct.pack("<I", 8) + text("x", HUGE)], [A]), f"x: expected {HUGE} more bytes"),
    "long array": (header([text("x") + struct.pack("<IIQ", 9, 10, HUGE)], [A]), f"x: expected {8 * HUGE} more bytes"),
    "array of texts": (header([text("x") + struct.pack("<IIQ", 9, 8, HUGE)], [A]), "x: expected .* more bytes"),
    "nested array": (header([text("x") + struct.pack("<IIQ", 9, 9, 1)], [A]), "x: .* no arrays of arrays, got 9"),
    "unknown value": (
        header([text("x") + struct.pack("<I", 13)], [A]),
        "x: expected a type of value 0 to 12, .*got 13",
    ),
    "no UTF-8": (header([text(b"\xff\xfe")], [A]), "key 0 of 1: expected UTF-8"),
    "control in a key": (header([text("a\x1b[2J") + b"\0\0\0\0\0"], [A]), r"printable names .* got 'a\\x1b\[2J'"),
    "control in a name": (header([ARCH], [("a\nb", (32,), 0, 0)]), r"printable names .* got 'a\\nb'"),
    "key twice": (header([ARCH, ARCH], [A]), "general.architecture: expected once in the header, got it twice"),
    "name twice": (header([ARCH], [A, A]), "token_embd.weight: expected one tensor of this name, got two"),
    "no dimensions": (header([ARCH], [("a", (), 0, 0)]), "a: expected 1 to 4 dimensions, got 0"),
    "dimensions": (header([ARCH], [("a", (1,) * 5, 0, 0)]), "a: expected 1 to 4 dimensions, got 5"),
    "elements": (header([ARCH], [("a", (HUGE, HUGE), 0, 0)]), r"a: expected a shape of 1 to 2\^62 elements"),
    "no elements": (header([ARCH], [("a", (32, 0), 0, 0)]), r"a: expected a shape of 1 .*got \[0, 32\]"),
    "unknown type": (header([ARCH], [("a", (32,), 1000, 0)]), "a: expected a type of GGML .*got number 1000"),
    "blocks": (
        header([ARCH], [("a", (48, 2), 12, 0)]),
        r"a: expected rows of whole blocks of 256 for Q4_K, got \[2, 48\]",
    ),
    "offset": (header([ARCH], [A, ("a", (32,), 0, 513)]), "a: expected an offset that is a multiple of 32, got 513"),
    "beyond": (
        header([ARCH], [("a", (32,), 0, HUGE)]),
        f"a: expected {HUGE + 256} bytes up to its end, got .*truncated",
    ),
    "large": (header([ARCH], [("a", (1 << 40,), 0, 0)]), r"a: expected \d{13} bytes up to its end, got .*truncated"),
    "overlap": (header([ARCH], [A, ("a", (32,), 0, 480)]), "a: expected to begin after token_embd.weight ends"),
    "alignment": (
        header([ARCH, text("general.alignment") + struct.pack("<II", 4, 24)], [A]),
        "general.alignment: expected a power of two, got 24",
    ),
    "no alignment": (
        header([ARCH, text("general.alignment") + struct.pack("<II", 4, 0)], [A]),
        "general.alignment: expected a power of two, got 0",
    ),
}


@pytest.fixture
def bounded() -> Iterator[None]:
    """No test here takes long, or much memory."""
    started, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert time.process_time() - started < 20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10


@pytest.mark.usefixtures("bounded")
@pytest.mark.parametrize("case", HEADERS)
def test_headers(case: str, tmp_path: Path) -> None:
    data, message = HEADERS[case]
    (tmp_path / "x.gguf").write_bytes(data + b"\0" * (640 if data else 0))
    with pytest.raises(ValueError, match=message) as caught:
        open_checkpoint(tmp_path / "x.gguf")
    assert str(caught.value).startswith(f"{tmp_path / 'x.gguf'}: ")


def test_a_good_header(tmp_path: Path) -> None:
    """What the cases above begin with is read, and gguf's reader agrees."""
    data = header([ARCH, text("x") + struct.pack("<IIQ", 9, 8, 2) + text("a") + text("")], [A, B])
    (tmp_path / "x.gguf").write_bytes(data + b"\0" * 1024)
    found, theirs = read_gguf_header(tmp_path / "x.gguf"), gguf.GGUFReader(tmp_path / "x.gguf")
    assert [(t.name, t.type, list(t.shape), t.begin, t.bytes) for t in found.tensors] == [
        (t.name, t.tensor_type.name, t.shape.tolist()[::-1], t.data_offset, t.n_bytes) for t in theirs.tensors
    ]


def test_every_cut(tmp_path: Path) -> None:
    """A file that ends too early is refused, wherever that is."""
    write_gguf(tmp_path / "x.gguf", tiny_model("qwen2"), "Q8_0")
    data, file = (tmp_path / "x.gguf").read_bytes(), tmp_path / "cut.gguf"
    first = min(tensor.begin for tensor in read_gguf_header(tmp_path / "x.gguf").tensors)
    for end in (*range(0, first, 61), first, (first + len(data)) // 2, len(data) - 33):
        file.write_bytes(data[:end])
        with pytest.raises(ValueError, match=r"cut\.gguf: "):
            open_checkpoint(file)


@pytest.mark.usefixtures("bounded")
def test_a_large_sparse_file(tmp_path: Path) -> None:
    """Counts are believed no further than the longest header, whatever the size of the file."""
    with (tmp_path / "x.gguf").open("wb") as stream:
        stream.write(header([text("x") + struct.pack("<IIQ", 9, 8, HUGE)], [A]))
        stream.truncate(1 << 40)
    with pytest.raises(
        ValueError, match=r"x: expected \d+ more bytes of the header, got \d+ of at most 100000000: it is damaged"
    ):
        open_checkpoint(tmp_path / "x.gguf")


def rewritten(source: Path, change: Callable[[str, Any], tuple[str, Any] | None], kind: str = "Q8_0") -> Path:
    """A copy of a file with other metadata. change: (key, value) -> those that it gets, or None to leave them out."""
    reader, target = gguf.GGUFReader(source), source.with_name("changed.gguf")
    writer = gguf.GGUFWriter(target, "x")
    writer.kv_data[0].clear()
    for key, field in reader.fields.items():
        found = None if key.startswith("GGUF.") else change(key, field.contents())
        if found is not None:
            kind_of = {
                str: gguf.GGUFValueType.STRING,
                float: gguf.GGUFValueType.FLOAT32,
                list: gguf.GGUFValueType.ARRAY,
            }
            writer.add_key_value(*found, kind_of.get(type(found[1]), gguf.GGUFValueType.UINT32))
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("good") / "x.gguf"
    write_gguf(file, tiny_model("mixtral"), "Q8_0")
    return file


METADATA: dict[str, tuple[str, Any, str]] = {
    "no architecture": ("general.architecture", None, "general.architecture: expected one of llama, .*got None"),
    "architecture": ("general.architecture", "mamba", "general.architecture: expected one of llama, .*got 'mamba'"),
    "number as architecture": ("general.architecture", 3, "general.architecture: expected str, got 3"),
    "no layers": ("llama.block_count", None, "llama.block_count: expected a number .*got none"),
    "text as layers": ("llama.block_count", "two", "llama.block_count: expected int, got 'two'"),
    "array as width": (
        "llama.feed_forward_length",
        [512, 512],
        r"llama.feed_forward_length: expected int, got Array\(count=2\)",
    ),
    "many layers": ("llama.block_count", 3_000_000_000, r"llama.block_count: expected a number from 1 to 2\^20"),
    "other layers": (
        "llama.block_count",
        1000,
        "llama.block_count: expected 2, the layers that have tensors, got 1000",
    ),
    "no heads": ("llama.attention.head_count", 0, r"llama.attention.head_count: expected a number from 1"),
    "odd heads": ("llama.attention.head_count", 100, "blk.0.attn_q.weight: expected rows of 100 heads, two by two"),
    "no epsilon": (
        "llama.attention.layer_norm_rms_epsilon",
        None,
        "layer_norm_rms_epsilon: expected a number .*got none",
    ),
    "value heads": (
        "llama.attention.value_length",
        32,
        "llama.attention.value_length: expected 64, as a head has, got 32",
    ),
    "partial rotary": ("llama.rope.dimension_count", 32, "llama.rope.dimension_count: expected 64, as a head has"),
    "experts": (
        "llama.expert_count",
        8,
        r"blk.0.ffn_gate_exps.weight: expected a shape of 8 experts, N and K, got \[4,",
    ),
    "no chosen experts": ("llama.expert_used_count", None, "llama.expert_used_count: expected a number .*got none"),
    "no experts": ("llama.expert_count", None, r"_exps.weight: expected a shape of 0 experts"),
    "scale": ("+llama.attention.scale", 0.5, "llama.attention.scale: expected none, or 1, .*got 0.5"),
    "rope scaling": ("+llama.rope.scaling.type", "longrope", "llama.rope.scaling.type: expected none, linear or yarn"),
    "rope factor": ("+llama.rope.scaling.type", "yarn", "with a factor, got 'yarn'"),
    "rope entry": (
        "+llama.rope.scaling.attn_factor",
        1.5,
        "llama.rope.scaling.attn_factor: expected none, as it is not",
    ),
    "token": ("tokenizer.ggml.eos_token_id", "</s>", "tokenizer.ggml.eos_token_id: expected int, got '</s>'"),
    "parts": ("+split.count", 3, r"expected the first file of 3, NAME-00001-of-00003\.gguf, got another name"),
}


@pytest.mark.usefixtures("bounded")
@pytest.mark.parametrize("case", METADATA)
def test_metadata(case: str, good: Path) -> None:
    name, value, message = METADATA[case]
    added = name.startswith("+")

    def change(key: str, old: Any) -> tuple[str, Any] | None:
        if added:
            return (name[1:], value) if key == "tokenizer.ggml.bos_token_id" else (key, old)
        return (key, old) if key != name else None if value is None else (key, value)

    file = rewritten(good, change)
    with pytest.raises(ValueError, match=message) as caught:
        open_checkpoint(file)
    assert str(caught.value).startswith(f"{file}: ")


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "IQ2_XS", "IQ3_S", "TQ1_0", "NVFP4"])
def test_types_that_are_not_read(kind: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "x.gguf", tiny_model("llama"), {"ffn_down": kind, "": "Q8_0"})
    expected = r"blk\.0\.ffn_down\.weight: expected F32, F16, BF16, Q4_0, .*MXFP4, which are read, got " + kind
    with pytest.raises(ValueError, match=expected):
        open_checkpoint(tmp_path / "x.gguf")


@pytest.mark.parametrize("name", ["blk.0.ssm_conv1.weight", "v_blk.attn_norm.weight", "blk.0.attn_norm.scales"])
def test_names_that_are_not_known(name: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "x.gguf", tiny_model("llama"), "Q8_0")
    data, old = (tmp_path / "x.gguf").read_bytes(), b"blk.0.attn_norm.weight"
    assert data.count(old) == 1 and len(old) == len(name)
    (tmp_path / "x.gguf").write_bytes(data.replace(old, name.encode()))
    with pytest.raises(ValueError, match=rf"x\.gguf: {name}: expected a tensor of llama, as package gguf names them"):
        open_checkpoint(tmp_path / "x.gguf")


def test_wrong_shapes(tmp_path: Path) -> None:
    """The model that the metadata describe has other layers: an error before a weight is read."""
    write_gguf(
        tmp_path / "x.gguf", tiny_model("qwen3", intermediate_size=768), "Q8_0", {"qwen3.feed_forward_length": 512}
    )
    with pytest.raises(ValueError, match=r"mlp.\w+_proj: expected K x N = .* as the model's config says, got"):
        load_model(tmp_path / "x.gguf")


def test_missing_tensors(tmp_path: Path) -> None:
    write_gguf(tmp_path / "x.gguf", tiny_model("llama"), "Q8_0")
    (tmp_path / "y.gguf").write_bytes(
        (tmp_path / "x.gguf").read_bytes().replace(b"blk.1.ffn_up.weight", b"blk.1.ffn_up.bias__")
    )
    with pytest.raises(ValueError, match=r"blk\.1\.ffn_up\.bias__: expected a tensor of llama"):
        load_model(tmp_path / "y.gguf")


def test_nan_scales_of_an_embedding(tmp_path: Path) -> None:
    write_gguf(tmp_path / "x.gguf", tiny_model("llama"), {"token_embd": "MXFP4", "": "Q8_0"})
    tensor = next(t for t in read_gguf_header(tmp_path / "x.gguf").tensors if t.name == "token_embd.weight")
    with (tmp_path / "x.gguf").open("r+b") as stream:
        stream.seek(tensor.begin)
        stream.write(b"\xff")
    with pytest.raises(ValueError, match=r"x\.gguf: model\.embed_tokens\.weight: MXFP4: expected exponents"):
        list(open_checkpoint(tmp_path / "x.gguf").records("cpu", progress=False))


def test_no_tokenizer(good: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["run", str(good), "--prompt", "x"]) == 1
    assert "expected a tokenizer for --prompt, got none; --tokens 1,2,3" in capsys.readouterr().err
    assert command.main(["run", str(good), "--tokens", "1,2", "--max-new-tokens", "2"]) == 0


def test_a_folder_of_its_name(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").mkdir()
    with pytest.raises(FileNotFoundError, match=r"x\.gguf: expected safetensors files, got none"):
        open_checkpoint(tmp_path / "x.gguf")
    with pytest.raises(FileNotFoundError, match=r"y\.gguf: expected the folder"):
        open_checkpoint(tmp_path / "y.gguf")
