"""The two wheels: what is in them, that two builds are equal, and what an installation of parts of them says."""

from __future__ import annotations

import base64
import csv
import hashlib
import json
import re
import zipfile
from pathlib import Path

import pytest
from tests import ROOT
from tests.packaging.test_house import installed, run

import weightonly as wo
from weightonly_build import library, target, wheels

LINUX = "manylinux_2_34_x86_64"
FILES = {
    "weightonly/lib/a.so": b"\x7fELF",
    "weightonly/__init__.py": b"",
    "weightonly-1.0.dist-info/METADATA": b"Metadata-Version: 2.4\nName: weightonly\nVersion: 1.0\n",
}


@pytest.fixture(autouse=True)
def no_date(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SOURCE_DATE_EPOCH", raising=False)


def test_two_wheels_of_the_same_files_are_equal(tmp_path: Path) -> None:
    written = []
    for name, files in (("a", FILES), ("b", dict(reversed(FILES.items())))):
        (folder := tmp_path / name).mkdir()
        written.append(wheels.write(folder, files, LINUX))
        assert list(folder.iterdir()) == [written[-1]]
    assert [wheel.name for wheel in written] == ["weightonly-1.0-py3-none-manylinux_2_34_x86_64.whl"] * 2
    assert written[0].read_bytes() == written[1].read_bytes()


def test_the_date_is_source_date_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1000000000")
    with zipfile.ZipFile(wheels.write(tmp_path, FILES, LINUX)) as wheel:
        assert {entry.date_time for entry in wheel.infolist()} == {(2001, 9, 9, 1, 46, 40)}


def test_a_wheel_records_what_is_in_it(tmp_path: Path) -> None:
    stale = {**FILES, "weightonly-1.0.dist-info/RECORD": b"of another wheel", "weightonly-1.0.dist-info/WHEEL": b"too"}
    with zipfile.ZipFile(wheels.write(tmp_path, stale, LINUX)) as wheel:
        contents = {name: wheel.read(name) for name in wheel.namelist()}
        assert wheel.getinfo("weightonly/lib/a.so").external_attr >> 16 == 0o100755
    record = "weightonly-1.0.dist-info/RECORD"
    rows = list(csv.reader(contents.pop(record).decode().splitlines()))
    assert rows.pop() == [record, "", ""]
    assert {name: digest for name, digest, _ in rows} == {
        name: "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
        for name, content in contents.items()
    }
    lines = contents["weightonly-1.0.dist-info/WHEEL"].decode().splitlines()
    assert "Tag: py3-none-manylinux_2_34_x86_64" in lines and "Root-Is-Purelib: false" in lines


def test_later_builds_of_a_version_have_their_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "project_version", lambda: ("1.0", 3))
    path = wheels.write(tmp_path, FILES, LINUX)
    assert path.name == "weightonly-1.0-3-py3-none-manylinux_2_34_x86_64.whl"
    with zipfile.ZipFile(path) as wheel:
        assert b"\nBuild: 3\n" in wheel.read("weightonly-1.0.dist-info/WHEEL")


def test_the_version_stands_in_one_place() -> None:
    version, number = library.project_version()
    assert version == wo.__version__ and number >= 0
    sources = [file for folder in ("weightonly", "kernels") for file in (ROOT / folder).rglob("*.py")]
    sources += [ROOT / name for name in ("pyproject.toml", "setup.py", "CMakeLists.txt", "Makefile")]
    says = re.compile(rf"""["']{re.escape(version)}["']""")
    assert [file.name for file in sources if says.search(file.read_text(encoding="utf-8"))] == ["version.py"]


