"""The audit chain, as pure functions on the standard library alone.

Each entry of the audit is one line of canonical JSON, and carries the hash of
itself and of the hash before it; so whoever changes, removes or moves an entry
must change every hash after it, and the latest hash, kept elsewhere, tells.

The store writes chains with these functions; `audit verify` checks them, also
on a machine without a daemon and from a copy of the file.  So this module knows
neither the daemon nor the store nor what an entry means.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GENESIS = "0" * 64
"""What stands for the hash before the first entry, and for the head of an empty chain."""

_SEQ_KEY = b',"seq":'
"""`seq` is the last of an entry's keys in canonical order, so an entry ends with it."""

_BUSY_TIMEOUT_S = 5.0
"""How long a lock is waited for: in WAL mode readers wait for recovery at most."""

_encode = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode


@dataclass(frozen=True, slots=True)
class Verdict:
    """What verification found.

    `entries` counts the good entries before the first bad one, whose sequence
    number is `first_bad`; `head` is the hash of the last good entry.
    """

    ok: bool
    entries: int
    head: str
    first_bad: int | None
    message: str


def canonical(value: Any) -> str:
    """Return the one JSON text of a value: sorted keys, no blanks, ASCII.

    ASCII, so that also names which are no valid Unicode have exactly one form.
    Raises ValueError for infinities and NaN, TypeError for what is not JSON.
    """
    return _encode(value)


def entry_hash(previous: str, text: str) -> str:
    """Return the hash, 64 hexadecimal digits, of an entry that follows `previous`."""
    return hashlib.sha256((previous + text).encode()).hexdigest()


def verify(database: Path | sqlite3.Connection, head: str | None = None) -> Verdict:
    """Check the chain of a database, reading only; a daemon may be writing to it.

    With `head`, a hash that was noted earlier, a chain in which it no longer
    occurs is bad too: its tail was cut, or it was written anew.  Never raises
    for what it finds in the file; raises FileNotFoundError when there is none.
    """
    if isinstance(database, sqlite3.Connection):
        return _verify(database, head)
    if not database.is_file():
        raise FileNotFoundError(f"there is no database {database}")
    try:
        with closing(open_read_only(database)) as connection:
            return _verify(connection, head)
    except (sqlite3.Error, UnicodeDecodeError) as error:
        return Verdict(False, 0, GENESIS, None, f"{database} cannot be read: {error}")


def open_read_only(database: Path) -> sqlite3.Connection:
    """Return a connection that cannot write, whether or not a daemon has the file open.

    One thread at a time may use it, whichever.  Raises sqlite3.Error.
    """
    uri = f"{database.absolute().as_uri()}?mode=ro"
    connection = _connect(uri)
    try:
        connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()
    except (sqlite3.Error, UnicodeDecodeError) as error:
        connection.close()
        wal = database.with_name(database.name + "-wal")
        if not isinstance(error, sqlite3.OperationalError) or (wal.exists() and wal.stat().st_size > 0):
            raise
        # A file in a directory that nobody can write to has no place for the
        # shared memory of WAL; as it has no WAL either, it is whole by itself.
        connection = _connect(f"{uri}&immutable=1")
    return connection


def _connect(uri: str) -> sqlite3.Connection:
    return sqlite3.connect(
        uri, uri=True, timeout=_BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
    )


def _verify(connection: sqlite3.Connection, head: str | None) -> Verdict:
    previous, count, noted = GENESIS, 0, head in (None, GENESIS)
    factory, connection.text_factory = connection.text_factory, bytes
    try:
        # Bytes, so that an entry that is no longer UTF-8 is an altered entry.
        for seq, text, stated in connection.execute("SELECT seq, entry, hash FROM audit ORDER BY seq"):
            wrong = _wrong(count + 1, previous, seq, text, stated)
            if wrong:
                return Verdict(False, count, previous, count + 1, wrong)
            previous, count = stated.decode(), count + 1
            noted = noted or previous == head
    except (sqlite3.Error, UnicodeDecodeError) as error:
        # SQLite quotes the damaged bytes in its message, and Python may fail to read that.
        message = f"the file is damaged at entry {count + 1}: {error}"
        return Verdict(False, count, previous, count + 1, message)
    finally:
        connection.text_factory = factory
    if not noted:
        message = (
            f"none of the {count} entries has the hash {head}: the tail was cut after it was noted,"
            " or the whole chain was written anew"
        )
        return Verdict(False, count, previous, count + 1, message)
    entries = "1 entry" if count == 1 else f"{count} entries"
    return Verdict(True, count, previous, None, f"{entries}, each one hashed over the one before")


def _wrong(expected: int, previous: str, seq: object, text: object, stated: object) -> str:
    """Say what is wrong with an entry; the empty string when nothing is."""
    if seq != expected:
        return f"entry {expected} is missing: the next one there is {seq}"
    if not isinstance(text, bytes) or not isinstance(stated, bytes):
        return f"entry {expected} was altered: it is not text"
    if not text.endswith(b"%b%d}" % (_SEQ_KEY, expected)):
        return f"entry {expected} was altered or moved: it does not carry its own number"
    if hashlib.sha256(previous.encode() + text).hexdigest().encode() != stated:
        return f"entry {expected} was altered: its hash does not follow from its text and the entry before"
    return ""
