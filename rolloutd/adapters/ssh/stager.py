"""Stagers `ssh` and `url`: artifacts over the node's ssh by SFTP, or fetched by the node.

Both compare the artifact's sha256 on the node before and after, and rename it when it is whole.  They do not
know who limits their rate.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from weakref import WeakValueDictionary

import asyncssh

from machines.model.preparation import ManifestEntry
from rolloutd.adapters.ssh.shell import SshShell
from rolloutd.adapters.ssh.shell_adapter import read_node_script, run_as_root
from rolloutd.concurrency import threads
from rolloutd.errors import AdapterFailed
from rolloutd.files.artifact_files import FileMismatch, compare_file, file_digest, mismatch_text
from rolloutd.ports import Failed, Host, Shell, ShellResult, Staged, StagingRequest, TakeBytes, staged_file

CHUNK_BYTES = 128 * 1024
"""Bytes that are taken from the rate limit at once: 10 ms at 100 Mbit/s, so that transfers share it."""

WRITES_IN_FLIGHT = 4
"""Chunks of one transfer that wait for the node's answer: half a MiB of memory, 25 MB/s at 20 ms."""

DEFAULT_MODE = "0644"

_MAX_READINGS = 1000
"""Remembered comparisons of local files: as many as a manifest has artifacts."""

_SCRIPT = read_node_script("staging.sh")

_FileVersion = tuple[Path, str, int, int, int]


class _NodeStager(ABC):
    """What both stagers share: the inspection of the node, and the removal."""

    def __init__(self, shell: Shell) -> None:
        self._shell = shell
        self._locks: WeakValueDictionary[tuple[str, str], asyncio.Lock] = WeakValueDictionary()

    async def stage(self, request: StagingRequest, *, take: TakeBytes, timeout_s: float) -> Staged | Failed:
        # Two rollouts may bring the same artifact at once: the second finds what the first brought.
        # It is locked by its digest: artifacts with the same bytes share a directory.
        place = (request.host.name, request.artifact.sha256)
        lock = self._locks.setdefault(place, asyncio.Lock())
        async with asyncio.timeout(timeout_s) as limit, lock:
            if (refusal := await self._refusal(request)) is not None:
                return refusal
            answer = await self._run(request, "inspect", timeout_s=timeout_s)
            match answer.stdout.split():
                case ["staged"]:
                    return Staged(0, f"{_title(request.artifact)} is on {request.host.name} already")
                case ["partial", size, digest, *differs]:
                    brought = await self._bring(
                        request, int(size), digest, outside_timeout(limit, take), timeout_s
                    )
                    if differs and isinstance(brought, Staged):
                        return replace(brought, replaced=_replaced(request, " ".join(differs)))
                    return brought
            return _failure(request, answer)

    async def remove(self, host: Host, to: str, digests: Collection[str], *, timeout_s: float) -> None:
        arguments = ("remove", to, " ".join(sorted(digests)))
        answer = await run_as_root(self._shell, host, _SCRIPT, *arguments, timeout_s=timeout_s)
        if answer.stdout.strip() != "removed":
            evidence = " ".join((answer.stdout + answer.stderr).split())[:200]
            raise AdapterFailed(f"{host.name}: {to} is not cleaned up: {evidence}; check its rights")

    async def _refusal(self, request: StagingRequest) -> Failed | None:
        """Return why this artifact is not for this node, None if it is."""
        artifact, host = request.artifact, request.host
        if artifact.select is None or artifact.select.matches({**host.labels, "kind": host.kind.value}):
            return None
        return Failed(f"{_title(artifact)} is for {artifact.select.canonical()}, which {host.name} is not")

    @abstractmethod
    async def _bring(
        self, request: StagingRequest, present: int, digest: str, take: TakeBytes, timeout_s: float
    ) -> Staged | Failed:
        """Bring the rest of the file, of which the node has `present` bytes."""

    async def _run(
        self, request: StagingRequest, action: str, url: str = "", *, timeout_s: float
    ) -> ShellResult:
        artifact = request.artifact
        name = staged_file(request.to, artifact).rpartition("/")[2]
        arguments = (
            action,
            request.to,
            artifact.sha256,
            name,
            str(artifact.size),
            artifact.mode or DEFAULT_MODE,
            artifact.owner,
            artifact.kind.value,
            str(int(artifact.unpack)),
            request.host.name,
            url,
        )
        return await run_as_root(self._shell, request.host, _SCRIPT, *arguments, timeout_s=timeout_s)


