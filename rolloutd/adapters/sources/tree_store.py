"""Store of source trees by pin, each complete or absent.

A tree is written to a staging directory, synced and renamed, so it is complete even after a power failure; a
removal renames first.  Pinning a tree touches it, so that retention keeps a tree that is about to be used.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from rolloutd.adapters.sources.git import COMMIT, GitCache, redact_url
from rolloutd.adapters.sources.upload import read_archive, write_entries
from rolloutd.errors import NotFound, StoreFailed
from rolloutd.ports import Artifact, PinnedSource
from rolloutd.source_archive import hash_entries

STAGING_PREFIX = ".staged-"
"""Name prefix of an incomplete tree."""

GIT_KIND = "git"
TREE_KIND = "tree"

_PIN_PATTERNS = {GIT_KIND: re.compile(r"[0-9a-f]{40}([0-9a-f]{24})?"), TREE_KIND: re.compile(r"[0-9a-f]{64}")}


def make(state_dir: Path) -> TreeStore:
    return TreeStore(state_dir)


def tree_directory(state_dir: Path, pinned: PinnedSource) -> Path:
    """Return the directory of a pin's tree, which may not exist."""
    return state_dir / "trees" / f"{pinned.kind}-{pinned.pin}"


class TreeStore:
    """ports.SourceStore and ports.ArtifactStore under `state_dir`; `allow_local` is for tests.

    Only the daemon that holds the state directory creates it, so it removes what a crash left incomplete.
    """

    def __init__(self, state_dir: Path, *, allow_local: bool = False) -> None:
        self._trees = state_dir / "trees"
        for leftover in self._trees.glob(f"{STAGING_PREFIX}*"):
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
        self._touch_lock = threading.Lock()
        self._git = GitCache(state_dir / "git", allow_local=allow_local)

    async def pin_git(self, url: str, ref: str) -> PinnedSource:
        existing = (
            self._directory_of(PinnedSource(GIT_KIND, ref))
            if _PIN_PATTERNS[GIT_KIND].fullmatch(ref)
            else None
        )
        if existing is not None and self._touch(existing):
            self._git.validate(url, ref)
            return PinnedSource(GIT_KIND, ref, redact_url(url), ref, COMMIT)
        async with self._git.fetch(url, ref) as commit:
            path = self._directory_of(PinnedSource(GIT_KIND, commit.id))
            if not self._touch(path):
                staged = await asyncio.to_thread(self._create_staging)
                try:
                    await commit.export_to(staged)
                    await asyncio.to_thread(_publish, staged, path)
                finally:
                    await asyncio.to_thread(shutil.rmtree, staged, ignore_errors=True)
        return PinnedSource(GIT_KIND, commit.id, redact_url(url), ref, commit.ref_kind)

    async def store_upload(self, archive: bytes) -> PinnedSource:
        return await asyncio.to_thread(self._store_upload, archive)

    def tree_path(self, pinned: PinnedSource) -> Path:
        pattern = _PIN_PATTERNS.get(pinned.kind)
        if pattern is None or not pattern.fullmatch(pinned.pin) or not self._directory_of(pinned).is_dir():
            where = self._trees / f"{pinned.kind}-{pinned.pin[:12]}..."
            raise NotFound(f"the playbooks are no longer stored ({where}): submit the same plan again")
        return self._directory_of(pinned)

    async def list_artifacts(self) -> Sequence[Artifact]:
        return await asyncio.to_thread(self._list_artifacts)

    async def remove(self, name: str, *, unmodified_since: float) -> bool:
        return await asyncio.to_thread(self._remove, name, unmodified_since)

    def _list_artifacts(self) -> Sequence[Artifact]:
        paths = [path for path in self._trees.glob("*-*") if not path.name.startswith(".")]
        return [Artifact(path.name, path.stat().st_mtime, path.name) for path in sorted(paths)]

    def _remove(self, name: str, unmodified_since: float) -> bool:
        path, removing = self._trees / name, self._trees / f"{STAGING_PREFIX}gone-{name}"
        with self._touch_lock:
            if path.is_dir() and path.stat().st_mtime > unmodified_since:
                return False
            with contextlib.suppress(FileNotFoundError):
                path.rename(removing)
        shutil.rmtree(removing, ignore_errors=True)
        return True

    def _touch(self, path: Path) -> bool:
        """Return whether a tree exists, and restart its retention period."""
        with self._touch_lock:
            if not path.is_dir():
                return False
            os.utime(path)
            return True

    def _directory_of(self, pinned: PinnedSource) -> Path:
        return tree_directory(self._trees.parent, pinned)

    def _create_staging(self) -> Path:
        self._trees.mkdir(parents=True, exist_ok=True, mode=0o700)
        return Path(tempfile.mkdtemp(prefix=STAGING_PREFIX, dir=self._trees))

    def _store_upload(self, archive: bytes) -> PinnedSource:
        leaves = read_archive(archive)
        pinned = PinnedSource(TREE_KIND, hash_entries(leaves))
        if not self._touch(self._directory_of(pinned)):
            self._write_tree(lambda staged: write_entries(leaves, staged), self._directory_of(pinned))
        return pinned

    def _write_tree(self, fill: Callable[[Path], None], path: Path) -> None:
        staged = None
        try:
            staged = self._create_staging()
            fill(staged)
            _publish(staged, path)
        except OSError as error:
            raise StoreFailed(f"the tree cannot be stored in {self._trees}: {error.strerror}") from error
        finally:
            if staged is not None:
                shutil.rmtree(staged, ignore_errors=True)


def _publish(staged: Path, target: Path) -> None:
    """Sync a tree and rename it; a tree that exists already has the same content."""
    for directory, _, files in os.walk(staged):
        for name in files:
            path = Path(directory, name)
            if not path.is_symlink():
                _sync(path)
        _sync(Path(directory))
    staged.chmod(0o755)
    try:
        staged.rename(target)
    except OSError:
        if not target.is_dir():
            raise
    _sync(target.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
