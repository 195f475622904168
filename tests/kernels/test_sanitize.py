"""What sanitize.py launches for compute-sanitizer on a GPU."""

from __future__ import annotations

import argparse

import pytest
from tests.kernels import sanitize

from weightonly.heuristics.configs import CONFIGS, FP8_CONFIGS, GROUPED_CONFIGS, GROUPED_FP8_CONFIGS, kernel_types


@pytest.fixture
def all_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if this build had every kernel, and this GPU ran it."""
    monkeypatch.setattr(sanitize, "is_compiled", lambda config, types: True)
    monkeypatch.setattr("weightonly.plan.choose.is_compiled", lambda config, types: True)
    monkeypatch.setattr("weightonly.plan.choose.runs_on", lambda config, arch: True)


def test_every_kernel_is_launched_with_every_type(all_compiled: None) -> None:
    configs = (*CONFIGS, *FP8_CONFIGS)
    found = sanitize.launches(configs, 90, 132)
    launched = {(one.config.kernel, one.types) for one in found}
    assert launched == {(config.kernel, types) for config in configs for types in kernel_types(config)}
    splits = {one.config.kernel for one in found if one.config.split_k == 2}
    assert splits == {config.kernel for config in configs if config.max_split_k > 1}


def test_every_grouped_kernel_is_launched_in_layers_too(all_compiled: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weightonly.grouped_kernels", lambda: list(GROUPED_CONFIGS))
    monkeypatch.setattr("weightonly.grouped_fp8_kernels", lambda: list(GROUPED_FP8_CONFIGS))
    found = {(one.config.kernel, one.types, one.tokens) for one in sanitize.grouped_launches()}
    for config in (*GROUPED_CONFIGS, *GROUPED_FP8_CONFIGS):
        for types in kernel_types(config):
            tokens = {tokens for kernel, kind, tokens in found if (kernel, kind) == (config.kernel, types)}
            assert tokens == ({None, 9, 140} if config.rules.in_layers else {None})


def test_parts_are_named_by_number_and_count() -> None:
    assert sanitize.part_of("2/3") == (2, 3)
    for text in ("", "0/3", "4/3", "1", "a/b"):
        with pytest.raises(argparse.ArgumentTypeError, match="expected a part such as 1/3"):
            sanitize.part_of(text)
