"""Judges what lies on the disk: the state directory, the room that is left, the database and its audit.

It opens files for reading alone, and knows neither settings nor daemon.
"""

from __future__ import annotations

import os
import pwd
import shutil
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

from rolloutd import chain
from rolloutd.errors import RolloutdError
from rolloutd.store import database
from rolloutd.upkeep.copies import damage_of
from rolloutd.upkeep.finding import Finding

LEAST_FREE_BYTES = 512 * 1024 * 1024
"""What a week of a large rollout writes, logs of runs included, and some air."""

SHELVES = ("runs", "trees", "git")
"""What grows in the state directory beside the database, and is told by itself; `keep` bounds it."""


def state_dir(path: Path) -> Iterator[Finding]:
    """Judge the directory and the disk that it is on."""
    if not path.is_dir():
        yield Finding("state directory", False, f"there is no {path}: start the daemon once, or make it")
        return
    found = path.stat()
    if found.st_mode & 0o077:
        text = f"{path} is open to others (mode {found.st_mode & 0o777:o}): chmod 700 {path}"
        yield Finding("state directory", False, text)
    elif found.st_uid not in (os.geteuid(), 0) or not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        yield Finding("state directory", False, f"{path} is {_whose(found.st_uid)}")
    else:
        yield Finding("state directory", True, str(path))
    free = shutil.disk_usage(path).free
    used = ", ".join(f"{name} {_size(path / name) // 2**20} MiB" for name in SHELVES)
    text = f"{free // 2**20} MiB free below {path} ({used})"
    yield Finding(
        "disk", free >= LEAST_FREE_BYTES, text if free >= LEAST_FREE_BYTES else f"{text}: free some"
    )


def ledger(path: Path) -> Iterator[Finding]:
    """Judge the database, and the audit in it."""
    if not path.exists():
        yield _no_database(path)
        return
    beside = (Path(f"{path}{suffix}") for suffix in ("", "-wal", "-shm"))
    shut = [str(file) for file in beside if file.exists() and not os.access(file, os.R_OK | os.W_OK)]
    if shut:
        text = f"the daemon's user may not write {', '.join(shut)}: chown it to the owner of {path.parent}"
        yield Finding("database", False, text)
        return
    try:
        with closing(database.open_reader(path)) as connection:
            damage = damage_of(connection)
            old = (
                ""
                if database.is_current(connection)
                else "; older than this version: a start brings it up to date"
            )
            verdict = chain.verify(connection)
    except RolloutdError as error:
        yield Finding("database", False, str(error))
        return
    except database.BROKEN as error:
        yield Finding("database", False, str(database.failure(error, path)))
        return
    if damage:
        yield Finding("database", False, f"damaged: {damage}; stop the daemon and restore a backup")
    else:
        yield Finding("database", True, f"{path}, {path.stat().st_size // 1024} KiB, sound{old}")
    what = verdict.message if verdict.ok else f"{verdict.message}; keep a copy, and compare with a backup"
    yield Finding("audit", verdict.ok, what)


def is_current(path: Path) -> bool:
    """Say whether there is a database, and one whose content this version's rules can judge."""
    if not path.exists():
        return False
    with closing(database.open_reader(path)) as connection:
        return database.is_current(connection)


def _whose(uid: int) -> str:
    """Say whose something is that is not ours, and what to do about it."""
    try:
        name = pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}'s, whom this machine does not know: chown -R it to the user of the daemon"
    return f"{name}'s: run this as root, or as {name}"


def _size(path: Path) -> int:
    """Return the bytes of the files below a directory; what goes away meanwhile counts nothing."""
    total = 0
    for directory, _, names in os.walk(path):
        for name in names:
            with suppress(FileNotFoundError):
                total += Path(directory, name).lstat().st_size
    return total


def _no_database(path: Path) -> Finding:
    left = [name for name in SHELVES if any((path.parent / name).glob("[!.]*"))]
    if left:
        rest = f"what it told of is there ({', '.join(left)})"
        return Finding("database", False, f"{path} is gone, and {rest}: put it back, or restore a backup")
    return Finding("database", True, "none yet; the daemon makes it when it starts")
