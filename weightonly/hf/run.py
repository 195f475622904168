"""`python -m weightonly run`: a checkpoint continues a text."""

from __future__ import annotations

import argparse
import logging
import math
import resource
import time
import warnings
from collections import Counter
from typing import Any

import torch
from transformers.generation.streamers import BaseStreamer

from ..device import check_visible
from ..explain import explain
from ..formats.describe import readable
from ..formats.shards import GGUF, check_folder
from ..hub import model_folder
from ..kernels import cuda_built
from ..nn.base import PackedLayer
from ..nn.summary import in_words, module_bytes
from ..shown import counted, shown
from .loader import load_model
from .tokenizer import load_tokenizer

_SPREAD = ("auto", "balanced", "balanced_low_0", "sequential")
"""What accelerate makes of several devices."""


class _Printer(BaseStreamer):
    """Prints tokens as they come, as text where there is a tokenizer. times: when each came, the prompt's first."""

    def __init__(self, tokenizer: Any, skip_prompt: bool = False) -> None:
        self.times: list[float] = []
        self._tokenizer = tokenizer
        self._skip_prompt = skip_prompt
        self._tokens: list[int] = []
        self._printed = ""

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())
        if self._skip_prompt and len(self.times) == 1:
            return
        if self._tokenizer is None:
            print(*value.flatten().tolist(), sep=" ", end=" ", flush=True)
            return
        # The text of a token depends on those before it.
        self._tokens += value.flatten().tolist()
        text = self._tokenizer.decode(self._tokens, skip_special_tokens=True)
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):
            self._print(text)

    def end(self) -> None:
        if self._tokenizer is not None:
            self._print(self._tokenizer.decode(self._tokens, skip_special_tokens=True))
        print(flush=True)

    def _print(self, text: str) -> None:
        print(shown(text[len(self._printed) :], keep="\n\t"), end="", flush=True)
        self._printed = text


class _Shown(logging.Formatter):
    """What another one makes, such that a terminal shows it: transformers logs values of config.json as they are."""

    def __init__(self, formatter: logging.Formatter | None) -> None:
        super().__init__()
        self._formatter = formatter or logging.Formatter()

    def format(self, record: logging.LogRecord) -> str:
        return shown(self._formatter.format(record), keep="\n")


def _show_messages() -> None:
    for handler in logging.getLogger("transformers").handlers:
        handler.setFormatter(_Shown(handler.formatter))
    form = warnings.formatwarning
    warnings.formatwarning = lambda *args, **kwargs: shown(form(*args, **kwargs), keep="\n")


def run(options: argparse.Namespace) -> None:
    """Load options.folder, continue the prompt, print the tokens as they come, and what computed them how fast.

    Raises ValueError, naming the option, for tokens that are no numbers of the vocabulary, an empty prompt, fewer than
    one new token, a prompt without a tokenizer, --chat without a chat template, and values out of range. Raises what
    `load_model` raises.
    """
    sampling = _sampling(options)
    _show_messages()
    folder = model_folder(options.folder)
    if folder.suffix != GGUF or not folder.is_file():
        check_folder(folder)
    tokenizer = None
    if options.tokens is not None:
        numbers = _numbers(options.tokens)
    else:
        tokenizer = load_tokenizer(folder)
        if tokenizer is None:
            raise ValueError(f"{folder}: expected a tokenizer for --prompt, got none; --tokens 1,2,3 gives numbers")
        numbers = _in_template(tokenizer, options.prompt) if options.chat else tokenizer(options.prompt)["input_ids"]
    device = options.device or ("cuda" if torch.cuda.is_available() and cuda_built() else "cpu")
    if device not in _SPREAD and check_visible(device).type not in ("cpu", "cuda"):
        raise ValueError(f"--device: expected cpu, cuda or {', '.join(_SPREAD)}, got {device!r}")
    model = load_model(
        folder,
        dtype=options.dtype,
        device_map=device,
        arch=options.arch,
        activations=options.activations,
        trust_remote_code=False,
    )
    vocabulary = model.get_input_embeddings().num_embeddings
    if not numbers or not all(0 <= number < vocabulary for number in numbers):
        name = "--tokens" if tokenizer is None else "--prompt"
        raise ValueError(f"{name}: expected at least one token of 0..{vocabulary - 1}, got {numbers}")

    if sampling["do_sample"]:
        options.seed = torch.seed() if options.seed is None else options.seed
        torch.manual_seed(options.seed)
    printer = _Printer(tokenizer, options.chat)
    tokens = torch.tensor([numbers], device=model.device)
    model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        max_new_tokens=options.max_new_tokens,
        streamer=printer,
        **sampling,
    )
    print(_describe(model, len(numbers)))
    if sampling["do_sample"]:
        print(f"seed {options.seed}")
    _, first, *_ = printer.times
    new = len(printer.times) - 1  # the first are those of the prompt
    seconds = printer.times[-1] - printer.times[0]
    rate = f"{(new - 1) / (printer.times[-1] - first):.1f}" if new > 1 else "-"
    print(
        f"{counted(new, 'token')} in {seconds:.2f} s: the first after {first - printer.times[0]:.2f} s, "
        f"then {rate} tokens/s"
    )


