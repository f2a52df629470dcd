"""The contract of ports.Stager: its fake, SFTP to a real sshd, and a node that fetches from a mirror."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import tarfile
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Protocol
from unittest.mock import ANY

import pytest

from machines.model.preparation import ArtifactKind, ManifestEntry
from machines.model.selector import parse_selector
from rolloutd.adapters.ssh.shell import SshShell
from rolloutd.adapters.ssh.stager import CHUNK_BYTES, SshStager, UrlStager, outside_timeout
from rolloutd.errors import AdapterFailed, NodeUnreachable
from rolloutd.ports import Failed, Host, Staged, Stager, StagingRequest, staged_file, unpacked_directory
from tests.contracts.fakes.shell import FakeShell
from tests.contracts.fakes.stager import FakeStager
from tests.contracts.ssh_fixtures import LIMIT_S, host_of, real_sshd
from tests.support.local_shell import LocalShell

CONTENT = os.urandom(8 * CHUNK_BYTES + 17)


class StagerBackend(Protocol):
    """A stager, a node, the directory of the manifest, and the artifacts' directory on the node."""

    stager: Stager
    host: Host
    directory: Path
    to: str
    url: str

    def read(self, path: str) -> bytes | None:
        """Return a file of the node, without asking the stager."""
        ...

    def write(self, path: str, content: bytes) -> None: ...


class FakeBackend:
    url = ""

    def __init__(self, directory: Path) -> None:
        self.stager = FakeStager()
        self.host, self.directory, self.to = Host("n1", labels={"arch": "amd64"}), directory, "/cache"

    def read(self, path: str) -> bytes | None:
        return self.stager.files.get(("n1", path))

    def write(self, path: str, content: bytes) -> None:
        self.stager.files["n1", path] = content


class FilesBackend:
    """A node whose files are on this machine."""

    def __init__(self, stager: Stager, host: Host, directory: Path, url: str = "") -> None:
        self.stager, self.directory, self.url = stager, directory, url
        self.host = Host(host.name, labels={"arch": "amd64"}, connection=host.connection)
        self.to = str(directory.parent / "node")

    def read(self, path: str) -> bytes | None:
        return Path(path).read_bytes() if Path(path).is_file() else None

    def write(self, path: str, content: bytes) -> None:
        Path(path).write_bytes(content)


@asynccontextmanager
async def fake_backend(directory: Path) -> AsyncIterator[FakeBackend]:
    yield FakeBackend(directory)


@asynccontextmanager
async def ssh_backend(directory: Path) -> AsyncIterator[FilesBackend]:
    with real_sshd(directory.parent / "sshd") as sshd:
        shell = SshShell()
        try:
            yield FilesBackend(SshStager(shell), host_of(sshd), directory)
        finally:
            await shell.close()


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, *args: Any) -> None:
        pass


@asynccontextmanager
async def url_backend(directory: Path) -> AsyncIterator[FilesBackend]:
    handler = partial(QuietHandler, directory=str(directory))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/"
        yield FilesBackend(UrlStager(LocalShell()), Host("n1"), directory, url)
        server.shutdown()


BACKENDS = {"fake": fake_backend, "ssh": ssh_backend, "url": url_backend}
every_stager = pytest.mark.parametrize("kind", BACKENDS)


@asynccontextmanager
async def open_backend(kind: str, tmp_path: Path) -> AsyncIterator[StagerBackend]:
    directory = tmp_path / "source"
    directory.mkdir()
    (directory / "app.bin").write_bytes(CONTENT)
    async with BACKENDS[kind](directory) as backend:
        yield backend


def entry(**changes: Any) -> ManifestEntry:
    digest = hashlib.sha256(CONTENT).hexdigest()
    fields = {"kind": ArtifactKind.FILE, "size": len(CONTENT), "sha256": digest, "path": "app.bin"}
    return ManifestEntry("app", "1.2.3", **{**fields, **changes})


async def stage(backend: StagerBackend, artifact: ManifestEntry, taken: list[int] | None = None) -> Any:
    async def take(size: int) -> None:
        if taken is not None:
            taken.append(size)

    request = StagingRequest(backend.host, artifact, backend.to, backend.directory, backend.url)
    return await backend.stager.stage(request, take=take, timeout_s=LIMIT_S)