def test_the_wheel_of_the_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "LIBRARY", tmp_path / "libweightonly_kernels.so")
    monkeypatch.setattr(library, "KERNELS_RECORD", tmp_path / "kernels.json")
    library.LIBRARY.write_bytes(b"\x7fELF")
    decision = target.Decision(Path("nvcc"), "a wheel")
    built = {"archs": ["80", "120+PTX"], "nvcc": "13.0.88", "cutlass": "4.2.0", "kernels": 2, "spills": []}
    library.write_metadata(library.KERNELS_RECORD, decision, **built, build_seconds=1.5)
    path = wheels.write(tmp_path, wheels.kernels_files(), LINUX)
    version = wo.__version__
    assert path.name == f"weightonly_kernels-{version}+cu130-py3-none-manylinux_2_34_x86_64.whl"
    with zipfile.ZipFile(path) as wheel:
        info = f"weightonly_kernels-{version}+cu130.dist-info"
        assert wheel.namelist() == [
            "weightonly/lib/kernels.json",
            "weightonly/lib/libweightonly_kernels.so",
            *(f"{info}/{name}" for name in ("METADATA", "WHEEL", "licenses/LICENSE", "RECORD")),
        ]
        assert f"\nRequires-Dist: weightonly=={version}\n" in wheel.read(f"{info}/METADATA").decode()
        record = json.loads(wheel.read("weightonly/lib/kernels.json"))
    assert record == {"version": version, "build": 0, "cuda": True, "reason": "a wheel", **built}


def test_pythons_are_named_or_on_the_path(tmp_path: Path) -> None:
    for version in wheels.PYTHONS:
        (python := tmp_path / f"python{version}").write_text("#!/bin/sh\n")
        python.chmod(0o755)
    env = {"PATH": str(tmp_path)}
    assert [python.name for python in wheels.find_pythons(env)] == [f"python{version}" for version in wheels.PYTHONS]
    named = wheels.find_pythons({**env, "WEIGHTONLY_PYTHONS": f"python3.12 {tmp_path}/python3.10"})
    assert named == [tmp_path / "python3.12", tmp_path / "python3.10"]
    (tmp_path / "python3.13").unlink()
    with pytest.raises(RuntimeError, match=r"^python3\.13 not found: .* WEIGHTONLY_PYTHONS='python3\.12 \.\.\.' names"):
        wheels.find_pythons(env)


# --- installations of parts: a module that fails when it is imported stands for the compiled one ------------------

PROGRAM = """
import sys, weightonly
from weightonly.__main__ import main
print(weightonly.cuda_built())
sys.exit(main(["info"]))
"""


def site_with(folder: Path, module: bool, kernels: str | None) -> Path:
    """An installation. module: of the wheel weightonly; kernels: the version of weightonly-kernels, None: without."""
    package = installed(folder) / "weightonly"
    if module:
        (package / "_C.py").write_text("raise ImportError('the module is imported')\n")
    reason = "the wheel weightonly-kernels is not installed"
    record = {"version": wo.__version__, "cuda": False, "reason": reason}
    (package / "_build.json").write_text(json.dumps(record))
    if kernels is not None:
        (package / "lib").mkdir(exist_ok=True)
        (package / "lib" / "libweightonly_kernels.so").touch()
        record = {"version": kernels, "cuda": True, "reason": "a wheel", "archs": ["80"], "nvcc": "13.0.88"}
        (package / "lib" / "kernels.json").write_text(json.dumps(record))
    return folder


def test_the_package_without_kernels_works_and_says_so(tmp_path: Path) -> None:
    done = run(site_with(tmp_path / "site", module=True, kernels=None), PROGRAM, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("False\n")
    assert "build: no CUDA kernels (the wheel weightonly-kernels is not installed)" in done.stdout


def test_kernels_of_another_version_are_an_error_that_says_what_to_install(tmp_path: Path) -> None:
    done = run(site_with(tmp_path / "site", module=True, kernels="9.9"), PROGRAM, tmp_path)
    assert done.returncode == 1
    version = wo.__version__
    expected = (
        f"ImportError: weightonly {version} has the kernels of version 9.9: pip install weightonly-kernels=={version}"
    )
    assert expected in done.stderr


def test_kernels_of_this_version_are_loaded(tmp_path: Path) -> None:
    done = run(site_with(tmp_path / "site", module=True, kernels=wo.__version__), PROGRAM, tmp_path)
    assert "ImportError: the module is imported" in done.stderr


def test_kernels_without_a_module_for_this_python(tmp_path: Path) -> None:
    done = run(site_with(tmp_path / "site", module=False, kernels=wo.__version__), PROGRAM, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("False\n")
    assert "they cannot be used: there is no compiled module for this Python" in done.stdout
