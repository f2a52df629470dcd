"""The audit's hash chain, with the standard library only.

Each entry of the audit is one line of canonical JSON with a hash of itself and of
the previous hash.  A change, removal or move of an entry changes every later hash,
so the latest hash, kept elsewhere, reveals it.

The store writes chains with these functions; `audit verify` checks them, also on a
machine without a daemon and from a copy of the file.  So this module knows neither
the daemon nor the store nor the meaning of an entry.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GENESIS_HASH = "0" * 64
"""The hash before the first entry, and the head of an empty chain."""

_SEQ_KEY = b',"seq":'
"""`seq` is the last of an entry's keys in canonical order, so an entry ends with it."""

_LOCK_TIMEOUT_S = 5.0
"""How long to wait for a lock: in WAL mode, readers wait only for recovery."""

_NO_PROBLEM: tuple[int | None, str] = (None, "")

_encode = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode


@dataclass(frozen=True, slots=True)
class ChainVerification:
    """The result of a verification.

    `entries` counts the good entries before the first bad one, whose sequence
    number is `first_bad`; `head` is the hash of the last good entry.
    """

    ok: bool
    entries: int
    head: str
    first_bad: int | None
    message: str


def canonical_json(value: Any) -> str:
    """Return the one JSON text of a value: sorted keys, no blanks, ASCII.

    ASCII, so that names that are not valid Unicode also have exactly one form.
    Raises ValueError for infinities and NaN, TypeError for what is not JSON.
    """
    return _encode(value)


def hash_entry(previous: str, text: str) -> str:
    """Return the hash, 64 hexadecimal digits, of an entry that follows `previous`."""
    return hashlib.sha256((previous + text).encode()).hexdigest()


def verify_chain(database: Path | sqlite3.Connection, head: str | None = None) -> ChainVerification:
    """Check the chain of a database, read-only; a daemon may be writing to it.

    `head` is a hash noted earlier; a chain without it is bad too: its tail was cut,
    or it was rewritten.  A damaged file is a result, not an error; raises
    FileNotFoundError for a missing file.
    """
    if isinstance(database, sqlite3.Connection):
        return verify_entries(database, head=head)
    if not database.is_file():
        raise FileNotFoundError(f"{database}: no such database; name another file")
    try:
        with closing(open_read_only(database)) as connection:
            return verify_entries(connection, head=head)
    except (sqlite3.Error, UnicodeDecodeError) as error:
        return ChainVerification(False, 0, GENESIS_HASH, None, f"{database}: not readable: {error}")


def open_read_only(database: Path) -> sqlite3.Connection:
    """Return a read-only connection, for one thread at a time; raises sqlite3.Error."""
    return _connect(read_only_uri(database))


def read_hashes(database: Path, numbers: Iterable[int]) -> dict[int, str]:
    """Return the recorded hashes of these entries, without those that are missing; raises sqlite3.Error."""
    with closing(open_read_only(database)) as connection:
        sql = "SELECT seq, hash FROM audit WHERE seq = ?"
        return dict(row for seq in numbers for row in connection.execute(sql, (seq,)))


def read_only_uri(database: Path) -> str:
    """Return the URI under which SQLite can read a database; raises sqlite3.Error."""
    uri = f"{database.absolute().as_uri()}?mode=ro"
    try:
        with closing(_connect(uri)) as connection:
            connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()
    except (sqlite3.Error, UnicodeDecodeError) as error:
        wal = database.with_name(database.name + "-wal")
        if not isinstance(error, sqlite3.OperationalError) or (wal.exists() and wal.stat().st_size > 0):
            raise
        # In a read-only directory SQLite cannot create WAL's shared memory; without
        # a WAL file, the database file alone is complete.
        return f"{uri}&immutable=1"
    return uri


def _connect(uri: str) -> sqlite3.Connection:
    return sqlite3.connect(
        uri, uri=True, timeout=_LOCK_TIMEOUT_S, isolation_level=None, check_same_thread=False
    )


def verify_entries(
    connection: sqlite3.Connection,
    table: str = "audit",
    head: str | None = None,
    visit: Callable[[str], object] | None = None,
) -> ChainVerification:
    """Check the chain on this connection; `table` may name an attached database.

    `visit` gets the text of each good entry, also of those after a bad one: an entry is good if its hash
    follows from its text and the recorded hash before it.
    """
    previous, count, head_found, bad = GENESIS_HASH, 0, head in (None, GENESIS_HASH), _NO_PROBLEM
    good_head = previous
    # Bytes, so that an entry that is not UTF-8 any more counts as altered.
    sql = f"SELECT seq, CAST(entry AS BLOB), CAST(hash AS BLOB) FROM {table} ORDER BY seq"  # noqa: S608  # our own name
    expected = 1
    try:
        for seq, text, recorded_hash in connection.execute(sql):
            problem = _find_problem(expected, previous, seq, text, recorded_hash)
            if problem and bad is _NO_PROBLEM:
                bad = (count + 1, problem)
                if visit is None:
                    break
            previous, expected = _text(recorded_hash), seq + 1
            if bad is _NO_PROBLEM:
                good_head, count = previous, count + 1
            head_found = head_found or (not problem and previous == head)
            if visit is not None and not problem:
                visit(text.decode())
    except (sqlite3.Error, UnicodeDecodeError) as error:
        # SQLite quotes the damaged bytes in its message, and Python may fail to read that.
        if visit is not None:
            raise
        bad = (count + 1, f"the file is damaged at entry {count + 1}: {error}")
    if bad is not _NO_PROBLEM:
        return ChainVerification(False, count, good_head, *bad)
    if not head_found:
        message = (
            f"none of the {count} entries has the hash {head}: the tail was cut after it was noted,"
            " or the whole chain was rewritten"
        )
        return ChainVerification(False, count, good_head, count + 1, message)
    entries = "1 entry" if count == 1 else f"{count} entries"
    return ChainVerification(True, count, good_head, None, f"{entries}, each one hashed over the one before")


def _text(recorded_hash: object) -> str:
    return recorded_hash.decode("utf-8", "replace") if isinstance(recorded_hash, bytes) else ""


def _find_problem(expected: int, previous: str, seq: object, text: object, recorded_hash: object) -> str:
    """Return the problem of an entry, or an empty string."""
    if seq != expected:
        return f"entry {expected} is missing: the next one is {seq}"
    if not isinstance(text, bytes) or not isinstance(recorded_hash, bytes):
        return f"entry {expected} was altered: it is not text"
    if not text.endswith(b"%b%d}" % (_SEQ_KEY, expected)):
        return f"entry {expected} was altered or moved: it does not carry its own number"
    if hashlib.sha256(previous.encode() + text).hexdigest().encode() != recorded_hash:
        return f"entry {expected} was altered: its hash does not follow from its text and the entry before"
    return ""