@every_stager
async def test_artifact_is_staged_once_and_removed(kind: str, tmp_path: Path) -> None:
    artifact, taken = entry(), list[int]()
    async with open_backend(kind, tmp_path) as backend:
        path = staged_file(backend.to, artifact)
        result = await stage(backend, artifact, taken)
        assert isinstance(result, Staged)
        assert result.bytes == sum(taken) == len(CONTENT)
        assert backend.read(path) == CONTENT
        again = await stage(backend, artifact, taken)
        assert isinstance(again, Staged)
        assert again.bytes == 0
        assert sum(taken) == len(CONTENT)
        for digest, left in (("0" * 64, CONTENT), (artifact.sha256, None), (artifact.sha256, None)):
            await backend.stager.remove(backend.host, backend.to, {digest}, timeout_s=LIMIT_S)
            assert backend.read(path) == left


@every_stager
async def test_altered_copy_on_node_is_replaced_with_reason(kind: str, tmp_path: Path) -> None:
    artifact = entry()
    async with open_backend(kind, tmp_path) as backend:
        await stage(backend, artifact)
        path = staged_file(backend.to, artifact)
        backend.write(path, CONTENT[:-1])
        again = await stage(backend, artifact)
        assert isinstance(again, Staged)
        assert (again.bytes, backend.read(path)) == (len(CONTENT), CONTENT)
        for part in ("app", path, hashlib.sha256(CONTENT[:-1]).hexdigest()):
            assert part in again.replaced
        assert await stage(backend, artifact) == replace(again, bytes=0, replaced="", text=ANY)


@every_stager
async def test_wrong_content_refused_with_both_digests(kind: str, tmp_path: Path) -> None:
    async with open_backend(kind, tmp_path) as backend:
        for content in (CONTENT[:-1], b"x" + CONTENT[1:]):
            (backend.directory / "app.bin").write_bytes(content)
            refused = await stage(backend, entry())
            assert isinstance(refused, Failed)
            for part in ("app", hashlib.sha256(content).hexdigest(), entry().sha256):
                assert part in refused.text
            assert backend.read(staged_file(backend.to, entry())) is None


@every_stager
async def test_artifact_of_another_arch_is_refused(kind: str, tmp_path: Path) -> None:
    async with open_backend(kind, tmp_path) as backend:
        refused = await stage(backend, entry(select=parse_selector("arch=arm64")))
        assert isinstance(refused, Failed)
        assert "arch=arm64" in refused.text
        assert isinstance(await stage(backend, entry(select=parse_selector("arch=amd64"))), Staged)


@pytest.mark.parametrize("kind", ["fake", "ssh"])
async def test_cut_transfer_is_resumed(kind: str, tmp_path: Path) -> None:
    async with open_backend(kind, tmp_path) as backend:
        request = StagingRequest(backend.host, entry(), backend.to, backend.directory)
        sent = 0

        async def cut(size: int) -> None:
            nonlocal sent
            sent += size
            if sent > 6 * CHUNK_BYTES:  # more than may be unanswered
                raise NodeUnreachable("n1: cut")

        with pytest.raises(NodeUnreachable):
            await backend.stager.stage(request, take=cut, timeout_s=LIMIT_S)
        assert backend.read(staged_file(backend.to, entry())) is None
        result = await stage(backend, entry())
        assert isinstance(result, Staged)
        assert 0 < result.bytes < len(CONTENT)
        assert backend.read(staged_file(backend.to, entry())) == CONTENT


# -- on a node of this machine ------------------------------------------------


