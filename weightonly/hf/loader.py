"""load_model: a folder of any quantizer that this library reads, as a running model of its own transformers class."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, GenerationConfig, PreTrainedModel
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from ..activation_dtype import activations_of
from ..extras import require_package
from ..formats.checkpoint import open_checkpoint
from ..formats.foreign import check_foreign, of_activations
from ..formats.gguf import GgufShards, open_shards
from ..formats.recognize import is_dense, quantization_config
from ..formats.shards import CONFIG
from ..heuristics.arch import Arch
from ..hub import model_folder
from ..nn.fuse import fuse_model
from ..packing import format_of, target_name
from ..require import require_bool
from ..shown import shown
from .checkpoint import CheckpointWeights, PlainLazy
from .config import WeightOnlyConfig, forget_quantizers
from .files import PartsError, check_used
from .names import Names
from .quantizer import pack_head


def load_model(
    folder: str | os.PathLike[str],
    dtype: torch.dtype | str | None = None,
    device_map: Any = None,
    arch: Arch | None = None,
    revision: str | None = None,
    activations: str | None = None,
    *,
    fuse: bool = True,
    quantize_head: str | None = None,
    **kwargs: Any,
) -> PreTrainedModel:
    """A folder that `python -m weightonly inspect` knows, or one that is not quantized, as a running model.

    Args:
        folder: of AWQ, GPTQ, compressed-tensors, bitsandbytes, HQQ, torchao, Quark, FP8, ModelOpt, gpt-oss, `convert`,
            `save_pretrained` or a dense model: safetensors files and config.json, on this machine; or "OWNER/NAME" of
            the Hugging Face Hub, which is downloaded; or a GGUF file (pip install gguf).
        dtype: of scales, biases, dense weights and activations: float16, bfloat16 or float32 (on the CPU alone). None
            or "auto": the one in config.json, or, where it names none, that of the tensors that are not quantized. Of a
            GGUF file float16, which has its scales; bfloat16 of MXFP4 and of Gemma, whose activations float16 does not
            hold.
        device_map: as for `from_pretrained`: None for the CPU, "auto", a device, or module -> device; CPU and disk too.
        arch: the GPU to pack for, or "cpu"; None: the visible GPU, else the CPU; a packed folder keeps its layout.
        revision: a branch, tag or commit of a model of the hub; None: the newest files.
        activations: "fp8": layers but output embeddings round x to E4M3, each row by its own scale (see
            `weightonly.nn.Linear`); they have to be symmetric int4 or mxfp4. "16bit": x stays as it is. None: a packed
            folder has what it was written with; others "16bit", whatever their config asks for.
        fuse: whether layers that read the same x compute one product, such as q, k, v: see `weightonly.nn.fuse_model`.
            False: their tensors share no memory, which `safetensors.torch.save_file` asks for.
        quantize_head: the format of the output embeddings, such as "int8" or "fp8", where the folder has them dense:
            they are quantized in memory, and an embedding that shares their weight stays as it is. None: they are left.
        **kwargs: for `from_pretrained` of transformers, such as attn_implementation, max_memory, offload_folder.
            trust_remote_code is False unless you pass True: code of the folder then runs.

    Returns:
        A model of the class that config.json names, in eval mode. The weights of the file are not rounded: a layer
        computes with the numbers that `record.dequantize()` gives, its scales in `dtype`. What transformers computes
        itself (tied embeddings, rotary frequencies) and `generation_config` are as it makes them. Packed layers are
        `weightonly.nn.Linear`; `save_pretrained` writes a packed folder.

    Raises:
        FileNotFoundError: a folder or shard that does not exist.
        ValueError: naming file, layer or tensor, an unknown method or version, a model whose code is in the folder,
            layers that no kernel of `arch` computes, with what would help, layers that are none for activations "fp8",
            a layer of another shape than the model has, tensors of the model that the folder lacks, and a dtype or
            device without kernels.
        TypeError: a `fuse` that is no bool.
        ImportError: a device_map without accelerate.

    Examples:
        >>> model = load_model("Llama-GPTQ", dtype=torch.bfloat16)
        >>> model(torch.tensor([[1, 2, 3]])).logits.shape
        torch.Size([1, 3, 128])
    """
    require_bool("fuse", fuse)
    model = _load(folder, dtype, device_map, arch, revision, activations, **kwargs)
    if quantize_head is not None:
        pack_head(model, format_of(None, quantize_head), arch)
    if fuse:
        fuse_model(model)
    return model


def _load(
    folder: str | os.PathLike[str],
    dtype: torch.dtype | str | None,
    device_map: Any,
    arch: Arch | None,
    revision: str | None,
    activations: str | None,
    **kwargs: Any,
) -> PreTrainedModel:
    """`load_model`, whose arguments these are."""
    folder = model_folder(folder, revision)
    if device_map is not None:
        require_package("accelerate")
    if arch is not None:
        target_name(arch)
    is_fp8 = activations_of(activations) is not None
    shards = open_shards(folder, dtype)
    is_gguf = isinstance(shards, GgufShards)
    if not is_gguf and not (folder / CONFIG).is_file():
        raise ValueError(f"{folder}: expected config.json, which says what the model is, got none")
    code = kwargs.setdefault("trust_remote_code", False)  # None asks on a terminal
    if is_gguf:
        config = AutoConfig.for_model(**(shards.config(CONFIG) or {}))
    else:
        config = model_config(folder, code)
        shards.configs[CONFIG] = entries(config)
    cls = model_class(config, folder if is_gguf else folder / CONFIG, bool(code))
    dtype = "auto" if dtype is None else dtype
    arguments = {"dtype": dtype, "device_map": device_map, "output_loading_info": True, **kwargs}
    if is_dense(shards):
        if is_fp8:
            raise ValueError(
                f"activations: expected None, as {folder} is not quantized, got 'fp8'; from_pretrained(folder, "
                "quantization_config=WeightOnlyConfig(activations='fp8')) quantizes it"
            )
        unused = of_activations(shards)
        plain = [name for name in shards.tensors if name not in unused]
        check_foreign(shards, plain, {})
        source = {"state_dict": {name: PlainLazy(shards, name) for name in plain}} if is_gguf else {}
        model, info = cls.from_pretrained(None if is_gguf else folder, config=config, **source, **arguments)
        check_used(model, Names(model), shards, plain)
        return complete(model, info, folder)
    weights = CheckpointWeights(open_checkpoint(shards), arch, activations)
    if weights.pack_arch is None:
        _describe(config, weights, quantization_config(shards)[1])
        try:
            model, info = cls.from_pretrained(folder, config=config, **arguments)
            return complete(model, info, folder)
        except PartsError:
            pass  # they are made dense below
    _describe(config, weights, weights.options)
    if arguments["dtype"] == "auto":
        arguments["dtype"] = config.dtype or weights.plain_dtype or torch.get_default_dtype()
    if "generation_config" not in kwargs and (folder / "generation_config.json").is_file():
        arguments["generation_config"] = GenerationConfig.from_pretrained(folder)
    model, info = cls.from_pretrained(None, config=config, state_dict=weights.tensors, **arguments)
    model.name_or_path = model.config._name_or_path = str(folder)
    return complete(model, info, folder)


def model_config(folder: Path, runs_code: bool | None = False) -> Any:
    """config.json of a folder, as its class of transformers has it. Raises ValueError, naming the file."""
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=runs_code)
    except (AttributeError, KeyError, StrictDataclassError, TypeError, ValueError) as error:
        raise ValueError(f"{folder / CONFIG}: {error}") from error


def model_class(config: Any, file: Path, runs_code: bool = False) -> Any:
    """The class that config.json names: one of transformers, or of the folder, where the caller lets its code run.

    Raises ValueError, naming the `file` of the config, where there is neither.
    """
    names = config.architectures or []
    for name in names if isinstance(names, list) else ():
        found = getattr(transformers, name, None) if isinstance(name, str) else None
        if isinstance(found, type) and issubclass(found, PreTrainedModel):
            return found
    own = (getattr(config, "auto_map", None) or {}).get("AutoModelForCausalLM")
    if runs_code and own is not None:
        return get_class_from_dynamic_module(own, str(file.parent))
    problem = "expected names of classes of transformers, one of them of a model"
    raise ValueError(f"{file}: architectures: {problem}, got {shown(repr(names))}")


def entries(config: Any) -> dict[str, Any]:
    """config.json as transformers read it: the entries that may say how the folder is quantized."""
    text = getattr(config, "text_config", None)
    return vars(config) | {"text_config": None if text is None else vars(text)}


def _describe(config: Any, weights: CheckpointWeights, options: dict[str, Any]) -> None:
    """Put this library's quantization config in the place of that of the quantizer."""
    forget_quantizers(config)
    config.quantization_config = WeightOnlyConfig(**options, fuse=False)  # `load_model` fuses what it was asked to
    config.quantization_config.weights = weights


def complete(model: PreTrainedModel, info: dict[str, Any], folder: Path) -> PreTrainedModel:
    """`model`. Raises ValueError where the folder lacks some of its tensors: transformers left them random."""
    missing = sorted(info["missing_keys"])
    if missing:
        more = f" and {len(missing) - 1} others" if len(missing) > 1 else ""
        raise ValueError(
            f"{folder}: expected every tensor of {type(model).__name__}, got none for {shown(missing[0])}{more}"
        )
    return model
