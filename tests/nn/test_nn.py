"""Linear and quantize_model: the layer against the equation, its state, and what moves with it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import weightonly as wo
from weightonly.nn import Linear, quantize_model

symmetries = pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "zero_points"])
biases = pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
bits_4_and_8 = pytest.mark.parametrize("bits", [4, 8], ids=["int4", "int8"])


def torch_linear(k: int, n: int, bias: bool = True, dtype: torch.dtype = torch.float16) -> torch.nn.Linear:
    return torch.nn.Linear(k, n, bias=bias).to(dtype)


@bits_4_and_8
@symmetries
@biases
@pytest.mark.parametrize("activation", [None, "silu"], ids=str)
def test_from_linear_is_the_equation(bits: int, symmetric: bool, bias: bool, activation: str | None) -> None:
    linear = torch_linear(128, 72, bias)
    layer = Linear.from_linear(linear, bits, 32, symmetric, activation=activation)
    x = torch.randn(2, 3, 128).half()
    q, scales, zeros = wo.quantize(linear.weight.t(), bits, 32, symmetric)
    expected = wo.gemm(
        x,
        wo.preprocess(q, bits),
        scales,
        zeros=zeros,
        bias=linear.bias if bias else None,
        activation=activation,
    )
    y = layer(x)
    assert y.shape == (2, 3, 72)
    assert y.dtype == torch.float16
    assert torch.equal(y, expected.detach())


def test_output_is_close_to_the_original_layer() -> None:
    linear = torch_linear(256, 64, dtype=torch.float32)
    x = torch.randn(16, 256)
    layer = Linear.from_linear(linear, bits=8, group_size=64)
    exact = linear(x)
    assert (layer(x) - exact).norm() < 0.01 * exact.norm()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_dtype_of_scales_and_bias(dtype: torch.dtype) -> None:
    linear = torch_linear(128, 32, dtype=torch.float32)
    layer = Linear.from_linear(linear, symmetric=False, dtype=dtype, search=False)
    assert layer.scales.dtype == dtype
    assert layer.zeros is not None
    assert layer.zeros.dtype == dtype
    assert layer.bias is not None
    assert layer.bias.dtype == dtype
    x = torch.randn(4, 128).to(dtype)
    assert layer(x).dtype == dtype
    # q is rounded against the scales as stored, from the fp32 weight
    w = wo.dequantize(layer.packed, layer.scales.float(), layer.zeros.float())
    assert ((w - linear.weight.t()).abs() <= 0.501 * layer.scales.float()).all()


def test_the_layer_does_not_follow_the_original() -> None:
    linear = torch_linear(128, 32)
    layer = Linear.from_linear(linear)
    x = torch.randn(4, 128).half()
    before = layer(x)
    with torch.no_grad():
        linear.weight.zero_()
        linear.bias.zero_()
    assert torch.equal(layer(x), before)
    assert not any(parameter.requires_grad for parameter in layer.parameters())


def test_an_empty_layer_gives_zeros() -> None:
    x = torch.ones(2, 100).half()
    assert torch.equal(Linear(100, 40, group_size=-1)(x), torch.zeros(2, 40).half())


def test_torch_compile_traces_the_layer() -> None:
    layer = Linear.from_linear(torch_linear(128, 72), symmetric=False, activation="relu")
    x = torch.randn(3, 128).half()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), layer(x))


def test_from_quantized_uses_the_given_tensors() -> None:
    q, scales, zeros = wo.quantize(torch.randn(64, 40), group_size=32, symmetric=False)
    weight = wo.preprocess(q)
    layer = Linear.from_quantized(weight, scales, zeros, activation="relu")
    assert layer.packed.data is weight.data
    assert layer.qweight.data_ptr() == weight.data.data_ptr()
    assert layer.scales.data_ptr() == scales.data_ptr()
    x = torch.randn(3, 64)
    assert torch.equal(layer(x), wo.gemm(x, weight, scales, zeros=zeros, activation="relu"))


def test_extra_repr_names_what_matters() -> None:
    text = repr(Linear(256, 64, bits=8, group_size=32, symmetric=False, arch="sm70", activation="gelu"))
    for part in (
        "in_features=256",
        "out_features=64",
        "format=int8",
        "group_size=32",
        "symmetric=False",
        "layout=row_major",
        "activation=gelu",
    ):
        assert part in text


WEIGHT = wo.preprocess(torch.ones(64, 40, dtype=torch.int8))
SCALES = torch.ones(2, 40)
GOOD_QUANTIZED: dict[str, Any] = {"weight": WEIGHT, "scales": SCALES}
BAD_QUANTIZED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "weight": ({"weight": SCALES}, TypeError, "weight: expected the PackedWeight"),
    "scales columns": ({"scales": SCALES[:, :39]}, ValueError, r"scales: expected .*got \[2, 39\]"),
    "scales rows": ({"scales": torch.ones(3, 40)}, ValueError, r"scales: expected .*got shape \[3, 40\]"),
    "zeros": ({"zeros": SCALES[:1]}, ValueError, r"zeros: expected shape \[2, 40\] as scales, got \[1, 40\]"),
    "bias": ({"bias": torch.ones(41)}, ValueError, r"bias: expected \[40\], got \[41\]"),
    "activation": ({"activation": "tanh"}, ValueError, "activation: expected one of None, .*got 'tanh'"),
}


@pytest.mark.parametrize("case", BAD_QUANTIZED)
def test_from_quantized_rejects(case: str) -> None:
    changes, error, message = BAD_QUANTIZED[case]
    with pytest.raises(error, match=message):
        Linear.from_quantized(**GOOD_QUANTIZED | changes)


def test_from_linear_rejects() -> None:
    with pytest.raises(TypeError, match=r"linear: expected a torch.nn.Linear, got Conv2d"):
        Linear.from_linear(torch.nn.Conv2d(1, 1, 1))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="group_size: expected -1 or a divisor of K=100, got 128"):
        Linear.from_linear(torch_linear(100, 32))
    with pytest.raises(ValueError, match=r"group_size .* got 48"):
        Linear.from_linear(torch_linear(96, 32), group_size=48)
    with pytest.raises(ValueError, match="activation"):
        Linear.from_linear(torch_linear(128, 32), activation="tanh")
    large = torch_linear(128, 2, dtype=torch.float32)
    torch.nn.init.constant_(large.weight, 1e5)
    with pytest.raises(ValueError, match=r"w: expected values within .* the range of torch.float16"):
        Linear.from_linear(large, dtype=torch.float16)


# --- quantize_model ----------------------------------------------------------------------------------------


class Block(torch.nn.Module):
    """Two layers, one of them used twice, and a module that owns a subclass of Linear."""

    def __init__(self) -> None:
        super().__init__()
        self.up = torch_linear(128, 256)
        self.down = torch.nn.Sequential(torch.nn.ReLU(), torch_linear(256, 128, bias=False))
        self.again = self.up
        self.norm = torch.nn.LayerNorm(128).half()
        self.attention = torch.nn.MultiheadAttention(128, 4).half()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.down(self.up(x)))


def test_quantize_model_replaces_every_linear_in_place() -> None:
    model = torch.nn.Sequential(Block(), Block(), torch_linear(128, 10)).eval()
    x = torch.randn(8, 128).half()
    exact = model(x)
    assert quantize_model(model, bits=8, group_size=64) is model
    for block in (model[0], model[1]):
        assert isinstance(block, Block)
        assert type(block.get_submodule("up")) is Linear
        assert type(block.get_submodule("down.1")) is Linear
        assert block.again is block.up
        assert type(block.get_submodule("attention.out_proj")) is not Linear
        assert not block.up.training
    assert isinstance(model[2], Linear)
    assert (model(x) - exact).norm() < 0.05 * exact.norm()


def test_quantize_model_state_dict_round_trip() -> None:
    source = quantize_model(torch.nn.Sequential(Block(), Block()), symmetric=False)
    target = quantize_model(torch.nn.Sequential(Block(), Block()), symmetric=False)
    x = torch.randn(4, 128).half()
    assert not torch.equal(source(x), target(x))
    target.load_state_dict(source.state_dict())
    assert torch.equal(source(x), target(x))


def test_quantize_model_skips_names_and_patterns() -> None:
    model = torch.nn.Sequential(Block(), Block(), torch_linear(128, 10))
    quantize_model(model, skip=["2", "*.down.1"])
    assert type(model[2]) is torch.nn.Linear
    assert [type(model.get_submodule(f"{i}.down.1")) for i in (0, 1)] == [torch.nn.Linear] * 2
    assert [type(model.get_submodule(f"{i}.up")) for i in (0, 1)] == [Linear] * 2


def test_quantize_model_of_a_single_linear() -> None:
    assert isinstance(quantize_model(torch_linear(128, 10)), Linear)


def test_quantize_model_names_the_layer_and_replaces_nothing() -> None:
    model = torch.nn.Sequential(torch_linear(128, 32), torch.nn.Sequential(torch_linear(96, 32)))
    with pytest.raises(ValueError, match=r"layer '1\.0': group_size: expected -1 or a divisor of K=96, got 128"):
        quantize_model(model, only=["*"])
    assert type(model[0]) is torch.nn.Linear


def test_quantize_model_names_the_layer_of_bad_values() -> None:
    bad = torch_linear(128, 32)
    with torch.no_grad():
        bad.weight[3, 4] = float("nan")
    model = torch.nn.Sequential(torch_linear(128, 32), bad)
    with pytest.raises(ValueError, match=r"layer '1': w: expected finite values"):
        quantize_model(model)


def test_quantize_model_takes_a_module() -> None:
    with pytest.raises(TypeError, match=r"^module: expected a torch\.nn\.Module, got str$"):
        wo.nn.quantize_model("org/model")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("skip", "error", "message"),
    [
        (["3"], ValueError, "got '3', which matches none"),
        ("0", TypeError, "skip: expected a collection of names"),
    ],
    ids=["unknown_name", "str"],
)
def test_quantize_model_rejects_skip(skip: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        quantize_model(torch.nn.Sequential(torch_linear(128, 32)), skip=skip)


@pytest.mark.gpu
@bits_4_and_8
@symmetries
def test_layer_on_the_gpu(bits: int, symmetric: bool, cuda_device: torch.device) -> None:
    linear = torch_linear(256, 192)
    x = torch.randn(5, 256).half()
    layer = Linear.from_linear(linear, bits, 128, symmetric)
    expected = layer(x).float()
    on_gpu = layer.to(cuda_device)(x.to(cuda_device))
    assert on_gpu.device == cuda_device
    torch.testing.assert_close(on_gpu.cpu().float(), expected, rtol=4e-3, atol=4e-3)
    made_there = Linear.from_linear(linear.to(cuda_device), bits, 128, symmetric)
    assert torch.equal(made_there(x.to(cuda_device)), on_gpu)


@pytest.mark.gpu
def test_a_layout_of_another_gpu_raises(cuda_device: torch.device) -> None:
    major, _ = torch.cuda.get_device_capability(cuda_device)
    foreign = "sm70" if major >= 8 else "sm80"
    layer = Linear.from_linear(torch_linear(128, 64), arch=foreign).to(cuda_device)
    with pytest.raises(ValueError, match="layout"):
        layer(torch.randn(2, 128).half().to(cuda_device))
