"""Directories that all workers of a test run share: made once, removed by the last one."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

MEMORY_BYTES = 8 << 30
"""Free space from which the tests take some 2 GB of memory: a disk takes a fifth more CPU time."""


def shared_directory(base: Path) -> Path:
    """Return a directory that all workers of this run share, and no other run, from a worker's own one."""
    return (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "packages"


def memory_directory() -> str | None:
    """Return where file systems of gigabytes are made and removed fastest, or None: as for other files."""
    place = Path("/dev/shm")
    if not place.is_dir():
        return None
    found = os.statvfs(place)
    # Programs and setuid ones are run there, and a machine with less memory needs it for the tests.
    is_usable = not found.f_flag & (os.ST_NOEXEC | os.ST_NOSUID | os.ST_NODEV)
    return str(place) if is_usable and found.f_bavail * found.f_frsize > MEMORY_BYTES else None


@contextmanager
def made_once(directory: Path, make: Callable[[Path], object]) -> Iterator[Path]:
    """Make the directory unless another worker has; remove it at the end unless another one still uses it."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    made = directory.with_suffix(".made")
    with directory.with_suffix(".users").open("w") as users:
        with _locked(directory):
            fcntl.flock(users, fcntl.LOCK_SH)
            if not made.exists():
                shutil.rmtree(directory, ignore_errors=True)
                make(directory)
                made.touch()
        yield directory
        with _locked(directory), suppress(BlockingIOError):
            fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
            made.unlink()
            shutil.rmtree(directory)


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Be the only worker that makes or removes the directory."""
    with directory.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
