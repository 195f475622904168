"""The plan of a layer of experts for few tokens: what it hands to kernels, for which a stand-in computes."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from stand_in import SM_COUNT, STREAM, declared

import weightonly as wo
from weightonly.experts import Gate, Product
from weightonly.heuristics.configs import GROUPED_CONFIGS
from weightonly.heuristics.families.grouped_decode_sm90 import GroupedDecodeSm90
from weightonly.plan import cache
from weightonly.plan import experts as layer_plans

EXPERTS, HIDDEN, INNER = 5, 64, 128
CONFIG = next(c for c in GROUPED_CONFIGS if c.rules.lists_rows and "int4" in c.formats)


def at(address: int, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """The tensor that is at an address, not copied."""
    count = torch.Size(shape).numel()
    content = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(content, dtype=dtype, count=count).view(shape)


class Kernels:
    """Computes the two products and the sum of a layer, with the weights that are packed at an address."""

    def __init__(self, weights: dict[int, torch.Tensor]) -> None:
        self.weights = weights  # address of packed weights -> w [E, K, N]
        self.launches: list[str] = []
        self.sizes: list[dict[str, Any]] = []
        self.rows: list[tuple[int, int]] = []  # of the list of tiles that was written last: expert, choice
        kernels = self

        class GroupedPlan:
            def __init__(self, **sizes: Any) -> None:
                assert set(sizes) <= set(declared()["GroupedPlan.__init__"])
                self.sizes = sizes
                kernels.sizes.append(sizes)

            def launch_choices(self, *arguments: int) -> None:
                given = dict(zip(declared()["GroupedPlan.launch_choices"], arguments, strict=True))
                kernels.multiply(self.sizes, given)

        self.GroupedPlan = GroupedPlan

    def multiply(self, sizes: dict[str, Any], p: dict[str, int]) -> None:
        m, k, n = sizes["m"], sizes["k"], sizes["n"]
        assert p["stream"] == STREAM and p["ldx"] == k
        if p["ids"]:
            self.launches.append("sort, multiply, gate")
            ids = at(p["ids"], torch.int64 if sizes["is_int64"] else torch.int32, m).tolist()
            here = [(e, choice) for choice, e in enumerate(ids) if 0 <= e < sizes["experts"]]
            others = [choice for choice, e in enumerate(ids) if not 0 <= e < sizes["experts"]]
            self.rows = sorted(here)
            for row, choice in enumerate([choice for _, choice in self.rows] + others):
                at(p["places"], torch.int32, m)[choice] = row
            at(p["list"], torch.int32, 2 + 2 * m)[1] = len(here)
            source = [choice // sizes["top_k"] for _, choice in self.rows]
        else:
            self.launches.append("multiply")
            source = list(range(len(self.rows)))
        x = at(p["x"], torch.float16, max(source) + 1, k).float()
        w = self.weights[p["weight"]]
        z = torch.stack([x[row] @ w[e] for row, (e, _) in zip(source, self.rows, strict=True)])
        if p["bias"]:
            z += at(p["bias"], torch.float16, sizes["experts"], n).float()[[e for e, _ in self.rows]]
        if sizes.get("is_gated"):
            gate, up = z.half().float().chunk(2, dim=1)
            assert sizes["activation"] == 3, "silu"
            z = torch.nn.functional.silu(gate) * up
        assert p["ldy"] == z.shape[1]
        at(p["y"], torch.float16, m, z.shape[1])[: len(self.rows)] = z.half()

    def combine(self, *arguments: int) -> None:
        p = dict(zip(declared()["combine"], arguments, strict=True))
        self.launches.append("add")
        tokens, top_k, columns = p["tokens"], p["top_k"], p["columns"]
        end = int(at(p["offs"], torch.int32, 1))
        rows = at(p["rows"], torch.float16, tokens * top_k, columns).float()
        places = at(p["places"], torch.int32, tokens, top_k).long()
        weights = at(p["weights"], torch.float32, tokens, top_k) * (places < end)
        rows = torch.where(torch.arange(tokens * top_k)[:, None] < end, rows, 0.0)
        at(p["y"], torch.float16, tokens, columns)[:] = (rows[places] * weights[..., None]).sum(1).half()


Layer = tuple[Product, Product, Kernels]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Layer]]:
    """Products of a layer, for which an H200's kernels stand in."""

    def made(generator: torch.Generator, bias: bool = False) -> Layer:
        products, dense = [], {}
        for k, n in ((HIDDEN, 2 * INNER), (INNER, HIDDEN)):
            q = torch.randint(-8, 8, (EXPERTS, k, n), generator=generator, dtype=torch.int8)
            scales = torch.full((EXPERTS, 1, n), 2.0**-6).half()
            given = torch.randn(EXPERTS, n, generator=generator).half() if bias else None
            products.append(Product(wo.preprocess(q, bits=4, layout="tiled"), scales, None, given))
            dense[products[-1].qweight.data.data_ptr()] = q.float() * 2.0**-6
        kernels = Kernels(dense)
        for name, value in (
            ("_C", kernels),
            ("select_grouped", lambda problem, experts: CONFIG),
            ("device_arch", lambda device: 90),
            ("sm_count", lambda device: SM_COUNT),
            ("runs_on", lambda config, arch: True),
            ("is_compiled", lambda config, types: True),
            ("grouped_kernel_numbers", Numbers),
            ("_current_stream", lambda device: STREAM),
        ):
            monkeypatch.setattr(layer_plans, name, value)
        monkeypatch.setattr(GroupedDecodeSm90, "lists_verified", True)
        cache.clear()
        return products[0], products[1], kernels

    yield made
    cache.clear()


