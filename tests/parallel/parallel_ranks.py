"""Runs cases on several processes: `python -m tests.parallel.parallel_ranks DEVICE MODULE OUT RANKS...`.

MODULE, of this folder, has CASES, name -> function(mesh) -> error, a number or None, and RANKS, name -> on how many
ranks it runs. OUT becomes JSON: how many ranks -> name -> the greatest error of all of them, or the tracebacks of those
that failed. Where a case fails, its processes end, as others may wait for the one that failed: new ones run the
cases after it. DEVICE: cpu, where ranks talk over gloo, or cuda, where each has a GPU and they talk over NCCL. On a CPU
one process imports torch and is forked: a rank costs no start.
"""

from __future__ import annotations

import ctypes
import datetime
import faulthandler
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from tests import ROOT

TIMEOUT_S = {"cpu": 900, "cuda": 240}
CASE_S = {"cpu": 600, "cuda": 60}
"""A rank that is so long in one case ends: a kernel waits for another GPU for ever."""

_PR_SET_PDEATHSIG = 1


def run(module: str, ranks: Sequence[int], folder: Path, device: str = "cpu") -> dict[str, dict[str, Any]]:
    """The results of a module's cases on 2 ranks, on 4, and so on; for tests."""
    out = folder / f"{module}.json"
    one_thread = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    environment = os.environ | one_thread | {"GLOO_SOCKET_IFNAME": "lo", "TOKENIZERS_PARALLELISM": "false"}
    environment |= {"PYTHONDONTWRITEBYTECODE": "1"} | ({"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {})
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "tests.parallel.parallel_ranks", device, module, str(out), *map(str, ranks)]
    log = folder / f"{module}.log"
    with log.open("w") as file:
        done = subprocess.run(command, env=environment, cwd=folder, stdout=file, stderr=file, timeout=TIMEOUT_S[device])
    assert done.returncode == 0, log.read_text()
    found: dict[str, dict[str, Any]] = json.loads(out.read_text())
    return found


def has_loopback() -> bool:
    """Whether processes of this machine can talk to each other as gloo does."""
    with socket.socket() as listener:
        try:
            listener.bind(("127.0.0.1", 0))
        except OSError:
            return False
    return True


def cases_of(module: str) -> ModuleType:
    return importlib.import_module(f"tests.parallel.{module}")


def names(module: str, ranks: int) -> list[str]:
    """The cases that run on so many ranks."""
    found = cases_of(module)
    return [name for name in found.CASES if ranks in found.RANKS[name]]


def check(results: dict[str, Any], name: str, bound: float) -> None:
    """Fails where a case failed, and where its error is above the bound."""
    result = results[name]
    assert not isinstance(result, str), result
    assert result is None or result <= bound, f"{name}: error {result}, bound {bound}"


def _rank(device: str, module: str, rank: int, ranks: int, folder: Path, first: int) -> bool:
    """Runs the cases from place `first` on; whether all of them passed."""
    import torch
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh

    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks))  # what torchrun says
    if device == "cuda":
        torch.cuda.set_device(rank)
    distributed.init_process_group(
        "gloo" if device == "cpu" else "nccl",
        init_method=f"file://{folder / 'rendezvous'}",
        rank=rank,
        world_size=ranks,
        timeout=datetime.timedelta(seconds=TIMEOUT_S[device]),
    )
    mesh = init_device_mesh(device, (ranks,))
    results: dict[str, Any] = {}
    start = time.monotonic()
    cases = cases_of(module).CASES
    for name in names(module, ranks)[first:]:
        if rank == 0:
            print(f"{time.monotonic() - start:.2f} s until {name}", flush=True)
        faulthandler.dump_traceback_later(CASE_S[device], exit=True)
        try:
            results[name] = cases[name](mesh)
        except BaseException:  # that of pytest.raises, too
            results[name] = f"rank {rank}: {traceback.format_exc()}"
            print(f"{name}: {results[name]}", flush=True)
            return False  # without a goodbye: the others may be in the middle of a sum
        finally:
            (folder / f"{rank}.json").write_text(json.dumps(results))
    gc.collect()  # graphs that hold sums go before NCCL, which waits for them
    distributed.destroy_process_group()
    return True


def _results(device: str, module: str, ranks: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    while len(found) < len(names(module, ranks)):
        found |= _up_to_a_failure(device, module, ranks, len(found))
    return found


def _up_to_a_failure(device: str, module: str, ranks: int, first: int) -> dict[str, Any]:
    """The results of cases from place `first` on, in new processes; the last one is that of a failure, if there is."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        children = []
        for rank in range(ranks):
            if device == "cuda":  # which lives through no fork
                command = [sys.executable, "-m", "tests.parallel.parallel_ranks", "rank", device, module]
                children.append(subprocess.Popen([*command, str(rank), str(ranks), name, str(first)]).pid)
                continue
            child = os.fork()
            if child == 0:
                status = 1
                try:
                    status = 0 if _rank(device, module, rank, ranks, folder, first) else 1
                except BaseException:
                    traceback.print_exc()
                finally:
                    sys.stdout.flush()
                    sys.stderr.flush()
                    os._exit(status)
            children.append(child)
        while children:
            child, status = os.wait()
            children.remove(child)
            if status:
                time.sleep(1)  # for what the others say; then they would wait for this one
                for other in children:
                    os.kill(other, signal.SIGKILL)
        found = [json.loads(file.read_text()) for file in sorted(folder.glob("[0-9]*.json"))]
    merged: dict[str, Any] = {}
    for name in names(module, ranks)[first:]:
        values = [result[name] for result in found if name in result]
        failures = [value for value in values if isinstance(value, str)]
        if failures or len(values) < ranks:
            merged[name] = "\n".join(failures) or f"{len(values)} of {ranks} ranks came to the end of this case"
            break
        errors = [value for value in values if value is not None]
        merged[name] = max(errors, default=None)
    return merged


if __name__ == "__main__":
    if sys.argv[1] == "rank":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # a GPU would wait for the others for ever
        device, module, rank, count, place, first = sys.argv[2:]
        os._exit(0 if _rank(device, module, int(rank), int(count), Path(place), int(first)) else 1)
    device, module, out = sys.argv[1:4]
    cases_of(module)
    importlib.import_module("torch._dynamo")  # DTensor does, in each rank, where it is not there yet
    results_of: dict[str, Any] = {}
    for number in sys.argv[4:]:
        results_of[number] = _results(device, module, int(number))
        Path(out).write_text(json.dumps(results_of))
