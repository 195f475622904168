"""What the driver says of itself and of a GPU: its version, clocks, temperature and power.

Through NVML, the C library behind nvidia-smi, which comes with every driver. All of it is for records: where NVML is
missing or does not answer, the value is None.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from typing import Any

import torch

_SM_CLOCK, _MEMORY_CLOCK, _GPU_SENSOR = 1, 2, 0  # nvmlClockType_t, nvmlTemperatureSensors_t


@dataclass(frozen=True)
class GpuState:
    """Of one moment."""

    sm_mhz: int | None
    memory_mhz: int | None
    temperature_c: int | None
    power_w: float | None

    def __str__(self) -> str:
        parts = (
            ("SM {} MHz", self.sm_mhz),
            ("memory {} MHz", self.memory_mhz),
            ("{} °C", self.temperature_c),
            ("{:.0f} W", self.power_w),
        )
        return ", ".join(text.format(value) for text, value in parts if value is not None) or "not known"


@functools.cache
def _library() -> Any:
    """The initialized library, or None."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    return library if library.nvmlInit_v2() == 0 else None


def driver_version() -> str | None:
    """Such as "580.65.06"."""
    library = _library()
    text = ctypes.create_string_buffer(96)
    if library is None or library.nvmlSystemGetDriverVersion(text, ctypes.c_uint(len(text))) != 0:
        return None
    return text.value.decode()


@functools.cache
def _handle(uuid: str) -> ctypes.c_void_p | None:
    handle = ctypes.c_void_p()
    found = _library().nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode(), ctypes.byref(handle)) == 0
    return handle if found else None


def gpu_state(device: torch.device) -> GpuState | None:
    """The state of a CUDA device now, in some microseconds; None for a CPU and where NVML does not know the GPU."""
    if device.type != "cuda" or _library() is None:
        return None
    handle = _handle(str(torch.cuda.get_device_properties(device).uuid))
    return None if handle is None else _read_state(handle)


def _read_state(handle: ctypes.c_void_p) -> GpuState:
    power_mw = _read("nvmlDeviceGetPowerUsage", handle)
    return GpuState(
        sm_mhz=_read("nvmlDeviceGetClockInfo", handle, _SM_CLOCK),
        memory_mhz=_read("nvmlDeviceGetClockInfo", handle, _MEMORY_CLOCK),
        temperature_c=_read("nvmlDeviceGetTemperature", handle, _GPU_SENSOR),
        power_w=None if power_mw is None else power_mw / 1e3,
    )


def _read(function: str, handle: ctypes.c_void_p, *arguments: int) -> int | None:
    """What one of NVML's functions writes to its last argument."""
    value = ctypes.c_uint()
    status = getattr(_library(), function)(handle, *map(ctypes.c_uint, arguments), ctypes.byref(value))
    return value.value if status == 0 else None
