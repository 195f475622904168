"""Training beside frozen experts: the time and the memory of a forward and a backward pass of one layer.

`python -m weightonly.bench experts-train` compares packed experts with transformers' dense ones in bf16 on torch's
grouped_mm, as they are and with the same LoRA adapters of PEFT. Gradients are those of x, of the router's weights, and
of the adapters.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pandas as pd
import torch
from tqdm import tqdm

import weightonly as wo

from .. import command
from ..devices import default_device
from ..providers import nbytes
from ..shapes import MIXTURES
from ..timing import time_eager
from .routing import ROUTINGS, topk_ids

BATCH = (4 * 512,)
RANKS = (0, 16)

DENSE = "dense, grouped_mm"


class _Layer(torch.nn.Module):
    def __init__(self, experts: torch.nn.Module) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.experts(x, ids, weights)
        return y


def dense_experts(model: str, dtype: torch.dtype, device: torch.device) -> torch.nn.Module:
    """Frozen random experts of a model of `MIXTURES`, as transformers has those of Qwen3."""
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    sizes = MIXTURES[model]
    config = Qwen3MoeConfig(
        hidden_size=sizes.hidden,
        moe_intermediate_size=sizes.inner,
        num_experts=sizes.experts,
        num_experts_per_tok=sizes.top_k,
    )
    config._experts_implementation = "grouped_mm"
    with torch.device("meta"):
        experts = Qwen3MoeExperts(config).to(dtype).requires_grad_(False)
    experts.to_empty(device=device)
    generator = torch.Generator(device).manual_seed(0)
    for weights in experts.parameters():  # (E, N, K)
        weights.normal_(std=weights.shape[2] ** -0.5, generator=generator)
    return experts


def with_adapters(experts: torch.nn.Module, rank: int) -> Any:
    """The layer as PEFT adapts it, for both products; rank 0: as it is."""
    layer = _Layer(experts)
    if rank == 0:
        return layer
    import peft

    import weightonly.hf  # noqa: F401  (makes packed experts known to PEFT)

    targets = ["experts.gate_up_proj", "experts.down_proj"]
    torch.manual_seed(0)
    return peft.get_peft_model(layer, peft.LoraConfig(r=rank, target_modules=[], target_parameters=targets))


def experts_train(
    shapes: Sequence[str] = ("qwen3-30b-a3b",),
    *,
    batch: Sequence[int] = BATCH,
    ranks: Sequence[int] = RANKS,
    formats: Sequence[str] = ("int4",),
    routing: str = "even",
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str | None = None,
    budget_ms: float = 2000.0,
    progress: bool = True,
) -> pd.DataFrame:
    """Time a forward and a backward pass through experts, packed and dense, frozen, with and without adapters.

    Raises what the libraries raise.

    Args:
        shapes: models of `MIXTURES`.
        batch: tokens.
        ranks: of adapters; 0: none.
        formats: of the packed experts.
        routing: a name of `ROUTINGS`.
        dtype: of x.
        device: as for `sweep`.
        budget_ms: of a measurement.
        progress: as for `sweep`.

    Returns:
        One row for each model, number of tokens, rank, and format beside dense. Columns: `model`, `tokens`, `rank`,
        `experts`; `us`, the median of both passes, with the host's time; in MB `weights_mb`, and, NaN on a CPU: what
        the backward pass finds (`kept_mb`), the most that both allocated beyond weights (`peak_mb`), and `beyond_mb`,
        the difference.

    Raises:
        ValueError: unknown names.

    Examples:
        >>> options = {"device": "cpu", "dtype": torch.float32, "budget_ms": 1, "progress": False}
        >>> frame = experts_train(["tiny"], batch=[8], ranks=[0], **options)
        >>> frame["experts"].tolist()
        ['dense, grouped_mm', 'weightonly int4']
    """
    for name, given, known in (("shapes", shapes, MIXTURES), ("routing", [routing], ROUTINGS)):
        for one in given:
            if one not in known:
                raise ValueError(f"{name}: expected some of {', '.join(known)}, got {one!r}")
    where = default_device(device)
    rows = []
    cells = list(itertools.product(shapes, ranks, (None, *formats)))
    for model, rank, format in tqdm(cells, disable=not progress, unit="layer"):
        experts = dense_experts(model, dtype, where)
        if format is not None:
            experts = wo.nn.quantize_model(_Layer(experts), format=format, search=False).experts  # type: ignore[assignment]
        layer = with_adapters(experts, rank)
        del experts
        cell = {"model": model, "rank": rank, "experts": DENSE if format is None else f"weightonly {format}"}
        for tokens in batch:
            ids = topk_ids(routing, tokens, MIXTURES[model].experts, MIXTURES[model].top_k, where)
            rows.append(
                cell | {"tokens": tokens} | _measure(layer, MIXTURES[model].hidden, dtype, ids.long(), budget_ms)
            )
    return pd.DataFrame(rows)


def _measure(
    layer: torch.nn.Module, hidden: int, dtype: torch.dtype, ids: torch.Tensor, budget_ms: float
) -> dict[str, float]:
    device = ids.device
    generator = torch.Generator(device).manual_seed(1)
    x, grad = (torch.randn(len(ids), hidden, generator=generator, device=device, dtype=dtype) for _ in range(2))
    weights = torch.full(ids.shape, 1 / ids.shape[1], device=device, requires_grad=True)
    x.requires_grad_()
    trained = [x, weights, *(p for p in layer.parameters() if p.requires_grad)]
    frozen = [p for p in layer.parameters() if not p.requires_grad]

    def step(between: Callable[[], None] = lambda: None) -> None:
        y = layer(x, ids, weights)
        between()
        torch.autograd.grad(y, trained, grad)

    row = {"us": time_eager(step, device, budget_ms=budget_ms).us, "weights_mb": nbytes(*frozen) / 1e6}
    if device.type != "cuda":
        return row | dict.fromkeys(("kept_mb", "peak_mb", "beyond_mb"), float("nan"))
    before, kept = torch.cuda.memory_allocated(device), 0

    def look() -> None:
        nonlocal kept
        kept = torch.cuda.memory_allocated(device) - before

    torch.cuda.reset_peak_memory_stats(device)
    step(look)
    peak = torch.cuda.max_memory_allocated(device) - before
    return row | {"kept_mb": kept / 1e6, "peak_mb": peak / 1e6, "beyond_mb": (peak - kept) / 1e6}


def train_table(frame: pd.DataFrame) -> str:
    """Markdown, with the time and the weights as parts of the dense experts' of the same rank."""
    keys = ["model", "tokens", "rank"]
    dense = frame[frame["experts"] == DENSE].set_index(keys)
    of_row = pd.MultiIndex.from_frame(frame[keys])
    ratios = {
        f"{name} / dense": (frame[column].to_numpy() / dense[column].reindex(of_row).to_numpy())
        for name, column in (("us", "us"), ("weights", "weights_mb"))
    }
    return str(frame.assign(**ratios).to_markdown(index=False, floatfmt=".2f"))


def _add_options(parser: command.Parser) -> None:
    parser.add_argument(
        "--shapes",
        type=command.names,
        default=["qwen3-30b-a3b"],
        help=f"some of {','.join(MIXTURES)} (default the Qwen)",
    )
    command.add_batch(parser, BATCH, "tokens of a step")
    parser.add_argument(
        "--ranks", type=command.integers, default=list(RANKS), help="of LoRA adapters, 0: none (default 0,16)"
    )
    parser.add_argument("--formats", type=command.names, default=["int4"], help="of packed experts (default int4)")
    parser.add_argument("--routing", choices=ROUTINGS, default="even", help="of tokens to experts (default even)")
    command.add_run(parser, dtype="bf16")


COMMAND = command.frame_command(
    "time and memory of training through a layer of experts: packed and dense, with LoRA adapters and without",
    _add_options,
    experts_train,
    train_table,
)
