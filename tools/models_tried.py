"""What becomes of every text architecture of transformers when it is quantized: docs/models.md is what this writes.

`python -m tools.models_tried docs/models.md`, or with `--only mamba --only t5`. Each class is tried in a process of its
own with a tiny config (`tools/tiny_models.py`).
"""

from __future__ import annotations

import argparse
import copy
import gc
import multiprocessing
import re
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import transformers
from tqdm import tqdm

import weightonly as wo
from weightonly.hf import WeightOnlyConfig, load_model

from .tiny_models import Architecture, architectures, inputs_of, output_of, tiny_model

GROUP = 32
BOUND = 1e-4
"""Of |packed - dense| / |dense|, of outputs in fp32: sums in another order, of the same weights."""

KINDS = (("causal", "Causal"), ("seq2seq", "Sequence to sequence"), ("encoder", "Base models"))
HEAD = """\
# Models tried

Every architecture for text that transformers has, with random weights in a tiny config: classes that generate, and base
models of the others. Of transformers {version}, on a CPU, `python -m tools.models_tried docs/models.md` tried {tried}
and built {built}; {right} of these are right in all that is tried: {causal} causal, {seq2seq} sequence to sequence,
{encoder} base models.

| tried | what is expected |
|---|---|
| quantize | `quantize_model(model, group_size={group})` in int4: outputs in fp32 differ from those of the dense model \
with the dequantized weights by at most {bound} of their norm |
| save | `save_pretrained`, `from_pretrained`: the same bits in all tensors and in the output |
| load | `load_model` of that folder: the same bits in the output |
| from_dense | `from_pretrained` of the dense folder with a `WeightOnlyConfig`: the same bits in the output as \
`quantize_model` of the same layers |
| fuse | `fuse_model`: the same bits in all tensors, and in the output, or an error as that of the first line |
| generate | four tokens, where the dense model generates them from tokens alone |
| in_bf16 | an output in bf16, where the dense model has one |

Layers that are left are output embeddings, layers that a model keeps in fp32, gates, and others: see
[what is left as it is](guides/quantize.md#what-is-left-as-it-is). The error is that of the first line. fused: how many
layers compute a product with others; k and v that have 32 columns, as in most of these tiny models, do not.
"""


@dataclass
class Result:
    """What was found of one class.

    built: None, or why it cannot be built. failed: step -> what came instead. notes: what the table says beside.
    """

    architecture: Architecture
    built: str | None = None
    packed: int = 0
    left: int = 0
    fused: int = 0
    error: float = 0.0
    failed: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def is_right(self) -> bool:
        return self.built is None and not self.failed


def try_one(architecture: Architecture, folder: Path) -> Result:
    """Quantizes a tiny model on every way, and compares.

    folder: an empty one.
    """
    result = Result(architecture)
    try:
        dense = tiny_model(architecture)
        y = output_of(dense, architecture)
        if not torch.isfinite(y).all():
            raise ValueError("expected finite outputs of the dense model, got others")
    except Exception as error:
        result.built = _text(error)
        return result
    tries = _Tries(result, dense, folder)
    for step in (tries.quantize, tries.save, tries.load, tries.from_dense, tries.fuse, tries.generate, tries.in_bf16):
        try:
            step()
        except _Skip:
            break
        except Exception as error:
            result.failed[step.__name__] = _text(error)
            if step == tries.quantize:
                break
    return result


class _Skip(Exception):
    """Nothing else can be tried."""


