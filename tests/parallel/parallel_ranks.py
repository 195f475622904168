"""Runs cases on several processes that talk over gloo: `python -m tests.parallel.parallel_ranks MODULE OUT RANKS...`.

MODULE, of this folder, has CASES, name -> function(mesh) -> error, a number or None, and RANKS, name -> on how many
ranks it runs. OUT becomes JSON: how many ranks -> name -> the greatest error of all of them, or the traceback of the
first that failed. One process imports torch and is forked: a rank costs no start.
"""

from __future__ import annotations

import datetime
import importlib
import json
import os
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

TIMEOUT_S = 900


def run(module: str, ranks: Sequence[int], folder: Path) -> dict[str, dict[str, Any]]:
    """The results of a module's cases on 2 ranks, on 4, and so on, up to a number where one fails; for tests."""
    out = folder / f"{module}.json"
    one_thread = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    environment = os.environ | one_thread | {"GLOO_SOCKET_IFNAME": "lo", "TOKENIZERS_PARALLELISM": "false"}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "PYTHONDONTWRITEBYTECODE": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "tests.parallel.parallel_ranks", module, str(out), *map(str, ranks)]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    found = json.loads(out.read_text())
    missing = f"not run: a case failed on {list(found)[-1]} ranks"
    return {str(number): found.get(str(number)) or dict.fromkeys(names(module, number), missing) for number in ranks}


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


def _rank(module: str, rank: int, ranks: int, folder: Path) -> None:
    import torch
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh

    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks))  # what torchrun says
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'rendezvous'}",
        rank=rank,
        world_size=ranks,
        timeout=datetime.timedelta(seconds=TIMEOUT_S),
    )
    mesh = init_device_mesh("cpu", (ranks,))
    results: dict[str, Any] = {}
    start = time.monotonic()
    cases = cases_of(module).CASES
    for name in names(module, ranks):
        if rank == 0:
            print(f"{time.monotonic() - start:.2f} s until {name}", flush=True)
        try:
            results[name] = cases[name](mesh)
        except BaseException:  # that of pytest.raises, too
            results[name] = f"rank {rank}: {traceback.format_exc()}"
            break  # the others may wait for this rank: their cases are over, too
    (folder / f"{rank}.json").write_text(json.dumps(results))
    distributed.destroy_process_group()


def _results(module: str, ranks: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        children = []
        for rank in range(ranks):
            child = os.fork()
            if child == 0:
                status = 1
                try:
                    _rank(module, rank, ranks, folder)
                    status = 0
                except BaseException:
                    traceback.print_exc()
                finally:
                    sys.stdout.flush()
                    sys.stderr.flush()
                    os._exit(status)
            children.append(child)
        for child in children:
            os.waitpid(child, 0)
        found = [json.loads(file.read_text()) for file in sorted(folder.glob("[0-9]*.json"))]
    merged: dict[str, Any] = {}
    for name in names(module, ranks):
        values = [result[name] for result in found if name in result]
        failures = [value for value in values if isinstance(value, str)]
        if failures or len(values) < ranks:
            merged[name] = failures[0] if failures else f"{len(values)} of {ranks} ranks came to this case"
        else:
            errors = [value for value in values if value is not None]
            merged[name] = max(errors, default=None)
    return merged


if __name__ == "__main__":
    cases_of(sys.argv[1])
    importlib.import_module("torch._dynamo")  # DTensor does, in each rank, where it is not there yet
    results_of: dict[str, Any] = {}
    for number in sys.argv[3:]:
        results_of[number] = _results(sys.argv[1], int(number))
        if any(isinstance(result, str) for result in results_of[number].values()):
            break
    Path(sys.argv[2]).write_text(json.dumps(results_of))
