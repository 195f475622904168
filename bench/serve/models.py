"""Models that are served with random weights: their configs, and their tensors as a quantizer's checkpoint has them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

import weightonly as wo
from weightonly.codebooks import codebook
from weightonly.heuristics.problem import FORMAT_GROUPS

from ..shapes import LLAMAS, MIXTURES, LlamaSizes, MixtureSizes

_POSITIONS = 8192
_VARIANTS = 4
"""Weights of one shape that differ; layers take them by turns, each with memory of its own."""

_BIAS = 0.1
"""The deviation of biases."""

_NVFP4_FACTOR = 2.0**-11
"""What NVFP4's scales are multiplied with: the same for all layers, as merged ones need it."""

Tensors = dict[str, torch.Tensor]


_CLASSES = {
    "llama": "LlamaForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
}
"""model_type in config.json -> the class."""


@dataclass(frozen=True)
class Served:
    """A model's sizes; mixture: of its experts, None: it is dense. kind: a key of `_CLASSES`."""

    attention: LlamaSizes
    mixture: MixtureSizes | None = None
    head_dim: int | None = None
    kind: str = "llama"

    @property
    def head(self) -> int:
        return self.head_dim or self.attention.head_dim

    @property
    def is_gpt_oss(self) -> bool:
        """Its experts have one format, MXFP4, all else is in bfloat16."""
        return self.kind == "gpt_oss"


def _mixture(
    sizes: MixtureSizes, layers: int, heads: int, kv_heads: int, vocabulary: int, kind: str, head_dim: int | None = None
) -> Served:
    attention = LlamaSizes(sizes.hidden, sizes.inner, layers, heads, kv_heads, vocabulary)
    return Served(attention, sizes, head_dim, kind)


MODELS: dict[str, Served] = {
    **{name: Served(sizes) for name, sizes in LLAMAS.items() if name != "tiny"},
    "mixtral-8x7b": _mixture(MIXTURES["mixtral-8x7b"], 32, 32, 8, 32000, "mixtral"),
    "qwen3-30b-a3b": _mixture(MIXTURES["qwen3-30b-a3b"], 48, 32, 4, 151936, "qwen3_moe", 128),
    "gpt-oss-20b": _mixture(MixtureSizes(2880, 2880, 32, 4), 24, 64, 8, 201088, "gpt_oss", 64),
    "tiny": Served(LlamaSizes(512, 1536, 4, 4, 2, 2048)),
    "tiny-mixtral": _mixture(MixtureSizes(512, 512, 8, 2), 4, 8, 4, 2048, "mixtral"),
    "tiny-gpt-oss": _mixture(MixtureSizes(512, 512, 8, 4), 4, 8, 4, 2048, "gpt_oss"),
}


def with_layers(model: Served, layers: int | None) -> Served:
    return model if layers is None else replace(model, attention=replace(model.attention, layers=layers))


def config_of(model: Served, quantization: Mapping[str, Any] | None, dtype: torch.dtype) -> dict[str, Any]:
    """config.json. quantization: see `quantization_of`; None: of the dense model."""
    sizes, mixture = model.attention, model.mixture
    config: dict[str, Any] = {
        "model_type": model.kind,
        "architectures": [_CLASSES[model.kind]],
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.intermediate,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": model.head,
        "vocab_size": sizes.vocabulary,
        "max_position_embeddings": _POSITIONS,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "hidden_act": "silu",
        "torch_dtype": str(dtype).removeprefix("torch."),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
    }
    if mixture is not None:
        config |= {"num_local_experts": mixture.experts, "num_experts_per_tok": mixture.top_k, "sliding_window": None}
        if model.kind == "qwen3_moe":
            config |= {"num_experts": mixture.experts, "moe_intermediate_size": mixture.inner, "norm_topk_prob": True}
            config |= {"decoder_sparse_step": 1, "mlp_only_layers": []}
    if model.is_gpt_oss:
        yarn = {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0}
        yarn |= {"original_max_position_embeddings": 4096, "truncate": False}
        config |= {"rope_scaling": yarn, "rope_theta": 150000.0, "max_position_embeddings": 131072}
        config |= {"sliding_window": 128, "attention_bias": True, "swiglu_limit": 7.0}
    return config if quantization is None else config | {"quantization_config": dict(quantization)}


