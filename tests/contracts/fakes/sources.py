"""The in-memory fake of the Sources: repositories are what a test says; trees lie in a directory."""

from __future__ import annotations

import asyncio
import hashlib
import io
import re
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from rolloutd.errors import NotFound, Refused, SourceFailed
from rolloutd.files.source_archive import TreeEntry, hash_entries
from rolloutd.ports import PinnedSource

SOURCE = PinnedSource("tree", "0" * 64)


async def find_source(rollout: str) -> PinnedSource:
    """Return a source for each rollout, for daemons whose runner is a fake."""
    return SOURCE


class FakeSourceStore:
    """ports.Sources; `commit` is what a user pushes to a repository.

    While `find_may_return` is clear, a tree that was asked for is not found yet.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._refs: dict[tuple[str, str], tuple[str, str]] = {}
        self._commits: dict[str, Mapping[str, str]] = {}
        self.answers: dict[str, asyncio.Event] = {}
        """When the servers of these repositories answer; others do at once."""
        self.find_was_called = asyncio.Event()
        self.find_may_return = asyncio.Event()
        self.find_may_return.set()

    def commit(
        self, url: str, files: Mapping[str, str], branches: Iterable[str], tags: Iterable[str] = ()
    ) -> str:
        """Let the refs of a repository name a new commit; return its id."""
        commit = hashlib.sha1(repr((url, sorted(files.items()))).encode()).hexdigest()
        self._commits[commit] = files
        named = {commit: "commit", **dict.fromkeys(branches, "branch"), **dict.fromkeys(tags, "tag")}
        for ref, kind in named.items():
            self._refs[url, ref] = (commit, kind)
        return commit

    async def pin_git(self, url: str, ref: str) -> PinnedSource:
        """Give the commit that the ref names now."""
        if not re.fullmatch(r"https://[^-\s]\S*", url):
            raise Refused("source", f"{url!r} is not a git URL")
        if not re.fullmatch(r"\w[\w./-]*", ref) or ".." in ref or ref.endswith(".lock"):
            raise Refused("source", f"{ref!r} is not a git branch, tag or commit")
        if url in self.answers:
            await self.answers[url].wait()
        if (url, ref) not in self._refs:
            raise SourceFailed(f"{url} has no branch and no tag {ref!r}")
        commit, kind = self._refs[url, ref]
        pinned = PinnedSource("git", commit, url, ref, kind)
        leaves = [TreeEntry(name, text.encode()) for name, text in self._commits[pinned.pin].items()]
        return self._store(pinned, leaves)

    async def store_upload(self, archive: bytes) -> PinnedSource:
        """Keep a well-meant archive."""
        leaves = []
        try:
            with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
                for member in tar:
                    content = None if member.issym() else tar.extractfile(member)
                    data = member.linkname.encode() if content is None else content.read()
                    leaves.append(
                        TreeEntry(member.name, data, bool(member.mode & 0o100 and content), content is None)
                    )
        except tarfile.TarError as error:
            raise Refused("upload", f"the upload is not a tar archive: {error}") from error
        return self._store(PinnedSource("tree", hash_entries(leaves)), leaves)

    async def pin_upload(self, upload: str) -> PinnedSource:
        return PinnedSource("tree", upload)

    def tree_path(self, pinned: PinnedSource) -> Path:
        """Give the directory of a kept tree."""
        if not self._directory_of(pinned).is_dir():
            raise NotFound(f"the tree {pinned.kind} {pinned.pin} is not kept here")
        return self._directory_of(pinned)

    async def find_tree(self, pinned: PinnedSource) -> Path:
        self.find_was_called.set()
        await self.find_may_return.wait()
        return self.tree_path(pinned)

    def _directory_of(self, pinned: PinnedSource) -> Path:
        return self._directory / f"{pinned.kind}-{pinned.pin}"

    def _store(self, pinned: PinnedSource, leaves: Iterable[TreeEntry]) -> PinnedSource:
        if not self._directory_of(pinned).is_dir():
            for leaf in leaves:
                path = self._directory_of(pinned) / leaf.path
                path.parent.mkdir(parents=True, exist_ok=True)
                if leaf.is_symlink:
                    path.symlink_to(leaf.content.decode())
                else:
                    path.write_bytes(leaf.content)
                    path.chmod(0o755 if leaf.is_executable else 0o644)
        return pinned
