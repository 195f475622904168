"""SGLang imports torchvision, whose compiled operators want CUDA: on a CPU it has to find their names.

Does nothing where SGLang is not installed, or torchvision works.
"""

from __future__ import annotations

import importlib.util

import torch

LIBRARY: torch.library.Library | None = None

if importlib.util.find_spec("sglang") is not None:
    try:
        importlib.import_module("torchvision")
    except RuntimeError:  # operator torchvision::nms does not exist
        LIBRARY = torch.library.Library("torchvision", "DEF")
        for _name in ("nms", "qnms"):
            LIBRARY.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
