"""`python -m weightonly info` and `--version`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import weightonly as wo
from weightonly import __main__ as command
from weightonly import build_info, info
from weightonly.build_info import BuildInfo, Spill
from weightonly.heuristics.configs import CONFIGS

BUILT = BuildInfo(
    version="0.1.0",
    cuda=True,
    reason="WEIGHTONLY_CUDA=on",
    archs=("80", "90a"),
    nvcc="13.0.88",
    cutlass="4.2.0",
    kernels=123,
)
H200 = info.Gpu("NVIDIA H200", 90, 132)
T4 = info.Gpu("Tesla T4", 75, 40)


def test_info_of_this_installation() -> None:
    result = subprocess.run([sys.executable, "-m", "weightonly", "info"], capture_output=True, text=True, check=True)
    lines = result.stdout.splitlines()
    assert lines[0] == f"weightonly {wo.__version__}, torch {torch.__version__}"
    built = build_info.read()
    assert lines[1] == info.describe_build(built, wo.cuda_built()).splitlines()[0]
    gpus = [line for line in lines if line.startswith("GPU ")]
    assert len(gpus) == torch.cuda.device_count()
    assert gpus or "GPU: none is visible; CPU tensors work" in lines


def test_version_of_this_installation() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "weightonly", "--version"], capture_output=True, text=True, check=True
    )
    assert result.stdout == info.describe_version(build_info.read()) + "\n"
    assert result.stdout.startswith(f"weightonly {wo.__version__} with")


def test_version_in_a_line() -> None:
    version = f"weightonly {wo.__version__}"
    assert info.describe_version(BUILT) == f"{version} with 123 kernels for 80, 90a (nvcc 13.0.88, CUTLASS 4.2.0)"
    build = BuildInfo(version="0.1.0", cuda=False, reason="WEIGHTONLY_CUDA=off")
    assert info.describe_version(build) == f"{version} without CUDA kernels (WEIGHTONLY_CUDA=off)"


def test_build_without_kernels() -> None:
    build = BuildInfo(version="0.1.0", cuda=False, reason="WEIGHTONLY_CUDA=auto, nvcc was not found")
    text = info.describe_build(build, loaded=False)
    assert text == "build: no CUDA kernels (WEIGHTONLY_CUDA=auto, nvcc was not found)"


def test_build_with_kernels() -> None:
    assert info.describe_build(BUILT, loaded=True).splitlines() == [
        "build: 123 kernels for 80, 90a (WEIGHTONLY_CUDA=on)",
        "  nvcc 13.0.88, CUTLASS 4.2.0",
        "  register spills: none",
    ]


def test_build_with_spills() -> None:
    spill = Spill(unit="gemm_a", name="_Z1a", arch="80", spill_store_bytes=8, spill_load_bytes=16)
    lines = info.describe_build(BuildInfo("0.1.0", True, "on", spills=(spill,)), loaded=True).splitlines()
    assert lines[-2:] == ["  register spills: 1", "    gemm_a sm_80: 8 bytes stored, 16 bytes loaded"]


def test_kernels_without_a_module_for_this_python() -> None:
    assert "make binding" in info.describe_build(BUILT, loaded=False).splitlines()[-1]


@pytest.mark.parametrize(
    ("driver", "is_too_old"),
    [((12, 9), True), ((13, 0), False), ((14, 1), False), (None, False)],
    ids=["older", "same", "newer", "unknown"],
)
def test_driver_of_another_cuda(driver: tuple[int, int] | None, is_too_old: bool) -> None:
    problem = info.driver_problem(BUILT, driver)
    expected = "driver: supports CUDA 12.9, too old for these kernels (CUDA 13.0.88); update it, or take kernels that "
    assert problem == (f"{expected}CUDA 12 built" if is_too_old else None)
    assert info.driver_problem(BuildInfo("0.1.0", cuda=False, reason=""), driver) is None


def test_kernels_that_run_on_each_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["weightonly.kernels"], "built_archs", lambda: ("80", "90a"))
    lines = info.describe_gpus(CONFIGS, [H200, T4]).splitlines()
    second = lines.index("GPU 1: Tesla T4, compute capability 7.5, 40 SMs")
    on_h200 = [c for c in CONFIGS if c.family not in ("gemm_sm70", "gemm_sm75")]
    assert lines[:second] == [
        "GPU 0: NVIDIA H200, compute capability 9.0, 132 SMs",
        f"  {len(on_h200)} of {len(CONFIGS)} compiled configurations run on it",
        *(f"    {config.kernel} ({', '.join(config.formats)})" for config in on_h200),
    ]
    assert lines[second + 1 :] == [
        f"  0 of {len(CONFIGS)} compiled configurations run on it",
        "  build for it: WEIGHTONLY_CUDA=on WEIGHTONLY_ARCHS=75 pip install .",
    ]


@pytest.mark.parametrize("argument", ["info", "--version"])
def test_damaged_metadata_is_an_error(
    argument: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged = tmp_path / "_build.json"
    damaged.write_text("{")
    read = build_info.read
    monkeypatch.setattr(build_info, "read", lambda: read(damaged))
    assert command.main([argument]) == 1
    assert f"error: {damaged}" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["information"]], ids=["no command", "unknown command"])
def test_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        command.main(arguments)
    assert stopped.value.code == 2
    assert "usage: python -m weightonly" in capsys.readouterr().err
