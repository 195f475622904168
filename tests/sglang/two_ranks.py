"""One of two ranks of SGLang, on the CPU: `python -m tests.sglang.two_ranks RANK FOLDER SPLIT SEED`.

SPLIT: "experts", where each rank has some of a layer's, or "tensors", where each has a part of every weight. Writes
what its layers give to FOLDER/RANK.pt.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt.distributed import init_distributed_environment, initialize_model_parallel
from sglang.srt.layers.linear import ColumnParallelLinear, RowParallelLinear
from sglang.srt.layers.moe.token_dispatcher import DeepEPDispatcher, standard
from sglang.srt.layers.moe.topk import PackedTopKOutput
from sglang.srt.layers.quantization import get_quantization_config
from sglang.srt.runtime_context import get_context, get_parallel
from tests import quantized_cases as cases

from weightonly.sglang_experts import Stored

from . import test_sglang as linear
from . import test_sglang_experts as experts

EXPERTS = 4
Case = tuple[str, int, bool, int]  # method, bits, whether there are zero points, rows of a group
CASES: tuple[Case, ...] = (
    ("gptq", 4, False, 64),
    ("gptq", 4, False, 32),
    ("gptq", 8, False, -1),
    ("awq", 4, True, 32),
    ("compressed-tensors", 4, False, 64),
    ("compressed-tensors", 8, False, -1),
)
CUT = 128  # rows of a group, which two ranks of tensor parallelism cut
LINEARS = ((ColumnParallelLinear, 256, 384), (RowParallelLinear, 256, 192))


def stack(case: Case, seed: int) -> experts.Stack:
    generator = torch.Generator().manual_seed(seed)
    full = experts.stack(case[1], case[3], case[2], generator, torch.float16)
    return {name: weights[:EXPERTS] for name, weights in full.items()}


def rows(seed: int) -> tuple[torch.Tensor, Any]:
    """Some choose no expert, or none of the first rank's."""
    x, topk = experts.inputs(torch.Generator().manual_seed(seed), torch.float16)
    topk.topk_ids.remainder_(EXPERTS)
    topk.topk_ids[2] = torch.tensor([-1, EXPERTS - 1])
    topk.topk_ids[3] = -1
    return x, topk


def weight(case: Case, k: int, n: int, seed: int) -> cases.Weight:
    generator = torch.Generator().manual_seed(seed)
    return cases.weight(generator, k, n, bits=case[1], group=case[3], zeros=case[2], dtype=torch.float16)


def run_experts(case: Case, seed: int) -> torch.Tensor:
    method, bits, zeros, group = case
    layer = experts.build(method, bits, group, zeros, torch.float16, num_experts=EXPERTS, reduce_results=True)
    experts.load(layer, method, stack(case, seed))
    assert hasattr(layer, "weightonly")
    return layer(*rows(seed))


def error_of(call: Callable[..., Any], *arguments: Any) -> str:
    """Of a ValueError; "": there was none."""
    try:
        call(*arguments)
    except ValueError as error:
        return str(error)
    return ""


def left_to_sglang() -> dict[str, str]:
    """Why a layer is, by kinds of expert parallelism; "": the kind that is ours."""
    layer = experts.build("gptq", 4, 64, False, torch.float16, num_experts=EXPERTS)
    check = Stored.gptq(layer.scheme.kernel).check
    found = {"": error_of(check, layer)}
    with get_context().override_server_args(enable_eplb=True):
        found["EPLB"] = error_of(check, layer)
    layer.dispatcher.skip_local_expert_mapping = True
    found["ids"] = error_of(check, layer)
    layer.dispatcher = DeepEPDispatcher.__new__(DeepEPDispatcher)
    found["all-to-all"] = error_of(check, layer)
    return found


def error_of_cut_groups(method: str) -> str:
    """Not of AWQ, whose layers SGLang does not give to Marlin then."""
    layer = experts.build(method, 4, CUT, False, torch.float16, num_experts=EXPERTS)
    kernel = layer.scheme if method == "compressed-tensors" else layer.scheme.kernel
    return error_of(getattr(Stored, method.replace("-", "_"))(kernel).check, layer)


def error_of_packed_ids(seed: int) -> str:
    x, topk = rows(seed)
    layer = experts.build("gptq", 4, 64, False, torch.float16, num_experts=EXPERTS)
    experts.load(layer, "gptq", stack(CASES[0], seed))
    return error_of(layer, x, PackedTopKOutput(topk.topk_ids << 16, topk.router_logits))


def run_linear(cls: type[Any], case: Case, k: int, n: int, seed: int) -> torch.Tensor:
    """The whole result on each rank."""
    method, bits, zeros, group = case
    of_method = get_quantization_config(linear.CONFIGS[method]).from_config(cases.config(method, bits, group, zeros))
    more = {"gather_output": True} if cls is ColumnParallelLinear else {"input_is_parallel": False}
    prefix = "model.layers.0.mlp.up_proj"
    layer = cls(k, n, bias=False, params_dtype=torch.float16, quant_config=of_method, prefix=prefix, **more)
    linear.load(layer, cases.tensors(method, weight(case, k, n, seed)))
    assert hasattr(layer, "weightonly")
    x = torch.randn(5, k, generator=torch.Generator().manual_seed(seed + 1)).half()
    return layer(x)[0]


def main(rank: int, folder: Path, split: str, seed: int) -> None:
    patch = pytest.MonkeyPatch()
    linear.say_hopper(patch)
    linear.apply_hooks(patch)
    patch.setattr(standard, "get_device", lambda: "cpu")
    ep = 2 if split == "experts" else 1
    widths = {"tp_size": 2, "moe_ep_size": ep, "moe_tp_size": 2 // ep, "attn_tp_size": 2}
    ranks = {"tp_rank": rank, "attn_tp_rank": rank, "attn_dp_rank": 0}
    ranks |= {"moe_ep_rank": rank if ep == 2 else 0, "moe_tp_rank": rank if ep == 1 else 0}
    with get_context().override_server_args(), get_parallel().override(**widths, **ranks):
        init_distributed_environment(2, rank, f"file://{folder / 'rendezvous'}", rank, backend="gloo")
        initialize_model_parallel()
        found: dict[Any, Any] = {("experts", case): run_experts(case, seed) for case in CASES}
        if split == "experts":
            found |= {"left": left_to_sglang(), "packed": error_of_packed_ids(seed)}
        else:
            found["left"] = [error_of_cut_groups(method) for method in ("gptq", "compressed-tensors")]
            for cls, k, n in LINEARS:
                found |= {(cls.__name__, case): run_linear(cls, case, k, n, seed) for case in CASES}
    torch.save(found, folder / f"{rank}.pt")


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
