"""Timing of one short GPU call: a CUDA graph of a chain of calls, over weights that the L2 does not hold.

A decode GEMM takes a few microseconds, less than its eager launch, and a benchmark that repeats it over one
weight measures the L2. So the caller prepares several copies of the weights (`copies_beyond_l2`) and passes
one call per copy; the calls, repeated in that order, become one graph, and the graph is replayed between CUDA
events.
"""

from __future__ import annotations

import functools
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

import weightonly as wo
from weightonly.launch import LaunchOverlap

Call = Callable[[], object]
Agree = Callable[[float], float]
"""The greatest of the numbers of all processes that time the same calls together; one process has its own."""

_L2_MULTIPLE = 3  # different bytes between two uses of one copy, in L2 sizes
_COPIES_LIMIT_BYTES = 2 << 30
_GRAPH_US = 1000.0  # a replay costs a few us beside its launches: 1 ms of them makes that less than 1%
_GRAPH_LAUNCHES = 4096
_REPLAYS = (3, 50)

_ROUNDS = 3  # in each round all timers measure, one after another

# A GPU that multiplies large matrices for long lowers its clocks. Calls that take so long are timed as they are then:
# before each measurement the GPU is kept busy with them for some time. Before shorter ones it rests.
_LONG_US = 400.0
_SETTLE_MS = 60.0
_REST_MS = 20.0


@dataclass(frozen=True)
class Timing:
    """us per call over the replays (CPU: over the calls). `coarse`: one quick measurement, not repeated."""

    us: float  # median
    min_us: float
    p10_us: float
    p90_us: float
    coarse: bool = False

    @classmethod
    def of(cls, samples_us: Sequence[float], coarse: bool = False) -> Timing:
        ordered = sorted(samples_us)

        def quantile(q: float) -> float:
            return ordered[round(q * (len(ordered) - 1))]

        return cls(statistics.median(ordered), ordered[0], quantile(0.1), quantile(0.9), coarse)


@contextmanager
def overlapping(overlap: LaunchOverlap) -> Iterator[None]:
    """Inside the with statement launches of `gemm` overlap as `wo.set_launch_overlap` says, after it as before."""
    before = wo.launch_overlap()
    wo.set_launch_overlap(overlap)
    try:
        yield
    finally:
        wo.set_launch_overlap(before)


