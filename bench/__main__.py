"""Time `gemm` beside others (`sweep`, `report`), the linears of a model one after another (`chain`), whole models
(`model`), their linears on several GPUs (`parallel`), vLLM's engine (`serve`), mixtures of experts (`experts`) and
training through them (`experts-train`), and what a call costs the host (`host`); say what quantizing loses
(`accuracy`), and what rounding activations to FP8 does (`activations`); find the configurations that are the quickest
on this GPU (`tune`)."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from .accuracy import COMMAND as ACCURACY
from .activations import COMMAND as ACTIVATIONS
from .chain import COMMAND as CHAIN
from .command import Command, run_commands
from .experts.measure import COMMAND as EXPERTS
from .experts.train import COMMAND as EXPERTS_TRAIN
from .host import COMMAND as HOST
from .model.measure import COMMAND as MODEL
from .parallel import COMMAND as PARALLEL
from .report.command import COMMAND as REPORT
from .serve import COMMAND as SERVE
from .sweep import COMMAND as SWEEP
from .tune import COMMAND as TUNE

COMMANDS: dict[str, Command] = {
    "sweep": SWEEP,
    "report": REPORT,
    "chain": CHAIN,
    "model": MODEL,
    "parallel": PARALLEL,
    "serve": SERVE,
    "experts": EXPERTS,
    "experts-train": EXPERTS_TRAIN,
    "tune": TUNE,
    "host": HOST,
    "accuracy": ACCURACY,
    "activations": ACTIVATIONS,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. 0; 1 for a `report --compare` with regressions, and where rows failed; 2 with one line for
    what it refuses."""
    return run_commands(COMMANDS, "python -m weightonly.bench", str(__doc__), "sweep", argv)


if __name__ == "__main__":
    sys.exit(main())