def quantization_of(model: Served, quantizer: str, group: int) -> dict[str, Any]:
    """quantization_config of `quantizer` in groups of `group` rows."""
    return {"quant_method": "mxfp4"} if model.is_gpt_oss else QUANTIZERS[quantizer].config(group)


# --- quantizers --------------------------------------------------------------------------------------------------


def _words(values: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """int8 [K, N] of unsigned values -> int32, 32 / bits of them in a word along dim, lowest bits first."""
    parts = values.movedim(dim, -1).unflatten(-1, (-1, 32 // bits)).to(torch.int64)
    words = (parts << torch.arange(0, 32, bits, device=values.device)).sum(-1)
    return torch.where(words < 1 << 31, words, words - (1 << 32)).to(torch.int32).movedim(-1, dim).contiguous()


_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # of the columns in a word


def _awq(values: torch.Tensor) -> torch.Tensor:
    return _words(values.unflatten(-1, (-1, 8))[..., list(_AWQ_ORDER)].flatten(-2), 4, 1)


@dataclass(frozen=True)
class Quantizer:
    """A format that vLLM reads by itself. layer: (random weight [K, N], rows of a group) -> the tensors of one layer by
    suffix, and the weight [K, N] that they stand for, fp32."""

    config: Callable[[int], dict[str, Any]]
    layer: Callable[[torch.Tensor, int], tuple[Tensors, torch.Tensor]]


def _integers(
    bits: int,
    symmetric: bool,
    config: Callable[[int], dict[str, Any]],
    tensors: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Tensors],
) -> Quantizer:
    """tensors: of (u [K, N], scales [groups, N], z [groups, N]), u and z unsigned."""
    half = 1 << (bits - 1)

    def layer(w: torch.Tensor, group: int) -> tuple[Tensors, torch.Tensor]:
        q, scales, zeros = wo.quantize(w, bits, group, symmetric=symmetric, search=False)
        z = torch.zeros_like(scales) if zeros is None else zeros.round()
        dense = (q - _rows(z, q)) * _rows(scales, q)
        return tensors(q.to(torch.int16) + half, scales, z.to(torch.int16) + half), dense

    return Quantizer(config, layer)


def _rows(groups: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Numbers of groups, fp32, one for each row of q."""
    return groups.float().repeat_interleave(len(q) // len(groups), 0)


def _gptq(bits: int) -> Quantizer:
    def config(group: int) -> dict[str, Any]:
        return {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": False, "sym": True}

    def tensors(u: torch.Tensor, scales: torch.Tensor, z: torch.Tensor) -> Tensors:
        rows = torch.arange(len(u), device=u.device, dtype=torch.int32) // (len(u) // len(scales))
        return {"qweight": _words(u, bits, 0), "scales": scales, "qzeros": _words(z - 1, bits, 1), "g_idx": rows}

    return _integers(bits, True, config, tensors)


def _compressed(format: str, weights: dict[str, Any]) -> dict[str, Any]:
    """The config of compressed-tensors."""
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    named = {"quant_method": "compressed-tensors", "format": format, "config_groups": groups}
    return named | {"quantization_status": "compressed", "ignore": ["lm_head", "re:.*gate$"]}


def _ct(bits: int, symmetric: bool) -> Quantizer:
    def config(group: int) -> dict[str, Any]:
        weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": "group", "group_size": group}
        return _compressed("pack-quantized", weights)

    def tensors(u: torch.Tensor, scales: torch.Tensor, z: torch.Tensor) -> Tensors:
        found = {"weight_packed": _words(u.t(), bits, 1), "weight_scale": scales.t().contiguous()}
        found["weight_shape"] = torch.tensor(u.t().shape)
        return found if symmetric else found | {"weight_zero_point": _words(z.t(), bits, 0)}

    return _integers(bits, symmetric, config, tensors)


def _fp4(format: str) -> Quantizer:
    """NVFP4 and MXFP4 of compressed-tensors, in groups of their own size."""
    rows = FORMAT_GROUPS[format]

    def config(group: int) -> dict[str, Any]:
        strategy = "tensor_group" if format == "nvfp4" else "group"
        weights = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": strategy, "group_size": rows}
        return _compressed(f"{format}-pack-quantized", weights | {"dynamic": False})

    def layer(w: torch.Tensor, group: int) -> tuple[Tensors, torch.Tensor]:
        codes, scales, _ = wo.quantize(w, format=format)
        codes = codes.view(torch.uint8)  # (K, N)
        by_row = codes.t()
        found = {"weight_packed": (by_row[:, ::2] | by_row[:, 1::2] << 4).contiguous()}
        if format == "nvfp4":
            raw = (scales.float() / _NVFP4_FACTOR).to(torch.float8_e4m3fn)  # exact: another power of two
            found["weight_global_scale"] = torch.tensor([1 / _NVFP4_FACTOR])
        else:
            raw = (torch.log2(scales.float()) + 127).to(torch.uint8)
        found["weight_scale"] = raw.t().contiguous()
        table = codebook(format).to(w.device).float()
        return found, table[codes.long()] * _rows(scales, w)

    return Quantizer(config, layer)


def _fp8() -> Quantizer:
    """E4M3 of compressed-tensors with a scale for each channel; x stays in 16 bits (W8A16)."""

    def config(group: int) -> dict[str, Any]:
        weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "dynamic": False}
        return _compressed("float-quantized", weights)

    def layer(w: torch.Tensor, group: int) -> tuple[Tensors, torch.Tensor]:
        codes, scales, _ = wo.quantize(w, group_size=-1, format="fp8")
        found = {"weight": codes.t().contiguous(), "weight_scale": scales.t().float()}
        return found, codes.float() * scales.float()

    return Quantizer(config, layer)


QUANTIZERS: dict[str, Quantizer] = {
    "gptq": _gptq(4),
    "gptq8": _gptq(8),
    "awq": _integers(
        4,
        False,
        lambda group: {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"},
        lambda u, scales, z: {"qweight": _awq(u), "scales": scales, "qzeros": _awq(z)},
    ),
    "ct": _ct(4, True),
    "ct8": _ct(8, True),
    "ct-zeros": _ct(4, False),
    "nvfp4": _fp4("nvfp4"),
    "mxfp4": _fp4("mxfp4"),
    "fp8": _fp8(),
}


# --- tensors -----------------------------------------------------------------------------------------------------


class Weights:
    """The tensors of a checkpoint, made one after another on a device.

    is_dense: those of the dense model with the numbers of the quantized one, so that the two are to be compared.
    group: rows that share a scale. seed: another one gives other numbers.
    """

    def __init__(
        self,
        model: Served,
        quantizer: Quantizer,
        is_dense: bool,
        group: int,
        dtype: torch.dtype,
        device: torch.device,
        seed: int = 0,
    ) -> None:
        self.model, self.quantizer, self.is_dense = model, quantizer, is_dense
        self.group, self.dtype, self.device, self.seed = group, dtype, device, seed
        self._made: dict[tuple[int, int, int], Tensors] = {}

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        sizes = self.model.attention
        yield "model.embed_tokens.weight", self._normal(0, sizes.vocabulary, sizes.hidden, 1.0)
        yield "lm_head.weight", self._normal(1, sizes.vocabulary, sizes.hidden, 2 * sizes.hidden**-0.5)
        yield "model.norm.weight", self._ones(sizes.hidden)
        for layer in range(sizes.layers):
            for name in ("input_layernorm", "post_attention_layernorm"):
                yield f"model.layers.{layer}.{name}.weight", self._ones(sizes.hidden)
            for name, tensor in self._of_gpt_oss(layer) if self.model.is_gpt_oss else self._of_layer(layer):
                yield f"model.layers.{layer}.{name}", tensor

    def _of_layer(self, layer: int) -> Iterator[tuple[str, torch.Tensor]]:
        has_norms = self.model.kind == "qwen3_moe"
        if has_norms:
            for norm in ("q_norm", "k_norm"):
                yield f"self_attn.{norm}.weight", self._ones(self.model.head)
        for number, (name, k, n) in enumerate((*self._attention(), *self._mlp())):
            for suffix, tensor in self._linear(k, n, (layer + number) % _VARIANTS).items():
                yield f"{name}.{suffix}", tensor
        if self.model.mixture is not None:
            yield f"{'mlp' if has_norms else 'block_sparse_moe'}.gate.weight", self._router(layer, self.model.mixture)

    def _of_gpt_oss(self, layer: int) -> Iterator[tuple[str, torch.Tensor]]:
        """All experts of a product are one tensor; biases everywhere."""
        mixture, seed = self.model.mixture, 2 + layer
        assert mixture is not None
        for number, (name, k, n) in enumerate(self._attention()):
            yield f"{name}.weight", self._normal(7 + (layer + number) % _VARIANTS, n, k, k**-0.5)
            yield f"{name}.bias", self._normal(seed, 1, n, _BIAS)[0]
        yield "self_attn.sinks", self._normal(seed, 1, self.model.attention.heads, 1.0)[0]
        yield "mlp.router.weight", self._router(layer, mixture)
        yield "mlp.router.bias", self._normal(seed, 1, mixture.experts, _BIAS)[0]
        for product, name in (("w13", "gate_up_proj"), ("w2", "down_proj")):
            k, n = mixture.shape(product)
            experts = [self._linear(k, n, (layer + e) % _VARIANTS) for e in range(mixture.experts)]
            stacks = {key: torch.stack([expert[key] for expert in experts]) for key in experts[0]}  # (E, N, ...)
            if self.is_dense:
                yield f"mlp.experts.{name}", stacks["weight"].transpose(1, 2)
            else:
                yield f"mlp.experts.{name}_blocks", stacks["weight_packed"].unflatten(2, (-1, 16))
                yield f"mlp.experts.{name}_scales", stacks["weight_scale"]
            yield f"mlp.experts.{name}_bias", self._normal(seed, mixture.experts, n, _BIAS)

    def _router(self, layer: int, mixture: MixtureSizes) -> torch.Tensor:
        return self._normal(2 + layer, mixture.experts, mixture.hidden, mixture.hidden**-0.5)

    def _attention(self) -> Iterator[tuple[str, int, int]]:
        """(name, K, N) of the linears of one layer's attention."""
        sizes, head = self.model.attention, self.model.head
        yield "self_attn.q_proj", sizes.hidden, sizes.heads * head
        yield "self_attn.k_proj", sizes.hidden, sizes.kv_heads * head
        yield "self_attn.v_proj", sizes.hidden, sizes.kv_heads * head
        yield "self_attn.o_proj", sizes.heads * head, sizes.hidden

    def _mlp(self) -> Iterator[tuple[str, int, int]]:
        """Those of its experts, or of its MLP."""
        sizes = self.model.attention
        bases, names = ["mlp"], ("gate_proj", "up_proj", "down_proj")
        if self.model.mixture is not None:
            is_mixtral = self.model.kind == "mixtral"
            module = "block_sparse_moe" if is_mixtral else "mlp"
            bases = [f"{module}.experts.{e}" for e in range(self.model.mixture.experts)]
            names = ("w1", "w3", "w2") if is_mixtral else names
        for base in bases:
            yield f"{base}.{names[0]}", sizes.hidden, sizes.intermediate
            yield f"{base}.{names[1]}", sizes.hidden, sizes.intermediate
            yield f"{base}.{names[2]}", sizes.intermediate, sizes.hidden

    def _linear(self, k: int, n: int, variant: int) -> Tensors:
        key = (k, n, variant)
        if key not in self._made:
            found, dense = self.quantizer.layer(self._normal(7 + variant, k, n, k**-0.5), self.group)
            self._made[key] = {"weight": dense.to(self.dtype).t().contiguous()} if self.is_dense else found
        return self._made[key]

    def _normal(self, seed: int, rows: int, columns: int, deviation: float) -> torch.Tensor:
        g = torch.Generator(self.device).manual_seed(self.seed * 1000 + seed)
        numbers = torch.randn(rows, columns, generator=g, device=self.device, dtype=torch.float32)
        return (numbers * deviation).to(self.dtype)

    def _ones(self, size: int) -> torch.Tensor:
        return torch.ones(size, dtype=self.dtype, device=self.device)
