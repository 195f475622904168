"""Regular expressions out of files, matched in bounded time and memory.

Python's `re` tries one way after another, and some patterns have exponentially many. This matcher goes through a
pattern once, from its end, with all places of the name at a time: a set of them is an int, place i its bit i. Only
repetitions go through a part more than once. It also counts its steps, and gives up aloud.

The language is what configs use: literals, `.`, classes, `\\d \\w \\s` and the like, anchors, `\\b`, groups, `|`,
`* + ? {m,n}`, their lazy forms (the same: only whether there is a match is asked), and lookaheads; all of it in ASCII.
"""

from __future__ import annotations

import functools
import re
import string
from collections.abc import Callable
from dataclasses import dataclass, field

MAX_LENGTH = 1000
"""Characters of a pattern, and of a name that it is matched with."""

_MAX_DEPTH = 50
_MAX_REPEATS = 1000
_ESCAPES = "dDwWsSntrfv" + string.punctuation + " "


class PatternError(ValueError):
    """A pattern that is none, is not supported, or takes too many steps; or too many patterns."""


@dataclass(eq=False)
class Steps:
    """What all patterns of a folder may take together: seconds, and some megabytes.

    left: of matching. characters: of the patterns: there are dozens of them in configs, here may be thousands.
    """

    left: int = 20_000_000
    characters: int = 100_000

    def take(self, count: int) -> None:
        self.left -= count
        if self.left < 0:
            raise PatternError("its patterns take too many steps to match with the names of its layers")


