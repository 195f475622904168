"""`python -m tools.fuzz`: random cases against an oracle, on a CPU or a GPU."""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from pathlib import Path

from weightonly.bench.command import Command, run_command
from weightonly.bench.devices import default_device

from . import TARGETS, State, fuzz
from .guided import guided
from .loop import describe, summary

HELP = "try random calls, files and kills, and compare with an fp64 oracle or with what has to be refused"
SECONDS = 60.0


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", choices=tuple(TARGETS), default="calls", help="what to try (default calls)")
    parser.add_argument("--seconds", type=float, help=f"stop after so long (default {SECONDS:g}, or --calls alone)")
    parser.add_argument("--calls", type=_count, help="stop at so many, those that --state remembers counted in")
    parser.add_argument("--seed", type=_count, help="default: a new one, printed")
    parser.add_argument("--start", type=_count, help="index of the first case (default 0)")
    parser.add_argument("--state", metavar="FILE", type=Path, help="go on where FILE says, and write it")
    parser.add_argument("--case", metavar="SEED:INDEX", type=_case, help="this one case alone")
    parser.add_argument("--failures", type=_count, default=5, help="stop after so many failed cases (default 5)")
    parser.add_argument(
        "--coverage",
        metavar="FOLDER",
        type=Path,
        help="let coverage of the readers choose the files (target files; needs atheris), inputs kept in FOLDER",
    )
    parser.add_argument("--device", help="cuda, cuda:1 or cpu (default: a GPU where there is one)")


def run(options: argparse.Namespace) -> int:
    """1 if a case failed, else 0. Raises ValueError for options that contradict."""
    if options.coverage is not None:
        return _run_guided(options)
    target = TARGETS[options.target](default_device(options.device))
    if options.case is not None:
        seed, index = options.case
        outcome = target.run(seed, index)
        if outcome.failures:
            print(describe(target, f"{seed}:{index}", outcome))
        else:
            print(f"{target.name} {seed}:{index} on {target.device}: {outcome.calls} calls, nothing wrong")
        return 1 if outcome.failures else 0
    state = _state(options)
    print(f"fuzz {target.name} on {target.device}, seed {state.seed}, from case {state.next_index}", flush=True)
    already = len(state.failed)
    seconds = SECONDS if options.seconds is None and options.calls is None else options.seconds
    fuzz(target, state, seconds=seconds, calls=options.calls, most_failures=options.failures, path=options.state)
    print(summary(target, state))
    return 1 if len(state.failed) > already else 0


def _run_guided(options: argparse.Namespace) -> int:
    """1 if an input failed, else 0."""
    if options.target != "files":
        raise ValueError(f"coverage: expected target files, whose inputs are bytes, got {options.target}")
    for name in ("case", "state", "start"):
        if getattr(options, name) is not None:
            raise ValueError(f"{name}: expected none with coverage, whose folder is what a run goes on with")
    seed = _new_seed() if options.seed is None else options.seed
    seconds = SECONDS if options.seconds is None and options.calls is None else options.seconds
    print(f"fuzz files, guided by coverage, seed {seed}", flush=True)
    report = guided(options.coverage, seed, seconds, options.calls)
    print(f"{report.runs} inputs, {report.reached}; {options.coverage} keeps those that reach something new")
    if report.failure:
        print(report.failure)
    return 1 if report.failure else 0


def _new_seed() -> int:
    return random.SystemRandom().randrange(1 << 31)


def _state(options: argparse.Namespace) -> State:
    """Where to begin: as the state file says, if there is one, else as the options do."""
    if options.state is not None and options.state.exists():
        state = State.read(options.state)
        if state.target != options.target:
            raise ValueError(f"target: expected {state.target}, that of {options.state}, got {options.target}")
        for name, kept in (("seed", state.seed), ("start", state.next_index)):
            given = getattr(options, name)
            if given is not None and given != kept:
                raise ValueError(f"{name}: expected {kept}, that of {options.state}, or none, got {given}")
        return state
    seed = _new_seed() if options.seed is None else options.seed
    return State(options.target, seed, options.start or 0)


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a number of 0 or more, got {text!r}")
    return int(text)


def _case(text: str) -> tuple[int, int]:
    seed, _, index = text.partition(":")
    if not (seed.isdecimal() and index.isdecimal()):
        raise argparse.ArgumentTypeError(f"expected SEED:INDEX such as 7:123, got {text!r}")
    return int(seed), int(index)


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(Command(HELP, add_options, run, lambda options: False), "python -m tools.fuzz", argv)


if __name__ == "__main__":
    sys.exit(main())
