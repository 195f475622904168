"""Cases that train adapters of packed mixtures on several ranks, each with a part of a batch. See parallel_ranks.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from tests.expert_models import make
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import weightonly as wo
import weightonly.hf
from weightonly.hf.lora_experts import LoraExperts

STEPS = 3
LINES = torch.arange(48).view(4, 12) * 5 % 96  # a batch


def adapted(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """A packed mixture with adapters for attention and experts, whose router is trained as it is."""
    torch.manual_seed(1)
    base = wo.nn.quantize_model(make(name).to(dtype), group_size=32)
    targets = ["experts.gate_up_proj", "experts.down_proj"]
    config = LoraConfig(target_modules=["q_proj"], target_parameters=targets, r=4, init_lora_weights=False)
    model = get_peft_model(base, config, autocast_adapter_dtype=False)
    assert any(isinstance(module, LoraExperts) for module in model.modules())
    for parameter_name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.data.mul_(0.2)
        if parameter_name.endswith(("mlp.gate.weight", "mlp.router.weight")):
            parameter.requires_grad_()
    return model


def train(model: Any, lines: torch.Tensor) -> None:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for _ in range(STEPS):
        model(input_ids=lines, labels=lines).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def trained(model: Any) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for name, p in model.named_parameters():
        if p.requires_grad:
            found[name.removeprefix("module.")] = (p.full_tensor() if isinstance(p, DTensor) else p).detach()
    return found


def case(name: str, spread: Callable[[Any, DeviceMesh], Any]) -> Callable[[DeviceMesh], float]:
    def run(mesh: DeviceMesh) -> float:
        """The greatest error of a trained tensor beside one process that has the whole batch, of its change."""
        alone, start = adapted(name), trained(adapted(name))
        model = spread(adapted(name), mesh)
        train(alone, LINES)
        train(model, LINES.chunk(mesh.size())[mesh.get_local_rank()])
        got, expected = trained(model), trained(alone)
        assert got.keys() == expected.keys()
        changes = {key: (expected[key] - start[key]).norm() for key in expected}
        assert all(change > 0 for change in changes.values())
        return max(float((got[key] - expected[key]).norm() / changes[key]) for key in expected)

    return run


def ddp(model: Any, mesh: DeviceMesh) -> Any:
    return DistributedDataParallel(model)


def fsdp(model: Any, mesh: DeviceMesh, **options: Any) -> Any:
    """Every tensor cut among the ranks, the packed bytes of experts, too."""
    for layer in model.base_model.model.model.layers:
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    cut = [p for p in model.parameters() if p.dtype == torch.uint8]
    assert cut and all(isinstance(p, DTensor) and p.to_local().numel() < p.numel() for p in cut)
    return model


def fsdp_bf16(mesh: DeviceMesh) -> None:
    """bf16 packed layers with fp32 adapters under the mixed precision of FSDP2."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = fsdp(adapted("qwen3-moe", torch.bfloat16), mesh, mp_policy=policy)
    before = trained(model)
    train(model, LINES.chunk(mesh.size())[mesh.get_local_rank()])
    assert all(bool((tensor != before[key]).any()) for key, tensor in trained(model).items())


CASES: dict[str, Callable[[DeviceMesh], float | None]] = {
    "DDP, qwen3-moe": case("qwen3-moe", ddp),
    "DDP, gpt-oss": case("gpt-oss", ddp),
    "FSDP2, mixtral": case("mixtral", fsdp),
    "FSDP2, gpt-oss": case("gpt-oss", fsdp),
    "FSDP2, bf16": fsdp_bf16,
}
RANKS = dict.fromkeys(CASES, (2,))
