"""The core decides in values: it has no sentence that people read."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

CORE = Path(__file__).resolve().parents[2] / "machines"

WORDS = re.compile(r"[A-Za-z]{2,} [a-z]{2,}|[a-z]{2,} \Z|\A [a-z]{2,}")
"""Two words, or the end of one next to a value."""

WITH_PROBLEMS: Final = {
    "invariants": "a violated invariant is an error of this program",
    "model/selector.py": "what is wrong with a selector, with its position",
}
"""Files whose texts say what is wrong with an input or with the program."""

ROWS: Final = {"the same content has passed"}
"""Texts of rows: the store replays the events of old entries, and must get the rows that it has."""


def sentences(tree: ast.Module) -> Iterator[str]:
    """Yield the texts of a module that are neither docstrings nor those of errors."""
    skipped: set[int] = set()
    for node in ast.walk(tree):
        is_error = isinstance(node, ast.Raise | ast.Assert) or (
            isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "_expect"
        )
        is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        is_type = isinstance(node, ast.AnnAssign)
        skipped |= {id(each) for each in ast.walk(node)} if is_error or is_docstring else set()
        skipped |= {id(each) for each in ast.walk(node.annotation)} if is_type else set()
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in skipped:
            yield node.value


def modules() -> list[str]:
    names = (str(path.relative_to(CORE)) for path in CORE.rglob("*.py"))
    return sorted(name for name in names if not name.startswith(tuple(WITH_PROBLEMS)))


@pytest.mark.parametrize("name", modules())
def test_module_has_no_sentence(name: str) -> None:
    found = [text for text in sentences(ast.parse((CORE / name).read_text())) if WORDS.search(text)]
    assert [text for text in found if text not in ROWS] == []


def test_sentence_beside_value_is_noticed() -> None:
    assert list(filter(WORDS.search, sentences(ast.parse('x = f"stopped by {who}"')))) == ["stopped by "]
