"""vLLM's LoRA layers around linear layers of the plug-in."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm")
pytest.importorskip("vllm.model_executor.kernels.linear.nvfp4")

from tests.vllm import vllm_cases as cases
from tests.vllm import vllm_fp4 as fp4
from tests.vllm import vllm_fp8 as fp8
from tests.vllm.test_vllm_folders import FOLDERS, write
from tests.vllm.vllm_lora import check_lora
from tests.vllm.vllm_models import load
from vllm.model_executor.layers.linear import ColumnParallelLinear, LinearBase, RowParallelLinear

import weightonly as wo


@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
@pytest.mark.parametrize("method", ["gptq", "awq", "compressed-tensors", "nvfp4", "mxfp4"])
def test_on_kernels(
    method: str, kind: type[LinearBase], generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases.take_first(monkeypatch, "sm90")
    with cases.serving():
        if method in fp4.ROWS:
            fp4.take_place(monkeypatch, "sm90")
            name, stored = (
                "compressed-tensors",
                fp4.tensors("compressed-tensors", fp4.weight(generator, method, 128, 72)),
            )
            options = fp4.config(name, method)
        else:
            zeros = method == "awq"
            w = cases.weight(generator, 128, 72, bits=4, group=64, zeros=zeros, dtype=torch.float16)
            name, stored, options = method, cases.tensors(method, w), cases.config(method, 4, 64, zeros)
        layer = cases.build(name, options, 128, 72, kind=kind)
        known = dict(layer.named_parameters())
        cases.load(layer, {inside: tensor for inside, tensor in stored.items() if inside in known})
        cases.finish(layer)
        check_lora(layer, generator)


@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
@pytest.mark.parametrize(("method", "scales"), fp8.METHODS)
def test_on_fp8(
    method: str, scales: str, kind: type[LinearBase], generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    fp8.take_place(monkeypatch, "sm80")
    with fp8.serving():
        layer = fp8.build(method, scales, 128, 72, kind=kind)
        fp8.load(layer, method, fp8.weight(generator, scales, 128, 72))
        cases.finish(layer)
        check_lora(layer, generator)


@pytest.mark.parametrize("name", ["gptq-4bit-act-order-zeros", "bnb-nf4"])
@pytest.mark.parametrize("converted", [False, True], ids=["its own folder", "converted"])
def test_on_folders(name: str, converted: bool, tmp_path: Path, generator: torch.Generator) -> None:
    """Merged layers too: an adapter for each of q, k and v, of gate and up."""
    folder = write(tmp_path / "source", *FOLDERS[name], generator)
    if converted:
        wo.formats.convert(folder, tmp_path / "converted", arch="sm90", progress=False)
        folder = tmp_path / "converted"
    layers = [module for module in load(folder).modules() if isinstance(module, LinearBase)]
    with cases.serving():
        for layer in layers[:4]:
            check_lora(layer, generator)
