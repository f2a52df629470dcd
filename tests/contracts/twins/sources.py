"""The in-memory twin of the Sources: repositories are what a test says; trees lie in a directory."""

from __future__ import annotations

import hashlib
import io
import re
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from rolloutd.errors import NotFound, Refused, SourceFailed
from rolloutd.packing import Leaf, hash_leaves
from rolloutd.ports import Pinned


class FakeSources:
    """ports.Sources; `commit` is what somebody pushes to a repository."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._refs: dict[tuple[str, str], str] = {}
        self._kept: set[Pinned] = set()
        self._commits: dict[str, Mapping[str, str]] = {}

    def commit(self, url: str, files: Mapping[str, str], refs: Iterable[str]) -> str:
        """Let the refs of a repository name a new commit; return its id."""
        commit = hashlib.sha1(repr((url, sorted(files.items()))).encode()).hexdigest()
        self._commits[commit] = files
        for ref in (*refs, commit):
            self._refs[url, ref] = commit
        return commit

    async def pin_git(self, url: str, ref: str) -> Pinned:
        """Give the commit that the ref names now."""
        if not re.fullmatch(r"https://[^-\s]\S*", url):
            raise Refused("source", f"{url!r} is no git url")
        if not re.fullmatch(r"\w[\w./-]*", ref) or ".." in ref or ref.endswith(".lock"):
            raise Refused("source", f"{ref!r} is no git branch, tag or commit")
        if (url, ref) not in self._refs:
            raise SourceFailed(f"{url} has no branch and no tag {ref!r}")
        pinned = Pinned("git", self._refs[url, ref])
        leaves = [Leaf(name, text.encode()) for name, text in self._commits[pinned.pin].items()]
        return self._keep(pinned, leaves)

    async def keep_upload(self, archive: bytes) -> Pinned:
        """Keep a well-meant archive."""
        leaves = []
        try:
            with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
                for member in tar:
                    content = None if member.issym() else tar.extractfile(member)
                    data = member.linkname.encode() if content is None else content.read()
                    leaves.append(
                        Leaf(member.name, data, bool(member.mode & 0o100 and content), content is None)
                    )
        except tarfile.TarError as error:
            raise Refused("upload", f"the upload is not a tar archive: {error}") from error
        return self._keep(Pinned("tree", hash_leaves(leaves)), leaves)

    def tree(self, pinned: Pinned) -> Path:
        """Give the directory of a kept tree."""
        if pinned not in self._kept:
            raise NotFound(f"the tree {pinned.kind} {pinned.pin} is not kept here")
        return self._place(pinned)

    def _place(self, pinned: Pinned) -> Path:
        return self._directory / f"{pinned.kind}-{pinned.pin}"

    def _keep(self, pinned: Pinned, leaves: Iterable[Leaf]) -> Pinned:
        if pinned not in self._kept:
            for leaf in leaves:
                path = self._place(pinned) / leaf.path
                path.parent.mkdir(parents=True, exist_ok=True)
                if leaf.link:
                    path.symlink_to(leaf.content.decode())
                else:
                    path.write_bytes(leaf.content)
                    path.chmod(0o755 if leaf.executable else 0o644)
            self._kept.add(pinned)
        return pinned
