"""The processes that share a piece: one for each GPU over NCCL, or some on one CPU over gloo."""

from __future__ import annotations

import datetime
import gc
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import distributed, multiprocessing
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ..runner import Process

_TIMEOUT = datetime.timedelta(minutes=5)  # a rank that waits so long for another gives up: compiling takes its time


class RanksApart(RuntimeError):
    """Ranks are at different steps: one of them failed where the others did not."""


@dataclass(frozen=True)
class Ranks(Process):
    """The ranks, as one of them sees them. mesh: None where there is one alone, which sends nothing."""

    mesh: DeviceMesh | None
    control: distributed.ProcessGroup | None

    def most(self, value: float, step: int = 0) -> float:
        """The greatest value of all ranks, each of which gives one. Raises RanksApart where steps differ."""
        if self.control is None:
            return float(value)
        tensor = torch.tensor([float(value), step, -step], dtype=torch.float64, device=self.device)
        # In a group of its own: a rank that failed meets no other there in the middle of an all-reduce.
        distributed.all_reduce(tensor, distributed.ReduceOp.MAX, group=self.control)
        greatest, last, first = tensor.tolist()
        if last != -first:
            raise RanksApart(f"ranks are apart, at steps {int(-first)} and {int(last)}")
        return float(greatest)

    def agree(self, error: Exception | None) -> Exception | None:
        """An error where one of the ranks has one. Raises it where the others are at another step."""
        try:
            has_failed = self.most(error is not None, step=1)
        except RanksApart as apart:
            raise error or apart from apart
        return error or RuntimeError("on another rank") if has_failed else None


Work = Callable[[Ranks], None]


def launched_ranks() -> int | None:
    """How many processes torchrun has started, this one among them; None where it has not."""
    return int(os.environ["WORLD_SIZE"]) if distributed.is_torchelastic_launched() else None


def is_first() -> bool:
    """Whether this process speaks for all of torchrun's; any other process speaks for itself."""
    return launched_ranks() is None or os.environ["RANK"] == "0"


def run(count: int, device_type: str, work: Work) -> None:
    """Calls work(ranks) in `count` processes that begin here, or in this one, which torchrun has started.

    Raises RuntimeError, with the error of the first one that failed; the others are stopped then.
    """
    if launched_ranks() is not None:
        with _joined(int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"]), count, device_type, "env://") as ranks:
            work(ranks)
        return
    with tempfile.TemporaryDirectory() as folder:
        place = f"file://{Path(folder) / 'rendezvous'}"
        try:
            multiprocessing.spawn(partial(_child, count, device_type, place, work), nprocs=count)
        except (multiprocessing.ProcessRaisedException, multiprocessing.ProcessExitedException) as error:
            lines = [line for line in str(error).splitlines() if line]
            raise RuntimeError(f"{count} ranks: {lines[-1]}") from error


def _child(count: int, device_type: str, place: str, work: Work, rank: int) -> None:
    if device_type == "cpu":
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // count))
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all are on this machine; its name may have no address
    with _joined(rank, rank, count, device_type, place) as ranks:
        work(ranks)


@contextmanager
def _joined(rank: int, local_rank: int, count: int, device_type: str, place: str) -> Iterator[Ranks]:
    device = torch.device(device_type) if device_type == "cpu" else torch.device(device_type, local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if count == 1:
        yield Ranks(0, 1, device, None, None)
        return
    backend = "nccl" if device.type == "cuda" else "gloo"
    distributed.init_process_group(backend, init_method=place, rank=rank, world_size=count, timeout=_TIMEOUT)
    try:
        mesh = init_device_mesh(device_type, (count,))
        ranks = Ranks(rank, count, device, mesh, distributed.new_group(timeout=_TIMEOUT))
        yield ranks
        gc.collect()  # graphs that hold all-reduces go before NCCL, which waits for them
        ranks.most(0)  # nobody leaves while another is in an all-reduce
    finally:
        distributed.destroy_process_group()
