"""explain: which kernel computes a layer for M rows of x, why, and its time by the cost model."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import torch

from .activation_dtype import FP8, activations_of, check_fp8_format
from .cpu import library, table
from .dense import check_weight_dtype, default_group_size, resolve_group_size
from .device import device_arch
from .device import sm_count as sm_count_of
from .formats.checkpoint import Checkpoint, open_checkpoint
from .heuristics import KernelConfig, Problem, candidates
from .heuristics.arch import Arch
from .heuristics.configs import TypeConfig
from .heuristics.grouped import select_grouped, select_layer
from .heuristics.launches import estimate_us, is_calibrated, launches
from .heuristics.legal import has_kernels
from .heuristics.problem import CODE_FORMATS, CODE_LAYOUTS, layouts_of
from .heuristics.select import invariant_class
from .invariance import batch_invariant
from .kernels import is_compiled, runs_on
from .layout import CPU, TILED_FP8
from .nn.base import PackedLayer
from .nn.experts import Experts
from .ops.around_experts import MAX_CHOICES
from .packed import PackedWeight
from .packing import format_of, layout_for_arch, target_name
from .plan.choose import DTYPE_NAMES, check_sizes, is_of_class, preferred, scale_mode
from .plan.tuned import table_of
from .require import require_bool, require_int
from .shown import counted, shown
from .weight import QuantizedWeight

SM_COUNTS = {70: 80, 72: 8, 75: 40, 80: 108, 86: 84, 87: 16, 89: 142, 90: 132, 100: 148, 101: 20, 103: 160, 110: 20}
SM_COUNTS |= {120: 188, 121: 48}
"""Compute capability -> SMs of its largest usual board, which is taken where nobody says."""

ROWS = (1, 16, 256, 4096)
_CPU_TYPES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}


@dataclass(frozen=True)
class Kind:
    """Layers that are computed in the same way.

    Args:
        k: rows of w.
        n: columns of w.
        format: of w.
        group_size: rows that share a scale, -1: all.
        zeros: whether there are zero points.
        experts: how many weights [K, N] are stacked; None: one.
        layout: None: the one of the GPU.
        dtype: of x.
        activations: "fp8" where x becomes E4M3.

    Examples:
        >>> (choice,) = wo.explain(k=4096, n=6144, format="nf4", m=1, arch="sm90").rows
        >>> choice.kind.format, choice.kind.group_size
        ('nf4', 64)
    """

    k: int
    n: int
    format: str
    group_size: int
    zeros: bool = False
    experts: int | None = None
    layout: str | None = None
    dtype: torch.dtype = torch.float16
    activations: str | None = None

    def __str__(self) -> str:
        size = f"{self.k} x {self.n}" if self.experts is None else f"{self.experts} x {self.k} x {self.n}"
        groups = "per channel" if self.group_size in (-1, self.k) else f"groups of {self.group_size}"
        zeros, activations = ", zeros" if self.zeros else "", f", x in {self.activations}" if self.activations else ""
        return f"{size} {self.format}, {groups}{zeros}{activations}"


@dataclass(frozen=True)
class Choice:
    """What computes M rows of x by the layers of one kind.

    Args:
        kind: of the layers.
        count: how many layers of this kind there are.
        m: rows of x, of stacked experts those of all experts together.
        kernel: the name of the kernel.
        family: that of its template, of CPUs the instructions.
        why: the reason in words.
        us: the time by the cost model; None: CPUs have none.
        bound: what takes the longer, "memory", "compute" or "launch".
        next: the name of the best of the other kernels.
        next_us: the time of that one.
        config: None on CPUs, and where nothing computes all experts in one launch.

    Examples:
        >>> (choice,) = wo.explain(k=4096, n=6144, format="int4", m=4096, arch="sm90").rows
        >>> choice.m, choice.bound, choice.kind.k
        (4096, 'compute', 4096)
    """

    kind: Kind
    count: int
    m: int
    kernel: str
    family: str
    why: str
    us: float | None = None
    bound: str | None = None
    next: str | None = None
    next_us: float | None = None
    config: KernelConfig | None = None


@dataclass(frozen=True)
class Explanation:
    """The choices for some kinds of layers and some M: `print` shows them, pandas.DataFrame(x.rows) makes a table.

    Args:
        target: what computes, in words.
        rows: a choice for each kind and M.

    Examples:
        >>> import pandas
        >>> pandas.DataFrame(wo.explain(k=4096, n=6144, format="int4", m=(1, 16), arch="cpu").rows)["m"].tolist()
        [1, 16]
    """

    target: str
    rows: tuple[Choice, ...]

    def __str__(self) -> str:
        lines = [self.target]
        kinds = dict.fromkeys((row.kind, row.count) for row in self.rows)
        for kind, count in kinds:
            rows = [row for row in self.rows if (row.kind, row.count) == (kind, count)]
            cells = [(f"M = {r.m}", r.kernel, "" if r.us is None else f"{r.us:.1f} us", r.why) for r in rows]
            widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
            lines += ["", f"{counted(count, 'layer')} {kind}"]
            for m, kernel, us, why in cells:
                lines.append(f"  {m:>{widths[0]}}  {kernel:<{widths[1]}}  {us:>{widths[2]}}  {why}")
        return shown("\n".join(lines), keep="\n")


def explain(
    weight: torch.nn.Module | QuantizedWeight | PackedWeight | None = None,
    m: int | Sequence[int] = ROWS,
    *,
    k: int | None = None,
    n: int | None = None,
    format: str | None = None,
    group_size: int | None = None,
    zeros: bool | None = None,
    experts: int | None = None,
    dtype: torch.dtype | None = None,
    arch: Arch | None = None,
    sm_count: int | None = None,
    activations: str | None = None,
) -> Explanation:
    """Which kernel `gemm` runs, for each M, why, and its time by the cost model; needs no GPU.

    The choice is that of `gemm`, a tuned table of the visible GPU included, and for experts in `nn.Experts` that of the
    whole layer.

    Args:
        weight: a packed layer, a model with some (each kind of layer once), a QuantizedWeight or a PackedWeight. None:
            `k`, `n`, `format` and `experts` describe one.
        m: rows of x, a number or several; of stacked experts the rows of all experts together.
        k: rows of w, where there is no `weight`.
        n: columns of w, where there is no `weight`.
        format: of w, where there is no `weight`.
        group_size: where `weight` does not say it; None: that of `quantize`.
        zeros: whether there are zero points, where `weight` does not say it; None: no.
        experts: how many weights are stacked, where there is no `weight`.
        dtype: of x; None: that of `weight`, else float16.
        arch: what computes: a GPU in any spelling, or "cpu". None: the GPU that the weight is on; for others the
            visible GPU, else the CPU. A weight in a layout that the GPU does not read is taken as `repack` makes it.
        sm_count: multiprocessors of the GPU. None: those of the visible GPU of this arch, else of its largest usual
            board.
        activations: "fp8", beside `k` and `n`: x is rounded first, by another kernel, whose time is not counted. Layers
            say it themselves; of a QuantizedWeight and a PackedWeight layout "tiled_fp8" does.

    Raises:
        TypeError: anything else than these.
        ValueError: a model without packed layers and for arguments that no kernel takes.

    Examples:
        >>> choices = wo.explain(k=4096, n=6144, format="int4", group_size=128, m=(1, 4096), arch="sm90")
        >>> [row.bound for row in choices.rows]  # print(choices) says more
        ['launch', 'compute']
    """
    rows = _rows(m)
    if sm_count is not None:
        require_int("sm_count", sm_count, least=1)
    require_bool("zeros", zeros, or_none=True)
    if dtype is not None:
        check_weight_dtype(dtype)
    counts: Counts
    device: torch.device | None = None
    if weight is None:
        if k is None or n is None:
            raise TypeError("explain: expected a weight, or k and n, got neither")
        for argument, value in (("k", k), ("n", n), ("experts", 1 if experts is None else experts)):
            require_int(argument, value, least=1)
        name = format_of(None, format)
        if zeros and name in CODE_FORMATS:
            raise ValueError(f"zeros: expected none for {name}, got True")
        size = default_group_size(name) if group_size is None else group_size
        activations = activations_of(activations)
        if activations is not None:
            check_fp8_format(name, not zeros)
        kind = Kind(k, n, name, size, bool(zeros), experts, None, dtype or torch.float16, activations)
        counts = Counter([(kind, None)])
    else:
        given = {"k": k, "n": n, "format": format, "experts": experts, "activations": activations}
        if wrong := [name for name, value in given.items() if value is not None]:
            raise TypeError(f"{wrong[0]}: expected None beside a weight, which has its own, got {given[wrong[0]]!r}")
        counts, device = _kinds_of(weight, group_size, zeros, dtype)
    return _explain(counts, rows, arch, sm_count, device)


def explain_folder(
    folder: str | os.PathLike[str] | Checkpoint,
    m: int | Sequence[int] = ROWS,
    arch: Arch | None = None,
    sm_count: int | None = None,
) -> Explanation:
    """`explain` of the layers of a checkpoint, by its headers; x is float16. Raises what `open_checkpoint` raises."""
    checkpoint = folder if isinstance(folder, Checkpoint) else open_checkpoint(folder)
    kinds = (
        Kind(
            s.k,
            s.n,
            s.format,
            s.group_size,
            s.symmetric is False,
            s.experts,
            s.layout,
            activations=checkpoint.activations_of(name),
        )
        for name, s in checkpoint.shapes.items()
    )
    if sm_count is not None:
        require_int("sm_count", sm_count, least=1)
    return _explain(Counter((kind, None) for kind in kinds), _rows(m), arch, sm_count)


def _rows(m: int | Sequence[int]) -> tuple[int, ...]:
    rows = (m,) if isinstance(m, int) else tuple(m)
    for one in rows:
        require_int("m", one, least=1)
    if not rows:
        raise ValueError("m: expected at least one number of rows, got none")
    return rows


Counts = Counter[tuple[Kind, tuple[Kind, bool] | None]]
"""Kinds of layers, each with the other product of its experts, and whether a gate is between, where it has one."""


def _kinds_of(
    weight: object, group_size: int | None, zeros: bool | None, dtype: torch.dtype | None
) -> tuple[Counts, torch.device]:
    if isinstance(weight, QuantizedWeight):
        w = weight
        layout = w.packed.layout
        has_zeros = w.zeros is not None
        kind = Kind(w.k, w.n, w.format, w.group_size, has_zeros, w.experts, layout, w.dtype, _activations(layout))
        return Counter([(kind, None)]), w.device
    if isinstance(weight, PackedWeight):
        p = weight
        size = p.group_size if group_size is None else group_size
        size = default_group_size(p.format) if size is None else size
        has_zeros = bool(p.has_zeros if zeros is None else zeros)
        dtype = dtype or torch.float16
        kind = Kind(p.k, p.n, p.format, size, has_zeros, p.experts, p.layout, dtype, _activations(p.layout))
        return Counter([(kind, None)]), p.device
    if not isinstance(weight, torch.nn.Module):
        raise TypeError(
            f"weight: expected a module, a QuantizedWeight, a PackedWeight or None, got {type(weight).__name__}"
        )
    found: Counts = Counter()
    inside: set[int] = set()
    device = None
    for module in weight.modules():
        if isinstance(module, Experts):
            first, down = (_kind_of(layer) for layer in module.children() if isinstance(layer, PackedLayer))
            found[first, (down, module.between.has_gate)] += 1
            inside |= {id(layer) for layer in module.children()}
        elif isinstance(module, PackedLayer) and id(module) not in inside:
            found[_kind_of(module), None] += 1
        if isinstance(module, PackedLayer) and device is None:
            device = module.qweight.device
    if device is None:
        raise ValueError(
            f"weight: expected packed layers, got none in {type(weight).__name__}; quantize_model makes some"
        )
    return found, device


def _kind_of(layer: PackedLayer) -> Kind:
    k = layer.in_features
    rows = k // layer.scales.shape[-2]
    dtype = layer.scales.dtype
    has_zeros = layer.zeros is not None
    return Kind(
        k, layer.out_features, layer.format, rows, has_zeros, layer._experts, layer.layout, dtype, layer.activations
    )


def _activations(layout: str) -> str | None:
    """Of a weight that belongs to no layer."""
    return FP8 if layout == TILED_FP8 else None


def _explain(
    counts: Counts, rows: Sequence[int], arch: Arch | None, sms: int | None, device: torch.device | None = None
) -> Explanation:
    for kind, _ in counts:
        resolve_group_size(kind.group_size, kind.k)
    gpu = _gpu(device, arch)
    if gpu is None:
        backend = library.backend()
        target = f"CPU: {backend.name} ({backend.reason}); there is no cost model for CPUs"
        both = [(one, count) for (kind, other), count in counts.items() for one in _products(kind, other)]
        return Explanation(target, tuple(_on_cpu(kind, count, m) for kind, count in both for m in rows))
    number, index = gpu
    sms = sms or (SM_COUNTS[number] if index is None else sm_count_of(index))
    found: list[Choice] = []
    for (kind, other), count in counts.items():
        for m in rows:
            found += _on_gpu(kind, other, count, m, number, sms, index)
    is_here = "this GPU" if index is not None else "no GPU was asked"
    return Explanation(f"sm{number}, {sms} SMs ({is_here}); times by the cost model", tuple(found))


_ROUNDED = "quantize_activations(x) before it"


def _products(kind: Kind, other: tuple[Kind, bool] | None) -> list[Kind]:
    return [kind] if other is None else [kind, other[0]]


def _gpu(device: torch.device | None, arch: Arch | None) -> tuple[int, int | None] | None:
    """(compute capability, the index of a visible GPU that has it, or None) of what computes; None: the CPU."""
    visible = {device_arch(i): i for i in range(torch.cuda.device_count())} if torch.cuda.is_available() else {}
    if arch is not None:
        name = target_name(arch)
        return None if name == CPU else (int(name[2:]), visible.get(int(name[2:])))
    if device is not None and device.type == "cuda":
        index = device.index or 0
        return device_arch(index), index
    if device is not None and device.type == "cpu":
        return None
    return next(iter(visible.items()), None)


def _on_cpu(kind: Kind, count: int, m: int) -> Choice:
    backend = library.backend()
    if kind.activations is not None and (backend.library is None or not batch_invariant()):
        why = "the equation in PyTorch: no kernel of CPUs takes x in 8 bits"
        return Choice(kind, count, m, "reference", "pytorch", why)
    if backend.library is None:
        why = f"the equation in PyTorch, because {backend.reason}"
        return Choice(kind, count, m, "reference", "pytorch", why)
    rows = resolve_group_size(kind.group_size, kind.k)
    kernel = table.kernel_of(backend.library, backend.level, _CPU_TYPES[kind.dtype], m, kind.k, rows, batch_invariant())
    why = f"for {_CPU_TYPES[kind.dtype]} and {counted(m, 'row')}, by the library's own table (weightonly info)"
    if kind.experts is not None:
        why += "; once for each expert that has rows"
    return Choice(kind, count, m, kernel, library.LEVELS[backend.level], why)


def _on_gpu(
    kind: Kind, other: tuple[Kind, bool] | None, count: int, m: int, arch: int, sms: int, index: int | None
) -> list[Choice]:
    kinds = _products(kind, other)
    try:
        problems = [_problem(one, m, arch, sms) for one in kinds]
        for problem in problems:
            check_sizes(problem)
        if kind.experts is None:
            return [_of_gemm(kind, count, problems[0], index)]
        layer = None
        if other is not None and m <= MAX_CHOICES and kind.activations == other[0].activations:
            layer = select_layer(problems[0], problems[1], kind.experts, other[1])
        chosen = [select_grouped(p, one.experts or 0) for one, p in zip(kinds, problems, strict=True)]
        if layer is not None:
            chosen = [layer.first, layer.second]
        return [
            _of_experts(one, count, problem, config, layer is not None)
            for one, problem, config in zip(kinds, problems, chosen, strict=True)
        ]
    except ValueError as error:
        return [Choice(one, count, m, "none", "none", f"no kernel: {error}") for one in kinds]


def _problem(kind: Kind, m: int, arch: int, sms: int) -> Problem:
    layout = kind.layout if kind.layout in layouts_of(arch) else ""
    if kind.activations is not None:
        layout = layout_for_arch(arch, kind.activations)
    if kind.format in CODE_FORMATS and layouts_of(arch)[0] not in CODE_LAYOUTS:
        raise ValueError(f"sm{arch} has no kernels for codes; it dequantizes them")
    if not has_kernels(kind.format, kind.group_size, arch, layout or layouts_of(arch)[0]):
        raise ValueError(f"{kind.format} is dequantized, slice after slice, and cuBLAS multiplies")
    invariant = batch_invariant()
    return Problem(m, kind.n, kind.k, kind.format, kind.group_size, arch, sms, layout, kind.zeros, invariant)


def _of_gemm(kind: Kind, count: int, problem: Problem, index: int | None) -> Choice:
    dtype = DTYPE_NAMES.get(kind.dtype, "f16") if problem.arch >= 80 else "f16"
    tuned = None if index is None or kind.activations is not None else table_of(index)
    config = preferred(problem, dtype, tuned)
    is_tuned = tuned is not None and tuned.config(problem, dtype) == config
    order = invariant_class(problem) if problem.invariant else None
    us, bound, parts = _cost(config, problem, order)
    others = [
        (estimate_us(c, problem, order), c.name)
        for c in candidates(problem)
        if c.kernel not in config.kernels() and is_calibrated(c, problem.format) and is_of_class(c, problem)
    ]
    next_us, name = min(others, default=(None, None))
    reasons = [f"{bound}-bound ({parts})"] if bound else []
    if problem.invariant:
        reasons.append("batch-invariant: of one class for every M")
    if is_tuned:
        reasons.append("measured by tune")
    elif us is None:
        reasons.append("nothing else computes it")
    reasons.append(f"next {name}, {next_us:.1f} us" if name is not None else "no other kernel computes it")
    types = TypeConfig(dtype, problem.format, scale_mode(problem.group_size, problem.zeros))
    if index is not None and not all(
        runs_on(part, problem.arch) and is_compiled(part, types) for part, _ in launches(config, problem)
    ):
        reasons.append("this build lacks it")
    if kind.activations is not None:
        reasons.append(_ROUNDED)
    if kind.layout not in (None, problem.layout):
        reasons.append(f"packed as {problem.layout}")
    return Choice(
        kind, count, problem.m, config.name, config.family, "; ".join(reasons), us, bound, name, next_us, config
    )


def _cost(config: KernelConfig, problem: Problem, order: Hashable) -> tuple[float | None, str | None, str]:
    """(microseconds, what bounds them, their parts) of a configuration; None where it is not calibrated."""
    if not is_calibrated(config, problem.format):
        return None, None, ""
    part, its_problem = launches(config, problem)[0]
    fixed_us, compute_us, memory_us, _ = part.rules.work(part, its_problem, order)
    parts = {"memory": memory_us, "compute": compute_us, "launch": fixed_us}
    text = ", ".join(f"{name} {us:.1f}" for name, us in parts.items())
    return estimate_us(config, problem, order), max(parts, key=parts.__getitem__), f"{text} us"


def _of_experts(kind: Kind, count: int, problem: Problem, config: KernelConfig | None, in_layer: bool) -> Choice:
    rounded = "" if kind.activations is None else f"; {_ROUNDED}"
    if config is None:
        of_one = replace(problem, m=max(1, problem.m // (kind.experts or 1)))
        one = _of_gemm(replace(kind, experts=None), count, of_one, None)
        why = f"a gemm for each expert that has rows, such as {one.kernel} for {counted(one.m, 'row')}{rounded}"
        return Choice(kind, count, problem.m, "gemm for each expert", one.family, why)
    us = config.rules.grouped_us(config, problem, kind.experts or 0)
    why = "chosen for the layer as a whole" if in_layer else "one launch for all experts"
    return Choice(kind, count, problem.m, config.name, config.family, why + rounded, us, config=config)