class Numbers(dict[str, int]):
    def __missing__(self, name: str) -> int:
        return 0


def choices(
    tokens: int, top_k: int, dtype: torch.dtype, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = torch.randn(tokens, HIDDEN, generator=generator).half()
    ids = torch.randint(-1, EXPERTS + 1, (tokens, top_k), generator=generator).to(dtype)
    return x, ids, torch.rand(tokens, top_k, generator=generator).half()


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(("tokens", "top_k"), [(1, 2), (3, 1), (16, 8)], ids=str)
def test_three_launches_give_what_the_cpu_gives(
    tokens: int, top_k: int, dtype: torch.dtype, bias: bool, make: Callable[..., Layer], generator: torch.Generator
) -> None:
    first, second, kernels = make(generator, bias)
    x, ids, weights = choices(tokens, top_k, dtype, generator)
    ids[0, 0] = 0  # one at least
    w13, w2 = ((p.qweight, p.scales, p.zeros, p.bias) for p in (first, second))
    wanted = wo.fused_experts(x, w13, w2, ids, weights, "silu")
    for _ in range(2):  # the second time by the plan that is kept
        y = layer_plans.decode_layer(x, ids, weights, first, Gate("silu"), second)
        assert y is not None
        torch.testing.assert_close(y, wanted, rtol=1e-2, atol=4e-3)
    assert kernels.launches == 2 * ["sort, multiply, gate", "multiply", "add"]
    assert len(kernels.sizes) == 2


def test_what_takes_other_launches(
    make: Callable[..., Layer], generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, kernels = make(generator)
    x, ids, weights = choices(16, 8, torch.int64, generator)

    def takes(x: torch.Tensor = x, ids: torch.Tensor = ids, first: Product = first, second: Product = second) -> bool:
        return layer_plans.decode_layer(x, ids, weights[: len(ids)], first, Gate("silu"), second) is not None

    assert takes()
    perm = torch.arange(HIDDEN).repeat(EXPERTS, 1)
    strided = torch.randn(16, 2 * HIDDEN, generator=generator).half()[:, :HIDDEN]
    shifted = torch.randn(16 * HIDDEN + 1, generator=generator).half()[1:].view(16, HIDDEN)
    for tokens in (17, 0):  # 136 choices, none
        other_x, other_ids, _ = choices(tokens, 8, torch.int64, generator)
        assert not takes(other_x, other_ids)
    assert not takes(first=Product(first.qweight, first.scales, perm=perm)), "act-order"
    assert not takes(x=strided) and not takes(x=shifted), "rows that vectors do not read"
    assert not takes(x=x.float()), "dtypes without kernels"
    sparse = second.scales.repeat_interleave(2, 2)[:, :, ::2]
    between = torch.cat([second.scales.flatten(), second.scales.flatten()])[1 : 1 + second.scales.numel()]
    assert not takes(second=Product(second.qweight, sparse))
    assert not takes(second=Product(second.qweight, between.view_as(second.scales))), "an address that is no vector's"
    assert takes()
    count = len(kernels.launches)
    monkeypatch.setattr(GroupedDecodeSm90, "lists_verified", False)
    cache.clear()
    assert not takes() and len(kernels.launches) == count, "kernels that no GPU has run so"
