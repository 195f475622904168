"""Weight-only quantized matrix products (W4A16, W8A16) for NVIDIA GPUs.

    q, scales, zeros = weightonly.quantize(w, bits=4, group_size=128)
    qweight = weightonly.preprocess(q, bits=4)
    y = weightonly.gemm(x, qweight, scales)

`gemm` has the equation, `quantize` and `preprocess` the formats.
"""

from . import search_path as _search_path  # noqa: F401  (first: it decides where all others come from)

# isort: split
import importlib
import importlib.util
from pathlib import Path
from types import ModuleType

if not (Path(__file__).parent / "heuristics").is_dir():
    # A checkout keeps heuristics/ and bench/ beside this folder. An install has them in it, and beside it the packages
    # of others.
    __path__ = [*__path__, str(Path(__file__).parents[1])]

from . import formats, heuristics, nn
from .experts import fused_experts
from .files import load, save
from .formats import load_checkpoint
from .gate import Gate
from .gemm import gemm
from .grouped import grouped_gemm
from .kernels import cuda_built, grouped_kernels, kernels
from .launch import launch_overlap, set_launch_overlap
from .ops.awq_dequantize import awq_dequantize
from .ops.blocks_4bit import dequantize_4bit, quantize_4bit
from .packed import PackedWeight
from .packing import preprocess, repack, unpack
from .quantize import quantize
from .version import VERSION as __version__  # noqa: F401  (the name that others ask for)
from .weight import QuantizedWeight, dequantize


def __getattr__(name: str) -> ModuleType:
    """A subpackage on first use: some need packages that `import weightonly` does without."""
    found = None if name.startswith("_") else importlib.util.find_spec(f"{__name__}.{name}")
    place = Path(found.origin or "") if found else Path()
    is_ours = name == "bench" or Path(__file__).parent in place.parents  # tools/ and tests/ lie beside bench/
    if place.name != "__init__.py" or not is_ours:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.{name}")


__all__ = [
    "Gate",
    "PackedWeight",
    "QuantizedWeight",
    "awq_dequantize",
    "cuda_built",
    "dequantize",
    "dequantize_4bit",
    "formats",
    "fused_experts",
    "gemm",
    "grouped_gemm",
    "grouped_kernels",
    "heuristics",
    "kernels",
    "launch_overlap",
    "load",
    "load_checkpoint",
    "nn",
    "preprocess",
    "quantize",
    "quantize_4bit",
    "repack",
    "save",
    "set_launch_overlap",
    "unpack",
]
