"""Launches every compiled kernel on a small ragged problem, for compute-sanitizer:

    compute-sanitizer --tool racecheck python tests/sanitize.py        (also memcheck, initcheck, synccheck)
    compute-sanitizer --tool racecheck python tests/sanitize.py decode_sm90 gemm_sm90        (these families)

Results are checked too, so that a run that computed nothing does not pass for a clean one.
"""

from __future__ import annotations

import sys

import torch

import weightonly as wo
from weightonly.heuristics.configs import KernelConfig, kernel_types
from weightonly.heuristics.cost import cluster_slots
from weightonly.kernels import kernel_numbers, sm_count

DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16}


def launch(config: KernelConfig, dtype: torch.dtype, bits: int, mode: str, generator: torch.Generator) -> bool:
    """One launch with ragged M, N and K; whether the result is the exact one."""
    k, n = 480, 72
    if config.family == "decode_sm90" and config.split_k > 1:
        # Three units and a ragged one per cluster: every buffer and barrier is used a second time.
        n = 3 * cluster_slots(sm_count(torch.cuda.current_device()), config.split_k) * config.block_n + 8
    m = min(config.max_m, config.block_m + 1)
    groups = 1 if mode == "channel" else k // 32
    limit = 1 << (bits - 1)
    q = torch.randint(-limit, limit, (k, n), generator=generator, dtype=torch.int8)
    scales = torch.full((groups, n), 0.5)
    zeros = torch.randint(-2, 3, (groups, n), generator=generator).float() if mode == "group_zeros" else None
    x = torch.randint(-2, 3, (m, k), generator=generator).float()
    w = q.float() - (0 if zeros is None else zeros.repeat_interleave(k // groups, 0))
    expected = (x @ w * 0.5).to(dtype)
    qweight = wo.preprocess(q, bits=bits, layout=config.layout).to("cuda")
    y = wo.gemm(
        x.to(dtype).cuda(),
        qweight,
        scales.to(dtype).cuda(),
        zeros=None if zeros is None else zeros.to(dtype).cuda(),
        config=config,
    )
    return torch.equal(y.cpu(), expected)


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    families = set(sys.argv[1:])
    launched = 0
    for config in wo.kernels():
        if families and config.family not in families:
            continue
        for types in kernel_types(config):
            if f"{config.kernel}_{types.name}" in kernel_numbers():
                bits = 4 if types.format == "int4" else 8
                parts = (1, 2) if config.shares_cluster else (2,)
                for split in (config.with_split_k(s) for s in parts if s <= config.max_split_k):
                    if not launch(split, DTYPES[types.dtype], bits, types.scale_mode, generator):
                        raise SystemExit(f"{split}_{types.name}: wrong result")
                    launched += 1
    torch.cuda.synchronize()
    print(f"{launched} kernels launched, all results exact")


if __name__ == "__main__":
    main()
