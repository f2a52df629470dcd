"""Writing half of the store: synchronous SQL on one connection.

A batch is transactions of several callers, committed together because an fsync is expensive.  Each runs in a
savepoint of its own, so a conflict rolls back only that transaction.  The chain's head is read from the
database inside each batch, because a batch that failed may or may not be on disk.

It knows neither event loop nor thread: the store runs it in its writing thread, a simulation inline.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from machines.facts.apply import UnexpectedRow, writes
from machines.model.events import Event, MismatchSettled
from rolloutd.audit_chain import GENESIS_HASH, hash_entry
from rolloutd.errors import Conflict, LeadershipLost, StoreFailed
from rolloutd.ports import AuditEntry, DiscoveredNode, SourceAnswer
from rolloutd.store.audit_entries import add_sequence_number
from rolloutd.store.audited_tables import settle_row
from rolloutd.store.commit_mark import write_mark
from rolloutd.store.database import DATABASE_ERRORS, check_files_unchanged, explain_failure, identify_files
from rolloutd.store.tables import TABLES, StoredRows, execute_rows, execute_writes

TransactionResult = tuple[AuditEntry, ...] | StoreFailed
"""The entries of one transaction, or the reason why it was rolled back."""


@dataclass(frozen=True, slots=True)
class Transaction:
    """One caller's events, decided at `at`, and their audit entries without number and hash.

    `unaudited` writes what the audit has nothing of.
    """

    events: tuple[Event, ...] = ()
    audit_drafts: tuple[str, ...] = ()
    at: float = 0.0
    unaudited: Callable[[sqlite3.Connection], object] | None = None


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
            write_events(self._connection, transaction.events, transaction.at)
            if transaction.unaudited is not None:
                transaction.unaudited(self._connection)
            entries = self._append_audit_entries(transaction.audit_drafts, head)
        except (StoreFailed, OverflowError, *DATABASE_ERRORS) as error:
            # SQLite has rolled back the whole batch, so all of its transactions fail.
            if not self._connection.in_transaction:
                raise
            execute("ROLLBACK TO one")
            execute("RELEASE one")
            return error if isinstance(error, StoreFailed) else explain_failure(error, self._path)
        execute("RELEASE one")
        return entries

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


def write_events(connection: sqlite3.Connection, events: Iterable[Event], at: float) -> None:
    """Write what events do; raises Conflict, StoreFailed."""
    rows = StoredRows(connection)
    for event in events:
        try:
            if isinstance(event, MismatchSettled):
                settle_row(connection, event)
            else:
                execute_writes(connection, writes(event, rows, at))
        except UnexpectedRow as error:
            raise Conflict(f"{error}: another change came first") from error
        except UnicodeError:
            raise  # a damaged file: see DATABASE_ERRORS
        except (LookupError, TypeError, ValueError) as error:
            raise StoreFailed(f"nothing was written: what happened cannot be kept ({error})") from error


def write_source_answer(connection: sqlite3.Connection, answer: SourceAnswer, removed: Iterable[str]) -> None:
    """Write the new and changed nodes of a source's answer, and drop the `removed` ones."""
    nodes = TABLES[DiscoveredNode]
    execute_rows(connection, TABLES[SourceAnswer].upsert, [TABLES[SourceAnswer].encode(answer)])
    changed = (replace(node, source=answer.source) for node in answer.nodes)
    execute_rows(connection, nodes.upsert, [nodes.encode(node) for node in changed])
    execute_rows(connection, nodes.delete, [(answer.source, name) for name in removed])
