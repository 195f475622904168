"""Time and memory of reading are linear in the file, whatever it holds."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import resource
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from weightonly.formats import open_checkpoint
from weightonly.formats.patterns import Budget, Pattern, PatternError
from weightonly.formats.shards import Shards
from weightonly.storage import parse_json

Work = Callable[[], object]


def fails(work: Work, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        work()


def twice(count: int, folder: Path) -> Work:
    """One name twice among many."""
    content = json.dumps({f"n{i}": 0 for i in range(20 * count)}).replace("}", ', "n7": 0}').encode()
    return lambda: fails(lambda: parse_json(content), "'n7' is there twice")


def checkpoint(folder: Path, layers: int, config: dict[str, Any]) -> Work:
    """AWQ's or compressed-tensors' layers of one word, as a folder that is opened."""
    folder.mkdir()
    inside: dict[str, torch.Tensor] = {
        "qweight": torch.zeros(32, 1, dtype=torch.int32),
        "qzeros": torch.zeros(1, 1, dtype=torch.int32),
        "scales": torch.ones(1, 8, dtype=torch.float16),
    }
    if config["quant_method"] == "gptq":
        inside["qweight"] = torch.zeros(4, 8, dtype=torch.int32)
    elif config["quant_method"] == "compressed-tensors":
        inside = {
            "weight_packed": torch.zeros(8, 4, dtype=torch.int32),
            "weight_scale": torch.ones(8, 1, dtype=torch.float16),
            "weight_shape": torch.tensor([8, 32]),
        }
    tensors = {f"l{layer}.{name}": tensor.clone() for layer in range(layers) for name, tensor in inside.items()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
    return lambda: open_checkpoint(folder)


def layers(count: int, folder: Path) -> Work:
    return checkpoint(folder, count, {"quant_method": "awq"})


def files(count: int, folder: Path) -> Work:
    """Each tensor in a file of its own."""
    folder.mkdir()
    for number in range(count):
        (folder / f"{number}.safetensors").touch()
    weight_map = {f"t{number}": f"{number}.safetensors" for number in range(count)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return lambda: Shards(folder)


def patterns(count: int, folder: Path) -> Work:
    dynamic = {rf"+:.*\.l{i}\..*": {"bits": 8} for i in range(20)}
    return checkpoint(folder, count, {"quant_method": "gptq", "bits": 4, "dynamic": dynamic})


WORK: dict[str, tuple[Callable[[int, Path], Work], int]] = {
    "a name twice": (twice, 200),
    "layers": (layers, 500),
    "files": (files, 500),
    "patterns": (patterns, 500),
}


@pytest.mark.parametrize("case", WORK)
def test_eight_times_as_much_takes_eight_times_as_long(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CPU time, the least of three runs. A quadratic one takes 64 times as long."""
    make, count = WORK[case]
    if case == "files":  # what is in a file does not count
        monkeypatch.setattr("weightonly.formats.shards.read_header", lambda file: ({f"t{file.stem}": file}, {}))

    def seconds(count: int) -> float:
        work, taken = make(count, tmp_path / str(count)), []
        for _ in range(3):
            started = time.process_time()
            work()
            taken.append(time.process_time() - started)
        return min(taken)

    assert seconds(8 * count) < 30 * seconds(count)


def test_a_name_twice_among_many_is_found_in_time() -> None:
    """60,000 names took a minute."""
    started = time.process_time()
    twice(3000, Path())()
    assert time.process_time() - started < 5


# --- patterns ------------------------------------------------------------------------------------------------


def classes() -> list[str]:
    """Patterns up to the limit, all of them of different classes."""
    letters = [chr(code) for code in range(33, 123) if chr(code) not in "[\\]^-"]
    made = [f"[{''.join(three)}]" for three in itertools.islice(itertools.combinations(letters, 3), 19_800)]
    return ["".join(made[first : first + 198]) for first in range(0, len(made), 198)]


