"""Cases of parallel linear layers: each compares what the ranks compute with one process. See parallel_ranks.py."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module

import weightonly as wo
from weightonly.heuristics.legal import computes_groups_of_16
from weightonly.parallel import ColwiseLinear, ColwiseParallel, ParallelLinear, RowwiseLinear, RowwiseParallel
from weightonly.parallel.linear import DENSE, OWN, PACKED, WHOLE
from weightonly.parallel.ranges import chunk, columns_of

K, N, M = 512, 384, 6

KINDS: dict[str, dict[str, Any]] = {
    "int4 tiled": {"format": "int4", "arch": 90},
    "int4 tiled zeros": {"format": "int4", "arch": 90, "symmetric": False},
    "int4 interleaved": {"format": "int4", "arch": 80},
    "int4 row_major zeros": {"format": "int4", "arch": 70, "symmetric": False},
    "int8 tiled": {"format": "int8", "arch": 90},
    "int8 interleaved": {"format": "int8", "arch": 80},
    "int8 row_major": {"format": "int8", "arch": 70},
    "nf4 tiled": {"format": "nf4", "arch": 90},
}
"""Name -> arguments of `Linear.from_linear`."""


def linear(k: int = K, n: int = N, bias: bool = True, activation: str | None = None, **kind: Any) -> wo.nn.Linear:
    """The same layer on every rank; its scales are fp32."""
    torch.manual_seed(k + n)
    dense = torch.nn.Linear(k, n, bias=bias)
    arguments: dict[str, Any] = {"format": "int4", "arch": 90, "group_size": 64} | kind
    return wo.nn.Linear.from_linear(dense, dtype=torch.float32, activation=activation, **arguments)


def act_order(k: int = K, n: int = N) -> wo.nn.Linear:
    """A layer whose rows are in act-order."""
    layer = linear(k, n)
    perm = torch.randperm(k, generator=torch.Generator().manual_seed(1)).int()
    fields = layer.packed.fields | {"has_perm": True}
    weight = wo.PackedWeight(layer.packed.data, **fields)
    return wo.nn.Linear.from_quantized(weight, layer.scales, layer.zeros, layer.bias, perm=perm)


def tokens(k: int = K, shape: tuple[int, ...] = (2, 8)) -> torch.Tensor:
    return torch.randn(*shape, k, generator=torch.Generator().manual_seed(7))


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """The greatest difference, in units of the greatest number."""
    assert got.shape == expected.shape, (got.shape, expected.shape)
    if not expected.numel():
        return 0.0
    return float((got - expected).abs().max() / expected.abs().max().clamp_min(1e-30))


def mine(y: torch.Tensor, mesh: DeviceMesh, dim: int = -1) -> torch.Tensor:
    """This rank's chunk of a tensor that all have."""
    begin, end = chunk(y.shape[dim], mesh.size(), mesh.get_local_rank())
    return y.narrow(dim, begin, end - begin)


def colwise(mesh: DeviceMesh, make: Callable[[], wo.nn.Linear]) -> float:
    layer = make()
    x = tokens(layer.in_features)
    with torch.no_grad():
        expected = layer(x)
        parallelize_module(layer, mesh, ColwiseParallel())
        assert isinstance(layer, ColwiseLinear)
        return error(layer(x), mine(expected, mesh))


def rowwise(mesh: DeviceMesh, make: Callable[[], wo.nn.Linear], input: Any = None) -> float:
    layer = make()
    x = tokens(layer.in_features)
    with torch.no_grad():
        expected = layer(x)
        parallelize_module(layer, mesh, RowwiseParallel(input_layouts=input))
        assert isinstance(layer, RowwiseLinear)
        return error(layer(x if input == Replicate() else mine(x, mesh)), expected)


