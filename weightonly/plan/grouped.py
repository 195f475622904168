"""The plans of grouped products: one kernel for the rows of all experts, or a `gemm` for each expert that has some."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from ..activations import activation_of
from ..args import GroupedArgs
from ..codebooks import codebook_on
from ..device import device_arch, sm_count
from ..fp8_args import Fp8GroupedArgs
from ..heuristics import KernelConfig, Problem
from ..heuristics.grouped import invariant_grouped_class, select_grouped, why_not_grouped
from ..heuristics.invariant import class_of
from ..heuristics.legal import has_kernels
from ..heuristics.machine import resident_clusters
from ..kernels import _C, check_kernels, grouped_kernel_numbers, is_compiled, runs_on
from ..layout import CPU
from ..packed import PackedWeight
from ..plain import aligned_rows
from .base import Plan
from .choose import check_compiled, check_sizes, problem_of, types_of
from .kernel import _current_stream


def make_grouped_plan(args: GroupedArgs) -> Plan | None:
    """The plan of one launch for all experts; None where no kernel computes them so.

    Raises what `grouped_gemm` raises for `config`.
    """
    config, w = args.config, args.weight.packed
    if config is not None and not isinstance(config, KernelConfig):
        raise TypeError(f"config: expected a KernelConfig of weightonly.grouped_kernels(), got {type(config).__name__}")
    if args.x.device.type == "cpu" or w.layout == CPU:
        if config is not None:
            raise ValueError(f"config: expected None for CPU tensors, which no kernel computes, got {config}")
        return None
    device = args.x.get_device()
    arch = device_arch(device)
    if config is None and not has_kernels(w.format, args.weight.group_size, arch, w.layout):
        return None
    if args.x.numel() == 0:
        return Plan(args)
    check_kernels(arch)
    experts, problem = w.experts or 0, problem_of(args.m, args.weight, arch, sm_count(device), args.invariant)
    types = types_of(problem, args.dtype)
    check_sizes(problem)
    if config is None:
        config = select_grouped(problem, experts)
        if config is None:
            return None
        if problem.invariant:  # another way for some numbers of rows alone would give them other bits
            check_compiled(config, types, arch)
        elif not runs_on(config, arch) or not is_compiled(config, types):
            return None
    elif (reason := why_not_grouped(config, problem, experts, types.dtype)) is not None:
        raise ValueError(f"config: {reason}")
    else:
        check_grouped_class(config, problem, experts)
        check_compiled(config, types, arch)
    return GroupedKernelPlan(args, problem, config)


def check_grouped_class(config: KernelConfig, problem: Problem, experts: int) -> None:
    """Raises ValueError in the batch-invariant mode for a configuration of another class than the product has."""
    if not problem.invariant:
        return
    expected = invariant_grouped_class(replace(problem, m=1), experts)
    if class_of(config, problem) != expected:
        raise ValueError(
            f"config: expected one of class {expected} in the batch-invariant mode, which computes these experts for "
            f"every number of rows, got {config} of {class_of(config, problem)}"
        )


def launches_of(
    w: PackedWeight, problem: Problem, config: KernelConfig, dtype: torch.dtype, device: int, **fields: Any
) -> tuple[Any, int]:
    """The _C.GroupedPlan of a kernel for the rows of all experts, and the address of its codebook, 0 for integers.

    dtype: of y. fields: of the plan, beside what the weight and the problem say.
    """
    plan = _C.GroupedPlan(
        kernel=grouped_kernel_numbers()[f"{config.kernel}_{types_of(problem, dtype).name}"],
        device=device,
        experts=w.experts or 0,
        m=problem.m,
        n=w.n,
        n_padded=w.n_padded,
        k_padded=w.k_padded,
        group_size=w.k_padded if problem.per_channel else problem.group_size,
        ld_scales=w.n_padded,
        clusters=resident_clusters(problem.sm_count, 1),
        **fields,
    )
    return plan, 0 if w.code is None else codebook_on(w.code, w.device, dtype).data_ptr()


class GroupedKernelPlan(Plan):
    """One launch for the rows of all experts. The host never reads `offs`, so that a CUDA graph can hold the call.

    problem: M counts the rows of all experts. config: a compiled kernel that computes it.
    """

    __slots__ = (
        "activate",
        "aligned",
        "codebook",
        "config",
        "k",
        "launch",
        "n_padded",
        "out_has_rows",
        "rows_aligned",
        "x_k",
    )

    def __init__(self, args: GroupedArgs, problem: Problem, config: KernelConfig) -> None:
        super().__init__(args)
        x, w = args.x, args.weight.packed
        self.config = config
        activation = activation_of(args.activation)
        self.activate = None if config.rules.in_layers else activation.in_place
        self.k = w.k
        aligned = 16 // x.element_size()
        self.x_k = -(-w.k // aligned) * aligned  # K as the kernel sees it
        self.n_padded = w.n_padded
        self.out_has_rows = self.m > 1
        # Rows of x are read where they are if they are contiguous inside and 16-byte aligned.
        distance = x.stride(0) if self.m > 1 else w.k
        in_place = args.weight.perm is not None or (
            (x.stride(1) == 1 or w.k == 1) and distance >= w.k and distance % aligned == 0
        )
        self.rows_aligned = in_place and self.x_k == w.k
        gate = (activation.number if config.rules.in_layers else 0, 1.0, math.inf, 0.0)
        plan, self.codebook = launches_of(w, problem, config, args.dtype, self.device, k=self.x_k, gate=gate)
        self.launch: Any = plan.launch

    def run(self, args: Any) -> torch.Tensor:
        x, w, bias, out = args.x, args.weight, args.bias, args.out
        if out is None:
            out = args.new_result()
        if w.perm is not None:
            x = self._gathered(x, w.perm, args.offs)
        if not self.rows_aligned or x.data_ptr() % 16:
            copy = x.new_zeros((self.m, self.x_k))
            copy[:, : self.k] = x
            x = copy
        x_scales = args.x_scales.contiguous() if isinstance(args, Fp8GroupedArgs) else None
        scales = aligned_rows(w.scales, self.n_padded)
        zeros = None if w.zeros is None else aligned_rows(w.zeros, self.n_padded)
        bias = None if bias is None else bias.contiguous()
        offs = args.offs.contiguous()
        self.launch(
            x.data_ptr(),
            w.packed.data.data_ptr(),
            scales.data_ptr(),
            self.codebook if zeros is None else zeros.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            out.data_ptr(),
            offs.data_ptr(),
            x.stride(0) if self.m > 1 else self.x_k,
            out.stride(0) if self.out_has_rows else self.shape[1],
            _current_stream(self.device),
            0 if x_scales is None else x_scales.data_ptr(),
        )
        if self.activate is not None:
            self.activate(out)
        return out

    def _gathered(self, x: torch.Tensor, perm: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        """Each row of x in the order of its expert's rows of the weight."""
        rows = torch.arange(self.m, dtype=torch.int32, device=x.device)
        expert = torch.searchsorted(offs, rows, right=True).clamp_(max=perm.shape[0] - 1)  # (T)
        return x.gather(1, perm[expert].long())
