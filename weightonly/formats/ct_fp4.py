"""compressed-tensors' "mxfp4-pack-quantized" and "nvfp4-pack-quantized" layers (llm-compressor): 4-bit floats.

weight_packed        uint8 [N, K / 2]: E2M1 codes; the even element of K in the low nibble
weight_scale         mxfp4: uint8 or float8_e8m0fnu [N, K / 32], exponents of E8M0; nvfp4: float8_e4m3fn [N, K / 16]
weight_global_scale  fp32 [1]: nvfp4 alone
input_global_scale   fp32 [1], of quantized activations: not used, as activations are not quantized here

mxfp4: w = 2^(weight_scale - 127) * number of the code.
nvfp4: w = (weight_scale / weight_global_scale) * number of the code; the quotient is rounded to fp32.

https://github.com/vllm-project/compressed-tensors has the packing.
"""

from __future__ import annotations

import torch

from ..codebooks import codebook
from ..heuristics.problem import FORMAT_GROUPS
from .e2m1 import e8m0_scales, unpack_codes
from .expect import TensorError, expect
from .plain import CodeWeight

E8M0_DTYPES = tuple(getattr(torch, name) for name in ("uint8", "float8_e8m0fnu") if hasattr(torch, name))


def read_compressed_fp4(
    weight_packed: torch.Tensor, weight_scale: torch.Tensor, weight_global_scale: torch.Tensor | None = None
) -> CodeWeight:
    """One layer of 4-bit floats: codes [K, N], and scales [K / g, N] in bfloat16 for mxfp4, in fp32 for nvfp4.

    Tensors: see the top of this module; on one device, CPU or CUDA. The dtype of weight_scale tells the format.

    Raises TensorError (a ValueError) for tensors that do not fit together, scales that are NaN or, with their codes,
    beyond fp32, and a weight_global_scale that is not a positive number.
    """
    format, _, _ = fp4_shape(weight_packed, weight_scale, weight_global_scale)
    if format == "mxfp4":
        scales = e8m0_scales("weight_scale", weight_scale)
    else:
        assert weight_global_scale is not None
        scales = _e4m3_scales(weight_scale, weight_global_scale)
    codes = unpack_codes(weight_packed).t().contiguous()
    table = codebook(format, weight_packed.device)
    return CodeWeight(codes, table, scales.t().contiguous(), format, torch.bfloat16)


def fp4_shape(
    weight_packed: torch.Tensor, weight_scale: torch.Tensor, weight_global_scale: torch.Tensor | None
) -> tuple[str, int, int]:
    """(format, K, N). Raises TensorError for tensors that do not fit together; looks at no data."""
    expect("weight_packed", weight_packed, torch.uint8, ["N", "K / 2"])
    n, k = weight_packed.shape[0], weight_packed.shape[1] * 2
    format = "nvfp4" if weight_scale.dtype == torch.float8_e4m3fn else "mxfp4"
    rows = FORMAT_GROUPS[format]
    if k % rows:
        raise TensorError("weight_packed", f"expected K to be a multiple of {rows} for {format}, got {k}")
    dtypes = (torch.float8_e4m3fn, *E8M0_DTYPES)
    expect("weight_scale", weight_scale, dtypes, [n, k // rows])
    if format == "nvfp4":
        if weight_global_scale is None:
            raise TensorError("weight_packed", "expected a weight_global_scale beside it for nvfp4, got none")
        expect("weight_global_scale", weight_global_scale, torch.float32, [1])
    elif weight_global_scale is not None:
        raise TensorError("weight_global_scale", "expected none for mxfp4, got one")
    return format, k, n


def _e4m3_scales(weight_scale: torch.Tensor, weight_global_scale: torch.Tensor) -> torch.Tensor:
    """fp32, of the shape of weight_scale. Some host syncs."""
    divisor = weight_global_scale.item()
    if not 0 < divisor < float("inf"):  # NaN is not, either
        raise TensorError("weight_global_scale", f"expected a positive number, got {divisor}")
    scales = weight_scale.float()
    if bool(scales.isnan().any()):
        raise TensorError("weight_scale", "expected numbers, got NaN")
    scales = scales / weight_global_scale
    limit = torch.finfo(torch.float32).max / 6
    if float(scales.abs().max()) > limit:
        raise TensorError("weight_global_scale", f"expected one that keeps weights within fp32, got {divisor:g}")
    return scales
