"""`tools.fuzz` beyond right calls: its targets as the library is, and with planted faults, which they have to find."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import weightonly as wo
from tools.fuzz import TARGETS, State, fuzz, guided
from tools.fuzz.__main__ import main
from weightonly import weight
from weightonly.formats import shards
from weightonly.plain import has_memory

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
    monkeypatch.setattr(weight, "check_perm", lambda perm, packed: None)
    assert "gemm(perm:" in failures("invalid", 20)


def test_a_write_before_a_refusal_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    gemm = wo.gemm

    def fault(*operands: Any, out: Any, **arguments: Any) -> torch.Tensor:
        is_matrix = isinstance(out, torch.Tensor) and out.dim() == 2 and out.device.type == "cpu"
        if is_matrix and not out.is_sparse and has_memory(out):
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
    from tools.fuzz import states

    def fault(path: Path, value: int) -> None:
        wo.save(path, {"value": torch.arange(4.0)})

    monkeypatch.setattr(states, "_save", fault)
    assert "save: expected one of" in failures("state", 12)


# --- guided by coverage ----------------------------------------------------------------------------------------


def test_coverage_needs_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"^coverage: expected the package atheris, got none; pip install atheris$"):
        guided.guided(tmp_path, 1, 1.0, None)


@pytest.mark.parametrize("options", ["--target calls", "--target files --start 3", "--target files --case 1:2"])
def test_options_that_contradict_coverage(options: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--coverage", str(tmp_path), *options.split()]) == 2
    assert "coverage" in capsys.readouterr().err


def test_seeds_are_read_and_changes_of_them_are_other_json() -> None:
    seeds = guided._Inputs.seeds()
    assert len({seed[0] for seed in seeds}) == len(seeds) >= 12
    for seed in seeds:
        changed = {guided.change(seed, 1 << 20, number, lambda data, most: b"blind") for number in range(20)}
        if seed[1:].startswith(b"GGUF"):  # no JSON
            assert changed == {b"blind"}
        else:
            assert isinstance(json.loads(seed[1:]), dict)
            assert b"blind" in changed and len(changed) > 2


def test_what_libfuzzer_says_is_read() -> None:
    text = "#4 INITED cov: 9 ft: 9 corp: 1/1b\n#35 NEW cov: 769 ft: 1388 corp: 62/9Kb\nDone 40 runs in 1 second(s)\n"
    assert guided._report(text, 0) == guided.Report(35, "cov: 769 ft: 1388 corp: 62", "")
    text += "FAILED files, guided by coverage:\n  awq: KeyError: 'x'\n === Uncaught\nTest unit written to a/failed-1\n"
    failure = "FAILED files, guided by coverage:\n  awq: KeyError: 'x'\na/failed-1"
    assert guided._report(text, 77) == guided.Report(35, "cov: 769 ft: 1388 corp: 62", failure)
    with pytest.raises(RuntimeError, match=r"^coverage: expected a report of libFuzzer, got ''$"):
        guided._report("", 0)


def test_inputs_guided_by_coverage(tmp_path: Path) -> None:
    pytest.importorskip("atheris")
    report = guided.guided(tmp_path / "corpus", 3, None, 60)
    assert report.runs >= 12 and "cov: " in report.reached and not report.failure
    assert len(list((tmp_path / "corpus").iterdir())) >= 12