HOSTILE: dict[str, tuple[list[str], list[str]]] = {
    "dots": (["(.*)" * 240 + "x"], ["a" * 1000] * 20),
    "nested repetitions": (["((a{1,40}){1,40}){1,40}$!", "(a|aa)+$!"], ["a" * 1000] * 20),
    "deep repetitions": (["(?:" * 40 + "a|aa" + "){9,1000}" * 40], ["a" * 1000]),
    "classes": (classes(), ["a" * 1000] * 10),
    "one letter": (["a"] * 49_000, ["b" * 1000] * 500),
    "alternatives": (["(?:" + "|" * 900 + "){900}"] * 100, ["a" * 1000] * 500),
    "counts": (["(?:" + "(a?b)" * 190 + "){99}"] * 100, ["a" * 1000]),
    "the memory of counts": (["a" * 98 + "{900}", "ab?(?:" + "(a?)" * 20 + "){100}"], ["a" * 1000]),
    "captures": (["(?:" + "(a?)" * 240 + ")+[^a]"], ["a" * 1000] * 20),
    "lookaheads": (["(?:(?=.*a)a)*" * 70] * 90, ["a" * 1000] * 500),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_patterns_take_bounded_time_and_memory(case: str) -> None:
    """Building them, and matching them with many names: an error, or a result, after seconds."""
    texts, names = HOSTILE[case]
    budget = Budget(2.0)
    started, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        built = [Pattern(text, budget) for text in texts]
        for name in names:
            for pattern in built:
                pattern.matches_start(name)
    except PatternError as error:
        assert re.search("take too long|at most 100000 characters", str(error))  # noqa: PT017
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10  # regex allocates by itself
    assert time.process_time() - started < 4
    tracemalloc.start()
    try:
        with contextlib.suppress(PatternError):
            budget = Budget(2.0)
            built = [Pattern(text, budget) for text in texts]
            built[0].matches_start(names[0])
        assert tracemalloc.get_traced_memory()[1] < 100e6
    finally:
        tracemalloc.stop()


def gptq(many: list[str]) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": 4, "dynamic": {f"{text}{i}": {} for i, text in enumerate(many)}}


def compressed(many: list[str]) -> dict[str, Any]:
    group = {"targets": [f"re:{text}{i}" for i, text in enumerate(many)], "weights": {"num_bits": 4}}
    return {"quant_method": "compressed-tensors", "config_groups": {"g": group}}


@pytest.mark.parametrize("make", [gptq, compressed])
def test_the_patterns_of_a_config_have_a_limit(make: Callable[[list[str]], dict[str, Any]], tmp_path: Path) -> None:
    """As many as configs have are read."""
    checkpoint(tmp_path / "many", 1, make([r"model\.layers\.17\.mlp\.experts\.up_proj"] * 2000))()
    work = checkpoint(tmp_path / "more", 1, make(["x" * 900] * 3000))
    started = time.process_time()
    fails(work, r"config\.json: .*expected regular expressions, got 'x*.*expected at most 100000 characters in all")
    assert time.process_time() - started < 10


def test_patterns_are_in_ascii() -> None:
    """Classes of all characters take a thousand times as long to compile."""
    with pytest.raises(PatternError, match="expected ASCII characters, got others"):
        Pattern("[\u0100-\U0010ffff]", Budget())


def test_the_groups_of_a_config_have_a_limit(tmp_path: Path) -> None:
    groups = {f"g{i}": {"weights": {"num_bits": 4}} for i in range(101)}
    work = checkpoint(tmp_path / "model", 1, {"quant_method": "compressed-tensors", "config_groups": groups})
    fails(work, "config_groups: expected at most 100 groups, got 101")


# --- memory --------------------------------------------------------------------------------------------------

DENSE = {
    "objects": b"[" + b"{}," * 1_000_000 + b"0]",
    "lists": b"[" + b"[]," * 1_000_000 + b"0]",
    "numbers": b"[" + b"1e9," * 2_000_000 + b"0]",
    "pairs": b"{" + b",".join(b'"%x":0' % i for i in range(1_000_000)) + b"}",
}


@pytest.mark.parametrize("case", DENSE)
def test_many_tiny_values_of_json_are_refused_before_they_are_made(case: str) -> None:
    content = DENSE[case]
    tracemalloc.start()
    try:
        fails(lambda: parse_json(content), r"^it has \d+ brackets, colons and commas, more than the \d+ of \d+ bytes$")
        assert tracemalloc.get_traced_memory()[1] < len(content)
    finally:
        tracemalloc.stop()


def test_a_header_takes_a_small_multiple_of_its_size() -> None:
    """200,000 tensors with names as checkpoints have them are read."""
    entry = {"dtype": "BF16", "shape": [4096, 4096], "data_offsets": [1 << 30, (1 << 30) + (1 << 25)]}
    content = json.dumps({f"model.layers.{i}.mlp.down_proj.weight": entry for i in range(200_000)}).encode()
    tracemalloc.start()
    try:
        assert len(parse_json(content)) == 200_000
        assert tracemalloc.get_traced_memory()[1] < 15 * len(content)
    finally:
        tracemalloc.stop()
