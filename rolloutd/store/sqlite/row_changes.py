"""The rows that a connection to SQLite changes, by triggers that call a Python function."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from typing import cast

from rolloutd.store.backend import Connection, RowChange, row_text
from rolloutd.store.schema import ROLLOUT_TABLES

_FUNCTION = "note_row"

_EVENTS = (("INSERT", 0, 1), ("UPDATE", 1, 1), ("DELETE", 1, 0))
"""Statements, and whether each has an old and a new row."""


class SqliteRowChanges:
    """The changed rows of one connection (store.backend.RowChanges)."""

    def __init__(self, connection: Connection, columns: Mapping[str, Sequence[str]]) -> None:
        self._changes: list[RowChange] = []
        cast(sqlite3.Connection, connection).create_function(_FUNCTION, 5, self._note)
        for table, names in columns.items():
            for event, old, new in _EVENTS:
                opened = "new.id" if (table, event) == ("rollout", "INSERT") else "''"
                calls = [_call(table, "old", -1, names, opened)] * old + [
                    _call(table, "new", 1, names, opened)
                ] * new
                connection.execute(
                    # Temporary, so no other connection has it.
                    f"CREATE TEMP TRIGGER digest_{table}_{event} AFTER {event} ON main.{table}"
                    f" BEGIN {' '.join(calls)} END"
                )

    def _note(self, table: str, rollout: str, node: str, sign: int, text: str) -> None:
        self._changes.append((table, rollout, node, sign, text))

    def begin(self) -> None:
        self._changes.clear()

    def mark(self) -> int:
        return len(self._changes)

    def forget_since(self, mark: int) -> None:
        del self._changes[mark:]

    def take(self) -> list[RowChange]:
        changes, self._changes = self._changes, []
        return changes


def _call(table: str, row: str, sign: int, columns: Sequence[str], opened: str) -> str:
    rollout = f"{row}.rollout" if table in (*ROLLOUT_TABLES, "step") else "''"
    node = f"{row}.node" if table == "step" else opened
    text = row_text([f"{row}.{column}" for column in columns])
    return f"SELECT {_FUNCTION}('{table}', {rollout}, {node}, {sign}, {text});"