@dataclass(eq=False)
class Name:
    """A name to match patterns with. all: all its places, the end too."""

    text: str
    steps: Steps
    all: int = field(init=False)
    _known: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.all = (2 << len(self.text)) - 1

    def places(self, piece: re.Pattern[str]) -> int:
        """Where a pattern of one character, or of none, matches."""
        places = self._known.get(piece.pattern)
        if places is None:
            self.steps.take(1 + len(self.text) // 4)
            places = self._known[piece.pattern] = sum(1 << found.start() for found in piece.finditer(self.text))
        return places


Node = Callable[[Name, int], int]
"""(name, places where it may end) -> those where it may begin"""


class Pattern:
    """A regular expression. Raises PatternError for text that is none, is not supported, or is too much."""

    def __init__(self, text: str, steps: Steps) -> None:
        if len(text) > MAX_LENGTH:
            raise PatternError(f"expected at most {MAX_LENGTH} characters, got {len(text)}")
        if not text.isascii():  # wide classes take long to compile
            raise PatternError("expected ASCII characters, got others")
        steps.characters -= len(text) + 1
        if steps.characters < 0:
            raise PatternError(f"expected at most {Steps.characters} characters in all patterns, got more")
        try:
            re.compile(text)  # what is wrong with it, in the words that users know
        except (re.error, RecursionError, OverflowError) as error:
            raise PatternError(str(error)) from error
        self._root = _Parser(text).parse()

    def matches_start(self, name: Name) -> bool:
        """Whether some beginning of `name` matches, as `re.match` says."""
        return bool(self._begins(name) & 1)

    def matches_part(self, name: Name) -> bool:
        """Whether some part of `name` matches, as `re.search` says."""
        return bool(self._begins(name))

    def _begins(self, name: Name) -> int:
        if len(name.text) > MAX_LENGTH:
            raise PatternError(f"expected names of at most {MAX_LENGTH} characters, got {len(name.text)}")
        name.steps.take(1)
        return self._root(name, name.all)


class _Parser:
    """Recursive descent over a pattern that `re` accepts."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.depth = 0

    def parse(self) -> Node:
        node = self.choice()
        if self.at < len(self.text):
            raise self.unsupported()
        return node

    def unsupported(self) -> PatternError:
        return PatternError(f"expected a simple regular expression, got {self.text[self.at : self.at + 4]!r} in it")

    def peek(self, *texts: str) -> bool:
        """Whether one of `texts` comes next; then it is skipped."""
        for text in texts:
            if self.text.startswith(text, self.at):
                self.at += len(text)
                return True
        return False

    def choice(self) -> Node:
        self.depth += 1
        if self.depth > _MAX_DEPTH:
            raise PatternError(f"expected groups nested at most {_MAX_DEPTH} deep")
        options = [self.sequence()]
        while self.peek("|"):
            options.append(self.sequence())
        self.depth -= 1
        return options[0] if len(options) == 1 else _any_of(options)

    def sequence(self) -> Node:
        parts: list[Node] = []
        while self.at < len(self.text) and self.text[self.at] not in "|)":
            parts.append(self.repeated())
        return _one_after_another(parts)

    def repeated(self) -> Node:
        node = self.atom()
        while True:
            counts = re.compile(r"\{(\d*)(,?)(\d*)\}").match(self.text, self.at)
            if self.peek("*"):
                low, high = 0, None
            elif self.peek("+"):
                low, high = 1, None
            elif self.peek("?"):
                low, high = 0, 1
            elif counts and (counts[1] or counts[2]):
                self.at = counts.end()
                low = int(counts[1] or 0)
                high = int(counts[3]) if counts[3] else (None if counts[2] else low)
                if max(low, high or 0) > _MAX_REPEATS:
                    raise PatternError(f"expected at most {_MAX_REPEATS} repetitions, got {counts[0]}")
            else:
                return node
            if self.peek("+"):  # possessive: it gives nothing back
                raise self.unsupported()
            self.peek("?")
            node = _repeat(node, low, high)

    def atom(self) -> Node:
        if self.peek("(?:"):
            node = self.choice()
        elif self.peek("(?="):
            node = _ahead(self.choice(), True)
        elif self.peek("(?!"):
            node = _ahead(self.choice(), False)
        elif self.text.startswith("(?", self.at):
            raise self.unsupported()
        elif self.peek("("):
            node = self.choice()
        else:
            return self.single()
        if not self.peek(")"):
            raise self.unsupported()
        return node

    def single(self) -> Node:
        """A character, or an anchor."""
        begin = self.at
        if self.peek("^", "$", r"\A", r"\Z", r"\b", r"\B"):
            return _single(self.text[begin : self.at], 0)
        if self.peek("["):
            self.peek("^")
            self.peek("]")
            while not self.peek("]"):
                self.character()
        else:
            self.character()
        return _single(self.text[begin : self.at], 1)

    def character(self) -> None:
        if self.peek("\\") and self.text[self.at] not in _ESCAPES:
            raise self.unsupported()
        self.at += 1


@functools.lru_cache(1000)
def _single(text: str, length: int) -> Node:
    piece = re.compile(text)
    return lambda name, ends: ends >> length & name.places(piece)


def _any_of(options: list[Node]) -> Node:
    def node(name: Name, ends: int) -> int:
        name.steps.take(len(options))
        begins = 0
        for option in options:
            begins |= option(name, ends)
        return begins

    return node


def _one_after_another(parts: list[Node]) -> Node:
    def node(name: Name, ends: int) -> int:
        name.steps.take(1 + len(parts))
        for part in reversed(parts):
            ends = part(name, ends)
        return ends

    return node


def _repeat(body: Node, low: int, high: int | None) -> Node:
    def node(name: Name, ends: int) -> int:
        found = 0 if low else ends
        count = 0
        while ends and (high is None or count < high):
            name.steps.take(1)
            begins = body(name, ends)
            count += 1
            if count >= low:
                begins &= ~found  # what was found before leads to nothing new
                found |= begins
            elif begins == ends:  # it stays so up to `low`
                count = low
                found |= begins
            ends = begins
        return found

    return node


def _ahead(body: Node, wanted: bool) -> Node:
    def node(name: Name, ends: int) -> int:
        begins = body(name, name.all)
        return ends & (begins if wanted else ~begins)

    return node
