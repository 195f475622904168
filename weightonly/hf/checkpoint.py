"""The tensors of a checkpoint under the names of the model, read and packed when transformers asks for each."""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections import Counter
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from ..activation_dtype import activations_of, check_fp8_format, check_fp8_groups
from ..device import device_arch
from ..formats.checkpoint import Checkpoint
from ..formats.converted import tensors_of
from ..formats.expect import FLOATS
from ..formats.layers import LayerShape
from ..formats.packed_config import METHOD, VERSION, check_runs, options_of
from ..formats.parts import read_part
from ..formats.shards import Shards
from ..heuristics.arch import ARCHS, Arch
from ..heuristics.problem import CODE_FORMATS
from ..layout import CPU, TILED_FP8
from ..packing import layout_for_arch, record_code_layout
from ..parallel import ParallelLinear
from ..quantize_codes import check_scales_as
from .dense import Dense, check_no_bias, dtype_of, tensors_inside
from .experts import in_turns_in_files, plan_experts, read_gates_first, stacked
from .files import check_complete, check_declared, check_used, has_bias
from .memory import after_packing
from .modules import Plan, Stack, check_size, linear_shape
from .names import Names

logger = logging.get_logger(__name__)


class CheckpointWeights:
    """The layers of a checkpoint, packed for `arch`, as a state dict of a model.

    tensors: empty until `plan` is called; then name in the model -> a tensor that is read when it is indexed.

    activations: "fp8" or "16bit" of all layers, but "16bit" of output embeddings; None: of those of a packed folder
        what they have, else "16bit".

    Raises ValueError for layers that no kernel of `arch` computes.
    """

    dtype: torch.dtype | None = None
    """Of the model, once it is known: transformers casts scales to it."""

    def __init__(self, checkpoint: Checkpoint, arch: Arch | None, activations: str | None = None) -> None:
        check_runs(checkpoint.shapes, arch)
        asked = activations_of(activations)
        self.checkpoint = checkpoint
        self.arch = arch
        self._is_asked = activations is not None
        self._activations = {
            name: asked if self._is_asked else checkpoint.activations_of(name) for name in checkpoint.layers
        }
        has_them = all(checkpoint.activations_of(name) == wanted for name, wanted in self._activations.items())
        keeps_layout = arch is None and METHOD in checkpoint.methods and has_them
        self.pack_arch: Arch | None = None if keeps_layout else arch_or_visible(arch)
        """What layers are packed for; None: they keep the layout that the folder has."""
        self.shapes = {name: self._packed_shape(name) for name in checkpoint.layers}
        """Of experts, until `plan` knows which layers are none, but for layouts that are kept."""
        self.tensors: dict[str, Any] = {}
        self._stacks: dict[str, Stack] = {}
        self._dense: dict[str, Dense] = {}
        self._lock = threading.Lock()  # layers are read one after another: the unpacked numbers of one at a time
        self._read: dict[str, dict[str, torch.Tensor]] = {}
        self._model: PreTrainedModel | None = None
        self._names: dict[str, str] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> CheckpointWeights:
        return self  # transformers copies configs

    @property
    def plain_dtype(self) -> torch.dtype | None:
        """Of the first tensor of floats that belongs to no quantized layer; None where there is none."""
        tensors = self.checkpoint.shards.tensors
        return next((tensors[name].dtype for name in self.plain if tensors[name].dtype in FLOATS), None)

    @property
    def plain(self) -> list[str]:
        """Tensors that belong to no quantized layer, and may have a place in a model."""
        return [name for name in self.checkpoint.plain if name not in self.checkpoint.unused]

    @property
    def options(self) -> dict[str, Any]:
        """The quantization config of the packed model, as far as it is known without the model."""
        return {"quant_method": METHOD, "format_version": VERSION, "arch": self.arch} | options_of(self.shapes)

    def plan(self, model: PreTrainedModel, stacks: bool = True) -> Plan:
        """What becomes of the layers of `model`; fills `tensors`. stacks: whether experts are packed, not dense.

        Raises ValueError for a linear layer of the model that the checkpoint does not have, and for a packed layer that
        config.json says to be dense.
        """
        self.tensors.clear()
        self._stacks.clear()
        self.dtype = model.dtype
        names, plan = Names(model), Plan()
        self._model = model
        experts = plan_experts(names, self.checkpoint, self.shapes, plan, stacks)
        for name, stack in plan.stacks.items():
            asked = {self._activations[layer] for layers in stack.parts for layer in layers}
            shape = self._with_activations(name, stack.shape, asked.pop() if len(asked) == 1 else None)
            plan.stacks[name] = self._stacks[name] = stack = dataclasses.replace(stack, shape=shape)
            self._add(name, name, stack.shape, bool(names.experts[name.rpartition(".")[0]].has_bias))
        alone = {tensor for layer in experts for tensor in tensors_inside(self.checkpoint, layer).values()}
        plain = [tensor for tensor in self.plain if tensor not in alone]
        found = check_used(model, names, self.checkpoint.shards, plain)
        places = {layer: names.of_layer(layer) for layer in self.shapes if layer not in experts}
        given = found | {f"{name}.weight" for name, _ in places.values()}
        for layer, (name, pattern) in places.items():
            self._plan_layer(layer, name, pattern, names, plan, given)
        for tensor in plain:
            self._add_plain(tensor)
        self._dense = {name: dense for name, dense in plan.densified.items() if dense.parts}
        for name, dense in self._dense.items():
            self.tensors[name] = _Lazy(self, name, "dense", dense.dtype)
            if dense.bias is not None:
                self.tensors[dense.bias] = _Lazy(self, name, "bias", dense.dtype)
        for reason, count in Counter(dense.reason for dense in plan.densified.values()).items():
            name = next(name for name, dense in plan.densified.items() if dense.reason == reason)
            more = f" and {count - 1} others" * (count > 1)
            logger.warning(f"weightonly: {name}{more} stay dense, dequantized: {reason}")
        check_complete(model, plan, found, self.checkpoint.folder)
        check_declared(plan, names, self.checkpoint)
        return plan

    def _plan_layer(
        self, layer: str, name: str, pattern: str | None, names: Names, plan: Plan, given: set[str]
    ) -> None:
        """What becomes of a layer that is no expert, and that the model calls so. given: the weights of the folder."""
        shape, bias = self.shapes[layer], self.checkpoint.layers[layer].tensors.get("bias")
        weight = f"{name}.weight"
        if pattern is not None and name in names.tensors:
            self.tensors[f"{layer}.weight"] = _Lazy(self, layer, "dense", torch.float32)
            dense = Dense("the model has it in other parts than the checkpoint", torch.float32)
            plan.densified |= dict.fromkeys(names.targets(name, pattern), dense)
            if bias is not None:
                self._add_plain(bias)
        elif weight in names.tensors:
            module = names.model.get_submodule(name)
            reason = _why_dense(names.model, module, weight, given)
            if reason is None:
                is_head = module is names.model.get_output_embeddings()
                shape = self.shapes[layer] = plan.layers[name] = self._linear_shape(layer, is_head)
                self._add(layer, name, shape, has_bias(module, layer, self.checkpoint))
            else:
                check_size(layer, tuple(names.tensors[weight].shape[::-1]), (shape.k, shape.n))
                own_bias = f"{name}.bias" if bias is not None and f"{name}.bias" in names.tensors else None
                plan.densified[weight] = Dense(reason, dtype_of(names.model, weight), ((layer,),), bias=own_bias)
                if f"{name}.bias" not in names.tensors:
                    check_no_bias(self.checkpoint, layer)
        else:
            model = type(names.model).__name__
            logger.warning(f"weightonly: {layer} of the checkpoint is not used: {model} has none")

    def check_scales(self) -> None:
        """Raises ValueError, naming the layer, for scales in the files that the dtype of the model does not hold."""
        shards, dtype = self.checkpoint.shards, self.dtype
        assert dtype is not None
        for layer, shape in self.shapes.items():
            scales = f"{layer}.scales"
            if shards.tensors[scales].dtype != dtype:
                _check_scales(layer, shards.read(scales), dtype, shape.format)

    def _add_plain(self, tensor: str) -> None:
        self.tensors[tensor] = PlainLazy(self.checkpoint.shards, tensor)

    def _add(self, layer: str, name: str, shape: LayerShape, has_bias: bool) -> None:
        self._names[layer] = name
        dtype = {"qweight": torch.uint8, "perm": torch.int32, "codebook": torch.int32}
        inside = ["qweight", "scales"]
        inside += ["zeros"] if shape.symmetric is False else []
        inside += ["perm"] if shape.act_order else []
        inside += ["codebook"] if shape.format == "code4" else []
        inside += ["bias"] if has_bias else []
        for tensor in inside:
            self.tensors[f"{name}.{tensor}"] = _Lazy(self, layer, tensor, dtype.get(tensor, torch.float32))

    def read(self, layer: str, tensor: str) -> torch.Tensor:
        """A tensor of a layer, or of stacked experts. The others are kept until they are read, too."""
        with self._lock:
            if layer in self._dense:
                dense = self._dense[layer]
                return dense.weight(self._weight) if tensor == "dense" else dense.biases(self._bias)
            if tensor == "dense":
                return self._weight(layer).t()
            if tensor not in self._read.get(layer, {}):
                read = self._stack if layer in self._stacks else self._tensors
                self._read[layer] = after_packing(read(layer))
            value = self._read[layer].pop(tensor)
            if not self._read[layer]:
                del self._read[layer]
            return value

    def _weight(self, layer: str) -> torch.Tensor:
        """The weight [K, N] of a layer, quantized or not."""
        if layer in self.checkpoint.layers:
            return self.checkpoint.read_layer(layer, self.pack_arch).dequantize()
        return self.checkpoint.shards.read(f"{layer}.weight").t()

    def _bias(self, layer: str) -> torch.Tensor:
        return self.checkpoint.shards.read(tensors_inside(self.checkpoint, layer)["bias"])

    def _tensors(self, layer: str) -> dict[str, torch.Tensor]:
        """The tensors of a layer, or of this rank's part of it."""
        module = None if self._model is None else self._model.get_submodule(self._names[layer])
        if not isinstance(module, ParallelLinear):
            record = self.checkpoint.read_layer(layer, self.pack_arch, activations=self.shapes[layer].activations)
            return {name.removeprefix(f"{layer}."): value for name, value in tensors_of(record).items()}
        part = {}
        if not module.is_empty:
            record = read_part(self.checkpoint, layer, self.pack_arch, module.rows, module.ranges, module.activations)
            part = {name.removeprefix(f"{layer}."): value for name, value in tensors_of(record).items()}
        # Of an empty part nothing was read. Of columns without zero points, beside columns that have some, no zeros.
        own = [*module.named_parameters(), *module.named_buffers()]
        rest = {name: torch.zeros_like(tensor, device="cpu") for name, tensor in own if name not in part}
        return part | rest

    def _stack(self, name: str) -> dict[str, torch.Tensor]:
        stack = self._stacks[name]
        assert self.dtype is not None
        in_turns = self._model is not None and in_turns_in_files(self._model, name) and len(stack.parts[0]) == 1
        read = functools.partial(read_gates_first, self.checkpoint) if in_turns else self.checkpoint.record_of
        arch, of_file = self.pack_arch, self.checkpoint.shards.read
        records = [
            tuple(read(layer, arch, of_file, activations=stack.shape.activations) for layer in parts)
            for parts in stack.parts
        ]
        has_bias = f"{name}.bias" in self.tensors
        return dict(stacked(name, stack, records, self.dtype, has_bias).state_dict())

    def _packed_shape(self, layer: str) -> LayerShape:
        shape = self.checkpoint.exact_shape(layer)
        if self.pack_arch is None:
            return shape
        find = record_code_layout if shape.format in CODE_FORMATS else layout_for_arch
        layout = find(self.pack_arch)
        return dataclasses.replace(shape, layout=layout, activations=None)

    def _linear_shape(self, layer: str, is_head: bool) -> LayerShape:
        """The shape of a layer that is no expert. is_head: whether it is the output embeddings, whose x stays as it is.

        Raises ValueError, naming the layer, for one that takes no x in E4M3.
        """
        activations = None if is_head and self._is_asked else self._activations[layer]
        return self._with_activations(layer, self.shapes[layer], activations)

    def _with_activations(self, layer: str, shape: LayerShape, activations: str | None) -> LayerShape:
        """`shape`, packed for x in E4M3 where a layer's activations are "fp8" and layouts are not kept."""
        if self.pack_arch is None or activations is None:
            return shape
        try:
            check_fp8_format(shape.format, shape.symmetric is not False)
            check_fp8_groups(shape.group_size, shape.k)
            layout = layout_for_arch(self.pack_arch, activations)
            if layout == TILED_FP8 and self.dtype == torch.float32:
                raise ValueError("activations: expected dtype float16 or bfloat16 for 'fp8' on a GPU, got float32")
        except ValueError as error:
            raise ValueError(f"{layer}: {error}") from error
        return dataclasses.replace(shape, layout=layout, activations=activations)


