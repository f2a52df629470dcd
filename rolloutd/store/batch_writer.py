"""Writing half of the store: synchronous SQL on one connection.

A batch is transactions of several callers, committed together because an fsync is expensive.  Each runs in a
savepoint of its own, so a conflict rolls back only that transaction.  The chain's head is read from the
database inside each batch, because a batch that failed may or may not be on disk.

It knows neither event loop nor thread: the store runs it in its writing thread, a simulation inline.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from machines.facts.apply import UnexpectedRow, apply_to_target
from machines.model.events import PhaseMoved
from machines.states import IllegalTransition
from rolloutd.audit_chain import GENESIS_HASH, hash_entry
from rolloutd.errors import Conflict, LeadershipLost, StoreFailed
from rolloutd.ports import AuditEntry
from rolloutd.store.audit_entries import add_sequence_number
from rolloutd.store.commit_mark import write_mark
from rolloutd.store.configuration_queries import load_configuration_records
from rolloutd.store.database import DATABASE_ERRORS, check_files_unchanged, explain_failure, identify_files
from rolloutd.store.queries import load_target
from rolloutd.store.sql_statement import Statement, TargetChange
from rolloutd.store.statements import update_target, upsert_configuration_records

TransactionResult = tuple[AuditEntry, ...] | StoreFailed
"""The entries of one transaction, or the reason why it was rolled back."""


@dataclass(frozen=True, slots=True)
class Transaction:
    """One caller's statements, and its audit entries without number and hash."""

    statements: tuple[Statement | TargetChange, ...]
    audit_drafts: tuple[str, ...]


class BatchWriter:
    """Writes batches until another daemon begins a term."""

    def __init__(self, connection: sqlite3.Connection, path: Path, *, holder: str, since: float) -> None:
        """Begin a term, which ends that of any other daemon.  Raises StoreFailed."""
        self._connection = connection
        self._path = path
        sql = "UPDATE term SET epoch = epoch + 1, holder = ?, since = ? RETURNING epoch"
        try:
            (self.epoch,) = connection.execute(sql, (holder, since)).fetchall()[0]
        except DATABASE_ERRORS as error:
            raise explain_failure(error, path) from error
        self._opened_files = identify_files(path)
        write_mark(path, self.epoch, self._head().seq)

    def write(self, batch: Sequence[Transaction]) -> list[TransactionResult]:
        """Write the transactions and return one result for each; database errors are results."""
        try:
            check_files_unchanged(self._path, self._opened_files)
            with self._begin_transaction():
                head = self._head()
                results: list[TransactionResult] = []
                for transaction in batch:
                    result = self._run_in_savepoint(transaction, head)
                    if isinstance(result, tuple):
                        head = result[-1] if result else head
                    results.append(result)
            write_mark(self._path, self.epoch, head.seq)
            return results
        except StoreFailed as error:
            # One exception for each caller: a shared one would collect the tracebacks of all callers.
            return [type(error)(*error.args) for _ in batch]
        except DATABASE_ERRORS as error:
            return [explain_failure(error, self._path) for _ in batch]

    @contextmanager
    def _begin_transaction(self) -> Iterator[None]:
        execute = self._connection.execute
        # IMMEDIATE takes the write lock now: no other daemon can begin a term between _head() and COMMIT.
        execute("BEGIN IMMEDIATE")
        try:
            yield
            execute("COMMIT")
        finally:
            # After some errors, such as a full disk, SQLite has already rolled back.
            if self._connection.in_transaction:
                execute("ROLLBACK")

    def _head(self) -> AuditEntry:
        """Return the chain's last entry; raises LeadershipLost when this writer's term has ended."""
        epoch, holder = self._connection.execute("SELECT epoch, holder FROM term").fetchone()
        if epoch != self.epoch:
            raise LeadershipLost(
                f"nothing was written: this daemon's term (epoch {self.epoch}) ended when {holder} opened"
                f" {self._path} (epoch {epoch}); only one may continue: end this one"
            )
        row = self._connection.execute("SELECT seq, '', hash FROM audit ORDER BY seq DESC LIMIT 1").fetchone()
        return AuditEntry(*row) if row else AuditEntry(0, "", GENESIS_HASH)

    def _run_in_savepoint(self, transaction: Transaction, head: AuditEntry) -> TransactionResult:
        execute = self._connection.execute
        execute("SAVEPOINT one")
        try:
            for statement in transaction.statements:
                if isinstance(statement, TargetChange):
                    for each in target_statements(self._connection, statement):
                        self._execute_statement(each)
                else:
                    self._execute_statement(statement)
            entries = self._append_audit_entries(transaction.audit_drafts, head)
        except (Conflict, OverflowError, *DATABASE_ERRORS) as error:
            # SQLite has rolled back the whole batch, so all of its transactions fail.
            if not self._connection.in_transaction:
                raise
            execute("ROLLBACK TO one")
            execute("RELEASE one")
            return error if isinstance(error, StoreFailed) else explain_failure(error, self._path)
        execute("RELEASE one")
        return entries

    def _execute_statement(self, statement: Statement) -> None:
        try:
            changed = execute_rows(self._connection, statement.sql, statement.rows)
        except sqlite3.IntegrityError as error:
            message = statement.conflict_message or "a row is not as expected"
            raise statement.conflict(f"{message} ({error})") from error
        if statement.expected_changes is not None and changed != statement.expected_changes:
            raise statement.conflict(statement.conflict_message)

    def _append_audit_entries(self, drafts: Sequence[str], head: AuditEntry) -> tuple[AuditEntry, ...]:
        entries: list[AuditEntry] = []
        for draft in drafts:
            text = add_sequence_number(draft, head.seq + 1)
            head = AuditEntry(head.seq + 1, text, hash_entry(head.hash, text))
            self._connection.execute(
                "INSERT INTO audit (seq, entry, hash) VALUES (?, ?, ?)", (head.seq, head.text, head.hash)
            )
            entries.append(head)
        return tuple(entries)


def target_statements(connection: sqlite3.Connection, change: TargetChange) -> Iterator[Statement]:
    """Yield what writes a target's row and its node's records after the event; raises Conflict."""
    target = load_target(connection, change.rollout, change.node)
    if target is None:
        raise Conflict(f"{change.node} is not a target of {change.rollout}")
    try:
        yield update_target(apply_to_target(target, change.event))
    except (IllegalTransition, UnexpectedRow) as error:
        raise Conflict(f"{error}: another writer moved it first") from error
    if isinstance(change.event, PhaseMoved):
        before = load_configuration_records(connection, change.node)
        after = before.after(target, change.event)
        if after != before:
            yield upsert_configuration_records(change.node, after)


def execute_rows(connection: sqlite3.Connection, sql: str, rows: Sequence[Sequence[Any]]) -> int:
    """Execute one statement for each row and return how many rows changed."""
    try:
        if len(rows) == 1:
            return connection.execute(sql, rows[0]).rowcount
        return connection.executemany(sql, rows).rowcount if rows else 0
    except UnicodeEncodeError:
        # Outside text may contain a lone surrogate, which UTF-8 cannot encode: replace only that.
        return connection.executemany(
            sql, [[_replace_surrogates(value) for value in row] for row in rows]
        ).rowcount


def _replace_surrogates(value: Any) -> Any:
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value
