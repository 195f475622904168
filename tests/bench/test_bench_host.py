"""`bench host`: the ways to call a linear compute the same product, and only a GPU is timed."""

from __future__ import annotations

import pandas as pd
import pytest
import torch

from weightonly.bench import host

CPU = torch.device("cpu")


def test_every_way_computes_the_product() -> None:
    torch.manual_seed(0)
    with host.registered_operator(), torch.no_grad():
        calls = host.ways(256, 128, 64, torch.bfloat16, CPU, backend="eager")
        products = {way: call() for way, call in calls.items()}
    expected = products["x @ w"]
    ours = {way: y for way, y in products.items() if "torch.nn" not in way and "torchao" not in way}
    assert len(ours) == 9
    assert isinstance(expected, torch.Tensor)
    for way, y in products.items():
        assert isinstance(y, torch.Tensor) and y.shape == (1, 128), way
    for way, y in ours.items():
        assert isinstance(y, torch.Tensor)
        assert (y.float() - expected.float()).norm() < 0.02 * expected.float().norm(), way


def test_the_operator_is_gone_afterwards() -> None:
    for _ in range(2):  # a second time: nothing is registered twice
        with host.registered_operator():
            assert hasattr(torch.ops.weightonly_bench, "linear")
    assert not host._OPERATOR_WEIGHTS


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_cpu_is_refused() -> None:
    with pytest.raises(RuntimeError, match="host needs a CUDA GPU"):
        host.host()


def test_the_table_has_a_column_for_each_shape() -> None:
    rows = [("gemm", 64, 7.5), ("x @ w", 64, 6.25), ("gemm", 128, 8), ("x @ w", 128, 6)]
    frame = pd.DataFrame([{"k": 64, "n": n, "way": way, "us": us} for way, n, us in rows])
    table = host.host_table(frame)
    assert "64x64 host us" in table and "64x128 host us" in table
    lines = [line.replace(" ", "") for line in table.splitlines()]
    assert lines[2:] == ["|gemm|7.50|8.00|", "|x@w|6.25|6.00|"]


@pytest.mark.gpu
def test_host_times_of_a_gpu(cuda_device: torch.device) -> None:
    frame = host.host("512x512", device=cuda_device)
    assert {"gemm", "gemm, out=", "gemm in a compiled function", "torch.nn.Linear"} <= set(frame["way"])
    assert (frame["us"] > 0).all() and (frame["us_min"] <= frame["us"]).all()
