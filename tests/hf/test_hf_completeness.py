"""What a folder has to have for a model of transformers: all layers, but those that are tied or that it makes anew."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tests.hf_version  # noqa: F401
import torch

from weightonly.formats.layers import LayerShape
from weightonly.hf.checkpoint import _Lazy
from weightonly.hf.files import check_complete, open_files
from weightonly.hf.modules import Plan


class Body(torch.nn.Module):
    """A model of its own, without a base model; its head has the weight of the embedding."""

    base_model_prefix = ""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.up, self.head = torch.nn.Embedding(4, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        self.all_tied_weights_keys = {"head.weight": "embed.weight"}


class WithHead(torch.nn.Module):
    base_model_prefix = "model"

    def __init__(self) -> None:
        super().__init__()
        self.model, self.score = Body(), torch.nn.Linear(4, 2)
        self.all_tied_weights_keys: dict[str, str] = {"model.head.weight": "model.embed.weight"}


@pytest.mark.parametrize(("model", "prefix"), [(Body(), ""), (WithHead(), "model.")], ids=["body", "with a head"])
def test_tied_weights_and_new_heads_are_not_asked_for(model: Any, prefix: str) -> None:
    plan = Plan()
    check_complete(model, plan, {f"{prefix}embed.weight", f"{prefix}up.weight"}, Path("folder"))
    assert plan.dense.keys() == {f"{prefix}up", f"{prefix}head"} | ({"score"} if prefix else set())
    with pytest.raises(ValueError, match=rf"^folder: expected {prefix}up\.qweight or {prefix}up\.weight, as the model"):
        check_complete(model, Plan(), {f"{prefix}embed.weight"}, Path("folder"))


@pytest.mark.parametrize("scale", [2.0**-47, 2.0**17])
def test_scales_that_the_dtype_of_the_model_does_not_hold(scale: float) -> None:
    """Of mxfp4, whose powers of two are exact or an error."""
    shape = LayerShape("mxfp4", 32, 8, 32, symmetric=True, act_order=False)
    weights: Any = SimpleNamespace(
        read=lambda layer, tensor: torch.full((1, 8), scale), shapes={"a.up": shape}, dtype=torch.float16
    )
    with pytest.raises(ValueError, match=r"^a\.up: scales: expected .*float16"):
        _Lazy(weights, "a.up", "scales", torch.float32)[...]
    weights.dtype = torch.bfloat16
    assert float(_Lazy(weights, "a.up", "scales", torch.float32)[0, 0]) == scale


@pytest.mark.parametrize("files", [None, []])
def test_a_state_dict_alone(files: list[str] | None) -> None:
    with pytest.raises(ValueError, match="state_dict: expected the folder of a packed model"):
        open_files(files, None)
