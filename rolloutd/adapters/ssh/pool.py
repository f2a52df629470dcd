"""A shell on every node, over one pooled ssh connection per node.

Commands of one node share its connection; it is made once, under the node's own
lock, replaced when it is dead or when the inventory names another way, and
closed when nobody has used it for a while.  Host keys are always checked.  What
commands mean, and whether a node should be asked at all, is not known here.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import asyncssh

from rolloutd.adapters.ssh.explain import explain_failed_login
from rolloutd.adapters.ssh.route import Defaults, Route, read_route
from rolloutd.adapters.ssh.session import COMMAND_LENGTH, Collector, NotStartedError, run_session
from rolloutd.errors import NodeUnreachable
from rolloutd.ports import Host, ShellResult


@dataclass(frozen=True, slots=True)
class Limits:
    """How long, how much and how many; the reasons stand beside the numbers."""

    connect_timeout_s: float = 10.0
    """TCP, key exchange and login: a healthy node needs under one second."""
    keepalive_s: float = 10.0
    keepalives_lost: int = 3
    """A node that falls silent in the middle is noticed after half a minute."""
    idle_s: float = 300.0
    """A node's steps follow each other within minutes; longer is another phase."""
    connections: int = 256
    """Open at once, and commands at once: far above what is in flight, below a limit of 1024 files."""
    sessions: int = 8
    """Commands at once on one connection: sshd's MaxSessions is 10."""
    output_bytes: int = 64 * 1024
    """Kept of stdout and of stderr each: evidence for people, not a transfer."""
    close_timeout_s: float = 5.0
    """A peer that does not say goodbye is left."""


class SshShell:
    """ports.Shell over asyncssh; the arguments count where the inventory says nothing."""

    def __init__(
        self,
        known_hosts: Path | None = None,
        user: str | None = None,
        key_file: Path | None = None,
        limits: Limits | None = None,
    ) -> None:
        self._defaults = Defaults(known_hosts, user, key_file)
        self._limits = limits or Limits()
        self._lines: dict[str, _Line] = {}
        self._commands = asyncio.Semaphore(self._limits.connections)
        self._known = _KnownHosts()
        # asyncssh logs every command line at INFO, and command lines may carry secrets.
        asyncssh.set_log_level(logging.WARNING)

    async def run(self, host: Host, command: str, *, timeout_s: float, stdin: str = "") -> ShellResult:
        """Run a shell command; killed by signal n it has exit status 128 + n.

        Raises NodeUnreachable (also when the connection is lost while it runs:
        then nobody knows how it ended), HostKeyChanged, and TimeoutError when
        it did not end in time.  It is then sent SIGTERM, which OpenSSH's server
        passes on for every user but root.
        """
        route = read_route(host, self._defaults)
        logged_in = False
        try:
            async with asyncio.timeout(timeout_s), self._commands, self._use(host.name, route) as line:
                await self._connect(line)
                logged_in = True
                collector = await self._execute(line, command, stdin.encode())
        except TimeoutError:
            if not logged_in:
                raise _unanswered(host.name, route, timeout_s) from None
            raise TimeoutError(
                f"{host.name}: `{command[:COMMAND_LENGTH]}` did not end within {timeout_s:g}s"
            ) from None
        return collector.result(host.name, command)

    async def forget(self, node: str) -> None:
        """Close the node's connection, if there is one."""
        line = self._lines.pop(node, None)
        if line is not None:
            await self._hang_up(line)

    async def close(self) -> None:
        """Close all connections."""
        lines = list(self._lines.values())
        self._lines.clear()
        async with asyncio.TaskGroup() as group:
            for line in lines:
                group.create_task(self._hang_up(line))

    @contextlib.asynccontextmanager
    async def _use(self, node: str, route: Route) -> AsyncIterator[_Line]:
        line = self._lines.pop(node, None)
        if line is not None and line.route != route:
            self._expire(line)  # commands still on it keep it until they end
            line = None
        if line is None:
            line = _Line(node, route, asyncio.Semaphore(self._limits.sessions))
        self._lines[node] = line  # at the end: the dictionary is in order of last use
        line.stop_idle_timer()
        line.users += 1
        try:
            async with line.sessions:
                yield line
        finally:
            line.users -= 1
            if self._lines.get(node) is not line:
                self._expire(line)
            elif line.users == 0:
                loop = asyncio.get_running_loop()
                line.idle_timer = loop.call_later(self._limits.idle_s, self._expire, line)

    async def _execute(self, line: _Line, command: str, stdin: bytes) -> Collector:
        for again in (True, False):
            connection = await self._connect(line)
            try:
                return await run_session(connection, command, stdin, self._limits.output_bytes)
            except NotStartedError as error:
                await asyncio.sleep(0)  # asyncssh marks a lost connection closed in its next turn
                # A pooled connection may have died unnoticed: nothing was started on it, so once more.
                if not (again and connection.is_closed()):
                    raise NodeUnreachable(
                        f"{line.node}: {line.route.address} opens no session: {error}"
                    ) from error
        raise AssertionError("unreachable")

    async def _connect(self, line: _Line) -> asyncssh.SSHClientConnection:
        async with line.lock:
            if line.connection is None or line.connection.is_closed():
                line.drop()
                self._make_room()
                await self._log_in(line)
            assert line.connection is not None
            return line.connection

    async def _log_in(self, line: _Line) -> None:
        witness = _Witness()
        try:
            async with asyncio.timeout(self._limits.connect_timeout_s):
                line.connection = await self._open(line, witness)
        except TimeoutError:
            line.drop()
            raise _unanswered(line.node, line.route, self._limits.connect_timeout_s) from None
        except (OSError, asyncssh.Error, ValueError) as error:
            line.drop()
            raise explain_failed_login(line.node, line.route, error, witness.offered) from error

    async def _open(self, line: _Line, witness: _Witness) -> asyncssh.SSHClientConnection:
        route, tunnel = line.route, None
        for jump in route.jumps:
            tunnel = await self._log_in_to_jump(line, jump, tunnel, witness)
        connection, _ = await asyncssh.create_connection(
            lambda: witness,
            route.host,
            route.port,
            tunnel=tunnel,
            proxy_command=() if route.proxy_command is None else _expand(route),
            host_key_alias=route.alias or (),
            **({} if route.password is None else {"password": route.password}),
            **self._options(route, route.user),
        )
        return connection

    async def _log_in_to_jump(
        self, line: _Line, jump: str, tunnel: asyncssh.SSHClientConnection | None, witness: _Witness
    ) -> asyncssh.SSHClientConnection:
        """Log in to a jump host; the key that was refused there counts as the node's."""
        user, _, address = jump.removeprefix("ssh://").rpartition("@")
        host, _, port = address.rpartition(":") if address.count(":") == 1 else (address, "", "")
        connection, _ = await asyncssh.create_connection(
            lambda: witness,
            host.strip("[]"),
            int(port or "22"),
            tunnel=tunnel,
            **self._options(line.route, user or None),
        )
        line.jumps.append(connection)
        return connection

    def _options(self, route: Route, user: str | None) -> dict[str, object]:
        options: dict[str, object] = {
            "known_hosts": self._known.read(route.known_hosts),
            "keepalive_interval": self._limits.keepalive_s,
            "keepalive_count_max": self._limits.keepalives_lost,
        }
        if user is not None:
            options["username"] = user
        if route.config is not None:
            options["config"] = [str(path) for path in route.config]
        if route.key_files:
            # The key that the inventory names, and no other: sshd counts every key that is tried.
            options |= {"client_keys": [str(path) for path in route.key_files], "agent_path": None}
        if route.password is None:
            options |= {"password_auth": False, "kbdint_auth": False}
        return options

    def _make_room(self) -> None:
        """Close the connection unused for longest where there are too many.

        There is always an unused one: commands at once are as many as connections.
        """
        opened = [line for line in self._lines.values() if line.connection is not None]
        if len(opened) >= self._limits.connections:
            for line in [line for line in opened if line.users == 0][:1]:
                self._expire(line)

    def _expire(self, line: _Line) -> None:
        if line.users == 0:
            if self._lines.get(line.node) is line:
                del self._lines[line.node]
            line.drop()

    async def _hang_up(self, line: _Line) -> None:
        connections = [c for c in (line.connection, *reversed(line.jumps)) if c is not None]
        line.drop()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._limits.close_timeout_s):
                for connection in connections:
                    await connection.wait_closed()


