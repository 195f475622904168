"""What `bench experts` measures: a cell for each mixture, routing, measure, number of tokens, and provider."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from .. import command, runner
from ..report.results import Results
from ..roofline import Ceilings
from ..shapes import MIXTURES
from ..weights import dtype_name
from . import tables
from .mixture import KEY, MEASURES, TIMES, Cell, Mixture
from .providers import EXPERTS_PROVIDERS
from .routing import ROUTINGS, SKEW
from .weights import PRODUCTS

COLUMNS = [*KEY, *TIMES, "note"]

BATCH = (1, 4, 16, 64, 256, 1024, 4096)

GROUP_SIZES = {"int4": 128, "int8": -1, "nf4": 64, "mxfp4": 32}
"""Format -> the rows of w per scale that it is measured with."""

_METHOD = (
    "random weights and x; each token has different experts. even: experts in turns; skewed: drawn with chances "
    "r ** -skew for the expert of rank r, always the same. w13: gate and up of all rows sorted by expert; w2: down; "
    "layer: M tokens in and out. Ours sorts the rows in the layer, the others are given them sorted. Before its "
    "timing each result is compared with the product of the dense values. roofline: the longer of bytes (experts with "
    "rows, x, y) and operations at the GPU's rates, plus a launch for each product. Weights rotate beyond the L2 "
    "cache. Providers take turns. Times are medians "
)
_GRAPHS = "of replays of CUDA graphs; where captured is False, of single calls, the host's time included."
_CALLS = "of single calls."


@dataclass(frozen=True, kw_only=True)
class ExpertsBench(runner.Bench):
    """Mixtures of experts. Other arguments are those of `runner.Bench`.

    Args:
        batch: tokens.
        measures: some of `MEASURES`.
        routings: some of `ROUTINGS`.
        skew: of skewed routing.
        format: one of `GROUP_SIZES`; None: each model's own.

    Examples:
        >>> from pathlib import Path
        >>> ExpertsBench(shapes=["tiny"], out=Path("experts"), device="cpu").format is None
        True
    """

    batch: Sequence[int] = BATCH
    measures: Sequence[str] = MEASURES
    routings: Sequence[str] = ROUTINGS
    skew: float = SKEW
    format: str | None = None

    name = "experts"
    models = MIXTURES
    registry = EXPERTS_PROVIDERS
    columns = COLUMNS
    positive = ("skew",)

    def check(self) -> None:
        runner.check_some("measures", self.measures, MEASURES)
        runner.check_some("routings", self.routings, ROUTINGS)
        runner.check_some("format", [self.format] if self.format else [], GROUP_SIZES)
        runner.check_integers("batch", self.batch)
        for name in self.shapes:
            format = self._format(name)
            group_size = GROUP_SIZES[format]
            for k in (MIXTURES[name].shape(product)[0] for product in PRODUCTS):
                if group_size != -1 and k % group_size:
                    raise ValueError(
                        f"format: expected groups that divide K = {k} of {name}, got {format}, groups of {group_size}"
                    )

    def _format(self, model: str) -> str:
        return self.format or MIXTURES[model].format

    def cells(self, labels: Sequence[str]) -> Iterator[Cell]:
        for model in self.shapes:
            weights = model, self._format(model), GROUP_SIZES[self._format(model)], dtype_name(self.dtype)
            for routing in self.routings:
                skew = self.skew if routing == "skewed" else 0.0
                for measure in self.measures:
                    for m in self.batch:
                        yield from (Cell(*weights, routing, skew, measure, m, label) for label in labels)

    def weights_of(self, cell: Cell) -> str:
        return cell.model

    def side_by_side(self, cell: Cell) -> tuple[str, str, int]:
        return cell.routing, cell.measure, cell.m

    def load(self, cells: Sequence[Cell], process: runner.Process, limits: Ceilings | None) -> runner.Measure:
        used = {cell.provider for cell in cells}
        providers = {label: one for label, one in self.by_label(process.device).items() if label in used}
        return Mixture(cells, providers, self.dtype, process.device, limits, self.budget_ms).rows

    def method(self, device: torch.device) -> dict[str, str]:
        return {"method": _METHOD + (_GRAPHS if device.type == "cuda" else _CALLS)}

    @classmethod
    def tables(cls, results: Results, folder: Path) -> list[Path]:
        return tables.write(results, folder)


def _add_options(parser: command.Parser) -> None:
    models = list(MIXTURES)
    runner.add_options(parser, "experts", models, ",".join(name for name in models if name != "tiny"))
    command.add_providers(parser, "all", EXPERTS_PROVIDERS)
    command.add_batch(parser, BATCH, "tokens")
    for name, known in (("measures", MEASURES), ("routings", ROUTINGS)):
        parser.add_argument(f"--{name}", type=command.names, default=list(known), help=f"some of {','.join(known)}")
    parser.add_argument(
        "--skew", type=float, default=SKEW, help=f"skewed: chances of experts are rank ** -SKEW (default {SKEW})"
    )
    parser.add_argument("--format", choices=tuple(GROUP_SIZES), help="of the weights (default: each model's own)")


COMMAND = command.Command(
    "grouped products and layers of mixtures of experts, beside others; writes a folder",
    _add_options,
    lambda options: runner.run(ExpertsBench, options),
    runner.needs_gpu,
)
