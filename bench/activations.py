"""What activations="fp8" loses beside what int4 weights lose: outputs of layers, embeddings of all-MiniLM-L6-v2.

`python -m weightonly.bench activations`; needs no GPU. MiniLM is left out where its package is not installed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import torch

import weightonly as wo

from . import command
from .accuracy import ROWS, WEIGHTS, Encoder, _choose, encoder
from .devices import default_device
from .report.facts import machine_facts
from .report.results import Results
from .shapes import Shape, resolve

SHAPES = "4096x1024"
GROUP_SIZES = (0, 128, 32)
"""Of int4 weights; 0: weights that are not quantized."""

COLUMNS = ["x", "group_size", "activations", "output_error_percent", "cosine_mean", "cosine_least"]

_EVERY = 100  # this column of x has outliers

RANDOM = {"normal": 1.0, "normal, 1% of columns times 50": 50.0}
"""Kinds of x, and how much larger than the others its columns with outliers are."""

MINILM = "all-MiniLM-L6-v2"


@dataclass(frozen=True)
class Mode:
    """group_size: of int4 weights, 0: as they are. activations: "fp8", or "16bit": x as it is."""

    group_size: int
    activations: str

    def weight(self, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """[N, K] as the layer has it, in fp32."""
        if not self.group_size:
            return weight
        q, scales, _ = wo.quantize(weight.t().to(dtype), group_size=self.group_size)
        return wo.dequantize(wo.preprocess(q, arch="cpu"), scales.float()).t()

    def x(self, x: torch.Tensor) -> torch.Tensor:
        """[..., K] as it is multiplied, in fp32."""
        if self.activations == "16bit":
            return x
        x8, x_scales = wo.quantize_activations(x)
        return x8.float() * x_scales.unsqueeze(-1)


MODES = [Mode(size, activations) for size in GROUP_SIZES for activations in ("16bit", "fp8")][1:]
"""All but what loses nothing."""


def output_error(mode: Mode, weight: torch.Tensor, x: torch.Tensor, dtype: torch.dtype) -> float:
    """The norm of what the outputs lose, as a part of their norm. weight [N, K], x [M, K], fp32."""
    exact = x.double() @ weight.double().t()
    found = mode.x(x).double() @ mode.weight(weight, dtype).double().t()
    return float((found - exact).norm() / exact.norm())


@torch.no_grad()
def _of_encoder(mode: Mode, found: Encoder, dtype: torch.dtype, expected: torch.Tensor) -> dict[str, float]:
    """The mean error of its layers, each on its own x of the original model, and cosines of its embeddings."""
    errors: list[float] = []
    weights = {name: module.weight.detach().clone() for name, module in found.linears.items()}

    def measure(module: torch.nn.Linear, inputs: tuple[torch.Tensor]) -> None:
        errors.append(output_error(mode, module.weight, inputs[0][found.kept], dtype))

    hooks = [module.register_forward_pre_hook(measure) for module in found.linears.values()]
    found.embeddings()
    for hook in hooks:
        hook.remove()
    for name, module in found.linears.items():
        module.weight.copy_(mode.weight(weights[name], dtype))
    hooks = [
        module.register_forward_pre_hook(lambda module, inputs: (mode.x(inputs[0]),))
        for module in found.linears.values()
    ]
    cosines = (found.embeddings() * expected).sum(-1)  # [S]
    for hook in hooks:
        hook.remove()
    for name, module in found.linears.items():
        module.weight.copy_(weights[name])
    return {
        "output_error_percent": 100 * sum(errors) / len(errors),
        "cosine_mean": cosines.mean().item(),
        "cosine_least": cosines.min().item(),
    }


def activations(
    shapes: str | Iterable[str | Shape] = SHAPES,
    *,
    dtype: torch.dtype = torch.float16,
    device: torch.device | str | None = None,
) -> pd.DataFrame:
    """One row of `COLUMNS` for each kind of x and mode.

    shapes: of random weights of variance 1 / K, as `sweep` takes them; errors are means over them. dtype: of x and
    scales. Raises ValueError for unknown shapes.
    """
    where, sizes = default_device(device), resolve(shapes)
    rows: list[dict[str, object]] = []
    for kind, factor in RANDOM.items():
        errors: dict[Mode, list[float]] = {mode: [] for mode in MODES}
        for k, n in sizes:
            generator = torch.Generator().manual_seed(0)  # of the CPU, for the same numbers on every device
            weight = (torch.randn(n, k, generator=generator) * k**-0.5).to(dtype).float().to(where)  # [N, K]
            x = torch.randn(ROWS, k, generator=generator)
            x[:, ::_EVERY] *= factor
            for mode, found in errors.items():
                found.append(output_error(mode, weight, x.to(dtype).float().to(where), dtype))
        rows += [
            {"x": kind, **vars(mode), "output_error_percent": 100 * sum(found) / len(found)}
            for mode, found in errors.items()
        ]
    if "minilm" in _choose("weights", "all", WEIGHTS):
        model = encoder(where)
        with torch.no_grad():
            expected = model.embeddings()
        rows += [{"x": MINILM, **vars(mode), **_of_encoder(mode, model, dtype, expected)} for mode in MODES]
    return pd.DataFrame(rows, columns=COLUMNS)


def activations_table(frame: pd.DataFrame) -> str:
    """Markdown: a line for each kind of weights and x."""
    lines = []
    for (group_size, kind), rows in frame.groupby(["group_size", "activations"], sort=False):
        line = {"weights": f"int4, group {group_size}" if group_size else "as they are", "activations": kind}
        for row in rows.itertuples():
            line[row.x] = f"{row.output_error_percent:.2f}%"
            if pd.notna(row.cosine_mean):
                line[f"{row.x}: cosine, least"] = f"{row.cosine_mean:.3f}, {row.cosine_least:.3f}"
        lines.append(line)
    return str(pd.DataFrame(lines).to_markdown(index=False, disable_numparse=True))


def _add_options(parser: command.Parser) -> None:
    command.add_shapes(parser, SHAPES, "of the random weights")
    command.add_run(parser, budget=False)
    command.add_csv(parser)


def _run(options: command.Options) -> int:
    frame = activations(**command.keywords(options, activations)).round(3)  # as the file has it
    print(activations_table(frame))
    if options.csv:
        facts = machine_facts(default_device(options.device)) | {"command": options.command_line}
        Results(frame, facts).write(Path(options.csv))
    return 0


COMMAND = command.Command(
    "what rounding activations to FP8 loses, beside int4 weights",
    _add_options,
    _run,
    needs_gpu=lambda options: False,
)
