"""Which modules a forward calls with the same tensor, read from its source."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap

import torch


@functools.cache
def same_input(owner: type[torch.nn.Module]) -> tuple[tuple[str, ...], ...]:
    """Attributes of `owner`, such as ("q_proj", "k_proj", "v_proj"), that its forward calls with the same variable.

    Nothing is assigned to the variable between the calls, and all are in the same branch: where one is called, all are.
    A class without source has none.
    """
    try:
        source = textwrap.dedent(inspect.getsource(inspect.unwrap(owner.forward)))
        tree = ast.parse(source)
    except (OSError, TypeError, SyntaxError):
        return ()
    reader = _Reader()
    reader.visit(tree)
    return tuple(tuple(names) for names in reader.found.values() if len(names) > 1)


class _Reader(ast.NodeVisitor):
    """Visits what runs in the order in which it runs."""

    def __init__(self) -> None:
        self.found: dict[object, list[str]] = {}
        self._assigned: dict[str, int] = {}
        self._branch: tuple[object, ...] = ()

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        called, args = node.func, node.args
        is_own = isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name) and called.value.id == "self"
        if is_own and len(args) == 1 and isinstance(args[0], ast.Name) and not node.keywords:
            assert isinstance(called, ast.Attribute)
            variable = args[0].id
            names = self.found.setdefault((variable, self._assigned.get(variable, 0), self._branch), [])
            if called.attr not in names:
                names.append(called.attr)

    def visit_Name(self, node: ast.Name) -> None:
        if not isinstance(node.ctx, ast.Load):
            self._assigned[node.id] = self._assigned.get(node.id, 0) + 1

    def visit_Assign(self, node: ast.Assign) -> None:
        for part in (node.value, *node.targets):
            self.visit(part)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        for part in (node.value, node.target):
            self.visit(part)

    def _visit_branches(self, node: ast.AST) -> None:
        outside = self._branch
        for field, value in ast.iter_fields(node):
            self._branch = outside if field in ("test", "iter") else (*outside, (id(node), field))
            for part in value if isinstance(value, list) else [value]:
                if isinstance(part, ast.AST):
                    self.visit(part)
        self._branch = outside

    visit_If = visit_IfExp = visit_For = visit_While = visit_Try = visit_Match = _visit_branches
    visit_ListComp = visit_GeneratorExp = visit_DictComp = visit_Lambda = _visit_branches
