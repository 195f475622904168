"""`weightonly.hf` beside libraries that are missing or too old."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests import ROOT

HOW = "pip install 'transformers>=5.23,<6', or pip install '.[hf]' in a checkout of weightonly"


def package(folder: Path, name: str, version: str) -> Path:
    """A folder with the metadata of a package, which is what tells its version."""
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return folder


def in_process(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    start = f"import sys; sys.path[:0] = [{str(folder)!r}, {str(ROOT)!r}]; "
    return subprocess.run([sys.executable, "-c", start + code], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("found", ["4.57.6", "5.22.2", "5.0.0.dev0"])
def test_an_old_transformers_is_named(found: str, tmp_path: Path) -> None:
    run = in_process("import weightonly.hf", package(tmp_path, "transformers", found))
    expected = f"ImportError: weightonly.hf: expected transformers >= 5.23.0, got {found}; {HOW}"
    assert run.stderr.splitlines()[-1] == expected


def test_run_says_it_in_a_line(tmp_path: Path) -> None:
    code = "from weightonly.__main__ import main; sys.exit(main(['run', 'folder', '--tokens', '1']))"
    run = in_process(code, package(tmp_path, "transformers", "4.57.6"))
    assert (run.returncode, run.stderr.count("\n")) == (1, 1)
    assert run.stderr.startswith("error: weightonly.hf: expected transformers >= 5.23.0, got 4.57.6")