def same_numbers(mesh: DeviceMesh, make: Callable[[], wo.nn.Linear]) -> None:
    """A part has the numbers of the whole, and its bytes are those of packing it alone."""
    whole = make()
    w = whole.dequantize()  # [K, N]
    layer = make()
    ColwiseParallel()._apply(layer, mesh)
    assert torch.equal(layer.dequantize(), mine(w, mesh))
    q = mine(wo.unpack(whole.packed), mesh)
    if q.numel():
        packed = wo.preprocess(q, bits=whole.packed.bits, layout=whole.layout, format=whole.format)
        assert torch.equal(layer.packed.data, packed.data)
    layer = make()
    RowwiseParallel()._apply(layer, mesh)
    assert torch.equal(layer.dequantize(), mine(w, mesh, 0))
    assert layer.qweight.untyped_storage().nbytes() in (layer.qweight.numel(), whole.qweight.numel())


def layouts(mesh: DeviceMesh) -> float:
    """Everything that torch's styles take: x and y replicated, cut along columns or along the sequence, as DTensors."""
    x = tokens()
    errors = []
    whole = linear(activation="gelu")
    with torch.no_grad():
        expected = whole(x)
        for style, natural in ((ColwiseParallel, Replicate()), (RowwiseParallel, Shard(-1))):
            for incoming in (natural, Replicate(), Shard(-1), Shard(1)):
                for outgoing in (Replicate(), Shard(-1), Shard(1)):
                    for is_local in (True, False):
                        layer = copy.deepcopy(whole)
                        plan = style(input_layouts=incoming, output_layouts=outgoing, use_local_output=is_local)
                        parallelize_module(layer, mesh, plan)
                        sent = distribute_tensor(x, mesh, [incoming], src_data_rank=None)
                        got = [layer(sent), layer(sent.to_local())]
                        for y in got:
                            assert isinstance(y, DTensor) is not is_local
                            y = y.to_local() if isinstance(y, DTensor) else y
                            part = mine(expected, mesh, outgoing.dim) if isinstance(outgoing, Shard) else expected
                            errors.append(error(y, part))
    return max(errors)


def fused(mesh: DeviceMesh) -> float:
    """q, k and v in one layer: a rank has its heads of each."""
    parts, errors = (256, 64, 64), []
    for kind in KINDS.values():
        layer = linear(**kind)
        x = tokens()
        with torch.no_grad():
            expected = layer(x).split(parts, -1)
            parallelize_module(layer, mesh, ColwiseParallel(parts=parts))
            errors.append(error(layer(x), torch.cat([mine(y, mesh) for y in expected], -1)))
    return max(errors)


def cut_groups(mesh: DeviceMesh) -> float:
    """A cut inside of a group: smaller groups, the same numbers."""
    kinds = ("int4 tiled", "int4 interleaved", "int8 row_major")
    errors = [rowwise(mesh, partial(linear, 96, 64, group_size=96))]  # inside of the one group: any cut
    for (k, group), kind in zip(((768, 384), (768, 192), (768, -1)), kinds, strict=True):
        make = partial(linear, k, 64, **KINDS[kind] | {"group_size": group})
        same_numbers(mesh, make)
        errors.append(rowwise(mesh, make))
    return max(errors)