class _Tries:
    def __init__(self, result: Result, dense: Any, folder: Path) -> None:
        self.result, self.architecture, self.dense = result, result.architecture, dense
        self.cls = type(dense)
        self.dense_folder, self.packed_folder = folder / "dense", folder / "packed"

    def quantize(self) -> None:
        """`quantize_model`, and the dense model with the numbers that it has."""
        self.dense.save_pretrained(self.dense_folder)
        self.model: Any = copy.deepcopy(self.dense)
        wo.nn.quantize_model(self.model, group_size=GROUP)
        summary: Any = self.model.weightonly_summary
        self.result.packed, self.result.left = len(summary.quantized), len(summary.left)
        if not summary.quantized:
            self.result.notes.append("nothing is quantized")
            raise _Skip
        self.y = output_of(self.model, self.architecture)
        dense: Any = copy.deepcopy(self.model).dequantize()
        expected = output_of(dense, self.architecture)
        self.result.error = float((self.y - expected).norm() / expected.norm())
        if not self.result.error <= BOUND:
            raise ValueError(f"expected an error of at most {BOUND}, got {self.result.error:.1e}")

    def save(self) -> None:
        """`save_pretrained`, `from_pretrained`: equal bits."""
        self.model.save_pretrained(self.packed_folder)
        again = self._from_pretrained(self.packed_folder)
        _same_state(self.model, again)
        _same(self.y, output_of(again, self.architecture))

    def load(self) -> None:
        """`load_model` of the same folder: equal bits."""
        again: Any = load_model(self.packed_folder)
        _same(self.y, output_of(again.eval(), self.architecture))

    def from_dense(self) -> None:
        """`from_pretrained(dense folder, WeightOnlyConfig)`: equal to `quantize_model` of the same layers."""
        config = WeightOnlyConfig(group_size=GROUP)
        model = self._from_pretrained(self.dense_folder, quantization_config=config)
        names, expected = _packed(model), _packed(self.model)
        same = self.y
        if names != expected:
            model_of_names = wo.nn.quantize_model(copy.deepcopy(self.dense), group_size=GROUP, only=sorted(names))
            same = output_of(model_of_names, self.architecture)
            others = ", ".join(sorted(names ^ expected)[:2])
            self.result.notes.append(f"from_pretrained {'packs' if names - expected else 'leaves'} {others}")
        _same(same, output_of(model, self.architecture))

    def fuse(self) -> None:
        """`fuse_model`: the same tensors. What reads a part of the columns may sum in another order, as matmul does."""
        model = copy.deepcopy(self.model)
        self.result.fused = sum(map(len, wo.nn.fuse_model(model)))
        y = output_of(model, self.architecture)
        error = float((y - self.y).norm() / self.y.norm())
        if not error <= BOUND:
            raise ValueError(f"expected an error of at most {BOUND}, got {error:.1e}")
        if error:
            self.result.notes.append(f"other bits when fused, {error:.0e}")
        _same_state(self.model, model)

    def generate(self) -> None:
        """Tokens, from the model and from the saved one."""
        if self.architecture.kind == "encoder":
            return
        tokens = inputs_of(self.architecture)["input_ids"]
        try:
            torch.manual_seed(0)
            self._generate(self.dense, tokens)
        except Exception as error:
            self.result.notes.append(f"the dense model does not generate ({_text(error)})")
            return
        self._generate(self.model, tokens)

    def in_bf16(self) -> None:
        """Where the dense model runs in bf16, the packed one does."""
        dense, model = copy.deepcopy(self.dense), copy.deepcopy(self.model)
        try:
            output_of(dense.to(torch.bfloat16), self.architecture)
        except Exception:
            return
        output_of(model.to(torch.bfloat16), self.architecture)

    def _from_pretrained(self, folder: Path, **options: Any) -> Any:
        return self.cls.from_pretrained(folder, **options).eval()

    def _generate(self, model: Any, tokens: torch.Tensor) -> None:
        start = {"decoder_start_token_id": 2} if self.architecture.kind == "seq2seq" else {}
        found = model.generate(tokens, max_new_tokens=4, min_new_tokens=4, do_sample=False, **start)
        if found.shape[-1] < 4:
            raise ValueError(f"expected 4 tokens more, got {list(found.shape)}")


def _packed(model: torch.nn.Module) -> set[str]:
    """The packed layers of a model; of experts the module that holds them."""
    return {
        name
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, wo.nn.Linear | wo.nn.Experts)
    }


def _same_state(model: torch.nn.Module, other: torch.nn.Module) -> None:
    a, b = model.state_dict(), other.state_dict()
    if a.keys() != b.keys():
        raise ValueError(f"expected the same tensors, got others: {sorted(a.keys() ^ b.keys())[:3]}")
    for name, tensor in a.items():
        if tensor.dtype != b[name].dtype or not torch.equal(tensor, b[name]):
            raise ValueError(f"{name}: expected the same bits, got others")


