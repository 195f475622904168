"""Layers with packed weights; `quantize_model` and `pack_model`, which put them into a model, and `fuse_model`."""

from .experts import Experts
from .fuse import fuse_model
from .grouped import GroupedLinear
from .linear import Linear
from .pack_model import pack_model
from .quantize_model import quantize_model

__all__ = ["Experts", "GroupedLinear", "Linear", "fuse_model", "pack_model", "quantize_model"]
