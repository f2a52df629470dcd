"""How the database file is opened, recognised and brought up to date.

SQLite in WAL mode with full synchronisation: what was answered survives a power
cut, and readers never wait for the writer.  The file says by its application id
that it is ours and by its user version which migrations it has seen; a file of
another program or of a newer rolloutd is refused, never touched.
"""

from __future__ import annotations

import os
import sqlite3
from importlib import resources
from pathlib import Path

from rolloutd.chain import open_read_only
from rolloutd.errors import RolloutdError, StoreFailed

FILE_NAME = "rolloutd.sqlite"

APPLICATION_ID = 0x726F6C6C
"""The letters `roll` in the file's header, so that file(1) and we know it."""

BUSY_TIMEOUT_S = 5.0
"""How long a foreign lock (a backup, somebody's shell) is waited for before the caller is told."""

WAL_LIMIT_BYTES = 64 * 1024 * 1024
"""What the WAL is cut back to after a burst, so that one big submit does not keep the disk for ever."""

CACHED_STATEMENTS = 256
"""Prepared statements kept: more than there are different ones."""

OLDEST_SQLITE = (3, 38, 0)
"""STRICT tables came with 3.37, JSON functions that are always there with 3.38."""


BESIDE = ("", "-wal", "-shm")
"""What is added to the database's name for the files that it consists of while a daemon works with it."""

Files = tuple[tuple[int, int] | None, ...]
"""Device and inode of each of them; None for one that is not there."""

BROKEN = (sqlite3.Error, UnicodeError)
"""What a statement may end with: SQLite quotes damaged bytes in its messages, and Python may fail on them."""


def open_writer(path: Path) -> sqlite3.Connection:
    """Open the database for writing, create it where there is none, and migrate it.

    Raises StoreFailed.
    """
    if sqlite3.sqlite_version_info < OLDEST_SQLITE:
        raise StoreFailed(f"SQLite {sqlite3.sqlite_version} is too old: 3.38 or newer is needed")
    if not path.exists() and Path(f"{path}-wal").exists():
        raise StoreFailed(
            f"there is no {path}, but its log {path}-wal: put the database back, or restore a backup;"
            " SQLite would remove the log"
        )
    try:
        # SQLite would create the file readable for everybody; it holds how nodes are reached.
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        uri = f"{path.absolute().as_uri()}?mode=rw"
        connection = sqlite3.connect(
            uri,
            uri=True,
            timeout=BUSY_TIMEOUT_S,
            isolation_level=None,
            check_same_thread=False,  # opened by one thread, used by another, never by both
            cached_statements=CACHED_STATEMENTS,
        )
        return _prepared(connection, path)
    except (*BROKEN, OSError) as error:
        raise failure(error, path) from error


def files_of(path: Path) -> Files:
    """Return which files a database consists of at this moment."""
    return tuple(_file(f"{path}{suffix}") for suffix in BESIDE)


def mind_files(path: Path, opened: Files) -> None:
    """Refuse to write into files that have lost their names; raises StoreFailed.

    SQLite does not notice: it would write on, answer, and all of it would be gone with the process.
    """
    if files_of(path) == opened:
        return
    if _file(str(path)) == opened[0]:
        raise StoreFailed(
            f"nothing was written: somebody removed {path}-wal or {path}-shm, which belong to the database;"
            " stop the daemon, which saves what they held, and start it again"
        )
    raise StoreFailed(
        f"nothing was written: somebody moved, removed or replaced {path}; put it back and the daemon goes on"
        f" by itself. What it held is in /proc/{os.getpid()}/fd as long as this daemon lives;"
        " only a restart takes up what is there now"
    )


def _file(path: str) -> tuple[int, int] | None:
    try:
        found = Path(path).stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:  # a refused look must not be the end of whoever writes
        raise StoreFailed(f"nothing was written: {path} cannot be looked at ({error})") from error
    return found.st_dev, found.st_ino


def open_reader(path: Path) -> sqlite3.Connection:
    """Open a connection that reads while another one writes.  Raises StoreFailed."""
    try:
        connection = open_read_only(path)
        try:
            if not _recognise(connection, path):
                raise StoreFailed(f"{path} holds nothing yet: start the daemon once")
        except BaseException:
            connection.close()
            raise
    except (*BROKEN, OSError) as error:
        raise failure(error, path) from error
    return connection


def is_current(connection: sqlite3.Connection) -> bool:
    """Say whether a database is as this version writes it; a start brings an older one up to date."""
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    return bool(version == len(_migrations()))


def failure(error: Exception, path: Path) -> StoreFailed:
    """Return what a person should know and do about an error of SQLite or the file system."""
    unreadable = "SQLITE_CORRUPT" if isinstance(error, UnicodeError) else ""
    name = getattr(error, "sqlite_errorname", None) or unreadable
    return StoreFailed(f"{_advice(name, error, path)} (SQLite says: {error})")


def _advice(name: str, error: Exception, path: Path) -> str:
    kind = name.removeprefix("SQLITE_").partition("_")[0]
    match kind:
        case "FULL":
            return (
                f"nothing was written: no space is left for {path}; free some, the daemon goes on by itself"
            )
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


def _prepared(connection: sqlite3.Connection, path: Path) -> sqlite3.Connection:
    try:
        version = _recognise(connection, path)
        (mode,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
        if mode != "wal":
            raise StoreFailed(f"{path} cannot be written safely: its file system does not carry SQLite's WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute(f"PRAGMA journal_size_limit = {WAL_LIMIT_BYTES}")
        for number, script in _migrations()[version:]:
            _migrate(connection, number, script)
    except (*BROKEN, RolloutdError):
        connection.close()
        raise
    return connection


def _recognise(connection: sqlite3.Connection, path: Path) -> int:
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


def _migrations() -> list[tuple[int, str]]:
    """Return the migrations, oldest first; they are numbered without gaps."""
    directory = resources.files("rolloutd.store") / "migrations"
    files = sorted((entry.name, entry) for entry in directory.iterdir() if entry.name.endswith(".sql"))
    return [(number, entry.read_text("utf-8")) for number, (_, entry) in enumerate(files, 1)]


def _migrate(connection: sqlite3.Connection, number: int, script: str) -> None:
    """Run one migration and note it, both or neither."""
    header = f"PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version = {number};"
    try:
        connection.executescript(f"BEGIN IMMEDIATE;\n{script}\n{header}\nCOMMIT;")
    except sqlite3.Error:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
