"""Files of tuned tables: written, read once, refused when damaged or foreign, and where they are."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.tuned_cases import H200, another, entry, problem, table

from weightonly.bench.tune import table_path
from weightonly.heuristics import candidates
from weightonly.heuristics.configs import CONFIGS
from weightonly.heuristics.select import likely_pairs
from weightonly.plan import tuned
from weightonly.plan.tuned import Origin


def test_a_file_gives_back_the_table(path: Path) -> None:
    assert path.name == "nvidia-h200-sm90-132.json"
    again = tuned.read(path, H200, CONFIGS)
    assert list(again) == [entry(problem(1)), entry(problem(16))]
    assert again.config(problem(16), "f16") == another(problem(16))
    assert [file.name for file in path.parent.iterdir()] == [path.name]  # nothing unfinished is left


def test_a_file_may_name_two_launches(tmp_path: Path) -> None:
    p = problem(512, 8192, 10240)
    pair = likely_pairs(p)[0]
    file = tmp_path / "table.json"
    tuned.write(file, table(entry(p, pair)))
    again = tuned.read(file, H200, CONFIGS)
    assert again.config(p, "f16") == pair and pair.tail is not None
    assert again.config(problem(500, 8192, 10240), "f16") == pair
    with pytest.raises(ValueError, match=r"config '.*' does not compute m=512, k=8192, n=10240"):
        table(dataclasses.replace(entry(p, pair), config=f"{pair}+{pair.tail}"))
    with pytest.raises(ValueError, match="is none of this installation"):
        table(dataclasses.replace(entry(p, pair), config=f"{pair}+"))


def test_a_write_that_fails_leaves_the_old_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(made: Path, target: Path) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        tuned.write(path, table())
    assert len(tuned.read(path, H200, CONFIGS)) == 2
    assert [file.name for file in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda record: "{", "it is damaged (Expecting"),
        (lambda record: "[]", "it is not a tuned table of this library"),
        (lambda record: json.dumps(record | {"schema": 2}), "it is not a tuned table of this library"),
        (lambda record: json.dumps(record | {"entries": None}), "it is damaged (no list of entries)"),
        (lambda record: json.dumps(record | {"origin": {"gpu": "x"}}), "it is damaged (expected library, gpu,"),
        (lambda record: _with(record, m="16"), "it is damaged (m: expected int, got '16')"),
        (lambda record: _with(record, zeros=0), "it is damaged (zeros: expected bool, got 0)"),
        (lambda record: _with(record, config="gemm_k1"), "config 'gemm_k1' is none of this installation"),
        (lambda record: _with(record, config="gemm"), "config 'gemm' is none of this installation"),
        (lambda record: _with(record, m=4000), "does not compute m=4000, k=4096, n=4096"),
        (lambda record: _with(record, m=0), "m must be at least 1, got 0"),
        (lambda record: _with(record, format="int3"), "format must be one of"),
    ],
)
def test_a_damaged_file_is_refused(damage: Callable[[Any], str], reason: str, path: Path) -> None:
    path.write_text(damage(json.loads(path.read_text())))
    message = f"^{re.escape(str(path))}: tuned table refused: .*{re.escape(reason)}.*; the cost model is used$"
    with pytest.warns(RuntimeWarning, match=message):
        assert tuned.read_or_warn(path, H200, CONFIGS, "the cost model is used") is None


def _with(record: Any, **fields: object) -> str:
    decode = next(config for config in candidates(problem(1)) if config.family == "decode_sm90")
    record["entries"][0] |= {"config": decode.name} | fields
    return json.dumps(record)


@pytest.mark.parametrize(
    "change",
    [{"library": "0.0.9"}, {"gpu": "NVIDIA H100"}, {"arch": 80}, {"sm_count": 114}, {"driver": "570.0"}],
    ids=lambda change: next(iter(change)),
)
def test_a_foreign_file_is_refused(change: dict[str, Any], path: Path) -> None:
    here = dataclasses.replace(H200, **change)
    ((name, value),) = change.items()
    with pytest.raises(ValueError, match=f"^it was made with {name} {getattr(H200, name)!r}, here it is {value!r}$"):
        tuned.read(path, here, CONFIGS)


def test_a_file_with_kernels_that_this_build_lacks_is_refused(path: Path) -> None:
    with pytest.raises(ValueError, match="is none of this installation"):
        tuned.read(path, H200, [config for config in CONFIGS if config.family == "gemv"])


def test_no_file_is_no_reason_to_warn(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    assert tuned.read_or_warn(tmp_path / "none.json", H200, CONFIGS, "") is None
    assert not recwarn.list


def test_where_tables_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("WEIGHTONLY_TUNED", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert tuned.folder() == tmp_path / "weightonly" / "tuned"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert tuned.folder() == tmp_path / ".cache" / "weightonly" / "tuned"
    monkeypatch.setenv("WEIGHTONLY_TUNED", str(tmp_path / "mine"))
    assert table_path(H200, None) == tmp_path / "mine" / H200.file_name
    assert table_path(H200, tmp_path) == tmp_path / H200.file_name
    monkeypatch.setenv("WEIGHTONLY_TUNED", "")
    assert tuned.folder() is None
    with pytest.raises(
        ValueError, match=r"^folder: expected one, as the environment variable WEIGHTONLY_TUNED is empty"
    ):
        table_path(H200, None)


def test_a_table_is_read_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuned, "_tables", {})
    monkeypatch.setattr(Origin, "of", classmethod(lambda cls, device: H200))
    monkeypatch.setattr(tuned, "kernels", lambda device: list(CONFIGS))
    monkeypatch.setenv("WEIGHTONLY_TUNED", str(path.parent))
    first = tuned.table_of(0)
    assert first is not None and len(first) == 2
    path.unlink()
    assert tuned.table_of(0) is first
    assert tuned.table_of(1) is None  # of another device: no file now
    replaced = table()
    tuned.use(0, replaced)
    assert tuned.table_of(0) is replaced
    monkeypatch.setattr(tuned, "_tables", {})
    monkeypatch.setenv("WEIGHTONLY_TUNED", "")
    assert tuned.table_of(0) is None
