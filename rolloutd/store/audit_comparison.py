"""Comparison of the tables with what the audit's entries make of them.

A daemon may write meanwhile: entries are only appended, so they are read in slices, and one read transaction
covers the last slice and the tables.  The replayed rows are in a temporary database, which compares them;
memory does not grow with the audit.
"""

from __future__ import annotations

import json
import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing
from typing import Any

from machines.model.rows import AuditMismatch, MismatchKind
from rolloutd.audit_chain import canonical_json, verify_entries
from rolloutd.ports import AuditReport, RowMismatch
from rolloutd.store.audit_entries import hash_text
from rolloutd.store.audit_replay import AuditReplay, hashed_content
from rolloutd.store.backend import Backend, ChainRow, Connection
from rolloutd.store.schema import HASHED_COLUMNS, KEYS, NOT_COMPARED_COLUMNS

Row = Mapping[str, Any]

MAX_MISMATCHES = 1000
"""Rows of one table that are named; a person settles them one by one or all at once."""


SLICE = 5000
"""Entries of one read transaction: a long one would keep the write-ahead log from being emptied."""

GENTLE_SHARE = 0.25
"""Share of a core that a gentle comparison takes."""


def compare_with_audit(backend: Backend, head: str | None = None, *, gently: bool = False) -> AuditReport:
    """Verify the chain of a database and compare its tables with the audit, read-only.

    Raises NotFound, StoreFailed; a broken chain and a damaged database are results.
    """
    try:
        with backend.open_comparison(_audited) as connection:
            if connection is not None:
                return _compare(backend, connection, head, gently=gently)
    except backend.errors as error:
        chain = backend.verify_chain(head)
        if chain.ok:
            raise backend.explain(error) from error
        return AuditReport(chain, compared=False)
    return AuditReport(backend.verify_chain(head), compared=False)


def _compare(backend: Backend, connection: Connection, head: str | None, *, gently: bool) -> AuditReport:
    replay, reader = AuditReplay(connection), _SliceReader(backend, connection, gently=gently)
    with closing(reader.read()) as entries:
        chain = verify_entries(entries, head, replay.add)
    replay.finish()
    _adopt_unrecorded(connection, replay)
    by_table = [list(_table_mismatches(connection, table)) for table in KEYS]
    found = tuple(row for rows in by_table for row in rows[:MAX_MISMATCHES])
    is_complete = all(len(rows) <= MAX_MISMATCHES for rows in by_table)
    return AuditReport(chain, found, tuple(replay.unreadable), is_complete, seq=reader.seq)


class _SliceReader:
    """Reads the audit, each slice in a transaction of its own; that of the last slice stays open."""

    def __init__(self, backend: Backend, connection: Connection, *, gently: bool) -> None:
        self._backend = backend
        self._connection = connection
        self._gently = gently
        self.seq = 0

    def read(self) -> Generator[ChainRow]:
        while True:
            began = time.thread_time()
            self._connection.execute("BEGIN")
            rows = self._backend.read_chain(self._connection, "stored.audit", self.seq, SLICE)
            yield from rows
            if rows:
                self.seq = rows[-1][0]
            if len(rows) < SLICE:
                return
            self._connection.execute("COMMIT")
            if self._gently:
                time.sleep((time.thread_time() - began) * (1 / GENTLE_SHARE - 1))


def _audited(column: str, value: str) -> str:
    """Return the audited form of a hashed column: what the replay writes for it."""
    if column == "content":
        return canonical_json(hashed_content(hash_text(value)))
    return value if value == "null" else canonical_json(hash_text(value))


def _adopt_unrecorded(connection: Connection, replay: AuditReplay) -> None:
    """Take over what entries of older versions did not record, so that it counts as equal."""
    connection.executemany(
        "UPDATE target SET (position, maybe_current, needs_vote_of) ="
        " (SELECT position, maybe_current, needs_vote_of FROM stored.target AS s"
        "  WHERE s.rollout = target.rollout AND s.node = target.node)"
        " WHERE rollout = ?1 AND node = ?2"
        " AND EXISTS (SELECT 1 FROM stored.target AS s WHERE s.rollout = ?1 AND s.node = ?2)",
        replay.without_positions,
    )
    connection.execute(
        "UPDATE rollout SET content = (SELECT audited('content', content) FROM stored.rollout AS s"
        " WHERE s.id = rollout.id) WHERE content = '{}' AND id IN (SELECT id FROM stored.rollout)"
    )


def _table_mismatches(connection: Connection, table: str) -> Iterator[RowMismatch]:
    columns = compared_columns(connection, table)
    stored = ", ".join(
        f"audited('{name}', {name})" if (table, name) in HASHED_COLUMNS else name for name in columns
    )
    here = f"SELECT {', '.join(columns)} FROM main.{table}"  # noqa: S608  # names of our own schema
    there = f"SELECT {stored} FROM stored.{table}"  # noqa: S608  # names of our own schema
    # One more than is reported shows that rows are left out.
    limit = f"LIMIT {MAX_MISMATCHES + 1}"
    found = _rows_by_key(connection, table, columns, f"{there} EXCEPT {here} {limit}")
    expected = _rows_by_key(connection, table, columns, f"{here} EXCEPT {there} {limit}")
    for key in dict.fromkeys((*found, *expected)):
        names = dict(zip(KEYS[table], json.loads(key), strict=True))
        yield _describe_mismatch(table, names, expected.get(key), found.get(key))


def _describe_mismatch(table: str, key: Row, expected: Row | None, found: Row | None) -> RowMismatch:
    columns: tuple[str, ...] = ()
    if found is None:
        kind = MismatchKind.MISSING
    elif expected is None:
        kind = MismatchKind.EXTRA
    else:
        kind = MismatchKind.ALTERED
        columns = tuple(name for name, value in expected.items() if found[name] != value)
    names = [str(value) for value in key.values() if value not in (None, "")]
    row = found or expected or {}
    node = row["node"] if table in ("target", "failure", "step", "preparation") else None
    summary = AuditMismatch("/".join((table, *names)), kind, _scope(table, row), columns, node)
    return RowMismatch(summary, table, key, expected, found, _is_restorable(table, columns, expected, found))


def _is_restorable(table: str, columns: tuple[str, ...], expected: Row | None, found: Row | None) -> bool:
    hashed = {name for of, name in HASHED_COLUMNS if of == table}
    if expected is None or found is not None:
        return not hashed & set(columns)
    return all(expected[name] == "null" for name in hashed)


def _scope(table: str, row: Row) -> str:
    """Return what must not start while a row is in doubt."""
    if table in ("rollout", "node"):
        return f"{table}/{row[KEYS[table][0]]}"
    owner = next((column for column in ("rollout", "node", "team") if column in row), None)
    return "all" if owner is None else f"{owner}/{row[owner]}"


def compared_columns(connection: Connection, table: str) -> list[str]:
    """Return the columns of a table that the audit accounts for."""
    skipped = NOT_COMPARED_COLUMNS.get(table, {})
    row = connection.execute(f"SELECT * FROM main.{table} LIMIT 0")  # noqa: S608  # names of our own schema
    return [name for name, *_ in row.description if name not in skipped]


def _rows_by_key(
    connection: Connection, table: str, columns: list[str], sql: str
) -> dict[str, dict[str, Any]]:
    rows = (dict(zip(columns, row, strict=True)) for row in connection.execute(sql))
    return {json.dumps([row[name] for name in KEYS[table]]): row for row in rows}