def _same(y: torch.Tensor, other: torch.Tensor) -> None:
    if not torch.equal(y, other):
        raise ValueError(f"expected the same output, got one that differs by {float((y - other).abs().max()):.1e}")


def _text(error: BaseException) -> str:
    """One line of an error, with the place that raised it."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    lines = [line for line in str(error).strip().splitlines() if line.strip()] or [""]
    text = re.sub(r"\S*/(?=dense|packed)", "", " ".join(" ".join(lines[-2:]).split()))
    return f"{type(error).__name__}: {text[:160]} ({Path(frame.filename).name})"


def _child(architecture: Architecture, pipe: Connection) -> None:
    with tempfile.TemporaryDirectory() as folder:
        pipe.send(try_one(architecture, Path(folder)))


def try_all(chosen: Sequence[Architecture], seconds: float = 120) -> list[Result]:
    """Each in a process of its own, one after another; one that takes longer than `seconds`, or dies, has failed."""
    context = multiprocessing.get_context("fork")
    results = []
    for architecture in tqdm(chosen):
        receive, send = context.Pipe(duplex=False)
        process = context.Process(target=_child, args=(architecture, send))
        process.start()
        send.close()
        try:
            result = receive.recv() if receive.poll(seconds) else None
        except EOFError:
            result = None
        if result is None:
            process.kill()
            result = Result(architecture, failed={"process": f"no answer in {seconds:.0f} s"})
        process.join()
        results.append(result)
        gc.collect()
    return results


def page(results: Sequence[Result]) -> str:
    """docs/models.md"""
    built = [result for result in results if result.built is None]
    right = [result for result in built if result.is_right]
    found = {kind: sum(r.architecture.kind == kind for r in right) for kind, _ in KINDS}
    lines = [
        HEAD.format(
            version=transformers.__version__,
            tried=len(results),
            built=len(built),
            right=len(right),
            group=GROUP,
            bound=f"{BOUND:.0e}",
            **found,
        )
    ]
    lines += _failures([result for result in built if not result.is_right])
    for kind, title in KINDS:
        lines += [f"## {title}", "", "| class | packed | fused | left | error | note |", "|---|---|---|---|---|---|"]
        for result in built:
            if result.architecture.kind == kind:
                error = f"{result.error:.0e}" if result.error else "0"
                note = "; ".join([*(f"**{step} fails**" for step in result.failed), *result.notes])
                name = result.architecture.class_name
                lines.append(f"| {name} | {result.packed} | {result.fused} | {result.left} | {error} | {_cell(note)} |")
        lines.append("")
    lines += [
        "## Not built",
        "",
        "Their dense models are not built or do not run from tokens alone in a tiny config.",
        "",
    ]
    lines += ["| class | reason |", "|---|---|"]
    lines += [f"| {r.architecture.class_name} | {_cell(r.built)} |" for r in results if r.built is not None]
    return "\n".join(lines) + "\n"


def _failures(failed: Sequence[Result]) -> list[str]:
    if not failed:
        return []
    rows = [
        f"| {result.architecture.class_name} | {step} | {_cell(reason)} |"
        for result in failed
        for step, reason in result.failed.items()
    ]
    return ["## Not right", "", "| class | tried | got |", "|---|---|---|", *rows, ""]


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.models_tried", description=__doc__)
    parser.add_argument("out", nargs="?", type=Path, help="the page to write; without it, it is printed")
    parser.add_argument("--only", action="append", help="a model type or a class, repeatable")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # a forked process has no threads of its parent
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    only = set(options.only or ())
    chosen = [a for a in architectures() if not only or only & {a.model_type, a.class_name}]
    if not chosen:
        parser.error(f"--only: expected model types or classes for text, got {', '.join(sorted(only))}")
    text = page(try_all(chosen))
    show: Callable[[str], object] = print if options.out is None else options.out.write_text
    show(text)


if __name__ == "__main__":
    main()
