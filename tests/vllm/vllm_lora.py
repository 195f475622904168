"""vLLM's LoRA layers around layers of the plug-in. Import this where vLLM is installed."""

from __future__ import annotations

from typing import Any

import torch
from vllm.config.lora import LoRAConfig
from vllm.lora.layers import LoRAMapping
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.lora.utils import from_layer

RANK, ROWS = 8, 6


def check_lora(layer: Any, g: torch.Generator) -> None:
    """Without an adapter the bits of the layer, with one its product beside them; set, used, and taken away."""
    x = torch.randn(ROWS, layer.input_size, generator=g).half()
    plain, _ = layer(x)
    sizes = list(getattr(layer, "output_sizes", [plain.shape[1]]))
    config = LoRAConfig(max_lora_rank=RANK, max_loras=1, max_cpu_loras=1, lora_dtype=torch.float16)
    wrapped: Any = from_layer(layer, 1, config, ["a part"] * len(sizes))
    assert wrapped is not layer and wrapped.weight.device == plain.device
    punica = PunicaWrapperCPU(64, 8, "cpu", max_loras=1)
    wrapped.set_mapping(punica)
    a = [torch.randn(RANK, layer.input_size, generator=g).half() / 8 for _ in sizes]
    b = [torch.randn(size, RANK, generator=g).half() / 8 for size in sizes]
    wrapped.set_lora(0, *((a, b) if len(sizes) > 1 else (a[0], b[0])))
    added = torch.cat([x.float() @ each.float().t() @ other.float().t() for each, other in zip(a, b, strict=True)], 1)
    for used in (1, 0):
        punica.update_metadata(LoRAMapping((used,) * ROWS, (used,), is_prefill=True), [1], 1, 64)
        y = wrapped(x)[0].clone()
        if used:
            torch.testing.assert_close(
                y.float(), plain.float() + added, rtol=4e-3, atol=4e-3 * float(added.abs().max())
            )
        else:
            assert torch.equal(y, plain)
