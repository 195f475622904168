"""`python -m weightonly` in a stranger's folder runs none of its code; nor does a stranger's `_C.py`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests import ROOT
from tests.formats_layers import AWQ, awq_layer, folder_of
from tests.packaging.test_house import installed

TRAP = """
import pathlib, sys
pathlib.Path(__file__).with_name("RAN").touch()
sys.exit("a stranger's code runs")
"""


def run(arguments: list[str], cwd: Path, *path: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, cwd=cwd, env=environment, check=False
    )


@pytest.fixture
def trapped(tmp_path: Path, generator: torch.Generator) -> Path:
    """A checkpoint with modules beside it that a program may import."""
    folder = folder_of(tmp_path, awq_layer, AWQ, generator)
    for name in ("tqdm", "safetensors", "torch", "numpy", "typing_extensions", "pathlib", "json", "__future__", "_C"):
        (folder / f"{name}.py").write_text(TRAP)
    return folder


@pytest.mark.parametrize("where", ["checkout", "install"])
@pytest.mark.parametrize(
    "arguments", [["-m", "weightonly", "inspect", "."], ["-mweightonly", "convert", ".", "../packed"]], ids=" ".join
)
def test_a_checkpoints_own_modules_do_not_run(arguments: list[str], where: str, trapped: Path, tmp_path: Path) -> None:
    site = ROOT if where == "checkout" else installed(tmp_path / "site")
    result = run(arguments, trapped, site)
    assert not (trapped / "RAN").exists()
    assert result.returncode == 0, result.stderr
    assert "2 quantized layers" in result.stdout


def test_the_console_script_is_the_same_program(trapped: Path, tmp_path: Path) -> None:
    """As pip writes it, from the entry of pyproject.toml."""
    text = (ROOT / "pyproject.toml").read_text()
    scripts = text.partition("[project.scripts]\n")[2].partition("\n[")[0]
    (entry,) = [line for line in scripts.splitlines() if line.startswith("weightonly")]
    module, _, function = entry.split('"')[1].partition(":")
    script = tmp_path / "bin" / "weightonly"
    script.parent.mkdir()
    script.write_text(f"import sys\nfrom {module} import {function}\nsys.exit({function}())\n")
    result = run([str(script), "inspect", "."], trapped, ROOT)
    assert not (trapped / "RAN").exists()
    assert result.returncode == 0 and "2 quantized layers" in result.stdout, result.stderr
    assert "usage: weightonly " in run([str(script), "--help"], trapped, ROOT).stdout


def test_a_program_keeps_its_search_path(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("import weightonly, sys\nprint(sys.path[0])\nimport beside\n")
    (tmp_path / "beside.py").write_text("print('beside')")
    for arguments in (["own.py"], ["-m", "own"]):
        result = run(arguments, tmp_path, ROOT)
        assert result.stdout.splitlines()[-1:] == ["beside"], result.stderr
        assert result.stdout.startswith(str(tmp_path))


def test_the_command_runs_from_a_checkout(tmp_path: Path) -> None:
    result = run(["-m", "weightonly", "--version"], ROOT)
    assert result.returncode == 0 and result.stdout.startswith("weightonly "), result.stderr


def test_what_lies_beside_an_installed_package_is_none_of_it(tmp_path: Path) -> None:
    site = installed(tmp_path / "site")
    (site / "stranger.py").write_text(TRAP)
    result = run(["-c", "import weightonly.stranger"], tmp_path, site)
    assert "No module named 'weightonly.stranger'" in result.stderr
    assert not (site / "RAN").exists()


@pytest.mark.parametrize("where", ["checkout", "install"])
def test_a_strangers_kernels_are_not_imported(where: str, tmp_path: Path) -> None:
    """A `_C.py` beside the package, where __path__ of a checkout leads."""
    site = installed(tmp_path / "site")
    if where == "checkout":
        for name in ("heuristics", "bench"):
            (site / "weightonly" / name).rename(site / name)
    (site / "_C.py").write_text(TRAP)
    result = run(["-c", "import weightonly; print(weightonly.cuda_built())"], tmp_path, site)
    assert not (site / "RAN").exists()
    assert result.stdout.strip() == "False", result.stderr