class SshStager(_NodeStager):
    """ports.Stager by SFTP on the pooled connections; an interrupted transfer is resumed."""

    def __init__(self, shell: SshShell) -> None:
        super().__init__(shell)
        self._sftp = shell.open_sftp
        self._readings: dict[_FileVersion, asyncio.Task[FileMismatch | None]] = {}

    async def _refusal(self, request: StagingRequest) -> Failed | None:
        artifact = request.artifact
        mismatch = await self._compare(request.directory / artifact.path, artifact)
        if mismatch is not None:
            problem = f"{artifact.path} {mismatch.problem}"
            if not mismatch.found:
                return Failed(f"{_title(artifact)}: {problem}; build it again")
            return Failed(_mismatch(artifact, problem, mismatch.found, "build it again"))
        return await super()._refusal(request)

    async def _bring(
        self, request: StagingRequest, present: int, digest: str, take: TakeBytes, timeout_s: float
    ) -> Staged | Failed:
        source = request.directory / request.artifact.path
        start = await threads.FILES.run(_resume_at, source, present, digest)
        incoming = f"{request.to.rstrip('/')}/.incoming/{request.host.name}/{request.artifact.sha256}"
        try:
            async with self._sftp(request.host) as sftp:
                sent = await _send(sftp, source, incoming, start, take)
        except asyncssh.SFTPError as error:
            return Failed(f"{_title(request.artifact)}: {request.host.name} cannot write it: {error.reason}")
        except OSError as error:
            return Failed(f"{_title(request.artifact)}: {source} cannot be read: {error.strerror}")
        answer = await self._run(request, "install", timeout_s=timeout_s)
        if answer.stdout.split() == ["staged"]:
            resumed = f", resumed at {start} bytes" if start else ""
            return Staged(sent, f"{_title(request.artifact)} is on {request.host.name}{resumed}")
        return _failure(request, answer)

    async def _compare(self, source: Path, artifact: ManifestEntry) -> FileMismatch | None:
        """Compare a file with its artifact; nodes that ask at once share one reading."""
        try:
            status = source.stat()  # noqa: ASYNC240  # one call, of a file that is read next
        except OSError:
            return await threads.FILES.run(compare_file, source, artifact.size, artifact.sha256)
        version = (source, artifact.sha256, status.st_mtime_ns, status.st_size, status.st_ino)
        reading = self._readings.get(version)
        if reading is None:
            if len(self._readings) >= _MAX_READINGS:
                self._readings.clear()
            reading = self._readings[version] = asyncio.ensure_future(
                threads.FILES.run(compare_file, source, artifact.size, artifact.sha256)
            )
        # Shielded, because other nodes wait for the same reading.
        return await asyncio.shield(reading)


class UrlStager(_NodeStager):
    """ports.Stager for nodes that fetch from a mirror themselves."""

    async def _bring(
        self, request: StagingRequest, present: int, digest: str, take: TakeBytes, timeout_s: float
    ) -> Staged | Failed:
        artifact = request.artifact
        url = artifact.url or f"{request.url.rstrip('/')}/{artifact.path}"
        await take(artifact.size)  # the node sends no word of its progress, so its start is delayed
        answer = await self._run(request, "fetch", url, timeout_s=timeout_s)
        if answer.stdout.split() == ["staged"]:
            return Staged(artifact.size, f"{_title(artifact)} is on {request.host.name}")
        return _failure(request, answer)


def outside_timeout(limit: asyncio.Timeout, take: TakeBytes) -> TakeBytes:
    """Return `take` so that its wait for the rate limit does not count."""
    loop = asyncio.get_running_loop()

    async def wait(size: int) -> None:
        began, ends_at = loop.time(), limit.when()
        limit.reschedule(None)
        try:
            await take(size)
        finally:
            limit.reschedule(None if ends_at is None else ends_at + loop.time() - began)

    return wait


async def _send(sftp: asyncssh.SFTPClient, source: Path, target: str, start: int, take: TakeBytes) -> int:
    """Write the rest of a file and return how many bytes; a few chunks are under way at once."""
    offset, writes = start, deque[asyncio.Task[int]]()
    async with sftp.open(target, "r+b" if start else "wb", encoding=None) as remote:
        try:
            with source.open("rb") as local:
                local.seek(start)
                while chunk := local.read(CHUNK_BYTES):
                    await take(len(chunk))
                    if len(writes) >= WRITES_IN_FLIGHT:
                        await writes.popleft()
                    writes.append(asyncio.ensure_future(remote.write(chunk, offset)))
                    offset += len(chunk)
            while writes:
                await writes.popleft()
        finally:
            for write in writes:
                write.cancel()
            await asyncio.gather(*writes, return_exceptions=True)
    return offset - start


def _resume_at(source: Path, present: int, digest: str) -> int:
    """Return how much of the file is on the node: all that is there, if it is the file's beginning."""
    if not 0 < present <= source.stat().st_size:
        return 0
    return present if file_digest(source, present) == digest else 0


def _failure(request: StagingRequest, answer: ShellResult) -> Failed:
    artifact, node = request.artifact, request.host.name
    evidence = "\n".join(part for part in (answer.stdout, answer.stderr) if part)
    match answer.stdout.split(maxsplit=1):
        case ["altered", found]:
            problem = f"what arrived on {node} is altered"
            return Failed(_mismatch(artifact, problem, found.strip(), "retry"), evidence)
        case ["failed", reason]:
            return Failed(f"{_title(artifact)}: {node} {reason.strip()}", evidence)
    return Failed(f"{_title(artifact)}: {node} gave no result, exit {answer.exit_status}", evidence)


def _replaced(request: StagingRequest, differs: str) -> str:
    return f"{_title(request.artifact)}: {staged_file(request.to, request.artifact)} {differs}; staged again"


def _mismatch(artifact: ManifestEntry, problem: str, found: str, action: str) -> str:
    return mismatch_text(_title(artifact), problem, found, artifact.sha256, action)


def _title(artifact: ManifestEntry) -> str:
    return f"{artifact.name} {artifact.version}"
