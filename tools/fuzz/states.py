"""Target "state": processes that save or convert are killed at a random moment; the next run goes on as if nothing was.

At every moment the target is absent or complete, an older complete file stays until a new one replaces it, and the next
run leaves nothing beside its result.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import tempfile
from pathlib import Path

import torch

import weightonly as wo
from weightonly.formats import convert

from .files import QUANTIZERS, write_checkpoint
from .loop import Outcome, Target


def _save(path: Path, value: int) -> None:
    weight = wo.preprocess(torch.full((256, 512), value % 8, dtype=torch.int8), bits=4)
    wo.save(path, {"w": weight, "value": torch.full((1 << 16,), float(value))})


def _work(kind: str, source: Path, target: Path, value: int) -> None:
    """Runs in a process of its own."""
    torch.set_num_threads(1)
    if kind == "save":
        _save(target, value)
    else:
        convert(source, target, shard_bytes=1, progress=False)


def _names(folder: Path, verify: bool) -> list[str]:
    return sorted(layer.name for layer in wo.load_checkpoint(folder, verify=verify, progress=False))


class States(Target):
    """Runs of `save` and `convert`, some of them killed, one after another in one folder."""

    name = "state"
    covers = "kinds of cases"

    def to_cover(self) -> set[str]:
        return {f"{kind} {end}" for kind in ("save", "convert") for end in ("killed", "done")}

    def run(self, seed: int, index: int) -> Outcome:
        draw = random.Random(f"state:{seed}:{index}")
        outcome = Outcome()
        kind = draw.choice(["save", "convert"])
        with tempfile.TemporaryDirectory() as made:
            top = Path(made)
            options, tensors = QUANTIZERS[draw.choice(list(QUANTIZERS))](torch.Generator().manual_seed(seed + index))
            write_checkpoint(top / "source", options, tensors, draw.randrange(1, 3))
            target = top / ("w.safetensors" if kind == "save" else "packed")
            held: set[int] = set()  # values that a complete file may have
            for step in range(4):
                outcome.calls += 1
                killed = self._run(
                    kind, top / "source", target, step, draw.random() * draw.choice([0.03, 0.03, 0.03, 1.0])
                )
                outcome.covered.add(f"{kind} {'killed' if killed else 'done'}")
                if kind == "convert" and not killed:
                    break
                held = held | {step} if killed else {step}
                self._check(kind, target, held, killed, outcome)
                if kind == "convert" and target.exists():
                    break  # killed after its target was there: a second run is refused
            if kind == "convert" and not target.exists():
                convert(top / "source", target, progress=False)
            elif kind == "save":
                _save(target, 99)
                held = {99}
            self._check(kind, target, held, False, outcome)
            left = [path.name for path in top.iterdir() if path.name not in ("source", target.name)]
            if left:
                outcome.failures.append(f"{kind}: left behind: {', '.join(left)}")
        return outcome

    def _run(self, kind: str, source: Path, target: Path, value: int, seconds: float) -> bool:
        """Whether the run was killed before it ended."""
        context = multiprocessing.get_context("fork")
        process = context.Process(target=_work, args=(kind, source, target, value))
        process.start()
        process.join(seconds)
        assert process.pid is not None
        if process.is_alive():
            os.kill(process.pid, signal.SIGKILL)
        process.join()
        return process.exitcode == -signal.SIGKILL

    def _check(self, kind: str, target: Path, held: set[int], may_lack: bool, outcome: Outcome) -> None:
        if not target.exists():
            if not may_lack and kind == "save":
                outcome.failures.append("save: it ended, and there is no file")
            return
        try:
            if kind == "convert":
                names, wanted = _names(target, verify=True), _names(target.with_name("source"), verify=False)
                if names != wanted:
                    outcome.failures.append(f"convert: expected {wanted}, got {names}")
                return
            value = wo.load(target)["value"]
            assert isinstance(value, torch.Tensor)
            if not (bool((value == value[0]).all()) and int(value[0]) in held):
                outcome.failures.append(f"save: expected one of {sorted(held)}, got {value.unique().tolist()}")
        except Exception as error:
            outcome.failures.append(f"{kind}: what a killed run left: {type(error).__name__}: {error}")
