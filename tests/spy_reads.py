"""What is opened and read of a checkpoint folder: counted where the real functions are called, which still run."""

from __future__ import annotations

import builtins
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from weightonly.formats import shards


class Reads:
    """headers: file -> how often its header was parsed. opened: file -> how often Python opened it. tensors: name ->
    how often its bytes, or a part of them, were read.
    """

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.headers: Counter[str] = Counter()
        self.opened: Counter[str] = Counter()
        self.tensors: Counter[str] = Counter()

        def spy(owner: Any, name: str, count: Callable[..., None]) -> None:
            real = getattr(owner, name)

            def called(*args: Any, **kwargs: Any) -> Any:
                count(*args)
                return real(*args, **kwargs)

            monkeypatch.setattr(owner, name, called)

        def opening(path: Any, *_: Any) -> None:
            if isinstance(path, (str, os.PathLike)) and Path(path).parent == folder:
                self.opened[Path(path).name] += 1

        spy(os, "open", opening)
        spy(builtins, "open", opening)
        spy(shards, "read_header", lambda file: self.headers.update([file.name]))
        spy(shards.Shards, "read", lambda _, name, *__: self.tensors.update([name]))

    def zero_points(self) -> set[int]:
        """How often tensors of zero points were read."""
        return {count for name, count in self.tensors.items() if name.endswith(("qzeros", "weight_zero_point"))}
