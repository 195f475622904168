"""Mutation testing: plants one fault after another in a copy of the repository, and runs the tests that cover it.

    python -m tests.mutate                  # all that the log does not have yet
    python -m tests.mutate --only quantize  # those whose names contain this
    python -m tests.mutate --list

A fault that the tests notice is killed; one that they do not survives, and needs a test, or a reason why no caller can
see it (`mutations`). The log has a line for each run, by what the file and its tests were: it is resumed, and what has
changed runs again, with the test first that noticed the fault the last time. A test that fails without the fault, too,
makes the result "broken", which is tried again.

Tests of the plug-in for vLLM run in `.venv-vllm` (`make test-vllm` makes it); without it, its mutations are left out.
"""

from __future__ import annotations

import argparse
import collections
import functools
import hashlib
import itertools
import json
import multiprocessing
import multiprocessing.context
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import hypothesis
import pytest
from tests import ROOT
from tests.mutations import ALL, Mutation
from tests.mutations.definitions import definitions

CPU_SOURCES = "kernels/cpu/"
"""Files of the library for CPUs, which is built with each fault: one that cannot be compiled is broken, not noticed."""

KILLED, SURVIVED, TIMEOUT, BROKEN, OUTDATED = "killed", "survived", "timeout", "broken", "outdated"

VLLM_PYTHON = ROOT / ".venv-vllm" / "bin" / "python"

_SEED = "7"  # of random tests: a run can be repeated
_HF = ("transformers.models.llama.modeling_llama", "transformers.integrations", "peft")
_PYTEST_ARGUMENTS = ("-x", "-q", "-p", "no:cacheprovider", "--tb=short")  # prints no arguments: tensors may be freed


def mutated(mutation: Mutation, root: Path = ROOT) -> str:
    """The content of its file with the fault. Raises ValueError unless its function has the old text exactly once."""
    place = root / mutation.file
    content = place.read_text(encoding="utf-8") if place.is_file() else ""
    parts = definitions(mutation.file, content, mutation.function)
    if not parts:
        raise ValueError(f"{mutation.name}: expected {mutation.function} in {mutation.file}, which does not define it")
    indentation = r"(?m:^[ \t]*)" if mutation.old.endswith("\n") and not mutation.new else ""
    old = re.compile(indentation + re.escape(mutation.old))
    found = {match.span() for part in parts for match in old.finditer(content, *part)}
    if len(found) != 1:
        where = f"{mutation.function} of {mutation.file}"
        raise ValueError(f"{mutation.name}: expected {mutation.old!r} once in {where}, got it {len(found)} times")
    ((begin, end),) = found
    return content[:begin] + mutation.new + content[end:]


def key_of(mutation: Mutation) -> str:
    """What the result of a mutation depends on, as far as it is looked at: its file and the tests."""
    digest = hashlib.sha256(mutated(mutation).encode())
    for path in test_files(mutation):
        digest.update((ROOT / path).read_bytes())
    return digest.hexdigest()[:16]


def test_files(mutation: Mutation) -> list[str]:
    return [_files_of_tests().get(name, f"tests/test_{name}.py") for name in mutation.tests]


@functools.cache
def _files_of_tests() -> dict[str, str]:
    """Their paths, by what is between "test_" and ".py"."""
    paths = (ROOT / "tests").glob("*/test_*.py")
    return {path.stem.removeprefix("test_"): str(path.relative_to(ROOT)) for path in paths}


