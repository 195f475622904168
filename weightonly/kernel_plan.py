"""Plan: what one weight and one shape of x need at each call, and the launch of a kernel with a call's addresses."""

from __future__ import annotations

import torch

from .checks import check_out
from .code_tables import table_on
from .dequantize import aligned_rows
from .heuristics import KernelConfig
from .heuristics.configs import TypeConfig
from .heuristics.cost import cluster_slots
from .kernels import _C, kernel_numbers, sm_count
from .packed import PackedWeight

_ACTIVATION_NUMBERS = {None: 0, "identity": 0, "relu": 1, "gelu": 2, "silu": 3}


class Plan:
    """What is decided once. This one is for an x without rows, which takes no kernel."""

    __slots__ = ("checked_out", "device", "m", "n", "shape")

    def __init__(self, x: torch.Tensor, qweight: PackedWeight) -> None:
        self.checked_out: object = None
        self.device = x.get_device()
        self.m = x.numel() // qweight.k
        self.n = qweight.n
        self.shape = (*x.shape[:-1], qweight.n)

    def check_out(
        self,
        x: torch.Tensor,
        qweight: PackedWeight,
        scales: torch.Tensor,
        zeros: torch.Tensor | None,
        bias: torch.Tensor | None,
        out: torch.Tensor,
        perm: torch.Tensor | None,
    ) -> None:
        """`checks.check_out`, once for a set of addresses: a decode loop comes with the same ones again and again."""
        where = None
        if isinstance(out, torch.Tensor):
            where = (
                (out.data_ptr(), out.shape, out.stride(), out.dtype, out.get_device(), x.data_ptr(), scales.data_ptr()),
                None if zeros is None else zeros.data_ptr(),
                None if bias is None else bias.data_ptr(),
                None if perm is None else perm.data_ptr(),
            )
            if where == self.checked_out:
                return
        inputs = {"x": x, "scales": scales, "zeros": zeros, "bias": bias, "perm": perm, "qweight": qweight.data}
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
        """The product: `out` if it is given, which `check_out` must have seen, else a new tensor."""
        return x.new_empty(self.shape) if out is None else out


class KernelPlan(Plan):
    """One launch of a compiled kernel; with split-K in memory a second one sums the parts."""

    __slots__ = (
        "code_table",
        "config",
        "launch",
        "ld_scales",
        "ldx",
        "ldy",
        "partials",
        "rows_aligned",
        "x_k",
    )

    def __init__(
        self,
        x: torch.Tensor,
        qweight: PackedWeight,
        group_size: int,
        types: TypeConfig,
        config: KernelConfig,
        activation: str | None,
    ) -> None:
        super().__init__(x, qweight)
        self.config = config
        self.ldy = qweight.n
        self.x_k = -(-qweight.k // 8) * 8  # K as the kernels see it
        # Of a code format, in the dtype of x: it stays where it is as long as the process runs.
        self.code_table = 0 if qweight.code is None else table_on(qweight.code, x.device, x.dtype).data_ptr()
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
            clusters=cluster_slots(sm_count(self.device), config.split_k) if config.shares_cluster else 1,
            activation=_ACTIVATION_NUMBERS[activation],
        ).launch

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
        ldx = self.ldx
        address = x.data_ptr()
        if not self.rows_aligned or address % 16:
            x = self._aligned_copy(x, qweight.k)
            address = x.data_ptr()
            ldx = self.x_k
        scales_address = scales.data_ptr()
        zeros_address = self.code_table if zeros is None else zeros.data_ptr()
        if self.n != self.ld_scales or (scales_address | zeros_address) % 16 or not scales.is_contiguous():
            scales = aligned_rows(scales, self.ld_scales)
            scales_address = scales.data_ptr()
            if zeros is not None:
                zeros = aligned_rows(zeros, self.ld_scales)
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

    def _aligned_copy(self, x: torch.Tensor, k: int) -> torch.Tensor:
        """x as [m, x_k], rows 16-byte aligned, zeros beyond K."""
        copy = x.new_empty((self.m, self.x_k))
        copy[:, :k] = x.reshape(self.m, k)
        if self.x_k != k:
            copy[:, k:] = 0
        return copy
