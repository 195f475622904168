"""Layers with activations="fp8": gemm of quantize_activations, bit for bit; their state; what they refuse."""

from __future__ import annotations

import copy
import io
import pickle
import re
from typing import Any

import pytest
import torch

import weightonly as wo
from weightonly.heuristics.families import FAMILIES
from weightonly.nn import Linear, quantize_model

DTYPE = torch.bfloat16


def layer_of(k: int = 256, n: int = 72, **options: Any) -> Linear:
    defaults: dict[str, Any] = {"group_size": 64, "activations": "fp8", "arch": "sm90", "dtype": DTYPE}
    options = defaults | options
    return Linear.from_linear(torch.nn.Linear(k, n), **options)


def tokens(k: int = 256) -> torch.Tensor:
    """Rows of very different sizes, some columns much larger than others."""
    x = torch.randn(3, 5, k) * torch.logspace(-2, 2, 5)[:, None]
    x[..., ::50] *= 30
    return x.to(DTYPE)


def explicit(layer: Linear, x: torch.Tensor) -> torch.Tensor:
    x8, x_scales = wo.quantize_activations(x)
    return wo.gemm(x8, layer.operand, x_scales=x_scales, bias=layer.bias, activation=layer.activation)


@pytest.mark.parametrize("arch", ["sm90", "cpu"])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_a_layer_is_gemm_of_quantized_activations(arch: str, activation: str | None) -> None:
    layer, x = layer_of(arch=arch, activation=activation), tokens()
    assert layer.activations == "fp8"
    assert layer.layout == {"sm90": "tiled_fp8", "cpu": "cpu"}[arch]
    assert f"layout={layer.layout}, activations=fp8" in repr(layer)
    y = layer(x)
    assert y.dtype == DTYPE and torch.equal(y, explicit(layer, x))
    w = layer.dequantize(torch.float32).double()
    x8, x_scales = wo.quantize_activations(x)
    sums = x_scales.double()[..., None] * (x8.double() @ w) + layer.bias.double()  # type: ignore[union-attr]
    expected = sums if activation is None else torch.nn.functional.silu(sums)
    torch.testing.assert_close(y.double(), expected, rtol=2**-8, atol=1e-3)
    in_16_bits = Linear.from_quantized(layer.repack("cpu").operand, bias=layer.bias, activation=activation)
    assert in_16_bits.activations is None and not torch.equal(in_16_bits(x), y)


def test_x_of_another_dtype() -> None:
    layer, x = layer_of(), tokens()
    with pytest.raises(TypeError, match=r"scales: expected dtype torch\.float32 as x has, got torch\.bfloat16"):
        layer(x.float())
    with torch.autocast("cpu", dtype=DTYPE):
        assert torch.equal(layer(x.float()), layer(x))


def test_act_order() -> None:
    layer, x = layer_of(), tokens()
    perm = torch.randperm(256)
    packed = wo.PackedWeight(layer.packed.data, **layer.packed.fields | {"has_perm": True})
    shuffled = Linear.from_quantized(packed, layer.scales, bias=layer.bias, perm=perm)
    assert shuffled.activations == "fp8"  # the layout says so
    assert torch.equal(shuffled(x), layer(x[..., perm]))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_torch_compile(backend: str) -> None:
    layer, x = layer_of(), tokens()
    compiled = torch.compile(layer, backend=backend, fullgraph=True)
    with torch.no_grad():
        assert torch.equal(compiled(x), layer(x))
    z = x.clone().requires_grad_()
    compiled(z).square().sum().backward()
    expected = x.clone().requires_grad_()
    layer(expected).square().sum().backward()
    torch.testing.assert_close(z.grad, expected.grad)


def test_quantized_activations_under_inductor_have_the_same_bits() -> None:
    x = tokens()
    with torch.no_grad():
        got = torch.compile(wo.quantize_activations, fullgraph=True)(x)
    for a, b in zip(got, wo.quantize_activations(x), strict=True):
        assert a.dtype == b.dtype and torch.equal(a.float(), b.float())


@pytest.mark.parametrize("activation", [None, "relu", "silu"])
def test_gradients_are_those_of_the_product_without_rounding(activation: str | None) -> None:
    layer = layer_of(activation=activation, dtype=torch.float32, arch="cpu")
    x = tokens().float().requires_grad_()
    y = layer(x)
    assert torch.equal(y, explicit(layer, x.detach()))
    weight = torch.randn_like(y)
    (y * weight).sum().backward()
    if activation is None:
        inner = weight
    else:
        plain = copy.deepcopy(layer)
        plain.activation = None
        z = plain(x.detach()).requires_grad_()
        (getattr(torch.nn.functional, activation)(z) * weight).sum().backward()
        inner = z.grad
    torch.testing.assert_close(x.grad, inner @ layer.dequantize().t(), rtol=1e-4, atol=1e-4)


