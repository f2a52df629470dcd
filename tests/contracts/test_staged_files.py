"""The contract of ports.StagedFiles: its fake, and one command over ssh to a real sshd."""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

import pytest

from rolloutd.adapters.ssh.shell import SshShell
from rolloutd.adapters.ssh.staged_files import MAX_DIFFERENCES, SshStagedFiles
from rolloutd.errors import AdapterFailed, NodeUnreachable
from rolloutd.ports import Host, ShellResult, StagedFile, StagedFiles
from tests.contracts.fakes.shell import FakeShell
from tests.contracts.fakes.stager import FakeStager
from tests.contracts.ssh_fixtures import LIMIT_S, host_of
from tests.support.sshd import Sshd

CONTENT = b"the artifact of the change"

LATER, EARLIER = 1 << 40, 0
"""What `date` on a node says: long after each file was written, or before."""


class CountingShell(SshShell):
    """A shell that counts the commands that it ran."""

    commands = 0

    async def run(self, *args: Any, **kwargs: Any) -> ShellResult:
        self.commands += 1
        return await super().run(*args, **kwargs)


class StagedBackend(Protocol):
    files: StagedFiles
    host: Host
    to: str

    def write(self, path: str, content: bytes | None) -> None:
        """Write a file on the node, or remove it."""
        ...


class FakeBackend:
    def __init__(self) -> None:
        self.files = FakeStager()
        self.host, self.to = Host("n1"), "/cache"

    def write(self, path: str, content: bytes | None) -> None:
        self.files.files.pop(("n1", path), None)
        if content is not None:
            self.files.files["n1", path] = content


class SshdBackend:
    """A node of a real sshd, whose `date` and `sha256sum` are the test's; `digests` counts the latter."""

    def __init__(self, directory: Path, wrapper: str = "") -> None:
        self.shell = CountingShell()
        self.files = SshStagedFiles(self.shell)
        self.to = f"{directory}/cache"
        self._bin, self._calls = directory / "bin", directory / "digests"
        self._bin.mkdir()
        path = f"{self._bin}:{os.environ['PATH']}"
        forced = f"""ForceCommand {wrapper} env PATH={path} sh -c "$SSH_ORIGINAL_COMMAND" """
        self.sshd = Sshd(options=forced).start(directory / "sshd")
        self.host = host_of(self.sshd)
        self.set_clock(LATER)
        self.set_program("sha256sum", f"echo x >> {self._calls}; exec {shutil.which('sha256sum')}")

    def set_program(self, name: str, script: str) -> None:
        program = self._bin / name
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)

    def set_clock(self, at: int) -> None:
        self.set_program("date", f"echo {at}")

    @property
    def digests(self) -> int:
        return len(self._calls.read_text().splitlines()) if self._calls.exists() else 0

    def write(self, path: str, content: bytes | None) -> None:
        file = Path(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.unlink(missing_ok=True)
        if content is not None:
            file.write_bytes(content)


@asynccontextmanager
async def open_backend(kind: str, tmp_path: Path) -> AsyncIterator[StagedBackend]:
    if kind == "fake":
        yield FakeBackend()
        return
    async with sshd_backend(tmp_path) as backend:
        yield backend


@asynccontextmanager
async def sshd_backend(tmp_path: Path, wrapper: str = "") -> AsyncIterator[SshdBackend]:
    backend = SshdBackend(tmp_path, wrapper)
    try:
        yield backend
    finally:
        await backend.shell.close()
        backend.sshd.stop()


def staged(backend: StagedBackend, name: str = "app.bin", content: bytes = CONTENT) -> StagedFile:
    digest = hashlib.sha256(content).hexdigest()
    file = StagedFile(f"{backend.to}/{digest}/{name}", len(content), digest)
    backend.write(file.path, content)
    return file


async def compare(backend: StagedBackend, *files: StagedFile, timeout_s: float = LIMIT_S) -> list[str]:
    found = await backend.files.compare(backend.host, files, timeout_s=timeout_s)
    assert set(found) <= {file.path for file in files}
    return list(found.values())


@pytest.mark.parametrize("kind", ["fake", "ssh"])
@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (CONTENT, None),
        (CONTENT[:-1], "has 25 bytes, not 26"),
        (b"X" + CONTENT[1:], f"is altered: sha256 {hashlib.sha256(b'X' + CONTENT[1:]).hexdigest()}, not"),
        (None, "is missing"),
    ],
    ids=["whole", "truncated", "altered", "deleted"],
)
async def test_difference_is_named_by_path(
    kind: str, content: bytes | None, problem: str | None, tmp_path: Path
) -> None:
    async with open_backend(kind, tmp_path) as backend:
        other, file = staged(backend, "other.bin", b"other"), staged(backend)
        backend.write(file.path, content)
        found = await backend.files.compare(backend.host, [other, file], timeout_s=LIMIT_S)
        assert list(found) == ([] if problem is None else [file.path])
        assert all(text.startswith(problem or "") for text in found.values())


# -- on a real node -----------------------------------------------------------


def link_file(file: Path) -> None:
    copy = file.with_name("copy")
    file.rename(copy)
    file.symlink_to(copy)


def link_directory(file: Path) -> None:
    copy = file.parent.with_name("copy")
    file.parent.rename(copy)
    file.parent.symlink_to(copy)


