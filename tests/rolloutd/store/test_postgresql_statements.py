"""Statements of the store as PostgreSQL reads them."""

from __future__ import annotations

from typing import Any

import pytest

from rolloutd.store.postgresql.connection import translate


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        ("SELECT ? FROM a WHERE b = '?' AND c = ?", ("SELECT $1 FROM a WHERE b = '?' AND c = $2", (0, 1))),
        ("SELECT ?2, ?1, ?2", ("SELECT $1, $2, $1", (1, 0))),
        ("SELECT :node, x::json, :node", ("SELECT $1, x::json, $1", ("node",))),
        ("DELETE FROM freeze WHERE id = 'freeze'", ("DELETE FROM \"freeze\" WHERE id = 'freeze'", ())),
        ("SELECT json_array(a)", ("SELECT json_build_array(a)", ())),
    ],
)  # fmt: skip
def test_statement_is_translated(statement: str, expected: tuple[str, Any]) -> None:
    assert translate(statement) == expected
