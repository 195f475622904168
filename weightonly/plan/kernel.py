"""The plan of a compiled kernel: sizes are fixed, each call brings its addresses."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

from ..activations import activation_of
from ..args import GemmArgs
from ..codebooks import codebook_on
from ..heuristics import KernelConfig, Problem
from ..heuristics.configs import TypeConfig
from ..heuristics.families.gemm_sm90 import Order
from ..heuristics.launches import launches
from ..heuristics.machine import resident_clusters
from ..heuristics.select import invariant_class
from ..kernels import _C, kernel_numbers
from ..plain import aligned_rows
from .base import Plan

Launch = Callable[..., None]
"""`_C.Plan.launch`, or `launch_fp8` where x has 8 bits: _C.pyi lists their positional arguments in their order."""


_current_stream: Any = getattr(
    torch._C, "_cuda_getCurrentRawStream", None
)  # device -> cudaStream_t, where PyTorch has CUDA


class KernelPlan(Plan):
    """One launch; with split-K in memory the kernel launches the reduction itself. Or two, side by side along N.

    problem, types: what the call computes, for which `config` has a compiled kernel.
    """

    __slots__ = (
        "bias_in_place",
        "codebook",
        "config",
        "launch",
        "ld_scales",
        "ldx",
        "ldy",
        "out_has_rows",
        "partials",
        "rows_aligned",
        "scales_in_place",
        "tail",
        "tail_offsets",
        "tail_partials",
        "x_k",
    )

    def __init__(self, args: GemmArgs, problem: Problem, types: TypeConfig, config: KernelConfig) -> None:
        super().__init__(args)
        x, w, bias = args.x, args.weight, args.bias
        qweight, scales, zeros = w.packed, w.scales, w.zeros
        k, n, n_padded = qweight.k, qweight.n, qweight.n_padded
        self.config = config
        self.ldy = n
        self.out_has_rows = len(self.shape) == 2 and self.m > 1  # at a distance that each call's `out` has
        aligned = 16 // x.element_size()
        self.x_k = -(-k // aligned) * aligned  # K as the kernels see it
        # Kernels for codes get their codebook, in the dtype of y, in the place of zeros. It is never freed.
        self.codebook = 0 if qweight.code is None else codebook_on(qweight.code, x.device, args.dtype).data_ptr()
        # A kernel reads rows of x where they are if they are at one distance, contiguous inside, and 16-byte aligned.
        self.ldx, in_place = k, True
        if w.perm is None:  # else x is gathered first, and contiguous
            self.ldx = x.stride(0) if x.dim() == 2 and self.m > 1 else k
            in_place = (x.dim() <= 2 or x.is_contiguous()) and (x.stride(-1) == 1 or k == 1) and self.ldx >= k
        self.rows_aligned = in_place and self.x_k == k and self.ldx % aligned == 0
        # The same for scales, zeros and bias; whether their addresses are aligned is seen at each call.
        self.ld_scales = n_padded
        self.scales_in_place = (
            n == self.ld_scales and scales.is_contiguous() and (zeros is None or zeros.is_contiguous())
        )
        self.bias_in_place = bias is None or bias.is_contiguous()
        of = invariant_class(problem) if problem.invariant else None
        order = (of.split_k, of.warpgroups) if isinstance(of, Order) and config.rules.takes_order else (0, 0)
        both = (config,) if config.tail is None else (config, config.tail)
        partials = [c.rules.partials(c, problem, n_padded, of) for c in both]  # fp32 elements of each launch
        self.partials, self.tail_partials = sum(partials), 4 * partials[0]  # elements, bytes

        def launch(config: KernelConfig, begin: int, end: int, columns: int) -> Launch:
            """For columns begin..end, `columns` with the padding; each call gives addresses of column `begin`."""
            plan = _C.Plan(
                kernel=kernel_numbers()[f"{config.kernel}_{types.name}"],
                device=self.device,
                is_tail=begin > 0,
                m=self.m,
                n=end - begin,
                k=self.x_k,
                n_padded=columns,
                k_padded=qweight.k_padded,
                group_size=qweight.k_padded if problem.per_channel else problem.group_size,
                ld_scales=self.ld_scales,
                split_k=config.split_k,
                clusters=resident_clusters(problem.sm_count, config.split_k) if config.shares_cluster else 1,
                activation=activation_of(args.activation).number,
                order=order,
            )
            return plan.launch if x.element_size() == 2 else plan.launch_fp8

        self.tail: Launch | None = None
        if config.tail is None:
            self.launch = launch(config, 0, n, n_padded)
        else:
            columns = launches(config, problem)[0][1].n
            self.launch = launch(config, 0, columns, columns)
            self.tail = launch(config.tail, columns, n, n_padded - columns)
            # Of x, weight, scales, zeros, bias and y, in bytes: from column 0 to the first one of the tail.
            row = 2 * columns  # 16-bit values
            weight = columns * qweight.k_padded * qweight.bits // 8
            self.tail_offsets = 0, weight, row, 0 if zeros is None else row, 0 if bias is None else row, row

    def run(self, args: GemmArgs) -> torch.Tensor:
        x, w, bias, out = args.x, args.weight, args.bias, args.out
        ldy = self.ldy
        if out is None:
            out = x.new_empty(*self.shape)  # 0.3 us less than new_empty(self.shape)
        elif self.out_has_rows:
            ldy = out.stride(0)
        ldx = self.ldx
        x_address = args.x_address if w._perm is None else x.data_ptr()
        weight_address, scales_address, zeros_address, bias_address, _ = args.addresses
        if not self.rows_aligned or x_address % 16:
            x = self._aligned_copy(x, w.k)
            x_address = x.data_ptr()
            ldx = self.x_k
        zeros_address = zeros_address or self.codebook
        scales_in_place = self.scales_in_place and not (scales_address | zeros_address) % 16
        if not scales_in_place:
            scales = aligned_rows(w._scales, self.ld_scales)
            scales_address = scales.data_ptr()
            if w._zeros is not None:
                zeros = aligned_rows(w._zeros, self.ld_scales)
                zeros_address = zeros.data_ptr()
        if bias is not None and not self.bias_in_place:
            bias = bias.contiguous()
            bias_address = bias.data_ptr()
        partials_address = 0
        if self.partials:
            partials = torch.empty(self.partials, dtype=torch.float32, device=x.device)
            partials_address = partials.data_ptr()
        y_address = out.data_ptr()
        stream = _current_stream(self.device)
        self.launch(
            x_address,
            weight_address,
            scales_address,
            zeros_address,
            bias_address,
            y_address,
            partials_address,
            ldx,
            ldy,
            stream,
            scales_in_place,
        )
        if self.tail is not None:
            addresses = (x_address, weight_address, scales_address, zeros_address, bias_address, y_address)
            of_tail = map(operator.add, addresses, self.tail_offsets)
            self.tail(*of_tail, partials_address + self.tail_partials, ldx, ldy, stream, scales_in_place)
        return out

    def _aligned_copy(self, x: torch.Tensor, k: int) -> torch.Tensor:
        """x as [M, x_k], rows 16-byte aligned, zeros beyond K."""
        copy = x.new_empty((self.m, self.x_k))
        copy[:, :k] = x.reshape(self.m, k)
        if self.x_k != k:
            copy[:, k:] = 0
        return copy
