"""A model on a static cache: prompts, and the decode step that is compiled and captured.

Modules and cache are transformers' own; the loop over the layers is here. Each layer gets
its own part of the cache, so that torch.compile makes one function for all of them: compiling a whole model takes
minutes, and one layer seconds. As in `generate` of transformers, the decode step alone is compiled.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

import weightonly as wo

from ..shapes import Shape
from ..timing import Call, captured

Forward = Callable[..., torch.Tensor]

CHECKED_TOKENS = 16
"""Of the prompt that `check` decodes one token after."""

# ||logits - those without a cache|| / ||those||, for every 32 layers: 16-bit roundings add up from layer to layer, to
# 0.15 in the 80 layers of llama3-70b. A wrong position or mask is near 1.
_CHECK_TOLERANCE = 0.1
_CHECK_LAYERS = 32


class Decoder:
    """A model, with a static cache of [batch, kv_heads, length, head_dim] for each layer.

    compile: the decode step by torch.compile, whose kernels start early where they can. backend: of it. kv_heads: of a
    model of which some are here; None: all.
    """

    def __init__(
        self,
        model: Any,
        batch: int,
        length: int,
        *,
        compile: bool,
        backend: str | Callable[..., Any] = "inductor",
        kv_heads: int | None = None,
    ) -> None:
        from transformers import StaticCache

        config, weight = model.config, model.lm_head.weight
        self.model, self.batch, self.length, self.device = model, batch, length, weight.device
        self.compiled = compile
        self._is_eager = config._attn_implementation == "eager"
        cache = StaticCache(config, max_cache_len=length)
        heads = config.num_key_value_heads if kv_heads is None else kv_heads
        cache.early_initialization(batch, heads, config.head_dim, weight.dtype, weight.device)
        self.caches: list[Any] = cache.layers
        # Its length counts the tokens of a cache, and each call of a layer adds to it: set before each.
        self._lengths = [layer.cumulative_length for layer in self.caches]
        self.position = torch.zeros((), dtype=torch.int64, device=self.device)  # of the first token of a call
        self.tokens = torch.zeros(batch, 1, dtype=torch.int64, device=self.device)  # [batch, 1]: the newest
        self._places = torch.arange(length, device=self.device)  # [length]
        self._before: Callable[..., Any] = self._embed
        self._layer: Forward = _run_layer
        self._after: Forward = self._choose
        if compile:
            torch.compiler.reset()  # what was compiled for another provider or batch
            options = wo.compile_options() if backend == "inductor" else None
            make = functools.partial(torch.compile, dynamic=False, backend=backend, options=options)
            self._before, self._layer, self._after = make(self._embed), make(_run_layer), make(self._choose)

    # --- what is timed ---------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self) -> None:
        """One decode step at `position`: reads `tokens`, writes the most likely next ones there."""
        self.tokens.copy_(self._after(self._hidden()))

    def _hidden(self) -> torch.Tensor:
        """[batch, 1, hidden] after the last layer, of `tokens` at `position`."""
        torch._foreach_copy_(self._lengths, [self.position] * len(self._lengths))
        hidden, mask, cos, sin = self._before(self.tokens)
        for layer, cache in zip(self.model.model.layers, self.caches, strict=True):
            hidden = self._layer(layer, hidden, mask, cos, sin, cache)
        return hidden

    @torch.no_grad()
    def prompt(self, tokens: torch.Tensor) -> torch.Tensor:
        """The logits [batch, vocabulary] after a prompt [batch, T >= 2], which is put into an empty cache; eager."""
        torch._foreach_zero_(self._lengths)
        hidden = self.model.model.embed_tokens(tokens)  # [batch, T, hidden]
        places = self._places[: tokens.shape[1]]
        cos, sin = self.model.model.rotary_emb(hidden, places[None])
        mask = self._mask(places) if self._is_eager else None
        for layer, cache in zip(self.model.model.layers, self.caches, strict=True):
            hidden = _run_layer(layer, hidden, mask, cos, sin, cache)
        return self._logits(hidden)

    def _embed(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """(hidden [batch, 1, hidden], mask [1, 1, 1, length], cos, sin [1, 1, head_dim]) of one token each."""
        hidden = self.model.model.embed_tokens(tokens)
        cos, sin = self.model.model.rotary_emb(hidden, self.position.view(1, 1))
        return hidden, self._mask(self.position.view(1)), cos, sin

    def _mask(self, places: torch.Tensor) -> torch.Tensor:
        """[1, 1, T, length] of T tokens: what each sees, as the attention of the model takes it."""
        sees = (self._places <= places[:, None])[None, None]
        if not self._is_eager:
            return sees
        return torch.zeros_like(sees, dtype=self.model.lm_head.weight.dtype).masked_fill(~sees, float("-inf"))

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model.lm_head(self.model.model.norm(hidden[:, -1]))  # [batch, vocabulary]
        return logits

    def _choose(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._logits(hidden).argmax(-1, keepdim=True)  # [batch, 1]

    # --- its parts -------------------------------------------------------------------------------------------------

    def linears(self) -> list[Any]:
        """The linears of the decoder layers, in the order of the model; of a mixture its attention's."""
        names = [f"self_attn.{name}_proj" for name in "qkvo"] + [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
        found = []
        for layer in self.model.model.layers:
            own = dict(layer.named_modules())
            found += [own[name] for name in names if name in own]
        return found

    def mixtures(self) -> list[Any]:
        """The mixtures of the decoder layers: router and experts."""
        return [layer.mlp for layer in self.model.model.layers if hasattr(layer.mlp, "experts")]

    def linear_shapes(self) -> list[Shape]:
        """(K, N) of each of `linears`."""
        return [(module.in_features, module.out_features) for module in self.linears()]

    def run_linears(self, rows: int) -> Call:
        """A call of all of `linears`, and `mixtures`, one after another, each on random x [rows, K]; of layers that are
        fused, of their product."""
        dtype = self.model.lm_head.weight.dtype
        calls: dict[Any, int] = {}
        for module in self.linears():
            group = getattr(module, "_fused", None)
            calls[module if group is None else group.multiply] = module.in_features
        x = {k: torch.randn(rows, k, dtype=dtype, device=self.device) for k in calls.values()}
        operands = [(call, x[k]) for call, k in calls.items()]
        if mixtures := self.mixtures():
            hidden = torch.randn(rows, 1, self.model.config.hidden_size, dtype=dtype, device=self.device)
            operands += [(mixture, hidden) for mixture in mixtures]

        @torch.no_grad()
        def run() -> None:
            for call, of_call in operands:
                call(of_call)

        return run

    def run_head(self) -> Call:
        """A call of the output embeddings on random rows, one for each line of the batch."""
        config, weight = self.model.config, self.model.lm_head.weight
        x = torch.randn(self.batch, config.hidden_size, dtype=weight.dtype, device=self.device)

        @torch.no_grad()
        def run() -> None:
            self.model.lm_head(x)

        return run

    # --- results ---------------------------------------------------------------------------------------------------

    def fill(self, context: int) -> None:
        """Random keys and values, as if `context` tokens had been read."""
        for cache in self.caches:
            cache.keys.normal_()
            cache.values.normal_()
        self.position.fill_(context)

    def greedy(self, prompt: torch.Tensor, count: int) -> torch.Tensor:
        """[batch, count]: the most likely tokens after a prompt [batch, T], by the captured decode step."""
        begin = prompt.shape[1]
        self.position.fill_(begin)
        replay = captured(self.step, self.device)  # it has written to the cache: from here on all is written anew
        self.tokens.copy_(self.prompt(prompt).argmax(-1, keepdim=True))
        found = [self.tokens.clone()]
        for place in range(begin, begin + count - 1):
            self.position.fill_(place)
            replay()
            found.append(self.tokens.clone())
        return torch.cat(found, dim=1)

    @torch.no_grad()
    def check(self) -> None:
        """Raises RuntimeError unless a prompt, and a decode step after it, give the logits of transformers' forward."""
        prompt = self.random_tokens(CHECKED_TOKENS + 1)
        expected = self.model(prompt, use_cache=False, logits_to_keep=2).logits.float()  # [batch, 2, vocabulary]
        tolerance = _CHECK_TOLERANCE * max(1, len(self.caches) / _CHECK_LAYERS)
        first = self.prompt(prompt[:, :-1])
        self.position.fill_(CHECKED_TOKENS)
        self.tokens.copy_(prompt[:, -1:])
        decoded = self._logits(self._hidden())
        for name, logits, wanted in (("a prompt", first, expected[:, 0]), ("a decode step", decoded, expected[:, 1])):
            error = float((logits.float() - wanted).norm() / wanted.norm())
            if not error <= tolerance:
                raise RuntimeError(
                    f"model: relative error {error:.3g} of the logits of {name}, expected at most {tolerance:g}"
                )

    def random_tokens(self, count: int) -> torch.Tensor:
        """[batch, count]: the same in every call."""
        generator = torch.Generator(self.device).manual_seed(0)
        size = (self.batch, count)
        return torch.randint(0, self.model.config.vocab_size, size, generator=generator, device=self.device)


def _run_layer(
    layer: Any, hidden: torch.Tensor, mask: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor, cache: Any
) -> torch.Tensor:
    """One decoder layer. mask: None where `hidden` is all that is in the cache; each row then sees those before it."""
    found: torch.Tensor = layer(
        hidden, attention_mask=mask, position_embeddings=(cos, sin), past_key_values=cache, use_cache=True
    )
    return found
