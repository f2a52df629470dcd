"""Code mutants: known bugs put into the running code by name, never by line.

A mutant names a function and the code in it that changes.  The code is compared
as a syntax tree, so layout, comments and moves between files do not matter; a
mutant whose code is not in its function exactly once raises MutantOutdated.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType, FunctionType


class MutantOutdated(Exception):
    """The mutant's function no longer has the code that the mutant replaces."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """One bug: in `function`, `old` (an expression, or whole statements) becomes `new`."""

    name: str
    function: Callable[..., object]
    old: str
    new: str

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Run with the bug.  The function object keeps its identity, so every importer sees the bug."""
        assert isinstance(self.function, FunctionType)
        sound = self.function.__code__
        self.function.__code__ = self.compile()
        try:
            yield
        finally:
            self.function.__code__ = sound

    def compile(self) -> CodeType:
        """Return the function's code with the bug; raises MutantOutdated."""
        tree = ast.parse(textwrap.dedent(inspect.getsource(self.function)))
        replacer = _Replacer(_parse(self.old), _parse(self.new))
        tree = ast.fix_missing_locations(replacer.visit(tree))
        if replacer.count != 1:
            where = f"{self.function.__module__}.{self.function.__qualname__}"
            raise MutantOutdated(f"{self.name}: {self.old!r} occurs {replacer.count} times in {where}")
        module = compile(tree, inspect.getfile(self.function), "exec")
        return next(each for each in module.co_consts if isinstance(each, CodeType))


class _Replacer(ast.NodeTransformer):
    """Replaces every occurrence of some code, and counts them."""

    def __init__(self, old: list[ast.stmt], new: list[ast.stmt]) -> None:
        self.count = 0
        self._old = [ast.dump(each) for each in old]
        self._new = new
        is_expression = len(old) == 1 and isinstance(old[0], ast.Expr)
        self._old_expression = ast.dump(old[0].value) if is_expression else ""

    def visit(self, node: ast.AST) -> ast.AST:
        if self._old_expression and isinstance(node, ast.expr) and ast.dump(node) == self._old_expression:
            self.count += 1
            return self._new[0].value
        for name, body in ast.iter_fields(node):
            if isinstance(body, list) and not self._old_expression:
                setattr(node, name, self._replace_statements(body))
        return self.generic_visit(node)

    def _replace_statements(self, body: list[ast.AST]) -> list[ast.AST]:
        size = len(self._old)
        for start in range(len(body) - size + 1):
            if [ast.dump(each) for each in body[start : start + size]] == self._old:
                self.count += 1
                return [*body[:start], *self._new, *body[start + size :]]
        return body


def _parse(code: str) -> list[ast.stmt]:
    """Parse code as if it stood in a coroutine, so that it may await."""
    (wrapper,) = ast.parse("async def _():\n" + textwrap.indent(textwrap.dedent(code), "    ")).body
    assert isinstance(wrapper, ast.AsyncFunctionDef)
    return wrapper.body