def copy_tree(target: Path) -> None:
    """What git knows of the repository, and what is not ignored, as it is now."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    beside = next((folder / "shared" for folder in ROOT.parents if (folder / "shared").is_dir()), None)
    if beside is not None and not (target.parent / "shared").exists():
        (target.parent / "shared").symlink_to(beside)


def needs_vllm(tests: Sequence[str]) -> bool:
    return any("/test_vllm_" in test for test in tests)


def build_cpu(tree: Path) -> str:
    """Brings the library for CPUs of a tree up to date, if need be. Returns why that did not work, if so."""
    environment = os.environ | {"PYTHONPATH": str(tree / "kernels"), "WEIGHTONLY_CPU_FLAGS": "-O1"}
    command = [sys.executable, "-m", "weightonly_build", "cpu"]
    built = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    return built.stderr if built.returncode else ""


def run_tests(tree: Path, tests: Sequence[str], log: Path, seconds: float) -> str:
    """Runs pytest in a tree, up to the first failure, in a process of its own."""
    if needs_vllm(tests):
        return _run_with_vllm(tree, tests, log, seconds)
    process = _processes().Process(target=_pytest, args=(str(tree), list(tests), str(log)))
    process.start()
    process.join(seconds)
    status = process.exitcode
    if status is None:
        os.killpg(process.pid or 0, signal.SIGKILL)
        process.join()
        return TIMEOUT
    return _result(status)


def _result(status: int) -> str:
    return {0: SURVIVED, 1: KILLED, 2: KILLED}.get(status, KILLED if status < 0 else BROKEN)


def _run_with_vllm(tree: Path, tests: Sequence[str], log: Path, seconds: float) -> str:
    command = [str(VLLM_PYTHON), "-m", "pytest", *_PYTEST_ARGUMENTS, *tests]
    environment = os.environ | {"VLLM_TARGET_DEVICE": "cpu", "VLLM_LOGGING_LEVEL": "ERROR"}
    with log.open("w") as output:
        process = subprocess.Popen(
            command, cwd=tree, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        return _result(process.wait(seconds))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return TIMEOUT


@functools.cache
def _processes() -> multiprocessing.context.ForkServerContext:
    """Forks of a process that has PyTorch and transformers: most tests take less time than importing them."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["hypothesis", "numpy", "pytest", "torch", *_HF])
    return context


def _pytest(tree: str, tests: list[str], log: str) -> None:
    """As `python -m pytest` in the folder `tree`, and in a process group of its own."""
    os.setpgid(0, 0)
    os.chdir(tree)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    # The same examples in every run, and no search for the smallest one that fails.
    phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
    hypothesis.settings.register_profile("mutate", derandomize=True, database=None, phases=phases)
    hypothesis.settings.load_profile("mutate")
    sys.path[:] = [tree, *(folder for folder in sys.path if folder not in ("", str(ROOT)))]
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]  # those of this checkout
    sys.exit(pytest.main([*_PYTEST_ARGUMENTS, *tests]))


def first_failure(log: Path) -> str:
    text = log.read_text(encoding="utf-8", errors="replace")
    if crashed := re.search(r'Fatal Python error(?s:.*?)/(tests/(?:\w+/)?test_\w+\.py)", line \d+ in (test_\w+)', text):
        return f"FAILED {crashed[1]}::{crashed[2]} - the process ended"
    lines = text.splitlines()
    return next((line for line in lines if line.startswith(("FAILED", "ERROR"))), lines[-1] if lines else "")[:300]


def test_of(failure: str) -> str:
    """The test that a line of `first_failure` names; "": none."""
    found = re.match(r"(?:FAILED|ERROR) (.+?)(?: - |$)", failure)
    return found[1] if found else ""


def fail_without_a_fault(tree: Path, tests: Sequence[str], seconds: float) -> set[str]:
    """Those that fail as the code is, too: their failure says nothing of a fault."""
    log = tree.parent / "again.log"
    if not tests or run_tests(tree, tests, log, seconds) == SURVIVED:
        return set()
    return {test for test in tests if run_tests(tree, [test], log, seconds) != SURVIVED}


