"""`python -m weightonly run`: a checkpoint continues a text."""

from __future__ import annotations

import argparse
import logging
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer
from transformers.generation.streamers import BaseStreamer

from ..formats.shards import check_folder
from ..kernels import cuda_built
from ..shown import shown
from .loader import load_model

_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt")


class _Printer(BaseStreamer):
    """Prints tokens as they come, as text where there is a tokenizer. times: when each came, the prompt's first."""

    def __init__(self, tokenizer: Any) -> None:
        self.times: list[float] = []
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._printed = ""

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())
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
    """Load options.folder, continue the prompt greedily, print the tokens and their number per second.

    Raises ValueError, naming the option, for tokens that are no numbers of the vocabulary, an empty prompt, fewer than
    one new token, and a prompt without a tokenizer. Raises what `load_model` raises.
    """
    if options.max_new_tokens < 1:
        raise ValueError(f"--max-new-tokens: expected at least 1, got {options.max_new_tokens}")
    _show_messages()
    folder = Path(options.folder)
    tokenizer = None
    if options.tokens is not None:
        numbers = _numbers(options.tokens)
    else:
        if folder.is_dir() and not any((folder / name).is_file() for name in _TOKENIZERS):
            raise ValueError(f"{folder}: expected a tokenizer for --prompt, got none; --tokens 1,2,3 gives numbers")
        check_folder(folder)
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        numbers = tokenizer(options.prompt)["input_ids"]
    device = options.device or ("cuda" if torch.cuda.is_available() and cuda_built() else "cpu")
    model = load_model(folder, dtype=options.dtype, device_map=device, arch=options.arch, trust_remote_code=False)
    vocabulary = model.get_input_embeddings().num_embeddings
    if not numbers or not all(0 <= number < vocabulary for number in numbers):
        name = "--tokens" if tokenizer is None else "--prompt"
        raise ValueError(f"{name}: expected at least one token of 0..{vocabulary - 1}, got {numbers}")

    printer = _Printer(tokenizer)
    tokens = torch.tensor([numbers], device=model.device)
    model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        max_new_tokens=options.max_new_tokens,
        do_sample=False,
        streamer=printer,
    )
    _, first, *_ = printer.times
    new = len(printer.times) - 1  # the first are those of the prompt
    seconds = printer.times[-1] - printer.times[0]
    rate = f"{(new - 1) / (printer.times[-1] - first):.1f}" if new > 1 else "-"
    print(f"{new} tokens in {seconds:.2f} s: the first after {first - printer.times[0]:.2f} s, then {rate} tokens/s")


def _numbers(text: str) -> list[int]:
    try:
        return [int(number) for number in text.split(",")]
    except ValueError as error:
        raise ValueError(f"--tokens: expected numbers such as 1,2,3, got {text!r}") from error
