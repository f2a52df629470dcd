"""Git repositories, by the git command: a ref becomes a commit, a commit becomes files.

Each url has a bare cache of its own.  A url is a client's word, so it may name a
server, never a path of this machine, and nothing in it can become an option.
git asks nobody for a password: what is not configured for the daemon's user
fails.  Where the files are kept is not known here.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import re
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from rolloutd.errors import Refused, SourceFailed

GIT_TIMEOUT_S = 180.0
"""For one git command: a shallow fetch takes seconds; a repository that needs more stops a submit."""

MAX_TREE_BYTES = 256 * 1024 * 1024
"""Of one commit's files: the daemon's disk holds one tree per pin."""

MAX_TREE_FILES = 100_000
"""Of one commit: each costs an inode."""

MESSAGE_LENGTH = 600
"""Kept of what git complains of: its last lines say why."""

OUTPUT_BYTES = 64 * 1024 * 1024
"""Kept of an answer: the listing of a tree of that many files, or of all refs of a large server."""

_SERVER = re.compile(r"(?:https?|ssh|git)://[^-/\s][^\s]*")
_SCP_LIKE = re.compile(
    r"(?:[A-Za-z0-9_.][A-Za-z0-9_.-]*@)?[A-Za-z0-9_.][A-Za-z0-9_.-]*:(?![:/]{2})[^-:\s][^\s]*"
)
_REF = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._/@+#=-]*")
_COMMIT = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")
_ABBREVIATED = re.compile(r"[0-9a-f]{7,63}")


@dataclass(frozen=True, slots=True)
class Commit:
    """A fetched commit; its objects stay for as long as the cache is held."""

    id: str
    cache: Path

    async def write_to(self, directory: Path) -> None:
        """Write the commit's files into an empty directory; raises SourceFailed when it cannot be kept."""
        await self._check()
        index = directory.parent / f"{directory.name}.index"
        try:
            environment = {"GIT_INDEX_FILE": str(index), "GIT_WORK_TREE": str(directory)}
            await _git(self.cache, "read-tree", self.id, environment=environment)
            await _git(self.cache, "checkout-index", "--all", cwd=directory, environment=environment)
        finally:
            index.unlink(missing_ok=True)

    async def _check(self) -> None:
        listing = await _git(self.cache, "ls-tree", "-r", "-l", "-z", self.id)
        size = count = 0
        for line in listing.split("\0"):
            meta, _, path = line.partition("\t")
            if not path:
                continue
            mode, _, _, length = meta.split()
            if mode == "160000":
                raise SourceFailed(f"{path} is a git submodule, which is not fetched; put its files there")
            size, count = size + int(length), count + 1
        if size > MAX_TREE_BYTES or count > MAX_TREE_FILES:
            raise SourceFailed(
                f"commit {self.id[:12]} has {count} files of {size // 1024**2} MiB; at most {MAX_TREE_FILES} "
                f"of {MAX_TREE_BYTES // 1024**2} MiB are kept"
            )


class GitCache:
    """Bare repositories under `directory`, one per url; one fetch of a url at a time."""

    def __init__(self, directory: Path, *, allow_local: bool = False) -> None:
        self._directory = directory
        self._allow_local = allow_local
        self._locks: dict[Path, asyncio.Lock] = {}

    def check(self, url: str, ref: str) -> None:
        """Raise Refused for a url or a ref that the daemon does not hand to git."""
        local = self._allow_local and re.fullmatch(r"(file://)?/\S+", url)
        if not (local or _SERVER.fullmatch(url) or _SCP_LIKE.fullmatch(url)):
            raise Refused(
                "source",
                f"{url!r} is no git url that the daemon opens; allowed are https://, ssh://, git:// and "
                "user@host:path, never a path of the daemon's machine (give `path` for a directory of yours)",
            )
        if not _REF.fullmatch(ref) or ".." in ref or "@{" in ref or ref.endswith((".lock", "/", ".")):
            raise Refused("source", f"{ref!r} is no git branch, tag or commit")

    @contextlib.asynccontextmanager
    async def fetched(self, url: str, ref: str) -> AsyncIterator[Commit]:
        """Yield the commit that the ref means now, fetched; raises SourceFailed."""
        self.check(url, ref)
        cache = self._directory / f"{hashlib.sha256(url.encode()).hexdigest()[:24]}.git"
        async with self._locks.setdefault(cache, asyncio.Lock()):
            # We hold the cache, so a lock in it is that of a git that was killed.
            for left in (*cache.glob("*.lock"), *(cache / "refs").rglob("*.lock")):
                left.unlink()
            if not (cache / "HEAD").is_file():
                cache.mkdir(parents=True, exist_ok=True, mode=0o700)
                await _git(cache, "init", "--quiet", "--bare")
            commit = Commit(await self._resolve(cache, url, ref), cache)
            # Without a ref of its own, git would throw the commit away some day.
            await _git(cache, "update-ref", f"refs/rolloutd/{commit.id}", commit.id)
            yield commit

    async def _resolve(self, cache: Path, url: str, ref: str) -> str:
        protocols = "http:https:ssh:git" + (":file" if self._allow_local else "")
        remote = _Remote(cache, url, {"GIT_ALLOW_PROTOCOL": protocols})
        if _COMMIT.fullmatch(ref):
            return await remote.fetch_commit(ref)
        name = await remote.find(ref)
        if name is not None:
            return await remote.fetch_ref(name)
        if _ABBREVIATED.fullmatch(ref):
            return await remote.fetch_commit(ref)
        raise SourceFailed(f"{_public(url)} has no branch and no tag {ref!r}")


