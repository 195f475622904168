"""How many GB the weights of known models take, by format: the table of docs/guides/memory.md.

Models are made on meta by transformers, quantized by `quantize_model`, and their bytes are counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

import weightonly as wo


@dataclass(frozen=True)
class Known:
    """A model by the sizes of its config. family: transformers' class without its ending. first: layers, at least one,
    that come before those that are all alike."""

    family: str
    sizes: dict[str, Any]
    first: int = 1

    @property
    def layers(self) -> int:
        return int(self.sizes["num_hidden_layers"])

    def on_meta(self, layers: int | None = None) -> Any:
        """The model in bf16, without memory. layers: of its decoder, default: all."""
        import transformers

        sizes = self.sizes if layers is None else self.sizes | {"num_hidden_layers": layers}
        config = getattr(transformers, f"{self.family}Config")(**sizes)
        with torch.device("meta"):
            return getattr(transformers, f"{self.family}ForCausalLM")(config).to(torch.bfloat16)


def _known(
    family: str,
    hidden: int,
    inner: int,
    layers: int,
    heads: int,
    kv_heads: int,
    vocabulary: int,
    first: int = 1,
    **others: Any,
) -> Known:
    sizes = {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
        "tie_word_embeddings": False,
    }
    return Known(family, sizes | others, first)


_TIED = {"tie_word_embeddings": True}


def _qwen3_moe(hidden: int, inner: int, layers: int, heads: int) -> Known:
    experts = {"moe_intermediate_size": inner, "num_experts": 128, "num_experts_per_tok": 8, "head_dim": 128}
    return _known("Qwen3Moe", hidden, inner, layers, heads, 4, 151936, **experts)


def _gpt_oss(layers: int, experts: int) -> Known:
    of_experts = {"num_local_experts": experts, "num_experts_per_tok": 4, "head_dim": 64}
    return _known("GptOss", 2880, 2880, layers, 64, 8, 201088, **of_experts)


MODELS: dict[str, Known] = {
    "Llama-3.2-1B": _known("Llama", 2048, 8192, 16, 32, 8, 128256, **_TIED),
    "Llama-3.2-3B": _known("Llama", 3072, 8192, 28, 24, 8, 128256, **_TIED),
    "Mistral-7B-v0.3": _known("Mistral", 4096, 14336, 32, 32, 8, 32768),
    "Llama-3.1-8B": _known("Llama", 4096, 14336, 32, 32, 8, 128256),
    "Qwen3-8B": _known("Qwen3", 4096, 12288, 36, 32, 8, 151936, head_dim=128),
    "Qwen3-14B": _known("Qwen3", 5120, 17408, 40, 40, 8, 151936, head_dim=128),
    "gpt-oss-20b": _gpt_oss(24, 32),
    "Qwen3-30B-A3B": _qwen3_moe(2048, 768, 48, 32),
    "Qwen3-32B": _known("Qwen3", 5120, 25600, 64, 64, 8, 151936, head_dim=128),
    "Mixtral-8x7B": _known("Mixtral", 4096, 14336, 32, 32, 8, 32000, num_local_experts=8, num_experts_per_tok=2),
    "Llama-3.1-70B": _known("Llama", 8192, 28672, 80, 64, 8, 128256),
    "gpt-oss-120b": _gpt_oss(36, 128),
    "Qwen3-235B-A22B": _qwen3_moe(4096, 1536, 94, 64),
    "Llama-3.1-405B": _known("Llama", 16384, 53248, 126, 128, 8, 128256),
    "DeepSeek-V3": Known("DeepseekV3", {"num_hidden_layers": 61}, first=3),  # its other sizes are transformers' own
}

FORMATS: dict[str, dict[str, Any]] = {
    "int8, g128": {"format": "int8"},
    "int4, g32": {"format": "int4", "group_size": 32},
    "int4, g128": {"format": "int4"},
    "NF4, g64": {"format": "nf4"},
    "MXFP4, g32": {"format": "mxfp4"},
    "NVFP4, g16": {"format": "nvfp4"},
}
"""Head of a column -> arguments of `quantize_model`."""


def model_bytes(model: Known, **format: Any) -> tuple[int, int]:
    """Bytes of all weights in bf16, and with what `quantize_model` packs. format: its arguments.

    Two models of few layers are made: layers that are alike take as many bytes each.
    """
    counts = []
    for layers in (model.first, model.first + 1):
        summary: Any = wo.nn.quantize_model(model.on_meta(layers), **format).weightonly_summary
        counts.append((summary.bytes_before, summary.bytes_after))
    (dense, packed), (more_dense, more_packed) = counts
    others = model.layers - model.first
    return dense + others * (more_dense - dense), packed + others * (more_packed - packed)


def sizes_table() -> str:
    """Markdown, in GB of 10^9 bytes."""
    lines = [f"| model | bf16 | {' | '.join(FORMATS)} |", "|---" * (2 + len(FORMATS)) + "|"]
    for name, model in MODELS.items():
        found = [model_bytes(model, **format) for format in FORMATS.values()]
        counts = (found[0][0], *(packed for _, packed in found))
        lines.append(f"| {name} | {' | '.join(_gb(count) for count in counts)} |")
    return "\n".join(lines)


def _gb(count: int) -> str:
    gb = count / 1e9
    return f"{gb:.{1 if gb < 100 else 0}f}"
