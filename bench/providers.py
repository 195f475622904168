"""What the benchmark compares: each provider multiplies by the same quantized weights in its own way.

To compare another library, subclass `Provider` and `register` an instance, in a module that --plugin names:

    class Mine(Provider):
        name = "mine"

        def prepare(self, weights):
            w = mine.pack(weights.q, weights.scales)  # once, not timed
            return Prepared(w, lambda w, x, out: mine.multiply(x, w), nbytes(w), weights.dense)

    register(Mine())

Nothing is timed before `check_product` has compared its result with the dense product.
"""

from __future__ import annotations

import copy
import importlib.util
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

import weightonly as wo
from weightonly.heuristics import KernelConfig
from weightonly.heuristics.problem import FORMATS

from .shapes import Shape
from .weights import DTYPES, Weights, dtype_name

Operand = TypeVar("Operand")


@dataclass(frozen=True)
class Prepared(Generic[Operand]):
    """One weight in a provider's own format, and how to multiply by it.

    Args:
        operand: the weight: a tensor, or anything that holds tensors and that copy.deepcopy copies.
        run: run(operand, x, out): x [m, k] times the weight, into out [m, n] or a new tensor; returns the result. On a
            GPU it is captured in a CUDA graph: on the current stream, without synchronizing.
        weight_bytes: what one call reads of the weight, scales and zeros.
        expected: [k, n] dense: the product that `run` must give is x @ expected.
        tolerance: ||y - product|| / ||product|| at most: rounding to bf16 is below 1e-2, a wrong layout or scale near
            1.

    Examples:
        >>> w = torch.randn(512, 768)
        >>> run = lambda w, x, out: torch.mm(x, w, out=out)
        >>> dense = Prepared(w, run, weight_bytes=w.nbytes, expected=w, tolerance=1e-2)
    """

    operand: Operand
    run: Callable[[Operand, torch.Tensor, torch.Tensor], torch.Tensor]
    weight_bytes: int
    expected: torch.Tensor
    tolerance: float = 2e-2

    def copies(self, count: int) -> list[Operand]:
        """The operand and count - 1 copies of it, in memory of their own."""
        return [self.operand, *(copy.deepcopy(self.operand) for _ in range(count - 1))]


class Named(ABC):
    """What is compared. `name` is what the command line calls it.

    dtypes: of x that it takes; empty: any. cuda_only: not on a CPU. package: what it needs.
    """

    name: str
    dtypes: Sequence[torch.dtype] = ()
    cuda_only = False
    package = ""

    def label(self, device: torch.device, dtype: torch.dtype) -> str:
        """What tables and pictures call it: its name, unless it is another thing on another device."""
        return self.name

    def missing(self, device: torch.device, dtype: torch.dtype) -> str | None:
        """Why it cannot run here ("the package x is not installed"), or None if it can."""
        if self.cuda_only and device.type != "cuda":
            return "it runs on CUDA only"
        if self.dtypes and dtype not in self.dtypes:
            return f"it takes {' and '.join(map(str, self.dtypes))} only, not {dtype}"
        has_package = not self.package or importlib.util.find_spec(self.package)
        return None if has_package else f"the package {self.package} is not installed"


class LayerProvider(Named):
    """A way to hold many weights: a model's, or its experts'."""

    def unavailable(self, device: torch.device, dtype: torch.dtype) -> str | None:
        """Why it cannot run this here, or None if it can."""
        return self.missing(device, dtype)


AnyNamed = TypeVar("AnyNamed", bound=Named)


class Registry(dict[str, AnyNamed]):
    """Name -> provider, in the order of tables and pictures."""

    def register(self, provider: AnyNamed) -> None:
        """Adds a provider. Raises ValueError for a name that is taken."""
        if provider.name in self:
            raise ValueError(f"provider: expected a new name, got {provider.name!r}, which is registered")
        self[provider.name] = provider


class Provider(Named):
    """A way to multiply by a quantized weight.

    Args:
        formats: names that it has; empty: all.
        group_sizes: those that it has; empty: all.

    Examples:
        >>> wo.bench.PROVIDERS["ours"].unavailable(torch.device("cpu"), torch.float32, "int4", 128) is None
        True
    """

    formats: Sequence[str] = ()
    group_sizes: Sequence[int] = ()

    def unavailable(self, device: torch.device, dtype: torch.dtype, format: str, group_size: int) -> str | None:
        """Why it cannot run this here ("it has int4 only, not int8"), or None if it can."""
        if self.formats and format not in self.formats:
            return f"it has {' and '.join(self.formats)} only, not {format}"
        if self.group_sizes and group_size not in self.group_sizes:
            return f"its group sizes are {self.group_sizes}, not {group_size}"
        return self.missing(device, dtype)

    def unfit(self, device: torch.device, k: int, n: int) -> str | None:
        """Why it cannot run a weight of this shape ("its N is a multiple of 16, not 77"), or None (the default)."""
        return None

    @abstractmethod
    def prepare(self, weights: Weights) -> Prepared:
        """The weights in its own format. Called once per shape, not timed."""


