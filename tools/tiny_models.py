"""Tiny models of every text architecture of transformers: their own classes, with configs whose sizes are small."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers import AutoConfig, PreTrainedModel
from transformers.models.auto import modeling_auto as auto

VOCABULARY = 128
LAYERS = 2
MOST_PARAMETERS = 16_000_000

SIZES: dict[str, int] = {
    name: size
    for size, names in (
        (
            LAYERS,
            "num_hidden_layers num_layers n_layer n_layers encoder_layers decoder_layers num_encoder_layers "
            "num_decoder_layers num_hidden_layers_encoder depth",
        ),
        (
            4,
            "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads "
            "num_local_experts num_experts n_routed_experts moe_num_experts num_mamba_heads mamba_num_heads "
            "mamba_n_heads linear_num_value_heads attention_head_count num_encoder_attention_heads "
            "num_decoder_attention_heads",
        ),
        (
            2,
            "num_key_value_heads num_experts_per_tok top_k moe_k moe_topk num_experts_per_token num_kv_heads "
            "linear_num_key_heads num_selected_experts num_global_key_value_heads",
        ),
        (
            1,
            "n_group topk_group num_expert_group n_groups mamba_n_groups mamba_ngroups n_shared_experts "
            "first_k_dense_replace num_shared_experts",
        ),
        (8, "state_size mamba_d_state ssm_state_size d_state"),
        (
            16,
            "head_dim d_kv qk_nope_head_dim qk_rope_head_dim v_head_dim attention_head_size key_value_dim "
            "global_head_dim kv_channels linear_key_head_dim linear_value_head_dim rotary_dim",
        ),
        (32, "q_lora_rank kv_lora_rank mamba_head_dim mamba_d_head mamba_headdim index_head_dim swa_head_dim"),
        (
            64,
            "hidden_size d_model n_embd dim emb_dim embedding_size word_embed_proj_dim lru_width model_dim "
            "attention_hidden_size embed_dim hidden_dim_base max_position_embeddings n_positions max_seq_len "
            "max_sequence_length n_ctx sliding_window attention_window_size projection_dim mamba_chunk_size chunk_size",
        ),
        (
            128,
            "intermediate_size ffn_dim d_ff n_inner hidden_dim encoder_ffn_dim decoder_ffn_dim d_inner "
            "moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size ffn_hidden_size "
            "mamba_d_ssm moe_shared_expert_intermediate_size dense_intermediate_size expert_ffn_hidden_size "
            "encoder_intermediate_size intermediate_size_mlp moe_ffn_hidden_size dff",
        ),
        (
            VOCABULARY,
            "vocab_size text_vocab_size src_vocab_size tgt_vocab_size vocab_size_per_layer_input entity_vocab_size "
            "pronunciation_vocab_size shape_vocab_size "
            "unpadded_vocab_size",
        ),
    )
    for name in names.split()
}

_HEADS: dict[str, Any] = {"head_dim": 16}
_REFORMER = {"axial_pos_embds_dim": (16, 48), "axial_pos_shape": (4, 16), "attn_layers": ["local", "lsh"]}
_BOXES = {"coordinate_size": 8, "shape_size": 16, "visual_embed": False}
OVERRIDES: dict[str, dict[str, Any]] = {
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2},
    "esm": {"vocab_size": VOCABULARY, "pad_token_id": 1, "mask_token_id": 2},
    "esmc": {"num_key_value_heads": 4, "vocab_size": VOCABULARY},
    "falcon_h1": {"mamba_d_ssm": 128, "mamba_n_heads": 4, "mamba_d_head": 32},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "hunyuan_v1_dense": _HEADS,
    "hunyuan_v1_moe": _HEADS,
    "layoutlmv3": _BOXES,
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "lilt": {"hidden_size": 96},
    "mamba2": {"num_heads": 4, "head_dim": 32},
    "ministral": _HEADS,
    "bamba": {"attn_layer_indices": [1]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "deepseek_v2": {"num_experts_per_tok": 2, "n_routed_experts": 4},
    "nemotron_h": {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"]},
    "nemotron": _HEADS | {"num_key_value_heads": 2},
    "reformer": _REFORMER | {"is_decoder": True},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "mistral4": {"head_dim": 32},
    "zamba": {"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"]}
    | {"attention_hidden_size": 128, "attention_head_dim": 32},
    "zamba2": {"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"]}
    | {"n_mamba_heads": 4, "mamba_headdim": 32, "attention_hidden_size": 128, "attention_head_dim": 32},
}
"""Of a model type: what its config needs beside SIZES."""


@dataclass(frozen=True)
class Architecture:
    """A class of transformers.

    kind: "causal", "seq2seq" or "encoder".
    """

    model_type: str
    kind: str
    class_name: str


def architectures() -> list[Architecture]:
    """Every class for text: those that generate, and the base models of the others."""
    found: dict[str, Architecture] = {}
    mappings: list[tuple[str, Any]] = [
        ("causal", auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
        ("seq2seq", auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES),
    ]
    for kind, mapping in mappings:
        for model_type, names in mapping.items():
            name = names if isinstance(names, str) else names[0]
            found.setdefault(name, Architecture(model_type, kind, name))
    encoders = (
        auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        auto.MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES,
        auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    )
    generating = {model_type for _, mapping in mappings for model_type in mapping}
    generating -= set(auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES)
    for mapping in encoders:
        for model_type in mapping:
            names = auto.MODEL_MAPPING_NAMES.get(model_type)
            if names is None or model_type in generating:
                continue
            name = names if isinstance(names, str) else names[0]
            found.setdefault(name, Architecture(model_type, "encoder", name))
    return sorted(found.values(), key=lambda a: (a.kind, a.model_type))


def tiny_config(model_type: str) -> Any:
    """The default config of a model type with small sizes."""
    config = AutoConfig.for_model(model_type)
    options = _small(config) | OVERRIDES.get(model_type, {})
    return type(config)(**options)


def _small(config: Any) -> dict[str, Any]:
    """The arguments of a config that make it small."""
    given = config.to_dict()
    options: dict[str, Any] = {}
    reserved = {"model_type", "transformers_version", "architectures", "_name_or_path", "dtype", "torch_dtype"}
    for name, value in given.items():
        if name in reserved or value is None:
            continue
        inner = vars(config).get(name)
        if isinstance(inner, transformers.PretrainedConfig):
            options[name] = type(inner)(**(_small(inner) | OVERRIDES.get(inner.model_type, {}))).to_dict()
        elif name in SIZES and isinstance(value, int) and not isinstance(value, bool):
            options[name] = min(SIZES[name], value) if value > 0 else value
        elif name.endswith("_token_id") and isinstance(value, int):
            options[name] = value if value < VOCABULARY else VOCABULARY - 1
        elif isinstance(value, list) and name.endswith(("layer_types", "layers_block_type", "layers_types")):
            options[name] = _two_kinds(value)
    if "kv_lora_rank" in options and "num_key_value_heads" in options:
        options["num_key_value_heads"] = options["num_attention_heads"]
    return options


def _two_kinds(kinds: list[Any]) -> list[Any]:
    """As many as there are layers, the first of each kind."""
    distinct = list(dict.fromkeys(kinds))
    return (distinct + [distinct[-1]] * LAYERS)[:LAYERS]


def tiny_model(architecture: Architecture, seed: int = 0) -> PreTrainedModel:
    """A model with random weights, biases among them. Raises ValueError for one that is not tiny."""
    config = tiny_config(architecture.model_type)
    cls = getattr(transformers, architecture.class_name)
    if not isinstance(config, cls.config_class):
        config = config.get_text_config(decoder=True)
    with torch.device("meta"):
        count = sum(p.numel() for p in cls(config).parameters())
    if count > MOST_PARAMETERS:
        raise ValueError(f"config: expected at most {MOST_PARAMETERS} parameters, got {count}")
    torch.manual_seed(seed)
    model: PreTrainedModel = cls(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") and parameter.dim() == 1:
                parameter.normal_(std=0.02)
    return model


def inputs_of(architecture: Architecture) -> dict[str, torch.Tensor]:
    """What the model takes: two rows of tokens."""
    tokens = torch.arange(24).view(2, 12) * 7 % (VOCABULARY - 8) + 4
    inputs = {"input_ids": tokens}
    if architecture.kind == "seq2seq":
        inputs["decoder_input_ids"] = tokens[:, :6]
    return inputs


@torch.no_grad()
def output_of(model: PreTrainedModel, architecture: Architecture) -> torch.Tensor:
    """Its logits, or the hidden states of a model without a head."""
    torch.manual_seed(0)  # Reformer hashes by random numbers
    inputs = inputs_of(architecture)
    options = {"use_cache": False} if architecture.kind != "encoder" else {}
    try:
        output = model(**inputs, **options)
    except TypeError:
        output = model(**inputs)
    for value in (getattr(output, "logits", None), getattr(output, "last_hidden_state", None), *tensors_in(output)):
        if isinstance(value, torch.Tensor):
            return value
    raise ValueError(f"{type(model).__name__}: expected an output of logits or hidden states, got {type(output)}")


def tensors_in(output: Any) -> Iterator[torch.Tensor]:
    """The tensors of an output."""
    for value in output.values() if isinstance(output, dict) else output:
        if isinstance(value, torch.Tensor):
            yield value
