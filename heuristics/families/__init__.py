"""The kernel families, each with its tiles, rules, shared memory, work, and constants of generated code."""

from .base import FAMILIES, Family, KernelConfig
from .decode_sm80 import DecodeSm80
from .decode_sm90 import DecodeSm90
from .dequantize_cublas import DequantizeCublasSm75, DequantizeCublasSm90
from .gemm_sm70 import GemmSm70
from .gemm_sm75 import GemmSm75
from .gemm_sm80 import GemmSm80
from .gemm_sm90 import GemmSm90
from .gemm_sm90_fp8 import GemmSm90Fp8, GemmSm90Fp8Mx
from .gemv import Gemv
from .grouped_decode_sm90 import GroupedDecodeSm90
from .grouped_sm80 import GroupedSm80
from .grouped_sm90 import GroupedSm90
from .grouped_sm90_fp8 import GroupedSm90Fp8, GroupedSm90Fp8Mx

__all__ = ["FAMILIES", "Family", "KernelConfig"]

_IN_ORDER: tuple[Family, ...] = (
    Gemv(),
    DecodeSm80(),
    GemmSm80(),
    DecodeSm90(),
    GemmSm90(),
    GemmSm90Fp8(),
    GemmSm90Fp8Mx(),
    GemmSm75(),
    GemmSm70(),
    DequantizeCublasSm75(),
    DequantizeCublasSm90(),
    GroupedDecodeSm90(),
    GroupedSm90(),
    GroupedSm90Fp8(),
    GroupedSm90Fp8Mx(),
    GroupedSm80(),
)
FAMILIES.update((family.name, family) for family in _IN_ORDER)
