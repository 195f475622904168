"""The pages are run as on a machine without a GPU, with tiny models in the place of those that they download."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import weightonly as wo

WORDS = ("Hello", ",", "who", "are", "you", "?")


@pytest.fixture(scope="session")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders by the names of models of the hub: a dense model, and the same as AWQ has it."""
    folder = tmp_path_factory.mktemp("hub")
    try:
        import tokenizers
        import transformers
    except ImportError:
        return folder
    words = tokenizers.models.WordLevel({word: number for number, word in enumerate(WORDS)}, WORDS[-1])
    made = tokenizers.Tokenizer(words)
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    dense = folder / "Qwen" / "Qwen3-8B"
    transformers.PreTrainedTokenizerFast(tokenizer_object=made).save_pretrained(dense)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "head_dim": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 32}
    config = transformers.Qwen3Config(**sizes, **heads, bos_token_id=None, eos_token_id=None)
    model: Any = transformers.Qwen3ForCausalLM(config)
    model.half().save_pretrained(dense)
    packed: Any = wo.nn.quantize_model(model)
    packed.save_pretrained(folder / "packed")
    wo.formats.export(folder / "packed", folder / "Qwen" / "Qwen3-8B-AWQ", to="awq")
    for file in dense.glob("tokenizer*"):
        (folder / "Qwen" / "Qwen3-8B-AWQ" / file.name).write_bytes(file.read_bytes())
    return folder


@pytest.fixture
def without_gpu(hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # some blocks write files
    for made in hub.glob("Qwen"):
        (tmp_path / made.name).symlink_to(made)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
