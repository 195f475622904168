"""Packages that this one does without until they are needed: which, and the line that installs them."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager

EXTRAS: dict[str, dict[str, str]] = {
    "bench": {"pandas": ">=2", "matplotlib": ">=3.7", "tqdm": ">=4.60", "tabulate": ">=0.9"},
    "gguf": {"gguf": ">=0.19,<1"},
    "hf": {"transformers": ">=5.23,<6", "accelerate": ">=1.10", "huggingface_hub": ">=1", "peft": ">=0.21.2,<0.22"},
}
"""Extra of pyproject.toml -> package -> the versions that work."""


def how_to_install(package: str) -> str:
    """The lines that install a package of an extra. No index has weightonly itself."""
    for extra, packages in EXTRAS.items():
        if package in packages:
            return (
                f"pip install '{package}{packages[package]}', or pip install '.[{extra}]' in a checkout of weightonly"
            )
    return f"pip install {package}"


def describe_missing(error: ImportError) -> str:
    """The message of an error, or, where a package of an extra is missing, what installs it."""
    package = (error.name or "").partition(".")[0]
    if not isinstance(error, ModuleNotFoundError) or not any(package in packages for packages in EXTRAS.values()):
        return str(error)
    return f"{package}: expected it to be installed, got none; {how_to_install(package)}"


@contextmanager
def missing_packages_named() -> Iterator[None]:
    """Raises ImportError with `describe_missing` for a package that an import inside lacks."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (message := describe_missing(error)) == str(error):
            raise
        raise ModuleNotFoundError(message, name=error.name, path=error.path) from error


def require_package(package: str) -> None:
    """Raises ImportError, with the line that installs it, unless the package can be imported."""
    with missing_packages_named():
        importlib.import_module(package)
