"""What quantizes a model: each provider replaces the linears of a decoder layer, in place.

To compare another library, subclass `ModelProvider` and `register` an instance, in a module that --plugin names.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch

import weightonly as wo

from ..providers import Dense, LayerProvider, Registry, linear4bit
from ..report.measure import GROUP_SIZES


class ModelProvider(LayerProvider):
    """A way to hold the linears of a model."""

    def untrainable(self) -> str | None:
        """Why LoRA is not trained with it, or None (the default)."""
        return None

    @abstractmethod
    def quantize(self, layer: torch.nn.Module) -> None:
        """Replaces the linears of a decoder layer, whose weights are random and on their device."""

    def finish(self, model: Any) -> None:
        """Called once, when all layers are quantized: what PEFT has to know of the model."""
        return


class Ours(ModelProvider):
    """`wo.nn.quantize_model`: int4 in groups of 128, int8 per channel, NF4 in blocks of 64, MXFP4.

    fuse: see `wo.nn.fuse_model`. head: the format of the output embeddings; None: they are dense.
    """

    def __init__(self, format: str, fuse: bool = False, head: str | None = None) -> None:
        self.format, self.fuse, self.head = format, fuse, head
        self.name = "-".join(self._words)

    @property
    def _words(self) -> list[str]:
        more = ["fused"] if self.fuse else []
        return ["ours", self.format, *more, *([] if self.head is None else ["head", self.head])]

    def label(self, device: torch.device, dtype: torch.dtype) -> str:
        return " ".join(self._words)

    def quantize(self, layer: torch.nn.Module) -> None:
        wo.nn.quantize_model(layer, format=self.format, group_size=GROUP_SIZES.get(self.format), fuse=self.fuse)

    def finish(self, model: Any) -> None:
        import weightonly.hf  # noqa: F401  (makes wo.nn.Linear known to PEFT)

        if self.head is not None:
            wo.nn.quantize_model(model, only=(), quantize_head=self.head)


class DenseModel(ModelProvider):
    """torch.nn.Linear as it is."""

    name = Dense.name

    def label(self, device: torch.device, dtype: torch.dtype) -> str:
        return Dense().label(device, dtype)

    def quantize(self, layer: torch.nn.Module) -> None:
        return


class BitsAndBytesModel(ModelProvider):
    """bitsandbytes' Linear4bit: NF4 in blocks of 64, plain statistics."""

    name = "bitsandbytes"
    package = "bitsandbytes"

    def label(self, device: torch.device, dtype: torch.dtype) -> str:
        return "bitsandbytes nf4"

    def quantize(self, layer: torch.nn.Module) -> None:
        for name, old in list(layer.named_modules()):
            if type(old) is torch.nn.Linear:
                layer.set_submodule(name, linear4bit(old.weight.detach(), 64))

    def finish(self, model: Any) -> None:
        model.is_loaded_in_4bit = True  # PEFT asks for it


class TorchAo(ModelProvider):
    """torchao's int4 in groups of 128, in the packing that PyTorch's own kernel reads."""

    name = "torchao"
    package = "torchao"
    cuda_only = True
    dtypes = (torch.bfloat16,)

    def label(self, device: torch.device, dtype: torch.dtype) -> str:
        return "torchao int4"

    def untrainable(self) -> str | None:
        return "PEFT trains it by another quantizer's config"

    def quantize(self, layer: torch.nn.Module) -> None:
        torchao_int4(layer, GROUP_SIZES["int4"])


def torchao_int4(module: torch.nn.Module, group_size: int) -> None:
    """Quantizes every torch.nn.Linear inside a module by torchao, for PyTorch's own kernel."""
    from torchao.quantization import Int4WeightOnlyConfig, quantize_

    quantize_(module, Int4WeightOnlyConfig(group_size=group_size, int4_packing_format="tile_packed_to_4d"))


MODEL_PROVIDERS: Registry[ModelProvider] = Registry()

register = MODEL_PROVIDERS.register

_FUSED = (Ours("int4", fuse=True), Ours("int4", fuse=True, head="int8"), Ours("mxfp4"), Ours("mxfp4", fuse=True))

for _provider in (*map(Ours, GROUP_SIZES), *_FUSED, DenseModel(), BitsAndBytesModel(), TorchAo()):
    register(_provider)
