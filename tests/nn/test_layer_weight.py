"""`layer.weight` of packed layers, for code that looks at it: a dense weight to read, not to write to unnoticed."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.utils import prune

import weightonly as wo

K, N = 128, 64


@pytest.fixture
def layer() -> wo.nn.Linear:
    torch.manual_seed(0)
    made = wo.nn.Linear.from_linear(torch.nn.Linear(K, N), group_size=32)
    made.layer_name = "mlp.up"
    return made


def dense(layer: wo.nn.Linear) -> torch.Tensor:
    return layer.dequantize().t().contiguous()


def test_it_has_the_shape_dtype_and_device_of_a_dense_weight(layer: wo.nn.Linear) -> None:
    w, expected = layer.weight, dense(layer)
    assert isinstance(w, torch.Tensor) and not isinstance(w, torch.nn.Parameter) and not w.requires_grad
    assert (w.shape, w.stride(), w.dtype, w.device) == (expected.shape, (K, 1), torch.float32, expected.device)
    assert layer.weight is w, "owners that look at it in every call find what is there"
    assert layer.half().weight.dtype == torch.float16 and w.dtype == torch.float32
    assert layer.to("meta").weight.is_meta


READS: dict[str, Callable[[torch.Tensor], Any]] = {
    "clone": torch.clone,
    "float": lambda w: w.double(),
    "rows": lambda w: w[3:5] + 0,
    "transposed": lambda w: torch.ones(2, N) @ w.t().mT,
    "chunks": lambda w: [part + 1 for part in w.chunk(3, dim=1)],
    "view": lambda w: w.view(8, 8, K).sum(1),
    "linear": lambda w: torch.nn.functional.linear(torch.ones(2, K), w),
    "cat": lambda w: torch.cat([w, w]),
    "item": lambda w: w[0, 1].item(),
    "lists": lambda w: w.tolist(),
    "numpy": lambda w: torch.from_numpy(w.numpy()),
    "data": lambda w: w.data.norm(),
    "detach": lambda w: w.detach().norm(),
    "deepcopy": lambda w: copy.deepcopy(w),
    "pickle": lambda w: pickle.loads(pickle.dumps(w)),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_reading_gives_the_dequantized_numbers(layer: wo.nn.Linear, read: Callable[[torch.Tensor], Any]) -> None:
    torch.testing.assert_close(read(layer.weight), read(dense(layer)), rtol=0, atol=0)


def test_x_gets_its_gradient_through_it(layer: wo.nn.Linear) -> None:
    x = torch.randn(3, K, requires_grad=True)
    torch.nn.functional.linear(x, layer.weight).sum().backward()
    torch.testing.assert_close(x.grad, dense(layer).sum(0).expand(3, K))


def _add(layer: wo.nn.Linear) -> None:
    layer.weight.data += 1


WRITES: dict[str, Callable[[wo.nn.Linear], object]] = {
    "assign": lambda layer: setattr(layer, "weight", torch.zeros(N, K)),
    "assign a Parameter": lambda layer: setattr(layer, "weight", torch.nn.Parameter(torch.zeros(N, K))),
    "assign None": lambda layer: setattr(layer, "weight", None),
    "assign data": lambda layer: setattr(layer.weight, "data", torch.zeros(N, K)),
    "copy_": lambda layer: layer.weight.copy_(torch.zeros(N, K)),
    "data.copy_": lambda layer: layer.weight.data.copy_(torch.zeros(N, K)),
    "data +=": _add,
    "a row": lambda layer: layer.weight.__setitem__(0, 0.0),
    "rows of data": lambda layer: layer.weight.data[:2].zero_(),
    "the transpose": lambda layer: layer.weight.t().zero_(),
    "a column of a view": lambda layer: layer.weight.view(-1, 2)[:, 1].fill_(0),
    "one of chunks": lambda layer: layer.weight.chunk(2)[1].mul_(2),
    "mul_ by a tensor": lambda layer: layer.weight.mul_(torch.ones(N, K)),
    "out=": lambda layer: torch.zeros(N, K, out=layer.weight),
    "foreach": lambda layer: torch._foreach_zero_([layer.weight]),
    "requires_grad": lambda layer: layer.weight.requires_grad_(),
    "data_ptr": lambda layer: layer.weight.data_ptr(),
    "storage": lambda layer: layer.weight.untyped_storage(),
} | {
    name: lambda layer, name=name: getattr(torch.nn.init, name)(layer.weight)
    for name in ("normal_", "zeros_", "eye_", "xavier_uniform_", "kaiming_uniform_", "orthogonal_", "trunc_normal_")
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_writing_is_an_error_that_names_the_layer(layer: wo.nn.Linear, write: Callable[[wo.nn.Linear], object]) -> None:
    before = dense(layer)
    with pytest.raises(RuntimeError, match=r"layer 'mlp.up' .*: weight: expected"):
        write(layer)
    assert torch.equal(dense(layer), before)


def test_a_number_multiplies_the_scales(layer: wo.nn.Linear) -> None:
    before, x = dense(layer), torch.randn(2, K)
    layer.weight.div_(4)
    layer.weight.data *= 2
    assert torch.equal(dense(layer), before / 2) and torch.equal(layer.weight + 0, before / 2)
    torch.testing.assert_close(layer(x), x @ before.t() / 2 + layer.state_dict()["bias"])


HOOKS: dict[str, Callable[[torch.nn.Module], object]] = {
    "weight_norm": torch.nn.utils.parametrizations.weight_norm,
    "spectral_norm": torch.nn.utils.spectral_norm,
    "prune": lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
    "register_parameter": lambda layer: layer.register_parameter("weight", torch.nn.Parameter(torch.zeros(N, K))),
}


@pytest.mark.parametrize("hook", HOOKS.values(), ids=HOOKS)
def test_hooks_of_torch_on_it_are_errors(layer: wo.nn.Linear, hook: Callable[[torch.nn.Module], object]) -> None:
    names = list(layer.state_dict())
    with pytest.raises((KeyError, TypeError, ValueError)):
        hook(layer)
    assert list(layer.state_dict()) == names and not layer._forward_pre_hooks


def test_it_is_in_no_state_and_a_copy_has_its_own(layer: wo.nn.Linear) -> None:
    w = layer.weight
    assert "weight" not in layer.state_dict() and "weight" not in dict(layer.named_parameters())
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert other.weight is not w and torch.equal(other.weight + 0, w + 0)
        other.weight.mul_(2)
    assert torch.equal(w + 0, dense(layer))
    saved = io.BytesIO()
    torch.save(w, saved)
    saved.seek(0)
    assert torch.equal(torch.load(saved), dense(layer))


def test_it_follows_the_tensors_of_the_layer(layer: wo.nn.Linear) -> None:
    other = wo.nn.Linear.from_linear(torch.nn.Linear(K, N), group_size=32)
    before = layer.weight + 0
    layer.load_state_dict(other.state_dict(), assign=True)
    assert not torch.equal(layer.weight + 0, before) and torch.equal(layer.weight + 0, dense(other))
    other.requantize(before.t().contiguous())
    assert torch.equal(other.weight + 0, dense(other))


def test_stacked_experts_have_one_weight_of_three_dimensions() -> None:
    stack = wo.nn.GroupedLinear(3, K, N, group_size=32, dtype=torch.float32)
    torch.nn.init.uniform_(stack.scales)
    assert stack.weight.shape == (3, N, K) and torch.equal(stack.weight + 0, stack.dequantize().mT)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torch_compile_traces_code_that_looks_at_it(layer: wo.nn.Linear) -> None:
    def run(x: torch.Tensor) -> torch.Tensor:
        is_other = isinstance(layer.weight, torch.Tensor) and x.dtype != layer.weight.dtype
        y = layer(x.to(layer.weight.dtype) if is_other else x)
        return y + x.to(y.dtype) @ layer.weight.t()

    x = torch.randn(2, K, dtype=torch.float64)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), run(x))
