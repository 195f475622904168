"""Folders that quantizers wrote of one tiny random Llama, and the logits that their own `dequantize` gives.

`write_samples.py` says how they were made.
"""

from __future__ import annotations

from pathlib import Path

import torch

HERE = Path(__file__).parent
TOKENS = torch.arange(24).view(2, 12) * 7 % 96
LOGITS = HERE / "logits.safetensors"
"""Name of a folder -> fp32 [2, 12, 96], of TOKENS."""
