"""Docstrings of the API pages: every parameter is described, and every function has an example, which is run.

An example has `torch`, `weightonly` as `wo` and the names of its own module. Its folders "Llama" (dense), "Llama-int4"
and "Llama-GPTQ" are tiny. One of flag NEEDS_GPU runs where there is a GPU.
"""

from __future__ import annotations

import dataclasses
import doctest
import importlib
import inspect
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.docs.test_docs import api_names
from torch.distributed import HashStore, destroy_process_group, init_process_group

import weightonly as wo

NEEDS_GPU = doctest.register_optionflag("NEEDS_GPU")

WITHOUT_EXAMPLE = {
    "weightonly.vllm.register": "vLLM calls it",
    "weightonly.sglang.register": "SGLang calls it",
    "weightonly.formats.torchao.read_torchao": "torchao is not installed with the tests",
    "weightonly.bench.serve.serve": "vLLM is not installed with the tests",
}


def find(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def docstring(found: Any) -> str:
    """With that of its own __init__: the page shows both as one."""
    own = [found, found.__init__] if inspect.isclass(found) and "__init__" in vars(found) else [found]
    return "\n".join(filter(None, map(inspect.getdoc, own)))


def parameters(found: Any) -> list[str]:
    """Those that are its own: a class that inherits others leaves their description to its base."""
    if "__dataclass_fields__" in vars(found):
        return [field.name for field in dataclasses.fields(found) if field.name in vars(found)["__annotations__"]]
    if inspect.isclass(found) and "__init__" not in vars(found):
        return []
    return list(inspect.signature(found).parameters)


@pytest.mark.parametrize("name", api_names())
def test_parameters_are_described(name: str) -> None:
    found = find(name)
    described = re.findall(r"^    \*{0,2}(\w+): ", docstring(found), re.MULTILINE)
    assert [name for name in parameters(found) if name not in described and not name.startswith("_")] == []


@pytest.fixture(scope="module")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    from weightonly.hf import WeightOnlyConfig
    from weightonly.hf.quantize_folder import quantize_folder

    folder = tmp_path_factory.mktemp("models")
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(vocab_size=128, **sizes)).half().save_pretrained(folder / "Llama")
    config = WeightOnlyConfig(group_size=64, symmetric=False, search="whole", arch="cpu")
    quantize_folder(folder / "Llama", folder / "Llama-int4", config)
    wo.formats.export(folder / "Llama-int4", folder / "Llama-GPTQ", "gptq", progress=False)
    return folder


@pytest.fixture
def one_process() -> Iterator[None]:
    init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    destroy_process_group()


def run_examples(name: str, *, with_gpu: bool) -> int:
    """How many there are. Raises what an example raises, or says how it differs."""
    found = find(name)
    names = {**vars(importlib.import_module(found.__module__)), "torch": torch, "wo": wo}
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE | (0 if with_gpu else doctest.SKIP)
    count = 0
    for case in doctest.DocTestFinder(recurse=inspect.isclass(found)).find(found, name, globs=names):
        for example in case.examples:
            if not example.options.get(NEEDS_GPU):
                example.options.setdefault(doctest.SKIP, False)
        doctest.DebugRunner(optionflags=flags).run(case)
        count += len(case.examples)
    return count


@pytest.mark.parametrize("name", api_names())
def test_examples(name: str, tiny_models: Path, without_gpu: None, one_process: None) -> None:
    for folder in tiny_models.iterdir():
        shutil.copytree(folder, folder.name)
    assert bool(run_examples(name, with_gpu=False)) != (name in WITHOUT_EXAMPLE)


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name in api_names() if "+NEEDS_GPU" in docstring(find(name))])
def test_examples_on_a_gpu(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cuda_device: object) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_examples(name, with_gpu=True)
