"""The database file: opening, identification, migrations.

SQLite runs in WAL mode with full synchronisation: a committed transaction survives a power cut, and readers
never wait for the writer.  The application id marks the file as rolloutd's, the user version counts its
migrations; a file of another program or of a newer rolloutd is refused and not changed.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from functools import cache
from importlib import resources
from pathlib import Path

from rolloutd.errors import RolloutdError, StoreFailed

FILE_NAME = "rolloutd.sqlite"

APPLICATION_ID = 0x726F6C6C
"""The letters `roll` in the file's header, so that file(1) and we know it."""

BUSY_TIMEOUT_S = 5.0
"""Wait for another process's lock (a backup, a shell) before the caller gets an error."""

READ_TIMEOUT_S = 5.0
"""How long to wait for a lock: in WAL mode, readers wait only for recovery."""

WAL_LIMIT_BYTES = 64 * 1024 * 1024
"""SQLite truncates a larger WAL to this size: one large submit must not occupy the disk permanently."""

STATEMENT_CACHE_SIZE = 256
"""Cached prepared statements: more than the store has different ones."""

MIN_SQLITE_VERSION = (3, 38, 0)
"""STRICT tables need 3.37; the JSON functions are built in from 3.38 on."""

SECRETS_REMOVED = 17
"""The last migration that removes secrets; the file of an older database is rewritten before."""

SPACE_IS_RELEASED = 18
"""The migration from which on a file gives free pages back; that of an older database is rewritten before."""

FILE_SUFFIXES = ("", "-wal", "-shm")
"""Suffixes of the database's files while a daemon uses it."""

DATABASE_ERRORS = (sqlite3.Error, UnicodeError)
"""Errors of a statement: SQLite quotes damaged bytes in its messages, and Python may fail to decode them."""


def open_writer(path: Path) -> sqlite3.Connection:
    """Open the database for writing, create it where there is none, and migrate it.

    Raises StoreFailed.
    """
    if sqlite3.sqlite_version_info < MIN_SQLITE_VERSION:
        raise StoreFailed(f"SQLite {sqlite3.sqlite_version} is too old: 3.38 or newer is needed")
    if not path.exists() and Path(f"{path}-wal").exists():
        raise StoreFailed(
            f"{path}: missing, but its log {path}-wal is there, which SQLite would remove;"
            " put the database back, or restore a backup"
        )
    try:
        # SQLite would create a world-readable file; it holds the nodes' connection variables.
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        uri = f"{path.absolute().as_uri()}?mode=rw"
        connection = sqlite3.connect(
            uri,
            uri=True,
            timeout=BUSY_TIMEOUT_S,
            # Python must not begin transactions by itself: the writer's own would be inside them.
            isolation_level=None,
            check_same_thread=False,  # opened in one thread, then used in another, never in both at once
            cached_statements=STATEMENT_CACHE_SIZE,
        )
        return _prepare(connection, path)
    except (*DATABASE_ERRORS, OSError) as error:
        raise explain_failure(error, path) from error


def open_reader(path: Path) -> sqlite3.Connection:
    """Open a connection that reads while another one writes.  Raises StoreFailed."""
    try:
        connection = open_read_only(path)
        try:
            if not _read_schema_version(connection, path):
                raise StoreFailed(f"{path} holds nothing yet: start the daemon once")
        except BaseException:
            connection.close()
            raise
    except (*DATABASE_ERRORS, OSError) as error:
        raise explain_failure(error, path) from error
    return connection


def open_read_only(path: Path) -> sqlite3.Connection:
    """Return a read-only connection to any database, for one thread at a time; raises sqlite3.Error."""
    return _connect_read_only(path)[0]


def read_only_uri(path: Path) -> str:
    """Return the URI under which SQLite can read a database; raises sqlite3.Error."""
    connection, uri = _connect_read_only(path)
    connection.close()
    return uri


def _connect_read_only(path: Path) -> tuple[sqlite3.Connection, str]:
    """Return a connection that can read, and its URI; SQLite reads the schema only once for it."""
    uri = f"{path.absolute().as_uri()}?mode=ro"
    connection = _connect_uri(uri)
    try:
        connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()
    except DATABASE_ERRORS as error:
        connection.close()
        wal = path.with_name(path.name + "-wal")
        if not isinstance(error, sqlite3.OperationalError) or (wal.exists() and wal.stat().st_size > 0):
            raise
        # In a read-only directory SQLite cannot create WAL's shared memory; without
        # a WAL file, the database file alone is complete.
        uri += "&immutable=1"
        connection = _connect_uri(uri)
    return connection, uri


def _connect_uri(uri: str) -> sqlite3.Connection:
    return sqlite3.connect(
        uri, uri=True, timeout=READ_TIMEOUT_S, isolation_level=None, check_same_thread=False
    )


def create_tables(connection: sqlite3.Connection) -> None:
    _migrate(connection, len(_migrations()), _schema())


@cache
def _schema() -> str:
    """Return a script with the result of all migrations; it takes a tenth of their time."""
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as connection:
        for number, script in _migrations():
            _migrate(connection, number, script)
        _, *statements, _ = connection.iterdump()  # without BEGIN and COMMIT
        return "\n".join(statements)


def has_current_schema(connection: sqlite3.Connection, name: str = "main") -> bool:
    """Return whether no migration is left to run; `name` may be that of an attached database."""
    (application,) = connection.execute(f"PRAGMA {name}.application_id").fetchone()
    (version,) = connection.execute(f"PRAGMA {name}.user_version").fetchone()
    return bool(application == APPLICATION_ID and version == len(_migrations()))


