"""WeightOnlyConfig: what transformers keeps as `quantization_config`, of a call and of a folder."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers.quantizers import AutoHfQuantizer, register_quantization_config
from transformers.utils.quantization_config import QuantizationConfigMixin

from ..activation_dtype import WHOLE, activations_of
from ..dense import default_group_size
from ..formats.layers import LayerShape
from ..formats.packed_config import METHOD, VERSION, check_version, options_of
from ..formats.recognize import METHODS
from ..heuristics.arch import Arch
from ..heuristics.problem import CODE_FORMATS
from ..least_squares import SearchFor
from ..nn.choice import check_own
from ..nn.recipe import Recipe
from ..packing import format_of, layout_for_arch, record_code_layout, target_name
from ..require import require_bool

if TYPE_CHECKING:
    from .checkpoint import CheckpointWeights
    from .dense_folder import DenseFolder


@register_quantization_config(METHOD)
class WeightOnlyConfig(QuantizationConfigMixin):
    """How `from_pretrained(folder, quantization_config=...)` quantizes the linear layers of a model while it loads.

    A folder of AWQ, GPTQ, compressed-tensors, bitsandbytes or gpt-oss keeps its numbers: its layers are packed for
    `arch`, as `load_model` packs them. So does a packed folder, which keeps its layout, too. Other arguments have to be
    left out, or to say what the folder has.

    Args:
        format: "int4" (the default), "int8", "nf4", "fp4", "mxfp4", "nvfp4" or "fp8".
        group_size: rows of K that share a scale: 16, 32, a multiple of 64, or -1 for all of K. A layer with a K that it
            does not divide stays dense. None: as `quantize_model` has it.
        symmetric: whether there are no zero points: True, which is the default, for all but int4 and int8.
        arch: the GPU to pack for (90, "sm90", (9, 0)), or "cpu"; None: the visible GPU, else the CPU. Volta has no
            kernels for codes.
        modules_to_not_convert: names of layers to leave dense, or patterns, as transformers matches them. Output
            embeddings and tied layers always stay dense.
        layers: what some layers have otherwise: a pattern of their names -> their format, group_size, symmetric or
            activations, as in {"down_proj": {"format": "int8"}}. A pattern is a name, in which `*` matches as in a file
            name, or the end of one, after a dot; of several that match, the last is taken. Where one of both formats is
            a codebook, the group size is the usual one of the layer's format. Activations "16bit" are None of the
            config.
        search: as for `quantize`, of weights that are quantized; folders do not keep it.
        activations: "fp8", as for `quantize_model`: of a folder of GPTQ and the like, too, if its layers are symmetric
            int4 or mxfp4. None: x stays as it is. A packed folder keeps what it has; `load_model` changes it.
        fuse: whether layers that read the same x compute one product, such as q, k, v: see `weightonly.nn.fuse_model`.
            Folders do not keep it. False: as for `load_model`.
        quantize_head: the format of the output embeddings, as for `quantize_model`, of a folder that has them dense,
            too. None: they are left.
        **layer_options: the other entries of a folder's config.json (see formats/packed_config.py); nobody else gives
            them.

    Raises:
        ValueError: an unknown format, arch, entry or version, a group size that no kernel takes, zero points of a
            codebook, and a format that `arch` has no kernel for; and in `from_pretrained`, what a quantized folder has
            not.
        TypeError: values of another type.

    Examples:
        >>> from transformers import AutoModelForCausalLM
        >>> config = WeightOnlyConfig(format="int4", group_size=64)
        >>> model = AutoModelForCausalLM.from_pretrained("Llama", quantization_config=config)
        >>> model.save_pretrained("Llama-packed")
    """

    def __init__(
        self,
        format: str | None = None,
        group_size: int | None = None,
        symmetric: bool | None = None,
        arch: Arch | None = None,
        modules_to_not_convert: Sequence[str] | None = None,
        layers: Mapping[str, Mapping[str, Any]] | None = None,
        search: SearchFor = True,
        activations: str | None = None,
        *,
        fuse: bool = True,
        quantize_head: str | None = None,
        **layer_options: Any,
    ) -> None:
        self.quant_method = METHOD
        arguments: dict[str, Any] = {"format": format, "group_size": group_size, "symmetric": symmetric, "arch": arch}
        arguments |= {"modules_to_not_convert": modules_to_not_convert, "layers": layers or None}
        arguments |= {
            "activations": activations,
            "fuse": None if fuse is True else fuse,
            "quantize_head": quantize_head,
        }
        self.given = {name: value for name, value in arguments.items() if value is not None}
        """The arguments of this call."""
        self.asked: dict[str, Any] = {}
        """Of a folder's config: the arguments of the config that the caller gave beside it."""
        given = layer_options.pop("quant_method", METHOD)
        if given != METHOD:
            raise ValueError(f"quant_method: expected {METHOD!r}, got {given!r}")
        self.format_version = layer_options.pop("format_version", VERSION)
        check_version(self.format_version)
        self.format = format_of(None, None) if format is None else format
        self.group_size = default_group_size(self.format) if group_size is None else group_size
        self.symmetric = True if symmetric is None else symmetric
        self.search = search
        require_bool("fuse", fuse)
        self.fuse = fuse
        self.quantize_head = None if quantize_head is None else format_of(None, quantize_head)
        self.activations = activations_of(activations)
        self.arch = None if arch is None else target_name(arch)
        if isinstance(modules_to_not_convert, str):
            raise TypeError(f"modules_to_not_convert: expected a list of names, got the str {modules_to_not_convert!r}")
        self.modules_to_not_convert = None if modules_to_not_convert is None else list(modules_to_not_convert)
        self.act_order: bool = layer_options.pop("act_order", False)
        self.layout: str | None = layer_options.pop("layout", None)
        self.layers: Any = {} if layers is None else layers
        self.source: dict[str, Any] | None = layer_options.pop("source", None)
        if layer_options:
            raise ValueError(f"quantization_config: unknown entries {', '.join(map(repr, sorted(layer_options)))}")
        self.weights: CheckpointWeights | None = None
        """The layers of the folder, where its headers have been read."""
        self.folder: dict[str, Any] | None = None
        """The quantization config of the folder, as transformers read it from config.json."""
        self.dense: DenseFolder | None = None
        """The folder of a dense model that `quantize_folder` reads and writes."""
        self._check()

    def _check(self) -> None:
        if self.layout is not None:  # of a folder: its tensors tell the rest
            return
        recipe = self.recipe(None)
        if self.group_size != -1:
            recipe.check_k(self.group_size * 2)  # some K that it divides, and is not K itself
        check_own(self.layers, recipe)

    def recipe(self, dtype: torch.dtype | None, shape: LayerShape | None = None) -> Recipe:
        """How a dense weight is quantized, with scales in `dtype`. shape: of the layer, where it has been planned."""
        if shape is None:
            return Recipe(self.format, self.group_size, self.symmetric, dtype, self.arch, self.search, self.activations)
        symmetric = shape.symmetric is not False
        return Recipe(shape.format, shape.group_size, symmetric, dtype, self.arch, self.search, shape.activations)

    def check_asked(self, folder: Path, shapes: Mapping[str, LayerShape]) -> None:
        """Raises ValueError, naming the argument, where a caller asked for what the layers of the folder have not."""
        asked = self.asked
        for name, shape in shapes.items():
            rows = asked.get("group_size", shape.group_size)
            found: dict[str, Any] = {
                "format": shape.format,
                "group_size": rows if rows == -1 and shape.group_size == shape.k else shape.group_size,
                "symmetric": asked.get("symmetric") if shape.symmetric is None else shape.symmetric,
                "modules_to_not_convert": None,
                "layers": None,
            }
            if shape.layout is not None and "arch" in asked:
                find = record_code_layout if shape.format in CODE_FORMATS else layout_for_arch
                if find(asked["arch"], activations=shape.activations) != shape.layout:
                    raise ValueError(
                        f"arch: expected one whose layout is {shape.layout!r}, as {name} of {folder} is packed, got "
                        f"{asked['arch']!r}; load_model(folder, arch=...) packs it anew"
                    )
            for argument, value in found.items():
                if argument in asked and asked[argument] != value:
                    raise ValueError(
                        f"{argument}: expected {value!r}, as {name} of {folder} has it, or nothing, got "
                        f"{asked[argument]!r}; a quantized folder keeps its numbers"
                    )

    def check_activations(self, folder: Path, shapes: Mapping[str, LayerShape]) -> None:
        """Raises ValueError where a caller asked for activations that no layer of a packed folder has."""
        asked, found = self.asked.get("activations"), {shape.activations for shape in shapes.values()}
        if asked is not None and activations_of(asked) not in found:
            raise ValueError(
                f"activations: expected {next(iter(found)) or WHOLE!r}, as {folder} has it, or nothing, got {asked!r}; "
                "load_model(folder, activations=...) packs it anew"
            )

    def to_dict(self) -> dict[str, Any]:
        """The entries of config.json."""
        hidden = {"given", "asked", "search", "fuse", "quantize_head", "weights", "folder", "dense"}
        hidden |= {name for name in ("source", "activations") if getattr(self, name) is None}
        return {name: value for name, value in vars(self).items() if name not in hidden}

    def tell(self, shapes: Mapping[str, LayerShape]) -> None:
        """Takes over what the packed layers of a model are. shapes: at least one."""
        for name, value in ({"activations": None} | options_of(shapes)).items():
            setattr(self, name, value)

    def get(self, name: str, default: Any = None) -> Any:
        """As of the dict that transformers has where a config was read from a file."""
        return getattr(self, name, default)


