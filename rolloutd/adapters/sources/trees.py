"""The kept trees: each under the name of its pin, complete or not there at all.

A tree is written beside its place and renamed into it once it is on the disk,
so whoever finds a name finds a whole tree, after a power cut too; it goes the
same way back.  Whoever pins a tree touches it, so that one that is about to be
used is not taken for one that nobody needs.  What a tree contains, and who may
run it, is not known here.
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

from rolloutd.adapters.sources.git import GitCache
from rolloutd.adapters.sources.upload import read_archive, write_leaves
from rolloutd.errors import NotFound, StoreFailed
from rolloutd.packing import hash_leaves
from rolloutd.ports import Kept, Pinned

STAGED = ".staged-"
"""How the name of a tree begins that is not whole yet."""

GIT = "git"
TREE = "tree"

_PIN = {GIT: re.compile(r"[0-9a-f]{40}([0-9a-f]{24})?"), TREE: re.compile(r"[0-9a-f]{64}")}


def make(state_dir: Path) -> TreeSources:
    """Return the daemon's sources, kept under its state directory."""
    return TreeSources(state_dir)


def place_of(state_dir: Path, pinned: Pinned) -> Path:
    """Return where the tree of a pin is kept; it may not be there."""
    return state_dir / "trees" / f"{pinned.kind}-{pinned.pin}"


class TreeSources:
    """ports.Sources and ports.Shelf under `state_dir`; `allow_local` lets git read local paths (for tests).

    Made by the one daemon that holds the state directory: what a crash left
    half-written there is removed.
    """

    def __init__(self, state_dir: Path, *, allow_local: bool = False) -> None:
        self._trees = state_dir / "trees"
        for left in self._trees.glob(f"{STAGED}*"):
            shutil.rmtree(left) if left.is_dir() else left.unlink()
        self._touching = threading.Lock()
        self._git = GitCache(state_dir / "git", allow_local=allow_local)

    async def pin_git(self, url: str, ref: str) -> Pinned:
        """Resolve a branch, a tag or a commit and keep its tree; raises SourceFailed, Refused."""
        kept = self._place(Pinned(GIT, ref)) if _PIN[GIT].fullmatch(ref) else None
        if kept is not None and self._touch(kept):
            self._git.check(url, ref)
            return Pinned(GIT, ref)
        async with self._git.fetched(url, ref) as commit:
            place = self._place(Pinned(GIT, commit.id))
            if not self._touch(place):
                staged = await asyncio.to_thread(self._stage)
                try:
                    await commit.write_to(staged)
                    await asyncio.to_thread(_settle, staged, place)
                finally:
                    await asyncio.to_thread(shutil.rmtree, staged, ignore_errors=True)
        return Pinned(GIT, commit.id)

    async def keep_upload(self, archive: bytes) -> Pinned:
        """Keep a tar archive (plain or gzipped) under its content hash; raises Refused for a bad one."""
        return await asyncio.to_thread(self._keep, archive)

    def tree(self, pinned: Pinned) -> Path:
        """Return the directory of a kept tree; raises NotFound."""
        pattern = _PIN.get(pinned.kind)
        if pattern is None or not pattern.fullmatch(pinned.pin) or not self._place(pinned).is_dir():
            where = self._trees / f"{pinned.kind}-{pinned.pin[:12]}..."
            raise NotFound(f"the playbooks are not kept any more ({where}): submit the same plan again")
        return self._place(pinned)

    async def kept(self) -> Sequence[Kept]:
        """Return all trees by the names of their directories."""
        return await asyncio.to_thread(self._kept)

    async def forget(self, name: str, *, untouched_since: float) -> bool:
        """Remove a tree that nobody has pinned since."""
        return await asyncio.to_thread(self._forget, name, untouched_since)

    def _kept(self) -> Sequence[Kept]:
        places = [path for path in self._trees.glob("*-*") if not path.name.startswith(".")]
        return [Kept(path.name, path.stat().st_mtime, path.name) for path in sorted(places)]

    def _forget(self, name: str, untouched_since: float) -> bool:
        place, gone = self._trees / name, self._trees / f"{STAGED}gone-{name}"
        with self._touching:
            if place.is_dir() and place.stat().st_mtime > untouched_since:
                return False
            with contextlib.suppress(FileNotFoundError):
                place.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)
        return True

    def _touch(self, place: Path) -> bool:
        """Say whether a tree is there; it is then kept for as long as one that is new."""
        with self._touching:
            if not place.is_dir():
                return False
            os.utime(place)
            return True

    def _place(self, pinned: Pinned) -> Path:
        return place_of(self._trees.parent, pinned)

    def _stage(self) -> Path:
        self._trees.mkdir(parents=True, exist_ok=True, mode=0o700)
        return Path(tempfile.mkdtemp(prefix=STAGED, dir=self._trees))

    def _keep(self, archive: bytes) -> Pinned:
        leaves = read_archive(archive)
        pinned = Pinned(TREE, hash_leaves(leaves))
        if not self._touch(self._place(pinned)):
            self._write(lambda staged: write_leaves(leaves, staged), self._place(pinned))
        return pinned

    def _write(self, fill: Callable[[Path], None], place: Path) -> None:
        staged = None
        try:
            staged = self._stage()
            fill(staged)
            _settle(staged, place)
        except OSError as error:
            raise StoreFailed(f"the tree cannot be kept in {self._trees}: {error.strerror}") from error
        finally:
            if staged is not None:
                shutil.rmtree(staged, ignore_errors=True)


def _settle(staged: Path, place: Path) -> None:
    """Bring a tree to the disk, then to its place; somebody who was there first has the same content."""
    for directory, _, files in os.walk(staged):
        for name in files:
            path = Path(directory, name)
            if not path.is_symlink():
                _sync(path)
        _sync(Path(directory))
    staged.chmod(0o755)
    try:
        staged.rename(place)
    except OSError:
        if not place.is_dir():
            raise
    _sync(place.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
