"""Directories by name under one parent, each complete or absent, also after a power failure.

A directory is written to a staging directory, synced and renamed; a removal renames first.  Touching a
directory restarts its retention period.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

from rolloutd.concurrency import threads
from rolloutd.ports import Artifact

STAGING_PREFIX = ".staged-"
"""Name prefix of an incomplete directory."""


class DirectoryStore:
    """ports.ArtifactStore of directories; only the daemon that holds the state directory may create it."""

    def __init__(self, parent: Path) -> None:
        """Remove what a crash left incomplete; `parent` need not exist."""
        self.parent = parent
        self._touch_lock = threading.Lock()
        for leftover in parent.glob(f"{STAGING_PREFIX}*"):
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()

    async def list_artifacts(self) -> Sequence[Artifact]:
        return await threads.FILES.run(self._list_artifacts)

    async def remove(self, name: str, *, unmodified_since: float) -> bool:
        return await threads.FILES.run(self._remove, name, unmodified_since)

    def stage(self) -> Path:
        """Create an empty directory that publish() completes."""
        self.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        return Path(tempfile.mkdtemp(prefix=STAGING_PREFIX, dir=self.parent))

    def publish(self, staged: Path, name: str, *, mode: int = 0o755) -> None:
        """Sync a staged directory and give it its name; one of this name has the same content and stays."""
        target = self.parent / name
        for directory, _, files in os.walk(staged):
            for file in files:
                path = Path(directory, file)
                if not path.is_symlink():
                    _sync(path)
            _sync(Path(directory))
        staged.chmod(mode)
        try:
            staged.rename(target)
        except OSError:
            # Another task may have published the same content meanwhile.
            if not target.is_dir():
                raise
        # A name is on disk only with its directory.
        _sync(target.parent)

    def touch(self, name: str) -> bool:
        """Return whether a directory exists, and restart its retention period."""
        with self._touch_lock:
            if not (self.parent / name).is_dir():
                return False
            os.utime(self.parent / name)
            return True

    def _list_artifacts(self) -> Sequence[Artifact]:
        found = []
        for path in sorted(self.parent.glob("[!.]*")):
            with contextlib.suppress(FileNotFoundError):
                found.append(Artifact(path.name, path.stat().st_mtime))
        return found

    def _remove(self, name: str, unmodified_since: float) -> bool:
        path, removing = self.parent / name, self.parent / f"{STAGING_PREFIX}gone-{name}"
        with self._touch_lock:
            if path.is_dir() and path.stat().st_mtime > unmodified_since:
                return False
            with contextlib.suppress(FileNotFoundError):
                path.rename(removing)
        shutil.rmtree(removing, ignore_errors=True)
        return True


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