def _why_dense(model: PreTrainedModel, module: torch.nn.Module, weight: str, given: set[str]) -> str | None:
    """Why a module of the model cannot take a packed layer. given: the weights of the folder."""
    if linear_shape(module) is None:
        return f"{type(module).__name__} is no linear layer"
    tied = {weight, model.all_tied_weights_keys.get(weight)}
    others = {name for pair in model.all_tied_weights_keys.items() if tied.intersection(pair) for name in pair}
    if others and not (others - {weight}) & given:
        return "it is the embedding, too"
    return None


def _check_scales(layer: str, scales: torch.Tensor, dtype: torch.dtype, format: str) -> None:
    try:
        check_scales_as(scales, dtype, format)
    except ValueError as error:
        raise ValueError(f"{layer}: {error}") from error


class PlainLazy:
    """A tensor of files that is read when it is indexed, as those of safetensors' `get_slice` are."""

    def __init__(self, shards: Shards, name: str) -> None:
        self._shards = shards
        self._name = name

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._shards.read(self._name, part=index)

    def get_shape(self) -> list[int]:
        """transformers asks for it to read a part."""
        return list(self._shards.tensors[self._name].shape)

    def is_floating_point(self) -> bool:
        """Whether transformers may cast it to the dtype of the model."""
        return self._shards.tensors[self._name].dtype.is_floating_point


class _Lazy:
    """The same of a layer's tensor, once it is packed, or dequantized."""

    def __init__(self, weights: CheckpointWeights, layer: str, tensor: str, dtype: torch.dtype) -> None:
        self._weights = weights
        self._layer = layer
        self._tensor = tensor
        self._dtype = dtype

    def __getitem__(self, index: Any) -> torch.Tensor:
        value = self._weights.read(self._layer, self._tensor)
        shape, dtype = self._weights.shapes.get(self._layer), self._weights.dtype
        if self._tensor == "scales" and shape is not None and dtype is not None:
            _check_scales(self._layer, value, dtype, shape.format)
        return value[index]

    def get_shape(self) -> list[int]:
        return list(self[...].shape)

    def is_floating_point(self) -> bool:
        """Whether transformers may cast it to the dtype of the model."""
        return self._dtype.is_floating_point


def arch_or_visible(arch: Arch | None) -> Arch:
    """`arch`; None: the visible GPU, else the CPU."""
    if arch is not None:
        return arch
    if torch.cuda.is_available() and device_arch(torch.cuda.current_device()) in ARCHS:
        return device_arch(torch.cuda.current_device())
    return CPU
