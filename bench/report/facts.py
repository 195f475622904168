"""What a measurement was made on and with, as text: it goes into the files and onto the page of a report."""

from __future__ import annotations

import datetime
import importlib.metadata
import platform
import subprocess
from pathlib import Path

import torch

import weightonly as wo
from weightonly.build_info import read as read_build
from weightonly.device import driver_version
from weightonly.plan.tuned import table_of

_LIBRARIES = (
    "bitsandbytes",
    "hqq",
    "torchao",
    "transformers",
    "peft",
    "triton",
    "numpy",
)  # beside torch: what providers and timing run through


def machine_facts(device: torch.device) -> dict[str, str]:
    """Name -> value of the GPU (or CPU), the driver, the libraries and the commit of this checkout."""
    facts = {"date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC")}
    if device.type == "cuda":
        gpu = torch.cuda.get_device_properties(device)
        table = table_of(torch.cuda.current_device() if device.index is None else device.index)
        facts |= {
            "GPU": gpu.name,
            "SMs": f"{gpu.multi_processor_count}, compute capability {gpu.major}.{gpu.minor}",
            "memory": f"{gpu.total_memory / 1e9:.0f} GB, L2 {gpu.L2_cache_size / 1e6:.0f} MB",
            "driver": driver_version() or "not known",
            "CUDA": str(torch.version.cuda),
            "choice of kernels": "cost model" if table is None else f"tuned table ({len(table)} problems), cost model",
        }
    else:
        facts["CPU"] = f"{platform.machine()}, {torch.get_num_threads()} threads"
    build = read_build()
    kernels = f"{build.kernels} kernels for {', '.join(build.archs)}, nvcc {build.nvcc}" if build.cuda else "no kernels"
    return facts | {
        "weightonly": f"{wo.__version__} ({kernels})",
        "commit": commit(Path(__file__).resolve().parents[2]),
        "torch": torch.__version__,
        "other libraries": ", ".join(filter(None, map(_version, _LIBRARIES))) or "none",
        "Python": platform.python_version(),
    }


def commit(checkout: Path) -> str:
    """Its commit, with "+ changes" where files differ from it; "not a git checkout" elsewhere."""
    if not (checkout / ".git").exists():
        return "not a git checkout"

    def git(*arguments: str) -> str:
        run = subprocess.run(["git", "-C", str(checkout), *arguments], capture_output=True, text=True, check=True)
        return run.stdout.strip()

    try:
        return git("rev-parse", "--short=12", "HEAD") + (" + changes" if git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError) as error:
        return f"not known ({type(error).__name__})"


def _version(package: str) -> str | None:
    try:
        return f"{package} {importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError:
        return None
