"""Headers of safetensors files: what the safetensors package refuses is refused here, too, in bounded time."""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError, safe_open

import weightonly as wo
from weightonly.formats.shards import read_header

ENTRY = '{"dtype":"U8","shape":[8],"data_offsets":[0,8]}'
NEXT = '{"dtype":"U8","shape":[8],"data_offsets":[8,16]}'


def write(path: Path, header: str | bytes, data_bytes: int = 8) -> Path:
    content = header.encode() if isinstance(header, str) else header
    path.write_bytes(struct.pack("<Q", len(content)) + content + bytes(range(data_bytes)))
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "model.safetensors"


# name -> (header, bytes of data, what the error says)
REFUSED: dict[str, tuple[str | bytes, int, str]] = {
    "overlap": (f'{{"a":{ENTRY},"b":{ENTRY}}}', 8, "b: expected to begin at byte .*, where the tensor before it ends"),
    "hole": (f'{{"b":{NEXT}}}', 16, "b: expected to begin at byte"),
    "hole inside": (
        f'{{"a":{ENTRY},"b":{{"dtype":"U8","shape":[1],"data_offsets":[9,10]}}}}',
        10,
        "b: expected to begin at byte",
    ),
    "trailing bytes": (f'{{"a":{ENTRY}}}', 9, "expected .* bytes, up to the end of the last tensor, got"),
    "one name twice": (f'{{"a":{ENTRY},"a":{ENTRY}}}', 8, "'a' is there twice"),
    "one field twice": (
        '{"a":{"dtype":"U8","dtype":"I8","shape":[8],"data_offsets":[0,8]}}',
        8,
        "'dtype' is there twice",
    ),
    "UTF-16": (f'{{"a":{ENTRY}}}'.encode("utf-16-le"), 8, "expected a safetensors header, got no JSON"),
    "byte order mark": (b"\xef\xbb\xbf" + f'{{"a":{ENTRY}}}'.encode(), 8, "got no JSON"),
    "lone surrogate": (f'{{"\\ud800":{ENTRY}}}', 8, "expected a safetensors header, got no JSON"),
    "lone surrogate in another field": (
        '{"a":{"dtype":"U8","shape":[8],"data_offsets":[0,8],"x":"\\ud800"}}',
        8,
        "expected a safetensors header, got no JSON",
    ),
    "true as a size": ('{"a":{"dtype":"U8","shape":[true,8],"data_offsets":[0,8]}}', 8, "a: expected dtype, shape"),
    "false as an offset": ('{"a":{"dtype":"U8","shape":[8],"data_offsets":[false,8]}}', 8, "a: expected dtype, shape"),
    "float as a size": ('{"a":{"dtype":"U8","shape":[8.0],"data_offsets":[0,8]}}', 8, "a: expected dtype, shape"),
    "object as a shape": ('{"a":{"dtype":"U8","shape":{"8":8},"data_offsets":[0,8]}}', 8, "a: expected dtype, shape"),
    "list as a dtype": ('{"a":{"dtype":["U8"],"shape":[8],"data_offsets":[0,8]}}', 8, "a: expected a dtype of"),
    "NaN": ('{"a":{"dtype":"U8","shape":[8],"data_offsets":[0,8],"x":NaN}}', 8, "NaN is no JSON"),
    "numbers in metadata": (
        f'{{"__metadata__":{{"x":1}},"a":{ENTRY}}}',
        8,
        "__metadata__: expected an object of strings",
    ),
    "no metadata but false": (
        f'{{"__metadata__":false,"a":{ENTRY}}}',
        8,
        "__metadata__: expected an object of strings",
    ),
    "nested": ("[" * 5000 + "]" * 5000, 0, "expected a safetensors header, got no JSON|JSON of another kind"),
    "nested objects": ('{"a":' * 100_000, 0, "got no JSON"),
    "a size that no tensor has": (
        f'{{"a":{ENTRY},"b":{{"dtype":"U8","shape":[9223372036854775808,0],"data_offsets":[8,8]}}}}',
        8,
        "b: expected a shape that PyTorch can have",
    ),
    "a size that no tensor has, behind a 0": (
        f'{{"a":{ENTRY},"b":{{"dtype":"U8","shape":[0,9223372036854775808],"data_offsets":[8,8]}}}}',
        8,
        "b: expected a shape that PyTorch can have",
    ),
    "more bytes than the shape has": (
        '{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,8]}}',
        8,
        r"a: expected 4 bytes for U8 \[4\], got 8",
    ),
    "sizes that overflow": (
        '{"a":{"dtype":"U8","shape":[4294967296,4294967296,8],"data_offsets":[0,8]}}',
        8,
        "a: expected a shape that PyTorch can have",
    ),
    "many large sizes": (
        '{"a":{"dtype":"U8","shape":[' + ",".join([str(2**60)] * 1_000_000) + '],"data_offsets":[0,8]}}',
        8,
        "a: expected a shape that PyTorch can have",
    ),
    "many dimensions": (
        '{"a":{"dtype":"U8","shape":[' + ",".join(["1"] * 1000) + '],"data_offsets":[0,1]}}',
        1,
        "a: expected a shape that PyTorch can have",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_strange_header_is_refused(case: str, file: Path) -> None:
    header, data_bytes, message = REFUSED[case]
    write(file, header, data_bytes)
    with pytest.raises(ValueError, match=rf"^{file}: .*({message})"):
        wo.load_checkpoint(file.parent)


# What the package reads, too.
READ = {
    "spaces around it": (f'  {{"a":{ENTRY}}}\n  ', 8),
    "other fields": ('{"a":{"dtype":"U8","shape":[8],"data_offsets":[0,8],"x":[1]}}', 8),
    "no metadata": (f'{{"__metadata__":null,"a":{ENTRY}}}', 8),
    "an empty tensor at the end": (f'{{"a":{ENTRY},"b":{{"dtype":"U8","shape":[0,3],"data_offsets":[8,8]}}}}', 8),
    "an empty tensor between": (
        f'{{"a":{ENTRY},"c":{NEXT},"b":{{"dtype":"U8","shape":[0],"data_offsets":[8,8]}}}}',
        16,
    ),
    "a scalar": ('{"a":{"dtype":"F64","shape":[],"data_offsets":[0,8]}}', 8),
    "no tensor": ("{}", 0),
}


@pytest.mark.parametrize("case", READ)
def test_an_unusual_header_is_read(case: str, file: Path) -> None:
    write(file, *READ[case])
    with safe_open(file, "pt") as opened:
        assert set(read_header(file)[0]) == set(opened.keys())


def _sample(draw: random.Random) -> tuple[str, int]:
    """A header that is nearly right: some entries that tile the data, with one number or word changed."""
    entries, at = {}, 0
    for name in draw.sample(["a", "b", "c", "d", ""], draw.randrange(1, 5)):
        shape = [draw.choice([0, 1, 2, 3]) for _ in range(draw.randrange(3))]
        size = 4
        for extent in shape:
            size *= extent
        entries[name] = {"dtype": draw.choice(["F32", "I32"]), "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(entries)
    for _ in range(draw.randrange(3)):
        place = draw.randrange(len(text))
        text = (
            text[:place] + draw.choice(["0", "1", "4", "8", "12", '"', ",", "{", "}", "-", "a", ""]) + text[place + 1 :]
        )
    return text, max(0, at + draw.choice([0, 0, 0, 0, 1, -1, 4]))


def test_no_header_is_read_that_the_package_refuses(file: Path, seed: int) -> None:
    draw, both, neither = random.Random(seed), 0, 0
    for _ in range(3000):
        write(file, *_sample(draw))
        try:
            with safe_open(file, "pt") as opened:
                theirs = set(opened.keys())
        except SafetensorError:
            neither += 1
            with pytest.raises(ValueError, match=rf"^{file}: "):
                read_header(file)
        else:
            try:
                ours = set(read_header(file)[0])
            except ValueError as error:
                assert "is there twice" in str(error) or "expected a shape that PyTorch can have" in str(error)  # noqa: PT017
            else:
                both += 1
                assert ours == theirs
    assert both > 500 and neither > 500


def test_values_come_as_the_package_reads_them(file: Path) -> None:
    torch.manual_seed(1)
    from safetensors.torch import save_file

    from weightonly.formats.shards import Shards

    stored = {"b": torch.randn(3, 4).half(), "a": torch.randint(0, 9, (5,)), "c": torch.empty(0, 2)}
    save_file(stored, file)
    shards = Shards(file.parent)
    assert set(shards.tensors) == set(stored)
    assert all(torch.equal(shards.read(name), tensor) for name, tensor in stored.items())
