"""Routing as blocks, each of one expert: what vLLM's `moe_align_block_size` makes for its fused kernels.

    sorted_token_ids       int32 or int64 [P], choices (m * top_k + j for row m of x) sorted by expert; M * top_k in
                           places that pad an expert to whole blocks
    expert_ids             int32 or int64, for each block_size of these the expert, or -1: one of another rank
    num_tokens_post_padded int32 or int64 [1], how many of sorted_token_ids count

Nothing here waits for a GPU, so a CUDA graph can hold the calls.
"""

from __future__ import annotations

import torch

from .device import check_one_device
from .ops.around_experts import _route
from .require import require_dtype, require_int


def ids_of_blocks(
    sorted_token_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    num_tokens_post_padded: torch.Tensor,
    block_size: int,
    tokens: int,
    top_k: int,
) -> torch.Tensor:
    """`topk_ids` of `fused_experts`, int64 [tokens, top_k]: the expert of each choice, -1 for none.

    Args:
        sorted_token_ids: int32 or int64 [P], choices (`m * top_k + j` for row m of x) sorted by expert; `tokens *
            top_k` in places that pad an expert to whole blocks.
        expert_ids: int32 or int64, for each block_size of these the expert, or -1: one of another rank.
        num_tokens_post_padded: int32 or int64 [1], how many of sorted_token_ids count.
        block_size: places of a block.
        tokens: rows of x, M.
        top_k: choices of a row.

    Raises:
        TypeError | ValueError: other tensors and sizes.

    Examples:
        >>> blocks = torch.tensor([0, 2, 1, 2]), torch.tensor([3, 1]), torch.tensor([4])
        >>> ids_of_blocks(*blocks, block_size=2, tokens=1, top_k=2)
        tensor([[3, 1]])
    """
    choices = sorted_token_ids, expert_ids, num_tokens_post_padded
    for name, tensor in zip(("sorted_token_ids", "expert_ids", "num_tokens_post_padded"), choices, strict=True):
        require_dtype(name, tensor, (torch.int32, torch.int64))
    for name, size in (("block_size", block_size), ("tokens", tokens), ("top_k", top_k)):
        require_int(name, size, least=0 if name == "tokens" else 1)
    if sorted_token_ids.dim() != 1:
        raise ValueError(f"sorted_token_ids: expected one dimension, got {list(sorted_token_ids.shape)}")
    places, blocks = sorted_token_ids.shape[0], -(-sorted_token_ids.shape[0] // block_size)
    if expert_ids.dim() != 1 or expert_ids.shape[0] < blocks:
        raise ValueError(
            f"expert_ids: expected one dimension of {blocks} or more, the blocks of {block_size} in {places}, "
            f"got {list(expert_ids.shape)}"
        )
    if num_tokens_post_padded.numel() != 1:
        raise ValueError(f"num_tokens_post_padded: expected one number, got {list(num_tokens_post_padded.shape)}")
    check_one_device(
        sorted_token_ids=sorted_token_ids, expert_ids=expert_ids, num_tokens_post_padded=num_tokens_post_padded
    )
    place = torch.arange(places, device=sorted_token_ids.device)  # (P)
    expert = expert_ids[place // block_size].long()  # (P)
    choice = sorted_token_ids.long()  # (P)
    none = tokens * top_k
    counts = (place < num_tokens_post_padded) & (choice >= 0) & (choice < none)
    # Places that do not count write to one place more, which is cut off.
    ids = expert.new_full((none + 1,), -1)
    ids.scatter_(0, torch.where(counts, choice, none), expert)
    return ids[:none].view(tokens, top_k)


def rows_of_blocks(
    sorted_token_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    num_tokens_post_padded: torch.Tensor,
    block_size: int,
    tokens: int,
    top_k: int,
    experts: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `grouped_gemm` takes, of the blocks that `ids_of_blocks` takes.

    Rows are `x[order // top_k]`, without padding; within an expert they are in the order of x. On a GPU rows after the
    last end are of no expert. On a CPU `grouped_gemm` wants `offs[-1]` rows.

    Args:
        sorted_token_ids: as for `ids_of_blocks`.
        expert_ids: as for `ids_of_blocks`.
        num_tokens_post_padded: as for `ids_of_blocks`.
        block_size: as for `ids_of_blocks`.
        tokens: as for `ids_of_blocks`.
        top_k: as for `ids_of_blocks`.
        experts: how many there are.

    Returns:
        (order, offs): choices by expert, int64 [tokens * top_k], those without one last; int32 [experts].

    Raises:
        TypeError | ValueError: as for `ids_of_blocks`; on the CPU also experts from `experts` + 1 on.

    Examples:
        >>> rows_of_blocks(torch.tensor([0, 2, 1, 2]), torch.tensor([3, 1]), torch.tensor([4]), 2, 1, 2, experts=4)
        (tensor([1, 0]), tensor([0, 1, 1, 2], dtype=torch.int32))
    """
    require_int("experts", experts, least=1)
    ids = ids_of_blocks(sorted_token_ids, expert_ids, num_tokens_post_padded, block_size, tokens, top_k)
    return _route(ids, experts)
