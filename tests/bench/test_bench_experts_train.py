"""`bench experts-train`: rows of packed and dense experts, with the same gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import weightonly as wo
from weightonly.bench.experts import train

pytest.importorskip("peft")


def test_rows_and_table() -> None:
    frame = train.experts_train(["tiny"], batch=[16], formats=["int4", "nf4"], device="cpu", budget_ms=1)
    assert list(frame["rank"]) == [0, 0, 0, 16, 16, 16]
    assert list(frame["experts"]) == [train.DENSE, "weightonly int4", "weightonly nf4"] * 2
    assert (frame["us"] > 0).all() and frame["peak_mb"].isna().all()
    weights = frame["weights_mb"]
    assert weights[0] == 8 * 3 * 128 * 128 * 2 / 1e6 and weights[1] < 0.3 * weights[0] and weights[3] == weights[0]
    table = train.train_table(frame)
    assert "us / dense" in table and table.count("| tiny") == 6 and "nan | nan" not in table.split("us / dense")[0]


@pytest.mark.parametrize("rank", [0, 4])
def test_gradients_are_those_of_dense_experts(rank: int) -> None:
    device = torch.device("cpu")
    dense = train.dense_experts("tiny", torch.bfloat16, device)
    layer_of_dense = train._Layer(train.dense_experts("tiny", torch.bfloat16, device))
    packed: Any = wo.nn.quantize_model(layer_of_dense, format="int8", search=False)
    x, weights = torch.randn(6, 128, dtype=torch.bfloat16), torch.rand(6, 2)
    ids = torch.tensor([[0, 1], [2, 3], [4, 5], [6, 7], [1, 0], [3, 5]])
    found = []
    for experts in (dense, packed.experts):
        layer = train.with_adapters(experts, rank)
        trained = [p for p in layer.parameters() if p.requires_grad]
        assert len(trained) == (4 if rank else 0)
        for i, p in enumerate(trained):
            p.data.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(i)) * 0.05)
        leaves = [x.clone().requires_grad_(), weights.clone().requires_grad_()]
        y = layer(leaves[0], ids, leaves[1])
        found.append([y, *torch.autograd.grad(y.float().square().sum(), [*leaves, *trained])])
    for ours, theirs in zip(*found, strict=True):
        assert (ours.float() - theirs.float()).norm() < 0.05 * theirs.float().norm()


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match=r"shapes: expected some of mixtral-8x7b, .*, got 'mixtral'"):
        train.experts_train(["mixtral"], device="cpu")


@pytest.mark.gpu
def test_memory_on_a_gpu(cuda_device: torch.device) -> None:
    frame = train.experts_train(["tiny"], batch=[256], ranks=[0, 8], device=cuda_device, budget_ms=20)
    assert (frame["peak_mb"] >= frame["kept_mb"]).all() and (frame["kept_mb"] > 0).all()
