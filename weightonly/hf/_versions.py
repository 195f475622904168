"""The versions of other libraries that this package needs. Importing this module checks transformers."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

from ..extras import how_to_install, require_package

LEAST = {"transformers": "5.23.0", "peft": "0.21.2"}
"""Package -> the oldest version that works: others have not the hooks."""


def why_not(package: str) -> str | None:
    """Why `package` cannot be used: it is missing, too old, or lacks another one. None where it is imported."""
    expected = f"expected {package} >= {LEAST[package]}"
    try:
        found = version(package)
    except PackageNotFoundError:
        return f"{expected}, got none; {how_to_install(package)}"
    if _numbers(found) < _numbers(LEAST[package]):
        return f"{expected}, got {found}; {how_to_install(package)}"
    try:
        require_package(package)
    except ImportError as error:  # of the package itself, or of another one that it needs
        return f"{expected}, got none; {how_to_install(package)}" if error.name == package else str(error)
    return None


def _numbers(text: str) -> tuple[int, ...]:
    """(5, 24, 0) of "5.24.0.dev0"."""
    return tuple(int(number) for number in re.findall(r"\d+", text)[:3])


if (_reason := why_not("transformers")) is not None:
    raise ImportError(f"weightonly.hf: {_reason}")