def test_copies_pickles_states_and_conversions_keep_it() -> None:
    layer, x = layer_of(), tokens()
    y = layer(x)
    fresh = layer_of()
    fresh.load_state_dict(layer.state_dict())
    on_meta = Linear(256, 72, group_size=64, dtype=DTYPE, device="meta", arch="sm90", activations="fp8")
    on_meta.load_state_dict(layer.state_dict(), assign=True)
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), fresh, on_meta, loaded, layer.to("cpu")):
        assert other.activations == "fp8" and other.layout == "tiled_fp8"
        assert torch.equal(other(x), y)
    half = copy.deepcopy(layer).half()
    assert torch.equal(half(x.half()), explicit(half, x.half()))
    state = copy.deepcopy(layer).repack("cpu").state_dict()
    fresh.load_state_dict(state)  # its metadata says what the bytes are
    assert fresh.layout == "cpu" and torch.equal(fresh(x), y)
    layer.repack("cpu")
    assert layer.layout == "cpu" and torch.equal(layer(x), y)
    layer.repack("sm90")
    assert layer.layout == "tiled_fp8" and torch.equal(layer(x), y)


def test_another_weight_in_place() -> None:
    torch.manual_seed(3)
    dense = torch.nn.Linear(256, 72)
    layer, expected = layer_of(), Linear.from_linear(dense, group_size=64, activations="fp8", arch=90, dtype=DTYPE)
    layer.update_(dense.weight, dense.bias)
    assert torch.equal(layer.qweight, expected.qweight) and torch.equal(layer.scales, expected.scales)


def test_a_model_and_its_summary() -> None:
    dense = torch.nn.Sequential(torch.nn.Linear(256, 128), torch.nn.ReLU(), torch.nn.Linear(128, 64)).to(DTYPE)
    layers = {"2": {"format": "int8", "activations": "16bit"}}
    model: Any = quantize_model(dense, group_size=64, activations="fp8", arch="sm90", layers=layers)
    assert [(m.format, m.activations) for m in model if isinstance(m, Linear)] == [("int4", "fp8"), ("int8", None)]
    summary = str(model.weightonly_summary)
    assert "int4, groups of 64, x in fp8: 1 layer quantized; int8, groups of 64: 1 layer" in summary
    assert "  x as it is, not in fp8: 2" in summary
    x, first = tokens(), model[0]
    assert torch.equal(model(x), model[2](model[1](explicit(first, x))))
    again = quantize_model(model, group_size=64, activations="fp8", arch="sm90", layers=layers)
    assert again is model  # all is as it was asked for
    with pytest.raises(ValueError, match="layer '0': it is int4 already, groups of 64, x in fp8"):
        quantize_model(torch.nn.Sequential(first), group_size=64)


