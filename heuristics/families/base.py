"""KernelConfig, one configuration of a kernel, and Family, all that is known of a kernel template."""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from ..arch import target_number
from ..cost import Work, problem_bytes
from ..machine import machine
from ..problem import FLOAT_FORMATS, INTEGER_FORMATS, MEASURED_AS, Problem

NEWEST = 1 << 30
"""`Family.last_arch` of a family that no newer one replaces."""

FAMILIES: dict[str, Family] = {}
"""Every family by its name (families/__init__.py)."""


@dataclass(frozen=True)
class KernelConfig:
    """Tile shape, pipeline and split of one kernel. The data types are not part of it: see `TypeConfig`.

    Args:
        family: a key of FAMILIES.
        block_m: tokens of the tile of one CTA; of cuBLAS, which has many tiles, what the cost model counts in.
        block_n: columns of the tile of one CTA.
        block_k: k of one iteration of its main loop.
        warp_m: tokens of the tile of one warp (gemm_sm90: of one warpgroup).
        warp_n: columns of the tile of one warp.
        stages: of the pipeline through shared memory.
        split_k: parts of K that are computed by CTAs of their own and summed in a fixed order; with `shares_cluster` by
            the CTAs of a cluster.
        formats: weight formats that the configuration is compiled for.
        tail: None: one launch computes all columns. Else it computes the columns of its full waves of CTAs, and a
            second launch, of this configuration, the columns that are left, which would keep few SMs busy.
        verified: False: no GPU has run it. It is neither built, unless a build asks for it, nor selected.
        groups_of_16: whether it computes groups of 16, and no others; else it computes all others.

    Examples:
        >>> config = wo.heuristics.select(16, 6144, 4096, "int4", 128, "sm90", 132)
        >>> config.with_split_k(2).split_k, config.layout
        (2, 'tiled')
    """

    family: str
    block_m: int
    block_n: int
    block_k: int
    warp_m: int
    warp_n: int
    stages: int
    split_k: int = 1
    formats: tuple[str, ...] = INTEGER_FORMATS
    tail: KernelConfig | None = None
    verified: bool = True
    groups_of_16: bool = False

    def __post_init__(self) -> None:
        if self.tail is not None and not isinstance(self.tail, KernelConfig):
            raise TypeError(f"tail: expected a KernelConfig or None, got {type(self.tail).__name__}")

    @functools.cached_property
    def kernel(self) -> str:
        """Name of the compiled kernel, less its types: everything but split_k, which is a launch parameter."""
        name = self.rules.kernel_name(self)
        if self.has_floats:
            return f"{name}_{self.formats[0]}"
        return f"{name}_g16" if self.groups_of_16 else name

    @property
    def least_group(self) -> int:
        """k of the smallest groups of scales that it computes."""
        return self.rules.least_group(self)

    @property
    def has_floats(self) -> bool:
        """Whether its weights are one of FLOAT_FORMATS: it computes no other format."""
        return self.formats[0] in FLOAT_FORMATS

    @functools.cached_property
    def measured(self) -> KernelConfig:
        """The configuration that lends the cost model its constants.

        For groups of 16 that is the one for all others, for floats the one for the format that they are MEASURED_AS.
        """
        formats = tuple(MEASURED_AS[format] for format in self.formats)
        return replace(self, groups_of_16=False, formats=formats, stages=self.rules.measured_stages(self))

    def kernels(self) -> set[str]:
        """Names of the compiled kernels that it runs."""
        return {self.kernel} if self.tail is None else {self.kernel, self.tail.kernel}

    @property
    def name(self) -> str:
        name = f"{self.kernel}_k{self.split_k}"
        return name if self.tail is None else f"{name}+{self.tail.name}"

    def __str__(self) -> str:
        return self.name

    @property
    def rules(self) -> Family:
        """Its family."""
        return FAMILIES[self.family]

    @property
    def layout(self) -> str:
        """The weight layout that the kernel reads."""
        return self.rules.layout

    @property
    def shares_cluster(self) -> bool:
        """Whether the CTAs that share K are a cluster: their sums need no memory and no kernel of their own."""
        return self.rules.shares_cluster

    @property
    def unfused(self) -> bool:
        """Whether it has no kernel of its own: the kernel of kernels/convert/dequantize.cu, then cuBLAS."""
        return self.rules.unfused

    @property
    def is_verified(self) -> bool:
        family = self.rules
        of_groups = family.groups_of_16_verified or not self.groups_of_16
        of_floats = family.floats_verified or not self.has_floats
        return self.verified and family.verified and of_groups and of_floats

    @functools.cached_property
    def max_split_k(self) -> int:
        return self.rules.max_split_k(self)

    @property
    def max_m(self) -> int:
        """Rows of x that one launch handles."""
        return self.rules.max_m(self)

    @functools.cached_property
    def k_tile(self) -> int:
        """The k that split-K hands out."""
        return self.rules.k_tile(self)

    @functools.cached_property
    def splits(self) -> tuple[KernelConfig, ...]:
        """It with each split_k that it is compiled for."""
        return tuple(replace(self, split_k=s) for s in range(1, self.max_split_k + 1))

    def with_split_k(self, split_k: int) -> KernelConfig:
        return replace(self, split_k=split_k)

    def for_groups_of_16(self, **changes: Any) -> KernelConfig:
        """The same for groups of 16, with other changes."""
        return replace(self, groups_of_16=True, **changes)

    def for_floats(self) -> tuple[KernelConfig, ...]:
        """The same for each of FLOAT_FORMATS that is MEASURED_AS one of its formats, if its family compiles any."""
        tile, tiles = (self.block_m, self.block_n, self.block_k, self.stages), self.rules.float_tiles
        if self.groups_of_16 or (tiles is not None and tile not in tiles):
            return ()
        formats = (format for format in FLOAT_FORMATS if MEASURED_AS[format] in self.formats)
        return tuple(replace(self, formats=(format,)) for format in formats)

    def with_tail(self, tail: KernelConfig | None) -> KernelConfig:
        """The same for full waves, `tail` for the columns that are left. Raises TypeError for anything but these."""
        return replace(self, tail=tail)


