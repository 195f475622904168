"""`weightonly run`: a conversation, sampling, and what streams."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tests.hf_models import llama, quantized, saved

from weightonly import __main__ as command
from weightonly.hf import load_model

TEMPLATE = "{% for m in messages %}<{{ m['content'] }}>{% endfor %}{% if add_generation_prompt %}#{% endif %}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A packed model with a tokenizer of letters and a chat template."""
    quantized(saved(tmp_path / "dense", llama), group_size=64).save_pretrained(tmp_path / "packed")
    words = {letter: number for number, letter in enumerate([*map(chr, range(33, 127)), "\u0120", "\u010a"])}
    tokenizer = transformers.Qwen2Tokenizer(vocab=words, merges=[])
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path / "packed")
    return tmp_path / "packed"


def run(folder: Path, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    arguments = ["run", str(folder), *words, "--max-new-tokens", "8", "--device", "cpu"]
    assert command.main(arguments) == 0
    return capsys.readouterr().out


def greedy(folder: Path, text: str, **options: Any) -> str:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    numbers = torch.tensor([tokenizer(text)["input_ids"]])
    tokens = load_model(folder).generate(numbers, max_new_tokens=8, do_sample=False, **options)
    return str(tokenizer.decode(tokens[0, numbers.shape[1] :], skip_special_tokens=True))


def test_chat_continues_the_template_and_prints_the_answer_alone(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = run(folder, capsys, "--prompt", "$&)", "--chat")
    assert out.startswith(greedy(folder, "<$&)>#") + "\nformat: ")


def test_a_seed_repeats_a_sample(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--tokens", "3,5,8", "--temperature", "5"]
    first = run(folder, capsys, *words)
    seed = next(line for line in first.splitlines() if line.startswith("seed ")).split()[1]
    again, other = run(folder, capsys, *words, "--seed", seed), run(folder, capsys, *words, "--seed", "1")
    assert first.splitlines()[0] == again.splitlines()[0] != other.splitlines()[0]


def test_a_narrow_top_p_and_no_temperature_are_greedy(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--tokens", "3,5,8"]
    expected = run(folder, capsys, *words).splitlines()[0]
    assert run(folder, capsys, *words, "--temperature", "0").splitlines()[0] == expected
    assert run(folder, capsys, *words, "--top-p", "1e-6").splitlines()[0] == expected


def test_chat_without_a_template_is_an_error(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "chat_template.jinja").unlink()
    assert command.main(["run", str(folder), "--prompt", "a", "--chat", "--device", "cpu"]) == 1
    assert "error: --chat: expected a tokenizer with a chat template, got one without" in capsys.readouterr().err
