"""Git repositories through the git command, one bare mirror per URL.

A client supplies the URL, so it may name a server, never a path of this machine, and nothing in it can become
an option.  git never prompts: it fails without credentials configured for the daemon's user.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import re
import shutil
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from weakref import WeakValueDictionary

from rolloutd.adapters.command import run_command
from rolloutd.concurrency import threads
from rolloutd.errors import Refused, SourceFailed
from rolloutd.ports import Artifact
from rolloutd.texts.secret_urls import without_secret

MAX_TREE_BYTES = 256 * 1024 * 1024
"""Limit of one commit's files: the daemon's disk holds one tree per pin."""

MAX_TREE_FILES = 100_000
"""Limit of one commit: each file costs an inode."""

MAX_MIRROR_BYTES = 2 * 1024 * 1024 * 1024
"""Size from which a mirror is made again: it only saves a transfer."""

MAX_MIRROR_PACKS = 200
"""Packs from which a mirror is made again: each fetch of a new commit adds one."""

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

_NO_PROGRAM = "/bin/false"
"""What verifies signatures of a kind for which no key is trusted: the daemon user's own keys do not count."""

GIT_TIMEOUT_S = 180.0
"""Limit of one git command: a shallow fetch takes seconds, and a submit waits for it."""

MAX_PACK_BYTES = 1024 * 1024 * 1024
"""Limit of one file that git writes: a server must not fill the disk."""

MAX_MESSAGE_LENGTH = 600
"""Limit of quoted stderr: git's last lines give the cause."""

MAX_OUTPUT_BYTES = 64 * 1024 * 1024
"""Limit of git's output: the listing of the largest tree, or of all refs of a large server."""


@dataclass(frozen=True, slots=True)
class TrustedKeys:
    """Keys whose signatures count: a file of allowed ssh signers, a GnuPG home with OpenPGP keys, or both."""

    allowed_signers: Path | None
    gnupg_home: Path | None

    async def verify_tag(self, cache: Path, tag: str, name: str) -> None:
        """Raise SourceFailed unless the tag object is signed and has this name.

        A server could otherwise show an old signed tag under a new name.
        """
        header = (await run_git(cache, "cat-file", "tag", tag)).partition("\n\n")[0]
        if f"tag {name}" not in header.splitlines():
            raise SourceFailed(f"the tag object of {name} was made for another name")
        await self._verify(cache, "verify-tag", tag)

    async def verify_commit(self, cache: Path, commit: str) -> None:
        """Raise SourceFailed unless the commit is signed."""
        await self._verify(cache, "verify-commit", commit)

    async def _verify(self, cache: Path, command: str, object_id: str) -> None:
        config = {f"gpg.{kind}program": _NO_PROGRAM for kind in ("", "ssh.", "x509.")}
        environment = {}
        if self.allowed_signers is not None:
            config["gpg.ssh.allowedSignersFile"] = str(self.allowed_signers)
            del config["gpg.ssh.program"]
        if self.gnupg_home is not None:
            environment["GNUPGHOME"] = str(self.gnupg_home)
            del config["gpg.program"]
        await run_git(cache, command, object_id, config=config, environment=environment)


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
            await run_git(self.cache, "read-tree", self.id, environment=environment)
            await run_git(self.cache, "checkout-index", "--all", cwd=directory, environment=environment)
        finally:
            index.unlink(missing_ok=True)

    async def _check_limits(self) -> None:
        listing = await run_git(self.cache, "ls-tree", "-r", "-l", "-z", self.id)
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
    """Bare mirrors under `directory`, one per url; one fetch of a url at a time.

    As ports.ArtifactStore it removes mirrors: they save transfers, and a later fetch makes them again.
    """

    def __init__(self, directory: Path, trusted_keys: TrustedKeys | None, *, allow_local: bool) -> None:
        self._directory = directory
        self._trusted_keys = trusted_keys
        self._allow_local = allow_local
        # Weak, because clients choose the URLs, and each would leave a lock.
        self._locks: WeakValueDictionary[Path, asyncio.Lock] = WeakValueDictionary()

    async def list_artifacts(self) -> Sequence[Artifact]:
        mirrors = await threads.FILES.run(lambda: sorted(self._directory.glob("*.git")))
        return [Artifact(path.name, path.stat().st_mtime) for path in mirrors]

    async def remove(self, name: str, *, unmodified_since: float) -> bool:
        mirror = self._directory / name
        async with self._locks.setdefault(mirror, asyncio.Lock()):
            if mirror.is_dir() and mirror.stat().st_mtime > unmodified_since:
                return False
            await threads.FILES.run(_remove_mirror, mirror)
            return True

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
            await threads.FILES.run(_prepare_mirror, cache)
            if not (cache / "HEAD").is_file():
                cache.mkdir(parents=True, exist_ok=True, mode=0o700)
                await run_git(cache, "init", "--quiet", "--bare")
            # Retention removes the mirrors that were not used for long.
            os.utime(cache)
            commit = await self._resolve(cache, url, ref)
            # Without a ref, git would delete the commit eventually.
            await run_git(cache, "update-ref", f"refs/rolloutd/{commit.id}", commit.id)
            yield commit

    async def _resolve(self, cache: Path, url: str, ref: str) -> Commit:
        # A server's redirect must not lead git to `file:` or `ext:`, which read and run things here.
        protocols = "http:https:ssh:git" + (":file" if self._allow_local else "")
        remote = _Remote(cache, url, {"GIT_ALLOW_PROTOCOL": protocols})
        is_commit = _COMMIT.fullmatch(ref) is not None
        name = None if is_commit else await remote.resolve_ref(ref)
        if name is not None:
            commit = Commit(
                await remote.fetch_ref(name), _REF_KINDS.get(name[: name.find("/", 5)], "ref"), cache
            )
        elif is_commit or _ABBREVIATED_COMMIT.fullmatch(ref):
            commit = Commit(await remote.fetch_commit(ref), COMMIT, cache)
        else:
            raise SourceFailed(f"{without_secret(url)} has no branch and no tag {ref!r}")
        await self._verify(remote, commit.id, name or ref)
        return commit

    async def _verify(self, remote: _Remote, commit: str, name: str) -> None:
        """Raise SourceFailed if signatures are required and the tag and the commit have none."""
        keys, failures = self._trusted_keys, []
        if keys is None:
            return
        tag = await remote.fetched_tag() if name.startswith("refs/tags/") else None
        try:
            if tag is not None:
                await keys.verify_tag(remote.cache, tag, name.removeprefix("refs/tags/"))
                return
        except SourceFailed as error:
            failures.append(str(error))
        try:
            await keys.verify_commit(remote.cache, commit)
        except SourceFailed as error:
            failures.append(str(error))
            raise SourceFailed(
                f"{without_secret(remote.url)}: {name} ({commit[:12]}) has no trusted signature: "
                f"{'; '.join(failures)}; sign the tag or the commit with a key of the settings (git)"
            ) from None


