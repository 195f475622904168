"""torchvision's compiled operators want CUDA. SGLang imports it on a CPU, too, where it has to find their names."""

from __future__ import annotations

import torch

_LIBRARY = torch.library.Library("torchvision", "FRAGMENT")
for _name in ("nms", "qnms"):
    if not hasattr(torch.ops.torchvision, _name):
        _LIBRARY.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
