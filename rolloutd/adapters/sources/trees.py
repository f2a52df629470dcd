"""The kept trees: each under the name of its pin, complete or not there at all.

A tree is written beside its place and renamed into it once it is on the disk,
so whoever finds a name finds a whole tree, after a power cut too.  What a tree
contains, and who may run it, is not known here.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from rolloutd.adapters.sources.git import GitCache
from rolloutd.adapters.sources.upload import read_archive, write_leaves
from rolloutd.errors import NotFound
from rolloutd.packing import hash_leaves
from rolloutd.ports import Pinned

STAGED = ".staged-"
"""How the name of a tree begins that is not whole yet."""

GIT = "git"
TREE = "tree"

_PIN = {GIT: re.compile(r"[0-9a-f]{40}([0-9a-f]{24})?"), TREE: re.compile(r"[0-9a-f]{64}")}


def make(state_dir: Path) -> TreeSources:
    """Return the daemon's sources, kept under its state directory."""
    return TreeSources(state_dir)


class TreeSources:
    """ports.Sources under `state_dir`; `allow_local` lets git read paths of this machine (for tests).

    Made by the one daemon that holds the state directory: what a crash left
    half-written there is removed.
    """

    def __init__(self, state_dir: Path, *, allow_local: bool = False) -> None:
        self._trees = state_dir / "trees"
        for left in self._trees.glob(f"{STAGED}*"):
            shutil.rmtree(left) if left.is_dir() else left.unlink()
        self._git = GitCache(state_dir / "git", allow_local=allow_local)

    async def pin_git(self, url: str, ref: str) -> Pinned:
        """Resolve a branch, a tag or a commit and keep its tree; raises SourceFailed, Refused."""
        kept = self._place(Pinned(GIT, ref)) if _PIN[GIT].fullmatch(ref) else None
        if kept is not None and kept.is_dir():
            self._git.check(url, ref)
            return Pinned(GIT, ref)
        async with self._git.fetched(url, ref) as commit:
            place = self._place(Pinned(GIT, commit.id))
            if not place.is_dir():
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
            raise NotFound(f"the tree {pinned.kind} {pinned.pin} is not kept here; submit the plan again")
        return self._place(pinned)

    def _place(self, pinned: Pinned) -> Path:
        return self._trees / f"{pinned.kind}-{pinned.pin}"

    def _stage(self) -> Path:
        self._trees.mkdir(parents=True, exist_ok=True, mode=0o700)
        return Path(tempfile.mkdtemp(prefix=STAGED, dir=self._trees))

    def _keep(self, archive: bytes) -> Pinned:
        leaves = read_archive(archive)
        pinned = Pinned(TREE, hash_leaves(leaves))
        if not self._place(pinned).is_dir():
            self._write(lambda staged: write_leaves(leaves, staged), self._place(pinned))
        return pinned

    def _write(self, fill: Callable[[Path], None], place: Path) -> None:
        staged = self._stage()
        try:
            fill(staged)
            _settle(staged, place)
        finally:
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