@dataclass(frozen=True, slots=True)
class _Remote:
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

    async def fetched_tag(self) -> str | None:
        """Return the tag object that was fetched last, None if it was not one."""
        kind = (await self._run("cat-file", "-t", "FETCH_HEAD")).strip()
        return (await self._run("rev-parse", "FETCH_HEAD")).strip() if kind == "tag" else None

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

    async def _run(self, command: str, *arguments: str) -> str:
        try:
            return await run_git(self.cache, command, *arguments, environment=self.environment)
        except SourceFailed as error:
            text = str(error).replace(self.url, without_secret(self.url))
            if await threads.FILES.run(_remove_partial_packs, self.cache) >= MAX_PACK_BYTES:
                text = f"the transfer exceeds {MAX_PACK_BYTES // 1024**2} MiB; remove large files from it"
            raise SourceFailed(f"{without_secret(self.url)}: {text}") from None


def _prepare_mirror(mirror: Path) -> None:
    """Remove what a killed git left, and a mirror that has grown too large; the caller holds its lock."""
    for stale_lock in (*mirror.glob("*.lock"), *(mirror / "refs").rglob("*.lock")):
        stale_lock.unlink()
    _remove_partial_packs(mirror)
    packs = [path.stat().st_size for path in (mirror / "objects" / "pack").glob("*.pack")]
    is_complete = (mirror / "HEAD").is_file()
    if not is_complete or len(packs) > MAX_MIRROR_PACKS or sum(packs) > MAX_MIRROR_BYTES:
        _remove_mirror(mirror)


def _remove_mirror(mirror: Path) -> None:
    """Remove a mirror; without its HEAD, what a crash leaves of it does not count as one."""
    (mirror / "HEAD").unlink(missing_ok=True)
    shutil.rmtree(mirror, ignore_errors=True)


def _remove_partial_packs(mirror: Path) -> int:
    """Remove the packs that a failed fetch left; return the size of the largest."""
    largest = 0
    for path in (mirror / "objects" / "pack").glob("tmp_*"):
        largest = max(largest, path.stat().st_size)
        path.unlink()
    return largest


async def run_git(
    cache: Path,
    command: str,
    *arguments: str,
    cwd: Path | None = None,
    config: Mapping[str, str] | None = None,
    environment: Mapping[str, str] | None = None,
) -> str:
    """Return what git prints; raises SourceFailed."""
    inherited = {name: value for name, value in os.environ.items() if name not in _REPOSITORY_VARIABLES}
    options = (("-c", f"{key}={value}") for key, value in {**_CONFIG, **(config or {})}.items())
    try:
        ended = await run_command(
            ["git", f"--git-dir={cache}", *chain.from_iterable(options), command, *arguments],
            cwd=cwd or cache,
            environment={**inherited, **_NONINTERACTIVE_ENVIRONMENT, **(environment or {})},
            timeout_s=GIT_TIMEOUT_S,
            max_output_bytes=MAX_OUTPUT_BYTES,
            # git starts what writes a pack only after it has talked to the server.
            max_file_bytes=MAX_PACK_BYTES,
        )
    except TimeoutError:
        raise SourceFailed(f"git {command} did not end within {GIT_TIMEOUT_S:g}s") from None
    except OSError as error:
        raise SourceFailed(f"git: cannot be started ({error}); install it") from error
    if ended.status != 0:
        message = ended.stderr.decode(errors="replace").strip()[-MAX_MESSAGE_LENGTH:]
        raise SourceFailed(f"git {command} failed: {message or f'exit status {ended.status}'}")
    if len(ended.stdout) >= MAX_OUTPUT_BYTES:
        raise SourceFailed(f"git {command} answered more than {MAX_OUTPUT_BYTES // 1024**2} MiB")
    return ended.stdout.decode(errors="surrogateescape")


_CONFIG = {"gc.auto": "0", "maintenance.auto": "false", "fetch.unpackLimit": "1"}
"""git starts nothing in the background, and a fetch writes one pack, whose size has a limit."""

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
