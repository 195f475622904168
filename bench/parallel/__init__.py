"""The linears of a model's layers, or their experts, cut over 1, 2, 4 ranks, and their all-reduces.

`python -m weightonly.bench parallel --shapes llama3-70b --out parallel` starts a process for each GPU; under torchrun
it takes the processes that are there.

    ranks.py    the processes, as one of them sees the others
    pieces.py   a linear, or all of a decoder layer, whole and cut
    experts.py  the experts of a decoder layer, whole and cut
    decode.py   decode steps of whole models
    rows.py     the rows of a piece: compared with one rank, then timed
    measure.py  the cells, for ../runner.py
    tables.py   the tables
"""

from __future__ import annotations

from .. import command, runner
from ..model.providers import MODEL_PROVIDERS, DenseModel, Ours
from ..shapes import MODELS

BATCH = (1, 16, 64, 128, 1024)
RANKS = (1, 2, 4)

PIECES = ("layer", "qkv", "o", "gate_up", "down", "experts", "decode")
"""What the column `piece` may say; `experts` of mixtures, the others of models of Llama's kind."""

PROVIDERS = {name: one for name, one in MODEL_PROVIDERS.items() if isinstance(one, Ours | DenseModel)}
"""The providers of models that can be sharded."""

DEFAULT_PROVIDERS = ("ours-int4", "ours-int8", "dense")


def _add_options(parser: command.Parser) -> None:
    runner.add_options(parser, "parallel", list(MODELS), "llama3-70b")
    cut, default = ",".join(PROVIDERS), ",".join(DEFAULT_PROVIDERS)
    parser.add_argument(
        "--providers", type=command.all_or_names, default=default, help=f"all, or some of {cut} (default {default})"
    )
    parser.add_argument(
        "--ranks",
        type=command.integers,
        help="such as 1,2,4 (default: as many as there are GPUs; on a CPU 1,2)",
    )
    command.add_batch(parser, BATCH)
    parser.add_argument("--pieces", type=command.names, default=PIECES, help=f"some of {','.join(PIECES)}")
    parser.add_argument(
        "--decode", metavar="LINES", type=command.integers, default=[], help="such as 1,16: also steps of whole models"
    )
    parser.add_argument("--context", type=int, default=512, help="tokens before a decode step (default 512)")
    parser.add_argument("--layers", type=int, help="of whole models (default: all that they have)")
    runner.add_compile(parser, "a layer, too, and steps (default: on GPUs)")


def _run(options: command.Options) -> int:
    try:
        from .measure import ParallelBench
    except ImportError as error:
        raise ImportError(f"bench parallel needs PyTorch 2.5 or later, with torch.distributed: {error}") from error
    return runner.run(ParallelBench, options)


COMMAND = command.Command(
    "the linears of models cut over several GPUs (torch.distributed), and their all-reduces; writes a folder",
    _add_options,
    _run,
    runner.needs_gpu,
)
