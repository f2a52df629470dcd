"""Directories by name under one parent, each complete or absent, also after a power failure.

With a bucket each is there too, and a directory that another machine has stored is fetched from it.

A directory is written to a staging directory, synced and renamed; a removal renames first.  Touching a
directory restarts its retention period.
"""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rolloutd.concurrency import threads
from rolloutd.ports import Artifact

if TYPE_CHECKING:  # a runner pod, which has no settings, would spend a third of its start on their models
    from rolloutd.adapters.s3_bucket import S3Bucket
    from rolloutd.settings import Settings
    from rolloutd.settings.shared_files import S3Files

STAGING_PREFIX = ".staged-"


def shared_store(settings: Settings, kind: str) -> DirectoryStore:
    """Return the store of one kind of directories that all machines need."""
    if settings.shared_files.s3 is None:
        return DirectoryStore(settings.files_dir / kind)
    return DirectoryStore(settings.files_dir / kind, open_bucket(settings.shared_files.s3, kind))


def open_bucket(settings: S3Files, kind: str) -> S3Bucket:
    # Imported only where the settings name a bucket.
    from rolloutd.adapters.s3_bucket import S3Bucket

    return S3Bucket(settings, kind)


class DirectoryStore:
    """ports.SharedDirectories; only the daemon that holds the state directory may create it.

    With a bucket its functions raise SourceFailed too.
    """

    def __init__(self, parent: Path, bucket: S3Bucket | None = None) -> None:
        """Remove what a crash left incomplete; `parent` need not exist."""
        self.parent = parent
        self._bucket = bucket
        self._threads = threads.FILES if bucket is None else threads.BUCKET
        self._touch_lock = threading.Lock()
        for leftover in parent.glob(f"{STAGING_PREFIX}*"):
            # What cannot be removed is only space: it must not keep the daemon from its start.
            with contextlib.suppress(OSError):
                shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()

    async def list_artifacts(self) -> Sequence[Artifact]:
        return await self._threads.run(self._list_artifacts)

    async def remove(self, name: str, *, unmodified_since: float) -> bool:
        return await self._threads.run(self._remove, name, unmodified_since)

    async def find(self, name: str) -> Path | None:
        path = self.parent / name
        if self._bucket is None or await threads.FILES.run(path.is_dir):
            return path if await threads.FILES.run(path.is_dir) else None
        return path if await self._threads.run(self._fetch, self._bucket, name) else None

    async def find_first(self, prefix: str) -> Path | None:
        """Return the first directory whose name begins so, as find() does."""
        same = await threads.FILES.run(lambda: sorted(self.parent.glob(f"{glob.escape(prefix)}*")))
        if same or self._bucket is None:
            return next(iter(same), None)
        name = await self._threads.run(self._bucket.first_name, prefix)
        return None if name is None else await self.find(name)

    async def share(self, name: str) -> None:
        if self._bucket is not None:
            await self._threads.run(self._bucket.put, name, self.parent / name)

    async def publish(self, staged: Path, name: str, *, mode: int = 0o755) -> None:
        """Sync a staged directory and give it its name; one of this name has the same content and stays."""
        await threads.FILES.run(self._publish, staged, name, mode)
        await self.share(name)

    async def touch(self, name: str) -> bool:
        """Return whether a directory exists, and restart its retention period."""
        if await self.find(name) is None or not await threads.FILES.run(self._touch, name):
            return False
        await self.share(name)
        return True

    def stage(self) -> Path:
        """Create an empty directory that publish() completes."""
        self.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        return Path(tempfile.mkdtemp(prefix=STAGING_PREFIX, dir=self.parent))

    def _publish(self, staged: Path, name: str, mode: int) -> None:
        target = self.parent / name
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
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

    def _fetch(self, bucket: S3Bucket, name: str) -> bool:
        staged = self.stage()
        try:
            if not bucket.fetch(name, staged):
                return False
            self._publish(staged, name, 0o755)
        finally:
            shutil.rmtree(staged, ignore_errors=True)
        return True

    def _touch(self, name: str) -> bool:
        with self._touch_lock:
            if not (self.parent / name).is_dir():
                return False
            os.utime(self.parent / name)
            return True

    def _list_artifacts(self) -> Sequence[Artifact]:
        found: dict[str, float] = {}
        for path in self.parent.glob("[!.]*"):
            with contextlib.suppress(FileNotFoundError):
                found[path.name] = path.stat().st_mtime
        stored = {} if self._bucket is None else self._bucket.names()
        for name, modified_at in stored.items():
            found[name] = max(found.get(name, 0.0), modified_at)
        return [Artifact(name, at) for name, at in sorted(found.items())]

    def _remove(self, name: str, unmodified_since: float) -> bool:
        path, removing = self.parent / name, self.parent / f"{STAGING_PREFIX}gone-{name}"
        with self._touch_lock:
            if path.is_dir() and path.stat().st_mtime > unmodified_since:
                return False
            if self._bucket is not None and not self._bucket.remove(name, unmodified_since):
                return False
            # What an earlier removal left of this name.
            shutil.rmtree(removing, ignore_errors=True)
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
