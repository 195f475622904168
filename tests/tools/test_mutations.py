"""The list of mutations fits the code, and a planted fault is told from a harmless change. `mutate.py` runs them."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest
from tests import ROOT, mutate
from tests.mutations import ALL, Mutation
from tests.mutations.definitions import definitions

ABORT = "__import__('os').abort()"


@pytest.mark.parametrize("mutation", ALL, ids=lambda mutation: mutation.name)
def test_mutation_applies(mutation: Mutation) -> None:
    """To compilable code, with tests that exist."""
    content, before = mutate.mutated(mutation), (ROOT / mutation.file).read_text()
    assert dump(content) != dump(before) if mutation.file.endswith(".py") else content != before
    assert [path for path in mutate.test_files(mutation) if not (ROOT / path).is_file()] == []


def dump(content: str) -> str:
    return ast.dump(ast.parse(content))


def test_names_are_unique() -> None:
    assert len({mutation.name for mutation in ALL}) == len(ALL)
    tests = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert len(set(tests)) == len(tests)


PYTHON = """
LIMIT = 1
if LIMIT:
    @cached
    def most(x):
        def inner():
            return x < 1
        return inner() or x < 2
class A:
    limit: int = 1
    def most(self):
        return self
"""
CPP = """
// most() {
struct A {
  bool most(int x, int y = f()) const { if (most(x)) { return '{' < x; } return false; }
};
A::A() : limit(1) {}
inline float most(float x) {
  return x;  // }
}
int other = most(1);
"""


@pytest.mark.parametrize(
    ("file", "name", "texts"),
    [
        ("a.py", "LIMIT", ["LIMIT = 1"]),
        ("a.py", "most", ["@cached ... x < 2"]),
        ("a.py", "most.inner", ["def inner(): ... x < 1"]),
        ("a.py", "A.limit", ["limit: int = 1"]),
        ("a.py", "A.most", ["def most(self): ... self"]),
        ("a.py", "inner", []),
        ("a.h", "A", ["struct A { ... }", "A() : limit(1) {}"]),
        ("a.h", "most", ["most(int x, ... return false; }", "most(float x) { ... }"]),
        ("a.h", "other", []),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{len(value)} times",
)
def test_a_name_is_found(file: str, name: str, texts: list[str]) -> None:
    content = PYTHON if file == "a.py" else CPP
    found = [" ".join(content[begin:end].split()) for begin, end in definitions(file, content, name)]
    ends = [text.split(" ... ") for text in texts]
    assert len(found) == len(texts)
    assert all(text.startswith(end[0]) and text.endswith(end[-1]) for text, end in zip(found, ends, strict=True))


def test_what_is_gone_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("def f(x):\n    return x or x\n\ndef g(y):\n    return y\n")
    for function, old, message in (
        ("g", "x", "expected 'x' once in g of a.py, got it 0 times"),
        ("f", "x", "expected 'x' once in f of a.py, got it 3 times"),
        ("h", "x", "expected h in a.py, which does not define it"),
    ):
        with pytest.raises(ValueError, match=f"^a.py: fault: {message}$"):
            mutate.mutated(Mutation("a.py: fault", "a.py", function, old, "z", ("a",)), tmp_path)


def test_a_line_goes_with_its_indentation(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("def f(x):\n    x.check()\n    return x\n")
    mutation = Mutation("a.py: fault", "a.py", "f", "x.check()\n", "", ("a",))
    assert mutate.mutated(mutation, tmp_path) == "def f(x):\n    return x\n"


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


def test_a_test_that_is_gone_is_not_the_only_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It noticed the fault the last time."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setattr(mutate, "test_files", lambda mutation: ["test_planted.py"])
    monkeypatch.setattr(mutate, "mutated", lambda mutation: "def more(x):\n    return x - 1\n")
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "planted_code.py").write_text("def more(x):\n    return x + 1\n")
    test = "from planted_code import more\n\n\ndef test_more():\n    assert more(1) == 2\n"
    (tmp_path / "tree" / "test_planted.py").write_text(test)
    fault = Mutation("planted_code.py: less", "planted_code.py", "more", "+", "-", ("planted",))
    record = mutate._run(fault, "key", tmp_path / "tree", 120, "test_planted.py::test_gone")
    assert (record["result"], mutate.test_of(record["by"])) == ("killed", "test_planted.py::test_more")