def main() -> int:
    parser = argparse.ArgumentParser(description="plant small faults, and see whether the tests notice")
    parser.add_argument("--only", metavar="TEXT", default="", help="mutations whose names contain this")
    parser.add_argument("--log", type=Path, default=ROOT / "build" / "mutations.jsonl", help="results, resumed")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for the tests of one (default 300)")
    parser.add_argument("--again", action="store_true", help="those too that the log has")
    parser.add_argument("--list", action="store_true", help="print the names alone")
    options = parser.parse_args()
    chosen = [mutation for mutation in ALL if options.only in mutation.name]
    if options.list:
        print(*(mutation.name for mutation in chosen), sep="\n")
        return 0
    if not VLLM_PYTHON.exists() and any(needs_vllm(test_files(mutation)) for mutation in chosen):
        print(f"left out: the mutations of weightonly/vllm, which need {VLLM_PYTHON}")
        chosen = [mutation for mutation in chosen if not needs_vllm(test_files(mutation))]
    if not chosen:
        parser.error(f"--only: expected a part of a name, got {options.only!r}")
    known: dict[str, dict[str, str]] = {}
    noticed_by: dict[str, str] = {}
    if options.log.exists() and not options.again:
        records = [json.loads(line) for line in options.log.read_text(encoding="utf-8").splitlines()]
        known = {f"{record['name']} {record['key']}": record for record in records if record["result"] != BROKEN}
        noticed_by = {record["name"]: test_of(record["by"]) for record in records if record["result"] == KILLED}
    options.log.parent.mkdir(parents=True, exist_ok=True)
    os.environ |= {"PYTHONDONTWRITEBYTECODE": "1", "WEIGHTONLY_TEST_SEED": _SEED, "OMP_NUM_THREADS": "1"}
    results: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as made:
        tree = Path(made) / "tree"
        keys = {}
        for mutation in chosen:
            try:
                keys[mutation] = key_of(mutation)
            except (ValueError, OSError) as error:
                print(f"{OUTDATED:9} {error}")
                results[mutation.name] = OUTDATED
        todo = [m for m in keys if not m.equivalent and f"{m.name} {keys[m]}" not in known]
        if todo:
            copy_tree(tree)
        if any("/cpu/" in mutation.file for mutation in todo) and (problem := build_cpu(tree)):
            parser.error(problem)
        for mutation, key in keys.items():
            if mutation not in todo:
                results[mutation.name] = (
                    "equivalent" if mutation.equivalent else known[f"{mutation.name} {key}"]["result"]
                )
        for _, group in itertools.groupby(todo, lambda mutation: mutation.file):
            made_of = [_run(m, keys[m], tree, options.timeout, noticed_by.get(m.name, "")) for m in group]
            if made_of[0]["name"].startswith(CPU_SOURCES):
                build_cpu(tree)
            tests = {test_of(record["by"]) for record in made_of if record["result"] == KILLED}
            failing = fail_without_a_fault(tree, sorted(tests - {""}), options.timeout) | {""}
            for record in made_of:
                if record["result"] == KILLED and test_of(record["by"]) in failing:
                    record["result"] = BROKEN
                with options.log.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(record) + "\n")
                print(f"{record['result']:9} {record['name']}  [{record['seconds']} s] {record['by']}", flush=True)
                results[record["name"]] = record["result"]
    return report(results)


def _run(mutation: Mutation, key: str, tree: Path, seconds: float, first: str) -> dict[str, str]:
    """A line of the log. first: the test to begin with, if any."""
    place, log = tree / mutation.file, tree.parent / "run.log"
    before, started = place.read_bytes(), time.monotonic()
    place.write_text(mutated(mutation), encoding="utf-8")
    try:
        problem = build_cpu(tree) if mutation.file.startswith(CPU_SOURCES) else ""
        if problem:
            log.write_text(f"ERROR {problem}", encoding="utf-8")
        result = run_tests(tree, [first], log, seconds) if first and not problem else BROKEN
        if result != KILLED and not problem:  # also where there is no such test any more
            result = run_tests(tree, test_files(mutation), log, seconds)
    finally:
        place.write_bytes(before)
    took = f"{time.monotonic() - started:.1f}"
    by = first_failure(log) if result in (KILLED, BROKEN) else ""
    return {"name": mutation.name, "key": key, "result": result, "seconds": took, "by": by}


def report(results: dict[str, str]) -> int:
    """Prints the score. 1 if a fault survived, or could not be tried."""
    counts = collections.Counter(results.values())
    for name, result in results.items():
        if result in (SURVIVED, BROKEN, OUTDATED):
            print(f"{result}: {name}")
    real = len(results) - counts["equivalent"] - counts[OUTDATED]
    noticed = counts[KILLED] + counts[TIMEOUT]
    print(
        f"{noticed} of {real} noticed ({counts[TIMEOUT]} by a timeout), {counts[SURVIVED]} survived, "
        f"{counts[BROKEN]} broken; {counts[OUTDATED]} more are outdated, {counts['equivalent']} are equivalent"
    )
    return 1 if counts[SURVIVED] or counts[BROKEN] or counts[OUTDATED] else 0


if __name__ == "__main__":
    sys.exit(main())
