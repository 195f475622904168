"""Plan: which kernel one weight and one shape of x get, and the launch with a call's addresses."""

from __future__ import annotations

import torch

from .checks import check_out
from .heuristics import KernelConfig, Problem, select
from .heuristics.configs import FAMILIES, TypeConfig
from .heuristics.cost import cluster_slots, machine
from .heuristics.legal import parts_of_k, smem_bytes, splits_evenly
from .heuristics.problem import layouts_of
from .kernels import _C, HOW_TO_BUILD, built_archs, cuda_built, device_arch, kernel_numbers, runs_on, sm_count
from .packed import PackedWeight

_DTYPE_NAMES = {torch.float16: "f16", torch.bfloat16: "bf16"}
_ACTIVATION_NUMBERS = {None: 0, "identity": 0, "relu": 1, "gelu": 2, "silu": 3}
_MAX_K = 1 << 20  # padded K that the kernels' group arithmetic holds (kernels/params.h)


class Plan:
    """A chosen kernel for one weight and one shape of x."""

    __slots__ = (
        "checked_out",
        "config",
        "device",
        "launch",
        "ld_scales",
        "ldx",
        "ldy",
        "m",
        "n",
        "partials",
        "rows_aligned",
        "shape",
        "x_k",
    )

    def __init__(
        self,
        x: torch.Tensor,
        qweight: PackedWeight,
        group_size: int,
        has_zeros: bool,
        activation: str | None,
        config: KernelConfig | None,
    ) -> None:
        if config is not None and not isinstance(config, KernelConfig):
            raise TypeError(f"config: expected a KernelConfig of weightonly.kernels(), got {type(config).__name__}")
        self.checked_out: object = None
        self.device = x.get_device()
        self.shape = (*x.shape[:-1], qweight.n)
        self.n = self.ldy = qweight.n
        self.m = x.numel() // qweight.k
        self.x_k = -(-qweight.k // 8) * 8  # K as the kernels see it
        if self.m == 0:
            return
        arch = device_arch(self.device)
        check_kernels(arch)
        sms = sm_count(self.device)
        w = qweight
        problem = Problem(self.m, w.n, w.k, w.format, group_size, arch, sms, w.layout, has_zeros)
        types = TypeConfig(_DTYPE_NAMES[x.dtype], qweight.format, scale_mode(group_size, has_zeros))
        self.config = config = choose(problem, types, config)
        # Rows that can be read where they are: 2-D (or one row), contiguous inside, 16-byte aligned strides.
        flat = x.dim() <= 2 or x.is_contiguous()
        self.ldx = x.stride(-2) if x.dim() == 2 and self.m > 1 else qweight.k
        inner = x.stride(-1) == 1 or qweight.k == 1
        aligned = self.x_k == qweight.k and self.ldx % 8 == 0
        self.rows_aligned = flat and inner and aligned and self.ldx >= qweight.k
        self.ld_scales = qweight.n_padded
        meets_in_memory = config.split_k > 1 and not config.shares_cluster
        self.partials = config.split_k * self.m * qweight.n_padded if meets_in_memory else 0
        self.launch = _C.Plan(
            kernel=kernel_numbers()[f"{config.kernel}_{types.name}"],
            device=self.device,
            m=self.m,
            n=qweight.n,
            k=self.x_k,
            n_padded=qweight.n_padded,
            k_padded=qweight.k_padded,
            group_size=qweight.k_padded if group_size == -1 else group_size,
            split_k=config.split_k,
            clusters=cluster_slots(sms, config.split_k) if config.shares_cluster else 1,
            activation=_ACTIVATION_NUMBERS[activation],
        ).launch

    def check_out(
        self,
        x: torch.Tensor,
        qweight: PackedWeight,
        scales: torch.Tensor,
        zeros: torch.Tensor | None,
        bias: torch.Tensor | None,
        out: torch.Tensor,
    ) -> None:
        """`checks.check_out`, once for a set of addresses: a decode loop comes with the same ones again and again."""
        where = None
        if isinstance(out, torch.Tensor):
            where = (
                (out.data_ptr(), out.shape, out.stride(), out.dtype, out.get_device(), x.data_ptr(), scales.data_ptr()),
                None if zeros is None else zeros.data_ptr(),
                None if bias is None else bias.data_ptr(),
            )
            if where == self.checked_out:
                return
        inputs = {"x": x, "scales": scales, "zeros": zeros, "bias": bias, "qweight": qweight.data}
        check_out(out, x, self.shape, inputs)
        self.checked_out = where

    def run(
        self,
        x: torch.Tensor,
        qweight: PackedWeight,
        scales: torch.Tensor,
        zeros: torch.Tensor | None,
        bias: torch.Tensor | None,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        ldy = self.ldy
        if out is None:
            out = x.new_empty(self.shape)
        elif len(self.shape) == 2 and self.m > 1:
            ldy = out.stride(0)
        if self.m == 0:
            return out
        ldx = self.ldx
        address = x.data_ptr()
        if not self.rows_aligned or address % 16:
            x = self._aligned_copy(x, qweight.k)
            address = x.data_ptr()
            ldx = self.x_k
        scales_address = scales.data_ptr()
        zeros_address = 0 if zeros is None else zeros.data_ptr()
        if self.n != self.ld_scales or (scales_address | zeros_address) % 16 or not scales.is_contiguous():
            scales = self._aligned_rows(scales)
            scales_address = scales.data_ptr()
            if zeros is not None:
                zeros = self._aligned_rows(zeros)
                zeros_address = zeros.data_ptr()
        elif zeros is not None and not zeros.is_contiguous():
            zeros = zeros.contiguous()
            zeros_address = zeros.data_ptr()
        if bias is not None and not bias.is_contiguous():
            bias = bias.contiguous()
        partials = None
        if self.partials:
            partials = torch.empty(self.partials, dtype=torch.float32, device=x.device)
        self.launch(
            address,
            qweight.data.data_ptr(),
            scales_address,
            zeros_address,
            0 if bias is None else bias.data_ptr(),
            out.data_ptr(),
            0 if partials is None else partials.data_ptr(),
            ldx,
            ldy,
            self.ld_scales,
            torch._C._cuda_getCurrentRawStream(self.device),
        )
        return out

    def _aligned_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """A copy of scales or zeros as [groups, n_padded] in aligned rows: for a padded N, and for views."""
        copy = rows.new_zeros((rows.shape[0], self.ld_scales))
        copy[:, : self.n] = rows
        return copy

    def _aligned_copy(self, x: torch.Tensor, k: int) -> torch.Tensor:
        """x as [m, x_k], rows 16-byte aligned, zeros beyond K."""
        copy = x.new_empty((self.m, self.x_k))
        copy[:, :k] = x.reshape(self.m, k)
        if self.x_k != k:
            copy[:, k:] = 0
        return copy


def scale_mode(group_size: int, has_zeros: bool) -> str:
    if has_zeros:
        return "group_zeros"
    return "channel" if group_size == -1 else "group"


def check_kernels(arch: int) -> None:
    """Raises RuntimeError unless this installation has kernels and can have them for this GPU."""
    if arch < 70:
        raise RuntimeError(f"x: is on a GPU of compute capability {arch / 10}; the kernels of weightonly need 7.0")
    if not cuda_built():
        raise RuntimeError(
            "x: is a CUDA tensor, but this installation of weightonly was built without kernels; "
            f"build them: {HOW_TO_BUILD.format(archs=arch)}"
        )


def choose(problem: Problem, types: TypeConfig, config: KernelConfig | None) -> KernelConfig:
    """The configuration to run: the given one if it can, else the heuristic's; errors say what is wrong."""
    if problem.k_padded > _MAX_K:
        raise ValueError(f"qweight: expected K of at most {_MAX_K} on a GPU, got {problem.k}")
    gpu = f"a GPU of compute capability {problem.arch / 10}"
    if config is None:
        p = problem
        if p.layout not in layouts_of(p.arch):
            read = " or ".join(repr(layout) for layout in layouts_of(p.arch))
            raise ValueError(
                f"qweight: packed in layout {p.layout!r}, but {gpu} reads {read}; "
                f"call preprocess(q, bits, arch='sm{p.arch}')"
            )
        if types.dtype == "bf16" and p.arch < 80:
            raise TypeError(f"x: expected dtype torch.float16 on {gpu} (bf16 needs 8.0), got torch.bfloat16")
        config = select(p.m, p.n, p.k, p.format, p.group_size, p.arch, p.sm_count, p.layout, p.zeros)
    else:
        check_config(config, problem, types)
    if not runs_on(config, problem.arch) or f"{config.kernel}_{types.name}" not in kernel_numbers():
        raise RuntimeError(
            f"no kernel {config.kernel}_{types.name} for {gpu}: built for {', '.join(built_archs())}; "
            f"rebuild: {HOW_TO_BUILD.format(archs=problem.arch)}"
        )
    return config


def check_config(config: KernelConfig, problem: Problem, types: TypeConfig) -> None:
    """Raises ValueError unless the configuration computes this problem; it says what is wrong."""
    if config.layout != problem.layout:
        packed = f"but qweight is packed as {problem.layout!r}"
        raise ValueError(f"config: {config} reads layout {config.layout!r}, {packed}")
    if problem.format not in config.formats:
        formats = ", ".join(config.formats)
        raise ValueError(f"config: {config} reads {formats}, but qweight is {problem.format}")
    if problem.m > config.max_m:
        raise ValueError(f"config: {config} computes at most {config.max_m} rows, but x has {problem.m}")
    if types.dtype not in FAMILIES[config.family].dtypes:
        raise ValueError(f"config: {config} computes fp16 alone, but x is bf16")
    if problem.arch < config.min_arch:
        raise ValueError(
            f"config: {config} needs compute capability {config.min_arch / 10}, but the GPU has {problem.arch / 10}"
        )
    if config.shares_cluster and problem.arch != config.min_arch:
        raise ValueError(
            f"config: {config} runs on compute capability {config.min_arch / 10} alone, "
            f"but the GPU has {problem.arch / 10}"
        )
    if not 1 <= config.split_k <= config.max_split_k:
        raise ValueError(f"config: expected split_k of 1 to {config.max_split_k}, got {config.split_k}")
    needed_bytes, limit_bytes = smem_bytes(config, problem), machine(problem.arch).smem_bytes
    if needed_bytes > limit_bytes:
        raise ValueError(
            f"config: {config} needs {needed_bytes} bytes of shared memory for {problem.format}, "
            f"but the GPU has {limit_bytes}"
        )
    if config.shares_cluster and not splits_evenly(config.shared_sums, config.split_k):
        raise ValueError(
            f"config: split_k of {config.split_k} leaves a CTA of the cluster without sums to finish: "
            f"{config.kernel} has {config.shared_sums} parts of them"
        )
    units = parts_of_k(config, problem)
    if not splits_evenly(units, config.split_k):
        raise ValueError(
            f"config: split_k of {config.split_k} leaves a part of K without work: K = {problem.k} "
            f"is {units} units of {config.kernel}"
        )
