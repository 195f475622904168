"""The weight shapes that the benchmarks know by name, each as (k, n): y[m, n] = x[m, k] @ w[k, n]."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

Shape = tuple[int, int]


@dataclass(frozen=True)
class LlamaSizes:
    """The sizes of a language model of Llama's kind."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def linears(self) -> tuple[Shape, ...]:
        """Of one layer, in order, as inference engines store them: query, key and value are one matrix, and so are gate
        and up."""
        attention = (self.hidden, (self.heads + 2 * self.kv_heads) * self.head_dim)
        up, down = (self.hidden, 2 * self.intermediate), (self.intermediate, self.hidden)
        return attention, (self.hidden, self.hidden), up, down


LLAMAS: dict[str, LlamaSizes] = {
    "llama3-8b": LlamaSizes(4096, 14336, layers=32, heads=32, kv_heads=8, vocabulary=128256),
    "llama3-70b": LlamaSizes(8192, 28672, layers=80, heads=64, kv_heads=8, vocabulary=128256),
    "tiny": LlamaSizes(128, 256, layers=2, heads=4, kv_heads=2, vocabulary=512),  # for a CPU: a second or two
}


@dataclass(frozen=True, kw_only=True)
class MixtureModelSizes(LlamaSizes):
    """The sizes of a language model with experts in each layer, `intermediate` being that of one of them.

    kind: its model type in transformers. own_head_dim: where it is not hidden / heads.
    """

    kind: str
    experts: int
    top_k: int
    own_head_dim: int | None = None

    @property
    def head_dim(self) -> int:
        return self.own_head_dim or super().head_dim


MODELS: dict[str, LlamaSizes] = LLAMAS | {
    "qwen3-30b-a3b": MixtureModelSizes(
        2048, 768, 48, 32, 4, 151936, kind="qwen3_moe", experts=128, top_k=8, own_head_dim=128
    ),
    "gpt-oss-20b": MixtureModelSizes(
        2880, 2880, 24, 64, 8, 201088, kind="gpt_oss", experts=32, top_k=4, own_head_dim=64
    ),
    "mixtral-8x7b": MixtureModelSizes(4096, 14336, 32, 32, 8, 32000, kind="mixtral", experts=8, top_k=2),
    "tiny-qwen3-moe": MixtureModelSizes(128, 128, 2, 4, 4, 512, kind="qwen3_moe", experts=4, top_k=2),
    "tiny-gpt-oss": MixtureModelSizes(128, 128, 2, 4, 4, 512, kind="gpt_oss", experts=4, top_k=2),
    "tiny-mixtral": MixtureModelSizes(128, 128, 2, 4, 4, 512, kind="mixtral", experts=4, top_k=2),
}
"""What `bench model` makes: those of Llama's kind, and mixtures."""

NAMED: dict[str, tuple[Shape, ...]] = {
    "llama3-8b": LLAMAS["llama3-8b"].linears,
    "llama3-70b": LLAMAS["llama3-70b"].linears,
    "table": (
        (4096, 4096),
        (4096, 6144),
        (4096, 28672),
        (14336, 4096),
        (8192, 8192),
        (8192, 10240),
        (28672, 8192),
    ),
    "minilm": ((384, 384), (384, 1536), (1536, 384)),
    "tiny": LLAMAS["tiny"].linears,
}


@dataclass(frozen=True)
class MixtureSizes:
    """The sizes of the experts of a mixture: w13 [hidden, 2 inner] is gate and up, w2 [inner, hidden] down.

    format: in which its weights are measured.
    """

    hidden: int
    inner: int
    experts: int
    top_k: int
    format: str = "int4"

    def shape(self, product: str) -> Shape:
        """(K, N) of "w13" or "w2"."""
        return {"w13": (self.hidden, 2 * self.inner), "w2": (self.inner, self.hidden)}[product]


MIXTURES: dict[str, MixtureSizes] = {
    "mixtral-8x7b": MixtureSizes(4096, 14336, experts=8, top_k=2),
    "qwen3-30b-a3b": MixtureSizes(2048, 768, experts=128, top_k=8),
    "deepseek-v3": MixtureSizes(7168, 2048, experts=256, top_k=8),
    "gpt-oss-120b": MixtureSizes(2880, 2880, experts=128, top_k=4, format="mxfp4"),
    "tiny": MixtureSizes(128, 128, experts=8, top_k=2),  # for a CPU: a second or two
}


def _parse_one(text: str) -> tuple[Shape, ...]:
    """A name of `NAMED`, or "KxN"."""
    if text in NAMED:
        return NAMED[text]
    k, cross, n = text.lower().partition("x")
    if cross and k.isdecimal() and n.isdecimal() and int(k) > 0 and int(n) > 0:
        return ((int(k), int(n)),)
    raise ValueError(f"shapes: expected one of {', '.join(NAMED)} or KxN (such as 4096x4096), got {text!r}")


def resolve(shapes: str | Iterable[str | Shape]) -> list[Shape]:
    """The (k, n) list that `shapes` means, in its order, without repeats.

    `shapes` is a name of `NAMED`, "KxN", several of these joined by commas, or a list of these
    or of (k, n) pairs. Raises ValueError for a name that does not exist (the message lists the names that do),
    for sizes below 1 and for an empty list.
    """
    items: list[str | Shape] = [*shapes.split(",")] if isinstance(shapes, str) else list(shapes)
    found: list[Shape] = []
    for item in items:
        if isinstance(item, str):
            found.extend(_parse_one(item.strip()))
            continue
        if len(item) != 2 or not all(isinstance(size, int) and size > 0 for size in item):
            raise ValueError(f"shapes: expected (k, n) of two positive integers, got {item!r}")
        found.append((item[0], item[1]))
    if not found:
        raise ValueError(f"shapes: expected at least one, got none; names: {', '.join(NAMED)}")
    return list(dict.fromkeys(found))
