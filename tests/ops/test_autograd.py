"""Gradients of gemm: against autograd of the dense product in fp64, and everything that is refused."""

# mypy: disable-error-code="arg-type, union-attr"

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from tests import ROOT
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import weightonly as wo
from weightonly.activations import activation_of

M, K, N, G = 5, 256, 72, 64
LAYOUTS = {"int4": "interleaved", "int8": "row_major", "nf4": "tiled", "fp4": "tiled", "code4": "tiled"}

formats = pytest.mark.parametrize("format", LAYOUTS)
activations = pytest.mark.parametrize("activation", [None, "relu", "gelu", "silu"], ids=str)


def operands(format: str, zeros: bool, perm: bool, dtype: torch.dtype, generator: torch.Generator) -> dict[str, Any]:
    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    is_code = LAYOUTS[format] == "tiled"
    low, high = (0, 16) if is_code else (-8, 8) if format == "int4" else (-128, 128)
    q = torch.randint(low, high, (K, N), dtype=torch.int8, generator=generator)
    code = random(16).tolist() if format == "code4" else None
    bits = 8 if format == "int8" else 4
    scale = {8: 1 / 400, 4: 1 / 20}[bits]
    return {
        "x": random(2, M, K).to(dtype).requires_grad_(),
        "qweight": wo.preprocess(q, bits, layout=LAYOUTS[format], format=format, code=code),
        "scales": ((random(K // G, N).abs() + 0.5) * scale).to(dtype),
        "zeros": torch.randint(-4, 4, (K // G, N), generator=generator).to(dtype) if zeros and not is_code else None,
        "bias": random(N).to(dtype).requires_grad_(),
        "perm": torch.randperm(K, generator=generator) if perm else None,
    }


def exact_product(a: dict[str, Any], x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Before the activation, of x and bias in fp64."""
    scales, zeros = a["scales"].float(), None if a["zeros"] is None else a["zeros"].float()
    w = wo.dequantize(a["qweight"], scales, zeros).double()
    return (x if a["perm"] is None else x[..., a["perm"]]) @ w + bias


def exact_gradients(a: dict[str, Any], activation: str | None, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of x and bias, by autograd on the dense weight, all fp64."""
    x, bias = (a[name].detach().double().requires_grad_() for name in ("x", "bias"))
    y = activation_of(activation).function(exact_product(a, x, bias))
    gradients = torch.autograd.grad(y, (x, bias), grad.double())
    return gradients[0], gradients[1]


def error(got: torch.Tensor, exact: torch.Tensor) -> float:
    return float((got.double() - exact).norm() / exact.norm())


@formats
@activations
@pytest.mark.parametrize("zeros", [False, True], ids=["symmetric", "zero_points"])
@pytest.mark.parametrize("perm", [False, True], ids=["in order", "act_order"])
@pytest.mark.parametrize("way", ["eager", "compiled"])
def test_gradients_are_those_of_the_dense_product(
    format: str, activation: str | None, zeros: bool, perm: bool, way: str, generator: torch.Generator
) -> None:
    if zeros and LAYOUTS[format] == "tiled":
        pytest.skip("codes have no zeros")
    torch.compiler.reset()
    a = operands(format, zeros, perm, torch.float32, generator)
    grad = torch.randn(2, M, N, generator=generator)

    def product(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return wo.gemm(**{**a, "x": x, "bias": bias}, activation=activation)

    call = torch.compile(product, backend="aot_eager", fullgraph=True) if way == "compiled" else product
    y = call(a["x"], a["bias"])
    with torch.no_grad():
        assert torch.equal(y, product(a["x"], a["bias"]))  # the same bits with and without a gradient
    got = torch.autograd.grad(y, (a["x"], a["bias"]), grad)
    for one, exact in zip(got, exact_gradients(a, activation, grad), strict=True):
        assert one.shape == exact.shape and error(one, exact) < 2e-6


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@activations
def test_gradients_in_16_bits(dtype: torch.dtype, activation: str | None, generator: torch.Generator) -> None:
    """At most twice the error of autograd on the dense weight in the same dtype."""
    a = operands("int8", True, True, dtype, generator)
    grad = torch.randn(2, M, N, generator=generator).to(dtype)
    y = wo.gemm(**a, activation=activation)
    got = torch.autograd.grad(y, (a["x"], a["bias"]), grad)
    exact = exact_gradients(a, activation, grad)
    w = wo.dequantize(a["qweight"], a["scales"], a["zeros"])
    x, bias = (a[name].detach().requires_grad_() for name in ("x", "bias"))
    dense = activation_of(activation).function(x[..., a["perm"]] @ w + bias)
    dense_gradients = torch.autograd.grad(dense, (x, bias), grad)
    for one, other, true in zip(got, dense_gradients, exact, strict=True):
        assert one.dtype == dtype and error(one, true) <= 2 * error(other, true)


def test_several_slices_of_columns(generator: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weightonly.reference._BLOCK_ELEMS", 8 * K)
    a = operands("int4", True, True, torch.float32, generator)
    grad = torch.randn(2, M, N, generator=generator)
    got = torch.autograd.grad(wo.gemm(**a), (a["x"], a["bias"]), grad)
    for one, exact in zip(got, exact_gradients(a, None, grad), strict=True):
        assert error(one, exact) < 2e-6


@pytest.mark.parametrize("needed", ["x", "bias"])
def test_only_what_is_asked_for(needed: str, generator: torch.Generator) -> None:
    a = operands("int4", False, False, torch.float32, generator)
    other = "bias" if needed == "x" else "x"
    a[other] = a[other].detach()
    y = wo.gemm(**a, activation="silu")
    y.sum().backward()
    assert a[needed].grad is not None and a[other].grad is None


def test_gradients_are_deterministic(generator: torch.Generator) -> None:
    a = operands("nf4", False, True, torch.bfloat16, generator)
    y = wo.gemm(**a, activation="gelu")
    grad = torch.randn(2, M, N, generator=generator).bfloat16()
    first = torch.autograd.grad(y, (a["x"], a["bias"]), grad, retain_graph=True)
    with torch.autocast("cpu", torch.bfloat16):  # a backward pass inside of autocast multiplies in fp32, too
        again = torch.autograd.grad(y, (a["x"], a["bias"]), grad)
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))


def test_no_rows_and_one_dimension(generator: torch.Generator) -> None:
    a = operands("int4", False, False, torch.float32, generator)
    for shape in ((0, K), (K,)):
        x = torch.ones(shape, requires_grad=True)
        y = wo.gemm(**a | {"x": x, "bias": a["bias"]})
        y.sum().backward()
        assert x.grad is not None and x.grad.shape == shape
    assert torch.equal(a["bias"].grad, torch.ones(N))  # of the one row


def test_checkpointed_layers(generator: torch.Generator) -> None:
    torch.manual_seed(0)
    layer = wo.nn.Linear.from_linear(torch.nn.Linear(K, N), activation="gelu")
    x = torch.randn(M, K, generator=generator, requires_grad=True)
    [plain] = torch.autograd.grad(layer(x).square().sum(), x)
    for reentrant in (False, True):
        y = checkpoint(layer, x, use_reentrant=reentrant)
        y.square().sum().backward()
        assert torch.equal(x.grad, plain)
        x.grad = None


def test_autocast_gives_the_gradient_in_the_dtype_of_x(generator: torch.Generator) -> None:
    torch.manual_seed(0)
    layer = wo.nn.Linear.from_linear(torch.nn.Linear(K, N)).bfloat16()
    x = torch.randn(M, K, generator=generator, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        layer(x).sum().backward()
    assert x.grad.dtype == torch.float32 and error(x.grad, layer.dequantize().double().sum(1).expand(M, K)) < 0.01


# --- memory --------------------------------------------------------------------------------------------------------

_MEMORY = """
import resource, torch, weightonly as wo
torch.set_num_threads(1)
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
k = n = 6144
def gradient(k, n):
    qweight = wo.PackedWeight(torch.zeros(k * n // 2, dtype=torch.uint8), k, n, "int4", "interleaved")
    x = torch.ones(2, k, requires_grad=True)
    wo.gemm(x, qweight, torch.ones(k // 128, n)).sum().backward()
    assert x.grad[0, 0] == -8 * n
gradient(2048, 2048)  # what code and threads take
before = peak()
gradient(k, n)
print(peak() - before, k * n * 4)
"""


def test_the_weight_is_never_dense_as_a_whole() -> None:
    """The peak of a backward pass: the packed weight and a few slices, not the 151 MB that the dense one takes."""
    result = subprocess.run([sys.executable, "-c", _MEMORY], capture_output=True, text=True, check=False, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    grown, dense = map(int, result.stdout.split())
    assert grown < 0.6 * dense


# --- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["scales", "zeros"])
def test_scales_and_zeros_have_no_gradient(name: str, generator: torch.Generator) -> None:
    a = operands("int4", True, False, torch.float32, generator)
    a[name] = a[name].clone().requires_grad_()
    for needed in (a["x"], a["x"].detach()):
        with pytest.raises(ValueError, match=rf"^{name}: expected a tensor that requires no gradient, .*detach it"):
            wo.gemm(**a | {"x": needed})
    with torch.no_grad():
        wo.gemm(**a)


def test_there_is_no_second_derivative(generator: torch.Generator) -> None:
    a = operands("int4", False, False, torch.float32, generator)
    [first] = torch.autograd.grad(wo.gemm(**a).square().sum(), a["x"], create_graph=True)
    with pytest.raises(RuntimeError, match="gemm is differentiable once: there is no gradient of its gradient"):
        first.sum().backward()


TRANSFORMS = {
    "grad": lambda f, x: torch.func.grad(lambda x: f(x).sum())(x),
    "vjp": lambda f, x: torch.func.vjp(f, x),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x,)),
    "jacrev": lambda f, x: torch.func.jacrev(f)(x),
    "vmap": lambda f, x: torch.vmap(f)(x),
}


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("argument", ["x", "bias", "scales"])
def test_transforms_of_torch_func_are_refused(name: str, argument: str, generator: torch.Generator) -> None:
    a = operands("int4", False, False, torch.float32, generator)
    a = {key: value.detach() if isinstance(value, torch.Tensor) else value for key, value in a.items()}
    given = a[argument]
    if name == "vmap":
        given = torch.stack([given, given])
    wo.gemm(**a)  # a plan that is kept does not hide it
    with pytest.raises(RuntimeError, match=rf"^{argument}: expected a plain tensor, got one inside of a torch.func"):
        TRANSFORMS[name](lambda value: wo.gemm(**a | {argument: value}), given)


def test_dual_tensors_are_refused(generator: torch.Generator) -> None:
    a = operands("int4", False, False, torch.float32, generator)
    x = a["x"].detach()
    with forward_ad.dual_level():
        for given in (x, a["x"]):
            with pytest.raises(RuntimeError, match=r"^x: expected a plain tensor, got a dual tensor"):
                wo.gemm(**a | {"x": forward_ad.make_dual(given, torch.ones_like(x))})
        with torch.no_grad():
            assert torch.isfinite(wo.gemm(**a)).all()  # plain tensors inside of a level


def test_out_makes_no_graph(generator: torch.Generator) -> None:
    a = operands("int4", False, False, torch.float32, generator)
    out = torch.empty(2, M, N)
    with pytest.raises(ValueError, match="out: expected None where x requires a gradient, got a tensor"):
        wo.gemm(**a, out=out)
    plain = a | {"x": a["x"].detach()}
    for _ in range(3):
        wo.gemm(**plain, out=out)
        assert out.grad_fn is None and not out.requires_grad
    torch.compiler.reset()
    compiled = torch.compile(lambda: wo.gemm(**plain, out=out), backend="aot_eager", fullgraph=True)
    compiled()
    assert out.grad_fn is None


# --- on a GPU ------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@formats
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@activations
def test_gradients_on_the_gpu(
    format: str, dtype: torch.dtype, activation: str | None, generator: torch.Generator, cuda_device: torch.device
) -> None:
    major, minor = torch.cuda.get_device_capability(cuda_device)
    if (LAYOUTS[format] == "tiled" and major != 9) or (dtype == torch.bfloat16 and major < 8):
        pytest.skip("no kernel for this format or dtype")
    a = operands(format, True, True, dtype, generator)
    grad = torch.randn(2, M, N, generator=generator).to(dtype)
    if activation == "relu":  # rounding decides which side of 0 such a product is on
        grad[exact_product(a, a["x"].detach().double(), a["bias"].detach().double()).abs() < 0.1] = 0
    exact = exact_gradients(a, activation, grad)
    a["qweight"] = wo.repack(a["qweight"], (major, minor)).to(cuda_device)
    a = {
        key: value.detach().to(cuda_device).requires_grad_(value.requires_grad)
        if isinstance(value, torch.Tensor)
        else value
        for key, value in a.items()
    }
    y = wo.gemm(**a, activation=activation)
    got = torch.autograd.grad(y, (a["x"], a["bias"]), grad.to(cuda_device))
    tolerance = 8 * torch.finfo(dtype).eps
    for one, true in zip(got, exact, strict=True):
        assert one.device == cuda_device and error(one.cpu(), true) < tolerance
