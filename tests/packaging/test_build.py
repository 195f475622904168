"""The build's decisions, its reading of compiler logs, and an install without CUDA; without nvcc or GPU."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests import ROOT

from weightonly import build_info
from weightonly.version import VERSION
from weightonly_build import cutlass, library, report, target

NVCC = Path("/opt/cuda/bin/nvcc")
KNOWN = [70, 75, 80, 86, 87, 89, 90, 100, 120]

# From `nvcc -Xptxas -v` of CUDA 13.0: two targets, a kernel that spills, and a function that was not inlined.
PTXAS_LOG = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z4finePf' for 'sm_90a'
ptxas info    : Function properties for _Z4finePf
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 10 registers, used 0 barriers
ptxas info    : Compile time = 19.758 ms
ptxas info    : Compiling entry function '_Z6spillyILi64EEvPfi' for 'sm_90a'
ptxas info    : Function properties for _Z6spillyILi64EEvPfi
    2296 bytes stack frame, 3384 bytes spill stores, 4064 bytes spill loads
ptxas info    : Used 32 registers, used 1 barriers, 2296 bytes cumulative stack size
ptxas info    : Compile time = 556.377 ms
kernels/gemm.cuh(12): warning #177-D: variable "i" was declared but never referenced
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z4finePf' for 'sm_80'
ptxas info    : Function properties for _Z4finePf
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 8 registers, used 0 barriers, 360 bytes cmem[0]
ptxas info    : Function properties for _Z3bigPfi
    0 bytes stack frame, 784 bytes spill stores, 840 bytes spill loads
"""

SERIALIZED_LOG = """\
ptxas info    : (C7514) Potential Performance Loss: wgmma.mma_async instructions are serialized due to non wgmma \
instructions reading accumulator registers of a wgmma in the function '_Z4waitv'
ptxas info    : 0 bytes gmem
"""

NINJA_LOG = """\
# ninja log v5
0\t9000\t1770000000000000000\tunits/a.cu.o\t5d1f3b2a
100\t2600\t1770000001000000000\tunits/b.cu.o\t6d1f3b2a
12000\t13500\t1770000002000000000\tunits/a.cu.o\t7d1f3b2a
"""


@pytest.mark.parametrize(
    ("mode", "nvcc", "gpus", "cuda", "reason"),
    [
        ("auto", NVCC, ["9.0"], True, "nvcc and a GPU were found"),
        ("auto", NVCC, [], False, "no NVIDIA GPU was found"),
        ("auto", None, ["9.0"], False, "nvcc was not found"),
        ("on", NVCC, [], True, "WEIGHTONLY_CUDA=on"),
        ("off", NVCC, ["9.0"], False, "WEIGHTONLY_CUDA=off"),
    ],
    ids=["auto", "auto_without_gpu", "auto_without_nvcc", "on", "off"],
)
def test_decide(mode: str, nvcc: Path | None, gpus: list[str], cuda: bool, reason: str) -> None:
    decision = target.decide(mode, nvcc, gpus)
    assert decision.cuda is cuda
    assert decision.nvcc == (nvcc if cuda else None)
    assert reason in decision.reason


def test_decide_refuses_unknown_mode() -> None:
    with pytest.raises(ValueError, match="WEIGHTONLY_CUDA: expected auto, on or off, got 'yes'"):
        target.decide("yes", NVCC, [])


def test_decide_on_needs_nvcc() -> None:
    with pytest.raises(RuntimeError, match="WEIGHTONLY_CUDA=on: nvcc was not found"):
        target.decide("on", None, ["9.0"])


