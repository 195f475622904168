"""The rows of a model that is in memory: its decode steps, prompts, overlap of launches, and training steps."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

import torch

from weightonly.nn.summary import module_bytes

from ..chain import OVERLAPS
from ..roofline import Ceilings, least_us
from ..runner import free_unused
from ..timing import CallTimer, Timing, overlapping, time_calls, time_eager, time_in_rounds
from .build import Built
from .decoder import Decoder
from .training import RANK, training_step

if TYPE_CHECKING:
    from .measure import Cell

_ROOM = 64  # tokens of a cache beyond the context: what `greedy` writes has its place there
_GREEDY_PROMPT, _GREEDY_TOKENS = 16, 32

_METHOD = (
    "a model of transformers' own class with random weights, made layer by layer; embeddings stay dense, and output "
    "embeddings where the label names no head. Of mixtures every layer attends to the whole context; bitsandbytes and "
    "torchao leave their experts dense. fused: q, k, v and gate, up are one product each. Before its timing the logits "
    "of a prompt and of a decode step are compared with transformers' own forward. linears_ms of a mixture has its "
    "routers and experts, too. "
    "decode: a step of one token for each line of the batch, sampling greedily, on a static cache that holds "
    f"the context and room for {_ROOM} tokens more, all of which attention reads; its keys and values are random. "
    "prefill: one prompt into an empty static cache, logits of the last token, not compiled. linears_ms: the linears "
    "of all decoder layers, one after another on random x, timed alone in the same way; head_ms: the output "
    "embeddings. overlap: the same step under each mode of set_launch_overlap, in turns; same_tokens: whether "
    f"{_GREEDY_TOKENS} greedy tokens after a prompt are those without overlap. train: forward, backward and AdamW of "
    f"LoRA adapters of rank {RANK} on all linears of the decoder layers, eager, without checkpointing. roofline_ms: "
    "the longer of bytes (weights that a step reads, keys and values of the context) and operations of linears and "
    "output embeddings at the GPU's rates. load_s: to quantize and pack; weights are made, not read. peak_mb: of "
    "PyTorch's allocator. ready_s: to compile the step and check it. Launches overlap where no row says otherwise, "
    "those of torch.compile's own kernels (compile_options), too. On Hopper and later attention does not copy keys and "
    "values for each head that shares them (TRANSFORMERS_SDPA_FORCE_GQA=1 of transformers, or what the environment "
    "says). "
)
_GRAPHS = "Times are medians of replays of one CUDA graph of the whole step, training apart."
_CALLS = "Times are medians of single calls."


def method(device: torch.device) -> str:
    """How the rows are measured on a device."""
    return _METHOD + (_GRAPHS if device.type == "cuda" else _CALLS)


class ModelRows:
    """A model in memory, and its rows."""

    def __init__(self, built: Built, device: torch.device, limits: Ceilings | None, budget_ms: float) -> None:
        self.built, self.device = built, device
        self.limits, self.budget_ms = limits, budget_ms
        self._decoder: Decoder | None = None

    def rows(self, cell: Cell) -> list[dict[str, Any]]:
        """Measures a cell. One row; of `overlap` one for each mode."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        make = {"decode": self._decode, "prefill": self._prefill, "overlap": self._overlap, "train": self._train}
        rows = make[cell.measure](cell)
        peak = torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else math.nan
        of_model = {"weights_mb": self.built.weight_bytes / 1e6, "load_s": self.built.load_s, "peak_mb": peak / 1e6}
        return [row | of_model for row in rows]

    def _checked(self, batch: int, length: int, compile: bool) -> tuple[Decoder, float]:
        """A decoder of this batch and length of cache, and the seconds until it was compiled and checked."""
        found, start = self._decoder, time.perf_counter()
        if found is None or (found.batch, found.length, found.compiled) != (batch, length, compile):
            self._decoder = found = None  # its cache is freed first
            free_unused()
            found = Decoder(self.built.model, batch, length, compile=compile)
            found.check()
            self._decoder = found
        return found, time.perf_counter() - start

    def _decode(self, cell: Cell) -> list[dict[str, Any]]:
        decoder, ready_s = self._checked(cell.batch, cell.tokens + _ROOM, cell.compiled)
        decoder.fill(cell.tokens)
        timing = self._time(decoder.step)
        kv_bytes = sum(2 * cache.keys[:, :, : cell.tokens].nbytes for cache in decoder.caches)
        parts = self._parts(decoder, cell.batch, kv_bytes)
        return [self._row(timing, cell.batch) | parts | {"ready_s": ready_s}]

    def _prefill(self, cell: Cell) -> list[dict[str, Any]]:
        decoder, _ = self._checked(cell.batch, max(cell.tokens, _ROOM), cell.compiled)
        tokens = decoder.random_tokens(cell.tokens)
        timing = self._time(lambda: decoder.prompt(tokens))
        parts = self._parts(decoder, cell.batch * cell.tokens, 0)
        return [self._row(timing, cell.batch * cell.tokens) | parts]

    def _overlap(self, cell: Cell) -> list[dict[str, Any]]:
        decoder, _ = self._checked(cell.batch, cell.tokens + _ROOM, cell.compiled)
        prompt = decoder.random_tokens(_GREEDY_PROMPT)
        written = []
        for mode in OVERLAPS:
            with overlapping(mode):
                written.append(decoder.greedy(prompt, _GREEDY_TOKENS))
        decoder.fill(cell.tokens)

        def step(mode: Any) -> None:
            with overlapping(mode):
                decoder.step()

        timers = [CallTimer([lambda mode=mode: step(mode)], self.device) for mode in OVERLAPS]  # type: ignore[misc]
        timings = time_in_rounds(timers, self.budget_ms)
        return [
            self._row(timing, cell.batch) | {"overlap": str(mode), "same_tokens": torch.equal(tokens, written[0])}
            for mode, timing, tokens in zip(OVERLAPS, timings, written, strict=True)
        ]

    def _train(self, cell: Cell) -> list[dict[str, Any]]:
        self._decoder = None
        free_unused()
        step = training_step(self.built.model, cell.batch, cell.tokens)
        if not bool(step().isfinite()):
            raise RuntimeError("model: expected a finite loss of a training step, got NaN or Inf")
        timing = time_eager(step, self.device, budget_ms=self.budget_ms)
        return [self._row(timing, cell.batch * cell.tokens)]

    def _time(self, call: Any) -> Timing:
        return time_calls([call], self.device, budget_ms=self.budget_ms)

    def _row(self, timing: Timing, tokens: int) -> dict[str, Any]:
        """tokens: that one call makes or reads."""
        return {"ms": timing.us / 1e3, "ms_min": timing.min_us / 1e3, "tokens_s": tokens / timing.us * 1e6}

    def _parts(self, decoder: Decoder, rows: int, kv_bytes: int) -> dict[str, Any]:
        """ms of a call's linears, on x of so many rows, and of its output embeddings; and its roofline."""
        return {
            "linears_ms": self._time(decoder.run_linears(rows)).us / 1e3,
            "head_ms": self._time(decoder.run_head()).us / 1e3,
            "roofline_ms": self._roofline_ms(decoder, rows, kv_bytes),
        }

    def _roofline_ms(self, decoder: Decoder, rows: int, kv_bytes: int) -> float:
        """NaN on a CPU."""
        if self.limits is None:
            return math.nan
        operations = 2 * rows * sum(k * n for k, n in decoder.linear_shapes())
        operations += 2 * decoder.batch * decoder.model.lm_head.weight.numel()
        moved = self.built.weight_bytes - decoder.model.model.embed_tokens.weight.nbytes + kv_bytes
        for mixture in decoder.mixtures():
            config = decoder.model.config
            shape = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
            operations += 6 * rows * config.num_experts_per_tok * config.hidden_size * shape
            read = min(1.0, rows * config.num_experts_per_tok / config.num_local_experts)  # none twice, at most
            moved -= int((1 - read) * module_bytes(mixture.experts))
        return least_us(moved, operations, self.limits) / 1e3
