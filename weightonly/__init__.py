"""Weight-only quantized matrix products (W4A16, W8A16) for NVIDIA GPUs.

    q, scales, zeros = weightonly.quantize(w, bits=4, group_size=128)
    qweight = weightonly.preprocess(q, bits=4)
    y = weightonly.gemm(x, qweight, scales)

`gemm` has the equation, `quantize` and `preprocess` the formats.
"""

from . import search_path as _search_path  # noqa: F401  (first: it decides where all others come from)

# isort: split
from importlib import import_module as _import_module
from importlib.util import find_spec as _find_spec
from pathlib import Path as _Path
from types import ModuleType as _ModuleType

if not (_Path(__file__).parent / "heuristics").is_dir():
    # A checkout keeps heuristics/ and bench/ beside this folder. An install has them in it, and beside it the packages
    # of others.
    __path__ = [*__path__, str(_Path(__file__).parents[1])]

from . import formats, heuristics, nn
from . import grouped_gradient as _grouped_gradient  # noqa: F401  (operators, which autograd finds by name)
from .experts import fused_experts
from .explain import explain
from .extras import missing_packages_named as _missing_packages_named
from .files import load, save
from .formats import load_checkpoint
from .gate import Gate
from .gemm import gemm
from .grouped import grouped_gemm
from .invariance import batch_invariant, set_batch_invariant
from .kernels import cuda_built, fp8_kernels, grouped_fp8_kernels, grouped_kernels, kernels
from .launch import compile_options, launch_overlap, set_launch_overlap
from .ops.awq_dequantize import awq_dequantize
from .ops.blocks_4bit import dequantize_4bit, quantize_4bit
from .ops.quantize_activations import quantize_activations
from .packed import PackedWeight
from .packing import preprocess, repack, unpack
from .quantize import quantize
from .version import VERSION as __version__  # noqa: F401  (the name that others ask for)
from .weight import QuantizedWeight, dequantize


def __getattr__(name: str) -> _ModuleType:
    """A subpackage on first use: some need packages that `import weightonly` does without."""
    found = None if name.startswith("_") else _find_spec(f"{__name__}.{name}")
    place = _Path(found.origin or "") if found else _Path()
    is_ours = name == "bench" or _Path(__file__).parent in place.parents  # tools/ and tests/ lie beside bench/
    if place.name != "__init__.py" or not is_ours:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with _missing_packages_named():
        return _import_module(f"{__name__}.{name}")


def __dir__() -> list[str]:
    return [*__all__, "__version__", "bench", "hf", "parallel", "vllm"]


__all__ = [
    "Gate",
    "PackedWeight",
    "QuantizedWeight",
    "awq_dequantize",
    "batch_invariant",
    "compile_options",
    "cuda_built",
    "dequantize",
    "dequantize_4bit",
    "explain",
    "formats",
    "fp8_kernels",
    "fused_experts",
    "gemm",
    "grouped_fp8_kernels",
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
    "quantize_activations",
    "repack",
    "save",
    "set_batch_invariant",
    "set_launch_overlap",
    "unpack",
]
