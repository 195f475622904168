"""Target "files", guided by coverage: `tools.fuzz --target files --coverage FOLDER`, with the package atheris.

libFuzzer changes the header of a safetensors file, or a JSON file, of a small checkpoint, and keeps in FOLDER what
reaches new branches of the readers. What counts as a failure is what `files.py` says. libFuzzer ends the process that
it runs in, and the readers are instrumented while they are imported: so it runs in a process of its own.
"""

from __future__ import annotations

import importlib.util
import json
import random
import re
import struct
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .files import KINDS, Files, change_json
from .loop import Outcome

READERS = ("weightonly.formats", "weightonly.files", "weightonly.packed", "weightonly.storage")
"""Modules whose branches count."""

_MOST_BYTES = 8192  # of an input
_MEMORY_MIB, _SECONDS = 4096, 600  # of the whole process; of one input, where `files.py` limits its CPU time

_START = """
import sys
sys.path[:] = {path!r}
import atheris
with atheris.instrument_imports(include={readers!r}):
    import weightonly.formats
from tools.fuzz import guided
guided.run_here(sys.argv)
"""


@dataclass(frozen=True)
class Report:
    """runs: inputs that were tried. reached: libFuzzer's words on coverage. failure: the first one, or ""."""

    runs: int
    reached: str
    failure: str


def guided(folder: Path, seed: int, seconds: float | None, calls: int | None) -> Report:
    """Tries inputs, those in `folder` first, until a budget is spent or one fails; it is then kept there, too.

    Raises ValueError where atheris is missing, and RuntimeError where libFuzzer does not say how it ended.
    """
    if importlib.util.find_spec("atheris") is None:
        raise ValueError("coverage: expected the package atheris, got none; pip install atheris")
    folder.mkdir(parents=True, exist_ok=True)
    for number, content in enumerate(_Inputs.seeds()):
        (folder / f"seed-{number:02}").write_bytes(content)
    budget = ([] if seconds is None else [f"-max_total_time={max(1, round(seconds))}"]) + (
        [] if calls is None else [f"-runs={calls}"]
    )
    limits = [f"-max_len={_MOST_BYTES}", f"-rss_limit_mb={_MEMORY_MIB}", f"-timeout={_SECONDS}"]
    options = [f"-seed={seed % (1 << 31) or 1}", f"-artifact_prefix={folder}/failed-", *budget, *limits]
    start = _START.format(path=sys.path, readers=list(READERS))
    command = [sys.executable, "-c", start, *options, str(folder)]
    ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    return _report(ended.stdout, ended.returncode)


def _report(text: str, status: int) -> Report:
    counts = [int(count) for count in re.findall(r"^#(\d+)\s", text, re.MULTILINE)]
    reached = re.findall(r"cov: \d+ ft: \d+ corp: \d+", text)
    failure = ""
    if status:
        found = re.search(r"^FAILED .*(?:\n  .*)*", text, re.MULTILINE)
        kept = re.findall(r"Test unit written to (.*)", text)
        failure = "\n".join([found[0] if found else text[-2000:], *kept])
    elif not counts:
        raise RuntimeError(f"coverage: expected a report of libFuzzer, got {text[-2000:]!r}")
    return Report(max(counts, default=0), reached[-1] if reached else "nothing new", failure)


class _Inputs:
    """What the bytes of an input mean: the first, which file of which checkpoint; the others, what is in it.

    Of a safetensors file they are the header: its length and the tensors' bytes are put around it.
    """

    def __init__(self, top: Path) -> None:
        self.reader = Files(torch.device("cpu"))
        self.files: list[tuple[str, Path, bytes]] = []  # kind, path, content
        for number, kind in enumerate(KINDS):
            place = top / kind
            place.mkdir()
            self.reader.make(random.Random(number), kind, place)
            self.files += [(kind, path, path.read_bytes()) for path in sorted((place / "model").iterdir())]

    @classmethod
    def seeds(cls) -> list[bytes]:
        with tempfile.TemporaryDirectory() as made:
            inputs = cls(Path(made))
        return [bytes([number]) + _text_of(path, content) for number, (_, path, content) in enumerate(inputs.files)]

    def run(self, data: bytes) -> Outcome:
        """Reads the checkpoint with this file in it."""
        outcome = Outcome()
        if data:
            kind, path, content = self.files[data[0] % len(self.files)]
            path.write_bytes(_with_text(path, content, data[1:]))
            try:
                self.reader.read(kind, path.parent, outcome)
            finally:
                path.write_bytes(content)
        return outcome


def _text_of(path: Path, content: bytes) -> bytes:
    if path.suffix != ".safetensors":
        return content
    return content[8 : 8 + struct.unpack("<Q", content[:8])[0]].rstrip()


def _with_text(path: Path, content: bytes, text: bytes) -> bytes:
    if path.suffix != ".safetensors":
        return text
    data = content[8 + struct.unpack("<Q", content[:8])[0] :]
    return struct.pack("<Q", len(text)) + text + data


def change(data: bytes, most_bytes: int, seed: int, blind: Any) -> bytes:
    """Another input: half of them differ in one value of their JSON, half as `blind`, libFuzzer, changes bytes."""
    draw = random.Random(seed)
    if draw.random() < 0.5:
        try:
            text = json.dumps(change_json(draw, json.loads(data[1:]))).encode()
        except (ValueError, RecursionError):
            text = b""
        if text and len(text) < most_bytes:
            return data[:1] + text
    changed: bytes = blind(data, most_bytes)
    return changed


def run_here(arguments: list[str]) -> None:
    """What the process of libFuzzer does. It does not return."""
    import atheris

    with tempfile.TemporaryDirectory() as made:
        inputs = _Inputs(Path(made))

        def one(data: bytes) -> None:
            outcome = inputs.run(data)
            if outcome.failures:
                print("\n  ".join(["FAILED files, guided by coverage:", *outcome.failures]), flush=True)
                raise AssertionError(outcome.failures[0])

        def mutator(data: bytes, most_bytes: int, seed: int) -> bytes:
            return change(data, most_bytes, seed, atheris.Mutate)

        atheris.Setup(arguments, one, custom_mutator=mutator)
        atheris.Fuzz()
