"""Jobs of the fake AWX as processes: each really runs ansible-playbook against its inventory."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

JSON = Any

CALLBACK_DIR = Path(__file__).parent / "callback"
MARK = "FAKE_AWX"

POLL_S = 0.05
"""Interval of reading a job's events."""


class _Unsafe(str):
    """A text that Ansible does not render."""


class _Dumper(yaml.SafeDumper):
    """Writes launch variables as AWX does."""


_Dumper.add_representer(_Unsafe, lambda dumper, text: dumper.represent_scalar("!unsafe", str(text)))


def _unsafe(value: JSON) -> JSON:
    match value:
        case str():
            return _Unsafe(value)
        case list():
            return [_unsafe(each) for each in value]
        case dict():
            return {name: _unsafe(each) for name, each in value.items()}
    return value


@dataclass
class Credential:
    """The machine credential of all templates: a user and the file of a key."""

    user: str = ""
    key_file: str = ""


@dataclass
class PlaybookProcesses:
    """The processes of all jobs, forked by one that has imported Ansible."""

    credential: Credential
    directory: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="awx")))
    _connection: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
    _ends: dict[int, asyncio.Future[int]] = field(default_factory=dict)
    _pids: asyncio.Queue[int] = field(default_factory=asyncio.Queue)
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    _reader: asyncio.Task[None] | None = None

    async def start(
        self, job: int, begin: int, tree: Path, script: JSON, fields: dict[str, JSON], playbook: str
    ) -> PlaybookProcess:
        """Start ansible-playbook as a job's container does."""
        home = self.directory / f"{job}.{begin}"
        home.mkdir()
        inventory = home / "hosts"
        inventory.write_text(f"#!/bin/sh\nprintf %s {shlex.quote(json.dumps(script))}\n")
        inventory.chmod(0o700)
        variables = {**_unsafe(fields["extra_vars"]), "awx_job_id": job, "tower_job_id": job}
        (home / "extravars").write_text(yaml.dump(variables, Dumper=_Dumper))
        argv = ["ansible-playbook", "-i", str(inventory), "-e", f"@{home / 'extravars'}"]
        argv += ["--check"] if fields["job_type"] == "check" else []
        argv += ["--diff"] if fields["diff_mode"] else []
        argv += ["-u", self.credential.user or "root"]
        argv += ["--private-key", self.credential.key_file] if self.credential.key_file else []
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(home),
            "LC_ALL": "C.UTF-8",
            "HOSTNAME": f"awx-{job}-{begin}",
            "AWX_EVENTS": str(home / "events"),
            "ANSIBLE_HOST_KEY_CHECKING": "False",
            "ANSIBLE_SSH_COMMON_ARGS": "-o UserKnownHostsFile=/dev/null -o LogLevel=ERROR",
            "ANSIBLE_SSH_CONTROL_PATH_DIR": str(home / "cp"),
            "ANSIBLE_LOCAL_TEMP": str(home / "tmp"),
            "ANSIBLE_NOCOLOR": "1",
            "ANSIBLE_RETRY_FILES_ENABLED": "0",
            "PYTHONDONTWRITEBYTECODE": "1",
            MARK: f"{self.directory}/{job}.{begin}.",
        }
        request = {
            "argv": [*argv, playbook],
            "env": environment,
            "cwd": str(tree),
            "output": str(home / "output"),
        }
        async with self._lock:
            writer = await self._connect()
            writer.write(json.dumps(request).encode() + b"\n")
            pid = await self._pids.get()
        return PlaybookProcess(pid, home, self._ends.setdefault(pid, asyncio.Future()))

    async def close(self) -> None:
        """End everything."""
        if self._reader is not None:
            self._reader.cancel()
        if self._connection is not None:
            self._connection[1].close()
        kill_marked(f"{MARK}={self.directory}/".encode())
        shutil.rmtree(self.directory, ignore_errors=True)

    async def _connect(self) -> asyncio.StreamWriter:
        if self._connection is None:
            reader, writer = self._connection = await asyncio.open_unix_connection(await _fork_server())
            self._reader = asyncio.create_task(self._read(reader))
            return writer
        return self._connection[1]

    async def _read(self, reader: asyncio.StreamReader) -> None:
        async for line in reader:
            match line.decode().split():
                case ["pid", pid]:
                    self._pids.put_nowait(int(pid))
                case ["exit", pid, code]:
                    end = self._ends.setdefault(int(pid), asyncio.Future())
                    if not end.done():
                        end.set_result(int(code))


_servers: list[tuple[subprocess.Popen[bytes], Path]] = []
"""The fork server of this process, which all fakes share; it ends with this process."""


async def _fork_server() -> Path:
    """Return the socket of the fork server."""
    if not _servers:
        directory = Path(tempfile.mkdtemp(prefix="awx"))
        atexit.register(shutil.rmtree, directory, ignore_errors=True)
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
        server = subprocess.Popen(
            [sys.executable, "-m", "tests.support.fake_awx.playbook_forks", str(directory / "socket")],
            stdin=subprocess.PIPE,
            env={
                **environment,
                "ANSIBLE_LOCAL_TEMP": str(directory),
                "ANSIBLE_CALLBACK_PLUGINS": str(CALLBACK_DIR),
            },
        )
        _servers.append((server, directory / "socket"))
    server, path = _servers[0]
    while not path.exists():
        assert server.poll() is None, "the fork server ended"
        await asyncio.sleep(POLL_S)
    return path


@dataclass
class PlaybookProcess:
    """One ansible-playbook."""

    pid: int
    home: Path
    end: asyncio.Future[int]
    _read: int = 0

    async def follow(self, on_event: Callable[[dict[str, JSON]], None]) -> int:
        """Pass each event on as it is written; return the exit code."""
        while True:
            ended = self.end.done()
            for event in self._new_events():
                on_event(event)
            if ended:
                kill_marked(f"{MARK}={self.home}.".encode())  # the container ends with its process
                return self.end.result()
            await asyncio.wait((self.end,), timeout=POLL_S)

    def output(self) -> str:
        return (self.home / "output").read_text(errors="replace")

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def _new_events(self) -> list[dict[str, JSON]]:
        path = self.home / "events"
        if not path.exists():
            return []
        with path.open("rb") as file:
            file.seek(self._read)
            lines = [line for line in file if line.endswith(b"\n")]
        self._read += sum(map(len, lines))
        return [json.loads(line) for line in lines]


def kill_marked(mark: bytes) -> None:
    """SIGKILL all processes with the mark in their environment."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                if mark in (entry / "environ").read_bytes():
                    os.kill(int(entry.name), signal.SIGKILL)