def copies_beyond_l2(weight_bytes: int, device: torch.device, other_bytes: int = 0) -> int:
    """How many copies of one weight to rotate so that every call reads its weights from memory.

    Between two uses of a copy three times the L2 pass through the cache: the other copies, and `other_bytes` that are
    the same in all calls, x and y, once. 2 GB of copies at most (two copies always). A CPU gets one: nothing here
    rotates its caches.
    """
    if device.type != "cuda":
        return 1
    l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    wanted = math.ceil((_L2_MULTIPLE * l2_bytes - other_bytes) / weight_bytes) + 1
    return max(2, min(wanted, _COPIES_LIMIT_BYTES // weight_bytes))


@functools.cache
def _capture_stream(device_index: int) -> torch.cuda.Stream:
    """One for all captures: cuBLAS keeps a workspace for every stream that it has seen."""
    return torch.cuda.Stream(device_index)


def _capture(calls: Sequence[Call], repeats: int, stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    # thread_local: NCCL has a thread of its own, which asks for events meanwhile.
    # Not `with torch.cuda.graph(...)`: each time it empties the allocator's cache, which takes longer than
    # measuring a short kernel.
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            for _ in range(repeats):
                for call in calls:
                    call()
        finally:
            graph.capture_end()
    return graph


def _replays_us(graph: torch.cuda.CUDAGraph, launches: int, replays: int) -> list[float]:
    """us per launch of each replay. The replays are queued together, so that the host's latency stays out."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
    graph.replay()
    marks[0].record()
    for mark in marks[1:]:
        graph.replay()
        mark.record()
    marks[-1].synchronize()
    return [a.elapsed_time(b) * 1e3 / launches for a, b in itertools.pairwise(marks)]


def wait(device: torch.device) -> None:
    """Returns when a GPU has done all that it was given; at once on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _eager_us(calls: Sequence[Call], device: torch.device, budget_ms: float, agree: Agree = float) -> list[float]:
    """us of single calls, one after another, the device waited for after each."""
    fewest, most = _REPLAYS
    samples_us: list[float] = []
    begin = time.perf_counter()
    while agree(time.perf_counter() - begin) < budget_ms / 1e3 or len(samples_us) < fewest:
        if len(samples_us) == most:
            break
        start = time.perf_counter()
        calls[len(samples_us) % len(calls)]()
        wait(device)
        samples_us.append((time.perf_counter() - start) * 1e6)
    return samples_us


def _release_old_graphs() -> None:
    """Gives back the memory of graphs that are gone. The allocator keeps it, and cannot free it during a capture."""
    total_bytes = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    if torch.cuda.memory_reserved() > total_bytes // 4:
        torch.cuda.empty_cache()


def _run_apart(calls: Sequence[Call]) -> torch.cuda.Stream:
    """Runs calls once outside a capture: modules are loaded, cuBLAS makes its handle, gemm its plan. The stream that
    they are to be captured on."""
    stream = _capture_stream(torch.cuda.current_device())
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.synchronize()
    return stream


def captured(call: Call, device: torch.device) -> Call:
    """Runs `call` once, and returns a replay of it as one CUDA graph; on a CPU `call` itself."""
    if device.type != "cuda":
        call()
        return call
    with torch.cuda.device(device):
        _release_old_graphs()
        return _capture([call], 1, _run_apart([call])).replay


class CallTimer:
    """Times calls in rounds, so that several that alternate meet the same clocks and temperature.

    `calls`: the same work on different copies of the weights, one after another (see `copies_beyond_l2`). On CUDA they
    are captured, when the first round begins: they must launch on the current stream and not synchronize.
    `agree`: of processes with calls that wait for each other, so that all repeat them equally often.
    """

    def __init__(self, calls: Sequence[Call], device: torch.device, agree: Agree = float) -> None:
        if not calls:
            raise ValueError("calls: expected at least one, got none")
        self._calls, self._device, self._agree = calls, device, agree
        self.on_gpu = device.type == "cuda"
        self._samples_us: list[float] = []
        self._graph: torch.cuda.CUDAGraph | None = None
        self._quick_us = 0.0  # of a call, the first measurement
        self._launches = 0  # calls of a replay
        self._replay_us = 0.0  # of a replay, a first estimate

    def prepare(self) -> float:
        """Captures, the first time; returns a first quick measurement, us per call."""
        if not self.on_gpu:
            self._calls[0]()
            start = time.perf_counter()
            self._calls[0]()
            return self._agree((time.perf_counter() - start) * 1e6)
        if self._graph is not None:
            return self._quick_us
        calls = self._calls
        with torch.cuda.device(self._device):
            _release_old_graphs()
            stream = _run_apart(calls)
            once = _capture(calls, 1, stream)
            quick_us = self._agree(min(_replays_us(once, len(calls), 2)))
            once_us = quick_us * len(calls)
            repeats = max(1, min(math.ceil(_GRAPH_US / once_us), _GRAPH_LAUNCHES // len(calls)))
            self._graph = once if repeats == 1 else _capture(calls, repeats, stream)
        self._quick_us, self._launches, self._replay_us = quick_us, len(calls) * repeats, once_us * repeats
        return quick_us

    def round(self, budget_ms: float, settle_ms: float = 0.0) -> None:
        """Some more samples, in about this device time, three at least.

        On CUDA after one eager call, which may overlap with others, and settle_ms of the same work.
        """
        fewest, most = _REPLAYS
        if not self.on_gpu:
            self._samples_us += _eager_us(self._calls, self._device, budget_ms, self._agree)
            return
        if self._graph is None:
            self.prepare()
        assert self._graph is not None
        replays = max(fewest, min(most, int(budget_ms * 1e3 / self._replay_us)))
        with torch.cuda.device(self._device):
            # One call as programs make it, eager and overlapping. The kernels of a graph take 0.35 us more each if the
            # last such launch was not a programmatic one (bench/measurements/LOG.md): each is timed in the state that
            # its own calls leave.
            with overlapping(True):
                self._calls[0]()
            for _ in range(math.ceil(settle_ms * 1e3 / self._replay_us)):
                self._graph.replay()
            self._samples_us += _replays_us(self._graph, self._launches, replays)

    def timing(self) -> Timing:
        """Of all rounds so far."""
        return Timing.of(self._samples_us)


def time_calls(
    calls: Sequence[Call], device: torch.device, *, budget_ms: float = 50.0, give_up_us: float = math.inf
) -> Timing:
    """Median time of one call in us.

    Args:
        calls: as for `CallTimer`.
        device: that computes them.
        budget_ms: of the timed work (three replays are made whatever they take).
        give_up_us: a first quick measurement slower than this per call is returned as it is, marked `coarse`.

    Examples:
        >>> x = torch.randn(64, 64)
        >>> wo.bench.time_calls([lambda: x @ x], torch.device("cpu"), budget_ms=1).us > 0
        True
    """
    timer = CallTimer(calls, device)
    quick_us = timer.prepare()
    if quick_us > give_up_us:
        return Timing.of([quick_us], coarse=True)
    timer.round(budget_ms)
    return timer.timing()


def time_in_rounds(
    timers: Sequence[CallTimer], budget_ms: float, after_round: Callable[[int], None] | None = None
) -> list[Timing]:
    """The timings of several that alternate: budget_ms for all rounds of one. after_round(i) follows each of i."""
    is_long = min(timer.prepare() for timer in timers) > _LONG_US
    for _ in range(_ROUNDS):
        for i, timer in enumerate(timers):
            if not is_long and timer.on_gpu:
                time.sleep(_REST_MS / 1e3)
            timer.round(budget_ms / _ROUNDS, _SETTLE_MS if is_long else 0.0)
            if after_round is not None:
                after_round(i)
    return [timer.timing() for timer in timers]


def time_eager(call: Call, device: torch.device, *, budget_ms: float) -> Timing:
    """Median time of one eager call in us, as a program sees a long one: the device is waited for after each.

    Three calls at least, and as many more as begin within `budget_ms`; before them two that are not counted.
    """
    for _ in range(2):
        call()
    wait(device)
    return Timing.of(_eager_us([call], device, budget_ms))


def host_us(fn: Call, device: torch.device, *, calls: int = 200, rounds: int = 9) -> float:
    """Host time of one eager call in us (median of `rounds`), without waiting for the device.

    The device is synchronized between rounds, and a round is shorter than the launch queue (some 1000 launches), or the
    host would wait for the device and the number would be the kernel's. On a CPU it is the time of the whole call.

    Args:
        fn: the call.
        device: that computes it.
        calls: of a round.
        rounds: of which the median is taken.

    Raises:
        ValueError: `calls` or `rounds` below 1.

    Examples:
        >>> x = torch.randn(64, 64)
        >>> wo.bench.host_us(lambda: x @ x, torch.device("cpu"), calls=2, rounds=3) > 0
        True
    """
    if calls < 1 or rounds < 1:
        raise ValueError(f"calls, rounds: expected at least 1, got {calls} and {rounds}")

    for _ in range(min(calls, 20)):
        fn()
    samples_us: list[float] = []
    for _ in range(rounds):
        wait(device)
        start = time.perf_counter()
        for _ in range(calls):
            fn()
        samples_us.append((time.perf_counter() - start) * 1e6 / calls)
    wait(device)
    return statistics.median(samples_us)
