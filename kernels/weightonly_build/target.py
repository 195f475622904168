"""What a build contains: CUDA kernels or not, and for which targets."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

DEFAULT_ARCHS = ("80", "90a")

# nvcc 13 has dropped Volta; generate.py compiles the sm70 kernels to compute_75 PTX there.
_WITHOUT_NVCC = (70,)
# wgmma and the tensor memory accelerator exist only in the architecture-specific target.
_SPECIFIC = {90: "90a"}


@dataclass(frozen=True)
class Decision:
    """The CUDA kernels are built with this nvcc, or not at all, and why."""

    nvcc: Path | None
    reason: str

    @property
    def cuda(self) -> bool:
        return self.nvcc is not None


def decide(mode: str, nvcc: Path | None, gpus: Sequence[str]) -> Decision:
    """What WEIGHTONLY_CUDA=`mode` means on a machine with this nvcc (None: not found) and these GPUs.

    `gpus` are compute capabilities. An unknown mode is a ValueError, `on` without nvcc a RuntimeError.
    """
    setting = f"WEIGHTONLY_CUDA={mode}"
    if mode not in ("auto", "on", "off"):
        raise ValueError(f"WEIGHTONLY_CUDA: expected auto, on or off, got {mode!r}")
    if mode == "off":
        return Decision(None, setting)
    if mode == "on":
        if nvcc is None:
            raise RuntimeError(f"{setting}: nvcc was not found (CUDACXX, CUDA_HOME, PATH, /usr/local/cuda)")
        return Decision(nvcc, setting)
    if nvcc is None:
        return Decision(None, f"{setting}, nvcc was not found")
    if not gpus:
        return Decision(None, f"{setting}, no NVIDIA GPU was found")
    return Decision(nvcc, f"{setting}, nvcc and a GPU were found")


def parse_archs(text: str, known: Sequence[int]) -> list[str]:
    """Targets such as "80,90a", "sm_80;8.6" or "9.0" as a sorted list of distinct names: ["80", "90a"].

    "120+PTX" also keeps the PTX of 120, for GPUs that are newer than all targets. `known` holds the numbers that can be
    built for (`buildable_archs`); any other is a ValueError.
    """
    archs: dict[str, int] = {}
    with_ptx: dict[str, str] = {}
    for value in filter(None, (value.strip() for value in re.split(r"[,;\s]", text))):
        found = re.fullmatch(r"(?:sm_|compute_)?(?:(\d{2,3})|(\d{1,2})\.(\d))([af]?)(\+PTX)?", value)
        number = int(found[1] or found[2] + found[3]) if found else 0
        suffix, ptx = (found[4], found[5] or "") if found else ("", "")
        # Architecture-specific targets begin with Hopper (a), family-specific ones with Blackwell (f).
        has_suffix = not suffix or number >= {"a": 90, "f": 100}[suffix]
        # Their PTX runs nowhere else, and that of Turing is always kept.
        has_ptx = not ptx or not (suffix or number <= 75 or number in _SPECIFIC)
        if not found or number not in known or not has_suffix or not has_ptx:
            expected = ", ".join(_SPECIFIC.get(arch, str(arch)) for arch in sorted(known))
            raise ValueError(f"WEIGHTONLY_ARCHS: expected some of {expected}, got {value!r}")
        name = _SPECIFIC.get(number, f"{number}{suffix}")
        archs[name], with_ptx[name] = number, ptx or with_ptx.get(name, "")
    if not archs:
        raise ValueError(f"WEIGHTONLY_ARCHS: expected targets such as '80,90a', got {text!r}")
    return [name + with_ptx[name] for name in sorted(archs, key=lambda name: (archs[name], name))]


def find_nvcc(env: Mapping[str, str] = os.environ) -> Path | None:
    """The CUDA compiler: CUDACXX, CUDA_HOME or CUDA_PATH, PATH, /usr/local/cuda; the first that exists."""
    homes = [env[name] for name in ("CUDA_HOME", "CUDA_PATH") if env.get(name)]
    candidates = [env.get("CUDACXX"), *(f"{home}/bin/nvcc" for home in homes), "nvcc"]
    for candidate in filter(None, [*candidates, "/usr/local/cuda/bin/nvcc"]):
        if found := shutil.which(candidate, path=env.get("PATH")):
            return Path(found)
    return None


def visible_gpus() -> list[str]:
    """Compute capabilities of the visible GPUs, e.g. ["9.0"]; empty without an NVIDIA driver."""
    command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    if shutil.which(command[0]) is None:
        return []
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return re.findall(r"^\d+\.\d$", result.stdout, re.MULTILINE) if result.returncode == 0 else []


def nvcc_version(nvcc: Path) -> str:
    """For example "13.0.88"."""
    text = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"\bV(\d+\.\d+\.\d+)", text)
    return found[1] if found else "unknown"


def buildable_archs(nvcc: Path) -> list[int]:
    """Every target number that this nvcc knows, and those that generate.py reaches through PTX."""
    text = subprocess.run([nvcc, "--list-gpu-code"], capture_output=True, text=True, check=True).stdout
    return sorted({*_WITHOUT_NVCC, *(int(number) for number in re.findall(r"sm_(\d+)", text))})


def requested_archs(nvcc: Path, gpus: Sequence[str], env: Mapping[str, str] = os.environ) -> list[str]:
    """WEIGHTONLY_ARCHS; unset or empty: the visible GPUs'; without a GPU: DEFAULT_ARCHS."""
    text = env.get("WEIGHTONLY_ARCHS") or ",".join(gpus) or ",".join(DEFAULT_ARCHS)
    return parse_archs(text, buildable_archs(nvcc))


def asks_for_unverified(env: Mapping[str, str] = os.environ) -> bool:
    """Whether WEIGHTONLY_UNVERIFIED=on asks for the kernels that no GPU has run, too. Other values: ValueError."""
    value = env.get("WEIGHTONLY_UNVERIFIED") or "off"
    if value not in ("on", "off"):
        raise ValueError(f"WEIGHTONLY_UNVERIFIED: expected on or off, got {value!r}")
    return value == "on"


def decide_here(env: Mapping[str, str] = os.environ) -> Decision:
    """`decide` for this machine and environment."""
    return decide(env.get("WEIGHTONLY_CUDA") or "auto", find_nvcc(env), visible_gpus())
