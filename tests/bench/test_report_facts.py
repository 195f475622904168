"""Facts of the machine in a report: the commit of the checkout, the driver and the state of the GPU."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from weightonly import device
from weightonly.bench.report import facts


def test_commit_of_a_checkout(tmp_path: Path) -> None:
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    assert facts.commit(tmp_path) == "not a git checkout"

    def git(*arguments: str) -> None:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", "-C", str(tmp_path), *identity, *arguments], check=True, capture_output=True)

    git("init")
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("commit", "-m", "one")
    assert re.fullmatch(r"[0-9a-f]{12}", facts.commit(tmp_path))
    (tmp_path / "file").write_text("2")
    assert re.fullmatch(r"[0-9a-f]{12} \+ changes", facts.commit(tmp_path))


class Library:
    """NVML as far as it is used, of a GPU that does not tell its temperature."""

    def nvmlSystemGetDriverVersion(self, text: object, length: object) -> int:
        text.value = b"580.65.06"  # type: ignore[attr-defined]
        return 0

    def _answer(self, place: object, value: int) -> int:
        place._obj.value = value  # type: ignore[attr-defined]
        return 0

    def nvmlDeviceGetClockInfo(self, handle: object, kind: object, place: object) -> int:
        return self._answer(place, {1: 1980, 2: 3201}[kind.value])  # type: ignore[attr-defined]

    def nvmlDeviceGetPowerUsage(self, handle: object, place: object) -> int:
        return self._answer(place, 123456)

    def nvmlDeviceGetTemperature(self, handle: object, sensor: object, place: object) -> int:
        return 3  # not supported


def test_state_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_library", Library)
    assert device.driver_version() == "580.65.06"
    state = device._read_state(device.ctypes.c_void_p(1))
    assert state == device.GpuState(1980, 3201, None, 123.456)
    assert str(state) == "SM 1980 MHz, memory 3201 MHz, 123 W"
    assert str(device.GpuState(None, None, None, None)) == "not known"


def test_no_driver_no_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_library", lambda: None)
    assert device.driver_version() is None
    assert device.gpu_state(torch.device("cuda", 0)) is None
    assert device.gpu_state(torch.device("cpu")) is None
