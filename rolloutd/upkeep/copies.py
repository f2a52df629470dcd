"""Copies of the database: taken while a daemon writes, and put back while none does.

A copy is made by SQLite's own online backup, so it is one moment of the
database, whole, and it is judged before anybody relies on it: its integrity and
its audit chain.  Trees of playbooks and logs of runs are plain files and no part
of it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sqlite3
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from rolloutd import chain
from rolloutd.chain import Verdict
from rolloutd.errors import StoreFailed
from rolloutd.store import database, lock

PAGES_AT_ONCE = 4096
"""Pages (16 MiB) copied between two looks at the source: the daemon's commits wait for none of them."""

EPOCH_LEAP = 1_000_000
"""What is added to the epoch where nobody can say how far the lost database had come.

Nodes refuse the runs of a daemon that is older than one they have obeyed, so
after a restore the epoch must be beyond every epoch that was ever used.
"""


@dataclass(frozen=True, slots=True)
class Restored:
    """What a restore did: the copy's verdict, where the old database is kept, the epoch it goes on from."""

    verdict: Verdict
    kept: Path | None
    epoch: int


def backup(state_dir: Path, target: Path) -> Verdict:
    """Copy the database of a state directory to a file; a daemon may be running.

    Returns what the audit chain of the copy is like; a broken one is copied too.
    Raises StoreFailed when the source cannot be read, the copy is damaged or would
    take the place of what a daemon works with, OSError.
    """
    _mind_target(state_dir, target)
    source = database.open_reader(_existing(state_dir))
    with closing(source), _draft(target) as draft:
        _copy(source, draft)
        verdict = chain.verify(draft)
        _settle(draft, target)
    return verdict


def restore(state_dir: Path, copy: Path) -> Restored:
    """Put a copy in the place of the database; what was there is kept beside it.

    Raises AlreadyRunning while a daemon has the directory, StoreFailed when the
    copy is damaged or its audit chain is broken, OSError.
    """
    if not copy.is_file():
        raise StoreFailed(f"{copy} is no file" if copy.exists() else f"there is no file {copy}")
    owner = _owner(state_dir)
    state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    held = lock.StateLock(state_dir, time.time())
    try:
        target = state_dir / database.FILE_NAME
        source = _source(copy)
        with closing(source), _draft(target) as draft:
            _copy(source, draft)
            verdict = chain.verify(draft)
            if not verdict.ok:
                raise StoreFailed(f"{copy} is not restored, its audit chain is broken: {verdict.message}")
            epoch = _set_epoch(draft, _epoch(target))
            _give(draft, owner)
            kept = _put_aside(target)
            _settle(draft, target)
        _give(state_dir / lock.FILE_NAME, owner)
    finally:
        held.release()
    return Restored(verdict, kept, epoch)


def _mind_target(state_dir: Path, target: Path) -> None:
    """Refuse a copy over the database itself: a daemon would go on writing into a file without a name.

    And what can be no copy's place.
    """
    if target.is_dir():
        raise StoreFailed(f"{target} is a directory: name a file")
    if not target.absolute().parent.is_dir():
        raise StoreFailed(f"there is no directory {target.absolute().parent}: make it, or name another place")
    own = [state_dir / f"{database.FILE_NAME}{suffix}" for suffix in ("", "-wal", "-shm")]
    place = target.absolute().resolve()
    if any(place == file.absolute().resolve() for file in (*own, state_dir / lock.FILE_NAME)):
        raise StoreFailed(f"{target} is what the daemon itself works with: name another file")


def _existing(state_dir: Path) -> Path:
    path = state_dir / database.FILE_NAME
    if not path.is_file():
        raise StoreFailed(f"there is no database {path}: is this the daemon's configuration?")
    return path


def _source(copy: Path) -> sqlite3.Connection:
    """Open a copy; what is wrong with it concerns no daemon, so it is said in other words."""
    try:
        return database.open_reader(copy)
    except StoreFailed as error:
        if error.__cause__ is None:
            raise
        text = f"{copy} is no sound copy of a database, and nothing was changed ({error.__cause__})"
        raise StoreFailed(text) from error