async def test_archive_unpacks_with_mode_and_owner(tmp_path: Path) -> None:
    async with open_backend("ssh", tmp_path) as backend:
        with tarfile.open(backend.directory / "app.tar.gz", "w:gz") as archive:
            archive.add(backend.directory / "app.bin", "bin/app")
        packed = (backend.directory / "app.tar.gz").read_bytes()
        artifact = entry(
            kind=ArtifactKind.ARCHIVE,
            path="app.tar.gz",
            size=len(packed),
            sha256=hashlib.sha256(packed).hexdigest(),
            mode="0600",
            owner=f"{os.geteuid()}:{os.getegid()}",
            unpack=True,
        )
        assert isinstance(await stage(backend, artifact), Staged)
        unpacked = Path(unpacked_directory(backend.to, artifact))
        assert (unpacked / "bin/app").read_bytes() == CONTENT
        file = Path(staged_file(backend.to, artifact))
        assert file.stat().st_mode & 0o777 == 0o600
        # What a crash left half-way is made whole.
        (unpacked / "bin/app").unlink()
        (unpacked / "bin").rmdir()
        unpacked.rmdir()
        file.chmod(0o644)
        assert isinstance(await stage(backend, artifact), Staged)
        assert (unpacked / "bin/app").read_bytes() == CONTENT
        assert file.stat().st_mode & 0o777 == 0o600
        assert sorted(each.name for each in Path(backend.to).iterdir()) == [".incoming", artifact.sha256]
        # Transfers that no rollout needs are removed too.
        for name in ("0" * 64, artifact.sha256):
            Path(f"{backend.to}/.incoming/n1/{name}").write_text("")
        await backend.stager.remove(backend.host, backend.to, {"0" * 64}, timeout_s=LIMIT_S)
        assert [each.name for each in Path(f"{backend.to}/.incoming/n1").iterdir()] == [artifact.sha256]


def pack(directory: Path, **changes: Any) -> ManifestEntry:
    """Write an archive with the directory `home`, and return its entry."""
    with tarfile.open(directory / "app.tar.gz", "w:gz") as archive:
        archive.add(directory / "app.bin", "home/app")
    packed = (directory / "app.tar.gz").read_bytes()
    return entry(
        kind=ArtifactKind.ARCHIVE,
        path="app.tar.gz",
        size=len(packed),
        sha256=hashlib.sha256(packed).hexdigest(),
        unpack=True,
        **changes,
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")
@pytest.mark.parametrize("place", ["unpacked/home", ""])
async def test_artifact_with_mount_in_it_is_not_removed(tmp_path: Path, place: str) -> None:
    precious = tmp_path / "pre cious"
    precious.mkdir()
    (precious / "file").write_text("of a person")
    async with open_backend("url", tmp_path) as backend:
        artifact = pack(backend.directory)
        await stage(backend, artifact)
        directory = Path(unpacked_directory(backend.to, artifact)).parent
        mount = f"mount --bind '{precious}' '{directory / place}' && {{}}"
        node = LocalShell()
        node.wrap = lambda command: ["unshare", "-m", "sh", "-c", mount.format(f"( {command} )")]
        with pytest.raises(AdapterFailed, match="a file system is mounted in"):
            await UrlStager(node).remove(backend.host, backend.to, {artifact.sha256}, timeout_s=LIMIT_S)
        assert (precious / "file").read_text() == "of a person"
        await backend.stager.remove(backend.host, backend.to, {artifact.sha256}, timeout_s=LIMIT_S)
        assert not directory.exists()


async def test_unpacked_files_are_on_disk_before_the_rename(tmp_path: Path) -> None:
    log, program = tmp_path / "log", tmp_path / "bin" / "sync"
    program.parent.mkdir()
    async with open_backend("url", tmp_path) as backend:
        artifact = pack(backend.directory)
        unpacked = unpacked_directory(backend.to, artifact)
        program.write_text(f'#!/bin/sh\n[ -e {unpacked} ] || ls "$2"/unpacked/home >> {log}\n')
        program.chmod(0o755)
        node = LocalShell()
        path = f"PATH={program.parent}:{os.environ['PATH']}"
        node.wrap = lambda command: ["env", path, "sh", "-c", command]
        request = StagingRequest(backend.host, artifact, backend.to, backend.directory, backend.url)
        staged = await UrlStager(node).stage(request, take=_take_nothing, timeout_s=LIMIT_S)
        assert isinstance(staged, Staged)
        assert log.read_text() == "app\n"


async def _take_nothing(size: int) -> None:
    pass


class EndlessHandler(QuietHandler):
    """Sends 64 MiB, whatever the artifact's size; `taken` is what the node took."""

    taken = 0

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        with contextlib.suppress(OSError):
            for _ in range(512):
                self.wfile.write(bytes(CHUNK_BYTES))
                EndlessHandler.taken += CHUNK_BYTES


async def test_mirror_that_sends_more_fills_no_disk(tmp_path: Path) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), EndlessHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        async with open_backend("url", tmp_path) as backend:
            url = f"http://127.0.0.1:{server.server_port}/app.bin"
            refused = await stage(backend, entry(url=url))
        server.shutdown()
    assert isinstance(refused, Failed)
    assert f"cannot fetch {url}" in refused.text
    assert EndlessHandler.taken < 256 * CHUNK_BYTES