def find_damage(connection: sqlite3.Connection) -> str:
    """Return what SQLite finds wrong with a database, "" for nothing."""
    rows = [str(row[0]) for row in connection.execute("PRAGMA integrity_check(5)")]
    rows += [
        f"row {row[1]} of {row[0]} has no {row[2]}" for row in connection.execute("PRAGMA foreign_key_check")
    ]
    return "; ".join(row for row in rows if row != "ok")


def read_epoch(connection: sqlite3.Connection) -> int:
    """Return the epoch of the daemon that may write; works before the migrations too."""
    (epoch,) = connection.execute(f"SELECT epoch FROM {_term_table(connection)}").fetchone()  # noqa: S608  # a constant
    return int(epoch)


def write_epoch(connection: sqlite3.Connection, epoch: int) -> None:
    """Set the epoch of a database that no daemon uses."""
    connection.execute(f"UPDATE {_term_table(connection)} SET epoch = ?", (epoch,))  # noqa: S608  # a constant


def _term_table(connection: sqlite3.Connection) -> str:
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    return "term" if version >= 3 else "tenure"  # the name in rolloutd 0.1


def explain_failure(error: Exception, path: Path) -> StoreFailed:
    """Return an error that names the remedy for a failure of SQLite or the file system."""
    unreadable = "SQLITE_CORRUPT" if isinstance(error, UnicodeError) else ""
    name = getattr(error, "sqlite_errorname", None) or unreadable
    return StoreFailed(f"{_advise(name, error, path)} (SQLite says: {error})")


def _advise(name: str, error: Exception, path: Path) -> str:
    kind = name.removeprefix("SQLITE_").partition("_")[0]
    match kind:
        case "FULL":
            return f"nothing was written: no space is left for {path}; free some and the daemon resumes"
        case "BUSY" | "LOCKED":
            return f"nothing was written: another process keeps {path} locked; see `fuser {path}` and end it"
        case "READONLY" | "PERM" | "CANTOPEN" | "AUTH":
            return f"{path} cannot be opened or written: check owner and mode of it and of its directory"
        case "CORRUPT" | "NOTADB":
            return (
                f"{path} is damaged: stop the daemon, keep a copy of the file, and restore a backup;"
                f" `rolloutctl audit verify --database {path}` says how much of the audit is whole"
            )
        case "IOERR":
            return (
                f"nothing was written: the disk of {path} answers with errors; see the kernel's log (dmesg)"
            )
    if isinstance(error, OSError):
        return f"{path} cannot be opened: check its directory"
    return f"nothing was written: {path} could not take it"


def _prepare(connection: sqlite3.Connection, path: Path) -> sqlite3.Connection:
    try:
        version = _read_schema_version(connection, path)
        # Before anything is written to a new file; an older one is rewritten.
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
        (mode,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
        if mode != "wal":
            raise StoreFailed(f"{path} cannot be written safely: its file system does not carry SQLite's WAL")
        # With NORMAL, a power cut loses the latest commits, and votes that were answered.
        connection.execute("PRAGMA synchronous = FULL")
        # SQLite checks them only on connections that ask for it.
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute(f"PRAGMA journal_size_limit = {WAL_LIMIT_BYTES}")
        # What a statement deletes or replaces is overwritten, not only marked as free.
        connection.execute("PRAGMA secure_delete = ON")
        if 0 < version < SPACE_IS_RELEASED:
            _rewrite(connection, is_needed=version < SECRETS_REMOVED)
        if not version:
            create_tables(connection)
        else:
            for number, script in _migrations()[version:]:
                _migrate(connection, number, script)
        # The WAL has old pages until it is emptied; if a reader prevents that, the next start does it.
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    except (*DATABASE_ERRORS, RolloutdError):
        connection.close()
        raise
    return connection


def _rewrite(connection: sqlite3.Connection, *, is_needed: bool) -> None:
    """Rewrite the file, which takes as much free space as it has; it is needed to remove old passwords."""
    try:
        connection.execute("VACUUM")
    except sqlite3.OperationalError:
        if is_needed:
            raise


def _read_schema_version(connection: sqlite3.Connection, path: Path) -> int:
    """Return the number of migrations that the file has seen."""
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    (tables,) = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()
    if application != APPLICATION_ID and (tables or application or version):
        raise StoreFailed(f"{path} belongs to another program: name another state directory, or move it away")
    newest = len(_migrations())
    if version > newest:
        raise StoreFailed(
            f"{path} was written by a newer rolloutd (schema {version}, this one knows {newest}):"
            " start that version, or restore the backup that was made before the upgrade"
        )
    return int(version)


@cache
def _migrations() -> Sequence[tuple[int, str]]:
    """Return the migrations, oldest first; they are numbered without gaps."""
    directory = resources.files("rolloutd.store.sqlite") / "migrations"
    files = sorted((entry.name, entry) for entry in directory.iterdir() if entry.name.endswith(".sql"))
    return [(number, entry.read_text("utf-8")) for number, (_, entry) in enumerate(files, 1)]


def _migrate(connection: sqlite3.Connection, number: int, script: str) -> None:
    """Run one migration and raise the user version, in one transaction."""
    header = f"PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version = {number};"
    try:
        # executescript commits what is open before it runs, so the script itself begins.
        connection.executescript(f"BEGIN IMMEDIATE;\n{script}\n{header}\nCOMMIT;")
    except sqlite3.Error:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
