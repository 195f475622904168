"""Weight-only quantized matrix products (W4A16, W8A16) for NVIDIA GPUs.

    q, scales, zeros = weightonly.quantize(w, bits=4, group_size=128)
    qweight = weightonly.preprocess(q, bits=4)
    y = weightonly.gemm(x, qweight, scales)

`gemm` has the equation, `quantize` and `preprocess` the formats.
"""

import importlib
from pathlib import Path
from types import ModuleType

# A checkout keeps heuristics/ and bench/ beside this folder; an install has them in it.
__path__ = [*__path__, str(Path(__file__).parents[1])]

from . import formats, heuristics, nn
from .awq import awq_dequantize
from .blocks_4bit import dequantize_4bit, quantize_4bit
from .dequantize import dequantize
from .formats import load_checkpoint
from .gemm import gemm
from .kernels import cuda_built, kernels
from .launch import launch_overlap, set_launch_overlap
from .packed import PackedWeight, load, preprocess, save, unpack
from .quantize import quantize
from .tuner import tune

__version__ = "0.1.0"


def __getattr__(name: str) -> ModuleType:
    """`weightonly.bench` on first use: it needs pandas, which nothing else does."""
    if name == "bench":
        return importlib.import_module(".bench", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "PackedWeight",
    "awq_dequantize",
    "cuda_built",
    "dequantize",
    "dequantize_4bit",
    "formats",
    "gemm",
    "heuristics",
    "kernels",
    "launch_overlap",
    "load",
    "load_checkpoint",
    "nn",
    "preprocess",
    "quantize",
    "quantize_4bit",
    "save",
    "set_launch_overlap",
    "tune",
    "unpack",
]
