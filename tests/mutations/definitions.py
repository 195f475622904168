"""Where a file defines a name: the function, the class or the assignment that a mutation is planted in."""

from __future__ import annotations

import ast
import functools
import itertools
import re
from collections.abc import Iterator

Span = tuple[int, int]

_NO_CODE = re.compile(r'//.*|"(?:\\.|[^"\\\n])*"|' + r"'(?:\\.|[^'\\\n])'")
_HEAD = r"\b(?:(?:struct|class) {0}\b[^;(){{}}]*|{0}\((?:[^()]|\([^()]*\))*\)[\s\w]*(?::[^;{{}}]*)?)\{{"


@functools.lru_cache
def definitions(file: str, content: str, name: str) -> list[Span]:
    """Begin and end of each overload. name: `function`, `Class.method`, `function.inner`, or what is assigned to."""
    if not file.endswith(".py"):
        return list(_in_cpp(content, name))
    first, *inner = name.split(".")
    found = list(_named(_parsed(content), first))
    for part in inner:
        found = [node for scope in found for node in _named(scope, part)]
    begins = [0, *itertools.accumulate(len(line) + 1 for line in content.split("\n"))]
    return [(begins[_first_line(node) - 1], begins[node.end_lineno or 0]) for node in found]


@functools.lru_cache(2)
def _parsed(content: str) -> ast.Module:
    return ast.parse(content)


def _named(scope: ast.AST, name: str) -> Iterator[ast.stmt]:
    for node in ast.iter_child_nodes(scope):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names = [node.name]
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [target.id for target in targets if isinstance(target, ast.Name)]
        else:
            yield from _named(node, name)
            continue
        if name in names:
            yield node


def _first_line(node: ast.stmt) -> int:
    """That of the first decorator, if there is one."""
    return min(part.lineno for part in (node, *getattr(node, "decorator_list", ())))


def _in_cpp(content: str, name: str) -> Iterator[Span]:
    """From the name of a function or a struct to the brace that closes its body."""
    code = _NO_CODE.sub(lambda found: " " * len(found[0]), content)
    for head in re.finditer(_HEAD.format(name), code):
        depth, at = 1, head.end()
        while depth and at < len(code):
            depth += {"{": 1, "}": -1}.get(code[at], 0)
            at += 1
        yield head.start(), at
