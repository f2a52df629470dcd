"""The backend on one SQLite file.

The daemon runs its SQL in aiosqlite's thread; a simulation under virtual time runs it inline, because a
thread runs in real time.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TypeVar, cast

import aiosqlite

from rolloutd.audit import audit_chain
from rolloutd.audit.audit_chain import GENESIS_HASH, ChainVerification
from rolloutd.concurrency import threads
from rolloutd.errors import NotFound, StoreFailed
from rolloutd.ports import AuditBase, AuditEntry
from rolloutd.store import backend, transfer
from rolloutd.store.audit_base import load_base
from rolloutd.store.schema import ROLLOUT_TABLES
from rolloutd.store.signing_key import load_signing_key
from rolloutd.store.sqlite import commit_mark, copy, database, lock

T = TypeVar("T")

COMPARISON_FILE = "audit-comparison.sqlite"
"""What a verification in the background has replayed, next to the database; removed when it ends."""

RELEASED_PAGES = 1000
"""Pages (4 MiB) that one transaction gives back: some milliseconds, in which other writes wait."""

_FileIdentities = tuple[tuple[int, int] | None, ...]
"""Device and inode of each of a database's files; None for a missing one."""


class SqliteBackend:
    """One SQLite file (store.backend.Backend); `inline` runs the SQL in the caller."""

    errors = database.DATABASE_ERRORS
    # IMMEDIATE takes the write lock now: no other daemon can begin a term before COMMIT.
    begin_write = "BEGIN IMMEDIATE"
    next_epoch = "epoch + 1"

    def __init__(self, path: Path, *, inline: bool = False) -> None:
        self.path = path
        self.name = str(path)
        self._inline = inline
        self._opened_files: _FileIdentities | None = None

    def explain(self, error: Exception) -> StoreFailed:
        return database.explain_failure(error, self.path)

    async def open_writer(self) -> backend.Executor:
        lock.prepare_directory(self.path.parent)
        commit_mark.require_newest(self.path)
        return await self._open(self._connect_writer)

    def _connect_writer(self, path: Path) -> sqlite3.Connection:
        connection = database.open_writer(path)
        try:
            transfer.require_startable(connection, self.name)
        except BaseException:
            connection.close()
            raise
        return connection

    async def open_reader(self) -> backend.Executor:
        return await self._open(database.open_reader)

    async def _open(self, connect: Callable[[Path], sqlite3.Connection]) -> backend.Executor:
        if self._inline:
            return backend.InlineExecutor(connect(self.path))
        # Connect outside aiosqlite's thread: aiosqlite does not stop its thread when connecting fails there.
        connection = await threads.DATABASE.run(connect, self.path)
        return cast(backend.Executor, await ThreadExecutor(lambda: connection, iter_chunk_size=1))

    def load_signing_key(self, *, may_make: bool = True) -> bytes:
        return load_signing_key(self.path.parent, may_make=may_make)

    def read_now(self, work: Callable[[backend.Connection], T]) -> T:
        try:
            with closing(database.open_reader(self.path)) as connection:
                return work(connection)
        except self.errors as error:
            raise self.explain(error) from error

    def check_writable(self, connection: backend.Connection) -> None:
        if self._opened_files is not None:
            _check_files_unchanged(self.path, self._opened_files)

    def is_in_doubt(self, connection: backend.Connection) -> bool:
        return False  # what COMMIT answers is so

    def await_database(self, connection: backend.Connection) -> None:
        return

    def record_commit(self, epoch: int, head: AuditEntry) -> None:
        if self._opened_files is None:
            self._opened_files = _identify_files(self.path)
        commit_mark.write_mark(self.path, epoch, head.seq)

    def append_entries(self, connection: backend.Connection, entries: Sequence[AuditEntry]) -> None:
        rows = [(entry.seq, entry.text, entry.hash) for entry in entries]
        connection.executemany("INSERT INTO audit (seq, entry, hash) VALUES (?, ?, ?)", rows)

    def follow_rows(
        self, connection: backend.Connection, columns: Mapping[str, Sequence[str]]
    ) -> backend.RowChanges:
        return SqliteRowChanges(connection, columns)

    def release_space(self, connection: backend.Connection) -> None:
        (free,) = connection.execute("PRAGMA freelist_count").fetchone()
        for _ in range(min(free, RELEASED_PAGES)):
            # One each: Python makes one step of the statement, which frees one page.
            connection.execute("PRAGMA incremental_vacuum(1)").fetchall()

    def file_sizes(self, connection: backend.Connection) -> tuple[int, int]:
        names = ("page_size", "page_count", "freelist_count")
        size, pages, free = (connection.execute(f"PRAGMA {name}").fetchone()[0] for name in names)
        return pages * size, free * size

    # -- the audit

    def read_chain(
        self, connection: backend.Connection, table: str, after: int, limit: int
    ) -> Sequence[backend.ChainRow]:
        return copy.read_chain(connection, table, after, limit)

    def verify_chain(self, head: str | None = None) -> ChainVerification:
        self._require_file()
        try:
            with closing(database.open_read_only(self.path)) as connection:
                # One transaction: entries up to the base may be removed meanwhile.
                connection.execute("BEGIN")
                base = _read_base(connection)
                sql = f"{copy.CHAIN.format('audit')} AND seq > ? ORDER BY seq"
                entries, start = connection.execute(sql, (base.seq,)), (base.seq, base.head)
                return audit_chain.verify_entries(entries, head, unreadable=self.errors, start=start)
        except self.errors as error:
            return ChainVerification(False, 0, GENESIS_HASH, None, f"{self.path}: not readable: {error}")

    def read_base(self) -> AuditBase:
        with closing(database.open_read_only(self.path)) as connection:
            return _read_base(connection)

    def read_hashes(self, numbers: Iterable[int]) -> dict[int, str]:
        sql = "SELECT seq, hash FROM audit WHERE seq = ?"
        with closing(database.open_read_only(self.path)) as connection:
            return dict(row for seq in numbers for row in connection.execute(sql, (seq,)))

    @contextmanager
    def open_comparison(
        self, audited: Callable[[str, str], str], *, is_resumable: bool = False
    ) -> Iterator[backend.Connection | None]:
        self._require_file()
        path = self.path.with_name(COMPARISON_FILE) if is_resumable else None
        with copy.open_comparison(self.path, audited, path) as connection:
            yield connection if database.has_current_schema(connection, "stored") else None

    @contextmanager
    def exported(self) -> Iterator[Iterator[backend.TableRows]]:
        self._require_file()
        with closing(database.open_reader(self.path)) as connection:
            if not database.has_current_schema(connection):
                raise StoreFailed(f"{self.path} is of an older version; start this version's daemon once")
            connection.execute("BEGIN")
            yield transfer.read_tables(connection, connection.execute)

    def import_tables(self, found: Iterable[backend.TableRows]) -> None:
        copy.place_copy(self.path, found, self.load_signing_key())

    def write_refusal(self, text: str) -> None:
        with closing(database.open_writer(self.path)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            transfer.write_refusal(connection, text)
            connection.execute("COMMIT")

    def _require_file(self) -> None:
        if not self.path.is_file():
            raise NotFound(f"{self.path}: no such database; name another file")

    def examine(self) -> backend.Examination:
        if not self.path.exists():
            return backend.Examination(self.name, exists=False)
        files = (Path(f"{self.path}{suffix}") for suffix in database.FILE_SUFFIXES)
        existing = [file for file in files if file.exists()]
        inaccessible = [str(file) for file in existing if not os.access(file, os.R_OK | os.W_OK)]
        text = f"{self.path}, {self.path.stat().st_size // 1024} KiB"
        if inaccessible:
            return backend.Examination(text, inaccessible=tuple(inaccessible))
        try:
            with closing(database.open_reader(self.path)) as connection:
                damage = database.find_damage(connection)
                return backend.Examination(text, damage, database.has_current_schema(connection))
        except self.errors as error:
            raise self.explain(error) from error


def _read_base(connection: sqlite3.Connection) -> AuditBase:
    has_bases = "SELECT 1 FROM sqlite_schema WHERE name = 'audit_base'"
    return load_base(connection) if connection.execute(has_bases).fetchone() else AuditBase()


class ThreadExecutor(aiosqlite.Connection):
    """aiosqlite's connection with one more method, which runs a whole function in its thread.

    aiosqlite's public methods switch threads once per statement, five times for the smallest transaction, and
    another task's statement may run in between.  All of them use the protected `_execute`, so a subclass must
    use it too; the contract suite fails if aiosqlite removes it.
    """

    async def run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        # The lambda hides the arguments: aiosqlite's debug log prints them, and a batch may hold passwords.
        return cast(T, await self._execute(lambda: work(self._conn)))  # type: ignore[no-untyped-call]


def _identify_files(path: Path) -> _FileIdentities:
    """Return which files a database consists of at this moment."""
    return tuple(_identify_file(f"{path}{suffix}") for suffix in database.FILE_SUFFIXES)


def _check_files_unchanged(path: Path, opened: _FileIdentities) -> None:
    """Raise StoreFailed if the paths no longer lead to the files that were opened.

    SQLite does not check this: it would report success, and the data in the unlinked files would be lost when
    the daemon ends.
    """
    if _identify_files(path) == opened:
        return
    if _identify_file(str(path)) == opened[0]:
        raise StoreFailed(
            f"nothing was written: {path}-wal or {path}-shm was removed, and both belong to the database;"
            " stop the daemon, which saves what they held, and start it again"
        )
    raise StoreFailed(
        f"nothing was written: {path} was moved, removed or replaced; restore it and the daemon resumes"
        f" by itself. What it held is in /proc/{os.getpid()}/fd as long as this daemon lives;"
        " only a restart opens the file that is there now"
    )


def _identify_file(path: str) -> tuple[int, int] | None:
    try:
        status = os.stat(path)  # noqa: PTH116  # three times a commit; a Path costs more than the call
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:  # an OSError would end the writer task
        raise StoreFailed(f"nothing was written: {path} cannot be inspected ({error})") from error
    return status.st_dev, status.st_ino


_FUNCTION = "note_row"

_EVENTS = (("INSERT", 0, 1), ("UPDATE", 1, 1), ("DELETE", 1, 0))
"""Statements, and whether each has an old and a new row."""


class SqliteRowChanges:
    """store.backend.RowChanges by triggers that call a Python function."""

    def __init__(self, connection: backend.Connection, columns: Mapping[str, Sequence[str]]) -> None:
        self._changes: list[backend.RowChange] = []
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

    def take(self) -> list[backend.RowChange]:
        changes, self._changes = self._changes, []
        return changes


def _call(table: str, row: str, sign: int, columns: Sequence[str], opened: str) -> str:
    rollout = f"{row}.rollout" if table in (*ROLLOUT_TABLES, "step") else "''"
    node = f"{row}.node" if table == "step" else opened
    text = backend.row_text([f"{row}.{column}" for column in columns])
    return f"SELECT {_FUNCTION}('{table}', {rollout}, {node}, {sign}, {text});"
