"""`bench fuzz` beyond right calls: its targets as the library is, and with planted faults, which they have to find."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import weightonly as wo
from weightonly import args
from weightonly.bench.fuzz import TARGETS, State, fuzz
from weightonly.formats import shards

CPU = torch.device("cpu")


@pytest.mark.parametrize(("name", "calls"), [("invalid", 2000), ("files", 200), ("state", 24)])
def test_nothing_is_found(name: str, calls: int, seed: int) -> None:
    target = TARGETS[name](CPU)
    state = fuzz(target, State(name, seed), calls=calls, say=pytest.fail)
    assert state.calls >= calls and not state.failed
    assert set(state.covered) <= target.to_cover() and state.covered


def failures(name: str, cases: int) -> str:
    target = TARGETS[name](CPU)
    return "\n".join(text for index in range(cases) for text in target.run(3, index).failures)


def test_an_accepted_argument_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(args, "check_perm", lambda perm, k: None)
    assert "gemm(perm:" in failures("invalid", 20)


def test_a_write_before_a_refusal_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    gemm = wo.gemm

    def fault(*operands: Any, out: Any, **arguments: Any) -> torch.Tensor:
        if isinstance(out, torch.Tensor) and out.dim() == 2 and out.device.type == "cpu" and not out.is_sparse:
            out.fill_(0)
        return gemm(*operands, out=out, **arguments)

    monkeypatch.setattr(wo, "gemm", fault)
    assert "was refused after it wrote to out" in failures("invalid", 5)


def test_an_unclear_error_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def fault(*arguments: object, **keywords: object) -> object:
        raise KeyError("data_offsets")

    monkeypatch.setattr(shards, "_tensor", fault)
    assert "KeyError: 'data_offsets'" in failures("files", 8)


def test_an_error_without_its_file_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def fault(*arguments: object, **keywords: object) -> object:
        raise ValueError("it is damaged")

    monkeypatch.setattr(shards, "_tensor", fault)
    assert "an error that names no file" in failures("files", 8)


def test_a_lax_header_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A parser that does not ask whether the tensors end where the file does."""
    read = shards.read_header

    def fault(file: Path) -> object:
        content = file.read_bytes()
        for extra in range(9):
            file.write_bytes(content[: len(content) - extra])
            try:
                return read(file)
            except ValueError as error:
                if "up to the end of the last tensor" not in str(error):
                    raise
            finally:
                file.write_bytes(content)
        return read(file)

    monkeypatch.setattr(shards, "read_header", fault)
    assert "a header was read that safetensors refuses" in failures("files", 60)


def test_what_a_killed_run_leaves_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from weightonly import storage

    monkeypatch.setattr(storage, "_remove_leftovers", lambda target: None)
    assert "left behind: ." in failures("state", 20)


def test_a_half_written_file_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from weightonly.bench.fuzz import states

    def fault(path: Path, value: int) -> None:
        wo.save(path, {"value": torch.arange(4.0)})

    monkeypatch.setattr(states, "_save", fault)
    assert "save: expected one of" in failures("state", 12)
