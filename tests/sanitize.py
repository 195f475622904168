"""Launches every compiled kernel on a small ragged problem, for compute-sanitizer:

    compute-sanitizer --tool racecheck python tests/sanitize.py        (also memcheck, initcheck, synccheck)
    compute-sanitizer --tool racecheck python tests/sanitize.py decode_sm90 gemm_sm90        (these families)
    compute-sanitizer --tool racecheck python tests/sanitize.py conversions        (AWQ words, 4-bit blocks)

Results are checked too, so that a run that computed nothing does not pass for a clean one.
"""

from __future__ import annotations

import sys

import torch

import weightonly as wo
from weightonly.heuristics.configs import KernelConfig, TypeConfig, kernel_types
from weightonly.heuristics.cost import cluster_slots
from weightonly.kernels import is_compiled, sm_count

DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16}


def has_room(config: KernelConfig, types: TypeConfig) -> bool:
    """Whether K may be shared as the configuration says: some tiles of gemm_sm90 have room for sums with some types."""
    if config.family != "gemm_sm90" or config.split_k == 1:
        return True
    return config.may_share_k(types.format, types.scale_mode == "channel", types.scale_mode == "group_zeros")


def launch(
    config: KernelConfig, dtype: torch.dtype, format: str, mode: str, group_size: int, generator: torch.Generator
) -> bool:
    """One launch with ragged M, N and, with groups of 32, K; whether the result is the exact one."""
    k, n = (480 if group_size == 32 else 5 * group_size), 72
    if config.family == "decode_sm90" and config.split_k > 1:
        # Three units and a ragged one per cluster: every buffer and barrier is used a second time.
        n = 3 * cluster_slots(sm_count(torch.cuda.current_device()), config.split_k) * config.block_n + 8
    m = min(config.max_m, config.block_m + 1)
    if config.loops:
        # Some CTAs have a second tile.
        n = (sm_count(torch.cuda.current_device()) // 2 + 1) * config.block_n + 8
    groups = 1 if mode == "channel" else k // group_size
    limit = 128 if format == "int8" else 8
    q = torch.randint(-limit, limit, (k, n), generator=generator, dtype=torch.int8)
    scales = torch.full((groups, n), 0.5)
    zeros = torch.randint(-2, 3, (groups, n), generator=generator).float() if mode == "group_zeros" else None
    x = torch.randint(-2, 3, (m, k), generator=generator).float()
    w = q.float() - (0 if zeros is None else zeros.repeat_interleave(k // groups, 0))
    expected = (x @ w * 0.5).to(dtype)
    if format == "code4":
        qweight = wo.preprocess(q + 8, format="code4", code=torch.arange(-8.0, 8.0), layout=config.layout).to("cuda")
    else:
        qweight = wo.preprocess(q, bits=8 if format == "int8" else 4, layout=config.layout).to("cuda")
    x, scales = x.to(dtype).cuda(), scales.to(dtype).cuda()
    zeros = None if zeros is None else zeros.to(dtype).cuda()
    torch.cuda.synchronize()  # from here on the weights are constant
    y = wo.gemm(x, qweight, scales, zeros=zeros, config=config)
    return torch.equal(y.cpu(), expected)


def convert(dtype: torch.dtype, generator: torch.Generator) -> bool:
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


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False  # cuBLAS' sums, too, are to be exact
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    families = set(sys.argv[1:])
    launched = 0
    for config in wo.kernels():
        if families and config.family not in families:
            continue
        for types in kernel_types(config):
            if is_compiled(config, types):
                parts = (1, 2) if config.shares_cluster or config.is_dense else (2,)
                units = -(-512 // config.piece_k) if config.shares_cluster else max(parts)
                # gemm_sm90 has other loops for groups that are longer than a block.
                sizes = (32, 128) if config.family == "gemm_sm90" and types.scale_mode != "channel" else (32,)
                for split in (config.with_split_k(s) for s in parts if s <= min(config.max_split_k, units)):
                    if not has_room(split, types):
                        continue
                    for size in sizes:
                        wo.set_launch_overlap("constant_weights" if launched % 3 == 0 else True)
                        if not launch(split, DTYPES[types.dtype], types.format, types.scale_mode, size, generator):
                            raise SystemExit(f"{split}_{types.name}, groups of {size}: wrong result")
                        launched += 1
    if not families or "conversions" in families:
        for name, dtype in DTYPES.items():
            if not convert(dtype, generator):
                raise SystemExit(f"conversions_{name}: wrong result")
    torch.cuda.synchronize()
    print(f"{launched} kernels launched, all results exact")


if __name__ == "__main__":
    main()
