"""The groups of a compressed-tensors config: what each says of its layers, and which layers it means."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..activation_dtype import FP8
from ..heuristics.problem import FORMAT_GROUPS
from .expect import TensorError, option
from .fp8 import CHANNEL, TENSOR, Block, block_option
from .groups import is_in_order
from .patterns import Budget, Pattern, PatternError

PACK_QUANTIZED = "pack-quantized"
FLOAT_GROUPS = {f"{name}-{PACK_QUANTIZED}": rows for name, rows in FORMAT_GROUPS.items()}
"""Format of 4-bit floats -> its group size."""

FLOAT_QUANTIZED = "float-quantized"
_FLOATS_OF_8_BITS = (FLOAT_QUANTIZED, "naive-quantized", "mxfp8-quantized")
"""Formats of fp8.py's layers: one to a scheme."""

_FORMATS = (PACK_QUANTIZED, *FLOAT_GROUPS, *_FLOATS_OF_8_BITS)
_CURE = "; quantize the original model again, to int4 or int8 with groups (W4A16, W8A16), or to nf4"
BITS = (4, 8)
_MAX_GROUPS = 100


@dataclass(frozen=True, eq=False)
class Scheme:
    """What a group of the config says. None: it does not say.

    format: "pack-quantized", one of FLOAT_GROUPS, or "float-quantized" for all of 8-bit floats.
    names: of layers and classes of modules. patterns: of names of layers.
    symmetric: whether there are no zero points. act_order: whether each row of K has a group of its own in g_idx.
    rows: of a group of K; -1: all of K, and one scale for each column or for all.
    scale_dtype: "torch.uint8", for one; of 4-bit floats alone.
    block: of 8-bit floats; see fp8.py.
    activations: "fp8" where x is rounded to E4M3, each token by a scale that it has when it comes.
    """

    names: frozenset[str]
    patterns: tuple[Pattern, ...]
    bits: int
    symmetric: bool | None
    rows: int | None
    act_order: bool | None
    format: str = PACK_QUANTIZED
    scale_dtype: str | None = None
    block: Block | None = None
    activations: str | None = None

    @property
    def may_name_a_class(self) -> bool:
        """Whether it has a target like "Linear", without dots, or no targets at all."""
        return not (self.names or self.patterns) or any("." not in name for name in self.names)

    def problem(self, tensors: Mapping[str, torch.Tensor], k: int, groups: int) -> TensorError | None:
        """What contradicts the tensors of a layer, if anything does."""
        if self.symmetric is False and "weight_zero_point" not in tensors:
            return TensorError("weight_zero_point", "expected one for symmetric: false of the config, got none")
        g_idx = tensors.get("weight_g_idx")
        is_set = g_idx is not None and not bool((g_idx == -1).all())
        if self.act_order and not is_set:
            return TensorError("weight_g_idx", "expected one for actorder: group of the config, got none")
        rows = k if self.rows == -1 else self.rows
        if self.act_order is False and g_idx is not None and is_set and not is_in_order(g_idx, rows):
            return TensorError(
                "weight_g_idx", "expected groups in order without actorder: group of the config, got others"
            )
        if self.rows is not None:
            expected = 1 if self.rows == -1 else -(-k // self.rows)
            if groups != expected:
                size = "K" if self.rows == -1 else self.rows
                problem = f"expected {expected} groups of {size} rows for K = {k} as the config says, got {groups}"
                return TensorError("weight_scale", problem)
        return None


class Schemes:
    """The groups of a config. Raises ValueError for one that is not read."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        schemes = list(_schemes_of(options, Budget()))
        self._by_name: dict[str, list[Scheme]] = {}
        for scheme in schemes:
            for name in scheme.names:
                self._by_name.setdefault(name, []).append(scheme)
        self.formats = {scheme.format for scheme in schemes}
        self._with_patterns = [scheme for scheme in schemes if scheme.patterns]
        self._of_classes = [scheme for scheme in schemes if scheme.may_name_a_class] or schemes

    def targeting(self, layer: str) -> Sequence[Scheme]:
        """Those that can mean a layer: as in compressed-tensors, its name goes before patterns, these before classes.

        No file tells the class of a module: without a name or a pattern, every group that may name a class may mean it.
        Raises TensorError for patterns that take too long.
        """
        if layer in self._by_name:
            return self._by_name[layer]
        try:
            found = [s for s in self._with_patterns if any(pattern.matches_start(layer) for pattern in s.patterns)]
            return found or self._of_classes
        except PatternError as error:
            raise TensorError("weight_packed", f"config_groups: targets: {error}") from error


def _schemes_of(options: Mapping[str, Any], budget: Budget) -> Iterator[Scheme]:
    if options.get("transform_config"):  # rotations, some of which are applied to x at run time
        raise ValueError(f"transform_config: expected none, got {options['transform_config']!r:.200}")
    whole = option(options, "format", str, PACK_QUANTIZED)
    groups = option(options, "config_groups", dict, {})
    if len(groups) > _MAX_GROUPS:  # each may mean each layer
        raise ValueError(f"config_groups: expected at most {_MAX_GROUPS} groups, got {len(groups)}")
    for name, group in groups.items():
        if not isinstance(group, dict):
            raise ValueError(f"config_groups.{name}: expected an object, got {group!r:.200}")
        form = option(group, "format", str, whole)
        if form not in _FORMATS:
            raise ValueError(f"config_groups.{name}.format: expected {_one_of(_FORMATS)}, got {form!r}{_CURE}")
        weights = option(group, "weights", dict, {})
        kind, bits = option(weights, "type", str, "int"), option(weights, "num_bits", int)
        allowed, expected = (BITS, "int of 4 or 8 bits") if form == PACK_QUANTIZED else ((4,), "float of 4 bits")
        if form in _FLOATS_OF_8_BITS:
            form, allowed, expected = FLOAT_QUANTIZED, (8,), "float of 8 bits"
        if kind != expected.split()[0] or bits not in allowed:
            raise ValueError(f"config_groups.{name}.weights: expected {expected}, got {kind!r} of {bits}")
        try:
            scheme = _scheme(group, weights, bits, form, budget)
            _check_floats(scheme)
            yield scheme
        except ValueError as error:
            raise ValueError(f"config_groups.{name}: {error}") from error
    if whole not in (*_FORMATS, "mixed-precision"):  # the latter: each group has a format of its own
        raise ValueError(f"format: expected {_one_of(_FORMATS)}, got {whole!r}{_CURE}")


def _one_of(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:-1])) + f" or {names[-1]!r}"


def _check_floats(scheme: Scheme) -> None:
    """Raises ValueError for floats with other groups than the format has, zero points, or act-order."""
    rows = FLOAT_GROUPS.get(scheme.format)
    if rows is None and scheme.format != FLOAT_QUANTIZED:
        return
    if rows is not None and scheme.rows not in (None, rows):
        raise ValueError(f"weights.group_size: expected {rows} for {scheme.format}, got {scheme.rows}")
    if scheme.symmetric is False:
        raise ValueError(f"weights.symmetric: expected true for {scheme.format}, got false")
    if scheme.act_order:
        raise ValueError(f"weights.actorder: expected none for {scheme.format}, got group")


def _scheme(group: Mapping[str, Any], weights: Mapping[str, Any], bits: int, form: str, budget: Budget) -> Scheme:
    """Raises ValueError for targets that are no names and patterns, and for values of another kind."""
    names: set[str] = set()
    patterns: list[Pattern] = []
    for target in option(group, "targets", list, []):
        if not isinstance(target, str):
            raise ValueError(f"targets: expected names and patterns, got {target!r:.200}")
        if target.startswith("re:"):
            try:
                patterns.append(Pattern(target.removeprefix("re:"), budget))
            except PatternError as error:
                raise ValueError(f"targets: expected regular expressions, got {target!r:.200} ({error})") from error
        else:
            names.add(target)
    rows = option(weights, "group_size", int)
    if option(weights, "strategy", str) in ("channel", "tensor"):
        rows = -1
    elif rows is not None and rows != -1 and rows < 1:
        raise ValueError(f"group_size: expected -1 or at least 1, got {rows}")
    act_order = option(weights, "actorder", (str, bool), False) if "actorder" in weights else None
    if isinstance(act_order, str):
        act_order = act_order.lower() in ("group", "dynamic")
    symmetric = option(weights, "symmetric", bool)
    scale_dtype = None if form == PACK_QUANTIZED else option(weights, "scale_dtype", str)
    block = _block(weights) if form == FLOAT_QUANTIZED else None
    activations = activations_asked(option(group, "input_activations", dict, {}))
    return Scheme(
        frozenset(names), tuple(patterns), bits, symmetric, rows, act_order, form, scale_dtype, block, activations
    )


def activations_asked(inputs: Mapping[str, Any]) -> str | None:
    """ "fp8" for `input_activations` that say a scale for each token, made when it comes; None for others."""
    asked = [inputs.get(name) for name in ("num_bits", "type", "strategy", "dynamic")]
    return FP8 if asked == [8, "float", "token", True] else None


def _block(weights: Mapping[str, Any]) -> Block | None:
    """The blocks of 8-bit floats. Raises ValueError for strategies that are not read."""
    strategy, rows = option(weights, "strategy", str), option(weights, "group_size", int)
    known = {None: None, "tensor": TENSOR, "channel": CHANNEL, "group": (1, rows or -1)}
    if strategy == "block":
        block = block_option(weights, "block_structure")
        if block is None:
            raise ValueError("weights.block_structure: expected two sizes for strategy 'block', got none")
        return block
    if strategy not in known:
        raise ValueError(f"weights.strategy: expected tensor, channel, block or group, got {strategy!r}")
    return known[strategy]
