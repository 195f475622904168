"""The list of mutations fits the code, and a planted fault is told from a harmless change. `mutate.py` runs them."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import mutate
import pytest
from mutations import ALL, Mutation

ROOT = Path(__file__).resolve().parents[1]
ABORT = "__import__('os').abort()"


@pytest.mark.parametrize("mutation", ALL, ids=lambda mutation: mutation.name)
def test_mutation_applies(mutation: Mutation) -> None:
    """Once, to compilable code, with tests that exist: a change of the code changes its mutations."""
    content, before = mutate.mutated(mutation), (ROOT / mutation.file).read_text()
    assert dump(content) != dump(before) if mutation.file.endswith(".py") else content != before
    assert [path for path in mutate.test_files(mutation) if not (ROOT / path).is_file()] == []


def dump(content: str) -> str:
    return ast.dump(ast.parse(content))


def test_names_are_unique() -> None:
    assert len({mutation.name for mutation in ALL}) == len(ALL)


def test_a_text_that_is_gone_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\nx = 1\n")
    for old in ("y = 1", "x = 1"):
        with pytest.raises(ValueError, match=r"a.py: fault: expected its old text once in a.py, got it [02] times"):
            mutate.mutated(Mutation("a.py: fault", "a.py", old, "x = 2", ("a",)), tmp_path)


@pytest.mark.parametrize("name", ["test_planted.py", "test_vllm_planted.py"])
@pytest.mark.parametrize(
    ("change", "result"),
    [
        ("return x + 1", "survived"),
        ("return x - 1", "killed"),
        ("return x +", "killed"),
        (ABORT, "killed"),
        ("while True: pass", "timeout"),
    ],
    ids=["harmless", "fault", "no code", "the end of the process", "endless"],
)
def test_what_becomes_of_a_fault(
    change: str, result: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this Python, and in that of vLLM. What is noticed is noticed by name, even if the process ended."""
    monkeypatch.setattr(mutate, "VLLM_PYTHON", Path(sys.executable))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    tree, log = tmp_path / "tree", tmp_path / "log"
    (tree / "tests").mkdir(parents=True)
    (tree / "planted_code.py").write_text(f"def more(x):\n    {change}\n")
    test = "from planted_code import more\n\n\ndef test_more():\n    assert more(1) == 2\n"
    (tree / "tests" / name).write_text(test)
    seconds = 5 if result == "timeout" else 120
    assert mutate.run_tests(tree, [f"tests/{name}"], log, seconds) == result
    if change in ("return x - 1", ABORT):
        assert mutate.test_of(mutate.first_failure(log)) == f"tests/{name}::test_more"


def test_no_tests_are_no_answer(tmp_path: Path) -> None:
    (tmp_path / "test_nothing.py").write_text("x = 1\n")
    assert mutate.run_tests(tmp_path, ["test_nothing.py"], tmp_path / "log", 120) == "broken"