@dataclass(slots=True, eq=False)
class _Line:
    """One node's connection, the jump hosts it goes by, and who uses it."""

    node: str
    route: Route
    sessions: asyncio.Semaphore
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    connection: asyncssh.SSHClientConnection | None = None
    jumps: list[asyncssh.SSHClientConnection] = field(default_factory=list)
    users: int = 0
    idle_timer: asyncio.TimerHandle | None = None

    def stop_idle_timer(self) -> None:
        if self.idle_timer is not None:
            self.idle_timer.cancel()
            self.idle_timer = None

    def drop(self) -> None:
        """Close the connections without waiting for the other side."""
        self.stop_idle_timer()
        if self.connection is not None:
            self.connection.close()
            self.connection = None
        while self.jumps:
            self.jumps.pop().close()


class _Witness(asyncssh.SSHClient):
    """Remembers the host key that known_hosts does not have, and refuses it."""

    def __init__(self) -> None:
        self.offered: asyncssh.SSHKey | None = None

    def validate_host_public_key(self, host: str, addr: str, port: int, key: asyncssh.SSHKey) -> bool:
        self.offered = key
        return False


def _unanswered(node: str, route: Route, timeout_s: float) -> NodeUnreachable:
    return NodeUnreachable(f"{node}: no answer from {route.address} within {timeout_s:g}s")


def _expand(route: Route) -> str:
    """Put host, port and user into a ProxyCommand (ssh_config(5), TOKENS)."""
    tokens = {"%%": "%", "%h": route.host, "%p": str(route.port), "%r": route.user or "", "%n": route.host}
    text = route.proxy_command or ""
    return "".join(tokens.get(part, part) for part in _split_tokens(text))


def _split_tokens(text: str) -> list[str]:
    parts, rest = [], text
    while rest:
        size = 2 if rest[0] == "%" else 1
        parts.append(rest[:size])
        rest = rest[size:]
    return parts


class _KnownHosts:
    """Reads known_hosts files once for as long as they do not change."""

    def __init__(self) -> None:
        self._read: dict[tuple[Path, ...], tuple[tuple[tuple[int, int], ...], asyncssh.SSHKnownHosts]] = {}

    def read(self, paths: tuple[Path, ...]) -> asyncssh.SSHKnownHosts:
        """Return what the files say together; a file that is not there says nothing."""
        stamps = tuple(_stamp(path) for path in paths)
        cached = self._read.get(paths)
        if cached is None or cached[0] != stamps:
            text = "\n".join(path.read_text() for path, stamp in zip(paths, stamps, strict=True) if stamp[0])
            cached = self._read[paths] = (stamps, asyncssh.import_known_hosts(text))
        return cached[1]


def _stamp(path: Path) -> tuple[int, int]:
    try:
        status = path.stat()
    except FileNotFoundError:
        return 0, 0
    return status.st_mtime_ns, status.st_size
