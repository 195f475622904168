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

from dataclasses import dataclass

import torch

from ..codebooks import codebook
from ..heuristics.problem import FORMAT_GROUPS
from .e2m1 import E8M0_DTYPES, e8m0_scales, unpack_codes
from .expect import TensorError, expect
from .plain import CodeWeight


@dataclass(frozen=True)
class Fp4Names:
    """What a quantizer calls the tensors of a layer. shape: of nvfp4's factor; divides: whether it is a divisor."""

    packed: str
    scale: str
    factor: str
    shape: tuple[int, ...]
    divides: bool


COMPRESSED_FP4 = Fp4Names("weight_packed", "weight_scale", "weight_global_scale", (1,), divides=True)
MODELOPT_FP4 = Fp4Names("weight", "weight_scale", "weight_scale_2", (), divides=False)


def read_compressed_fp4(
    weight_packed: torch.Tensor, weight_scale: torch.Tensor, weight_global_scale: torch.Tensor | None = None
) -> CodeWeight:
    """One layer of 4-bit floats: codes [K, N], and scales [K / g, N] in bfloat16 for mxfp4, in fp32 for nvfp4.

    The dtype of weight_scale tells the format. All tensors are on one device, CPU or CUDA.

    Args:
        weight_packed: uint8 [N, K / 2]: E2M1 codes; the even element of K in the low nibble.
        weight_scale: of mxfp4 uint8 or float8_e8m0fnu [N, K / 32], exponents of E8M0; of nvfp4 float8_e4m3fn [N, K /
            16].
        weight_global_scale: fp32 [1] of nvfp4, the divisor of its scales; None of mxfp4.

    Raises:
        TensorError: a ValueError, tensors that do not fit together, scales that are NaN or, with their codes, beyond
            fp32, and a factor that is not a positive number.

    Examples:
        >>> codes = torch.randint(256, (768, 256), dtype=torch.uint8)
        >>> exponents = torch.full((768, 16), 127, dtype=torch.uint8)  # 2^0
        >>> wo.formats.read_compressed_fp4(codes, exponents).format
        'mxfp4'
    """
    return read_fp4(weight_packed, weight_scale, weight_global_scale, COMPRESSED_FP4)


def read_fp4(packed: torch.Tensor, scale: torch.Tensor, factor: torch.Tensor | None, names: Fp4Names) -> CodeWeight:
    """`read_compressed_fp4` of tensors that have these names."""
    format, _, _ = fp4_shape(packed, scale, factor, names)
    if format == "mxfp4":
        scales = e8m0_scales(names.scale, scale)
    else:
        assert factor is not None
        scales = _e4m3_scales(scale, factor, names)
    codes = unpack_codes(packed).t().contiguous()
    table = codebook(format, packed.device)
    return CodeWeight(codes, table, scales.t().contiguous(), format, torch.bfloat16)


def fp4_shape(
    packed: torch.Tensor, scale: torch.Tensor, factor: torch.Tensor | None, names: Fp4Names = COMPRESSED_FP4
) -> tuple[str, int, int]:
    """(format, K, N). Raises TensorError for tensors that do not fit together; looks at no data."""
    expect(names.packed, packed, torch.uint8, ["N", "K / 2"])
    n, k = packed.shape[0], packed.shape[1] * 2
    format = "nvfp4" if scale.dtype == torch.float8_e4m3fn else "mxfp4"
    rows = FORMAT_GROUPS[format]
    if k % rows:
        raise TensorError(names.packed, f"expected K to be a multiple of {rows} for {format}, got {k}")
    dtypes = (torch.float8_e4m3fn, *E8M0_DTYPES)
    expect(names.scale, scale, dtypes, [n, k // rows])
    if format == "nvfp4":
        if factor is None:
            raise TensorError(names.packed, f"expected a {names.factor} beside it for nvfp4, got none")
        expect(names.factor, factor, torch.float32, [1] if list(factor.shape) == [1] else names.shape)
    elif factor is not None:
        raise TensorError(names.factor, "expected none for mxfp4, got one")
    return format, k, n


def _e4m3_scales(scale: torch.Tensor, factor: torch.Tensor, names: Fp4Names) -> torch.Tensor:
    """fp32, of the shape of scale. Some host syncs."""
    number = factor.item()
    if not 0 < number < float("inf"):  # NaN is not, either
        raise TensorError(names.factor, f"expected a positive number, got {number}")
    scales = scale.float()
    if bool(scales.isnan().any()):
        raise TensorError(names.scale, "expected numbers, got NaN")
    scales = scales / factor if names.divides else scales * factor
    limit = torch.finfo(torch.float32).max / 6
    if float(scales.abs().max()) > limit:
        raise TensorError(names.factor, f"expected one that keeps weights within fp32, got {number:g}")
    return scales
