"""A copy of a store's tables in an SQLite file, for a comparison with its audit or as a store of its own."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from rolloutd.errors import StoreFailed
from rolloutd.store.audit_base import sign_again
from rolloutd.store.audit_comparison import ComparisonStopped
from rolloutd.store.backend import ChainRow, Connection, TableRows
from rolloutd.store.sqlite import database, files
from rolloutd.store.transfer import UNFINISHED, chunks, insert_statement, read_refusal, write_refusal

# Bytes, so that an entry that is not UTF-8 any more counts as altered.
CHAIN = "SELECT seq, CAST(entry AS BLOB), CAST(hash AS BLOB) FROM {} WHERE true"


def read_chain(connection: Connection, table: str, after: int, limit: int) -> Sequence[ChainRow]:
    """Return the first audit entries after a number."""
    sql = f"{CHAIN.format(table)} AND seq > ? ORDER BY seq LIMIT ?"
    return connection.execute(sql, (after, limit)).fetchall()


@contextmanager
def open_comparison(
    stored: Path, audited: Callable[[str, str], str], path: Path | None
) -> Iterator[sqlite3.Connection]:
    """Open the tables of a replay as schema `main`, and a file read-only as schema `stored`.

    With a path they are those of a comparison that ComparisonStopped or a kill has ended there.
    """
    with closing(_open_replay(path)) as connection:
        connection.execute("ATTACH ? AS stored", (database.read_only_uri(stored),))
        # The entries of a damaged audit may make rows without their parents.
        connection.execute("PRAGMA foreign_keys = OFF")
        connection.create_function("audited", 2, audited, deterministic=True)
        try:
            yield connection
        except ComparisonStopped:
            raise  # what it has reached stays
        except BaseException:
            _remove_replay(path)
            raise
    _remove_replay(path)


def _open_replay(path: Path | None) -> sqlite3.Connection:
    """Open the tables of a replay: empty ones, or those of a resumable replay that was ended."""
    if path is None:
        # An empty name is a private temporary file, which SQLite removes when it is closed.
        connection = sqlite3.connect("", uri=True, isolation_level=None)
        database.create_tables(connection)
        return connection
    with suppress(sqlite3.Error):
        connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode=rw", uri=True, isolation_level=None)
        with suppress(sqlite3.Error):
            is_begun = connection.execute("SELECT seq FROM comparison_progress").fetchone()
            if is_begun and database.has_current_schema(connection):
                return connection
        connection.close()
    _remove_replay(path)
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    connection = sqlite3.connect(path.absolute().as_uri(), uri=True, isolation_level=None)
    database.create_tables(connection)
    return connection


def _remove_replay(path: Path | None) -> None:
    if path is not None:
        for suffix in ("", "-journal"):
            Path(f"{path}{suffix}").unlink(missing_ok=True)


def write_tables(path: Path, tables: Iterable[TableRows]) -> None:
    """Make a file with these tables; raises sqlite3.Error."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        database.create_tables(connection)
        connection.execute("BEGIN")
        connection.execute("DELETE FROM term")
        for each in tables:
            for rows in chunks(each.rows):
                connection.executemany(insert_statement(each.table, each.columns), rows)
        write_refusal(connection, UNFINISHED)
        connection.execute("COMMIT")


def place_copy(path: Path, tables: Iterable[TableRows], key: bytes) -> None:
    """Make a store of these tables that refuses to start; raises StoreFailed where one is in use.

    `key` signs the audit's base in place of the one of the machine that the tables come from.
    """
    if path.exists():
        with closing(database.open_reader(path)) as old:
            if not read_refusal(old):
                raise StoreFailed(f"{path}: a store is there already; name a state directory without one")
    owner = files.find_owner(path.parent)
    with files.temporary_database(path) as temporary:
        write_tables(temporary, tables)
        with closing(sqlite3.connect(temporary, isolation_level=None)) as connection:
            sign_again(connection, key)
        files.change_owner(temporary, owner)
        # One that was moved away stays, under another name.
        files.link_previous(path)
        files.replace_database(temporary, path)


class WithoutNul:
    """A connection that writes texts as PostgreSQL can have them, so that a replay makes equal rows."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self.IntegrityError = connection.IntegrityError

    @property
    def in_transaction(self) -> bool:
        return self._connection.in_transaction

    def execute(self, sql: str, parameters: Any = (), /) -> sqlite3.Cursor:
        return self._connection.execute(sql, _without_nul(parameters))

    def executemany(self, sql: str, rows: Iterable[Sequence[Any]], /) -> sqlite3.Cursor:
        return self._connection.executemany(sql, map(_without_nul, rows))


def _without_nul(values: Any) -> Any:
    if isinstance(values, dict) or not any(isinstance(each, str) and "\0" in each for each in values):
        return values
    return [
        each.replace("\0", "\N{REPLACEMENT CHARACTER}") if isinstance(each, str) else each for each in values
    ]
