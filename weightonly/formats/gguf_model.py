"""What a GGUF file says about its model, as transformers has it: the config, and the names and forms of its tensors.

transformers' own mapping (`AutoConfig.from_pretrained(gguf_file=)`) leaves out what these models need: experts of
Mixtral, sizes of experts, head_dim of Qwen3, scaled rotary frequencies, the scale of attention in Gemma 27B.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..shown import shown
from .expect import option
from .gguf_blocks import TYPES
from .gguf_header import Header, Stored

_MODELS = {
    "llama": ("llama", "LlamaForCausalLM"),  # Mistral, too: nothing in the file tells them apart
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen2moe": ("qwen2_moe", "Qwen2MoeForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "qwen3moe": ("qwen3_moe", "Qwen3MoeForCausalLM"),
    "gemma": ("gemma", "GemmaForCausalLM"),
    "gemma2": ("gemma2", "Gemma2ForCausalLM"),
    "gemma3": ("gemma3_text", "Gemma3ForCausalLM"),
}
"""general.architecture -> (model_type, class) of transformers."""

_MIXTRAL = ("mixtral", "MixtralForCausalLM")
"""Of "llama" with experts."""

_SIZES = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
}

_OF_GEMMA = {
    "attention.sliding_window": ("sliding_window", int),
    "attn_logit_softcapping": ("attn_logit_softcapping", float),
    "final_logit_softcapping": ("final_logit_softcapping", float),
}
"""Other models have no window in llama.cpp, whatever the file says."""

_HEADS_OF_27B = {"gemma2": 46, "gemma3": 62}
"""Layers of the models whose attention is scaled by the width of a head as embedding_length / head_count gives it."""

_LEAVES = [
    *("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"),
    *(f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")),
    *(f"mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj", "shared_expert_gate")),
    *(f"mlp.shared_expert.{name}" for name in ("gate_proj", "up_proj", "down_proj")),
]
_EXPERTS = ["mlp.gate", *(f"mlp.experts.{name}" for name in ("gate_proj", "up_proj", "down_proj"))]
_MIXTRAL_EXPERTS = ["block_sparse_moe.gate", *(f"block_sparse_moe.experts.{name}" for name in ("w1", "w3", "w2"))]
"""What transformers' files call the parts of a layer. Package gguf knows what GGUF calls them."""

_NAME = re.compile(r"(?:blk\.(\d+)\.)?(\w+?)(?:\.(\d+))?\.(weight|bias)")
ROPE = "rope_freqs.weight"
"""Of Llama 3: what rotary frequencies are divided by. In transformers it is in the config."""


@dataclass(frozen=True)
class Place:
    """A tensor of the model, in a file. name: without the suffix ("model.norm"); inside: "weight" or "bias".

    heads: whose rows llama.cpp has in another order than transformers; 0: none. minus_one: whether it is w + 1 in the
    file.
    """

    stored: Stored
    name: str
    inside: str
    heads: int = 0
    minus_one: bool = False