@dataclass(frozen=True, slots=True)
class _Remote:
    """One repository elsewhere, and the cache that it is fetched into."""

    cache: Path
    url: str
    environment: dict[str, str]

    async def find(self, ref: str) -> str | None:
        """Return the full name of a ref, a tag before a branch, as git itself reads it."""
        listing = await self._call("ls-remote", "--", self.url, ref, f"refs/tags/{ref}", f"refs/heads/{ref}")
        names = {line.partition("\t")[2] for line in listing.splitlines()}
        wanted = (
            ref if ref.startswith("refs/") or ref == "HEAD" else "",
            f"refs/tags/{ref}",
            f"refs/heads/{ref}",
        )
        return next((name for name in wanted if name in names), None)

    async def fetch_ref(self, name: str) -> str:
        """Fetch a ref and return its commit."""
        await self._fetch(name)
        return await self._commit("FETCH_HEAD")

    async def fetch_commit(self, commit: str) -> str:
        """Fetch a commit by its id; by way of all branches and tags where the server gives no single ones."""
        try:
            return await self._commit(commit)
        except SourceFailed:
            pass
        try:
            if _COMMIT.fullmatch(commit):
                await self._fetch(commit)
                return await self._commit(commit)
        except SourceFailed:
            pass
        shallow = ["--unshallow"] if (self.cache / "shallow").exists() else []
        refs = ("+refs/heads/*:refs/remotes/all/*", "+refs/tags/*:refs/tags/*")
        await self._call("fetch", "--quiet", "--force", *shallow, "--", self.url, *refs)
        return await self._commit(commit)

    async def _fetch(self, name: str) -> None:
        fetch = ("fetch", "--quiet", "--no-tags", "--no-write-commit-graph")
        try:
            await self._call(*fetch, "--depth=1", "--", self.url, name)
        except SourceFailed as error:
            if "shallow" not in str(error):
                raise
            # Plain web servers (the "dumb" protocol) cannot give a part of the history.
            await self._call(*fetch, "--", self.url, name)

    async def _commit(self, name: str) -> str:
        return (await self._call("rev-parse", "--verify", "--quiet", f"{name}^{{commit}}")).strip()

    async def _call(self, *arguments: str) -> str:
        try:
            return await _git(self.cache, *arguments, environment=self.environment)
        except SourceFailed as error:
            text = str(error).replace(self.url, _public(self.url))
            raise SourceFailed(f"{_public(self.url)}: {text}") from None


def _public(url: str) -> str:
    """Return the url without the password or token that it may hold."""
    return re.sub(r"(?<=://)[^/@\s]+@", "", url)


async def _git(
    cache: Path, *arguments: str, cwd: Path | None = None, environment: dict[str, str] | None = None
) -> str:
    """Run git on a cache and return its stdout; raises SourceFailed."""
    kept = {name: value for name, value in os.environ.items() if name not in _OF_ANOTHER_REPOSITORY}
    try:
        process = await asyncio.create_subprocess_exec(
            "git",
            f"--git-dir={cache}",
            *arguments,
            cwd=cwd or cache,
            env={**kept, **_QUIET, **(environment or {})},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,  # no terminal to ask on, and one group to end
        )
    except OSError as error:
        raise SourceFailed(f"git cannot be started: {error}; is it installed?") from error
    try:
        async with asyncio.timeout(GIT_TIMEOUT_S):
            stdout, stderr = await asyncio.gather(_read(process.stdout), _read(process.stderr))
            status = await process.wait()
    except TimeoutError:
        raise SourceFailed(f"git {arguments[0]} did not end within {GIT_TIMEOUT_S:g}s") from None
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    if status != 0:
        said = stderr.decode(errors="replace").strip()[-MESSAGE_LENGTH:]
        raise SourceFailed(f"git {arguments[0]} failed: {said or f'exit status {status}'}")
    if len(stdout) > OUTPUT_BYTES:
        raise SourceFailed(f"git {arguments[0]} answered more than {OUTPUT_BYTES // 1024**2} MiB")
    return stdout.decode(errors="surrogateescape")


async def _read(stream: asyncio.StreamReader | None) -> bytes:
    """Read to the end and keep the beginning, a byte more than is allowed."""
    assert stream is not None
    kept = bytearray()
    while chunk := await stream.read(64 * 1024):
        kept += chunk[: max(0, OUTPUT_BYTES + 1 - len(kept))]
    return bytes(kept)


_OF_ANOTHER_REPOSITORY = frozenset(
    {"GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_OBJECT_DIRECTORY", "GIT_COMMON_DIR", "GIT_NAMESPACE"}
)
"""What git's hooks set: a daemon or a test that was started by one must not work on its repository."""

_QUIET = {
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_ASKPASS": "",
    "SSH_ASKPASS": "",
    "GCM_INTERACTIVE": "never",
    "GIT_OPTIONAL_LOCKS": "0",
    "LC_ALL": "C.UTF-8",
}
"""git asks nobody, and complains in English."""
