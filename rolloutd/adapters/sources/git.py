"""Git repositories through the git command, one bare cache per URL.

A client supplies the URL, so it may name a server, never a path of this machine, and nothing in it can become
an option.  git never prompts: it fails without credentials configured for the daemon's user.
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
"""Limit of one git command: a shallow fetch takes seconds, and a submit waits for it."""

MAX_TREE_BYTES = 256 * 1024 * 1024
"""Limit of one commit's files: the daemon's disk holds one tree per pin."""

MAX_TREE_FILES = 100_000
"""Limit of one commit: each file costs an inode."""

MAX_MESSAGE_LENGTH = 600
"""Limit of quoted stderr: git's last lines give the cause."""

MAX_OUTPUT_BYTES = 64 * 1024 * 1024
"""Limit of git's output: the listing of the largest tree, or of all refs of a large server."""

_SERVER_URL = re.compile(r"(?:https?|ssh|git)://[^-/\s][^\s]*")
_SCP_LIKE_URL = re.compile(
    r"(?:[A-Za-z0-9_.][A-Za-z0-9_.-]*@)?[A-Za-z0-9_.][A-Za-z0-9_.-]*:(?![:/]{2})[^-:\s][^\s]*"
)
_REF = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._/@+#=-]*")
_COMMIT = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")
_ABBREVIATED_COMMIT = re.compile(r"[0-9a-f]{7,63}")

COMMIT = "commit"
"""The `ref_kind` of a commit that was named by its id."""

_REF_KINDS = {"refs/heads": "branch", "refs/tags": "tag"}


@dataclass(frozen=True, slots=True)
class Commit:
    """A fetched commit; its objects exist while the cache is locked.

    `ref_kind` is what named it: a `branch`, a `tag`, a `commit` or another `ref`.
    """

    id: str
    ref_kind: str
    cache: Path

    async def export_to(self, directory: Path) -> None:
        """Write the commit's files into an empty directory; raises SourceFailed if it exceeds a limit."""
        await self._check_limits()
        index = directory.parent / f"{directory.name}.index"
        try:
            environment = {"GIT_INDEX_FILE": str(index), "GIT_WORK_TREE": str(directory)}
            await _run_git(self.cache, "read-tree", self.id, environment=environment)
            await _run_git(self.cache, "checkout-index", "--all", cwd=directory, environment=environment)
        finally:
            index.unlink(missing_ok=True)

    async def _check_limits(self) -> None:
        listing = await _run_git(self.cache, "ls-tree", "-r", "-l", "-z", self.id)
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

    def validate(self, url: str, ref: str) -> None:
        """Raise Refused for a URL or a ref that the daemon does not pass to git."""
        local = self._allow_local and re.fullmatch(r"(file://)?/\S+", url)
        if not (local or _SERVER_URL.fullmatch(url) or _SCP_LIKE_URL.fullmatch(url)):
            raise Refused(
                "source",
                f"{url!r} is not a git URL that the daemon opens; allowed are https://, ssh://, git:// and "
                "user@host:path, never a path of the daemon's machine (give `path` for a directory of yours)",
            )
        if not _REF.fullmatch(ref) or ".." in ref or "@{" in ref or ref.endswith((".lock", "/", ".")):
            raise Refused("source", f"{ref!r} is not a git branch, tag or commit")

    @contextlib.asynccontextmanager
    async def fetch(self, url: str, ref: str) -> AsyncIterator[Commit]:
        """Fetch the ref and yield its commit; raises SourceFailed."""
        self.validate(url, ref)
        cache = self._directory / f"{hashlib.sha256(url.encode()).hexdigest()[:24]}.git"
        async with self._locks.setdefault(cache, asyncio.Lock()):
            # We hold the cache, so a killed git left any lock in it.
            for stale_lock in (*cache.glob("*.lock"), *(cache / "refs").rglob("*.lock")):
                stale_lock.unlink()
            if not (cache / "HEAD").is_file():
                cache.mkdir(parents=True, exist_ok=True, mode=0o700)
                await _run_git(cache, "init", "--quiet", "--bare")
            commit = await self._resolve(cache, url, ref)
            # Without a ref, git would delete the commit eventually.
            await _run_git(cache, "update-ref", f"refs/rolloutd/{commit.id}", commit.id)
            yield commit

    async def _resolve(self, cache: Path, url: str, ref: str) -> Commit:
        protocols = "http:https:ssh:git" + (":file" if self._allow_local else "")
        remote = _Remote(cache, url, {"GIT_ALLOW_PROTOCOL": protocols})
        if _COMMIT.fullmatch(ref):
            return Commit(await remote.fetch_commit(ref), COMMIT, cache)
        name = await remote.resolve_ref(ref)
        if name is not None:
            kind = _REF_KINDS.get("/".join(name.split("/", 2)[:2]), "ref")
            return Commit(await remote.fetch_ref(name), kind, cache)
        if _ABBREVIATED_COMMIT.fullmatch(ref):
            return Commit(await remote.fetch_commit(ref), COMMIT, cache)
        raise SourceFailed(f"{redact_url(url)} has no branch and no tag {ref!r}")


