"""The native kernels of CPUs in a process: its memory, its threads, its children. cpu_process.py has what is run."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests import ROOT

from weightonly.cpu import library

unsanitized = pytest.mark.skipif("asan" in os.environ.get("LD_PRELOAD", ""), reason="ASan has an allocator of its own")


def run(*arguments: object, **variables: str) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | variables
    command = [sys.executable, "-m", "tests.cpu.cpu_process", *map(str, arguments)]
    found = subprocess.run(command, cwd="/", env=environment, timeout=600, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr


@pytest.mark.parametrize("imported", [False, True], ids=["first import in the child", "imported before"])
def test_a_forked_child_computes(best: library.Backend, imported: bool) -> None:
    run("forked", imported)


def test_no_operand_is_touched_beside_its_ends(best: library.Backend) -> None:
    run("guards")


@unsanitized
def test_memory_of_a_large_product_is_given_back(best: library.Backend) -> None:
    run("shrinks")


@unsanitized
def test_an_allocation_that_fails_is_an_error(best: library.Backend, tmp_path: Path) -> None:
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    if shutil.which(compiler[0]) is None:
        pytest.skip(f"the host compiler {compiler[0]} was not found")
    source, hook = ROOT / "tests/cpu/failing_allocations.cpp", tmp_path / "failing.so"
    subprocess.run([*compiler, "-O1", "-shared", "-fPIC", source, "-o", hook], check=True)
    run("without_memory", LD_PRELOAD=str(hook))


def test_a_level_above_the_cpu_is_refused(best: library.Backend) -> None:
    run("without_tiles")
