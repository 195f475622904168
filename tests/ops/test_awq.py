"""`awq_dequantize` on the CPU, and the checks of its arguments."""

from __future__ import annotations

import re
import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests import formats_reference as ref

import weightonly as wo
from weightonly.ops.awq_dequantize import AUTO, on_gpu

AWQ = sys.modules["weightonly.ops.awq_dequantize"]


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    group_size=st.integers(1, 40),
    groups=st.integers(1, 5),
    words=st.integers(1, 5),
    dtype=st.sampled_from([torch.float16, torch.bfloat16]),
)
def test_weight_is_that_of_the_reference(
    seed: int, group_size: int, groups: int, words: int, dtype: torch.dtype
) -> None:
    k, n = group_size * groups, 8 * words
    layer = ref.random_awq_layer(k, n, groups, dtype, torch.Generator().manual_seed(seed))
    w = wo.awq_dequantize(**layer)
    assert w.dtype == dtype and w.shape == (k, n) and w.is_contiguous()
    # The reference is exact in fp32, and rounding it is the one rounding.
    assert torch.equal(w, ref.awq_weight(**layer).to(dtype))


def test_arguments_go_by_place_and_may_be_views(generator: torch.Generator) -> None:
    layer = ref.random_awq_layer(24, 32, 3, torch.float16, generator)
    wide = {name: torch.cat([tensor, tensor], dim=1) for name, tensor in layer.items()}
    views = [tensor[:, : layer[name].shape[1]] for name, tensor in wide.items()]
    assert not any(view.is_contiguous() for view in views)
    assert torch.equal(wo.awq_dequantize(*views), wo.awq_dequantize(**layer))


def test_parameters_that_want_gradients_are_read(generator: torch.Generator) -> None:
    layer = ref.random_awq_layer(8, 8, 1, torch.float16, generator)
    expected = wo.awq_dequantize(**layer)
    w = wo.awq_dequantize(layer["qweight"], layer["scales"].requires_grad_(), layer["qzeros"])
    assert torch.equal(w, expected) and not w.requires_grad


BAD: dict[str, tuple[str, Any, type[Exception], str]] = {
    "array": ("qweight", torch.zeros(64, 2, dtype=torch.int32).numpy(), TypeError, "qweight: expected a tensor, got"),
    "kind of words": ("qweight", torch.zeros(64, 2, dtype=torch.int64), TypeError,
                      "qweight: expected dtype torch.int32, got torch.int64"),
    "kind of scales": ("scales", torch.ones(2, 16), TypeError,
                       "scales: expected dtype torch.float16 or torch.bfloat16, got torch.float32"),
    "kind of zeros": ("qzeros", torch.zeros(2, 2), TypeError, "qzeros: expected dtype torch.int32, got torch.float32"),
    "rank": ("qweight", torch.zeros(64, dtype=torch.int32), ValueError,
             "qweight: expected int32 [K, N / 8], got int32 [64]"),
    "no rows": ("qweight", torch.zeros(0, 2, dtype=torch.int32), ValueError, "qweight: expected int32 [K, N / 8]"),
    "columns": ("scales", torch.ones(2, 15).half(), ValueError, "scales: expected float16 or bfloat16 or float32 "
                "[groups, 16], got float16 [2, 15]"),
    "groups": ("scales", torch.ones(3, 16).half(), ValueError,
               "scales: expected a number of groups that divides K = 64, got 3"),
    "zeros": ("qzeros", torch.zeros(2, 3, dtype=torch.int32), ValueError,
              "qzeros: expected int32 [2, 2], got int32 [2, 3]"),
    "device": ("qzeros", torch.zeros(2, 2, dtype=torch.int32, device="meta"), ValueError,
               "qzeros: expected on cpu as qweight is, got meta"),
    "other device": ("qweight", torch.zeros(64, 2, dtype=torch.int32, device="meta"), ValueError,
                     "qweight: expected a CPU or CUDA tensor, got one on meta"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_refused(case: str, generator: torch.Generator) -> None:
    name, value, error, message = BAD[case]
    layer = ref.random_awq_layer(64, 16, 2, torch.float16, generator)
    wo.awq_dequantize(**layer)
    with pytest.raises(error, match=f"^{re.escape(message)}"):
        wo.awq_dequantize(**layer | {name: value})


@pytest.mark.parametrize(("k", "words"), [(2**31, 1), (1, 2**28)])
def test_sizes_that_the_kernel_cannot_count(k: int, words: int) -> None:
    """Before anything is asked of a GPU; the tensors are views of one word."""
    qweight, qzeros = torch.zeros(1, 1, dtype=torch.int32).expand(k, words), torch.zeros(1, 1, dtype=torch.int32)
    scales = torch.ones(1, 1).half().expand(1, 8 * words)
    message = f"qweight: expected K and N of at most 2147479552 on a GPU, got {k} and {8 * words}"
    with pytest.raises(ValueError, match=f"^{message}$"):
        on_gpu(qweight, scales, qzeros.expand(1, words), AUTO)
