"""The messages that docs/faq.md quotes are those of the program: each is in a string of its source."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest
from tests import ROOT

FAQ = ROOT / "docs" / "faq.md"
GAP = "..."
"""Stands in the page for what differs."""


def messages() -> list[str]:
    """The lines of its text blocks."""
    blocks = re.findall(r"^```text\n(.*?)^```$", FAQ.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]


def strings() -> Iterator[str]:
    """Every string of the package, what is filled in as `GAP`; names of text in f-strings as that text."""
    for path in (ROOT / "weightonly").rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        texts = {
            name.id: node.value
            for node in tree.body
            if isinstance(node, ast.Assign)
            for name in node.targets
            if isinstance(name, ast.Name)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr | ast.Constant):
                yield text_of(node, texts)


def text_of(node: ast.expr, texts: dict[str, ast.expr]) -> str:
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part, texts) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        known = texts.get(node.value.id) if isinstance(node.value, ast.Name) else None
        return text_of(known, texts) if isinstance(known, ast.Constant) else GAP
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else GAP


def occurs(message: str, texts: set[str]) -> bool:
    """Whether the parts of a message between gaps stand in one of `texts`, in order."""
    return any(holds(text, [part for part in message.split(GAP) if part]) for text in texts)


def holds(text: str, parts: list[str]) -> bool:
    place = 0
    for part in parts:
        found = text.find(part, place)
        if found < 0:
            return False
        place = found + len(part)
    return True


@pytest.fixture(scope="module")
def texts() -> set[str]:
    return set(strings())


@pytest.mark.parametrize("message", messages())
def test_message_is_one_of_the_program(message: str, texts: set[str]) -> None:
    assert len(message.replace(GAP, "").strip()) > 15
    assert occurs(message, texts)


def test_another_message_is_not(texts: set[str]) -> None:
    assert occurs("group_size: expected -1 or a divisor of K=..., got ...", texts)
    assert not occurs("group_size: expected -1 or a factor of K=..., got ...", texts)


def test_there_are_twenty() -> None:
    assert len(set(messages())) == len(messages()) >= 20
