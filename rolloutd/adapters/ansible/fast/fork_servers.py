"""Fork servers of the daemon: one for each tree and configuration, with the inventory of its latest run.

A fork costs a third of a new process, most of whose CPU time imports Ansible.  A server ends when it has not
been used for a while, after many runs, when there are too many, or when the machine is short of memory.
Runs do not notice its end.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rolloutd.adapters.ansible.environment import GENERATION_ENV
from rolloutd.adapters.ansible.processes import ProcessExit
from rolloutd.adapters.ansible.run_directory import RunDirectory
from rolloutd.concurrency import threads

_log = logging.getLogger(__name__)

SCRIPT = Path(__file__).with_name("fork_server.py")
MAX_ANSWER_BYTES = 1024

START_TIMEOUT_S = 30.0
"""Limit of a server's import of Ansible, which takes half a second of CPU time."""

FORK_TIMEOUT_S = 5.0
"""Limit of one fork, which takes some milliseconds."""

IDLE_S = 120.0
"""A server ends after so long without a run: it holds some 50 MB, and 70 MB with 10,000 hosts."""

RUNS_PER_SERVER = 500
"""A server is replaced after so many runs, so that nothing can grow in it."""

MAX_SERVERS = 4
"""The least recently used server ends when there is one more."""

MIN_AVAILABLE_MEMORY = 0.1
"""Share of the machine's memory below which the servers end and runs are new processes."""

RETRY_REFUSED_S = 300.0
"""Time after which a server that refused is tried again: the reason is mostly in the tree's ansible.cfg."""

ROOM = "x" * 8192
"""Memory in which a fork shows its own environment."""

PER_RUN_VARIABLES = frozenset(
    {
        "ANSIBLE_LOCAL_TEMP",
        "ANSIBLE_SSH_CONTROL_PATH_DIR",
        "ANSIBLE_SSH_EXECUTABLE",
        GENERATION_ENV,
        "ROLLOUTD_EVENTS",
        "ROLLOUTD_RUN",
        "ROLLOUTD_RUN_DIR",
    }
)


class NotForked(Exception):
    """The run is to be started as a new process; the message says why."""


