"""A database file that replaces another: written next to it, moved into its place, the old one kept."""

from __future__ import annotations

import contextlib
import itertools
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def temporary_database(target: Path) -> Iterator[Path]:
    """Yield a private file next to the target; it is removed unless it was moved into place."""
    descriptor, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.absolute().parent)
    os.close(descriptor)
    temporary = Path(name)
    try:
        yield temporary
    finally:
        for suffix in ("", "-journal", "-wal", "-shm"):
            Path(f"{temporary}{suffix}").unlink(missing_ok=True)


def move_into_place(temporary: Path, target: Path) -> None:
    _fsync(temporary, os.O_RDONLY)
    temporary.rename(target)
    _fsync(target.absolute().parent, os.O_RDONLY | os.O_DIRECTORY)


def write_durably(path: Path, text: str) -> None:
    """Write a small file that is there, whole, after a power cut."""
    temporary = path.with_name(f".{path.name}")
    temporary.write_text(text)
    move_into_place(temporary, path)


def remove_durably(path: Path) -> None:
    path.unlink(missing_ok=True)
    _fsync(path.absolute().parent, os.O_RDONLY | os.O_DIRECTORY)


def _fsync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def find_owner(state_dir: Path) -> tuple[int, int] | None:
    """Return the owner of the state directory if we run as root: the restored files must belong to it."""
    if os.geteuid() != 0 or not state_dir.exists():
        return None
    status = state_dir.stat()
    return status.st_uid, status.st_gid


def change_owner(path: Path, owner: tuple[int, int] | None) -> None:
    if owner is not None:
        os.chown(path, *owner)


def link_previous(path: Path) -> Path | None:
    """Hard-link the old database and its WAL under a new name, and return that name.

    The old name stays until the copy replaces it: after a crash in between, a daemon must not find the path
    empty and create an empty database.
    """
    if not path.exists():
        return None
    previous = _find_unused_path(
        path.with_name(f"{path.name}.before-{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}")
    )
    for suffix in ("-wal", "-shm", ""):
        with contextlib.suppress(FileNotFoundError):
            Path(f"{previous}{suffix}").hardlink_to(f"{path}{suffix}")
    _fsync(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    return previous


def replace_database(temporary: Path, target: Path) -> None:
    # Remove the WAL before the copy is renamed: SQLite would apply the old WAL to the copy.
    for suffix in ("-wal", "-shm"):
        Path(f"{target}{suffix}").unlink(missing_ok=True)
    move_into_place(temporary, target)


def _find_unused_path(path: Path) -> Path:
    alternatives = (path.with_name(f"{path.name}-{number}") for number in itertools.count(2))
    taken = {each.name.removesuffix("-wal").removesuffix("-shm") for each in path.parent.iterdir()}
    return next(each for each in itertools.chain((path,), alternatives) if each.name not in taken)
