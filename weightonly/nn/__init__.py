"""Layers with packed weights, and `quantize_model`, which puts them into a model."""

from .experts import Experts
from .grouped import GroupedLinear
from .linear import Linear
from .quantize_model import quantize_model

__all__ = ["Experts", "GroupedLinear", "Linear", "quantize_model"]
