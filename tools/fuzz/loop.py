"""The loop of every target: case after case, until a budget is spent; where to go on, and how to repeat a failure.

A case is `seed:index`: its random numbers come from these two alone, so that it can be repeated by itself, and a run
that goes on at an index is the run that was not interrupted.
"""

from __future__ import annotations

import json
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

_SAVE_SECONDS = 10.0  # between two writes of a state file


@dataclass
class Outcome:
    """What one case found."""

    calls: int = 0
    failures: list[str] = field(default_factory=list)  # one text for each
    covered: set[str] = field(default_factory=set)  # names of what the target wants to have run
    fatal: bool = False  # nothing can follow in this process: a CUDA context is lost


class Target(ABC):
    """Draws cases and checks them."""

    name: str
    covers = "kernels run"  # what to_cover() counts

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @abstractmethod
    def run(self, seed: int, index: int) -> Outcome:
        """The case `seed:index`, alone. What goes wrong is a text in the outcome, not an exception."""

    def to_cover(self) -> set[str]:
        """Every name that `Outcome.covered` can hold."""
        return set()


@dataclass
class State:
    """How far a run is. `next_index` is the case to go on with."""

    target: str
    seed: int
    next_index: int = 0
    calls: int = 0
    seconds: float = 0.0
    failed: list[str] = field(default_factory=list)  # cases
    covered: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path) -> State:
        """Raises ValueError naming the file for anything that `write` has not written."""
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            state = cls(**record)
            numbers = (state.seed, state.next_index, state.calls)
            if not all(isinstance(number, int) for number in numbers) or not isinstance(state.target, str):
                raise TypeError
        except (ValueError, TypeError):
            raise ValueError(f"{path}: expected the state of a fuzz run, got something else") from None
        return state

    def write(self, path: Path) -> None:
        """In one step: an interrupted write leaves the file as it was."""
        beside = path.with_name(f"{path.name}.{os.getpid()}")
        beside.write_text(json.dumps(asdict(self)), encoding="utf-8")
        beside.replace(path)


def fuzz(
    target: Target,
    state: State,
    *,
    seconds: float | None = None,
    calls: int | None = None,
    most_failures: int = 5,
    path: Path | None = None,
    say: Callable[[str], object] = print,
) -> State:
    """Runs cases from `state.next_index` on and updates `state`, which it returns.

    Ends after `seconds` of this run, at `calls` calls of all runs that share the state, after `most_failures` failed
    cases, when interrupted (Ctrl-C), or when nothing can follow; each failure is told to `say`. path: where `state` is
    kept, written as it goes.

    Raises ValueError unless a budget is given.
    """
    if seconds is None and calls is None:
        raise ValueError("seconds, calls: expected at least one of them, got none")
    started = saved = time.perf_counter()
    before, failures = state.seconds, 0
    covered = set(state.covered)

    def save() -> None:
        state.seconds = before + time.perf_counter() - started
        state.covered = sorted(covered)
        if path is not None:
            state.write(path)

    try:
        while failures < most_failures and (calls is None or state.calls < calls):
            now = time.perf_counter()
            if seconds is not None and now - started >= seconds:
                break
            if now - saved >= _SAVE_SECONDS:
                save()
                saved = now
            outcome = target.run(state.seed, state.next_index)
            case = f"{state.seed}:{state.next_index}"
            state.next_index += 1
            state.calls += outcome.calls
            covered |= outcome.covered
            if outcome.failures:
                failures += 1
                state.failed.append(case)
                say(describe(target, case, outcome))
            if outcome.fatal:
                break
    except KeyboardInterrupt:
        say("interrupted")
    save()
    return state


def describe(target: Target, case: str, outcome: Outcome) -> str:
    """A failed case, and the command that repeats it."""
    command = f"python -m tools.fuzz --target {target.name} --device {target.device} --case {case}"
    return "\n  ".join([f"FAILED {target.name} {case}", *outcome.failures, command])


def summary(target: Target, state: State) -> str:
    """What a run did, and how to go on."""
    every = target.to_cover()
    lines = [
        f"{state.calls} random {target.name} in {state.next_index} cases, {len(state.failed)} failed, "
        f"{state.seconds:.0f} s, seed {state.seed}, on {target.device}"
    ]
    if every:
        lines.append(f"{target.covers}: {len(every & set(state.covered))} of {len(every)}")
    if state.failed:
        lines.append(f"failed cases: {' '.join(state.failed)}")
    lines.append(f"go on with --seed {state.seed} --start {state.next_index}")
    return "\n".join(lines)
