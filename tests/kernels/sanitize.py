"""Launches every compiled kernel on a small ragged problem, for compute-sanitizer:

    compute-sanitizer --tool racecheck python -m tests.kernels.sanitize        (also memcheck, initcheck, synccheck)
    compute-sanitizer --tool racecheck python -m tests.kernels.sanitize decode_sm90 gemm_sm90        (these families)
    compute-sanitizer --tool racecheck python -m tests.kernels.sanitize conversions        (AWQ words, 4-bit blocks)
    compute-sanitizer --tool racecheck python -m tests.kernels.sanitize grouped        (products and layers of experts)
    compute-sanitizer --tool racecheck python -m tests.kernels.sanitize --format fp8        (this format alone)
    compute-sanitizer --tool racecheck python -m tests.kernels.sanitize --part 1/3 --seconds 200    (the first third)

Results are checked too, so that a run that computed nothing does not pass for a clean one. A run that --seconds ends
before all of its part was launched says so and exits with 1.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from tests.fp8_cases import random_e4m3

import weightonly as wo
from weightonly.codebooks import codebook
from weightonly.device import device_arch, sm_count
from weightonly.experts import Product
from weightonly.gate import Gate
from weightonly.heuristics import KernelConfig, Problem
from weightonly.heuristics.configs import TypeConfig, kernel_types
from weightonly.heuristics.families import FAMILIES
from weightonly.heuristics.families.gemm_sm90 import Order
from weightonly.heuristics.families.grouped_decode_sm90 import MAX_SORTED_CHOICES
from weightonly.heuristics.grouped import LayerChoice
from weightonly.heuristics.machine import resident_clusters
from weightonly.heuristics.problem import CODE_FORMATS, FLOAT_FORMATS
from weightonly.kernels import is_compiled
from weightonly.ops.around_experts import combine, in_pairs, sort_by_expert
from weightonly.plan import cache
from weightonly.plan import choose as plan_choice
from weightonly.plan import experts as layer_plans
from weightonly.plan import grouped as grouped_plans
from weightonly.plan import kernel as plan_kernel
from weightonly.plan.choose import choose

DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16}
ORDERS = (Order("gemm_sm90", 2, 2), Order("gemm_sm90", 1, 4), Order("gemm_sm90", 3, 1))
CONVERSIONS = "conversions"
GROUPED = "grouped"


@dataclass(frozen=True)
class Launch:
    """One launch with ragged M, N and, with groups of 16 and 32, K."""

    config: KernelConfig
    types: TypeConfig
    group_size: int
    m: int
    n: int
    k: int
    order: Order | None = None  # that it is told to add in

    def __str__(self) -> str:
        return f"{self.config}_{self.types.name}, groups of {self.group_size}, {self.order}"


def launch_of(config: KernelConfig, types: TypeConfig, group_size: int, sms: int) -> Launch:
    k, n = {16: 656, 32: 992 if config.block_k == 512 else 480}.get(group_size, 5 * group_size), 72
    if config.family == "decode_sm90" and config.split_k > 1:
        # Three tiles and a ragged one per cluster: every buffer and barrier is used a second time.
        n = 3 * resident_clusters(sms, config.split_k) * config.block_n + 8
    if config.rules.loops(config):
        # Some CTAs have a second tile.
        n = (sms // 2 + 1) * config.block_n + 8
    return Launch(config, types, group_size, min(config.max_m, config.block_m + 1), n, k)


def launches(configs: Iterable[KernelConfig], arch: int, sms: int) -> list[Launch]:
    """Every configuration with every type, alone and with K in two parts, where these can be."""
    found = []
    for config in configs:
        for types in kernel_types(config):
            if not is_compiled(config, types):
                continue
            # gemm_sm90 and gemm_sm90_fp8 have other loops for groups that are longer than a k_block.
            has_loops = config.family in ("gemm_sm90", "gemm_sm90_fp8") and types.scale_mode != "channel"
            sizes = (16,) if config.groups_of_16 else (32, 128) if has_loops else (32,)
            for split_k in (1, 2):
                for size in sizes:
                    one = launch_of(config.with_split_k(split_k), types, size, sms)
                    if can_run(one, arch, sms):
                        found += [one, *(replace(one, order=order) for order in ORDERS if may_follow(one, order))]
    return found


def may_follow(one: Launch, order: Order) -> bool:
    return one.config.rules.may_follow(one.config, order)


def can_run(one: Launch, arch: int, sms: int) -> bool:
    group_size = -1 if one.types.scale_mode == "channel" else one.group_size
    zeros = one.types.scale_mode == "group_zeros"
    problem = Problem(
        one.m, one.n, one.k, one.types.format, group_size, arch, sms, layout=one.config.layout, zeros=zeros
    )
    try:
        choose(problem, one.types, one.config)
    except ValueError:
        return False
    return True


def weights_of(
    types: TypeConfig, layout: str, shape: tuple[int, ...], generator: torch.Generator
) -> tuple[wo.PackedWeight, torch.Tensor]:
    """Random weights [K, N] or [E, K, N] on the GPU, and their numbers."""
    if types.format in FLOAT_FORMATS:
        floats = random_e4m3(shape, generator, exact=True)
        return wo.preprocess(floats, format=types.format, layout=layout).to("cuda"), floats.float()
    limit = 128 if types.format == "int8" else 8
    q = torch.randint(-limit, limit, shape, generator=generator, dtype=torch.int8)
    is_code = types.format in CODE_FORMATS
    code = torch.arange(-8.0, 8.0) if types.format == "code4" else None
    packed = wo.preprocess(q + 8 if is_code else q, format=types.format, code=code, layout=layout)
    return packed.to("cuda"), codebook(types.format)[(q + 8).long()] if types.format == "mxfp4" else q.float()


def in_8_bits(x: torch.Tensor) -> dict[str, Any]:
    """x of integers as `gemm` takes it in E4M3."""
    return {"x": x.to(torch.float8_e4m3fn).cuda(), "x_scales": torch.ones(len(x), device="cuda")}


def is_exact(one: Launch, generator: torch.Generator) -> bool:
    """Launches it; whether the result is the exact one."""
    k, n, types = one.k, one.n, one.types
    groups = 1 if types.scale_mode == "channel" else k // one.group_size
    qweight, w = weights_of(types, one.config.layout, (k, n), generator)
    scales = torch.full((groups, n), 0.5)
    zeros = (
        torch.randint(-2, 3, (groups, n), generator=generator).float() if types.scale_mode == "group_zeros" else None
    )
    x = torch.randint(-2, 3, (one.m, k), generator=generator).float()
    w = w - (0 if zeros is None else zeros.repeat_interleave(k // groups, 0))
    dtype = DTYPES[types.dtype]
    expected = (x @ w * 0.5).to(dtype)
    given = in_8_bits(x) if one.config.rules.x_bytes == 1 else {"x": x.to(dtype).cuda()}
    scales = scales.to(dtype).cuda()
    zeros = None if zeros is None else zeros.to(dtype).cuda()
    torch.cuda.synchronize()  # from here on the weights are constant
    with in_order(one.order):
        y = wo.gemm(qweight=qweight, scales=scales, zeros=zeros, config=one.config, **given)
    return torch.equal(y.cpu(), expected)


@contextmanager
def in_order(order: Order | None) -> Iterator[None]:
    """Inside the with statement kernels are those of the batch-invariant mode, as if weights had this class."""
    if order is None:
        yield
        return
    with ExitStack() as stack:
        for module in (plan_choice, plan_kernel):
            stack.enter_context(mock.patch.object(module, "invariant_class", return_value=order))
        stack.callback(cache.clear)
        stack.callback(wo.set_batch_invariant, False)
        cache.clear()
        wo.set_batch_invariant(True)
        yield


def converts(dtype: torch.dtype, generator: torch.Generator) -> bool:
    """Conversions of whole weights, ragged and larger than a tile; whether the results are those of the CPU."""
    words = torch.randint(-(2**31), 2**31, (60, 264 // 8), generator=generator).to(torch.int32)
    scales = torch.rand(3, 264, generator=generator).to(dtype)
    layer = (words, scales, words[:3])
    exact = torch.equal(wo.awq_dequantize(*(tensor.cuda() for tensor in layer)).cpu(), wo.awq_dequantize(*layer))
    w = torch.randn(3 * 4096 + 1001, generator=generator).to(dtype)
    for blocksize in (32, 64, 256, 4096):
        for quant_type in ("nf4", "fp4"):
            packed, absmax = wo.quantize_4bit(w.cuda(), blocksize, quant_type)
            expected = wo.quantize_4bit(w, blocksize, quant_type)
            restored = wo.dequantize_4bit(packed, absmax, blocksize, quant_type, w.shape, dtype)
            exact &= torch.equal(packed.cpu(), expected[0]) and torch.equal(absmax.cpu(), expected[1])
            exact &= torch.equal(restored.cpu(), wo.dequantize_4bit(*expected, blocksize, quant_type, w.shape, dtype))
    return exact


@dataclass(frozen=True)
class GroupedLaunch:
    """One product of experts with ragged rows, N and K, some without rows; or a layer of so many tokens."""

    config: KernelConfig
    types: TypeConfig
    tokens: int | None = None

    def __str__(self) -> str:
        layer = "" if self.tokens is None else f", a layer of {self.tokens} tokens"
        return f"{self.config}_{self.types.name}{layer}"


def grouped_launches() -> list[GroupedLaunch]:
    """Layers of as few tokens as kernels sort themselves, and of more."""
    return [
        GroupedLaunch(config, types, tokens)
        for config in (*wo.grouped_kernels(), *wo.grouped_fp8_kernels())
        for types in kernel_types(config)
        if is_compiled(config, types)
        for tokens in (None, *((9, 140) if config.rules.in_layers else ()))
    ]


def experts_of(
    k: int, n: int, one: GroupedLaunch, generator: torch.Generator, scale: float = 0.5
) -> tuple[Product, torch.Tensor]:
    """Five experts on the GPU, and their weights [5, K, N]."""
    types, dtype = one.types, DTYPES[one.types.dtype]
    group_size = 16 if one.config.groups_of_16 else 32 if types.format == "mxfp4" else 64
    groups = 1 if types.scale_mode == "channel" else k // group_size
    qweight, w = weights_of(types, one.config.layout, (5, k, n), generator)
    zeros = torch.randint(-2, 3, (5, groups, n), generator=generator).float()
    if types.scale_mode != "group_zeros":
        zeros.zero_()
    w = w - zeros.repeat_interleave(k // groups, 1)
    given = zeros.to(dtype).cuda() if types.scale_mode == "group_zeros" else None
    scales = torch.full((5, groups, n), scale, dtype=dtype, device="cuda")
    return Product(wo.QuantizedWeight(qweight, scales, given)), w * scale


def is_exact_grouped(one: GroupedLaunch, generator: torch.Generator) -> bool:
    """Launches it; whether the product is the exact one, or the layer is as its two products make it."""
    dtype = DTYPES[one.types.dtype]
    cache.clear()  # plans do not tell kernels apart that `select_grouped` gives below
    if one.tokens is not None:
        # Every step is exact but for its rounding.
        gate = Gate("relu", limit=2.0) if one.config.rules.in_layers else Gate("relu", has_gate=False)
        scale = 2.0**-9 if one.types.format == "int8" else 2.0**-5  # results are far from the limits of fp16
        first, _ = experts_of(320, 256 if gate.has_gate else 128, one, generator, scale)
        second, _ = experts_of(128, 320, one, generator, scale)
        x = torch.randint(-1, 2, (one.tokens, 320), generator=generator).to(dtype).cuda()
        ids = torch.randint(-1, 6, (one.tokens, 3), generator=generator).cuda()
        weights = torch.rand(one.tokens, 3, generator=generator).cuda()
        torch.cuda.synchronize()
        grouped_plans.select_grouped = lambda problem, experts: one.config
        sorts = one.config.rules.sorts and ids.numel() <= MAX_SORTED_CHOICES
        layer_plans.select_layer = lambda *arguments: LayerChoice(one.config, one.config, sorts)
        if one.config.rules.x_bytes == 1:
            x8, x_scales = in_8_bits(x).values()
            y = layer_plans.layer(in_pairs(x8), ids, weights, first, gate, second, x_scales)
            cache.clear()
            layer_plans.select_layer = lambda *arguments: None
            expected = wo.fused_experts(x8, first.operand, second.operand, ids, weights, gate, x_scales=x_scales)
            return y is not None and bool(expected.isfinite().all()) and torch.equal(y, expected)
        y = layer_plans.layer(x, ids, weights, first, gate, second)
        rows, offs, places = sort_by_expert(x, ids, 5)
        rows = second(gate(first(rows, offs)), offs)
        expected = combine(rows, weights, ids, offs, places, dtype)
        assert expected.isfinite().all() and expected.any()
        summed = combine(rows.requires_grad_(), weights.requires_grad_(), ids, offs, places, dtype)
        torch.autograd.grad(summed, (rows, weights), torch.ones_like(summed))  # which launches a kernel, too
        return y is not None and torch.equal(y, expected)
    k, n, counts = 320, 200, [9, 0, 130, 1, 0]
    product, w = experts_of(k, n, one, generator)
    x = torch.randint(-1, 2, (143, k), generator=generator).float()  # the last three rows are of no expert
    expected = torch.zeros(143, n)
    begin = 0
    for expert, count in enumerate(counts):
        expected[begin : begin + count] = x[begin : begin + count] @ w[expert]
        begin += count
    offs = torch.tensor(counts).cumsum(0).int().cuda()
    given = in_8_bits(x) if one.config.rules.x_bytes == 1 else {"x": x.to(dtype).cuda()}
    torch.cuda.synchronize()
    y = wo.grouped_gemm(qweight=product.operand, offs=offs, config=one.config, **given)
    return torch.equal(y.cpu(), expected.to(dtype))


def part_of(text: str) -> tuple[int, int]:
    """(1, 3) for "1/3\""""
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise argparse.ArgumentTypeError(f"expected a part such as 1/3, got {text!r}")
    return int(number), int(count)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("families", nargs="*", help=f"of kernels, {CONVERSIONS} or {GROUPED}; default: all")
    parser.add_argument("--format", help="launches of this format alone, such as fp8")
    parser.add_argument("--part", type=part_of, default=(1, 1), help="1/3: every third launch, from the first on")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="launch nothing more after so long")
    options = parser.parse_args()
    families, (part, parts) = set(options.families), options.part
    started = time.monotonic()
    for family in FAMILIES.values():
        family.floats_verified = True  # type: ignore[misc]  # layers of experts run them, then, where they are built
    generator = torch.Generator().manual_seed(part)
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False  # cuBLAS' sums, too, are to be exact
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    device = torch.cuda.current_device()
    chosen = [c for c in (*wo.kernels(), *wo.fp8_kernels()) if not families or c.family in families]
    todo: list[Launch | GroupedLaunch] = [*launches(chosen, device_arch(device), sm_count(device))]
    todo += [one for one in grouped_launches() if not families or families & {GROUPED, one.config.family}]
    todo = [one for one in todo if options.format in (None, one.types.format)]
    if not todo and CONVERSIONS not in families:
        parser.error("families, --format: this build and GPU have no such kernels")
    todo = todo[part - 1 :: parts]
    launched = 0
    for one in todo:
        if time.monotonic() - started > options.seconds:
            break
        wo.set_launch_overlap("constant_weights" if launched % 3 == 0 else True)
        if not (is_exact(one, generator) if isinstance(one, Launch) else is_exact_grouped(one, generator)):
            raise SystemExit(f"{one}: wrong result")
        launched += 1
    if part == 1 and (not families or CONVERSIONS in families):
        for name, dtype in DTYPES.items():
            if not converts(dtype, generator):
                raise SystemExit(f"conversions_{name}: wrong result")
    torch.cuda.synchronize()
    print(f"{launched} of {len(todo)} launches of part {part}/{parts}, all results exact")
    return 0 if launched == len(todo) else 1


if __name__ == "__main__":
    sys.exit(main())
