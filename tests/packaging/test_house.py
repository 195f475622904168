"""Which rooms of the repository may use which, and what is importable as a part of `weightonly`."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests import ROOT


def imports_of(file: Path, package: str) -> Iterator[str]:
    """The absolute names of the modules that a file of `package` imports, wherever in the file it does."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")
            base = parents[: len(parents) + 1 - node.level] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{module}.{alias.name}" for alias in node.names)


def files_of(folder: str, package: str) -> Iterator[tuple[Path, str]]:
    """Each Python file below `folder`, and the package that it belongs to when installed."""
    for file in sorted((ROOT / folder).rglob("*.py")):
        yield file, ".".join([package, *file.parent.relative_to(ROOT / folder).parts])


def test_imports_are_found_wherever_they_are(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_text("import json\nfrom . import b\nfrom .c import d\ndef f():\n    from ..bench.e import g\n")
    assert sorted(imports_of(file, "w.p")) == ["json", "w.bench.e.g", "w.p.b", "w.p.c.d"]


def test_the_package_imports_nothing_of_the_benchmarks() -> None:
    found = [
        f"{file.relative_to(ROOT)}: {name}"
        for file, package in files_of("weightonly", "weightonly")
        for name in imports_of(file, package)
        if name.startswith(("weightonly.bench", "bench"))
    ]
    assert not found


def test_what_is_installed_imports_nothing_of_tools() -> None:
    found = [
        f"{file.relative_to(ROOT)}: {name}"
        for folder in ("weightonly", "heuristics", "bench")
        for file, package in files_of(folder, folder)
        for name in imports_of(file, package)
        if name.partition(".")[0] == "tools"
    ]
    assert not found


def cycle_of(graph: dict[str, set[str]]) -> list[str]:
    """The modules that import each other in a circle, with those that lead to one; [] where there is none."""
    left = dict(graph)
    while leaves := [name for name, used in left.items() if not used & left.keys()]:
        for name in leaves:
            del left[name]
    return sorted(left)


def test_circles_are_found() -> None:
    assert cycle_of({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == ["a", "b", "c"]
    assert cycle_of({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_no_modules_of_the_package_import_each_other() -> None:
    """Imports inside of functions and for types alone count, too."""
    modules = {
        f"{package}.{file.stem}".removesuffix(".__init__"): (file, package)
        for folder, name in (("weightonly", "weightonly"), ("heuristics", "weightonly.heuristics"))
        for file, package in files_of(folder, name)
    }
    graph: dict[str, set[str]] = {}
    for module, (file, package) in modules.items():
        names = [name for name in imports_of(file, package) if name != "weightonly._C"]  # compiled
        graph[module] = {name if name in modules else name.rpartition(".")[0] for name in names} & modules.keys()
    assert len(graph) > 80 and graph["weightonly"] >= {"weightonly.gemm", "weightonly.nn"}
    assert cycle_of(graph) == []


def test_heuristics_need_the_standard_library_alone() -> None:
    allowed = {*sys.stdlib_module_names, "weightonly"}
    found = [
        f"{file.relative_to(ROOT)}: {name}"
        for file, package in files_of("heuristics", "weightonly.heuristics")
        for name in imports_of(file, package)
        if name.partition(".")[0] not in allowed
        or (name.startswith("weightonly") and not name.startswith("weightonly.heuristics"))
    ]
    assert not found


def test_device_vocabulary_includes_nothing_of_the_kernels() -> None:
    """cutlass_ext includes itself, CUTLASS, and headers of C++ and of the toolkit."""
    own = re.compile(r'"(cutlass_ext|cutlass|cute)/[^"]+"')
    system = re.compile(r"<[^/>]+>")
    headers = sorted((ROOT / "cutlass_ext").rglob("*.h"))
    found = [
        f"{header.relative_to(ROOT)}: {name}"
        for header in headers
        for name in re.findall(r"^\s*#\s*include\s*(\S+)", header.read_text(encoding="utf-8"), re.MULTILINE)
        if not own.fullmatch(name) and not system.fullmatch(name)
    ]
    assert headers and not found


# --- what is a part of `weightonly` ----------------------------------------------------------------------------


def installed(folder: Path) -> Path:
    """A folder like site-packages: the package as setup.py lays it out, and `pip` beside it."""
    ignore = shutil.ignore_patterns("__pycache__", "lib", "*.so", "measurements")
    shutil.copytree(ROOT / "weightonly", folder / "weightonly", ignore=ignore)
    for name in ("heuristics", "bench"):
        shutil.copytree(ROOT / name, folder / "weightonly" / name, ignore=ignore)
    (folder / "pip").mkdir()
    (folder / "pip" / "__init__.py").touch()
    return folder


def run(path: Path, program: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(path)}
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment, cwd=cwd, check=False
    )


@pytest.mark.parametrize("where", ["install", "checkout"])
def test_other_packages_are_no_parts(where: str, tmp_path: Path) -> None:
    path = ROOT if where == "checkout" else installed(tmp_path / "site")
    program = f"""
import pip, weightonly
assert weightonly.__file__ == {str(path / "weightonly" / "__init__.py")!r}, weightonly.__file__
import weightonly.heuristics.select
for name in ("pip", "torch", "no_such_module"):
    assert not hasattr(weightonly, name), name
import weightonly.pip
"""
    result = run(path, program, tmp_path)
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1] == "ModuleNotFoundError: No module named 'weightonly.pip'"


@pytest.mark.parametrize("where", ["install", "checkout"])
def test_benchmarks_come_on_first_use(where: str, tmp_path: Path) -> None:
    path = ROOT if where == "checkout" else installed(tmp_path / "site")
    program = """
import sys, weightonly
assert "weightonly.bench" not in sys.modules and "pandas" not in sys.modules
print(weightonly.bench.sweep.__module__)
"""
    result = run(path, program, tmp_path)
    assert (result.returncode, result.stdout.strip()) == (0, "weightonly.bench.sweep"), result.stderr


@pytest.mark.parametrize("name", ["_hidden", "__wrapped__", "gem", "tests", "tools"])
def test_unknown_attributes_are_errors(name: str) -> None:
    import weightonly

    with pytest.raises(AttributeError, match=f"^module 'weightonly' has no attribute {name!r}$"):
        getattr(weightonly, name)
