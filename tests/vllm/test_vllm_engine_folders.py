"""The folders that test_vllm_engine.py serves: their numbers, and that vLLM loads them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm")

from safetensors.torch import load_file
from tests.vllm import vllm_cases as cases
from tests.vllm import vllm_fp8 as fp8
from tests.vllm.engine_folders import FOLDERS, write
from tests.vllm.vllm_models import check, load

import weightonly as wo
from weightonly.bench.serve.engine import METHOD, kernels
from weightonly.formats import QuantizedLayer


@pytest.mark.parametrize("name", FOLDERS)
def test_numbers_of_the_dense_twin(name: str, tmp_path: Path) -> None:
    case = FOLDERS[name]
    twin = load_file(write(case, tmp_path, is_dense=True) / "model.safetensors")
    for record in wo.load_checkpoint(write(case, tmp_path, is_dense=False), progress=False):
        if isinstance(record, QuantizedLayer):
            assert torch.equal(record.dequantize(torch.float32).half().t(), twin.pop(f"{record.name}.weight"))
        else:
            assert torch.equal(record.tensor, twin.pop(record.name))
    assert not twin


@pytest.mark.parametrize("name", FOLDERS)
def test_model(name: str, tmp_path: Path, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    case = FOLDERS[name]
    folder = write(case, tmp_path, is_dense=False, arch="sm90")
    by_vllm = {"quantization": None, "load_format": "auto"}
    cases.take_first(monkeypatch, "sm90")
    fp8.take_place(monkeypatch, "sm90", (9, 0))
    model = load(folder, **({} if case.provider == METHOD else by_vllm))
    check(model, folder, generator)
    assert case.kernels.items() <= kernels(model).items()