def _copy(source: sqlite3.Connection, draft: Path) -> None:
    """Copy through SQLite and make the copy one file; raises StoreFailed when it is not sound."""
    try:
        with closing(sqlite3.connect(draft, isolation_level=None)) as target:
            source.backup(target, pages=PAGES_AT_ONCE)
            target.execute("PRAGMA journal_mode = DELETE")
            damage = damage_of(target)
    except database.BROKEN as error:
        raise database.failure(error, draft) from error
    if damage:
        raise StoreFailed(f"the copy is damaged, as its source must be: {damage}")


def damage_of(connection: sqlite3.Connection) -> str:
    """Return what SQLite finds wrong with a database; the empty string when nothing is."""
    rows = [str(row[0]) for row in connection.execute("PRAGMA integrity_check(5)")]
    rows += [
        f"row {row[1]} of {row[0]} has no {row[2]}" for row in connection.execute("PRAGMA foreign_key_check")
    ]
    return "; ".join(row for row in rows if row != "ok")


def _epoch(path: Path) -> int | None:
    """Return the epoch of the database that is to be replaced; None when it cannot be read."""
    if not path.exists():
        return None
    try:
        with closing(database.open_reader(path)) as connection:
            (epoch,) = connection.execute("SELECT epoch FROM tenure").fetchone()
    except (StoreFailed, TypeError, *database.BROKEN):
        return None
    return int(epoch)


def _set_epoch(draft: Path, newest: int | None) -> int:
    with closing(sqlite3.connect(draft, isolation_level=None)) as connection:
        (own,) = connection.execute("SELECT epoch FROM tenure").fetchone()
        epoch = int(own) + EPOCH_LEAP if newest is None else max(int(own), newest)
        connection.execute("UPDATE tenure SET epoch = ?", (epoch,))
    return epoch


def _put_aside(path: Path) -> Path | None:
    """Give the database with its log a second name, and return it; its own name stays until the copy has it.

    So whatever ends us in the middle, a daemon that starts then finds a database and makes no empty one.
    """
    if not path.exists():
        return None
    kept = _unused(path.with_name(f"{path.name}.before-{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}"))
    for suffix in ("-wal", "-shm", ""):
        with contextlib.suppress(FileNotFoundError):
            Path(f"{kept}{suffix}").hardlink_to(f"{path}{suffix}")
    _sync(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    # Before the copy has the name: the log of another database would be nonsense to it.
    for suffix in ("-wal", "-shm"):
        Path(f"{path}{suffix}").unlink(missing_ok=True)
    return kept


def _unused(path: Path) -> Path:
    """Return the path, or one like it, that nothing has yet: two restores may fall into one second."""
    taken = (path.with_name(f"{path.name}-{number}") for number in itertools.count(2))
    return next(each for each in itertools.chain((path,), taken) if not each.exists())


@contextlib.contextmanager
def _draft(target: Path) -> Iterator[Path]:
    """Yield a file beside the target, readable by nobody else; removed unless it was settled."""
    descriptor, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.absolute().parent)
    os.close(descriptor)
    draft = Path(name)
    try:
        yield draft
    finally:
        for suffix in ("", "-journal", "-wal", "-shm"):
            Path(f"{draft}{suffix}").unlink(missing_ok=True)


def _settle(draft: Path, target: Path) -> None:
    """Give the draft its name, on disk."""
    _sync(draft, os.O_RDONLY)
    draft.rename(target)
    _sync(target.absolute().parent, os.O_RDONLY | os.O_DIRECTORY)


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _owner(state_dir: Path) -> tuple[int, int] | None:
    """Return whose the state directory is, where we are root and the files must become theirs."""
    if os.geteuid() != 0 or not state_dir.exists():
        return None
    found = state_dir.stat()
    return found.st_uid, found.st_gid


def _give(path: Path, owner: tuple[int, int] | None) -> None:
    if owner is not None:
        os.chown(path, *owner)
