"""Providers of the benchmark: the products they compute, and how to add one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

import weightonly as wo
from weightonly.bench import PROVIDERS, Prepared, Provider, providers, register
from weightonly.bench.__main__ import main
from weightonly.bench.weights import Weights
from weightonly.codebooks import codebook


@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "zeros"])
@pytest.mark.parametrize("group_size", [32, 128])
def test_providers_on_a_cpu_compute_the_same_product(symmetric: bool, group_size: int) -> None:
    weights = _weights(group_size, symmetric)
    x = torch.randn(5, weights.k, dtype=torch.bfloat16)
    for name in ("ours", "dense", "dequantize+matmul", "tinygemm"):
        prepared = providers.PROVIDERS[name].prepare(weights)
        copies = prepared.copies(2)
        assert len(copies) == 2
        providers.check_product(name, prepared, copies, x, torch.empty(5, weights.n, dtype=torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_bitsandbytes_on_a_cpu_multiplies_by_its_own_values(dtype: torch.dtype) -> None:
    pytest.importorskip("bitsandbytes")
    weights = _weights(64, True, "nf4", dtype)
    prepared = PROVIDERS["bitsandbytes"].prepare(weights)
    assert prepared.weight_bytes == 256 * 64 // 2 + 256 * 64 // 64 * 4  # codes, and an fp32 number for each block
    assert (prepared.expected - weights.dense).norm() < 0.1 * weights.dense.norm()
    x, out = torch.randn(5, 256, dtype=dtype), torch.empty(5, 64, dtype=dtype)
    for m in (1, 5):
        providers.check_product("bitsandbytes", prepared, prepared.copies(2), x[:m], out[:m])


@pytest.mark.parametrize("format", ["nf4", "fp4"])
def test_providers_multiply_by_codes_of_a_table(format: str) -> None:
    weights = _weights(64, True, format)
    assert weights.q.min() >= 0 and weights.q.max() <= 15
    x = torch.randn(5, weights.k, dtype=torch.bfloat16)
    for name in ("ours", "dense", "dequantize+matmul"):
        prepared = providers.PROVIDERS[name].prepare(weights)
        providers.check_product(name, prepared, prepared.copies(2), x, torch.empty(5, weights.n, dtype=torch.bfloat16))


def test_weights_of_codes_are_the_nearest() -> None:
    weights = _weights(64, True, "fp4")
    normal = torch.randn(256, 64, generator=torch.Generator().manual_seed(0)).mul_(256**-0.5).to(torch.bfloat16)
    table = codebook("fp4")
    scales = weights.scales.float().repeat_interleave(64, 0)  # [k, n]
    distances = (normal.float()[..., None] - scales[..., None] * table).abs()  # [k, n, 16]
    chosen = distances.gather(-1, weights.q.long()[..., None])[..., 0]
    assert torch.allclose(chosen, distances.amin(-1), atol=1e-3 * float(scales.max()))


def test_copies_of_a_weight_have_memory_of_their_own() -> None:
    first, second = providers.PROVIDERS["ours"].prepare(_weights(64, False)).copies(2)
    pairs = [(first.qweight.data, second.qweight.data), (first.scales, second.scales), (first.zeros, second.zeros)]
    for one, other in pairs:
        assert torch.equal(one, other) and one.data_ptr() != other.data_ptr()


@pytest.mark.parametrize("wrong", ["one-wrong-copy", "unwritten-output"])
def test_a_wrong_provider_raises(wrong: str) -> None:
    weights = _weights(64, True)
    ring = [weights.dense, weights.dense * (1.1 if wrong == "one-wrong-copy" else 1.0)]

    def run(w: torch.Tensor, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        rows = len(x) - 1 if wrong == "unwritten-output" else len(x)
        torch.matmul(x[:rows], w, out=out[:rows])
        return out

    prepared = providers.Prepared(ring[0], run, 1, weights.dense)
    x = torch.randn(4, weights.k, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match="provider wrong: relative error"):
        providers.check_product("wrong", prepared, ring, x, torch.empty(4, weights.n, dtype=torch.bfloat16))


@pytest.mark.parametrize(
    ("device", "dtype", "label"),
    [
        ("cuda", torch.float16, "cuBLAS fp16"),
        ("cpu", torch.bfloat16, "torch bf16"),
        ("cpu", torch.float32, "torch fp32"),
    ],
)
def test_the_dense_product_is_called_what_it_is(device: str, dtype: torch.dtype, label: str) -> None:
    dense = PROVIDERS["dense"]
    assert dense.label(torch.device(device), dtype) == label
    assert providers.is_dense(label) and providers.of_label(label) is dense
    assert PROVIDERS["ours"].label(torch.device(device), dtype) == "ours" and not providers.is_dense("ours")
    assert providers.of_label("marlin") is None


@pytest.mark.parametrize(("name", "on_cpu"), [("tinygemm", "torch int4"), ("bitsandbytes", "bitsandbytes NF4")])
def test_libraries_are_called_what_runs(name: str, on_cpu: str) -> None:
    provider = PROVIDERS[name]
    for device, label in (("cuda", name), ("cpu", on_cpu)):
        assert provider.label(torch.device(device), torch.bfloat16) == label
        assert providers.of_label(label) is provider


def test_the_shapes_that_libraries_take() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    for name, columns in (("tinygemm", 16), ("bitsandbytes", 32)):
        assert PROVIDERS[name].unfit(cpu, 128, 2 * columns) is None
        assert PROVIDERS[name].unfit(cpu, 128, columns + 8) == f"its N is a multiple of {columns}, not {columns + 8}"
        assert PROVIDERS[name].unfit(cuda, 128, columns + 8) is None
    assert PROVIDERS["bitsandbytes"].unfit(cuda, 96, 64) == "its K is a multiple of 64, not 96"


@pytest.fixture
def dummy() -> Iterator[None]:
    """A provider of a few lines, as providers.py shows how to write one."""

    class Doubled(Provider):
        name = "doubled"

        def unavailable(self, device: torch.device, dtype: torch.dtype, format: str, group_size: int) -> str | None:
            return None if group_size == 64 else "it has groups of 64 alone"

        def prepare(self, weights: Weights) -> Prepared[torch.Tensor]:
            w = 2 * weights.dense
            return Prepared(w, lambda w, x, out: torch.mm(x, w, out=out), w.nbytes, w)

    register(Doubled())
    yield
    del PROVIDERS["doubled"]


@pytest.mark.usefixtures("dummy")
def test_a_registered_provider_is_compared() -> None:
    options: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cpu", "budget_ms": 1, "progress": False}
    frame = wo.bench.sweep([(128, 64)], 1, ["ours", "doubled"], group_size=64, **options)
    assert list(frame["provider"]) == ["ours", "doubled"]
    everything = wo.bench.sweep([(128, 64)], 1, "all", group_size=32, **options)
    assert "doubled" not in set(everything["provider"])
    with pytest.raises(ValueError, match="doubled cannot run this: it has groups of 64 alone"):
        wo.bench.sweep([(128, 64)], 1, "doubled", group_size=32, **options)


@pytest.mark.usefixtures("dummy")
def test_a_provider_needs_a_name_of_its_own() -> None:
    with pytest.raises(ValueError, match="expected a new name, got 'doubled'"):
        register(PROVIDERS["doubled"])


PLUG_IN = """
from weightonly.bench import Prepared, Provider, register


class Mine(Provider):
    name = "mine"

    def prepare(self, weights):
        return Prepared(weights.dense, lambda w, x, out: x @ w, weights.dense.nbytes, weights.dense)


register(Mine())
"""


def test_a_plug_in_module_is_imported_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_provider.py").write_text(PLUG_IN)
    monkeypatch.syspath_prepend(tmp_path)
    arguments = "--shapes 128x64 --batch 1 --device cpu --group-size 64 --quiet --budget-ms 1 --plugin my_provider"
    try:
        assert main([*arguments.split(), "--providers", "ours,mine", "--csv", str(tmp_path / "s.csv")]) == 0
    finally:
        PROVIDERS.pop("mine", None)
    assert list(pd.read_csv(tmp_path / "s.csv")["provider"]) == ["ours", "mine"]


def _weights(group_size: int, symmetric: bool, format: str = "int4", dtype: torch.dtype = torch.bfloat16) -> Weights:
    return Weights.random(
        256,
        64,
        bits=4,
        format=format,
        group_size=group_size,
        symmetric=symmetric,
        dtype=dtype,
        device=torch.device("cpu"),
    )
