"""GPUs as torch and the driver describe them: compute capability, SMs; driver version, clocks, temperature, power.

The driver is asked through NVML, the C library behind nvidia-smi. Its answers go into records of measurements only:
where NVML is missing or does not answer, a value is None.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from typing import Any

import torch

from .require import require_device

_SM_CLOCK, _MEMORY_CLOCK, _GPU_SENSOR = 1, 2, 0  # nvmlClockType_t, nvmlTemperatureSensors_t


@dataclass(frozen=True)
class GpuState:
    """What the driver says of a GPU at one moment. None: it does not say."""

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
def device_arch(device: int) -> int:
    """Compute capability of a CUDA device as an integer: 90 for an H200."""
    major, minor = torch.cuda.get_device_capability(device)
    return major * 10 + minor


@functools.cache
def sm_count(device: int) -> int:
    """Streaming multiprocessors of a CUDA device: 132 for an H200."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def check_memory(device: torch.device | str | int) -> torch.device:
    """The device. Raises what `check_visible` raises, and ValueError for meta, which holds no numbers."""
    found = check_visible(device)
    if found.type == "meta":
        raise ValueError("device: expected one that holds numbers, got 'meta'")
    return found


def check_visible(device: torch.device | str | int) -> torch.device:
    """The device. Raises what `require_device` raises, and ValueError for a CUDA device that is not visible."""
    found = require_device(device)
    if found.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device: expected 'cpu', as no CUDA GPU is visible, got {str(device)!r}")
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device: expected a GPU of 0..{torch.cuda.device_count() - 1}, got {str(device)!r}")
    return found


@functools.cache
def _library() -> Any:
    """NVML, initialized; None where there is none."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    return library if library.nvmlInit_v2() == 0 else None


def driver_version() -> str | None:
    """The version of the driver, such as "580.65.06"; None where it is not known."""
    library = _library()
    text = ctypes.create_string_buffer(96)
    if library is None or library.nvmlSystemGetDriverVersion(text, ctypes.c_uint(len(text))) != 0:
        return None
    return text.value.decode()


def driver_cuda() -> tuple[int, int] | None:
    """The newest CUDA that the driver supports, such as (13, 0); None where it is not known."""
    version = ctypes.c_int()
    if (library := _library()) is None or library.nvmlSystemGetCudaDriverVersion_v2(ctypes.byref(version)) != 0:
        return None
    return version.value // 1000, version.value % 1000 // 10


@functools.cache
def _handle(uuid: str) -> ctypes.c_void_p | None:
    handle = ctypes.c_void_p()
    found = _library().nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode(), ctypes.byref(handle)) == 0
    return handle if found else None


def gpu_state(device: torch.device) -> GpuState | None:
    """The state of a CUDA device now; None for a CPU and for a GPU that NVML does not know. Takes some microseconds."""
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
    """The number that an NVML function writes to its last argument; None where it fails."""
    value = ctypes.c_uint()
    status = getattr(_library(), function)(handle, *map(ctypes.c_uint, arguments), ctypes.byref(value))
    return value.value if status == 0 else None


def check_one_device(**tensors: torch.Tensor) -> None:
    """Raises ValueError unless all are on the device of the first, which is a CPU or a CUDA GPU."""
    (first, where), *others = ((name, tensor.device) for name, tensor in tensors.items())
    if where.type not in ("cpu", "cuda"):
        raise ValueError(f"{first}: expected a CPU or CUDA tensor, got one on {where}")
    for name, device in others:
        if device != where:
            raise ValueError(f"{name}: expected on {where} as {first} is, got {device}")
