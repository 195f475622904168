"""Tensor parallel layers on torch.distributed: styles for `torch.distributed.tensor.parallel.parallelize_module`.

    mesh = init_device_mesh("cuda", (8,))
    parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})

Needs PyTorch 2.5 or later, for torch.distributed.tensor.
"""

from .experts import ExpertParallel, ExpertTensorParallel, ParallelExperts
from .linear import ColwiseLinear, ParallelLinear, RowwiseLinear
from .styles import ColwiseParallel, RowwiseParallel

__all__ = [
    "ColwiseLinear",
    "ColwiseParallel",
    "ExpertParallel",
    "ExpertTensorParallel",
    "ParallelExperts",
    "ParallelLinear",
    "RowwiseLinear",
    "RowwiseParallel",
]
