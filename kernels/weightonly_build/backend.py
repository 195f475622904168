"""setuptools' build backend, with the build requirements of this machine: with CUDA a few, else none."""

from __future__ import annotations

from typing import Any

from setuptools import build_meta
from setuptools.build_meta import (
    build_editable,
    build_sdist,
    build_wheel,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

from . import library, target

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

Settings = dict[str, Any] | None


def get_requires_for_build_wheel(config_settings: Settings = None) -> list[str]:
    required: list[str] = build_meta.get_requires_for_build_wheel(config_settings)
    return required + library.build_requirements(target.decide_here())


def get_requires_for_build_editable(config_settings: Settings = None) -> list[str]:
    required: list[str] = build_meta.get_requires_for_build_editable(config_settings)
    return required + library.build_requirements(target.decide_here())
