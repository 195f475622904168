"""How the benchmark times calls: medians, the host's share, launch overlap, weights beyond the L2."""

from __future__ import annotations

import functools
import types

import pytest
import torch

import weightonly as wo
from weightonly.bench import timing


def test_timing_is_the_median_and_goes_through_every_call() -> None:
    seen: list[int] = []
    result = timing.time_calls([functools.partial(seen.append, i) for i in range(4)], torch.device("cpu"), budget_ms=5)
    assert set(seen) == {0, 1, 2, 3}
    assert 0 < result.min_us <= result.p10_us <= result.us <= result.p90_us
    assert not result.coarse
    assert timing.Timing.of([3.0, 1.0, 2.0, 50.0, 4.0]) == timing.Timing(3.0, 1.0, 1.0, 50.0)


def test_timing_gives_up_on_a_slow_call_after_one_measurement() -> None:
    seen: list[int] = []
    result = timing.time_calls([lambda: seen.append(1)], torch.device("cpu"), give_up_us=0.0)
    assert result.coarse and len(seen) == 2  # the warm-up and the measurement


def test_host_us_is_per_call() -> None:
    seen: list[int] = []
    assert 0 < timing.host_us(lambda: seen.append(1), torch.device("cpu"), calls=10, rounds=3) < 1e5
    assert len(seen) == 10 + 3 * 10


def test_overlap_is_what_it_was_after_a_measurement() -> None:
    def fail() -> None:
        with timing.overlapping(False):
            assert not wo.launch_overlap()
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        fail()
    assert wo.launch_overlap()


@pytest.mark.parametrize("other_bytes", [0, 30 << 20, 1 << 30])
def test_what_all_calls_share_passes_the_l2_once(monkeypatch: pytest.MonkeyPatch, other_bytes: int) -> None:
    l2_bytes, weight_bytes = 60 << 20, 9 << 20
    gpu = types.SimpleNamespace(L2_cache_size=l2_bytes)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    count = timing.copies_beyond_l2(weight_bytes, torch.device("cuda"), other_bytes)
    assert (count - 1) * weight_bytes + other_bytes >= 3 * l2_bytes
    assert count == 2 or (count - 2) * weight_bytes + other_bytes < 3 * l2_bytes


@pytest.mark.gpu
def test_rotated_weights_pass_the_l2(cuda_device: torch.device) -> None:
    l2_bytes = torch.cuda.get_device_properties(cuda_device).L2_cache_size
    assert (timing.copies_beyond_l2(1 << 20, cuda_device) - 1) << 20 >= 3 * l2_bytes
    assert timing.copies_beyond_l2(1 << 32, cuda_device) == 2


@pytest.mark.gpu
def test_each_round_begins_with_a_call_as_programs_make_it(cuda_device: torch.device) -> None:
    """The last launch outside of graphs decides in which state the GPU is (bench/measurements/LOG.md)."""
    x = torch.zeros(1 << 20, device=cuda_device)
    seen: list[tuple[object, bool]] = []

    def call() -> None:
        seen.append((wo.launch_overlap(), torch.cuda.is_current_stream_capturing()))
        x.add_(1)

    with timing.overlapping(False):
        timer = timing.CallTimer([call], cuda_device)
        timer.prepare()
        assert {overlap for overlap, _ in seen} == {False}
        seen.clear()
        timer.round(1.0)
        timer.round(1.0)
        assert seen == [(True, False)] * 2
        assert not wo.launch_overlap()