def replace_by_directory(file: Path) -> None:
    file.unlink()
    file.mkdir()


def replace_by_pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (link_file, "is a symbolic link"),
        (link_directory, "is a symbolic link"),
        (replace_by_directory, "is not a regular file"),
        (replace_by_pipe, "is not a regular file"),
    ],
)
async def test_what_is_no_file_is_named(damage: Callable[[Path], None], problem: str, tmp_path: Path) -> None:
    async with sshd_backend(tmp_path) as backend:
        file = staged(backend)
        assert await compare(backend, file) == []
        damage(Path(file.path))
        assert await compare(backend, file) == [problem]


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("setpriv") is None, reason="needs root and setpriv")
async def test_unreadable_file_differs(tmp_path: Path) -> None:
    # A login that is root could read everything.
    wrapper = "setpriv --bounding-set=-dac_override,-dac_read_search"
    async with sshd_backend(tmp_path, wrapper) as backend:
        file = staged(backend)
        Path(file.path).chmod(0)
        assert await compare(backend, file) == ["cannot be read"]


async def test_archive_that_is_not_unpacked_differs(tmp_path: Path) -> None:
    async with sshd_backend(tmp_path) as backend:
        file = staged(backend)
        unpacked = Path(file.path).with_name("unpacked")
        archive = StagedFile(file.path, file.size, file.sha256, str(unpacked))
        assert await compare(backend, archive) == ["is not unpacked any more"]
        unpacked.mkdir()
        assert await compare(backend, archive) == []


async def test_all_files_are_compared_with_one_command(tmp_path: Path) -> None:
    async with sshd_backend(tmp_path) as backend:
        files = [staged(backend, f"it's {number}", b"%d" % number) for number in range(1000)]
        for file in files[500:]:
            Path(file.path).unlink()
        found = await backend.files.compare(backend.host, files, timeout_s=LIMIT_S)
        assert list(found) == [file.path for file in files[500 : 500 + MAX_DIFFERENCES]]
        assert backend.shell.commands == 1


async def test_digest_is_computed_once_for_unchanged_file(tmp_path: Path) -> None:
    async with sshd_backend(tmp_path) as backend:
        file = staged(backend)
        for _ in range(3):
            assert await compare(backend, file) == []
        assert backend.digests == 1


async def test_altered_file_with_restored_mtime_differs(tmp_path: Path) -> None:
    async with sshd_backend(tmp_path) as backend:
        file = staged(backend)
        assert await compare(backend, file) == []
        path = Path(file.path)
        before = path.stat()
        with path.open("r+b") as opened:
            opened.write(b"X")
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        after = path.stat()
        assert (after.st_ino, after.st_size, after.st_mtime_ns) == (
            before.st_ino,
            before.st_size,
            before.st_mtime_ns,
        )
        (problem,) = await compare(backend, file)
        assert problem.startswith("is altered")


async def test_file_that_just_changed_is_not_remembered(tmp_path: Path) -> None:
    async with sshd_backend(tmp_path) as backend:
        file = staged(backend)
        backend.set_clock(EARLIER)
        for _ in range(2):
            assert await compare(backend, file) == []
        assert backend.digests == 2


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give a file to another user")
@pytest.mark.parametrize("forged", ["directory", "file", "link"])
async def test_memory_of_another_user_is_not_trusted(forged: str, tmp_path: Path) -> None:
    async with sshd_backend(tmp_path) as backend:
        file = staged(backend)
        assert await compare(backend, file) == []
        memory = Path(backend.to) / ".compared"
        (remembered,) = memory.iterdir()
        match forged:
            case "directory":
                os.chown(memory, 12345, 12345)
            case "file":
                os.chown(remembered, 12345, 12345)
            case "link":
                memory.rename(tmp_path / "elsewhere")
                memory.symlink_to(tmp_path / "elsewhere")
        assert await compare(backend, file) == []
        assert backend.digests == 2


async def test_node_without_stat_or_memory_is_compared(tmp_path: Path) -> None:
    async with sshd_backend(tmp_path) as backend:
        file = staged(backend)
        (Path(backend.to) / ".compared").write_text("")
        assert await compare(backend, file) == []
        backend.set_program("stat", "exit 1")
        assert await compare(backend, file) == []
        backend.write(file.path, CONTENT[:-1])
        assert await compare(backend, file) == ["has 25 bytes, not 26"]


async def test_comparison_ends_at_its_time_limit(tmp_path: Path) -> None:
    async with sshd_backend(tmp_path) as backend:
        file = staged(backend)
        assert await compare(backend, file) == []  # the login is not what is limited
        os.mkfifo(tmp_path / "never")
        backend.set_program("sha256sum", f"exec cat {tmp_path}/never")
        Path(file.path).touch()
        with pytest.raises(TimeoutError):
            await compare(backend, file, timeout_s=0.5)


async def test_node_that_gives_no_answer_is_an_error(tmp_path: Path) -> None:
    async with sshd_backend(tmp_path) as backend:
        file = staged(backend)
        await asyncio.to_thread(backend.sshd.stop)
        with pytest.raises(NodeUnreachable):
            await compare(backend, file)
    with pytest.raises(AdapterFailed, match="n1: its staged files are not compared"):
        await SshStagedFiles(FakeShell()).compare(Host("n1"), [file], timeout_s=LIMIT_S)
