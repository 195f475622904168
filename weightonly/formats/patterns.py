"""Regular expressions out of files, matched in bounded time.

Python's `re` tries one way after another, and some patterns have exponentially many. This matcher keeps, for each part
of a pattern and each place of the text, the set of places where a match can end: polynomially many. It also counts its
steps, and gives up aloud.

The language is what configs use: literals, `.`, classes, `\\d \\w \\s` and the like, anchors, `\\b`, groups, `|`,
`* + ? {m,n}`, their lazy forms (the same: only whether there is a match is asked), and lookaheads.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable
from dataclasses import dataclass, field

MAX_LENGTH = 1000
"""Characters of a pattern, and of a name that it is matched with."""

_MAX_DEPTH = 50
_MAX_REPEATS = 1000
_CLASSES = "dDwWsS"
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v", "0": "\0"}


class PatternError(ValueError):
    """A pattern that is none, is not supported, or takes too many steps."""


@dataclass(eq=False)
class Steps:
    """How many steps all matches of a folder may take together: seconds."""

    left: int = 20_000_000

    def take(self, count: int) -> None:
        self.left -= count
        if self.left < 0:
            raise PatternError("its patterns take too many steps to match with the names of its layers")


Node = Callable[["_Match", int], frozenset[int]]
"""(match, where it begins) -> where it can end"""


@dataclass(eq=False)
class _Match:
    text: str
    steps: Steps
    known: dict[tuple[int, int], frozenset[int]] = field(default_factory=dict)

    def ends(self, node: Node, begin: int) -> frozenset[int]:
        key = id(node), begin
        found = self.known.get(key)
        if found is None:
            found = self.known[key] = node(self, begin)
            self.steps.take(1 + len(found))
        return found


class Pattern:
    """A regular expression. Raises PatternError for text that is none, or that is not supported."""

    def __init__(self, text: str) -> None:
        if len(text) > MAX_LENGTH:
            raise PatternError(f"expected at most {MAX_LENGTH} characters, got {len(text)}")
        try:
            re.compile(text)  # what is wrong with it, in the words that users know
        except (re.error, RecursionError, OverflowError) as error:
            raise PatternError(str(error)) from error
        self._root = _Parser(text).parse()

    def matches_start(self, name: str, steps: Steps) -> bool:
        """Whether some beginning of `name` matches, as `re.match` says."""
        if len(name) > MAX_LENGTH:
            raise PatternError(f"expected names of at most {MAX_LENGTH} characters, got {len(name)}")
        return bool(_Match(name, steps).ends(self._root, 0))


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
        if self.peek("^", r"\A"):
            return lambda match, at: frozenset((at,) if at == 0 else ())
        if self.peek(r"\Z"):
            return lambda match, at: frozenset((at,) if at == len(match.text) else ())
        if self.peek("$"):
            return lambda match, at: frozenset((at,) if match.text[at:] in ("", "\n") else ())
        for mark in (r"\b", r"\B"):
            if self.peek(mark):
                edge = re.compile(mark)
                return lambda match, at: frozenset((at,) if edge.match(match.text, at) else ())
        return _character(re.compile(self.character(), re.DOTALL if self.text[self.at - 1] != "." else 0))

    def character(self) -> str:
        """The pattern of one character that comes next: it has no other way to match."""
        begin = self.at
        if self.peek("["):
            self.peek("^")
            self.peek("]")
            while not self.peek("]"):
                self.at += 2 if self.text[self.at] == "\\" else 1
        elif self.peek("\\"):
            escaped = self.text[self.at]
            if escaped not in _CLASSES and escaped not in _ESCAPES and escaped not in string.punctuation + " ":
                raise self.unsupported()
            self.at += 1
        else:
            self.at += 1
        return self.text[begin : self.at]


def _character(one: re.Pattern[str]) -> Node:
    return lambda match, at: frozenset((at + 1,) if at < len(match.text) and one.fullmatch(match.text[at]) else ())


def _any_of(options: list[Node]) -> Node:
    return lambda match, at: frozenset().union(*(match.ends(option, at) for option in options))


def _one_after_another(parts: list[Node]) -> Node:
    def node(match: _Match, at: int) -> frozenset[int]:
        places = frozenset((at,))
        for part in parts:
            places = frozenset().union(*(match.ends(part, place) for place in places))
        return places

    return node


def _repeat(body: Node, low: int, high: int | None) -> Node:
    def node(match: _Match, at: int) -> frozenset[int]:
        places, found = frozenset((at,)), set((at,) if low == 0 else ())
        count = 0
        while places and (high is None or count < high):
            after: frozenset[int] = frozenset().union(*(match.ends(body, place) for place in places))
            count += 1
            match.steps.take(1 + len(after))
            if count >= low:
                after -= found  # what was found before leads to nothing new
                found |= after
            elif after == places:  # it stays so up to `low`
                count = low
                found |= after
            places = after
        return frozenset(found)

    return node


def _ahead(body: Node, wanted: bool) -> Node:
    return lambda match, at: frozenset((at,) if bool(match.ends(body, at)) is wanted else ())
