"""Providers of packages that few have installed: `python -m weightonly.bench report --plugin tools.peers`.

humming   humming-kernels (PyPI): kernels compiled on this machine when a shape is first met, by nvrtc or, where the
          environment variable HUMMING_COMPILER says so, nvcc; some 10 s each on one CPU core
marlin    the package marlin (https://github.com/IST-DASLab/marlin), built from its source

and of `experts`:

humming           humming-kernels' indexed kernels, which gather the rows of x by token, as vLLM 0.33 runs them
humming_grouped   its grouped kernels, of rows sorted by expert, as vLLM runs them where GPUs share the experts
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from weightonly.bench.experts.providers import ExpertsProvider
from weightonly.bench.experts.providers import register as register_experts
from weightonly.bench.experts.routing import Routing
from weightonly.bench.experts.weights import ExpertWeights, combined, summed
from weightonly.bench.providers import Prepared, Provider, nbytes, register
from weightonly.bench.weights import Weights
from weightonly.heuristics.problem import FORMATS


def _without_zeros(weights: Weights, name: str) -> None:
    if weights.zeros is not None:
        raise ValueError(f"{name}: expected weights without zero points, as this provider packs none")


def _words(q: torch.Tensor, bits: int, zero: int) -> torch.Tensor:
    """q + zero of int8 q [k, n] in `bits` bits: int32 [n, k * bits / 32], even k in the low nibble."""
    unsigned = (q.t().int() + zero).to(torch.uint8)  # [n, k]
    if bits == 4:
        unsigned = unsigned[:, 0::2] | unsigned[:, 1::2] << 4  # [n, k/2]
    return unsigned.contiguous().view(torch.int32)


class Humming(Provider):
    """humming-kernels' layer with its own choice of kernels, on our numbers and scales."""

    name = "humming"
    package = "humming"
    formats = ("int4", "int8")
    cuda_only = True
    # Rows of x that kernels are compiled for at once. Another number compiles all of a shape, some 30.
    rows: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)

    def prepare(self, weights: Weights) -> Prepared[torch.nn.Module]:
        from humming.layer import HummingLayer
        from humming.tune import get_heuristics_config

        _without_zeros(weights, self.name)
        bits = FORMATS[weights.format]
        layer = HummingLayer(
            shape_n=weights.n,
            shape_k=weights.k,
            weight_config={"dtype": f"uint{bits}", "group_size": max(weights.group_size, 0)},
            torch_dtype=weights.dense.dtype,
        ).to(weights.q.device)
        words = _words(weights.q, bits, 1 << (bits - 1))
        layer.load_from_tensors({"weight": words, "weight_scale": weights.scales.t().contiguous()})
        layer.transform()
        # (begin, end, kernel) for begin < m <= end: kernels of the rows that are timed are compiled side by side.
        ranges = get_heuristics_config(layer.humming_config)
        few = json.dumps([r for r in ranges if any(r[0] < m <= r[1] for m in self.rows)])

        def run(w: torch.nn.Module, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
            return w(x, outputs=out, tuning_config=few if x.shape[0] in self.rows else None)

        size_bytes = sum(p.nbytes for p in layer.parameters())
        return Prepared(layer, run, size_bytes, weights.dense)


class Marlin(Provider):
    """Marlin's kernel as its authors published it: int4 without zero points, fp16, groups of 128 or per channel."""

    name = "marlin"
    package = "marlin"
    formats = ("int4",)
    group_sizes = (-1, 128)
    dtypes = (torch.float16,)
    cuda_only = True
    _MOST_PARALLEL = 16  # workspaces of n / 128 locks for so many tiles of 64 tokens

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


def _cat(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """torch.cat, which need not have float8_e8m0fnu."""
    if parts[0].dtype == torch.float8_e8m0fnu:
        return torch.cat([part.view(torch.uint8) for part in parts]).view(torch.float8_e8m0fnu)
    return torch.cat([*parts])


@dataclass
class HummingWeights:
    """Stacked experts as humming's kernels take them. config: humming's LayerConfig."""

    config: Any
    tensors: dict[str, torch.Tensor]  # weight, weight_scale
    locks: torch.Tensor  # zeros, which kernels that split K leave as zeros


@functools.lru_cache(maxsize=8)  # as many as one measurement uses; a CUDA graph cannot capture their making
def _blocks(routing: Routing, rows: int, by_token: bool) -> Mapping[str, torch.Tensor]:
    """The rows of each expert in blocks of `rows`, the last one filled up with T, as indexed kernels take them.
    by_token: as (token, expert) pairs, else as sorted rows."""
    device, counts = routing.order.device, torch.tensor(routing.counts)
    blocks = (counts + rows - 1) // rows  # [E]
    experts = torch.arange(len(counts)).repeat_interleave(blocks)  # [blocks]
    first = rows * (torch.arange(len(experts)) - (blocks.cumsum(0) - blocks)[experts])  # [blocks], within its expert
    within = first[:, None] + torch.arange(rows)  # [blocks, rows]
    ids = (counts.cumsum(0) - counts)[experts, None] + within
    if by_token:
        ids = routing.order.cpu()[ids.clamp(max=routing.rows - 1)]
    ids[within >= counts[experts, None]] = routing.rows
    return {
        "sorted_ids": ids.flatten().int().to(device),
        "expert_ids": experts.int().to(device),
        "num_tokens_padded": torch.tensor([ids.numel()], dtype=torch.int32, device=device),
    }


@functools.lru_cache(maxsize=8)
def _starts(routing: Routing) -> Mapping[str, torch.Tensor]:
    """Where the rows of each expert begin, and T, as grouped kernels take it."""
    return {"expert_layout": torch.nn.functional.pad(routing.offs, (1, 0))}  # [E + 1]


class HummingExperts(ExpertsProvider):
    """humming-kernels' products of stacked experts with its own choice of kernels, on our numbers and scales. They are
    given what they read of the routing: the others of `experts` are given sorted pairs, too."""

    holds = "humming"
    package = "humming"
    dtypes = (torch.bfloat16,)
    cuda_only = True
    # T that kernels are compiled for at once: some 10 for each product, side by side. Another T compiles its own.
    rows: Sequence[int] = tuple(1 << i for i in range(16))
    # Format -> bits, what is added to q, and what its schema says
    _FORMATS = {  # noqa: RUF012  (a constant)
        "int4": (4, 8, {"b_dtype": "uint4"}),
        "int8": (8, 128, {"b_dtype": "uint8"}),
        "mxfp4": (4, 0, {"b_dtype": "float4e2m1", "bs_dtype": "float8e8m0"}),
    }

    def __init__(self, name: str, kind: str) -> None:
        """kind: of humming's GemmType, "indexed" or "grouped_contiguous"."""
        self.name, self._indexed = name, kind == "indexed"
        self._compute: dict[str, Any] = {"use_f16_accum": False, "use_batch_invariant": False, "gemm_type": kind}

    def prepare(self, weights: ExpertWeights) -> HummingWeights:
        if weights.format not in self._FORMATS:
            raise ValueError(f"humming: expected one of {', '.join(self._FORMATS)}, got {weights.format}")
        from humming.schema import HummingWeightSchema
        from humming.transform import prepare_and_transform_humming_tensors, prepare_layer_config

        bits, zero, numbers = self._FORMATS[weights.format]
        experts, k, n = weights.q.shape
        dtype, device = weights.dense.dtype, weights.q.device
        group_size = k // weights.scales.shape[1]
        schema = HummingWeightSchema(weight_scale_group_size=group_size if group_size < k else 0, **numbers)
        # It has quicker kernels for integers of which none is the lowest: all experts must agree on that.
        symmetric = weights.format != "mxfp4" and not bool((weights.q == -zero).any())
        shape: dict[str, Any] = {"shape_n": n, "shape_k": k, "torch_dtype": dtype, "device": device}
        shape |= {"pad_n_to_multiple": 256, "pad_k_to_multiple": 128}  # as vLLM pads
        of_one = schema
        parts: dict[str, list[torch.Tensor]] = {}
        for q, scales in zip(weights.q, weights.scales, strict=True):  # one by one: humming unpacks to int32
            tensors = {"weight": _words(q, bits, zero)[None], "weight_scale": scales.t().contiguous()[None]}
            if weights.format == "mxfp4":
                tensors["weight_scale"] = tensors["weight_scale"].float().to(torch.float8_e8m0fnu)  # powers of two
            if symmetric:
                of_one, tensors = schema.convert_symmetric_integer_weight(tensors)
            _, tensors = prepare_and_transform_humming_tensors(tensors, weight_schema=of_one, num_experts=1, **shape)
            for name, tensor in tensors.items():
                parts.setdefault(name, []).append(tensor)
        stacked = {name: _cat(part) for name, part in parts.items()}
        config = prepare_layer_config(weight_schema=of_one, num_experts=experts, **shape)
        locks = torch.zeros(2048, dtype=torch.int32, device=device)  # as many as humming's layer has
        return HummingWeights(config, stacked, locks)

    def weight_bytes(self, operand: HummingWeights) -> int:
        return nbytes(*operand.tensors.values())

    def product(self, operand: HummingWeights, x: torch.Tensor, routing: Routing) -> torch.Tensor:
        return self._multiply(operand, x, routing, by_token=False)

    def layer(self, w13: HummingWeights, w2: HummingWeights, x: torch.Tensor, routing: Routing) -> torch.Tensor:
        from humming.forward import may_process_input

        top_k = routing.ids.shape[1]
        if self._indexed:
            gate_up = self._multiply(w13, x, routing, by_token=True, top_k=top_k)
        else:
            gate_up = self._multiply(w13, x[routing.order // top_k], routing, by_token=False)
        activation = {"activation_type": "binary_split", "activation_impl": "(a / (1.f + expf(-a))) * b"}  # as in vLLM
        between, _, _ = may_process_input(w2.config, gate_up, **activation)
        y = self._multiply(w2, between, routing, by_token=self._indexed)
        return summed(y, routing) if self._indexed else combined(y, routing)

    def _multiply(
        self, weights: HummingWeights, x: torch.Tensor, routing: Routing, *, by_token: bool, top_k: int = 1
    ) -> torch.Tensor:
        """[T, N]. by_token: its rows and the rows of x are in the order of tokens, and top_k of them read one of x;
        else they are sorted by expert."""
        from humming.forward import humming_forward

        kernels = self._kernels(weights.config, routing.rows)
        if self._indexed:
            own = next(config for begin, end, config in kernels if begin < routing.rows <= end)
            given = _blocks(routing, own["block_shape"][0], by_token)
        else:
            given = _starts(routing)
        y: torch.Tensor = humming_forward(
            weights.config,
            inputs=x,
            locks=weights.locks,
            top_k=top_k,
            compute_config=json.dumps(self._compute),
            tuning_config=json.dumps(kernels),
            **weights.tensors,
            **given,
        )
        return y

    def _kernels(self, layer_config: Any, rows: int) -> list[tuple[int, int, dict[str, Any]]]:
        """(begin, end, kernel) for begin < T <= end."""
        from humming.tune import get_heuristics_config

        kernels: list[tuple[int, int, dict[str, Any]]] = []
        begin = 0  # humming looks T = 1 up, too
        for end in sorted(self.rows) if rows in self.rows else [rows]:
            config = get_heuristics_config(layer_config, end, **self._compute)
            kernels.append((begin, end, config))
            begin = end
        return kernels


for _provider in (Humming(), Marlin()):
    register(_provider)
for _experts in (HummingExperts("humming", "indexed"), HummingExperts("humming_grouped", "grouped_contiguous")):
    register_experts(_experts)
