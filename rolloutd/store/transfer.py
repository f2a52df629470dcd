"""All rows of a store, read from one database and written to another: same values, same order.

The columns of the audit that follow from an entry are not transferred; each database makes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Final

from rolloutd.errors import StoreFailed
from rolloutd.store import schema
from rolloutd.store.backend import Connection, Row, TableRows

ROWS_PER_STATEMENT = 1_000
"""Rows that are in memory at once: entries of 500 nodes have 100 KB."""

_COLUMNS: Final = {"audit": ("seq", "entry", "hash")}

_ORDERS: Final = {
    "audit": "seq",
    "audit_base": "seq",
    "audit_base_part": "seq, number",
    "rollout": "number",
    "vote": "number",
    "opened": "number",
    "failure": "number",
    "term": "id",
    "node": "name",
    "target": "rollout, node",
    "forecast": "rollout, made_at",
    "hold": "node, source, id",
    "freeze": "id",
    "team_rules": "team",
    "train": "name",
    "reboot_approval": "id",
    "spent_token": "id",
    "verdicts": "id",
    "node_configuration": "node",
    "configuration": "content",
    "source": "name",
    "source_node": "source, name",
    **dict.fromkeys(
        ("step", "preparation", "preparation_snapshot", "pilot_evidence", "built_manifest"), "rowid"
    ),
}
"""The order in which rows were inserted where it matters, else of their keys."""

TABLES: Final = (
    "audit_base",
    "audit_base_part",
    "audit",
    "term",
    *dict.fromkeys(table.name for table in schema.TABLES.values()),
    "forecast",
)
"""The tables; one comes after those that it refers to.  What is of one machine or one database stays."""

NUMBERED: Final = ("rollout", "vote", "opened", "failure")
"""Tables whose rows have numbers that the database gives."""

REFUSAL_KEY = "refuses_start"
"""Row of `meta` of a store that no daemon may use; its value says why."""

UNFINISHED = "a move to it was not finished; repeat `rolloutctl store move`"


def read_tables(connection: Connection, stream: Callable[[str], Iterator[Row]]) -> Iterator[TableRows]:
    """Yield the tables of one moment; the caller has begun a transaction, and `stream` reads within it."""
    for table in TABLES:
        columns = _COLUMNS.get(table) or columns_of(connection, table)
        sql = f"SELECT {', '.join(columns)} FROM {table} ORDER BY {_ORDERS[table]}"  # noqa: S608
        yield TableRows(table, columns, stream(sql))


def columns_of(connection: Connection, table: str) -> list[str]:
    description = connection.execute(f"SELECT * FROM {table} LIMIT 0").description  # noqa: S608
    return [name for name, *_ in description if name != "rowid"]


def chunks(rows: Iterator[Row]) -> Iterator[list[Row]]:
    while chunk := list(islice(rows, ROWS_PER_STATEMENT)):
        yield chunk


def insert_statement(table: str, columns: Sequence[str]) -> str:
    return f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({', '.join('?' * len(columns))})"  # noqa: S608


def read_refusal(connection: Connection) -> str:
    """Return why no daemon may start on this store, "" if one may."""
    row = connection.execute("SELECT value FROM meta WHERE key = ?", (REFUSAL_KEY,)).fetchone()
    return "" if row is None else str(row[0])


def require_startable(connection: Connection, name: str) -> None:
    """Raise StoreFailed for a store that was moved away, or not completely moved here."""
    if reason := read_refusal(connection):
        raise StoreFailed(f"{name}: {reason}")


def write_refusal(connection: Connection, text: str) -> None:
    """Let no daemon start on this store, or with an empty text every daemon."""
    connection.execute("DELETE FROM meta WHERE key = ?", (REFUSAL_KEY,))
    if text:
        connection.execute("INSERT INTO meta (key, value) VALUES (?, ?)", (REFUSAL_KEY, text))
