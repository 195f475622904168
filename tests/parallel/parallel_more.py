"""Cases of parallel experts, of gradients, of torch.compile and of checkpoints. See parallel_ranks.py."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.parallel.parallel_linear import KINDS, PLAN, Block, act_order, error, linear, mine, tokens
from torch.distributed import checkpoint
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel as TorchColwiseParallel
from torch.distributed.tensor.parallel import RowwiseParallel as TorchRowwiseParallel
from torch.distributed.tensor.parallel import parallelize_module

import weightonly as wo
from weightonly.parallel import ColwiseParallel, ExpertParallel, ExpertTensorParallel, RowwiseParallel

if find_spec("peft"):
    import weightonly.hf  # makes the layers known to PEFT

E, H, INNER, M, TOP_K = 6, 128, 256, 10, 2


def experts(format: str = "int4", arch: int = 90, has_bias: bool = False) -> wo.nn.Experts:
    """The same experts on every rank; scales are fp32."""
    torch.manual_seed(5)

    def layer(k: int, n: int) -> wo.nn.Linear:
        dense = torch.nn.Linear(k, n, bias=has_bias)
        return wo.nn.Linear.from_linear(dense, format=format, arch=arch, group_size=64, dtype=torch.float32)

    def part(k: int, n: int) -> Any:
        made = layer(k, n)
        return wo.formats.QuantizedLayer("", made.packed, made.scales, made.zeros, made.bias)

    return wo.nn.Experts.from_quantized([part(H, 2 * INNER) for _ in range(E)], [part(INNER, H) for _ in range(E)])


def routed() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(M, H, generator=generator)
    weights, ids = torch.randn(M, E, generator=generator).softmax(-1).topk(TOP_K)
    return x, ids, weights


def expert_layers(mesh: DeviceMesh, style: Callable[..., Any], **options: Any) -> float:
    """y, and the gradients of x and of the weights of the experts."""
    whole, layer = experts(**options), experts(**options)
    parallelize_module(layer, mesh, style())
    tensors = [routed(), routed()]
    for x, _, weights in tensors:
        x.requires_grad_()
        weights.requires_grad_()
    expected, got = whole(*tensors[0]), layer(*tensors[1])
    expected.square().sum().backward()
    got.square().sum().backward()
    errors = [error(got.detach(), expected.detach())]
    for i in (0, 2):
        errors.append(error(grad(tensors[1][i]), grad(tensors[0][i])))
    return max(errors)


def expert_layouts(mesh: DeviceMesh) -> float:
    """Rows cut over the ranks, as DTensors and not."""
    errors = []
    whole = experts()
    with torch.no_grad():
        expected = whole(*routed())
        for style in (ExpertParallel, ExpertTensorParallel):
            layer = copy.deepcopy(whole)
            parallelize_module(layer, mesh, style(input_layouts=Shard(0), output_layouts=Shard(0)))
            sent = [distribute_tensor(tensor, mesh, [Shard(0)], src_data_rank=None) for tensor in routed()]
            errors.append(error(layer(*sent), mine(expected, mesh, 0)))
            layer = copy.deepcopy(whole)
            parallelize_module(layer, mesh, style(use_local_output=False))
            errors.append(error(layer(*routed()).full_tensor(), expected))
    return max(errors)


def experts_of_transformers(mesh: DeviceMesh) -> float:
    """gpt-oss alternates gate and up, Nemotron has no gate; on 4 ranks the last has no experts."""
    from tests import expert_models
    from transformers import NemotronHConfig
    from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts

    from weightonly.nn.recipe import Recipe

    nemotron = NemotronHConfig(hidden_size=64, moe_intermediate_size=96, n_routed_experts=5)
    torch.manual_seed(4)
    without_gate = NemotronHExperts(nemotron)
    for parameter in without_gate.parameters():
        parameter.data.normal_()
    errors = []
    for module in (expert_models.make("gpt-oss").model.layers[0].mlp.experts, without_gate):
        whole = wo.nn.Experts.from_module(module, Recipe("int8", -1, True, torch.float32, 90))
        generator = torch.Generator().manual_seed(2)
        x = torch.randn(M, 64, generator=generator)
        weights, ids = torch.randn(M, 5, generator=generator).softmax(-1).topk(TOP_K)
        with torch.no_grad():
            expected = whole(x, ids, weights)
            for style in (ExpertParallel, ExpertTensorParallel):
                layer = copy.deepcopy(whole)
                parallelize_module(layer, mesh, style())
                errors.append(error(layer(x, ids, weights), expected))
    return max(errors)


def refused(mesh: DeviceMesh) -> None:
    """Modules and cuts that the styles of experts do not take."""
    layer = experts()
    with pytest.raises(TypeError, match=r"module: expected weightonly\.nn\.Experts, got Linear"):
        ExpertParallel()._apply(linear(), mesh)
    down = layer.down_proj
    perm = torch.arange(INNER, dtype=torch.int32).flip(0).expand(E, -1).contiguous()
    weight = wo.PackedWeight(down.packed.data, **down.packed.fields | {"has_perm": True})
    ordered = wo.nn.GroupedLinear.from_quantized(weight, down.scales, perm=perm)
    with pytest.raises(ValueError, match="module: expected down_proj without act-order"):
        ExpertTensorParallel()._apply(wo.nn.Experts(layer.gate_up_proj, ordered, layer.between), mesh)
    first = wo.nn.GroupedLinear(E, H, 192, bias=False, group_size=64)
    second = wo.nn.GroupedLinear(E, 96, H, bias=False, group_size=32)
    if mesh.size() == 4:  # 24 rows
        with pytest.raises(ValueError, match="in_features: expected a K that 4 ranks can cut") as failure:
            ExpertTensorParallel()._apply(wo.nn.Experts(first, second, layer.between), mesh)
        assert "got 96" in str(failure.value)
    parallelize_module(layer, mesh, ExpertParallel())
    with pytest.raises(ValueError, match="module: expected experts that are not cut yet, got ParallelExperts"):
        ExpertParallel()._apply(layer, mesh)


def experts_of_the_first_rank(mesh: DeviceMesh) -> float:
    whole, layer = experts(), experts()
    if mesh.get_local_rank():
        layer.down_proj.scales.data.zero_()
    parallelize_module(layer, mesh, ExpertParallel())
    with torch.no_grad():
        return error(layer(*routed()), whole(*routed()))


def grad(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None and tensor.grad is not None
    return tensor.grad


def bias_of(layer: wo.nn.Linear) -> torch.Tensor:
    """The bias of a layer, to be trained."""
    assert layer.bias is not None
    return layer.bias.requires_grad_()


def gradients(mesh: DeviceMesh) -> float:
    """Of x and of the biases, through a column-wise and a row-wise layer."""
    whole, block = Block(), Block()
    parallelize_module(block, mesh, {name: style() for name, style in PLAN.items()})
    up, down = (bias_of(whole.up), bias_of(block.up)), (bias_of(whole.down), bias_of(block.down))
    xs = [tokens(256).requires_grad_() for _ in range(2)]
    for model, x in zip((whole, block), xs, strict=True):
        model(x).square().sum().backward()
    pairs = [(grad(xs[1]), grad(xs[0])), (grad(down[1]), grad(down[0])), (grad(up[1]), mine(grad(up[0]), mesh))]
    return max(error(got, expected) for got, expected in pairs)


def sequence_gradients(mesh: DeviceMesh) -> float:
    """x and y cut along the sequence."""
    whole, block = Block(), Block()
    plan = {"up": ColwiseParallel(input_layouts=Shard(1)), "down": RowwiseParallel(output_layouts=Shard(1))}
    parallelize_module(block, mesh, plan)
    biases = bias_of(whole.down), bias_of(block.down)
    x = tokens(256).requires_grad_()
    part = mine(tokens(256), mesh, 1).contiguous().requires_grad_()
    whole.down(whole.up(x)).square().sum().backward()
    block.down(block.up(part)).square().sum().backward()
    return max(error(grad(part), mine(grad(x), mesh, 1)), error(grad(biases[1]), grad(biases[0])))


def compiled(mesh: DeviceMesh) -> float:
    """One graph, forwards and backwards."""
    errors = []
    block = Block()
    parallelize_module(block, mesh, {name: style() for name, style in PLAN.items()})
    ordered = act_order(256, 128)
    parallelize_module(ordered, mesh, RowwiseParallel(input_layouts=Replicate()))
    for model in (block, ordered):
        torch._dynamo.reset()
        graph = torch.compile(model, backend="aot_eager", fullgraph=True)
        with torch.no_grad():
            errors.append(error(graph(tokens(256)), model(tokens(256))))
        xs = [tokens(256).requires_grad_() for _ in range(2)]
        for call, x in zip((graph, model), xs, strict=True):
            call(x).square().sum().backward()
        assert xs[0].grad is not None and xs[1].grad is not None
        errors.append(error(xs[0].grad, xs[1].grad))
    return max(errors)


def saved(mesh: DeviceMesh) -> None:
    """torch.distributed.checkpoint: all ranks save, all ranks load; even cuts load into a whole model, too."""
    warnings.simplefilter("ignore")  # torch tells what a later version will do
    for number, (make, plan) in enumerate(
        [
            (partial(linear, 512, 512, **KINDS["int4 tiled zeros"]), ColwiseParallel),
            (partial(linear, 512, 512, **KINDS["int4 tiled zeros"]), RowwiseParallel),
            (partial(linear, 512, 512, **KINDS["int8 interleaved"]), ColwiseParallel),
            (partial(act_order, 512, 512), RowwiseParallel),
            (partial(linear, 768, 100, group_size=192), ColwiseParallel),
            (partial(linear, 768, 100, group_size=192), RowwiseParallel),
        ]
    ):
        folder = Path.cwd() / f"checkpoint_{mesh.size()}_{number}"
        layer, again, whole = make(), make(), make()
        for each in (layer, again):
            parallelize_module(each, mesh, plan())
        state = layer.state_dict()
        checkpoint.save(state, checkpoint_id=folder)
        for tensor in (*again.parameters(), *whole.parameters()):
            tensor.data.zero_()
        loaded = again.state_dict()
        checkpoint.load(loaded, checkpoint_id=folder)
        again.load_state_dict(loaded)
        for name, tensor in layer.named_parameters():
            assert torch.equal(tensor, again.get_parameter(name)), (number, name)
        with torch.no_grad():
            x = tokens(make().in_features)
            x = x if plan is ColwiseParallel else mine(x, mesh)
            if layer.perm is None or plan is ColwiseParallel:
                assert torch.equal(layer(x), again(x))
        if number < 4:
            loaded = whole.state_dict()
            checkpoint.load(loaded, checkpoint_id=folder)
            whole.load_state_dict(loaded)
            expected = make().state_dict()
            for name, tensor in whole.state_dict().items():
                assert torch.equal(tensor, expected[name]), (number, name)


def lora(mesh: DeviceMesh) -> float:
    """Adapters first, then one plan for base layers and adapters: steps of training are those of one process."""
    import peft

    class Mlp(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = linear(256, 512), linear(512, 256)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(torch.nn.functional.silu(self.up(x)))

    def adapted() -> Any:
        torch.manual_seed(11)
        config = peft.LoraConfig(r=4, target_modules=["up", "down"], init_lora_weights=False)
        return peft.get_peft_model(Mlp(), config)

    plan = {
        "up.base_layer": ColwiseParallel(),
        "up.lora_B.default": TorchColwiseParallel(),
        "down.base_layer": RowwiseParallel(),
        "down.lora_A.default": TorchRowwiseParallel(),
    }
    whole, model = adapted(), adapted()
    parallelize_module(model.base_model.model, mesh, plan)
    x = tokens(256)
    losses: list[list[torch.Tensor]] = []
    for each in (whole, model):
        optimizer = torch.optim.SGD([p for p in each.parameters() if p.requires_grad], lr=0.01)
        losses.append([])
        for _ in range(3):
            loss = each(x).square().mean()
            losses[-1].append(loss.detach())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert losses[0][0] > losses[0][-1]
    return error(torch.stack(losses[1]), torch.stack(losses[0]))


def experts_updated(mesh: DeviceMesh) -> None:
    """Each rank takes its experts of dense weights of all; the last of 4 ranks has none. Parts of each are refused."""
    torch.manual_seed(6)
    weights = torch.randn(E, 2 * INNER, H), torch.randn(E, H, INNER)
    biases = torch.randn(E, 2 * INNER), torch.randn(E, H)
    layer, expected, cut = (experts(has_bias=True) for _ in range(3))
    expected.update_(*weights, *biases)
    for each in (layer, expected):
        parallelize_module(each, mesh, ExpertParallel(), src_data_rank=None)
    with pytest.raises(ValueError, match=rf"down: expected {E} experts, got \[{E - 1}, {H}, {INNER}\]"):
        layer.update_(weights[0], weights[1][:-1])
    layer.update_(*weights, *biases)
    for name, tensor in layer.named_parameters():
        assert torch.equal(tensor, expected.get_parameter(name)), name
    parallelize_module(cut, mesh, ExpertTensorParallel())
    with pytest.raises(ValueError, match="first: expected whole experts on each rank"):
        cut.update_(*weights, *biases)


CASES: dict[str, Callable[[DeviceMesh], float | None]] = {
    **{
        f"{name}, {format} for sm{arch}": partial(expert_layers, style=style, format=format, arch=arch, has_bias=bias)
        for name, style in (("expert parallel", ExpertParallel), ("tensor parallel experts", ExpertTensorParallel))
        for format, arch, bias in (("int4", 90, True), ("int8", 80, False), ("nf4", 90, False))
    },
    "experts, layouts of x and y": expert_layouts,
    **({"experts of transformers": experts_of_transformers} if find_spec("transformers") else {}),
    "experts that are refused": refused,
    "experts of the first rank": experts_of_the_first_rank,
    "experts that are updated": experts_updated,
    "gradients": gradients,
    "gradients, sequence parallel": sequence_gradients,
    "torch.compile": compiled,
    "torch.distributed.checkpoint": saved,
    **({"LoRA": lora} if find_spec("peft") else {}),
}
_FEW = ("experts", "expert parallel, int4", "tensor parallel experts, int4", "gradients", "torch.distributed")
RANKS = {name: (2, 4) if name.startswith(_FEW) else (2,) for name in CASES}