@pytest.mark.parametrize(
    ("text", "archs"),
    [
        ("80,90a", ["80", "90a"]),
        ("90a;80", ["80", "90a"]),
        ("sm_80, compute_86", ["80", "86"]),
        ("8.0 9.0", ["80", "90a"]),
        ("90", ["90a"]),
        ("9.0,9.0,sm_90a", ["90a"]),
        ("120,7.5,70", ["70", "75", "120"]),
        ("10.0,100a,100f", ["100", "100a", "100f"]),
        ("12.0+PTX,90", ["90a", "120+PTX"]),
        ("120,sm_120+PTX,120", ["120+PTX"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "+".join(value),
)
def test_parse_archs(text: str, archs: list[str]) -> None:
    assert target.parse_archs(text, KNOWN) == archs


@pytest.mark.parametrize(
    "value", ["61", "hopper", "80a", "90f", "8", "sm_", "800", "-80", "75+PTX", "90a+PTX", "120+ptx"]
)
def test_parse_archs_names_the_unknown_value(value: str) -> None:
    with pytest.raises(ValueError, match=f"WEIGHTONLY_ARCHS: expected some of 70, 75, .*, got '{re.escape(value)}'"):
        target.parse_archs(f"80,{value}", KNOWN)


@pytest.mark.parametrize("text", ["", " ,; "])
def test_parse_archs_refuses_an_empty_list(text: str) -> None:
    with pytest.raises(ValueError, match="WEIGHTONLY_ARCHS: expected targets"):
        target.parse_archs(text, KNOWN)


@pytest.mark.parametrize(
    ("variable", "gpus", "archs"),
    [
        ("75", ["9.0"], ["75"]),
        ("", ["9.0", "8.0", "9.0"], ["80", "90a"]),
        ("", [], ["80", "90a"]),
    ],
    ids=["variable", "visible GPUs", "neither"],
)
def test_requested_archs(monkeypatch: pytest.MonkeyPatch, variable: str, gpus: list[str], archs: list[str]) -> None:
    monkeypatch.setattr(target, "buildable_archs", lambda nvcc: KNOWN)
    assert target.requested_archs(NVCC, gpus, {"WEIGHTONLY_ARCHS": variable}) == archs


def _program(path: Path, output: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\ncat <<'EOF'\n{output}\nEOF\n")
    path.chmod(0o755)
    return path


def test_machine_is_read_from_the_tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvcc = _program(tmp_path / "nvcc", "sm_75\nsm_80\nsm_90\nrelease 13.0, V13.0.88")
    _program(tmp_path / "nvidia-smi", "9.0\n8.0")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert target.buildable_archs(nvcc) == [70, 75, 80, 90]
    assert target.nvcc_version(nvcc) == "13.0.88"
    assert target.visible_gpus() == ["9.0", "8.0"]
    assert target.decide_here({"PATH": str(tmp_path)}).nvcc == nvcc


def test_a_failing_driver_is_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing = _program(tmp_path / "nvidia-smi", "NVIDIA-SMI has failed because it could not reach the driver")
    failing.write_text(failing.read_text() + "exit 9\n")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert target.visible_gpus() == []


@pytest.mark.parametrize("variable", ["CUDACXX", "CUDA_HOME", "CUDA_PATH"])
def test_find_nvcc_prefers_the_variables(tmp_path: Path, variable: str) -> None:
    on_path = _program(tmp_path / "path" / "nvcc", "")
    named = _program(tmp_path / "home" / "bin" / "nvcc", "")
    env = {"PATH": str(on_path.parent)}
    assert target.find_nvcc(env) == on_path
    assert target.find_nvcc({**env, variable: str(named if variable == "CUDACXX" else tmp_path / "home")}) == named


def test_build_requirements_without_cuda_are_none() -> None:
    assert library.build_requirements(target.Decision(None, "WEIGHTONLY_CUDA=off")) == []


def test_build_requirements_with_cuda_name_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "find_tool", lambda name: "/usr/bin/ninja" if name == "ninja" else None)
    requirements = library.build_requirements(target.Decision(NVCC, "WEIGHTONLY_CUDA=on"))
    assert requirements == [library.pin("cmake"), library.pin("pybind11")]


def test_build_requirements_are_pinned_by_hash() -> None:
    """And the versions are those that pyproject.toml and the backend ask for."""
    text = library.REQUIREMENTS.read_text()
    blocks = re.findall(r"^(\w+)==[\d.]+ \\\n((?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)", text, re.MULTILINE)
    assert [name for name, _ in blocks] == ["cmake", "ninja", "pybind11", "setuptools"]
    text = library.REQUIREMENTS.with_name("wheel_requirements.txt").read_text()
    hashed = r"^\w+==[\d.]+ \\\n    --hash=sha256:[0-9a-f]{64}$"
    assert len(re.findall(hashed, text, re.MULTILINE)) == text.count("==") == 3
    assert f'requires = ["{library.pin("setuptools")}"]' in (ROOT / "pyproject.toml").read_text()
    every = library.build_requirements(target.Decision(NVCC, "on"))
    assert every and all("==" in requirement for requirement in every)


def _headers(folder: Path, version: str) -> Path:
    major, minor, patch = version.split(".")
    (folder / "cutlass").mkdir(parents=True)
    text = f"#define CUTLASS_MAJOR {major}\n#define CUTLASS_MINOR {minor}\n#define CUTLASS_PATCH {patch}\n"
    (folder / "cutlass" / "version.h").write_text(text)
    return folder


@pytest.mark.parametrize("below", ["include", "."], ids=["checkout", "include folder"])
def test_cutlass_dir_is_used(tmp_path: Path, below: str) -> None:
    include = _headers(tmp_path / "cutlass-checkout" / below, cutlass.VERSION)
    env = {"WEIGHTONLY_CUTLASS_DIR": str(tmp_path / "cutlass-checkout")}
    assert cutlass.find_headers(tmp_path / "build", env).resolve() == include.resolve()


def test_cutlass_dir_of_another_version_is_refused(tmp_path: Path) -> None:
    _headers(tmp_path, "3.5.1")
    with pytest.raises(RuntimeError, match=rf"expected version {cutlass.VERSION}, got 3\.5\.1"):
        cutlass.find_headers(tmp_path / "build", {"WEIGHTONLY_CUTLASS_DIR": str(tmp_path)})


def test_cutlass_dir_without_headers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="WEIGHTONLY_CUTLASS_DIR: expected a folder with cutlass/"):
        cutlass.find_headers(tmp_path / "build", {"WEIGHTONLY_CUTLASS_DIR": str(tmp_path)})


def test_cutlass_copy_in_the_build_folder_is_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    include = _headers(tmp_path / f"cutlass-{cutlass.VERSION}" / "include", cutlass.VERSION)
    monkeypatch.setattr(cutlass, "HEADERS_SHA256", cutlass.digest(include))
    assert cutlass.find_headers(tmp_path, {}) == include
    (include / "cutlass" / "version.h").write_text((include / "cutlass" / "version.h").read_text() + " ")
    monkeypatch.setattr(cutlass, "_download", lambda *folders: None)
    with pytest.raises(RuntimeError, match=r"CUTLASS headers in .*: expected SHA-256 \w{64}, got \w{64}"):
        cutlass.find_headers(tmp_path, {})


def test_cutlass_is_taken_from_nowhere_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not from `cutlass_library/` in the current folder, nor an installed one, nor a wheel that lies there."""
    _headers(tmp_path / "cutlass_library" / "source" / "include", cutlass.VERSION)
    (tmp_path / "cutlass_library" / "__init__.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    planted = tmp_path / "build" / "downloads" / "nvidia_cutlass-4.2.0.0-py3-none-any.whl"
    planted.parent.mkdir(parents=True)
    planted.write_bytes(b"PK")
    asked: list[list[str]] = []

    def pip(command: list[str], check: bool) -> None:
        asked.append([str(word) for word in command])
        assert not planted.exists()
        raise subprocess.CalledProcessError(1, command)

    monkeypatch.setattr(subprocess, "run", pip)
    with pytest.raises(RuntimeError, match="pip download"):
        cutlass.find_headers(tmp_path / "build", {})
    (command,) = asked
    assert "--require-hashes" in command
    requirement = Path(command[command.index("-r") + 1]).read_text()
    assert requirement == f"{cutlass.PACKAGE} --hash=sha256:{cutlass.WHEEL_SHA256}\n"


def test_parse_ptxas() -> None:
    functions = report.parse_ptxas(PTXAS_LOG)
    assert functions == [
        report.Function("_Z4finePf", "90a", 0, 0),
        report.Function("_Z6spillyILi64EEvPfi", "90a", 3384, 4064),
        report.Function("_Z4finePf", "80", 0, 0),
        report.Function("_Z3bigPfi", "80", 784, 840),
    ]
    assert [function.spills for function in functions] == [False, True, False, True]


def test_parse_ninja_log_keeps_the_last_build() -> None:
    assert report.parse_ninja_log(NINJA_LOG) == {"units/a.cu.o": 1.5, "units/b.cu.o": 2.5}


def _build_folder(folder: Path) -> Path:
    commands = [{"file": "units/a.cu", "command": "nvcc -c units/a.cu -o units/a.cu.o"}]
    commands += [{"file": "units/b.cu", "command": "nvcc -c units/b.cu -o units/b.cu.o"}]
    commands += [{"file": "host.cpp", "command": "c++ -c host.cpp -o host.cpp.o"}]
    (folder / "units").mkdir(parents=True)
    (folder / "compile_commands.json").write_text(json.dumps(commands))
    (folder / ".ninja_log").write_text(NINJA_LOG)
    (folder / "units" / "a.cu.o.log").write_text(PTXAS_LOG)
    (folder / "units" / "b.cu.o.log").write_text(SERIALIZED_LOG)
    return folder


def test_report_names_every_spilling_function_and_the_slowest_units(tmp_path: Path) -> None:
    units = report.read_units(_build_folder(tmp_path))
    text = report.report(units, ["80", "90a"], kernel_count=2, wall_s=12.3, slowest=1)
    assert "2 kernels for 80, 90a from 2 units; this build took 12 s (units: 4 s" in text
    assert "2.5 s  b" in text
    assert "1.5 s  a" not in text
    assert "register spills: 2, and there should be none" in text
    assert "a sm_90a: 3384 bytes stored, 4064 bytes loaded (_Z6spillyILi64EEvPfi)" in text
    assert "a sm_80: 784 bytes stored, 840 bytes loaded (_Z3bigPfi)" in text
    assert text.endswith("wgmma serialized: b (_Z4waitv)")
    assert [unit.serialized for unit in units] == [(), ("_Z4waitv",)]


def test_report_without_spills_says_none() -> None:
    unit = report.Unit("a", 1.0, (report.Function("_Z4finePf", "80", 0, 0),))
    assert report.report([unit], ["80"], 1, 1.0).endswith("register spills: none")


def test_build_info_reads_what_the_build_writes(tmp_path: Path) -> None:
    units = report.read_units(_build_folder(tmp_path / "cmake"))
    path = tmp_path / "_build.json"
    library.write_metadata(
        path,
        target.Decision(NVCC, "WEIGHTONLY_CUDA=on"),
        archs=["80", "90a"],
        nvcc="13.0.88",
        cutlass=cutlass.VERSION,
        kernels=2,
        spills=report.spills(units),
        build_seconds=12.3,
    )
    info = build_info.read(path)
    assert info == build_info.BuildInfo(
        version=VERSION,
        cuda=True,
        reason="WEIGHTONLY_CUDA=on",
        archs=("80", "90a"),
        nvcc="13.0.88",
        cutlass="4.2.0",
        kernels=2,
        spills=(
            build_info.Spill("a", "_Z6spillyILi64EEvPfi", "90a", 3384, 4064),
            build_info.Spill("a", "_Z3bigPfi", "80", 784, 840),
        ),
        build_seconds=12.3,
    )


def test_build_info_of_a_cpu_library(tmp_path: Path) -> None:
    path = tmp_path / "_build.json"
    library.write_metadata(path, target.Decision(None, "WEIGHTONLY_CUDA=off"))
    info = build_info.read(path)
    assert (info.cuda, info.reason, info.archs, info.kernels) == (False, "WEIGHTONLY_CUDA=off", (), 0)


def test_build_info_without_a_build(tmp_path: Path) -> None:
    info = build_info.read(tmp_path / "_build.json")
    assert not info.cuda
    assert info.reason == "never built: there is no _build.json"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[1, 2]",
        "null",
        '{"cuda": true}',
        '{"version": "1", "cuda": true, "reason": "", "colour": 1}',
    ],
)
def test_build_info_names_a_corrupt_file(tmp_path: Path, text: str) -> None:
    path = tmp_path / "_build.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"_build\.json: expected the metadata of a build, got"):
        build_info.read(path)


@pytest.mark.slow
def test_install_without_cuda_is_quick_and_complete(tmp_path: Path) -> None:
    """`pip install .` into an empty folder: seconds, no CUDA kernels, and both mapped folders."""
    site = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-v", "--no-deps"]
    options = ["--no-build-isolation", "--target", str(site), str(ROOT)]
    env = {**os.environ, "WEIGHTONLY_CUDA": "off"}
    installed = subprocess.run([*pip, *options], capture_output=True, text=True, env=env, check=False)
    log = installed.stdout + installed.stderr
    assert installed.returncode == 0, log
    assert "no CUDA kernels are built (WEIGHTONLY_CUDA=off)" in log
    assert {file.name for file in site.glob("weightonly/**/*.so")} <= {"libweightonly_cpu.so"}
    modules = {file.relative_to(ROOT) for name in ("heuristics", "bench") for file in (ROOT / name).rglob("*.py")}
    modules |= {file.relative_to(ROOT / "weightonly") for file in (ROOT / "weightonly").rglob("*.py")}
    assert {file.relative_to(site / "weightonly") for file in site.glob("weightonly/**/*.py")} == modules

    program = (
        "import weightonly, weightonly.heuristics, weightonly.bench; from weightonly import build_info; "
        "print(weightonly.__file__, build_info.read().reason)"
    )
    env = {**os.environ, "PYTHONPATH": str(site)}
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=env, cwd=tmp_path, check=False
    )
    assert run.returncode == 0, run.stderr
    file, reason = run.stdout.split()
    assert Path(file).is_relative_to(site)
    assert reason == "WEIGHTONLY_CUDA=off"


def test_lint_looks_at_every_file_of_cpp() -> None:
    """By the folders alone: an sdist has no git."""
    names = ["*.h", "*.cuh", "*.cu", "*.cpp"]
    tracked = subprocess.run(["git", "ls-files", *names], cwd=ROOT, capture_output=True, text=True, check=False)
    if tracked.returncode or not tracked.stdout:
        pytest.skip("not a git checkout")
    command = ["make", "--dry-run", "lint", "VENV=none"]
    steps = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    (formatted,) = (line.split() for line in steps if "clang-format" in line)
    assert set(tracked.stdout.split()) <= set(formatted)


@pytest.mark.parametrize(("value", "expected"), [(None, False), ("", False), ("off", False), ("on", True)])
def test_unverified_kernels_are_asked_for(value: str | None, expected: bool) -> None:
    assert target.asks_for_unverified({} if value is None else {"WEIGHTONLY_UNVERIFIED": value}) == expected


def test_another_word_for_unverified_kernels() -> None:
    with pytest.raises(ValueError, match="WEIGHTONLY_UNVERIFIED: expected on or off, got '1'"):
        target.asks_for_unverified({"WEIGHTONLY_UNVERIFIED": "1"})