def refused(mesh: DeviceMesh) -> None:
    """A K whose cut leaves no groups: an error that names the next one, and that K works."""
    ranks = mesh.size()
    if ranks == 1:
        return
    k = 64 * (ranks + 1)
    layer = linear(k, 64)
    try:
        RowwiseParallel()._apply(layer, mesh)
    except ValueError as failure:
        message = str(failure)
    else:
        assert (-(-k // ranks)) % (16 if computes_groups_of_16() else 32) == 0, "expected an error"
        return
    assert type(layer) is wo.nn.Linear
    works = int(message.split("the next one is ")[1].split(",")[0])
    assert works > k and f"got {k}" in message, message
    assert rowwise(mesh, partial(linear, works, 64)) < 1e-5


def nothing(mesh: DeviceMesh) -> float:
    """More ranks than rows or columns."""
    errors = []
    for kind in ("int4 tiled", "int8 interleaved", "int4 row_major zeros"):
        narrow = partial(linear, 64, 5, **KINDS[kind])
        flat = partial(linear, 5, 64, **KINDS[kind] | {"group_size": -1})
        errors += [colwise(mesh, narrow), rowwise(mesh, flat), rowwise(mesh, flat, Replicate())]
        same_numbers(mesh, narrow)
        same_numbers(mesh, flat)
    layer = linear(64, 5)
    layer.requires_grad_(False)
    parallelize_module(layer, mesh, ColwiseParallel(output_layouts=Replicate()))
    errors.append(error(layer(tokens(64)), linear(64, 5)(tokens(64))))
    assert repr(layer).startswith("ColwiseLinear(")
    return max(errors)


class Block(torch.nn.Module):
    """Packed layers beside a dense one."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = linear(256, 512, activation="silu"), linear(512, 256)
        torch.manual_seed(3)
        self.head = torch.nn.Linear(256, 128)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.down(self.up(x)))


PLAN: dict[str, Callable[[], Any]] = {"up": ColwiseParallel, "down": RowwiseParallel, "head": ColwiseParallel}


def model(mesh: DeviceMesh) -> float:
    """One plan for packed layers and a torch.nn.Linear; each rank's x another: rank 0's tensors are those of all."""
    whole, block = Block(), Block()
    if mesh.get_local_rank():
        block.up.scales.data.zero_()
    parallelize_module(block, mesh, {name: style() for name, style in PLAN.items()})
    with torch.no_grad():
        return error(block(tokens(256)), mine(whole(tokens(256)), mesh))


def sequence_parallel(mesh: DeviceMesh) -> float:
    """x and y cut along the sequence, as between norms that are sequence parallel."""
    whole, block = Block(), Block()
    plan = {"up": ColwiseParallel(input_layouts=Shard(1)), "down": RowwiseParallel(output_layouts=Shard(1))}
    parallelize_module(block, mesh, plan)
    x = tokens(256)
    with torch.no_grad():
        return error(block.down(block.up(mine(x, mesh, 1).contiguous())), mine(whole.down(whole.up(x)), mesh, 1))


def cut_twice(mesh: DeviceMesh) -> None:
    layer = linear()
    parallelize_module(layer, mesh, ColwiseParallel())
    for style in (ColwiseParallel(), RowwiseParallel()):
        with pytest.raises(ValueError, match="module: expected a layer that is not cut yet, got a ColwiseLinear"):
            style._apply(layer, mesh)
    with pytest.raises(ValueError, match=rf"x: expected {K} columns, all of them, got shape \[2, 8, {K - 1}\]"):
        layer(tokens(K - 1))
    with pytest.raises(ValueError, match=f"parts: expected columns of fused layers that add up to N = {N}, got"):
        ColwiseParallel(parts=(N, N))._apply(linear(), mesh)
    with pytest.raises(ValueError, match=r"output_layouts: expected Shard.* for a layer of several parts, got"):
        ColwiseParallel(parts=(N,), output_layouts=Replicate())
    assert columns_of(N, None, 1, 0) == [(0, N)]


def wrong_styles(mesh: DeviceMesh) -> None:
    """Arguments that contradict each other, and modules that a style does not take."""
    with pytest.raises(ValueError, match=r"output_layouts: expected Shard.* got S\(-1\) with use_local_output=False"):
        ColwiseParallel(parts=(N,), use_local_output=False)
    square = DeviceMesh("cpu", torch.arange(mesh.size()).view(-1, 1))
    with pytest.raises(ValueError, match="device_mesh: expected one dimension, got 2"):
        ColwiseParallel()._apply(linear(), square)
    layer = linear()
    RowwiseParallel()._apply(layer, mesh)
    assert isinstance(layer, RowwiseLinear)
    for reads, comes_cut in ((DENSE, True), (PACKED, True), (OWN, True), (WHOLE, False)):
        layer.reads = reads
        assert layer.comes_cut("qweight") is comes_cut
    with pytest.raises(ValueError, match=r"qweight: expected \[.*\], got \[3, 4\]"):
        layer.cut("qweight", torch.zeros(3, 4, dtype=torch.uint8))


def names_in_states(mesh: DeviceMesh) -> None:
    """Scales per channel are those of every rank, under their own name."""
    layer = linear(group_size=-1)
    parallelize_module(layer, mesh, RowwiseParallel())
    assert type(layer.state_dict()["scales"]) is torch.Tensor


def first_ranks(mesh: DeviceMesh) -> float:
    """The order of rows, a buffer, is that of the first rank, too; with src_data_rank=None each has its own tensors."""
    layer, own = act_order(), linear()
    with torch.no_grad():
        expected = layer(tokens())
        if mesh.get_local_rank():
            layer.perm.zero_()  # type: ignore[union-attr]
        own.scales.data.mul_(mesh.get_local_rank() + 1)
        mine_alone = mine(own(tokens()), mesh)
        parallelize_module(layer, mesh, ColwiseParallel())
        parallelize_module(own, mesh, ColwiseParallel(), src_data_rank=None)
        bias = mine(linear().bias, mesh)  # type: ignore[arg-type]
        assert torch.equal(own.bias, bias)  # type: ignore[arg-type]
        return max(error(layer(tokens()), mine(expected, mesh)), error(own(tokens()), mine_alone))


def gathered(mesh: DeviceMesh) -> None:
    """`gather` gives the layer from before it was cut, bit for bit; so does a checkpoint of all ranks' state dicts."""
    styles: tuple[Callable[[], Any], ...] = (
        ColwiseParallel,
        RowwiseParallel,
        partial(ColwiseParallel, parts=(64, N - 64)),
    )
    makers = [partial(linear, **kind) for kind in KINDS.values()] + [act_order]
    makers += [partial(linear, activations="fp8", arch="cpu")]
    makers += [partial(linear, 64, 5), partial(linear, 5, 64, group_size=-1), partial(linear, 768, 64, group_size=192)]
    for make in makers:
        for style in styles:
            whole, layer = make(), make()
            if style is styles[2] and whole.out_features != N:
                continue
            parallelize_module(layer, mesh, style(), src_data_rank=None)
            state = whole.state_dict()
            assert isinstance(layer, ParallelLinear)
            again = layer.gather().state_dict()
            assert state.keys() == again.keys()
            for name, tensor in state.items():
                assert torch.equal(tensor, again[name]), (name, style, whole)
            # The state of this rank, and that of the whole layer, come back to where they were.
            part = {name: tensor.clone() for name, tensor in layer.named_parameters()}
            mine = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
            for loaded in (mine, state):
                for tensor in layer.parameters():
                    tensor.data.zero_()
                layer.load_state_dict(loaded)
                for name, tensor in layer.named_parameters():
                    assert torch.equal(tensor, part[name]), (name, style, whole)


def updated(mesh: DeviceMesh) -> None:
    """Each rank takes its part of a dense weight: what a fresh layer has, cut."""
    plans: list[tuple[Callable[[], Any], int, dict[str, Any]]] = [(ColwiseParallel, K, kind) for kind in KINDS.values()]
    plans += [(RowwiseParallel, K, kind) for kind in KINDS.values()]
    plans += [(RowwiseParallel, 768, {"group_size": size}) for size in (384, 192, -1)]  # groups that the cut splits
    plans += [(partial(ColwiseParallel, parts=(256, 64, 64)), K, {"format": "nvfp4", "group_size": 16})]
    plans += [(style, 64, {"group_size": -1}) for style in (ColwiseParallel, RowwiseParallel)]
    for style, k, kind in plans:
        torch.manual_seed(5)
        other = torch.nn.Linear(k, N)
        arguments: dict[str, Any] = {"format": "int4", "arch": 90, "group_size": 64} | kind
        layer, expected = linear(k, **kind), wo.nn.Linear.from_linear(other, dtype=torch.float32, **arguments)
        for each in (layer, expected):
            parallelize_module(each, mesh, style(), src_data_rank=None)
        with pytest.raises(ValueError, match=rf"weight: expected shape \[{N}, {k}\], got \[{N}, {k + 1}\]"):
            layer.update_(torch.zeros(N, k + 1))
        layer.update_(other.weight, other.bias)
        for name, tensor in layer.named_parameters():
            assert torch.equal(tensor, expected.get_parameter(name)), (name, style, arguments)
    layer, w = act_order(), torch.randn(N, K, generator=torch.Generator().manual_seed(4))
    whole = act_order()
    for each in (layer, whole):
        each.update_(w * 2) if each is whole else None
        parallelize_module(each, mesh, RowwiseParallel(), src_data_rank=None)
    layer.update_(w * 2)
    assert torch.equal(layer.qweight, whole.qweight) and torch.equal(layer.scales, whole.scales)


def rowwise_fp8(mesh: DeviceMesh, make: Callable[[], wo.nn.Linear]) -> float:
    """Each rank rounds its part of x by scales of its own."""
    layer = make()
    x = tokens(layer.in_features)
    w, bias = layer.dequantize(torch.float32), layer.bias
    assert bias is not None
    parts = zip(x.chunk(mesh.size(), -1), w.chunk(mesh.size()), strict=True)
    rounded = ((wo.quantize_activations(part), rows) for part, rows in parts)
    expected = sum(scales[..., None] * (x8.float() @ rows) for (x8, scales), rows in rounded) + bias
    with torch.no_grad():
        parallelize_module(layer, mesh, RowwiseParallel())
        assert isinstance(layer, RowwiseLinear) and layer.activations == "fp8"
        return error(layer(mine(x, mesh)), expected)


CASES: dict[str, Callable[[DeviceMesh], float | None]] = {
    **{f"colwise, {name}": partial(colwise, make=partial(linear, **kind)) for name, kind in KINDS.items()},
    **{f"rowwise, {name}": partial(rowwise, make=partial(linear, **kind)) for name, kind in KINDS.items()},
    **{f"same numbers, {name}": partial(same_numbers, make=partial(linear, **kind)) for name, kind in KINDS.items()},
    "colwise, gelu": partial(colwise, make=partial(linear, activation="gelu")),
    "rowwise, gelu": partial(rowwise, make=partial(linear, activation="gelu")),
    "colwise, fp8": partial(colwise, make=partial(linear, activations="fp8", arch="cpu")),
    "rowwise, fp8": partial(rowwise_fp8, make=partial(linear, activations="fp8", arch="cpu")),
    "colwise, act-order": partial(colwise, make=act_order),
    "rowwise, act-order": partial(rowwise, make=act_order),
    "rowwise, x replicated": partial(rowwise, make=linear, input=Replicate()),
    "every layout of x and y": layouts,
    "fused parts": fused,
    "groups that a cut splits": cut_groups,
    "a K that is refused": refused,
    "ranks without a part": nothing,
    "a plan for a model": model,
    "sequence parallel": sequence_parallel,
    "cut twice": cut_twice,
    "wrong styles": wrong_styles,
    "names in states": names_in_states,
    "tensors of the first rank": first_ranks,
    "gathered again": gathered,
    "updated": updated,
}

_SLOW = ("same numbers", "wrong styles", "names", "tensors of", "fused", "sequence", "every layout", "gathered", "upd")
_ALIKE = ("zeros", "interleaved")
RANKS = {name: (2, 4) if name.startswith(_SLOW) or name.endswith(_ALIKE) else (1, 2, 4, 8) for name in CASES}