def test_a_model_on_meta() -> None:
    def make() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(256, 72))

    model = quantize_model(make(), group_size=64, dtype=DTYPE, activations="fp8", arch=90)
    with torch.device("meta"):
        again = make()
    again = quantize_model(again, group_size=64, dtype=DTYPE, activations="fp8", arch=90)
    again.load_state_dict(model.state_dict(), assign=True)
    x = tokens()
    assert torch.equal(again(x), model(x))


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "another word": ({"activations": "int8"}, "activations: expected None, '16bit' or 'fp8', got 'int8'"),
    "a format": (
        {"format": "nf4"},
        "activations: expected None for nf4, got 'fp8', which is for symmetric int4 and mxfp4 alone",
    ),
    "8 bits": ({"bits": 8}, "activations: expected None for int8, got 'fp8'"),
    "zero points": ({"symmetric": False}, "activations: expected None for int4 with zero points, got 'fp8'"),
    "a group size": ({"group_size": 16}, "activations 'fp8': group_size must be -1 (per channel), 32, a multiple"),
    "a GPU": ({"arch": "sm80"}, "activations: expected None for sm80, as sm90 or cpu alone take fp8, got 'fp8'"),
    "fp32 for a GPU": (
        {"dtype": torch.float32},
        "activations: expected scales in float16 or bfloat16 for 'fp8' on a GPU, got torch.float32",
    ),
    "some layers": (
        {"layers": {"0": {"format": "int8"}}},
        "layers['0']: activations: expected None for int8, got 'fp8', which is for symmetric int4 and mxfp4 alone; "
        "'activations': '16bit' leaves x of these layers as it is",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_refused_before_any_work(case: str) -> None:
    changed, message = WRONG[case]
    options: dict[str, Any] = {"group_size": 64, "dtype": DTYPE, "arch": 90, "activations": "fp8"} | changed
    dense = torch.nn.Linear(256, 72)
    model = torch.nn.Sequential(dense)
    with pytest.raises(ValueError, match=re.escape(message)):
        quantize_model(model, **options)
    assert model[0] is dense
    if "layers" not in options:
        with pytest.raises(ValueError, match=re.escape(message)):
            Linear.from_linear(dense, **options)


def test_weights_and_states_that_do_not_go_with_it() -> None:
    layer = layer_of()
    tiled = wo.repack(layer.packed, layout="tiled")
    with pytest.raises(ValueError, match="weight: expected layout 'tiled_fp8' or 'cpu' for activations='fp8', got 'ti"):
        Linear.from_quantized(tiled, layer.scales, activations="fp8")
    q, scales, zeros = wo.quantize(torch.randn(256, 72), group_size=64, symmetric=False)
    with pytest.raises(ValueError, match="activations: expected None for int4 with zero points"):
        Linear.from_quantized(wo.preprocess(q, arch="cpu"), scales, zeros, activations="fp8")
    with pytest.raises(ValueError, match="activations: expected None for int8"):
        Linear(256, 72, bits=8, activations="fp8", arch="cpu")
    with pytest.raises(ValueError, match="activations: expected None for sm89"):
        layer.repack("sm89")
    of_16_bits = layer_of(activations=None)
    with pytest.raises(ValueError, match="state dict: expected layout 'tiled_fp8' or 'cpu' for activations='fp8'"):
        layer.load_state_dict(of_16_bits.state_dict())
    with pytest.raises(ValueError, match="state dict: expected a layout for x in 16 bits, got 'tiled_fp8'"):
        of_16_bits.load_state_dict(layer.state_dict())
    for assign in (False, True):  # a file of safetensors has no metadata: the shape of the bytes tells
        with pytest.raises(ValueError, match=r"qweight: .*'tiled_fp8'; make the layer with activations='fp8'"):
            of_16_bits.load_state_dict(dict(layer.state_dict()), assign=assign)
        with pytest.raises(ValueError, match=r"qweight: .*'tiled'; repack it, or make the layer without activations"):
            layer.load_state_dict(dict(of_16_bits.state_dict()), assign=assign)
    again = layer_of()
    again.load_state_dict(dict(layer.state_dict()))
    assert torch.equal(again.dequantize(), layer.dequantize())


def test_explain_says_which_kernel(monkeypatch: pytest.MonkeyPatch, forgetful: None) -> None:
    monkeypatch.setattr(FAMILIES["gemm_sm90_fp8"], "verified", True)
    given: list[dict[str, Any]] = [
        {"weight": layer_of()},
        {"weight": layer_of(arch="cpu")},
        {"weight": layer_of().operand},
    ]
    given += [{"weight": layer_of().packed, "dtype": DTYPE}]
    given += [{"k": 256, "n": 72, "group_size": 64, "dtype": DTYPE, "activations": "fp8"}]
    rows = [wo.explain(**options, m=16, arch="sm90").rows[0] for options in given]
    assert len({row.kernel for row in rows}) == 1 and len({row.us for row in rows}) == 1
    assert rows[0].family == "gemm_sm90_fp8" and rows[0].us is not None and rows[0].us > 0
    assert "quantize_activations(x) before it" in rows[0].why
    text = str(wo.explain(layer_of(), m=16, arch="sm90"))
    assert "1 layer 256 x 72 int4, groups of 64, x in fp8" in text
    on_cpu = wo.explain(layer_of(arch="cpu"), m=16, arch="cpu").rows[0]
    assert (on_cpu.kernel, on_cpu.family) == ("reference", "pytorch")
    elsewhere = wo.explain(layer_of(), m=16, arch="sm80").rows[0]
    assert elsewhere.kernel == "none" and "activations: expected None for sm80" in elsewhere.why
    with pytest.raises(TypeError, match="activations: expected None beside a weight"):
        wo.explain(layer_of(), activations="fp8")
    with pytest.raises(ValueError, match="activations: expected None for nf4"):
        wo.explain(k=256, n=72, format="nf4", activations="fp8")