@dataclass(slots=True, eq=False)
class _Server:
    generation: str
    channel: socket.socket
    exit: ProcessExit
    is_ready: bool = False
    runs: int = 0
    used_at: float = field(default_factory=time.monotonic)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def serves(self, environment: Mapping[str, str]) -> bool:
        """Return whether it can start one more run, which has its inventory."""
        has_inventory = self.generation == environment.get(GENERATION_ENV, "")
        # One that is not ready was left by a cancelled start, with an answer that nothing has read.
        return self.is_ready and has_inventory and not self.exit.has_exited and self.runs < RUNS_PER_SERVER

    async def ask(self, message: bytes, timeout_s: float) -> str:
        """Send a message unless it is empty, and return the answer; raises NotForked."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(timeout_s):
                if message:
                    await loop.sock_sendall(self.channel, message)
                answer = (await loop.sock_recv(self.channel, MAX_ANSWER_BYTES)).decode()
        except TimeoutError:
            raise NotForked(f"the fork server did not answer in {timeout_s:g} s") from None
        except OSError as error:
            raise NotForked(f"the fork server ended ({error.strerror})") from None
        if not answer:
            raise NotForked("the fork server ended")
        if answer.startswith("refused "):
            raise NotForked(answer.removeprefix("refused "))
        return answer


class ForkServers:
    def __init__(self, binary: str, pids: set[int]) -> None:
        """`binary` is the ansible-playbook of this Python; `pids` always has those of the servers."""
        self._binary = binary
        self._pids = pids
        self._servers: dict[str, _Server] = {}
        self._refusals: dict[str, tuple[float, str]] = {}
        self._start_lock = asyncio.Lock()
        self._idle_timer: asyncio.TimerHandle | None = None

    async def fork(self, directory: RunDirectory, tree: Path) -> int:
        """Start the run's wrapper in a fork and return its pid; raises NotForked."""
        environment = await threads.RUNS.run(directory.read_environment)
        key = await threads.RUNS.run(_server_key, tree, environment)
        refused_at, reason = self._refusals.get(key, (0.0, ""))
        if reason and time.monotonic() - refused_at < RETRY_REFUSED_S:
            raise NotForked(reason)
        try:
            server = await self._find_or_start(key, directory, tree, environment)
        except NotForked as refusal:
            ended = self._end(key)
            if ended is not None and not ended.is_ready:
                self._refusals[key] = (time.monotonic(), str(refusal))
                _log.warning("runs in %s start as new processes: %s", tree, refusal)
            raise
        async with server.lock:
            server.used_at = time.monotonic()
            server.runs += 1
            try:
                return int(await server.ask(os.fsencode(directory.path), FORK_TIMEOUT_S))
            except BaseException:
                # Also when it is cancelled: the next run would read the answer as its own.
                if self._servers.get(key) is server:
                    self._end(key)
                raise
            finally:
                if self._servers.get(key) is not server:
                    server.channel.close()

    def close(self) -> None:
        self._end_all()
        if self._idle_timer is not None:
            self._idle_timer.cancel()

    async def _find_or_start(
        self, key: str, directory: RunDirectory, tree: Path, environment: Mapping[str, str]
    ) -> _Server:
        async with self._start_lock:
            if _available_memory() < MIN_AVAILABLE_MEMORY:
                self._end_all()
                raise NotForked("the machine is short of memory")
            server = self._servers.get(key)
            if server is not None and not server.serves(environment):
                self._end(key)
                server = None
            if server is None:
                while len(self._servers) >= MAX_SERVERS:
                    self._end(min(self._servers, key=lambda each: self._servers[each].used_at))
                server = self._servers[key] = self._start(directory, tree, environment)
                self._end_idle_servers()
                async with server.lock:
                    await server.ask(b"", START_TIMEOUT_S)
                server.is_ready = True
            return server

    def _start(self, directory: RunDirectory, tree: Path, environment: Mapping[str, str]) -> _Server:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        own = {name: value for name, value in environment.items() if name not in PER_RUN_VARIABLES}
        # Ansible makes a directory there as it is imported; the server removes it at once.
        own["ANSIBLE_LOCAL_TEMP"] = environment["ANSIBLE_LOCAL_TEMP"]
        # Other runs of its generation have the same file; without a generation each run reads its own.
        inventory = str(directory.inventory_file) if GENERATION_ENV in environment else ""
        argv = [sys.executable, str(SCRIPT), str(theirs.fileno()), self._binary, str(tree), inventory, ROOM]
        with theirs:
            process = subprocess.Popen(
                argv,
                cwd=tree,
                env={**own, "ROLLOUTD_ROOM": ROOM},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        process.returncode = 0  # ProcessExit reaps it
        pid = process.pid
        self._pids.add(pid)
        return _Server(
            environment.get(GENERATION_ENV, ""), ours, ProcessExit(pid, lambda: self._pids.discard(pid))
        )

    def _end_all(self) -> None:
        for key in list(self._servers):
            self._end(key)

    def _end(self, key: str) -> _Server | None:
        server = self._servers.pop(key, None)
        if server is not None and not server.lock.locked():  # else when it has answered
            server.channel.close()
        return server

    def _end_idle_servers(self) -> None:
        """End the servers that are idle, or all if memory is short; look again later."""
        now, is_short = time.monotonic(), _available_memory() < MIN_AVAILABLE_MEMORY
        for key, server in list(self._servers.items()):
            if is_short or now - server.used_at > IDLE_S:
                self._end(key)
        self._idle_timer = None
        if self._servers:
            loop = asyncio.get_running_loop()
            self._idle_timer = loop.call_later(IDLE_S / 4, self._end_idle_servers)


def _server_key(tree: Path, environment: Mapping[str, str]) -> str:
    """Return what runs that share a server have in common."""
    common = [
        f"{name}={value}" for name, value in sorted(environment.items()) if name not in PER_RUN_VARIABLES
    ]
    common.append(str(GENERATION_ENV in environment))  # a run with hosts of its own replaces no server
    # The directory of Python's packages changes when Ansible is upgraded.
    files = [environment.get("ANSIBLE_CONFIG", ""), str(SCRIPT), sysconfig.get_path("purelib")]
    return hashlib.sha256("\0".join([str(tree), *common, *map(_version, files)]).encode()).hexdigest()


def _version(path: str) -> str:
    """Return what changes when a file is replaced."""
    with contextlib.suppress(OSError):
        found = os.stat(path)  # noqa: PTH116 - the path may be empty
        return f"{path} {found.st_ino} {found.st_mtime_ns} {found.st_size}"
    return path


def _available_memory() -> float:
    with Path("/proc/meminfo").open() as file:
        lines = dict(line.split(":", 1) for line in file)
    return int(lines["MemAvailable"].split()[0]) / int(lines["MemTotal"].split()[0])
