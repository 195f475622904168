"""The tokenizer of a folder, or of a GGUF file, as transformers makes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerFast

from ..formats.gguf_header import read_gguf_header
from ..formats.shards import GGUF

_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt")


def load_tokenizer(path: Path) -> Any:
    """The tokenizer; None where the folder, or the file, has none.

    Raises ValueError, naming the file, for a GGUF file that is damaged, or whose tokenizer transformers does not make.
    """
    if path.suffix != GGUF or not path.is_file():
        has_one = any((path / name).is_file() for name in _FILES)
        return AutoTokenizer.from_pretrained(path, trust_remote_code=False) if has_one else None
    if "tokenizer.ggml.model" not in read_gguf_header(path).metadata:  # which has checked what transformers believes
        return None
    try:
        return PreTrainedTokenizerFast.from_pretrained(path.parent, gguf_file=path.name)
    except Exception as error:
        kind = f"{type(error).__name__}: {error}"
        raise ValueError(f"{path}: expected a tokenizer that transformers makes, got another ({kind})") from error
