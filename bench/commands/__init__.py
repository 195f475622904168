"""The commands of `python -m weightonly.bench`: a module for each, with its options and what it prints.

A command is a module with HELP, add_options, needs_gpu and run, entered in COMMANDS.
"""

from __future__ import annotations

import argparse
from typing import Protocol

from . import chain, conversions, experts, fuzz, host, model, parallel, regret, report, sweep, tune


class Command(Protocol):
    """What such a module has."""

    HELP: str

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        """Adds the command's options."""

    def needs_gpu(self, options: argparse.Namespace) -> bool:
        """Whether it measures what a GPU alone has; the command line refuses it elsewhere, before any work."""

    def run(self, options: argparse.Namespace) -> int:
        """Does it, prints the result, and returns the exit status."""


COMMANDS: dict[str, Command] = {
    "sweep": sweep,
    "report": report,
    "chain": chain,
    "model": model,
    "parallel": parallel,
    "experts": experts,
    "conversions": conversions,
    "regret": regret,
    "tune": tune,
    "host": host,
    "fuzz": fuzz,
}
