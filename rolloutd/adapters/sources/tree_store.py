"""Store of source trees by pin, each complete or absent.

Pinning a tree touches it, so that retention keeps a tree that is about to be used.
"""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path

from rolloutd.adapters.directory_store import DirectoryStore
from rolloutd.adapters.sources.git import COMMIT, GitCache, TrustedKeys
from rolloutd.adapters.sources.upload import read_archive, write_entries
from rolloutd.concurrency import threads
from rolloutd.errors import NotFound, StoreFailed
from rolloutd.files.source_archive import hash_entries, require_links_inside
from rolloutd.ports import ArtifactStore, PinnedSource
from rolloutd.texts.formats import format_size
from rolloutd.texts.secret_urls import without_secret

GIT_KIND = "git"
TREE_KIND = "tree"

TREES_DIRECTORY = "trees"

MIN_FREE_BYTES = 512 * 1024 * 1024
"""Free space that no source may use, at most a tenth of the disk: on a full disk no node starts.

Each member of a team may store sources, and retention removes them only after days.
"""

_PIN_PATTERNS = {GIT_KIND: re.compile(r"[0-9a-f]{40}([0-9a-f]{24})?"), TREE_KIND: re.compile(r"[0-9a-f]{64}")}


def tree_name(pinned: PinnedSource) -> str:
    return f"{pinned.kind}-{pinned.pin}"


def tree_directory(files_dir: Path, pinned: PinnedSource) -> Path:
    """Return the directory of a pin's tree, which may not exist."""
    return files_dir / TREES_DIRECTORY / tree_name(pinned)


class TreeStore:
    """ports.SourceStore under `files_dir`; `allow_local` is for tests.

    Mirrors of git repositories are in `git_dir` (default: there too): only this machine uses them.

    With `trusted_keys`, a git source needs a signature by one of them.  `prepare` is called with each
    tree that is pinned.
    """

    def __init__(
        self,
        files_dir: Path,
        *,
        trees: DirectoryStore | None = None,
        git_dir: Path | None = None,
        trusted_keys: TrustedKeys | None = None,
        prepare: Callable[[Path], Awaitable[str]] | None = None,
        allow_local: bool = False,
    ) -> None:
        self._trees = trees or DirectoryStore(files_dir / TREES_DIRECTORY)
        self._git = GitCache(git_dir or files_dir / "git", trusted_keys, allow_local=allow_local)
        self._is_verified = trusted_keys is not None
        self._prepare = prepare

    @property
    def artifact_stores(self) -> Sequence[ArtifactStore]:
        """The trees, and the mirrors from which they were taken."""
        return (self._trees, self._git)

    async def pin_git(self, url: str, ref: str) -> PinnedSource:
        return await self._prepared(await self._pin_git(url, ref))

    async def store_upload(self, archive: bytes) -> PinnedSource:
        entries = await threads.FILES.run(read_archive, archive)
        pinned = PinnedSource(TREE_KIND, await threads.FILES.run(hash_entries, entries))
        if not await self._is_stored(pinned):
            await self._store(pinned, lambda staged: threads.FILES.run(write_entries, entries, staged))
        return await self._prepared(pinned)

    async def pin_upload(self, upload: str) -> PinnedSource:
        return await self._prepared(PinnedSource(TREE_KIND, upload))

    async def _prepared(self, pinned: PinnedSource) -> PinnedSource:
        if self._prepare is None:
            return pinned
        return replace(pinned, requirements=await self._prepare(self.tree_path(pinned)))

    async def _pin_git(self, url: str, ref: str) -> PinnedSource:
        # The tree of a named commit needs no fetch, unless its signature must be verified.
        if _PIN_PATTERNS[GIT_KIND].fullmatch(ref) and not self._is_verified:
            pinned = PinnedSource(GIT_KIND, ref, without_secret(url), ref, COMMIT)
            if await self._is_stored(pinned):
                self._git.validate(url, ref)
                return pinned
        await threads.FILES.run(self._require_free_space)
        async with self._git.fetch(url, ref) as commit:
            pinned = PinnedSource(GIT_KIND, commit.id, without_secret(url), ref, commit.ref_kind)
            if not await self._is_stored(pinned):
                await self._store(pinned, commit.export_to)
        return pinned

    async def _is_stored(self, pinned: PinnedSource) -> bool:
        """Return whether the tree is stored; raises Refused if a link leads out of it."""
        name = tree_name(pinned)
        if not await self._trees.touch(name):
            return False
        # Older versions stored trees of git with such links, and an upgrade keeps the trees.
        await threads.FILES.run(require_links_inside, self._trees.parent / name)
        return True

    def tree_path(self, pinned: PinnedSource) -> Path:
        pattern, path = _PIN_PATTERNS.get(pinned.kind), self._trees.parent / tree_name(pinned)
        if pattern is None or not pattern.fullmatch(pinned.pin) or not path.is_dir():
            where = self._trees.parent / f"{pinned.kind}-{pinned.pin[:12]}..."
            raise NotFound(f"the playbooks are no longer stored ({where}): submit the same plan again")
        return path

    async def find_tree(self, pinned: PinnedSource) -> Path:
        with contextlib.suppress(NotFound):
            return self.tree_path(pinned)
        pattern = _PIN_PATTERNS.get(pinned.kind)
        if pattern is not None and pattern.fullmatch(pinned.pin):
            await self._trees.find(tree_name(pinned))
        return self.tree_path(pinned)

    async def _store(self, pinned: PinnedSource, fill: Callable[[Path], Awaitable[None]]) -> None:
        """Store the tree that `fill` writes into an empty directory, if no link leads out of it."""
        staged = None
        try:
            await threads.FILES.run(self._require_free_space)
            staged = await threads.FILES.run(self._trees.stage)
            await fill(staged)
            await threads.FILES.run(require_links_inside, staged)
            await self._trees.publish(staged, tree_name(pinned))
        except OSError as error:
            raise StoreFailed(
                f"the tree cannot be stored in {self._trees.parent}: {error.strerror}"
            ) from error
        finally:
            if staged is not None:
                await threads.FILES.run(shutil.rmtree, staged, ignore_errors=True)

    def _require_free_space(self) -> None:
        trees = self._trees.parent
        trees.mkdir(parents=True, exist_ok=True, mode=0o700)
        disk = shutil.disk_usage(trees)
        if disk.free < min(MIN_FREE_BYTES, disk.total // 10):
            raise StoreFailed(
                f"{trees}: {format_size(disk.free)} free, too little to store a source; free some"
            )