def nbytes(*tensors: torch.Tensor | None) -> int:
    """Bytes of all of them together."""
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


@dataclass(frozen=True)
class Packed:
    """A weight as `gemm` takes it."""

    qweight: wo.PackedWeight
    scales: torch.Tensor  # [k/g, n]
    zeros: torch.Tensor | None  # [k/g, n]

    @classmethod
    def of(cls, weights: Weights, layout: str | None = None) -> Packed:
        """layout: None for the one that `preprocess` picks."""
        qweight = wo.preprocess(weights.q, FORMATS[weights.format], layout=layout, format=weights.format)
        return cls(qweight, weights.scales, weights.zeros)

    @property
    def nbytes(self) -> int:
        return nbytes(self.qweight.data, self.scales, self.zeros)

    def multiply(
        self,
        x: torch.Tensor,
        out: torch.Tensor,
        config: KernelConfig | None = None,
        x_scales: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`wo.gemm`."""
        return wo.gemm(x, self.qweight, self.scales, zeros=self.zeros, out=out, config=config, x_scales=x_scales)

    def dequantized(self) -> torch.Tensor:
        """`wo.dequantize`: [k, n]."""
        return wo.dequantize(self.qweight, self.scales, self.zeros)


class Ours(Provider):
    """`wo.gemm`."""

    name = "ours"

    def prepare(self, weights: Weights) -> Prepared[Packed]:
        packed = Packed.of(weights)
        return Prepared(packed, Packed.multiply, packed.nbytes, weights.dense)


class Dense(Provider):
    """The dense weight in the dtype of x: `torch.matmul`, cuBLAS, on a GPU, `torch.nn.functional.linear` on a CPU."""

    name = "dense"

    def label(self, device: torch.device, dtype: torch.dtype) -> str:
        """Such as "cuBLAS fp16" or "torch fp32"."""
        return f"{'cuBLAS' if device.type == 'cuda' else 'torch'} {dtype_name(dtype)}"

    def prepare(self, weights: Weights) -> Prepared[torch.Tensor]:
        def multiply(w: torch.Tensor, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
            return torch.matmul(x, w, out=out)

        def linear(w: torch.Tensor, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.linear(x, w)

        dense = weights.dense  # [k, n]
        if dense.device.type == "cuda":
            return Prepared(dense, multiply, dense.nbytes, dense)
        # [n, k], as torch.nn.Linear has it: the other order took 1.5 times as long at M = 1.
        return Prepared(dense.t().contiguous(), linear, dense.nbytes, dense)


class DequantizeMatmul(Provider):
    """`wo.dequantize`, then `torch.matmul`: what one does without a fused kernel."""

    name = "dequantize+matmul"

    def prepare(self, weights: Weights) -> Prepared[Packed]:
        def run(w: Packed, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
            return torch.matmul(x, w.dequantized(), out=out)

        packed = Packed.of(weights)
        return Prepared(packed, run, packed.nbytes, weights.dense)


class Tinygemm(Provider):
    """PyTorch's own int4 GEMM (`torch.ops.aten._weight_int4pack_mm`), "tinygemm"; on a CPU its `_for_cpu` form.

    Its values are unsigned, w = (u - 8) * scale + zero, with scale and zero side by side in one bf16 tensor
    [k/g, n, 2], so that our scale * (q - z) has zero = -scale * z.
    """

    name = "tinygemm"
    formats = ("int4",)
    group_sizes = (32, 64, 128, 256)
    dtypes = (torch.bfloat16,)
    _INNER_K_TILES = 8  # of 16 k each: the widest packing, for any k that 128 divides
    _CPU_COLUMNS = 16  # N is a multiple of it

    def label(self, device: torch.device, dtype: torch.dtype) -> str:
        return self.name if device.type == "cuda" else "torch int4"

    def unfit(self, device: torch.device, k: int, n: int) -> str | None:
        columns = self._CPU_COLUMNS
        return f"its N is a multiple of {columns}, not {n}" if device.type == "cpu" and n % columns else None

    def unavailable(self, device: torch.device, dtype: torch.dtype, format: str, group_size: int) -> str | None:
        if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
            return "it needs compute capability 8.0"
        return super().unavailable(device, dtype, format, group_size)

    def prepare(self, weights: Weights) -> Prepared[tuple[torch.Tensor, torch.Tensor]]:
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
        group_size = weights.group_size

        def run(w: tuple[torch.Tensor, torch.Tensor], x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
            values, scales = w
            return multiply(x, values, group_size, scales)  # it has no out=

        size_bytes = nbytes(packed, scales_and_zeros)
        return Prepared((packed, scales_and_zeros), run, size_bytes, weights.dense)


class BitsAndBytes(Provider):
    """bitsandbytes' NF4 in blocks of 64 along k. It quantizes for itself: compared with its own values.

    On a CPU it is its Linear4bit, which packs the weight for kernels of its own where the CPU has AVX512-BF16: these
    multiply in bf16, whatever the dtype of x.
    """

    name = "bitsandbytes"
    package = "bitsandbytes"
    formats = tuple(format for format, bits in FORMATS.items() if bits == 4)
    _BLOCK = 64
    _CPU_COLUMNS = 32  # N is a multiple of it

    def label(self, device: torch.device, dtype: torch.dtype) -> str:
        return self.name if device.type == "cuda" else "bitsandbytes NF4"

    def unfit(self, device: torch.device, k: int, n: int) -> str | None:
        if device.type == "cpu" and n % self._CPU_COLUMNS:
            return f"its N is a multiple of {self._CPU_COLUMNS}, not {n}"
        return f"its K is a multiple of {self._BLOCK}, not {k}" if k % self._BLOCK else None

    def prepare(self, weights: Weights) -> Prepared:
        import bitsandbytes as bnb

        layer = linear4bit(weights.dense.t().contiguous(), self._BLOCK).eval()
        packed, state = layer.weight.data, layer.weight.quant_state
        expected = bnb.functional.dequantize_4bit(packed, state).t()
        size_bytes = nbytes(packed, state.absmax)

        def run_layer(w: bnb.nn.Linear4bit, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
            return w(x)

        def run(w: tuple[torch.Tensor, bnb.functional.QuantState], x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
            values, statistics = w
            return bnb.matmul_4bit(x, values.t(), quant_state=statistics, out=out)

        if weights.dense.device.type == "cpu":
            return Prepared(layer, run_layer, size_bytes, expected)
        return Prepared((packed, state), run, size_bytes, expected)


def linear4bit(weight: torch.Tensor, block: int) -> Any:
    """bitsandbytes' Linear4bit of a weight [n, k]: NF4, plain statistics, products in the dtype of the weight."""
    import bitsandbytes as bnb

    n, k = weight.shape
    options: dict[str, Any] = {"quant_type": "nf4", "compress_statistics": False}
    layer = bnb.nn.Linear4bit(k, n, bias=False, compute_dtype=weight.dtype, device="meta", **options)
    parameter: Any = bnb.nn.Params4bit(weight, requires_grad=False, blocksize=block, **options)
    layer.weight = parameter.to(weight.device)
    return layer


def is_dense(label: str) -> bool:
    """Whether a label names `Dense`, on whatever device."""
    return re.fullmatch(rf"(cuBLAS|torch) ({'|'.join(DTYPES)})", label) is not None


def of_label(label: str) -> Provider | None:
    """The provider of a label; None for one that is not registered here."""
    of_cpu = {p.label(_CPU, torch.bfloat16): p for p in PROVIDERS.values()}
    return PROVIDERS[Dense.name] if is_dense(label) else PROVIDERS.get(label) or of_cpu.get(label)


_CPU = torch.device("cpu")

PROVIDERS: Registry[Provider] = Registry()

register = PROVIDERS.register

for _provider in (Ours(), Dense(), DequantizeMatmul(), Tinygemm(), BitsAndBytes()):
    register(_provider)


def check_product(
    name: str, prepared: Prepared[Operand], copies: Sequence[Operand], x: torch.Tensor, out: torch.Tensor
) -> None:
    """Raises RuntimeError unless the product of x [m, k] is the dense one, by the first and the last of `copies`."""
    expected = torch.matmul(x, prepared.expected).float()  # [m, n]
    for operand in (copies[0], copies[-1]):
        out.fill_(torch.nan)
        error = (prepared.run(operand, x, out).float() - expected).norm() / expected.norm()
        if not error.item() <= prepared.tolerance:
            m, k = x.shape
            raise RuntimeError(
                f"provider {name}: relative error {error.item():.3g} against the dense product at "
                f"m={m}, k={k}, n={out.shape[1]}; expected at most {prepared.tolerance}"
            )


def named(
    names: str | Sequence[str],
    *,
    device: torch.device,
    dtype: torch.dtype,
    format: str,
    group_size: int,
    shapes: Sequence[Shape],
) -> list[Provider]:
    """The providers of these names; "all" means every one that can run this, for each of `shapes`.

    Raises ValueError for a name that does not exist and for a provider asked for by name that cannot run this.
    """

    def reason(p: Provider) -> str | None:
        unfit = (p.unfit(device, k, n) for k, n in shapes)
        return p.unavailable(device, dtype, format, group_size) or next(filter(None, unfit), None)

    return [PROVIDERS[name] for name in choose(names, {name: reason(p) for name, p in PROVIDERS.items()})]


def choose(names: str | Sequence[str], reasons: Mapping[str, str | None]) -> list[str]:
    """The names asked for; "all" means the providers without a reason. reasons: name -> why it cannot run this.

    Raises ValueError as `named`.
    """
    if names == "all":
        return [name for name, reason in reasons.items() if reason is None]
    chosen = [names] if isinstance(names, str) else list(names)
    if not chosen:
        raise ValueError("providers: expected at least one, got none")
    for name in chosen:
        if name not in reasons:
            raise ValueError(f'providers: expected "all" or some of {", ".join(reasons)}, got {name!r}')
        if reasons[name] is not None:
            raise ValueError(f"providers: {name} cannot run this: {reasons[name]}")
    return list(dict.fromkeys(chosen))