@pytest.mark.parametrize("place", ["file", "dead-link", "directory", "parent"])
async def test_what_stands_in_the_artifacts_place_is_replaced(place: str, tmp_path: Path) -> None:
    artifact, precious = entry(), tmp_path / "precious"
    precious.mkdir()
    (precious / "app.bin").write_bytes(CONTENT)
    async with open_backend("ssh", tmp_path) as backend:
        await stage(backend, artifact)
        file = Path(staged_file(backend.to, artifact))
        file.unlink()
        match place:
            case "file":
                file.symlink_to(precious / "app.bin")
            case "dead-link":
                file.symlink_to(precious / "gone")
            case "directory":
                file.mkdir()
            case "parent":
                file.parent.rmdir()
                file.parent.symlink_to(precious)
        again = await stage(backend, artifact)
        assert isinstance(again, Staged)
        assert again.replaced
        assert not file.is_symlink()
        assert not file.parent.is_symlink()
        assert file.read_bytes() == CONTENT
        assert [(each.name, each.read_bytes()) for each in precious.iterdir()] == [("app.bin", CONTENT)]


async def test_what_the_node_cannot_take_is_named(tmp_path: Path) -> None:
    async with open_backend("ssh", tmp_path) as backend:
        bad = entry(sha256=hashlib.sha256(b"no archive").hexdigest(), kind=ArtifactKind.ARCHIVE, unpack=True)
        (backend.directory / "app.bin").write_bytes(b"no archive")
        refused = await stage(backend, bad)
        assert isinstance(refused, Failed)
        assert "cannot unpack" in refused.text
        Path(backend.to).with_name("file").write_text("")
        backend.to = f"{tmp_path}/file/cache"
        refused = await stage(backend, bad)
        assert isinstance(refused, Failed)
        assert "cannot make" in refused.text
    with pytest.raises(AdapterFailed, match="not cleaned up"):
        await UrlStager(FakeShell()).remove(Host("n1"), "/cache", (), timeout_s=LIMIT_S)


async def test_same_artifact_staged_twice_at_once_is_sent_once(tmp_path: Path) -> None:
    async with open_backend("ssh", tmp_path) as backend:
        results = await asyncio.gather(*(stage(backend, entry()) for _ in range(4)))
        assert sorted(result.bytes for result in results) == [0, 0, 0, len(CONTENT)]
        assert [each.name for each in Path(backend.to).iterdir() if each.name != ".incoming"] == [
            entry().sha256
        ]


async def test_same_bytes_under_two_names_are_both_kept(tmp_path: Path) -> None:
    async with open_backend("url", tmp_path) as backend:
        (backend.directory / "copy.bin").write_bytes(CONTENT)
        both = [entry(), entry(path="copy.bin")]
        for artifact in both:
            assert isinstance(await stage(backend, artifact), Staged)
        assert [backend.read(staged_file(backend.to, each)) for each in both] == [CONTENT, CONTENT]


async def test_wait_for_the_rate_limit_is_outside_the_timeout() -> None:
    deadlines: list[float | None] = []
    async with asyncio.timeout(LIMIT_S) as limit:

        async def take(size: int) -> None:
            deadlines.append(limit.when())

        await outside_timeout(limit, take)(1)
        assert deadlines == [None]
        assert limit.when() is not None
