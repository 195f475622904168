"""4-bit floats as checkpoints store them: E2M1 codes, two to a byte, and E8M0 scales.

Both are of OCP's Microscaling Formats (MX) Specification 1.0.
"""

from __future__ import annotations

import torch

from .expect import TensorError

E8M0_DTYPES = tuple(getattr(torch, name) for name in ("uint8", "float8_e8m0fnu") if hasattr(torch, name))

LARGEST_EXPONENT = 252
"""2^125: times the largest code, 6, it is the last one within fp32. 255 is NaN."""


def unpack_codes(data: torch.Tensor) -> torch.Tensor:
    """uint8 [..., bytes] -> uint8 [..., 2 * bytes], the even element from the low nibble."""
    return torch.stack((data & 15, data >> 4), dim=-1).flatten(-2)


def e8m0_scales(name: str, exponents: torch.Tensor) -> torch.Tensor:
    """2^(e - 127) in bfloat16, exactly. exponents: uint8 or float8_e8m0fnu of any shape. One host sync.

    Raises TensorError, naming the tensor `name`, for NaN and for scales that make weights beyond fp32.
    """
    bits = exponents.view(torch.uint8).to(torch.int16)
    largest = int(bits.max())
    if largest > LARGEST_EXPONENT:
        meaning = "which is NaN" if largest == 255 else "which makes weights beyond fp32"
        raise TensorError(name, f"expected exponents 0..{LARGEST_EXPONENT} of E8M0, got {largest}, {meaning}")
    # The exponent of a bfloat16 is in bits 7 to 14. 2^-127 is subnormal: half of the smallest normal number.
    return torch.where(bits == 0, 1 << 6, bits << 7).to(torch.int16).view(torch.bfloat16)
