"""compile_options: what torch.compile takes, and what its kernels give then. test_overlap_gpu.py runs them on a GPU."""

from __future__ import annotations

import pytest
import torch

import weightonly as wo


@pytest.mark.parametrize("cudagraphs", [False, True])
def test_torch_compile_takes_them(cudagraphs: bool, generator: torch.Generator) -> None:
    x = torch.randn(4, 64, generator=generator)
    q, scales, _ = wo.quantize(torch.randn(64, 32, generator=generator), bits=4, group_size=64)
    w = wo.preprocess(q)

    def step(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.silu(wo.gemm(x * 2, w, scales)) + 1

    compiled = torch.compile(step, options=wo.compile_options(cudagraphs=cudagraphs))
    torch.testing.assert_close(compiled(x), step(x))


def test_what_is_no_bool() -> None:
    with pytest.raises(TypeError, match="cudagraphs: expected a bool, got int"):
        wo.compile_options(cudagraphs=1)  # type: ignore[arg-type]
