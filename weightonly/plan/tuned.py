"""Tuned tables: which configuration was measured to be the quickest on this GPU. `tune` writes them, `gemm` asks them.

A table is a JSON file, one per kind of GPU, in `folder()`. It counts for the library version, GPU, and driver that it
was made with; a file of anything else, or a damaged one, is refused with a warning, and the cost model
(`heuristics.select`) decides, as it does wherever there is no table. `select` itself never looks at tables: it is a
function of its arguments alone.

For an M that was not measured the next larger one that was counts, if it is less than twice as large: its configuration
takes no longer for fewer rows. Else, or where that configuration cannot compute this M, the cost model decides.
"""

from __future__ import annotations

import bisect
import dataclasses
import json
import os
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..device import device_arch, driver_version, sm_count
from ..heuristics import KernelConfig, Problem, legal
from ..kernels import kernels
from ..storage import open_regular, parse_json, publish, staged
from ..version import VERSION
from . import cache

VARIABLE = "WEIGHTONLY_TUNED"
"""Environment variable: the folder of the tables. Empty: there are none."""

_SCHEMA = 1
_MAX_BYTES = 1 << 26


@dataclass(frozen=True)
class Origin:
    """What a table counts for."""

    library: str  # version
    gpu: str  # name
    arch: int
    sm_count: int
    driver: str  # version; "" where the driver does not say

    @classmethod
    def of(cls, device: int) -> Origin:
        """What tables for a CUDA device count for, now."""
        name = torch.cuda.get_device_name(device)
        return cls(VERSION, name, device_arch(device), sm_count(device), driver_version() or "")

    @property
    def file_name(self) -> str:
        gpu = re.sub(r"[^a-z0-9]+", "-", self.gpu.lower()).strip("-")
        return f"{gpu}-sm{self.arch}-{self.sm_count}.json"


@dataclass(frozen=True)
class Entry:
    """The measured choice for one problem. Times are us per call, both from the same measurement."""

    m: int
    n: int
    k: int
    format: str
    group_size: int
    zeros: bool
    layout: str
    dtype: str  # "f16" or "bf16"
    config: str  # name of the quickest configuration
    us: float
    model_config: str  # what the cost model picks
    model_us: float

    def problem(self, origin: Origin) -> Problem:
        return Problem(
            self.m, self.n, self.k, self.format, self.group_size, origin.arch, origin.sm_count, self.layout, self.zeros
        )


_Key = tuple[int, int, str, int, str, bool, str]


def _key(problem: Problem, dtype: str) -> _Key:
    """What entries of one curve over M share."""
    p = problem
    return p.k, p.n, p.format, -1 if p.per_channel else p.group_size, p.layout, p.zeros, dtype


class Table:
    """Entries, by problem; of two for the same problem the later one.

    kernels: what can run here, as `weightonly.kernels` lists it. Raises ValueError for an entry with a configuration
    that is not among it, or does not compute the problem.
    """

    def __init__(self, origin: Origin, entries: Iterable[Entry], kernels: Iterable[KernelConfig]) -> None:
        self.origin = origin
        by_name = {config.kernel: config for config in kernels}
        self._entries = {(_key(entry.problem(origin), entry.dtype), entry.m): entry for entry in entries}
        self._curves: dict[_Key, tuple[list[int], list[KernelConfig]]] = {}
        for key, m in sorted(self._entries):
            ms, configs = self._curves.setdefault(key, ([], []))
            ms.append(m)
            configs.append(_config_of(self._entries[key, m], origin, by_name))

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def config(self, problem: Problem, dtype: str) -> KernelConfig | None:
        """The configuration for a problem on this GPU, or None: then the cost model decides. See above for M."""
        curve = self._curves.get(_key(problem, dtype))
        if curve is None:
            return None
        ms, configs = curve
        place = bisect.bisect_left(ms, problem.m)
        if place == len(ms) or ms[place] >= 2 * problem.m:
            return None
        config = configs[place]
        return config if ms[place] == problem.m or legal(config, problem) else None