class Model:
    """The config and the tensors of a file, or of some that one model was split into.

    header: of the first. tensors: by their names in GGUF. Raises ValueError, naming file and key or tensor, for an
    architecture that is not read, missing or damaged metadata, and names, types and shapes that it does not have.
    """

    def __init__(self, header: Header, tensors: Mapping[str, Stored]) -> None:
        self.file: Path = header.file
        self.metadata = header.metadata
        self.tensors = tensors
        try:
            self.arch = option(self.metadata, "general.architecture", str)
            if self.arch not in _MODELS:
                raise ValueError(f"general.architecture: expected one of {', '.join(_MODELS)}, got {self.arch!r:.200}")
            experts = self._value("expert_count", int) or 0
            is_mixtral = self.arch == "llama" and experts > 0
            self.model_type, self.cls = _MIXTRAL if is_mixtral else _MODELS[self.arch]
            self.layers = self._size("block_count")
            found = {match[1] for name in tensors if (match := re.match(r"blk\.(\d+)\.", name))}
            if len(found) != self.layers:
                key = f"{self.arch}.block_count"
                raise ValueError(f"{key}: expected {len(found)}, the layers that have tensors, got {self.layers}")
            self.experts = experts
            self.config = self._config()
        except ValueError as error:
            raise ValueError(f"{self.file}: {shown(error)}") from error
        self._leaves = _names_of(self.arch, _MIXTRAL_EXPERTS if is_mixtral else _EXPERTS)

    def places(self) -> Iterator[Place]:
        """The tensors of the model. Raises what `Model` raises."""
        for stored in self.tensors.values():
            if stored.name == ROPE and self.arch == "llama":
                continue
            try:
                yield from self._places(stored)
            except ValueError as error:
                raise ValueError(f"{stored.file}: {stored.name}: {error}") from error

    def divide_frequencies(self, factors: list[float]) -> None:
        """Takes the numbers of ROPE into the config. Raises ValueError, naming file and tensor, for others."""
        rope, half = self.config["rope_parameters"], self.config["head_dim"] // 2
        fits = len(factors) == half and all(0 < factor < math.inf for factor in factors)
        if not fits or rope["rope_type"] != "default":
            expected = f"{half} numbers above 0, without {self.arch}.rope.scaling.type"
            raise ValueError(f"{self.file}: {ROPE}: expected {expected}, got {len(factors)}, {rope['rope_type']}")
        context = self.config["max_position_embeddings"]
        rope |= {"rope_type": "longrope", "short_factor": factors, "long_factor": factors, "factor": 1.0}
        rope |= {"attention_factor": 1.0, "original_max_position_embeddings": context}

    def _places(self, stored: Stored) -> Iterator[Place]:
        match = _NAME.fullmatch(stored.name)
        part = "" if match is None else match[2]
        if match is not None and match[3] is not None:  # older files have each expert by itself
            part += "_exps"
        leaf = self._leaves.get(part if match is None or match[1] is None else f"blk.{part}")
        if match is None or leaf is None:
            raise ValueError(f"expected a tensor of {self.arch}, as package gguf names them, got another name")
        if match[1] is not None and int(match[1]) >= self.layers:
            raise ValueError(f"expected {self.layers} layers, as {self.arch}.block_count says, got layer {match[1]}")
        if stored.type not in ("F32", "F16", "BF16", *TYPES):
            raise ValueError(f"expected F32, F16, BF16, {', '.join(TYPES)}, which are read, got {stored.type}")
        if stored.type in TYPES and len(stored.shape) < 2:
            raise ValueError(f"expected F32, F16 or BF16 for a vector, got {stored.type}")
        place = Place(stored, leaf if match[1] is None else f"model.layers.{match[1]}.{leaf}", match[4])
        if self.arch == "llama" and part in ("attn_q", "attn_k"):
            heads = self.config["num_attention_heads" if part == "attn_q" else "num_key_value_heads"]
            if stored.shape[0] % (2 * heads):
                raise ValueError(f"expected rows of {heads} heads, two by two, got {list(stored.shape)}")
            place = replace(place, heads=heads)
        elif self.arch.startswith("gemma") and part.endswith("norm"):
            place = replace(place, minus_one=True)
        elif leaf == "mlp.shared_expert_gate" and len(stored.shape) == 1:
            place = replace(place, stored=replace(stored, shape=(1, *stored.shape)))
        if ".experts." not in leaf:
            yield place
            return
        owner, _, last = place.name.rpartition(".")
        if match[3] is not None:
            yield replace(place, name=f"{owner}.{int(match[3])}.{last}")
            return
        if len(stored.shape) != 3 or stored.shape[0] != self.experts:
            raise ValueError(f"expected a shape of {self.experts} experts, N and K, got {list(stored.shape)}")
        size = stored.bytes // self.experts
        for index in range(self.experts):
            one = replace(stored, shape=stored.shape[1:], begin=stored.begin + index * size, bytes=size)
            yield replace(place, stored=one, name=f"{owner}.{index}.{last}")

    def _config(self) -> dict[str, Any]:
        """config.json. Raises ValueError, naming the key."""
        config: dict[str, Any] = {"model_type": self.model_type, "architectures": [self.cls], "dtype": self._dtype()}
        config |= {name: self._size(key) for key, name in _SIZES.items()}
        heads, hidden = config["num_attention_heads"], config["hidden_size"]
        config["num_key_value_heads"] = self._value("attention.head_count_kv", int) or heads
        config["head_dim"] = head_dim = self._value("attention.key_length", int) or hidden // heads
        config["rms_norm_eps"] = self._value("attention.layer_norm_rms_epsilon", float, required=True)
        for key in ("attention.value_length", "rope.dimension_count"):
            if self._value(key, int) not in (None, head_dim):
                raise ValueError(f"{self.arch}.{key}: expected {head_dim}, as a head has, got {self._value(key, int)}")
        for key, value in self.metadata.items():
            if key.startswith(f"{self.arch}.") and key.endswith("scale") and value != 1:
                raise ValueError(f"{key}: expected none, or 1, as the model of transformers has, got {value!r:.200}")
        config["vocab_size"] = self._rows("token_embd.weight", 0)
        config["tie_word_embeddings"] = "output.weight" not in self.tensors
        ends = [self._token(name) for name in ("eos", "eot")]
        ends = list(dict.fromkeys(token for token in ends if token is not None))
        config["eos_token_id"] = ends if len(ends) > 1 else next(iter(ends), None)
        config["bos_token_id"], config["pad_token_id"] = self._token("bos"), self._token("padding")
        return config | self._rope(config) | self._of_family(config)

    def _of_family(self, config: Mapping[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if self.model_type == "llama":
            found["attention_bias"] = "blk.0.attn_q.bias" in self.tensors
        if self.arch in ("gemma2", "gemma3"):
            given = {name: self._value(key, kind) for key, (name, kind) in _OF_GEMMA.items()}
            found |= {name: value for name, value in given.items() if value is not None}
            wide = config["num_hidden_layers"] == _HEADS_OF_27B[self.arch]
            of_27b = config["hidden_size"] // config["num_attention_heads"]
            found["query_pre_attn_scalar"] = of_27b if wide else config["head_dim"]
        if self.experts:
            found["num_local_experts" if self.model_type == "mixtral" else "num_experts"] = self.experts
            found["num_experts_per_tok"] = self._size("expert_used_count")
            if self.model_type != "mixtral":
                found["moe_intermediate_size"] = self._rows("blk.0.ffn_up_exps.weight", 1)
                found["norm_topk_prob"] = self.model_type == "qwen3_moe"  # as llama.cpp has it
            if self.model_type == "qwen2_moe":
                found["shared_expert_intermediate_size"] = self._rows("blk.0.ffn_up_shexp.weight", 0)
        return found

    def _rope(self, config: Mapping[str, Any]) -> dict[str, Any]:
        rope: dict[str, Any] = {"rope_type": "default", "rope_theta": self._value("rope.freq_base", float) or 10000.0}
        keys = {"type": str, "factor": float, "original_context_length": int, "finetuned": bool}
        own = f"{self.arch}.rope.scaling."
        for key in self.metadata:
            if key == f"{self.arch}.rope.scale_linear" or (key.startswith(own) and key.removeprefix(own) not in keys):
                raise ValueError(f"{key}: expected none, as it is not read, got {self.metadata[key]!r:.200}")
        kind, factor, context, _ = (self._value(f"rope.scaling.{key}", of) for key, of in keys.items())
        if kind not in (None, "none", "linear", "yarn") or (kind in ("linear", "yarn") and factor is None):
            raise ValueError(f"{own}type: expected none, linear or yarn, with a factor, got {kind!r:.200}")
        if kind in ("linear", "yarn"):
            rope |= {"rope_type": kind, "factor": factor}
        if kind == "yarn":
            rope["original_max_position_embeddings"] = context or config["max_position_embeddings"]
        if self.arch != "gemma3":
            return {"rope_parameters": rope}
        local = {"rope_type": "default", "rope_theta": self._value("rope.freq_base_swa", float) or 10000.0}
        return {"rope_parameters": {"full_attention": rope, "sliding_attention": local}}

    def _dtype(self) -> str:
        """Of a running model: fp16 has the scales of most types as they are, and more bits of those of K-quants.

        bfloat16 has the range that MXFP4's scales and Gemma's activations need.
        """
        types = {stored.type for stored in self.tensors.values() if len(stored.shape) > 1}
        if types & TYPES.keys():
            return "bfloat16" if "MXFP4" in types or self.arch.startswith("gemma") else "float16"
        return "bfloat16" if "BF16" in types else "float16" if "F16" in types else "float32"

    def _value(self, key: str, kind: type, required: bool = False) -> Any:
        """A value of the model's metadata. Raises ValueError for one of another type, negative, or missing."""
        full = f"{self.arch}.{key}"
        value = option(self.metadata, full, (float, int) if kind is float else kind)
        if (value is None and required) or (value is not None and kind in (int, float) and not 0 <= value < 1 << 40):
            raise ValueError(f"{full}: expected a number of 0 to 2^40, got {'none' if value is None else value}")
        return value

    def _size(self, key: str) -> int:
        """A number from 1 to 2^20, or of tokens to 2^40."""
        value: int = self._value(key, int, required=True)
        if not 1 <= value <= 1 << (40 if key == "context_length" else 20):
            raise ValueError(f"{self.arch}.{key}: expected a number from 1 to 2^20, got {value}")
        return value

    def _token(self, name: str) -> int | None:
        token: int | None = option(self.metadata, f"tokenizer.ggml.{name}_token_id", int)
        return token

    def _rows(self, name: str, dim: int) -> int:
        stored = self.tensors.get(name)
        if stored is None or len(stored.shape) != dim + 2:
            raise ValueError(f"expected a tensor {name} of {dim + 2} dimensions, got {stored and list(stored.shape)}")
        return stored.shape[dim]


def _names_of(arch: str, experts: list[str]) -> dict[str, str]:
    """Name in GGUF, "blk.attn_q" of those of layers -> name of transformers, of those of layers inside of them."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    known = get_tensor_name_map(next(number for number, name in MODEL_ARCH_NAMES.items() if name == arch), 1)
    leaves = {known.get_name(f"model.layers.0.{leaf}"): leaf for leaf in (*_LEAVES, *experts)}
    names = leaves | {known.get_name(name): name for name in ("model.embed_tokens", "model.norm", "lm_head")}
    return {name.replace("blk.0.", "blk."): own for name, own in names.items() if name is not None}
