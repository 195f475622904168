"""Routing as blocks of one expert each (vLLM's moe_align_block_size), turned into ids, and into rows and ends."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.expert_cases import exact_stack

import weightonly as wo
from weightonly.blocks import ids_of_blocks, rows_of_blocks

GARBAGE = 123_456
"""In places that vLLM leaves as they were."""


def align(ids: torch.Tensor, experts: int, block_size: int, shuffle: torch.Generator) -> dict[str, Any]:
    """The blocks of ids [M, top_k], in plain Python. Experts of -1 and `experts` have blocks of -1."""
    choices = ids.flatten().tolist()
    places: list[int] = []
    blocks: list[int] = []
    for expert in [-1, *range(experts)]:
        of_expert = [i for i, id in enumerate(choices) if (id if id < experts else -1) == expert]
        of_expert = [of_expert[i] for i in torch.randperm(len(of_expert), generator=shuffle).tolist()]
        count = -(-len(of_expert) // block_size)
        places += of_expert + [len(choices)] * (count * block_size - len(of_expert))
        blocks += [expert] * count
    used = len(places)
    places += [0] * (2 * block_size + 3)  # not counted, though they are ids of choices
    blocks += [GARBAGE % experts] * 5
    return {
        "sorted_token_ids": torch.tensor(places, dtype=torch.int32),
        "expert_ids": torch.tensor(blocks, dtype=torch.int32),
        "num_tokens_post_padded": torch.tensor([used], dtype=torch.int32),
        "block_size": block_size,
        "tokens": ids.shape[0],
        "top_k": ids.shape[1],
    }


@pytest.mark.parametrize("block_size", [1, 8, 64])
@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(1, 8, 2), (40, 3, 1), (33, 64, 8), (0, 4, 2)])
def test_ids_and_rows(tokens: int, experts: int, top_k: int, block_size: int, generator: torch.Generator) -> None:
    ids = torch.randint(-1, experts, (tokens, top_k), generator=generator)
    blocks = align(ids, experts, block_size, generator)
    assert torch.equal(ids_of_blocks(**blocks), ids)
    order, offs = rows_of_blocks(**blocks, experts=experts)
    flat = ids.flatten().tolist()
    wanted = [i for e in [*range(experts), -1] for i, id in enumerate(flat) if id == e]
    assert order.tolist() == wanted
    assert offs.dtype == torch.int32 and offs.tolist() == [sum(0 <= id <= e for id in flat) for e in range(experts)]


def test_products_of_blocks(generator: torch.Generator) -> None:
    tokens, experts, top_k = 12, 5, 2
    w = exact_stack(experts, 64, 96, generator)
    x = torch.randint(-2, 3, (tokens, 64), generator=generator).float()
    ids = torch.stack([torch.randperm(experts, generator=generator)[:top_k] for _ in range(tokens)])
    order, offs = rows_of_blocks(**align(ids, experts, 16, generator), experts=experts)
    y = wo.grouped_gemm(x[order // top_k], w.qweight, w.scales, offs, zeros=w.zeros)
    for row, choice in zip(y, order.tolist(), strict=True):
        expert = int(ids.flatten()[choice])
        assert torch.equal(row.double(), x[choice // top_k].double() @ w.w64[expert])


def test_a_layer_of_experts_takes_the_ids(generator: torch.Generator) -> None:
    w13, w2 = (exact_stack(3, k, n, generator) for k, n in ((64, 128), (64, 64)))
    x = torch.randn(7, 64, generator=generator)
    ids = torch.stack([torch.randperm(3, generator=generator)[:2] for _ in range(7)])
    weights = torch.rand(7, 2, generator=generator)
    layer = ((w13.qweight, w13.scales, w13.zeros), (w2.qweight, w2.scales, w2.zeros))
    given = ids_of_blocks(**align(ids, 3, 4, generator))
    assert torch.equal(wo.fused_experts(x, *layer, given, weights), wo.fused_experts(x, *layer, ids, weights))


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"sorted_token_ids": [1, 2]}, TypeError, "sorted_token_ids: expected a tensor, got list"),
        ({"expert_ids": torch.zeros(9)}, TypeError, "expert_ids: expected dtype torch.int32 or torch.int64, got"),
        ({"sorted_token_ids": torch.zeros(2, 2).int()}, ValueError, "sorted_token_ids: expected one dimension, got"),
        ({"expert_ids": torch.zeros(1).int()}, ValueError, r"expert_ids: expected one dimension of \d+ or more, the"),
        ({"num_tokens_post_padded": torch.zeros(2).int()}, ValueError, "num_tokens_post_padded: expected one number"),
        ({"block_size": 0}, ValueError, "block_size: expected at least 1, got 0"),
        ({"tokens": True}, TypeError, "tokens: expected an int, got bool"),
        ({"top_k": 0}, ValueError, "top_k: expected at least 1, got 0"),
        ({"experts": 0}, ValueError, "experts: expected at least 1, got 0"),
        ({"expert_ids": torch.zeros(99, device="meta").int()}, ValueError, "expert_ids: expected on cpu as sorted_tok"),
    ],
    ids=lambda value: str(value)[:50] if isinstance(value, str) else "",
)
def test_what_is_refused(
    changed: dict[str, Any], error: type[Exception], message: str, generator: torch.Generator
) -> None:
    blocks = align(torch.tensor([[0, 1], [2, -1]]), 3, 4, generator) | {"experts": 3} | changed
    with pytest.raises(error, match=message):
        rows_of_blocks(**blocks)


def test_other_experts_are_refused(generator: torch.Generator) -> None:
    blocks = align(torch.tensor([[0, 1], [2, 7]]), 8, 4, generator)
    with pytest.raises(ValueError, match=r"topk_ids: expected -1..3 for 3 experts, got numbers in 0..7"):
        rows_of_blocks(**blocks, experts=3)


@pytest.mark.gpu
def test_a_graph_holds_both(cuda_device: torch.device, generator: torch.Generator) -> None:
    """Nothing waits for the GPU: capture would fail."""
    given: dict[str, Any] = {
        "sorted_token_ids": torch.zeros(128, dtype=torch.int32, device=cuda_device),
        "expert_ids": torch.zeros(16, dtype=torch.int32, device=cuda_device),
        "num_tokens_post_padded": torch.zeros(1, dtype=torch.int32, device=cuda_device),
        "block_size": 8,
        "tokens": 10,
        "top_k": 2,
    }
    rows_of_blocks(**given, experts=6)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        order, offs = rows_of_blocks(**given, experts=6)
    for _ in range(2):
        blocks = align(torch.randint(-1, 6, (10, 2), generator=generator), 6, 8, generator)
        for name, value in blocks.items():
            if isinstance(value, torch.Tensor):
                given[name][: len(value)].copy_(value)
        graph.replay()
        wanted, ends = rows_of_blocks(**blocks, experts=6)
        assert torch.equal(order.cpu(), wanted) and torch.equal(offs.cpu(), ends)