def _config_of(entry: Entry, origin: Origin, kernels: Mapping[str, KernelConfig]) -> KernelConfig:
    config = None
    for name in reversed(entry.config.split("+")):  # of one or two launches
        kernel, _, split_k = name.rpartition("_k")
        if kernel not in kernels or not split_k.isdecimal():
            raise ValueError(f"config {entry.config!r} is none of this installation")
        config = kernels[kernel].with_split_k(int(split_k)).with_tail(config)
    assert config is not None
    if not legal(config, entry.problem(origin)):
        raise ValueError(f"config {entry.config!r} does not compute m={entry.m}, k={entry.k}, n={entry.n}")
    return config


# --- files -------------------------------------------------------------------------------------------------


def folder() -> Path | None:
    """Where tables are: $WEIGHTONLY_TUNED, else weightonly/tuned in the user's cache; None if the variable is empty."""
    named = os.environ.get(VARIABLE)
    if named is not None:
        return Path(named) if named else None
    return Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "weightonly" / "tuned"


def write(path: Path, table: Table) -> None:
    """Writes the file, which appears complete or not at all."""
    record = {
        "schema": _SCHEMA,
        "origin": dataclasses.asdict(table.origin),
        "entries": [dataclasses.asdict(entry) for entry in table],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    with staged(path) as folder:
        unfinished = folder / path.name
        unfinished.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        publish(unfinished, path)


def read(path: Path, origin: Origin, kernels: Iterable[KernelConfig]) -> Table:
    """Raises ValueError saying why a file is no table for `origin`, FileNotFoundError where there is none."""
    with open_regular(path) as stream:
        owner = os.fstat(stream.fileno()).st_uid
        if owner not in (0, os.geteuid()):
            raise ValueError(f"it belongs to another user (id {owner})")
        content = stream.read(_MAX_BYTES + 1)
    if len(content) > _MAX_BYTES:
        raise ValueError(f"it has more than {_MAX_BYTES} bytes")
    try:
        record = parse_json(content)
    except ValueError as error:
        raise ValueError(f"it is damaged ({error})") from None
    if not isinstance(record, dict) or record.get("schema") != _SCHEMA:
        raise ValueError("it is not a tuned table of this library")
    found = _checked(Origin, record.get("origin"))
    for field in dataclasses.fields(Origin):
        has, needs = getattr(found, field.name), getattr(origin, field.name)
        if has != needs:
            raise ValueError(f"it was made with {field.name} {has!r}, here it is {needs!r}")
    entries = record.get("entries")
    if not isinstance(entries, list):
        raise ValueError("it is damaged (no list of entries)")
    return Table(origin, [_checked(Entry, entry) for entry in entries], kernels)


def _checked(kind: type[Any], record: object) -> Any:
    """The dataclass of a JSON object, which must have the fields of `kind` by name and type."""
    types = {field.name: field.type for field in dataclasses.fields(kind)}  # as text
    if not isinstance(record, dict) or record.keys() != types.keys():
        raise ValueError(f"it is damaged (expected {', '.join(types)}, got {record!r:.80})")
    for name, value in record.items():
        if type(value).__name__ != types[name]:
            raise ValueError(f"it is damaged ({name}: expected {types[name]}, got {value!r:.80})")
    return kind(**record)


def read_or_warn(path: Path, origin: Origin, kernels: Iterable[KernelConfig], instead: str) -> Table | None:
    """The table of a file; None where there is none, and, with a warning, where it is refused."""
    try:
        return read(path, origin, kernels)
    except FileNotFoundError:
        return None
    except (ValueError, OSError) as error:
        warnings.warn(f"{path}: tuned table refused: {error}; {instead}", RuntimeWarning, stacklevel=2)
        return None


# --- what this process uses --------------------------------------------------------------------------------

_tables: dict[int, Table | None] = {}


def table_of(device: int) -> Table | None:
    """The table that `gemm` asks on a CUDA device: read from its file on the first call, and kept."""
    if device not in _tables:
        where, origin = folder(), Origin.of(device)
        _tables[device] = (
            None
            if where is None
            else read_or_warn(where / origin.file_name, origin, kernels(device), "the cost model is used")
        )
    return _tables[device]


def use(device: int, table: Table | None) -> None:
    """Makes all later calls of `gemm` on a CUDA device ask this table, or none. CUDA graphs keep what they captured."""
    _tables[device] = table
    cache.clear()
