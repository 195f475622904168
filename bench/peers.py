"""Providers of packages that few have installed: `python -m weightonly.bench report --plugin weightonly.bench.peers`.

humming   humming-kernels (PyPI): kernels compiled on this machine when a shape is first met, by nvrtc or, where the
          environment variable HUMMING_COMPILER says so, nvcc; some 10 s each on one CPU core
marlin    the package marlin (https://github.com/IST-DASLab/marlin), built from its source
"""

from __future__ import annotations

import json
from typing import Any

import torch

from .providers import Prepared, Provider, missing_package, nbytes, register
from .weights import Weights


def _without_zeros(weights: Weights, name: str) -> None:
    if weights.zeros is not None:
        raise ValueError(f"{name}: expected weights without zero points, as this provider packs none")


class Humming(Provider):
    """humming-kernels' layer with its own choice of kernels, on our numbers and scales."""

    name = "humming"
    # Rows of x that kernels are compiled for at once. Another number compiles all of a shape, some 30.
    rows: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
    _BITS = {"int4": 4, "int8": 8}  # noqa: RUF012  (a constant)

    def unavailable(self, device: torch.device, dtype: torch.dtype, format: str, group_size: int) -> str | None:
        if format not in self._BITS:
            return f"it is compared with int4 and int8, not {format}"
        if device.type != "cuda":
            return "it runs on CUDA only"
        return missing_package("humming")

    def prepare(self, weights: Weights) -> Prepared[torch.nn.Module]:
        from humming.layer import HummingLayer
        from humming.tune import get_heuristics_config

        _without_zeros(weights, self.name)
        bits = self._BITS[weights.format]
        layer = HummingLayer(
            shape_n=weights.n,
            shape_k=weights.k,
            weight_config={"dtype": f"uint{bits}", "group_size": max(weights.group_size, 0)},
            torch_dtype=weights.dense.dtype,
        ).to(weights.q.device)
        unsigned = (weights.q.t().int() + (1 << (bits - 1))).to(torch.uint8)  # [n, k]
        if bits == 4:
            unsigned = unsigned[:, 0::2] | unsigned[:, 1::2] << 4  # [n, k/2], even k in the low nibble
        words = unsigned.contiguous().view(torch.int32)  # [n, k * bits / 32]
        layer.load_from_tensors({"weight": words, "weight_scale": weights.scales.t().contiguous()})
        layer.transform()
        # (begin, end, kernel) for begin < m <= end: those of the rows that are timed are compiled side by side.
        ranges = get_heuristics_config(layer.humming_config)
        few = json.dumps([r for r in ranges if any(r[0] < m <= r[1] for m in self.rows)])

        def run(w: torch.nn.Module, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
            return w(x, outputs=out, tuning_config=few if x.shape[0] in self.rows else None)

        size_bytes = sum(p.nbytes for p in layer.parameters())
        return Prepared(layer, run, size_bytes, weights.dense)


class Marlin(Provider):
    """Marlin's kernel as its authors published it: int4 without zero points, fp16, groups of 128 or per channel."""

    name = "marlin"
    _MOST_PARALLEL = 16  # workspaces of n / 128 locks for so many tiles of 64 tokens

    def unavailable(self, device: torch.device, dtype: torch.dtype, format: str, group_size: int) -> str | None:
        if format != "int4":
            return f"it has int4 only, not {format}"
        if dtype != torch.float16:
            return f"it takes float16 only, not {dtype}"
        if group_size not in (-1, 128):
            return f"its groups are of 128 or per channel, not {group_size}"
        if device.type != "cuda":
            return "it runs on CUDA only"
        return missing_package("marlin")

    def prepare(self, weights: Weights) -> Prepared[Any]:
        import marlin

        _without_zeros(weights, self.name)
        k, n = weights.k, weights.n
        layer = marlin.Layer(k, n, groupsize=weights.group_size).to(weights.q.device)
        linear = torch.nn.Linear(k, n, bias=False, device=weights.q.device, dtype=torch.float16)
        linear.weight.data = weights.dense.t().contiguous()
        layer.pack(linear, weights.scales.t().contiguous())
        parallel = self._MOST_PARALLEL
        locks = torch.zeros(n // 128 * parallel, dtype=torch.int32, device=weights.q.device)

        def run(w: tuple[torch.Tensor, ...], x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
            values, scales, locks = w
            marlin.mul(x, values, out, scales, locks, max_par=parallel)
            return out

        operand = (layer.B, layer.s, locks)
        return Prepared(operand, run, nbytes(layer.B, layer.s), weights.dense)


for _provider in (Humming(), Marlin()):
    register(_provider)