@dataclass(frozen=True, slots=True)
class _Remote:
    """A remote repository and its cache."""

    cache: Path
    url: str
    environment: dict[str, str]

    async def resolve_ref(self, ref: str) -> str | None:
        """Return the full name of a ref; as in git, a tag wins over a branch."""
        listing = await self._run("ls-remote", "--", self.url, ref, f"refs/tags/{ref}", f"refs/heads/{ref}")
        names = {line.partition("\t")[2] for line in listing.splitlines()}
        candidates = (
            ref if ref.startswith("refs/") or ref == "HEAD" else "",
            f"refs/tags/{ref}",
            f"refs/heads/{ref}",
        )
        return next((name for name in candidates if name in names), None)

    async def fetch_ref(self, name: str) -> str:
        await self._fetch(name)
        return await self._parse_commit("FETCH_HEAD")

    async def fetch_commit(self, commit: str) -> str:
        """Fetch a commit by id, or all branches and tags if the server does not serve single commits."""
        try:
            return await self._parse_commit(commit)
        except SourceFailed:
            pass
        try:
            if _COMMIT.fullmatch(commit):
                await self._fetch(commit)
                return await self._parse_commit(commit)
        except SourceFailed:
            pass
        shallow = ["--unshallow"] if (self.cache / "shallow").exists() else []
        refs = ("+refs/heads/*:refs/remotes/all/*", "+refs/tags/*:refs/tags/*")
        await self._run("fetch", "--quiet", "--force", *shallow, "--", self.url, *refs)
        return await self._parse_commit(commit)

    async def _fetch(self, name: str) -> None:
        fetch = ("fetch", "--quiet", "--no-tags", "--no-write-commit-graph")
        try:
            await self._run(*fetch, "--depth=1", "--", self.url, name)
        except SourceFailed as error:
            if "shallow" not in str(error):
                raise
            # Plain web servers (the "dumb" protocol) cannot serve a shallow history.
            await self._run(*fetch, "--", self.url, name)

    async def _parse_commit(self, name: str) -> str:
        return (await self._run("rev-parse", "--verify", "--quiet", f"{name}^{{commit}}")).strip()

    async def _run(self, *arguments: str) -> str:
        try:
            return await _run_git(self.cache, *arguments, environment=self.environment)
        except SourceFailed as error:
            text = str(error).replace(self.url, redact_url(self.url))
            raise SourceFailed(f"{redact_url(self.url)}: {text}") from None


def redact_url(url: str) -> str:
    """Return the URL without its password or token."""
    return re.sub(r"(?<=://)[^/@\s]+@", "", url)


async def _run_git(
    cache: Path, *arguments: str, cwd: Path | None = None, environment: dict[str, str] | None = None
) -> str:
    inherited = {name: value for name, value in os.environ.items() if name not in _REPOSITORY_VARIABLES}
    try:
        process = await asyncio.create_subprocess_exec(
            "git",
            f"--git-dir={cache}",
            *arguments,
            cwd=cwd or cache,
            env={**inherited, **_NONINTERACTIVE_ENVIRONMENT, **(environment or {})},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,  # git cannot prompt, and one signal ends its process group
        )
    except OSError as error:
        raise SourceFailed(f"git cannot be started: {error}; is it installed?") from error
    try:
        async with asyncio.timeout(GIT_TIMEOUT_S):
            stdout, stderr = await asyncio.gather(
                _read_limited(process.stdout), _read_limited(process.stderr)
            )
            status = await process.wait()
    except TimeoutError:
        raise SourceFailed(f"git {arguments[0]} did not end within {GIT_TIMEOUT_S:g}s") from None
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    if status != 0:
        message = stderr.decode(errors="replace").strip()[-MAX_MESSAGE_LENGTH:]
        raise SourceFailed(f"git {arguments[0]} failed: {message or f'exit status {status}'}")
    if len(stdout) > MAX_OUTPUT_BYTES:
        raise SourceFailed(f"git {arguments[0]} answered more than {MAX_OUTPUT_BYTES // 1024**2} MiB")
    return stdout.decode(errors="surrogateescape")


async def _read_limited(stream: asyncio.StreamReader | None) -> bytes:
    """Read to the end and return the beginning, one byte more than the limit."""
    assert stream is not None
    kept = bytearray()
    while chunk := await stream.read(64 * 1024):
        kept += chunk[: max(0, MAX_OUTPUT_BYTES + 1 - len(kept))]
    return bytes(kept)


_REPOSITORY_VARIABLES = frozenset(
    {"GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_OBJECT_DIRECTORY", "GIT_COMMON_DIR", "GIT_NAMESPACE"}
)
"""Variables of git's hooks: a process started by a hook must not work on the hook's repository."""

_NONINTERACTIVE_ENVIRONMENT = {
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_ASKPASS": "",
    "SSH_ASKPASS": "",
    "GCM_INTERACTIVE": "never",
    "GIT_OPTIONAL_LOCKS": "0",
    "LC_ALL": "C.UTF-8",
}
"""git does not prompt, and reports errors in English."""