def forget_quantizers(config: Any) -> None:
    """Takes the quantization config of a quantizer out of the config of a model."""
    text = config.get_text_config(decoder=True)
    for holder in {id(config): config, id(text): text}.values():
        if hasattr(holder, "quantization_config"):
            del holder.quantization_config


def _merge_with(original: Callable[..., Any]) -> Callable[..., Any]:
    """`AutoHfQuantizer.merge_quantization_configs`, where the config of a call is a WeightOnlyConfig."""

    def merge(quantization_config: Any, quantization_config_from_args: Any) -> Any:
        found = quantization_config if isinstance(quantization_config, dict) else vars(quantization_config)
        method = getattr(found.get("quant_method"), "value", found.get("quant_method"))
        if not isinstance(quantization_config_from_args, WeightOnlyConfig) or method == METHOD:
            config = original(quantization_config, quantization_config_from_args)
        elif method not in METHODS:
            raise ValueError(f"quant_method: expected one of {', '.join(METHODS)}, got {method!r}")
        else:
            config = copy.copy(quantization_config_from_args)
        if isinstance(config, WeightOnlyConfig):
            if isinstance(quantization_config_from_args, WeightOnlyConfig):
                config.asked = quantization_config_from_args.given
            if found is quantization_config:
                config.folder = dict(found)
        return config

    return merge


# transformers has no hook for a folder of one method that another one reads: it refuses a config of another class.
AutoHfQuantizer.merge_quantization_configs = staticmethod(_merge_with(AutoHfQuantizer.merge_quantization_configs))
