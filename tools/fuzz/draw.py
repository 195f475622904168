"""What a random case of `gemm` is: one weight and some calls with it, as plain descriptions."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

from weightonly.device import device_arch, sm_count
from weightonly.heuristics import KernelConfig, Problem
from weightonly.heuristics.configs import TypeConfig, kernel_types
from weightonly.heuristics.legal import computes_groups_of_16
from weightonly.heuristics.problem import (
    CODE_FORMATS,
    CODEBOOK_FORMATS,
    FLOAT_FORMATS,
    FORMAT_GROUPS,
    FORMATS,
    LAYOUTS,
    layouts_of,
)
from weightonly.kernels import dequantizes_groups_of_16, is_compiled, kernels
from weightonly.launch import LaunchOverlap
from weightonly.plan.choose import choose, scale_mode
from weightonly.plan.tuned import table_of

DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}
GROUP_SIZES = (-1, 32, 64, 128, 192, 256)

# Where an operand lies in memory.
FORMS = ("plain", "shifted", "wide", "columns", "every other row", "every other column", "transposed")
X_FORMS = (*FORMS, "aligned columns", "batched", "vector")
OUT_FORMS = ("frame", "odd frame", "every other row", "line", "none")
_TRIES = 20  # configurations of one call, until one computes its problem

OVERLAPS: tuple[LaunchOverlap, ...] = (False, True, "constant_weights")


@dataclass(frozen=True)
class Limits:
    """How large the problems of a device are."""

    products: float  # m * n * k of one call
    k: tuple[int, ...]  # longest K, one of these
    n: int
    m: int
    calls: int  # of one weight


GPU_LIMITS = Limits(products=5e9, k=(256, 1024, 3072, 16384), n=2560, m=2000, calls=24)
CPU_LIMITS = Limits(products=4e6, k=(128, 512, 1024), n=400, m=150, calls=6)


@dataclass(frozen=True)
class Weight:
    """A weight [K, N], its scales, and what all calls with it share."""

    k: int
    n: int
    format: str
    dtype: str
    layout: str
    group_size: int  # -1: per channel
    zeros: str  # "none", "whole" or "half" numbers
    perm: bool
    scales_form: str
    zeros_form: str
    bias_form: str

    @property
    def types(self) -> TypeConfig:
        """As kernels are named."""
        if self.format in CODEBOOK_FORMATS:
            return TypeConfig(self.dtype, "code4", "group")
        return TypeConfig(self.dtype, self.format, scale_mode(self.group_size, self.zeros != "none"))


@dataclass(frozen=True)
class Call:
    """One call of `gemm`."""

    m: int
    begin: int  # its first row in the x of the case
    config: KernelConfig | None  # as `gemm` is told
    chosen: KernelConfig | None  # what it runs; None on a CPU and without rows
    bias: bool
    activation: str | None
    x_form: str
    out_form: str
    overlap: LaunchOverlap

    def __str__(self) -> str:
        rows = f"m={self.m} (rows from {self.begin}), x {self.x_form}, out {self.out_form}"
        kernel = f"config={self.config}, runs {self.chosen}, overlap={self.overlap}"
        return f"{rows}, bias={self.bias}, activation={self.activation}, {kernel}"


class Drawer:
    """Draws weights and calls that the device can compute."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.limits = CPU_LIMITS
        self.configs: list[KernelConfig] = []
        self._fitting_by_types: dict[tuple[str, TypeConfig], list[KernelConfig]] = {}
        self.chooses: tuple[str, ...] = LAYOUTS  # layouts that `gemm` has a configuration of its own for
        self.groups_of_16 = True
        if device.type == "cuda":
            self.limits = GPU_LIMITS
            self.index = torch.cuda.current_device() if device.index is None else device.index
            self.arch, self.sms = device_arch(self.index), sm_count(self.index)
            self.configs = [config for config in kernels(self.index) if config.is_verified]
            self.groups_of_16 = computes_groups_of_16(self.arch) and dequantizes_groups_of_16()
            self.chooses = layouts_of(self.arch)

    def kernel_names(self) -> set[str]:
        """Every compiled configuration with every type that it computes."""
        return {f"{c.kernel}_{t.name}" for c in self.configs for t in kernel_types(c) if is_compiled(c, t)}

    def weight(self, draw: random.Random) -> Weight:
        """Any format, dtype, layout and group size; K a multiple of the group, N anything."""
        format, dtype, layout = self._types(draw)
        longest = draw.choice(self.limits.k)
        has_16 = self.groups_of_16 and not (self.configs and format in FLOAT_FORMATS)  # GPUs dequantize those
        sizes = (*GROUP_SIZES, 16) if has_16 else GROUP_SIZES
        group_size = FORMAT_GROUPS.get(format) or draw.choice([size for size in sizes if size <= longest])
        if group_size == -1:
            step = draw.choice([1, 8, 64])
            k = step * draw.randint(1, longest // step)
        else:
            k = group_size * draw.randint(1, longest // group_size)
            group_size = -1 if k == group_size else group_size
        most = max(8, min(self.limits.n, int(self.limits.products / k)))
        n = draw.choice(
            [draw.randint(1, 300), draw.randint(1, most), 64 * draw.randint(1, 40), 8 * draw.randint(1, 300)]
        )
        zeros = "none"
        if format not in CODE_FORMATS and draw.random() < 0.4:
            # bf16 holds 8 bits: those of an int8 less a whole number, but no halves.
            zeros = "whole" if format == "int8" and dtype == "bf16" else draw.choice(["whole", "half"])
        perm, forms = draw.random() < 0.15, (draw.choice(FORMS) for _ in range(3))
        return Weight(k, min(n, most), format, dtype, layout, group_size, zeros, perm, *forms)

    def _types(self, draw: random.Random) -> tuple[str, str, str]:
        """Format, dtype and layout: on a GPU those of a kernel, so that none is drawn more rarely than another."""
        if not self.configs:
            format = draw.choice(tuple(FORMATS))
            return format, draw.choice(tuple(DTYPES)), "tiled" if format in CODE_FORMATS else draw.choice(LAYOUTS)
        config = draw.choice(self.configs)
        types = draw.choice([types for types in kernel_types(config) if is_compiled(config, types)])
        code_formats = [code for code in CODEBOOK_FORMATS if self.groups_of_16 or FORMAT_GROUPS.get(code) != 16]
        format = draw.choice(code_formats) if types.format == "code4" else types.format
        return format, types.dtype, config.layout

    def calls(self, draw: random.Random, weight: Weight) -> list[Call]:
        return [self._call(draw, weight) for _ in range(self.limits.calls)]

    def _call(self, draw: random.Random, weight: Weight) -> Call:
        config, m = self._config(draw, weight) if draw.random() > 0.01 else (None, 0)
        chosen = self._choose(m, weight, config) if self.configs and m else None
        x_form = draw.choice([form for form in X_FORMS if form != "vector" or m == 1])
        return Call(
            m=m,
            begin=draw.randint(0, 3),
            config=config,
            chosen=chosen,
            bias=draw.random() < 0.4,
            activation=draw.choice([None, None, "identity", "relu", "gelu", "silu"]),
            x_form=x_form,
            out_form=draw.choice(OUT_FORMS),
            overlap=draw.choice(OVERLAPS),
        )

    def _config(self, draw: random.Random, weight: Weight) -> tuple[KernelConfig | None, int]:
        """A configuration that computes the weight, or None for the heuristic's choice, and a number of rows for it."""
        most = max(1, min(self.limits.m, int(self.limits.products / (weight.n * weight.k))))
        fitting = self._fitting(weight.layout, weight.types)
        if weight.layout not in self.chooses or (fitting and draw.random() < 0.75):
            for _ in range(_TRIES):
                config = _split(draw, draw.choice(fitting))
                if draw.random() < 0.1:
                    config = config.with_tail(_split(draw, draw.choice(fitting)))
                few = draw.randint(1, min(config.max_m, 72))
                edge = config.block_m * draw.randint(1, 4) + draw.randint(-3, 3)
                m = max(1, min(draw.choice([few, edge, edge, draw.randint(1, self.limits.m)]), config.max_m, most))
                try:
                    self._choose(m, weight, config)
                except (ValueError, RuntimeError):
                    continue  # not for this problem
                return config, m
            if weight.layout not in self.chooses:
                return None, 0
        few, many = draw.randint(1, min(72, self.limits.m)), draw.randint(1, self.limits.m)
        return None, min(draw.choice([few, few, many]), most)

    def _fitting(self, layout: str, types: TypeConfig) -> list[KernelConfig]:
        """The configurations that read a layout and compute these types."""
        key = (layout, types)
        if key not in self._fitting_by_types:
            self._fitting_by_types[key] = [
                c for c in self.configs if c.layout == layout and types in kernel_types(c) and is_compiled(c, types)
            ]
        return self._fitting_by_types[key]

    def _choose(self, m: int, weight: Weight, config: KernelConfig | None) -> KernelConfig:
        w = weight
        problem = Problem(
            m, w.n, w.k, w.format, w.group_size, self.arch, self.sms, layout=w.layout, zeros=w.zeros != "none"
        )
        return choose(problem, w.types, config, table_of(self.index) if config is None else None)


def _split(draw: random.Random, config: KernelConfig) -> KernelConfig:
    """The configuration with any split of K, a third of the time."""
    return config.with_split_k(draw.choice([1, 1, draw.randint(1, config.max_split_k)]))
