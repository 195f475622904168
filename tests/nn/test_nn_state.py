"""What a Linear consists of, and how it is saved, loaded, copied, moved and converted."""

# mypy: disable-error-code="arg-type, index, union-attr"

from __future__ import annotations

import copy
import io
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import weightonly as wo
from weightonly.nn import Linear

K, N = 128, 72
ARCHS = {"sm70": "row_major", "sm80": "interleaved", "sm90": "tiled", "cpu": "cpu"}

archs = pytest.mark.parametrize("arch", ARCHS)
assigns = pytest.mark.parametrize("assign", [False, True], ids=["copy", "assign"])
symmetries = pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "zero_points"])
biases = pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
bits_4_and_8 = pytest.mark.parametrize("bits", [4, 8], ids=["int4", "int8"])


def layer_of(bits: int = 4, symmetric: bool = True, arch: str = "sm80", bias: bool = True, seed: int = 0) -> Linear:
    torch.manual_seed(seed)
    linear = torch.nn.Linear(K, N, bias=bias).half()
    return Linear.from_linear(linear, bits, 64, symmetric, arch=arch)


def x_of(dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.randn(3, K, generator=torch.Generator().manual_seed(1)).to(dtype)


def code4_layer() -> Linear:
    q = torch.arange(K * N).remainder(16).view(K, N).to(torch.int8)
    weight = wo.preprocess(q, format="code4", code=[i / 16 - 0.47 for i in range(16)])
    return Linear.from_quantized(weight, torch.rand(2, N).half() + 0.1)


def old_state(layer: Linear) -> dict[str, torch.Tensor]:
    """The state dict of version 0.1: one-dimensional bytes, and what they mean as JSON in a uint8 tensor."""
    fields: dict[str, Any] = {"k": K, "n": N, "format": layer.format, "layout": layer.layout}
    if layer.packed.format == "code4":
        fields["code"] = layer.packed.code
    state = {"qweight": layer.qweight.detach().clone().view(-1), "scales": layer.scales.detach().clone()}
    for name in ("zeros", "bias", "perm"):
        if (tensor := getattr(layer, name)) is not None:
            state[name] = tensor.detach().clone()
    return state | {"_extra_state": torch.tensor(list(json.dumps(fields).encode()), dtype=torch.uint8)}


# --- Parameters ------------------------------------------------------------------------------------------------


@bits_4_and_8
@pytest.mark.parametrize(
    ("arch", "shapes"),
    [
        ("sm90", {4: (2, 2 * 2048), 8: (2, 2 * 4096)}),  # N = 72: two panels; K = 128: two k_blocks
        ("sm80", {4: (128 // 4, 128 * 2), 8: (96 // 2, 128 * 2)}),
        ("sm70", {4: (128 * 2, 32), 8: (128 * 3, 32)}),
    ],
)
def test_the_bytes_are_a_matrix(bits: int, arch: str, shapes: dict[int, tuple[int, int]]) -> None:
    layer = layer_of(bits, arch=arch)
    assert tuple(layer.qweight.shape) == shapes[bits]
    assert layer.packed.data.dim() == 1 and layer.packed.data.data_ptr() == layer.qweight.data_ptr()
    assert layer.layout == layer.packed.layout == ARCHS[arch]


@bits_4_and_8
@pytest.mark.parametrize("k", [1, 64, 128, 4096])
@pytest.mark.parametrize("ratio", [1 / 64, 1 / 4, 1, 2, 4, 16, 64])
def test_no_two_layouts_have_one_shape(bits: int, k: int, ratio: float) -> None:
    n = max(1, int(k * ratio))
    shapes = {Linear(k, n, bits=bits, group_size=-1, arch=arch, device="meta").qweight.shape for arch in ARCHS}
    assert len(shapes) == len(ARCHS)


@symmetries
@biases
def test_parameters_are_frozen_and_describe_themselves(symmetric: bool, bias: bool) -> None:
    layer = layer_of(symmetric=symmetric, bias=bias)
    names = {"qweight", "scales", *(() if symmetric else ("zeros",)), *(("bias",) if bias else ())}
    assert {name for name, _ in layer.named_parameters()} == names == set(layer.state_dict())
    assert not any(parameter.requires_grad for parameter in layer.parameters())
    assert list(layer.buffers()) == []
    got = (layer.in_features, layer.out_features, layer.format, layer.layout, layer.group_size, layer.symmetric)
    assert got == (K, N, "int4", "interleaved", 64, symmetric)
    assert (layer.packed.group_size, layer.packed.has_zeros, layer.packed.has_perm) == (64, not symmetric, False)


# --- save and load ---------------------------------------------------------------------------------------------


@archs
@bits_4_and_8
@symmetries
@assigns
def test_state_dict_through_a_file(bits: int, symmetric: bool, arch: str, assign: bool, tmp_path: Path) -> None:
    layer = layer_of(bits, symmetric, arch)
    save_file(layer.state_dict(), tmp_path / "layer.safetensors")
    other = Linear(K, N, bits=bits, group_size=64, symmetric=symmetric, arch=arch)
    assert torch.equal(other(x_of()), torch.zeros(3, N).half())  # what was kept of the zeros is not used any more
    other.load_state_dict(load_file(tmp_path / "layer.safetensors"), assign=assign)
    assert torch.equal(other(x_of()), layer(x_of()))
    assert not any(parameter.requires_grad for parameter in other.parameters())


@pytest.mark.parametrize("saved", ARCHS)
@pytest.mark.parametrize("made", ARCHS)
@assigns
def test_a_state_of_another_layout(saved: str, made: str, assign: bool, tmp_path: Path) -> None:
    """A state dict says its layout; a file of safetensors does not, but its shape differs."""
    layer = layer_of(8, arch=saved)
    model = torch.nn.Sequential(Linear(K, N, bits=8, group_size=64, arch=made))
    save_file(torch.nn.Sequential(layer).state_dict(), tmp_path / "model.safetensors")
    if saved != made:
        before = model[0].qweight
        with pytest.raises(ValueError, match=rf"0.qweight: expected .*{ARCHS[made]}.*got .*'{ARCHS[saved]}'; make"):
            model.load_state_dict(load_file(tmp_path / "model.safetensors"), assign=assign)
        assert model[0].qweight is before and model[0].layout == ARCHS[made]
    model.load_state_dict(torch.nn.Sequential(layer).state_dict(), assign=assign)
    assert model[0].layout == model[0].packed.layout == ARCHS[saved]
    assert torch.equal(model[0](x_of()), layer(x_of()))


@pytest.mark.parametrize("made", ARCHS)
@archs
@bits_4_and_8
@assigns
def test_a_state_of_version_0_1_loads(bits: int, arch: str, made: str, assign: bool, tmp_path: Path) -> None:
    layer = layer_of(bits, symmetric=False, arch=arch)
    state = {f"mlp.up.{name}": tensor for name, tensor in old_state(layer).items()}
    save_file(state, tmp_path / "old.safetensors")
    model = torch.nn.ModuleDict({"mlp": torch.nn.ModuleDict({"up": Linear(K, N, bits=bits, group_size=64, arch=made,
                                                                          symmetric=False)})})  # fmt: skip
    model.load_state_dict(load_file(tmp_path / "old.safetensors"), assign=assign)
    other = model.get_submodule("mlp.up")
    assert isinstance(other, Linear) and other.layout == ARCHS[arch]
    assert torch.equal(other.qweight, layer.qweight)
    assert torch.equal(other(x_of()), layer(x_of()))
    assert "_extra_state" not in str(list(model.state_dict()))


@assigns
@pytest.mark.parametrize("old", [False, True], ids=["new", "version 0.1"])
def test_the_codebook_comes_with_the_state(old: bool, assign: bool) -> None:
    layer = code4_layer()
    other = Linear(K, N, format="code4", group_size=64, bias=False)
    assert other.packed.code != layer.packed.code
    other.load_state_dict(old_state(layer) if old else layer.state_dict(), assign=assign)
    assert other.packed.code == layer.packed.code
    assert torch.equal(other(x_of()), layer(x_of()))
    assert other.bfloat16().packed.code == layer.packed.code


def test_old_states_that_do_not_fit_are_refused_and_change_nothing() -> None:
    state = old_state(layer_of(arch="sm90"))
    for target, message in (
        (Linear(96, N, group_size=-1), r"state dict: expected a weight with .*'k': 96.*got .*'k': 128"),
        (Linear(K, N, format="nf4", group_size=64), r"state dict: .*'nf4'.*got .*'int4'"),
    ):
        with pytest.raises(ValueError, match=message):
            target.load_state_dict(state)
    target = Linear(K, N, group_size=64, arch="sm80")
    with pytest.raises(RuntimeError, match="size mismatch for qweight"):
        target.load_state_dict(state | {"qweight": state["qweight"][1:]})
    assert target.layout == "interleaved" and not target.qweight.any()


def as_bytes(text: str) -> torch.Tensor:
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


@pytest.mark.parametrize(
    ("extra_state", "message"),
    [
        (as_bytes('{"k": 128'), "expected JSON as uint8"),
        (as_bytes('{"a":' * 100_000), "expected JSON as uint8, got something else .*nested too deeply"),
        (as_bytes('{"k": 128, "k": 96}'), "expected JSON as uint8, got something else .*'k' is there twice"),
        (as_bytes("[128, 72]"), "expected a JSON object, got list"),
        (torch.rand(8), "expected JSON as uint8"),
        (b"{}", "expected JSON as uint8"),
    ],
    ids=["truncated", "nested", "twice", "a list", "floats", "no tensor"],
)
def test_a_damaged_description_of_version_0_1_is_an_error_of_its_name(extra_state: object, message: str) -> None:
    state: dict[str, Any] = {f"mlp.{name}": tensor for name, tensor in old_state(layer_of()).items()}
    model = torch.nn.ModuleDict({"mlp": Linear(K, N, group_size=64)})
    with pytest.raises(ValueError, match=rf"^state dict: mlp\._extra_state: {message}"):
        model.load_state_dict(state | {"mlp._extra_state": extra_state})


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        ({"in_features": 96}, {"in_features": 128}, r"expected a weight with .*'k': 128.*got .*'k': 96"),
        ({"format": "nf4"}, {"format": "fp4"}, r"expected a weight with .*'fp4'.*got .*'nf4'"),
    ],
    ids=["K of equal shapes", "format"],
)
def test_a_state_of_another_weight_is_refused(source: dict[str, Any], target: dict[str, Any], message: str) -> None:
    common = {"in_features": 128, "out_features": 40, "group_size": -1}
    state = Linear(**common | source).state_dict()
    with pytest.raises(ValueError, match=f"state dict: {message}"):
        Linear(**common | target).load_state_dict(state)


# --- copies and moves ------------------------------------------------------------------------------------------


def through_torch_save(layer: Linear) -> Linear:
    file = io.BytesIO()
    torch.save(layer, file)
    assert len(file.getvalue()) < 1.5 * sum(p.nbytes for p in layer.parameters()) + 8000
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Callable[[Linear], Linear]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda layer: pickle.loads(pickle.dumps(layer)),
    "torch.save": through_torch_save,
}


@pytest.mark.parametrize("name", COPIES)
@pytest.mark.parametrize("make", [layer_of, code4_layer], ids=["int4", "code4"])
def test_copies(make: Callable[[], Linear], name: str) -> None:
    layer = make()
    expected = layer(x_of())
    clone = COPIES[name](layer)
    assert torch.equal(clone(x_of()), expected)
    assert clone.packed.data.data_ptr() == clone.qweight.data_ptr()
    if name != "copy":
        layer.qweight.data.zero_()
        assert torch.equal(clone(x_of()), expected)


def test_a_pickle_holds_the_bytes_once() -> None:
    layer = Linear(1024, 1024, bias=False)
    layer(torch.ones(1, 1024).half())
    assert len(pickle.dumps(layer)) < 1.1 * sum(p.nbytes for p in layer.parameters())


def test_packed_follows_the_parameter() -> None:
    layer = layer_of(arch="sm70")
    first = layer.packed
    assert layer.packed is first
    layer.qweight = torch.nn.Parameter(torch.zeros_like(layer.qweight), requires_grad=False)
    expected = wo.gemm(x_of(), layer.packed, layer.scales, bias=layer.bias)
    assert layer.packed is not first and torch.equal(layer(x_of()), expected)
    layer.to("meta")
    assert layer.packed.device.type == "meta" and layer.packed.layout == "row_major"
    assert layer.qweight.shape == first.data.view(-1, 32).shape


def test_to_meta_and_back_from_a_state() -> None:
    layer = layer_of(symmetric=False)
    expected, state = layer(x_of()), {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    layer.to("meta").load_state_dict(state, assign=True)
    assert torch.equal(layer(x_of()), expected)
    made_on_meta = Linear(K, N, group_size=64, symmetric=False, device="meta", arch="sm80")
    made_on_meta.to_empty(device="cpu").load_state_dict(state)
    assert torch.equal(made_on_meta(x_of()), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=["half", "bfloat16", "float"])
@pytest.mark.parametrize("by", ["method", "to"])
def test_conversions_of_the_dtype(dtype: torch.dtype, by: str) -> None:
    layer = layer_of(symmetric=False)
    before = layer.qweight.clone()
    names = {torch.float16: "half", torch.bfloat16: "bfloat16", torch.float32: "float"}
    layer = layer.to(dtype) if by == "to" else getattr(layer, names[dtype])()
    assert {layer.scales.dtype, layer.zeros.dtype, layer.bias.dtype} == {dtype}
    assert torch.equal(layer.qweight, before)
    assert layer(x_of(dtype)).dtype == dtype


def test_double_is_refused_and_changes_nothing() -> None:
    model = torch.nn.ModuleDict({"up": wo.nn.quantize_model(torch.nn.Sequential(torch.nn.Linear(K, N)))})
    for convert in (model.double, lambda: model.to(torch.float64)):
        with pytest.raises(TypeError, match=r"layer '0' .*128 -> 72\): expected float16, .*got float64"):
            convert()
    assert model["up"][0].scales.dtype == torch.float32
    with pytest.raises(TypeError, match=r"layer '0' .*x: expected dtype float16, .*got torch.float64"):
        model["up"](torch.ones(1, K).double())


def test_errors_of_forward_name_the_layer() -> None:
    model = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(K, N).half()))
    wo.nn.quantize_model(model)
    with pytest.raises(TypeError, match=r"layer '0\.0' .*scales: expected dtype torch.float32 as x has, got torch.flo"):
        model(x_of(torch.float32))
    with pytest.raises(ValueError, match=r"layer without a name .*x: expected \[..., K\] with K = 128"):
        layer_of()(torch.ones(1, 64).half())


