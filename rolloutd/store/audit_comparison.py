"""Comparison of the tables with what the audit's entries make of them.

A daemon may write meanwhile: entries are only appended, so they are read in slices, and one read transaction
covers the last slice and the tables.  The replayed rows are in a temporary database, which compares them;
memory does not grow with the audit.  The replay begins at the audit's base.  That of a gentle comparison is
in a file of its own, with the entry that it has reached, so that it resumes after a restart.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from machines.model.rows import AuditMismatch, MismatchKind
from rolloutd.audit.audit_chain import GENESIS_HASH, ChainVerification, canonical_json, verify_entries
from rolloutd.audit.audit_segments import InvalidSegment, read_segments
from rolloutd.errors import StoreFailed
from rolloutd.ports import AuditBase, AuditReport, RowMismatch
from rolloutd.store import audit_base
from rolloutd.store.audit_base import BaseRecord, NewBase
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


class ComparisonStopped(StoreFailed):
    """The daemon stops; the next gentle comparison continues this one."""


class _BaseAdvanced(Exception):
    """Entries that are still to be read may be removed now."""


def never() -> bool:
    return False


def compare_with_audit(
    backend: Backend,
    head: str | None = None,
    *,
    gently: bool = False,
    segments: Path | None = None,
    is_stopping: Callable[[], bool] = never,
) -> AuditReport:
    """Verify the chain of a database and compare its tables with the audit, read-only.

    With a directory of segments all entries are replayed, else those after the base.  A gentle comparison
    continues one that a stop or a kill has ended.  Raises NotFound, StoreFailed; a broken chain and a damaged
    database are results.
    """
    while True:
        try:
            return _compare_with_audit(backend, head, gently, segments, is_stopping)
        except _BaseAdvanced:
            continue  # it begins again at the new base


def _compare_with_audit(
    backend: Backend,
    head: str | None,
    gently: bool,
    segments: Path | None,
    is_stopping: Callable[[], bool],
) -> AuditReport:
    try:
        with backend.open_comparison(_audited, is_resumable=gently) as connection:
            if connection is not None:
                comparison = _Comparison(backend, connection, gently=gently, is_stopping=is_stopping)
                return comparison.run(head, segments)
    except backend.errors as error:
        chain = backend.verify_chain(head)
        if chain.ok:
            raise backend.explain(error) from error
        return AuditReport(chain, compared=False)
    return AuditReport(backend.verify_chain(head), compared=False)


def make_base(backend: Backend, seq: int, at: float, *, is_stopping: Callable[[], bool] = never) -> NewBase:
    """Return the base that entry `seq` makes, with a quarter of a core; raises StoreFailed, NotFound."""
    try:
        with backend.open_comparison(_audited) as connection:
            if connection is None:
                raise StoreFailed(f"{backend.name}: it has another schema; start the daemon once")
            comparison = _Comparison(backend, connection, gently=True, is_stopping=is_stopping)
            return comparison.make_base(seq, at)
    except backend.errors as error:
        raise backend.explain(error) from error


class _Comparison:
    """The replay in the tables `main`, of entries that are read in slices from the database `stored`."""

    def __init__(
        self, backend: Backend, connection: Connection, *, gently: bool, is_stopping: Callable[[], bool]
    ) -> None:
        self._backend = backend
        self._connection = connection
        self._gently = gently
        self._is_stopping = is_stopping
        self._key = backend.load_signing_key(may_make=False)
        self._replay = AuditReplay(connection)
        self._seq = 0
        """The last entry that was read."""

    def run(self, head: str | None, segments: Path | None) -> AuditReport:
        record = audit_base.read_base(self._connection, "stored")
        base, forgery = AuditBase(), ""
        exported: Iterator[ChainRow] = iter(())
        start = (0, GENESIS_HASH)
        if record is not None:
            base = record.base
        if segments is not None:
            exported, self._seq = self._read_segments(segments, base), base.seq
        else:
            forgery = "" if record is None else audit_base.describe_forgery(record, self._key)
            start = self._begin(record, is_resumable=self._gently)
        with closing(self._read(keeps_progress=self._gently)) as entries:
            rows = itertools.chain(exported, entries)
            chain = verify_entries(rows, head, self._replay.add, (InvalidSegment, OSError), start=start)
        if segments is not None and not chain.ok and chain.entries < base.seq:
            return AuditReport(chain, compared=False)
        if forgery and chain.ok:
            chain = replace(chain, ok=False, first_bad=1, message=forgery)
        return self._compare_tables(chain)

    def make_base(self, seq: int, at: float) -> NewBase:
        record = audit_base.read_base(self._connection, "stored")
        if record is not None and (forgery := audit_base.describe_forgery(record, self._key)):
            raise StoreFailed(f"audit: {forgery}")
        start = self._begin(record, is_resumable=False)
        with closing(self._read(through=seq)) as entries:
            chain = verify_entries(entries, None, self._replay.add, start=start)
        if not chain.ok or chain.entries != seq:
            raise StoreFailed(f"audit: entry {chain.entries + 1} is missing or altered; see audit verify")
        origin = audit_base.origin_of(self._connection)
        base = AuditBase(seq, chain.head, origin, at)
        return audit_base.make_base(self._connection, self._replay, base, self._key)

    def _begin(self, record: BaseRecord | None, *, is_resumable: bool) -> tuple[int, str]:
        """Fill the tables with those of the base, or let what a comparison before has reached stay there."""
        execute = self._connection.execute
        if is_resumable:
            execute("CREATE TABLE IF NOT EXISTS comparison_progress (seq, head, state)")
            reached = execute("SELECT seq, head, state FROM comparison_progress").fetchone()
            if reached is not None:
                if record is not None and record.base.seq > reached[0]:
                    raise _BaseAdvanced
                self._seq, head, state = reached
                self._replay.resume(json.loads(state))
                return self._seq, head
        if record is None:
            return 0, GENESIS_HASH
        execute("BEGIN")
        audit_base.restore_tables(self._connection, record, self._replay)
        execute("COMMIT")
        self._seq = record.base.seq
        return self._seq, record.base.head

    def _read(self, through: int | None = None, *, keeps_progress: bool = False) -> Generator[ChainRow]:
        """Yield the audit, each slice in a transaction of its own; that of the last slice stays open."""
        execute, replay, began_at_seq = self._connection.execute, self._replay, self._seq
        while True:
            began = time.thread_time()
            execute("BEGIN")
            record = audit_base.read_base(self._connection, "stored")
            if record is not None and record.base.seq > self._seq:
                raise _BaseAdvanced
            limit = SLICE if through is None else min(SLICE, through - self._seq)
            rows = self._backend.read_chain(self._connection, "stored.audit", self._seq, limit)
            yield from rows
            if rows:
                self._seq = rows[-1][0]
            if len(rows) < SLICE:
                return
            # A chain that is broken by now is read from before the break again.
            if keeps_progress and replay.count == self._seq - began_at_seq:
                self._keep_progress(rows[-1])
            execute("COMMIT")
            if self._is_stopping():
                raise ComparisonStopped("audit: the verification was stopped; the next start continues it")
            if self._gently:
                time.sleep((time.thread_time() - began) * (1 / GENTLE_SHARE - 1))

    def _read_segments(self, directory: Path, base: AuditBase) -> Iterator[ChainRow]:
        for seq, text, entry_hash in read_segments(directory, base.seq, base.head, self._key):
            yield seq, text.encode(), entry_hash.encode()

    def _keep_progress(self, row: ChainRow) -> None:
        seq, _, head = row
        self._connection.execute("DELETE FROM comparison_progress")
        self._connection.execute(
            "INSERT INTO comparison_progress (seq, head, state) VALUES (?, ?, ?)",
            (seq, head.decode(), canonical_json(self._replay.state())),
        )

    def _compare_tables(self, chain: ChainVerification) -> AuditReport:
        self._replay.finish()
        _adopt_unrecorded(self._connection, self._replay)
        by_table = [list(_table_mismatches(self._connection, table)) for table in KEYS]
        mismatches = tuple(row for rows in by_table for row in rows[:MAX_MISMATCHES])
        is_complete = all(len(rows) <= MAX_MISMATCHES for rows in by_table)
        return AuditReport(chain, mismatches, tuple(self._replay.unreadable), is_complete, seq=self._seq)


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
    skipped = NOT_COMPARED_COLUMNS.get(table, {})
    row = connection.execute(f"SELECT * FROM main.{table} LIMIT 0")  # noqa: S608  # names of our own schema
    return [name for name, *_ in row.description if name not in skipped]


def _rows_by_key(
    connection: Connection, table: str, columns: list[str], sql: str
) -> dict[str, dict[str, Any]]:
    rows = (dict(zip(columns, row, strict=True)) for row in connection.execute(sql))
    return {json.dumps([row[name] for name in KEYS[table]]): row for row in rows}
