"""The mark of the latest commit, a small file next to the database.

A database that lost its `-wal`, or was replaced by an older copy, is sound and does not know it.  The mark
does: it has the term and the audit entry of the latest commit.  It is written after the commit and without
fsync, so after a power cut it may be older than the database, but never newer.
"""

from __future__ import annotations

import os
import shlex
from contextlib import closing, suppress
from pathlib import Path

from rolloutd.errors import StoreFailed
from rolloutd.store.sqlite import database

FILE_NAME = "newest-commit"

RESTORE_FILE_NAME = "unfinished-restore"
"""The note of a restore that has begun: it has the name of the copy."""

Position = tuple[int, int]
"""A term's epoch and the number of an audit entry; both only grow."""


def write_mark(path: Path, epoch: int, seq: int) -> None:
    """Record a commit; on a full disk the mark stays older, which is harmless."""
    with suppress(OSError):
        descriptor = os.open(mark_path(path), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            # Of one length, so that it is replaced in one write without truncation.
            os.pwrite(descriptor, b"%020d %020d\n" % (epoch, seq), 0)
        finally:
            os.close(descriptor)


def mark_path(path: Path) -> Path:
    return path.with_name(FILE_NAME)


def restore_path(path: Path) -> Path:
    return path.with_name(RESTORE_FILE_NAME)


def read_unfinished_restore(path: Path) -> str | None:
    """Return the copy of a restore that has not ended."""
    note = restore_path(path)
    return note.read_text().removesuffix("\n") if note.exists() else None


def explain_unfinished_restore(path: Path) -> StoreFailed:
    copy = shlex.quote(str(read_unfinished_restore(path)))
    return StoreFailed(f"{path}: its restore was interrupted; run it again: rolloutctl restore {copy}")


def read_mark(path: Path) -> Position | None:
    """Return the mark next to a database, None when there is none that can be read."""
    try:
        epoch, seq = mark_path(path).read_text().split()
        return int(epoch), int(seq)
    except (OSError, ValueError):
        return None


def require_newest(path: Path) -> None:
    """Raise StoreFailed for a database that lacks commits which its mark has, or whose restore was killed."""
    if read_unfinished_restore(path) is not None:
        raise explain_unfinished_restore(path)
    mark = read_mark(path)
    if mark is None:
        return
    if not path.exists():
        raise StoreFailed(
            f"{path}: the database is gone; put it back, restore a backup, or remove {mark_path(path)}"
            " to begin with an empty one"
        )
    try:
        found = _read_position(path)
    except database.DATABASE_ERRORS:
        return  # the one that opens it for writing explains that
    # Both grow only, so either one that is lower means that commits are missing.
    if found[0] < mark[0] or found[1] < mark[1]:
        raise StoreFailed(
            f"{path}: its last entry is {found[1]} of term {found[0]}, but {mark[1]} of term {mark[0]} was"
            f" written; put back its -wal, or accept the loss: rolloutctl restore {shlex.quote(str(path))}"
        )


def _read_position(path: Path) -> Position:
    with closing(database.open_read_only(path)) as connection:
        (seq,) = connection.execute("SELECT ifnull(max(seq), 0) FROM audit").fetchone()
        return database.read_epoch(connection), int(seq)