def test_tied_layers_stay_tied() -> None:
    shared = torch.nn.Linear(K, K).half()
    model = wo.nn.quantize_model(torch.nn.ModuleList([shared, shared]))
    assert model[0] is model[1]
    clone = copy.deepcopy(model).bfloat16()
    assert clone[0] is clone[1] and clone[0].scales.dtype == torch.bfloat16
    layer, other = layer_of(), layer_of(seed=1)
    other.qweight = layer.qweight
    both = copy.deepcopy(torch.nn.ModuleList([layer, other]))
    assert both[0].qweight is both[1].qweight
    assert torch.equal(both[1].packed.data, both[0].packed.data)


# --- repack and dequantize -------------------------------------------------------------------------------------


@bits_4_and_8
@archs
@pytest.mark.parametrize("target", ARCHS)
def test_repack(bits: int, arch: str, target: str) -> None:
    layer, expected = layer_of(bits, arch=arch), layer_of(bits, arch=target)
    y = layer(x_of())
    state, weight = layer.qweight, layer.packed
    assert layer.repack(arch=target) is layer
    assert torch.equal(layer.qweight, expected.qweight) and layer.layout == ARCHS[target]
    assert torch.equal(layer(x_of()), y)
    assert (layer.qweight is state) == (arch == target)
    again = wo.repack(layer.packed, arch=arch)
    assert torch.equal(again.data, weight.data) and again.fields == weight.fields
    assert wo.repack(weight, arch=arch) is weight
    assert torch.equal(wo.unpack(wo.repack(weight, target)), wo.unpack(weight))


