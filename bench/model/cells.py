"""What is measured of a model: one cell for each provider, measure, batch and number of tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields

from .providers import ModelProvider, Ours

MEASURES = {
    "decode": "tokens/s of decode steps; tokens: the context that they read",
    "prefill": "tokens/s of prompts; tokens: their length",
    "overlap": "decode steps of ours by overlap of launches, and whether greedy tokens are the same",
    "train": "tokens/s of LoRA training steps; tokens: the length of a line",
}
"""Name -> what its rows are, in the order in which they are measured: `train` changes the model."""


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


KEY = [field.name for field in fields(Cell)]


@dataclass(frozen=True)
class Sizes:
    """batch, context: of decode steps. prompts: lengths, of one prompt each. lines, line: of a training step."""

    batch: Sequence[int]
    context: int
    prompts: Sequence[int]
    lines: int
    line: int

    def __post_init__(self) -> None:
        for name, values in asdict(self).items():
            sizes = list(values) if isinstance(values, Sequence) else [values]
            least = 2 if name in ("prompts", "line") else 1  # of one token nothing is predicted
            if not sizes or not all(isinstance(size, int) and size >= least for size in sizes):
                raise ValueError(f"{name}: expected integers from {least} on, got {values!r}")

    def of(self, measure: str) -> list[tuple[int, int]]:
        """(batch, tokens) of each cell of a measure."""
        if measure == "prefill":
            return [(1, length) for length in self.prompts]
        if measure == "train":
            return [(self.lines, self.line)]
        return [(batch, self.context) for batch in self.batch]


def cells_of(
    model: str,
    layers: int,
    provider: ModelProvider,
    label: str,
    dtype: str,
    compiled: bool,
    measures: Sequence[str],
    sizes: Sizes,
) -> Iterator[Cell]:
    """Those of one provider, in the order in which they are measured: decode and overlap of a batch together."""
    found = [
        Cell(model, layers, label, dtype, compiled and measure in ("decode", "overlap"), measure, batch, tokens)
        for measure in MEASURES
        if measure in measures and _has(provider, measure)
        for batch, tokens in sizes.of(measure)
    ]
    steps = [cell for cell in found if cell.measure in ("decode", "overlap")]
    yield from sorted(steps, key=lambda cell: cell.batch)
    yield from (cell for cell in found if cell not in steps)


def _has(provider: ModelProvider, measure: str) -> bool:
    if measure == "overlap":
        return isinstance(provider, Ours)
    return measure != "train" or provider.untrainable() is None