def measured(config: KernelConfig, format: str) -> tuple[str, str]:
    """The kernel and the format whose constants a configuration has for a format."""
    return config.measured.kernel, MEASURED_AS[format]


class Launch:
    """One launch of a configuration on one GPU, for one format and kind of scales: its work, for any M, N and K.

    start_us, k_us  all SMs compute for at least start_us + tiles * K * k_us, with any split_k of the kernel
    most_tiles      output tiles up to which `select` considers it
    """

    __slots__ = ("config", "k_us", "most_tiles", "start_us")

    def __init__(
        self, config: KernelConfig, k_us: float = 0.0, start_us: float = 0.0, most_tiles: float = math.inf
    ) -> None:
        self.config, self.k_us, self.start_us, self.most_tiles = config, k_us, start_us, most_tiles

    def work(self, m: int, n: int, k: int, tiles: int, total_bytes: float) -> Work:
        """What it has to do. tiles: output tiles of M and N; total_bytes: see `problem_bytes`."""
        raise NotImplementedError


def has_empty_part(k_tiles: int, split_k: int) -> bool:
    """Whether split_k equal parts of K leave one without k-tiles."""
    return (split_k - 1) * -(-k_tiles // split_k) >= k_tiles


class Family:
    """A kernel template: the layout that it reads, what it is compiled for, its rules, and the work of a launch.

    layout                 of the weights
    first_arch, last_arch  compute capabilities that it is compiled for, and that `select` considers it for
    dtypes                 of x; tensor cores before sm80 have no bf16
    x_bytes                of an element of x. 1: it is E4M3 with a scale for each row, and `dtypes` are those of y
    scale_modes            that it is compiled for: see TypeConfig
    shares_cluster         parts of K are summed by a cluster: machine code of 90a alone, which runs on 9.0 alone
    unfused                dequantizes slices of the weight, which cuBLAS multiplies by
    takes_tail             may be the first of two launches
    tail_overlap_us        of the second of them, while the first one runs
    smem_grows             with M, N or K
    verified               False: no GPU has run it. It is neither built, unless a build asks for it, nor selected
    groups_of_16_verified  the same of its kernels for groups of 16
    floats_verified        the same of its kernels for FLOAT_FORMATS
    float_tiles            (block_m, block_n, block_k, stages) of those that it has; None: all
    grouped                computes grouped products alone (heuristics/grouped.py)
    takes_order            may add its sums over K in the order of another kernel
    sorts                  grouped: it can sort the tokens' expert ids by itself
    in_layers              grouped: it can apply the function of a gate, and start while the kernel in front still runs
    max_experts            grouped: experts of one launch
    header                 of the kernel, below kernels/gemm
    launcher               of the family whose function launch_<name> launches it; "": its own
    """

    name: ClassVar[str]
    layout: ClassVar[str]
    first_arch: ClassVar[int]
    last_arch: ClassVar[int] = NEWEST
    dtypes: ClassVar[tuple[str, ...]] = ("f16", "bf16")
    x_bytes: ClassVar[int] = 2
    scale_modes: ClassVar[tuple[str, ...]] = ("channel", "group", "group_zeros")
    shares_cluster: ClassVar[bool] = False
    unfused: ClassVar[bool] = False
    takes_tail: ClassVar[bool] = False
    tail_overlap_us: ClassVar[float] = 0.0
    smem_grows: ClassVar[bool] = False
    verified: ClassVar[bool] = True
    groups_of_16_verified: ClassVar[bool] = True
    floats_verified: ClassVar[bool] = True
    float_tiles: ClassVar[tuple[tuple[int, int, int, int], ...] | None] = None
    grouped: ClassVar[bool] = False
    takes_order: ClassVar[bool] = False
    sorts: ClassVar[bool] = False
    in_layers: ClassVar[bool] = False
    max_experts: ClassVar[int] = 0
    header: ClassVar[str] = ""
    launcher: ClassVar[str] = ""

    # --- its configurations ---

    def configs(self) -> Iterable[KernelConfig]:
        raise NotImplementedError

    def kernel_name(self, config: KernelConfig) -> str:
        c = config
        return f"{c.family}_{c.block_m}x{c.block_n}x{c.block_k}_w{c.warp_m}x{c.warp_n}_s{c.stages}"

    def k_tile(self, config: KernelConfig) -> int:
        """The k that split-K hands out."""
        return config.block_k

    def least_group(self, config: KernelConfig) -> int:
        """k of the smallest groups of scales that it computes: 16, alone, or 32, or 128 and its multiples."""
        return 16 if config.groups_of_16 else 32

    def min_m(self, config: KernelConfig) -> int | None:
        """Rows of x from which `select` considers it; None: only where nothing else computes a problem."""
        return 1

    def max_m(self, config: KernelConfig) -> int:
        """Rows of x that one launch handles."""
        return 2**31 - 1

    def max_split_k(self, config: KernelConfig) -> int:
        raise NotImplementedError

    def loops(self, config: KernelConfig) -> bool:
        """Whether CTAs go through several output tiles, the next on its way while one is finished."""
        return False

    def first_parts(self, config: KernelConfig) -> int:
        """The most split_k with which `select` considers it as the first of two launches; 0: it does not."""
        return 0

    def tiles(self, config: KernelConfig, m: int, n: int) -> int:
        """Output tiles of a launch."""
        return -(-m // config.block_m) * -(-n // config.block_n)

    # --- code generation ---

    def compiled_for(self, arch: str) -> bool:
        """Whether a build for `arch` ("80", "90a") has the family. 70 stands for the PTX of compute_75."""
        in_range = self.first_arch <= target_number(arch) <= self.last_arch
        return in_range and (not self.shares_cluster or arch.endswith("a"))

    def code_constants(self, config: KernelConfig, format: str) -> dict[str, int]:
        """The constants that a generated kernel hands to its template."""
        raise NotImplementedError

    def defines(self, config: KernelConfig) -> tuple[str, ...]:
        """Macros that a generated unit needs."""
        return ()

    # --- rules ---

    def smem_bytes(self, config: KernelConfig, problem: Problem) -> int:
        """Dynamic shared memory of one CTA, bytes. It may be more than a GPU has: see `why_not`."""
        raise NotImplementedError

    def why_not(self, config: KernelConfig, problem: Problem, dtype: str | None = None) -> str | None:
        """Why a launch of the configuration cannot compute a problem; None if it can. dtype of x: "f16" or "bf16"."""
        return self.why_unsupported(config, problem, dtype) or self.why_not_sizes(config, problem)

    def why_unsupported(self, config: KernelConfig, problem: Problem, dtype: str | None = None) -> str | None:
        """The part of `why_not` that M, N and K do not change."""
        p = problem
        if self.layout != p.layout:
            return f"{config} reads layout {self.layout!r}, but qweight is packed as {p.layout!r}"
        if p.format not in config.formats:
            return f"{config} reads {', '.join(config.formats)}, but qweight is {p.format}"
        if p.zeros and "group_zeros" not in self.scale_modes:
            return f"{config} computes symmetric weights alone, but qweight has zeros"
        if config.groups_of_16 != (p.group_step == 16):
            computed = "of 16 alone" if config.groups_of_16 else "of 32, 64 and their multiples"
            return f"{config} computes groups {computed}, but those of scales are of {p.group_size}"
        if dtype is not None and dtype not in self.dtypes:
            return f"{config} computes fp16 alone, but x is bf16"
        if p.arch < self.first_arch:
            needed = self.first_arch / 10
            return f"{config} needs compute capability {needed}, but the GPU has {p.arch / 10}"
        if self.first_arch == self.last_arch < p.arch:
            return f"{config} runs on compute capability {self.first_arch / 10} alone, but the GPU has {p.arch / 10}"
        if not 1 <= config.split_k <= config.max_split_k:
            return f"expected split_k of 1 to {config.max_split_k}, got {config.split_k}"
        return None if self.smem_grows else self._why_not_smem(config, p)

    def why_not_sizes(self, config: KernelConfig, problem: Problem) -> str | None:
        """The part of `why_not` that M, N and K decide."""
        p = problem
        if p.m > config.max_m:
            return f"{config} computes at most {config.max_m} rows, but x has {p.m}"
        if self.smem_grows and (reason := self._why_not_smem(config, p)) is not None:
            return reason
        k_tiles = -(-p.k_padded // config.k_tile)
        if has_empty_part(k_tiles, config.split_k):
            return (
                f"split_k of {config.split_k} leaves a part of K without work: K = {p.k} is {k_tiles} k-tiles of "
                f"{config.kernel}"
            )
        return None

    def _why_not_smem(self, config: KernelConfig, problem: Problem) -> str | None:
        needed, limit = self.smem_bytes(config, problem), machine(problem.arch).smem_bytes
        if needed <= limit:
            return None
        return f"{config} needs {needed} bytes of shared memory for {problem.format}, but the GPU has {limit}"

    def bits_class(self, config: KernelConfig, problem: Problem) -> Hashable | None:
        """What the bits of a row of a launch depend on, beside that row of x and the weight; M does not count.

        Launches of one class give a row the same bits, whatever M is, whatever the other rows hold, wherever the row
        is. None: its bits depend on one of these.
        """
        return None

    def may_follow(self, config: KernelConfig, order: Hashable) -> bool:
        """Whether a launch can compute in a class that is not its own, if it is told which."""
        return False

    def partials(self, config: KernelConfig, problem: Problem, n_padded: int, order: Hashable) -> int:
        """fp32 numbers of global memory that a launch needs. order: its class in the batch-invariant mode, or None."""
        return config.split_k * problem.m * n_padded if config.split_k > 1 and not self.shares_cluster else 0

    # --- cost ---

    def measured_stages(self, config: KernelConfig) -> int:
        """Stages of the configuration that lends its constants."""
        return config.stages

    def ctas(self, config: KernelConfig) -> int:
        """CTAs of a kernel of Hopper that share an SM."""
        return 1

    def grouped_us(self, config: KernelConfig, problem: Problem, experts: int, is_gated: bool = False) -> float:
        """Of a family of grouped products: the time of one, on average. problem.m: the rows of all experts."""
        raise NotImplementedError

    def is_calibrated(self, config: KernelConfig, format: str) -> bool:
        """Whether h200.py has the constants of a kernel. One that is not measured yet is compiled, but not chosen."""
        raise NotImplementedError

    def splits(self, config: KernelConfig) -> Iterable[int]:
        """The split_k that `select` considers; none: it does not consider the configuration."""
        return range(1, config.max_split_k + 1)

    def launch(self, config: KernelConfig, problem: Problem, order: Hashable = None) -> Launch:
        """Its launch on the problem's GPU, for its format and kind of scales. M, N and K do not count.

        order: the class that it computes in, in the batch-invariant mode. Raises KeyError where it is not calibrated.
        """
        raise NotImplementedError

    def work(self, config: KernelConfig, problem: Problem, order: Hashable = None) -> Work:
        """What one launch of a legal configuration has to do. Raises KeyError where it is not calibrated."""
        p = problem
        return self.launch(config, p, order).work(p.m, p.n, p.k, self.tiles(config, p.m, p.n), problem_bytes(p))