def test_repack_rejects() -> None:
    with pytest.raises(TypeError, match="qweight: expected a PackedWeight, got Tensor"):
        wo.repack(torch.ones(2), arch="sm80")
    with pytest.raises(ValueError, match="arch: expected one of"):
        wo.repack(layer_of().packed, arch="sm60")
    with pytest.raises(ValueError, match=r"arch: expected sm75 .*for code4"):
        code4_layer().repack(arch="sm70")
    layer = code4_layer()
    assert layer.repack() is layer and layer.layout == layer.packed.layout


@symmetries
@pytest.mark.parametrize("order", [False, True], ids=["in order", "act_order"])
def test_dequantize_is_the_weight_of_the_layer(symmetric: bool, order: bool) -> None:
    layer = layer_of(symmetric=symmetric, bias=False).float()
    if order:
        perm = torch.randperm(K, generator=torch.Generator().manual_seed(2)).int()
        weight = wo.preprocess(wo.unpack(layer.packed))
        layer = Linear.from_quantized(weight, layer.scales, layer.zeros, perm=perm)
    x = x_of(torch.float32)
    torch.testing.assert_close(layer(x), x @ layer.dequantize(), rtol=1e-5, atol=1e-5)
    assert layer.dequantize(torch.bfloat16).dtype == torch.bfloat16


# --- autocast --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scales", [torch.float16, torch.bfloat16, torch.float32], ids=["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("given", [torch.float16, torch.bfloat16, torch.float32], ids=["fp16", "bf16", "fp32"])
def test_autocast_casts_x_and_leaves_the_sums_alone(scales: torch.dtype, given: torch.dtype) -> None:
    torch.compiler.reset()
    layer = layer_of(8, symmetric=False).to(scales)
    x = x_of(given)
    expected = layer(x.to(scales))
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)(x)
        assert torch.is_autocast_enabled("cpu")
    assert y.dtype == scales
    assert torch.equal(y, expected) and torch.equal(compiled, expected)


def test_autocast_casts_no_float64() -> None:
    with torch.autocast("cpu"), pytest.raises(TypeError, match="x: expected dtype"):
        layer_of()(x_of(torch.float64))


@pytest.mark.gpu
def test_autocast_on_the_gpu(cuda_device: torch.device) -> None:
    layer = layer_of(arch="sm80").to(cuda_device).repack()
    x = x_of(torch.float32).to(cuda_device)
    with torch.autocast("cuda", torch.bfloat16):
        y = layer(x)
    assert torch.equal(y, layer(x.half()))
