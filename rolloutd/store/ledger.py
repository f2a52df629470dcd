"""The writing half of the store: plain synchronous SQL on one connection.

A batch is several transactions of several callers, committed together because
the disk is what costs.  Each runs in a savepoint of its own, so that one that
meets a conflict leaves no trace in the others.  The chain's head is read from
the database inside the batch, never remembered between batches: whatever
happened to the last batch, the next one continues what is really there.

It knows no event loop and no thread: the store runs it in its writing thread,
a simulation runs it inline.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rolloutd.chain import GENESIS, entry_hash
from rolloutd.errors import Conflict, StoreFailed, TenureLost
from rolloutd.ports import Entry
from rolloutd.store.database import BROKEN, failure, files_of, mind_files
from rolloutd.store.entries import numbered
from rolloutd.store.statement import Statement

Answer = tuple[Entry, ...] | StoreFailed
"""What became of one transaction: its entries, or why it left no trace."""


@dataclass(frozen=True, slots=True)
class Transaction:
    """What one caller wants written: rows, and audit entries without number and hash."""

    statements: tuple[Statement, ...]
    drafts: tuple[str, ...]


class Ledger:
    """Writes batches as long as the tenure it took at opening lasts."""

    def __init__(self, connection: sqlite3.Connection, path: Path, *, holder: str, since: float) -> None:
        """Take the tenure over from whoever had it.  Raises StoreFailed."""
        self._connection = connection
        self._path = path
        sql = "UPDATE tenure SET epoch = epoch + 1, holder = ?, since = ? RETURNING epoch"
        try:
            (self.epoch,) = connection.execute(sql, (holder, since)).fetchall()[0]
        except BROKEN as error:
            raise failure(error, path) from error
        self._files = files_of(path)

    def write(self, batch: Sequence[Transaction]) -> list[Answer]:
        """Write the transactions and return one answer for each; never raises for what the database does."""
        try:
            mind_files(self._path, self._files)
            with self._committed():
                head = self._head()
                answers: list[Answer] = []
                for transaction in batch:
                    answer = self._attempt(transaction, head)
                    if isinstance(answer, tuple):
                        head = answer[-1] if answer else head
                    answers.append(answer)
                return answers
        except StoreFailed as error:
            return [type(error)(*error.args) for _ in batch]
        except BROKEN as error:
            return [failure(error, self._path) for _ in batch]

    @contextmanager
    def _committed(self) -> Iterator[None]:
        execute = self._connection.execute
        execute("BEGIN IMMEDIATE")
        try:
            yield
            execute("COMMIT")
        finally:
            # Some errors, a full disk among them, roll back by themselves.
            if self._connection.in_transaction:
                execute("ROLLBACK")

    def _head(self) -> Entry:
        """Return the chain's last entry, once it is certain that this writer may continue it."""
        epoch, holder = self._connection.execute("SELECT epoch, holder FROM tenure").fetchone()
        if epoch != self.epoch:
            raise TenureLost(
                f"nothing was written: this daemon's tenure (epoch {self.epoch}) ended when {holder} opened"
                f" {self._path} (epoch {epoch}); only one may go on: end this one"
            )
        row = self._connection.execute("SELECT seq, '', hash FROM audit ORDER BY seq DESC LIMIT 1").fetchone()
        return Entry(*row) if row else Entry(0, "", GENESIS)

    def _attempt(self, transaction: Transaction, head: Entry) -> Answer:
        execute = self._connection.execute
        execute("SAVEPOINT one")
        try:
            for statement in transaction.statements:
                self._run(statement)
            entries = self._append(transaction.drafts, head)
        except (Conflict, OverflowError, *BROKEN) as error:
            if not self._connection.in_transaction:
                raise
            execute("ROLLBACK TO one")
            execute("RELEASE one")
            return error if isinstance(error, StoreFailed) else failure(error, self._path)
        execute("RELEASE one")
        return entries

    def _run(self, statement: Statement) -> None:
        try:
            changed = self._changed(statement.sql, statement.rows)
        except sqlite3.IntegrityError as error:
            raise Conflict(f"{statement.otherwise or 'a row is not as expected'} ({error})") from error
        if statement.changes is not None and changed != statement.changes:
            raise Conflict(statement.otherwise)

    def _changed(self, sql: str, rows: Sequence[Sequence[Any]]) -> int:
        try:
            if len(rows) == 1:
                return self._connection.execute(sql, rows[0]).rowcount
            return self._connection.executemany(sql, rows).rowcount if rows else 0
        except UnicodeEncodeError:
            # Something from outside holds half a character; the rest of it is worth keeping.
            return self._connection.executemany(
                sql, [[_whole(value) for value in row] for row in rows]
            ).rowcount

    def _append(self, drafts: Sequence[str], head: Entry) -> tuple[Entry, ...]:
        entries: list[Entry] = []
        for drafted in drafts:
            text = numbered(drafted, head.seq + 1)
            head = Entry(head.seq + 1, text, entry_hash(head.hash, text))
            self._connection.execute(
                "INSERT INTO audit (seq, entry, hash) VALUES (?, ?, ?)", (head.seq, head.text, head.hash)
            )
            entries.append(head)
        return tuple(entries)


def _whole(value: Any) -> Any:
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value
