"""What the benchmark compares: each provider multiplies by the same quantized weights in its own way.

A provider is a small class with the three members of `Provider`; `PROVIDERS` lists them. Nothing is timed
before `check_product` has compared its result with the dense product.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

import weightonly as wo

# run(copy, x, out): x [m, k] times copy number `copy` of the weights, into out [m, n] or a new tensor; the
# result.
Run = Callable[[int, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Weights:
    """One random weight, quantized: w[k, n] = scales[k // g, n] * (q[k, n] - zeros[k // g, n])."""

    k: int
    n: int
    bits: int
    group_size: int  # -1: per channel
    q: torch.Tensor  # [k, n] int8
    scales: torch.Tensor  # [k/g, n]
    zeros: torch.Tensor | None  # [k/g, n]
    dense: torch.Tensor  # [k, n], dtype of scales: the values that q stands for

    @classmethod
    def random(
        cls,
        k: int,
        n: int,
        *,
        bits: int,
        group_size: int,
        symmetric: bool,
        dtype: torch.dtype,
        device: torch.device,
        seed: int = 0,
    ) -> Weights:
        """Normal values of variance 1/k (so that y keeps the size of x), quantized by `wo.quantize`."""
        generator = torch.Generator(device).manual_seed(seed)
        w = torch.randn(k, n, generator=generator, device=device).mul_(k**-0.5).to(dtype)  # [k, n]
        q, scales, zeros = wo.quantize(w, bits=bits, group_size=group_size, symmetric=symmetric)
        groups = scales.shape[0]
        values = q.float().view(groups, k // groups, n)  # [k/g, g, n]
        if zeros is not None:
            values -= zeros[:, None].float()
        values *= scales[:, None].float()
        return cls(k, n, bits, group_size, q, scales, zeros, values.view(k, n).to(dtype))


@dataclass(frozen=True)
class Prepared:
    """Weights in a provider's own format, in several copies."""

    run: Run
    copies: int
    weight_bytes: int  # what one call reads of the weights, scales and zeros
    expected: torch.Tensor  # [k, n] dense: the product that `run` must give is x @ expected


class Provider(Protocol):
    name: str

    def unavailable(self, device: torch.device, dtype: torch.dtype, bits: int, group_size: int) -> str | None:
        """Why it cannot run this, or None."""

    def prepare(self, weights: Weights, copies: Callable[[int], int]) -> Prepared:
        """`copies(weight_bytes)` says how many copies to make."""


def nbytes(*tensors: torch.Tensor | None) -> int:
    """Bytes of all of them together."""
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def _cloned(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.clone()


@dataclass(frozen=True)
class _PackedCopy:
    qweight: wo.PackedWeight
    scales: torch.Tensor
    zeros: torch.Tensor | None


def packed_copies(
    weights: Weights, copies: Callable[[int], int], layout: str | None = None
) -> tuple[list[_PackedCopy], int]:
    """(copies of the preprocessed weights, bytes of one); layout: None for the one that `preprocess` picks."""
    qweight = wo.preprocess(weights.q, bits=weights.bits, layout=layout)
    size_bytes = nbytes(qweight.data, weights.scales, weights.zeros)
    ring = [
        _PackedCopy(
            wo.PackedWeight(qweight.data.clone(), qweight.k, qweight.n, qweight.format, qweight.layout),
            weights.scales.clone(),
            _cloned(weights.zeros),
        )
        for _ in range(copies(size_bytes))
    ]
    return ring, size_bytes


class Ours:
    """`wo.gemm`."""

    name = "ours"

    def unavailable(self, device: torch.device, dtype: torch.dtype, bits: int, group_size: int) -> str | None:
        return None

    def prepare(self, weights: Weights, copies: Callable[[int], int]) -> Prepared:
        ring, size_bytes = packed_copies(weights, copies)

        def run(copy: int, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
            w = ring[copy]
            return wo.gemm(x, w.qweight, w.scales, zeros=w.zeros, out=out)

        return Prepared(run, len(ring), size_bytes, weights.dense)


class Cublas:
    """`torch.matmul` with the dense 16-bit weights: cuBLAS on a GPU, PyTorch's own library on a CPU."""

    name = "cublas"

    def unavailable(self, device: torch.device, dtype: torch.dtype, bits: int, group_size: int) -> str | None:
        return None

    def prepare(self, weights: Weights, copies: Callable[[int], int]) -> Prepared:
        size_bytes = nbytes(weights.dense)
        ring = [weights.dense.clone() for _ in range(copies(size_bytes))]  # each [k, n]

        def run(copy: int, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
            return torch.matmul(x, ring[copy], out=out)

        return Prepared(run, len(ring), size_bytes, weights.dense)


class DequantizeMatmul:
    """`wo.dequantize`, then `torch.matmul`: what one does without a fused kernel."""

    name = "dequantize+matmul"

    def unavailable(self, device: torch.device, dtype: torch.dtype, bits: int, group_size: int) -> str | None:
        return None

    def prepare(self, weights: Weights, copies: Callable[[int], int]) -> Prepared:
        ring, size_bytes = packed_copies(weights, copies)

        def run(copy: int, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
            w = ring[copy]
            return torch.matmul(x, wo.dequantize(w.qweight, w.scales, w.zeros), out=out)

        return Prepared(run, len(ring), size_bytes, weights.dense)


class Tinygemm:
    """PyTorch's own int4 GEMM (`torch.ops.aten._weight_int4pack_mm`), on a CPU its `_for_cpu` form.

    Its values are unsigned, w = (u - 8) * scale + zero, with scale and zero side by side in one bf16 tensor
    [k/g, n, 2], so that our scale * (q - z) has zero = -scale * z.
    """

    name = "tinygemm"
    _INNER_K_TILES = 8  # of 16 k each: the widest packing, for any k that 128 divides
    _GROUPS = (32, 64, 128, 256)

    def unavailable(self, device: torch.device, dtype: torch.dtype, bits: int, group_size: int) -> str | None:
        if bits != 4:
            return f"it has int4 only, not int{bits}"
        if dtype != torch.bfloat16:
            return f"it takes bfloat16 only, not {dtype}"
        if group_size not in self._GROUPS:
            return f"its group sizes are {self._GROUPS}, not {group_size}"
        if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
            return "it needs compute capability 8.0"
        return None

    def prepare(self, weights: Weights, copies: Callable[[int], int]) -> Prepared:
        u = (weights.q.t().to(torch.int32) + 8).contiguous()  # [n, k]
        if u.is_cuda:
            pairs = (u[:, 0::2] << 4 | u[:, 1::2]).to(torch.uint8)  # [n, k/2], even k in the high nibble
            packed = torch.ops.aten._convert_weight_to_int4pack(pairs, self._INNER_K_TILES)
            multiply = torch.ops.aten._weight_int4pack_mm
        else:
            packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(u, self._INNER_K_TILES)
            multiply = torch.ops.aten._weight_int4pack_mm_for_cpu
        zeros = torch.zeros_like(weights.scales) if weights.zeros is None else -weights.scales * weights.zeros
        scales_and_zeros = torch.stack([weights.scales, zeros], dim=-1).contiguous()  # [k/g, n, 2]
        size_bytes = nbytes(packed, scales_and_zeros)
        ring = [(packed.clone(), scales_and_zeros.clone()) for _ in range(copies(size_bytes))]
        group_size = weights.group_size

        def run(copy: int, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
            w, s = ring[copy]
            return multiply(x, w, group_size, s)  # it has no out=

        return Prepared(run, len(ring), size_bytes, weights.dense)


class BitsAndBytes:
    """bitsandbytes' NF4 in blocks of 64 along k. It quantizes for itself: compared with its own values."""

    name = "bitsandbytes"
    _BLOCK = 64

    def unavailable(self, device: torch.device, dtype: torch.dtype, bits: int, group_size: int) -> str | None:
        if bits != 4:
            return f"its NF4 has 4 bits, not {bits}"
        if device.type != "cuda":
            return "it is compared on CUDA only"
        if importlib.util.find_spec("bitsandbytes") is None:
            return "the package bitsandbytes is not installed"
        return None

    def prepare(self, weights: Weights, copies: Callable[[int], int]) -> Prepared:
        import bitsandbytes as bnb

        packed, state = bnb.functional.quantize_4bit(
            weights.dense.t().contiguous(), blocksize=self._BLOCK, quant_type="nf4"
        )  # of [n, k]
        size_bytes = nbytes(packed, state.absmax)
        ring = []
        for _ in range(copies(size_bytes)):
            own_state = bnb.functional.QuantState(
                absmax=state.absmax.clone(),
                shape=state.shape,
                code=state.code,
                blocksize=state.blocksize,
                quant_type=state.quant_type,
                dtype=state.dtype,
            )
            ring.append((packed.clone(), own_state))

        def run(copy: int, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
            w, w_state = ring[copy]
            return bnb.matmul_4bit(x, w.t(), quant_state=w_state, out=out)

        return Prepared(run, len(ring), size_bytes, bnb.functional.dequantize_4bit(packed, state).t())


_ALL: tuple[Provider, ...] = (Ours(), Cublas(), DequantizeMatmul(), Tinygemm(), BitsAndBytes())
PROVIDERS: dict[str, Provider] = {provider.name: provider for provider in _ALL}

# ||y - dense product|| / ||dense product||: bf16 rounding stays below 1e-2, a wrong layout or scale is near
# 1.
_CHECK_TOLERANCE = 2e-2


def check_product(name: str, prepared: Prepared, x: torch.Tensor, out: torch.Tensor) -> None:
    """Raises RuntimeError unless the product of x [m, k] is the dense one, by the first and the last copy."""
    expected = torch.matmul(x, prepared.expected).float()  # [m, n]
    for copy in (0, -1):
        out.fill_(torch.nan)
        error = (prepared.run(copy, x, out).float() - expected).norm() / expected.norm()
        if not error.item() <= _CHECK_TOLERANCE:
            m, k = x.shape
            raise RuntimeError(
                f"provider {name}: relative error {error.item():.3g} against the dense product at "
                f"m={m}, k={k}, n={out.shape[1]}; expected at most {_CHECK_TOLERANCE}"
            )


def named(
    names: str | Sequence[str],
    *,
    device: torch.device,
    dtype: torch.dtype,
    bits: int,
    group_size: int,
) -> list[Provider]:
    """The providers of these names; "all" means every one that can run this.

    Raises ValueError for a name that does not exist and for a provider asked for by name that cannot run
    this.
    """
    reasons = {p.name: p.unavailable(device, dtype, bits, group_size) for p in PROVIDERS.values()}
    if names == "all":
        return [PROVIDERS[name] for name, reason in reasons.items() if reason is None]
    chosen = [names] if isinstance(names, str) else list(names)
    if not chosen:
        raise ValueError("providers: expected at least one, got none")
    for name in chosen:
        if name not in PROVIDERS:
            raise ValueError(f'providers: expected "all" or some of {", ".join(PROVIDERS)}, got {name!r}')
        if reasons[name] is not None:
            raise ValueError(f"providers: {name} cannot run this: {reasons[name]}")
    return [PROVIDERS[name] for name in dict.fromkeys(chosen)]
