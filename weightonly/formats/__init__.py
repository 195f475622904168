"""Checkpoints of other quantizers, read bit-exactly (torchao's int4 with float zeros: to the last bits of fp32).

`load_checkpoint` reads a folder layer by layer, `convert` writes a packed copy of one, `export` one in the format of
another quantizer, and `open_checkpoint` tells what is in one. A `read_*` function takes the tensors of one linear layer
and returns its weight, unpacked, in the conventions of this library (see plain.py).
"""

from .awq import read_awq
from .bitsandbytes import read_bitsandbytes
from .checkpoint import Checkpoint, load_checkpoint, open_checkpoint
from .compressed_tensors import read_compressed_tensors
from .convert import convert
from .ct_fp4 import read_compressed_fp4
from .export import export
from .fp8 import read_fp8
from .gpt_oss import read_gpt_oss
from .gptq import read_gptq
from .hqq import read_hqq
from .modelopt import read_modelopt_fp4
from .plain import CodeWeight, IntWeight
from .records import PlainTensor, QuantizedLayer, Record
from .torchao import read_torchao

__all__ = [
    "Checkpoint",
    "CodeWeight",
    "IntWeight",
    "PlainTensor",
    "QuantizedLayer",
    "Record",
    "convert",
    "export",
    "load_checkpoint",
    "open_checkpoint",
    "read_awq",
    "read_bitsandbytes",
    "read_compressed_fp4",
    "read_compressed_tensors",
    "read_fp8",
    "read_gpt_oss",
    "read_gptq",
    "read_hqq",
    "read_modelopt_fp4",
    "read_torchao",
]
