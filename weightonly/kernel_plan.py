"""Plan: what one weight and one shape of x need at each call, and the launch of a kernel with a call's addresses."""

from __future__ import annotations

from collections.abc import Callable

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
    """A launch of a compiled kernel, with split-K in memory one more that sums the parts; or two, side by side along N.

    columns: of y that the first one computes.
    """

    __slots__ = (
        "bias_in_place",
        "code_table",
        "config",
        "launch",
        "ld_scales",
        "ldx",
        "ldy",
        "partials",
        "rest",
        "rest_columns",
        "rest_weight_bytes",
        "rows_aligned",
        "scales_in_place",
        "x_k",
    )

    def __init__(
        self,
        x: torch.Tensor,
        qweight: PackedWeight,
        scales: torch.Tensor,
        zeros: torch.Tensor | None,
        bias: torch.Tensor | None,
        group_size: int,
        types: TypeConfig,
        config: KernelConfig,
        activation: str | None,
        columns: int,
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
        # The same of scales, zeros and bias: their addresses alone change from call to call.
        self.ld_scales = qweight.n_padded
        self.scales_in_place = (
            self.n == self.ld_scales and scales.is_contiguous() and (zeros is None or zeros.is_contiguous())
        )
        self.bias_in_place = bias is None or bias.is_contiguous()
        meets_in_memory = config.split_k > 1 and not config.shares_cluster
        self.partials = config.split_k * self.m * qweight.n_padded if meets_in_memory else 0

        def launch(config: KernelConfig, begin: int, end: int, n_padded: int) -> Callable[..., None]:
            """Of columns begin to end, the address of whose first one a call gives."""
            return _C.Plan(
                kernel=kernel_numbers()[f"{config.kernel}_{types.name}"],
                device=self.device,
                m=self.m,
                n=end - begin,
                k=self.x_k,
                n_padded=n_padded,
                k_padded=qweight.k_padded,
                group_size=qweight.k_padded if group_size == -1 else group_size,
                split_k=config.split_k,
                clusters=cluster_slots(sm_count(self.device), config.split_k) if config.shares_cluster else 1,
                activation=_ACTIVATION_NUMBERS[activation],
                follows=begin > 0,
            ).launch

        n, n_padded = qweight.n, qweight.n_padded
        if config.rest is None:
            self.launch, self.rest = launch(config, 0, n, n_padded), None
        else:
            self.launch = launch(config, 0, columns, columns)
            self.rest = launch(config.rest, columns, n, n_padded - columns)
            self.rest_columns = columns
            self.rest_weight_bytes = columns * qweight.k_padded * qweight.bits // 8

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
        scales_in_place = self.scales_in_place and not (scales_address | zeros_address) % 16
        if not scales_in_place:
            scales = aligned_rows(scales, self.ld_scales)
            scales_address = scales.data_ptr()
            if zeros is not None:
                zeros = aligned_rows(zeros, self.ld_scales)
                zeros_address = zeros.data_ptr()
        if not self.bias_in_place and bias is not None:
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
            scales_in_place,
        )
        if self.rest is not None:
            offset = 2 * self.rest_columns  # bytes of 16-bit values
            self.rest(
                address,
                qweight.data.data_ptr() + self.rest_weight_bytes,
                scales_address + offset,
                zeros_address if zeros is None else zeros_address + offset,
                0 if bias is None else bias.data_ptr() + offset,
                out.data_ptr() + offset,
                0,
                ldx,
                ldy,
                self.ld_scales,
                torch._C._cuda_getCurrentRawStream(self.device),
                scales_in_place,
            )
        return out

    def _aligned_copy(self, x: torch.Tensor, k: int) -> torch.Tensor:
        """x as [m, x_k], rows 16-byte aligned, zeros beyond K."""
        copy = x.new_empty((self.m, self.x_k))
        copy[:, :k] = x.reshape(self.m, k)
        if self.x_k != k:
            copy[:, k:] = 0
        return copy