def _sampling(options: argparse.Namespace) -> dict[str, Any]:
    """What `generate` takes. Raises ValueError for options that are out of range, or that nothing would read."""
    temperature, top_p = options.temperature, options.top_p
    if options.max_new_tokens < 1:
        raise ValueError(f"--max-new-tokens: expected at least 1, got {options.max_new_tokens}")
    if temperature is not None and not 0 <= temperature < math.inf:
        raise ValueError(f"--temperature: expected 0 or more, got {temperature}")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"--top-p: expected more than 0 and at most 1, got {top_p}")
    if options.chat and options.prompt is None:
        raise ValueError("--chat: expected --prompt, which the chat template takes, got --tokens")
    if temperature == 0 or (temperature is None and top_p is None):
        for name, value in (("--top-p", top_p), ("--seed", options.seed)):
            if value is not None:
                raise ValueError(f"{name}: expected --temperature above 0 beside it, got {value} without sampling")
        return {"do_sample": False}
    if options.seed is not None and not -(1 << 63) <= options.seed < 1 << 64:
        raise ValueError(f"--seed: expected a number of 64 bits, got {options.seed}")
    return {"do_sample": True, "temperature": temperature or 1.0, "top_p": top_p or 1.0, "top_k": 0}


def _in_template(tokenizer: Any, prompt: str) -> list[int]:
    """The tokens of a conversation that begins with the prompt. Raises ValueError where there is no chat template."""
    if not tokenizer.chat_template:
        raise ValueError("--chat: expected a tokenizer with a chat template, got one without; leave --chat out")
    messages = [{"role": "user", "content": prompt}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _describe(model: torch.nn.Module, prompt_rows: int) -> str:
    """The formats of its layers, the kernels of a token and of the prompt, and the memory, a line each."""
    packed = [layer for layer in model.modules() if isinstance(layer, PackedLayer)]
    dense = sum(isinstance(layer, torch.nn.Linear) for layer in model.modules())
    kinds = Counter(in_words(w.format, w.group_size, w.activations) for w in packed)
    formats = [f"{counted(count, 'layer')} {kind}" for kind, count in kinds.items()]
    lines = [f"format: {'; '.join([*formats, f'{dense} dense'])}"]
    if packed:
        rows = explain(model, [1, prompt_rows]).rows
        of_token, of_prompt = (sorted({f"{c.kernel} ({c.family})" for c in rows if c.m == m}) for m in (1, prompt_rows))
        lines.append(f"kernels: {', '.join(of_token)} for a token; {', '.join(of_prompt)} for the prompt")
    lines.append(f"memory: {readable(module_bytes(model))} of weights, {_peak()}")
    return "\n".join(lines)


def _peak() -> str:
    """The most memory that was in use."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        used = sum(torch.cuda.max_memory_allocated(i) for i in range(torch.cuda.device_count()))
        return f"at most {readable(used)} in use on GPUs"
    return f"at most {readable(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)} in use by the process"


def _numbers(text: str) -> list[int]:
    try:
        return [int(number) for number in text.split(",")]
    except ValueError as error:
        raise ValueError(f"--tokens: expected numbers such as 1,2,3, got {text!r}") from error
