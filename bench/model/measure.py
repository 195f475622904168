"""What `bench model` measures: a cell for each provider, measure, batch and number of tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import torch

from .. import command, runner
from ..kept import require_packages
from ..report.results import Results
from ..roofline import Ceilings
from ..shapes import MODELS
from ..weights import dtype_name
from . import tables
from .build import build, share_keys
from .providers import MODEL_PROVIDERS, ModelProvider, Ours
from .rows import ModelRows, method
from .tables import MEASURES


@dataclass(frozen=True)
class Cell:
    """What tells rows apart, but that `overlap` has one for each mode."""

    model: str
    layers: int
    provider: str  # a label
    dtype: str
    compiled: bool
    measure: str
    batch: int
    tokens: int

    def __str__(self) -> str:
        return f"{self.model} {self.provider} {self.measure} {self.batch} x {self.tokens}"


COLUMNS = [field.name for field in fields(Cell)]
COLUMNS += ["overlap", "ms", "ms_min", "tokens_s", "linears_ms", "head_ms", "roofline_ms", "same_tokens"]
COLUMNS += ["weights_mb", "peak_mb", "load_s", "ready_s", "note"]


@dataclass(frozen=True, kw_only=True)
class ModelBench(runner.Bench):
    """Whole models of transformers. Other arguments are those of `runner.Bench`. Needs transformers, and PEFT for
    `train`.

    Args:
        measures: some of `MEASURES`; None: all, on a CPU all but overlap.
        layers: of each model; None: all that it has.
        batch: of decode steps.
        context: tokens before a decode step.
        prompts: lengths, of one prompt each.
        train: lines and tokens of a training step.
        compile: the decode step; None: on a GPU.
        budget_ms: device time of a measurement.

    Examples:
        >>> from pathlib import Path
        >>> bench = ModelBench(shapes=["tiny"], out=Path("models"), measures=["decode"], device="cpu")
        >>> bench.batch
        (1, 8, 32, 128)
    """

    measures: Sequence[str] | None = None
    layers: int | None = None
    batch: Sequence[int] = (1, 8, 32, 128)
    context: int = 512
    prompts: Sequence[int] = (512, 4096)
    train: Sequence[int] = (4, 512)
    compile: bool | None = None
    budget_ms: float = 300.0

    name = "model"
    models = MODELS
    registry = MODEL_PROVIDERS
    columns = COLUMNS
    positive = ("layers",)

    def check(self) -> None:
        measures = self._measures()
        if not measures:
            raise ValueError(f"measures: expected some of {', '.join(MEASURES)}, got none")
        runner.check_some("measures", measures, MEASURES)
        if self.where.type == "cpu" and "overlap" in measures:
            raise ValueError(f"measures: overlap needs launches on a GPU, got device {self.where}")
        if len(self.train) != 2:
            raise ValueError(f"train: expected LINES,TOKENS such as 4,512, got {len(self.train)} numbers")
        runner.check_integers("batch", self.batch)
        runner.check_integers("context", self.context)
        runner.check_integers("prompts", self.prompts, 2)  # of one token nothing is predicted
        runner.check_integers("train, lines", self.train[0])
        runner.check_integers("train, tokens", self.train[1], 2)
        require_packages("model", "transformers", *(["peft"] if "train" in measures else []))

    def _measures(self) -> Sequence[str]:
        if self.measures is not None:
            return self.measures
        return [name for name in MEASURES if self.where.type == "cuda" or name != "overlap"]

    def cells(self, labels: Sequence[str]) -> Iterator[Cell]:
        """Cells of decode and overlap of a batch follow each other, and training comes last."""
        providers = self.by_label(self.where)
        for model in self.shapes:
            for label in labels:
                cells = list(self._cells_of(model, label, providers[label]))
                steps = [cell for cell in cells if cell.measure in ("decode", "overlap")]
                yield from sorted(steps, key=lambda cell: cell.batch)
                yield from (cell for cell in cells if cell not in steps)

    def _cells_of(self, model: str, label: str, provider: ModelProvider) -> Iterator[Cell]:
        layers, dtype = self.layers or MODELS[model].layers, dtype_name(self.dtype)
        compile = self.where.type == "cuda" if self.compile is None else self.compile
        lines, tokens = self.train
        decode = [(batch, self.context) for batch in self.batch]
        sizes = {"decode": decode, "prefill": [(1, length) for length in self.prompts]}
        sizes |= {"overlap": decode if isinstance(provider, Ours) else []}
        sizes |= {"train": [(lines, tokens)] if provider.untrainable() is None else []}
        for measure in (name for name in MEASURES if name in self._measures()):
            for batch, length in sizes[measure]:
                compiled = compile and measure in ("decode", "overlap")
                yield Cell(model, layers, label, dtype, compiled, measure, batch, length)

    def weights_of(self, cell: Cell) -> tuple[str, str]:
        return cell.model, cell.provider

    def load(self, cells: Sequence[Cell], process: runner.Process, limits: Ceilings | None) -> runner.Measure:
        first, device = cells[0], process.device
        provider = self.by_label(device)[first.provider]
        share_keys(device)
        built = build(MODELS[first.model], first.layers, provider, self.dtype, device, progress=self.progress)
        model = ModelRows(built, device, limits, self.budget_ms)
        return lambda cells: [model.rows(cell) for cell in cells]

    def method(self, device: torch.device) -> dict[str, str]:
        return {"method": method(device)}

    @classmethod
    def tables(cls, results: Results, folder: Path) -> list[Path]:
        return tables.write(results, folder)


def _add_options(parser: command.Parser) -> None:
    runner.add_options(parser, "models", list(MODELS), "llama3-8b")
    command.add_providers(parser, "all", MODEL_PROVIDERS)
    command.add_batch(parser, ModelBench.batch)
    parser.add_argument("--layers", type=int, help="of each model (default: all that it has)")
    known = ",".join(MEASURES)
    parser.add_argument("--measures", type=command.names, help=f"some of {known} (default: all that the device has)")
    parser.add_argument("--context", type=int, default=512, help="tokens before a decode step (default 512)")
    parser.add_argument(
        "--prompts", type=command.integers, default=[512, 4096], help="tokens of a prompt (default 512,4096)"
    )
    parser.add_argument(
        "--train", metavar="LINES,TOKENS", type=command.integers, default=[4, 512], help="of a step (default 4,512)"
    )
    runner.add_compile(parser, "the decode step, by torch.compile (default: on a GPU)")


COMMAND = command.Command(
    "decode, prompts, LoRA and overlap of launches in transformers' models with random weights; writes a folder",
    _add_options,
    lambda options: runner.run(ModelBench, options),
    runner.needs_gpu,
)
