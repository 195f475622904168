"""The plug-ins for vLLM and SGLang on a machine that has neither."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("module", ["weightonly", "weightonly.vllm", "weightonly.sglang"])
def test_importing_it_asks_for_nothing(module: str) -> None:
    """Neither vLLM nor SGLang is needed, and CUDA is not initialized: vLLM forks its workers after the import."""
    code = f"""
import sys, torch
sys.modules["vllm"] = sys.modules["sglang"] = None
import {module}
assert not torch.cuda.is_initialized()
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("module", ["vllm", "sglang"])
def test_registering_it_there_says_what_is_missing(module: str) -> None:
    code = f"""
import sys
sys.modules["{module}"] = None
import weightonly.{module} as plugin
plugin.built_archs = lambda: ("90a",)
try:
    plugin.register()
except ModuleNotFoundError as error:
    assert error.name and error.name.split(".")[0] == "{module}", error
else:
    raise AssertionError("no error")
"""
    subprocess.run([sys.executable, "-c", code], check=True)
