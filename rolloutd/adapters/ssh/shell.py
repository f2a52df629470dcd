"""Shell over one pooled ssh connection per node.

Commands of a node share its connection.  A dead connection, or one whose route the inventory changed, is
replaced; an idle one is closed.  Host keys are always checked.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import asyncssh

from rolloutd.adapters.ssh.login_errors import login_error
from rolloutd.adapters.ssh.route import Route, read_route
from rolloutd.adapters.ssh.session import NotStartedError, OutputCollector, describe_command, run_session
from rolloutd.errors import AdapterFailed, NodeUnreachable
from rolloutd.ports import ConnectionDefaults, Host, ShellResult

_log = logging.getLogger(__name__)

HOST_KEY_ALGORITHMS = (("ssh-ed25519",), ("ecdsa-sha2-nistp256",), ("rsa-sha2-512", "rsa-sha2-256"))
"""Types of host keys that sshd has by default, each with the algorithms that it signs with."""

_ENDED_EARLY = (
    asyncssh.KeyExchangeFailed,
    asyncssh.ConnectionLost,
    ConnectionResetError,
    BrokenPipeError,
)


@dataclass(frozen=True, slots=True)
class SshLimits:
    connect_timeout_s: float = 10.0
    """TCP, key exchange and login: a healthy node needs under one second."""
    keepalive_interval_s: float = 10.0
    max_missed_keepalives: int = 3
    """A silent node is detected after half a minute."""
    idle_timeout_s: float = 300.0
    """A node's steps follow each other within minutes."""
    max_connections: int = 256
    """Connections that idle ones leave room for, and concurrent commands: more than nodes in flight."""
    max_transfers: int = 128
    """Concurrent SFTP sessions: a transfer lasts long, and commands must find a connection all the same."""
    max_sessions: int = 8
    """Concurrent commands on one connection: sshd's MaxSessions is 10."""
    max_output_bytes: int = 64 * 1024
    """Limit of stdout and of stderr each: evidence for people, not a transfer."""
    close_timeout_s: float = 5.0


class SshShell:
    """ports.Shell over asyncssh; the arguments are defaults for values missing in the inventory."""

    def __init__(
        self,
        known_hosts: Path | None = None,
        user: str | None = None,
        key_file: Path | None = None,
        limits: SshLimits | None = None,
        *,
        before_command: Callable[[], None] = lambda: None,
    ) -> None:
        """`before_command` is called before each command and transfer on a connection, and may raise."""
        self._before_command = before_command
        self._defaults = ConnectionDefaults(known_hosts, user, key_file)
        self._limits = limits or SshLimits()
        self._connections: dict[str, _PooledConnection] = {}
        self._command_slots = asyncio.Semaphore(self._limits.max_connections)
        self._transfer_slots = asyncio.Semaphore(self._limits.max_transfers)
        # asyncssh logs every command line at INFO, and command lines may carry secrets.
        asyncssh.set_log_level(logging.WARNING)

    async def run(self, host: Host, command: str, *, timeout_s: float, stdin: str = "") -> ShellResult:
        """Run a shell command; its exit status is 128 + n if signal n ended it.

        Raises NodeUnreachable (its result is unknown if the connection was lost while it ran), HostKeyChanged
        and TimeoutError.  A timeout sends SIGTERM, which OpenSSH's server delivers for every user but root.
        """
        route = read_route(host, self._defaults)
        logged_in = False
        try:
            async with (
                # The wait for a slot counts: the caller's deadline does not wait for other nodes.
                asyncio.timeout(timeout_s),
                self._command_slots,
                self._lease(host.name, route) as pooled,
            ):
                await self._connect(pooled)
                logged_in = True
                self._before_command()
                collector = await self._execute(pooled, command, stdin.encode())
        except TimeoutError:
            if not logged_in:
                raise _no_answer_error(host.name, route, timeout_s) from None
            raise TimeoutError(
                f"{host.name}: {describe_command(command)} did not end within {timeout_s:g}s"
            ) from None
        return collector.result(host.name, command)

    async def read_host_keys(self, host: Host) -> Sequence[asyncssh.SSHKey]:
        """Return the host keys that the node's sshd offers, without a login to it.

        A jump host before it is logged in to, so its key must be in known_hosts.  Raises NodeUnreachable.
        """
        route, keys = read_route(host, self._defaults), []
        pooled = _PooledConnection(host.name, route, asyncio.Semaphore(1))
        recorder, tunnel = _HostKeyRecorder(), None
        try:
            async with asyncio.timeout(self._limits.connect_timeout_s):
                for jump in route.jumps:
                    tunnel = await self._log_in_to_jump(pooled, jump, tunnel, recorder)
                for algorithms in HOST_KEY_ALGORITHMS:
                    # A server without a key of this type ends the connection, often before it says so.
                    with contextlib.suppress(*_ENDED_EARLY):
                        key = await asyncssh.get_server_host_key(
                            route.host,
                            route.port,
                            tunnel=tunnel,
                            proxy_command=_proxy_command(route),
                            server_host_key_algs=algorithms,
                        )
                        keys += [key] if key is not None else []
        except TimeoutError:
            raise _no_answer_error(host.name, route, self._limits.connect_timeout_s) from None
        except (OSError, asyncssh.Error, ValueError) as error:
            raise login_error(host.name, route, error, recorder.offered_key) from error
        finally:
            pooled.abort()
        if not keys:
            raise NodeUnreachable(
                f"{host.name}: {route.address} ends each connection without a host key; check its sshd"
            )
        return keys

    @contextlib.asynccontextmanager
    async def open_sftp(self, host: Host) -> AsyncIterator[asyncssh.SFTPClient]:
        """Open an SFTP session on the node's connection; the caller limits its time.

        Raises NodeUnreachable, also when the connection is lost in the body, and AdapterFailed if the node
        has no SFTP server.
        """
        async with self._transfer_slots, self._lease(host.name, read_route(host, self._defaults)) as pooled:
            connection = await self._connect(pooled)
            self._before_command()
            try:
                async with connection.start_sftp_client() as sftp:
                    yield sftp
            except (asyncssh.ConnectionLost, asyncssh.SFTPConnectionLost, asyncssh.SFTPNoConnection) as error:
                raise NodeUnreachable(
                    f"{host.name}: the connection was lost in a transfer: {error}"
                ) from error
            except (asyncssh.ChannelOpenError, asyncssh.SFTPBadMessage) as error:
                raise AdapterFailed(
                    f"{host.name}: no SFTP server answers: {error}; enable it in sshd"
                ) from error

    async def disconnect(self, node: str) -> None:
        pooled = self._connections.pop(node, None)
        if pooled is not None:
            await self._close_and_wait(pooled)

    async def close(self) -> None:
        all_pooled = list(self._connections.values())
        self._connections.clear()
        # At once: each may take the whole limit, and systemd waits for all of them.
        async with asyncio.TaskGroup() as group:
            for pooled in all_pooled:
                group.create_task(self._close_and_wait(pooled))

    @contextlib.asynccontextmanager
    async def _lease(self, node: str, route: Route) -> AsyncIterator[_PooledConnection]:
        pooled = self._connections.pop(node, None)
        if pooled is not None and pooled.route != route:
            self._close_if_unused(pooled)  # commands still on it keep it until they end
            pooled = None
        if pooled is None:
            pooled = _PooledConnection(node, route, asyncio.Semaphore(self._limits.max_sessions))
        self._connections[node] = pooled  # at the end: the dictionary is in order of last use
        pooled.stop_idle_timer()
        pooled.users += 1
        try:
            async with pooled.sessions:
                yield pooled
        finally:
            pooled.users -= 1
            if self._connections.get(node) is not pooled:
                self._close_if_unused(pooled)
            elif pooled.users == 0:
                loop = asyncio.get_running_loop()
                pooled.idle_timer = loop.call_later(
                    self._limits.idle_timeout_s, self._close_if_unused, pooled
                )

    async def _execute(self, pooled: _PooledConnection, command: str, stdin: bytes) -> OutputCollector:
        for may_retry in (True, False):
            connection = await self._connect(pooled)
            try:
                return await run_session(connection, command, stdin, self._limits.max_output_bytes)
            except NotStartedError as error:
                await asyncio.sleep(0)  # asyncssh marks a lost connection closed in its next turn
                # A pooled connection may have died unnoticed: nothing was started on it, so once more.
                if not (may_retry and connection.is_closed()):
                    raise NodeUnreachable(
                        f"{pooled.node}: {pooled.route.address} opens no session: {error}"
                    ) from error
        raise AssertionError("unreachable")

    async def _connect(self, pooled: _PooledConnection) -> asyncssh.SSHClientConnection:
        # Commands that begin together would each open a connection, and sshd limits unfinished logins.
        async with pooled.lock:
            if pooled.connection is None or pooled.connection.is_closed():
                pooled.abort()
                self._evict_idle()
                await self._log_in(pooled)
            assert pooled.connection is not None
            return pooled.connection

    async def _log_in(self, pooled: _PooledConnection) -> None:
        recorder = _HostKeyRecorder()
        try:
            async with asyncio.timeout(self._limits.connect_timeout_s):
                pooled.connection = await self._open(pooled, recorder)
        except TimeoutError:
            pooled.abort()
            raise _no_answer_error(pooled.node, pooled.route, self._limits.connect_timeout_s) from None
        except (OSError, asyncssh.Error, ValueError) as error:
            pooled.abort()
            raise login_error(pooled.node, pooled.route, error, recorder.offered_key) from error

    async def _open(
        self, pooled: _PooledConnection, recorder: _HostKeyRecorder
    ) -> asyncssh.SSHClientConnection:
        route, tunnel = pooled.route, None
        for jump in route.jumps:
            tunnel = await self._log_in_to_jump(pooled, jump, tunnel, recorder)
        connection, _ = await asyncssh.create_connection(
            lambda: recorder,
            route.host,
            route.port,
            tunnel=tunnel,
            proxy_command=_proxy_command(route),
            host_key_alias=route.alias or (),
            **({} if route.password is None else {"password": route.password}),
            **self._connect_options(route, route.user),
        )
        return connection

    async def _log_in_to_jump(
        self,
        pooled: _PooledConnection,
        jump: str,
        tunnel: asyncssh.SSHClientConnection | None,
        recorder: _HostKeyRecorder,
    ) -> asyncssh.SSHClientConnection:
        """Log in to a jump host; a host key that is rejected there is reported as the node's."""
        user, _, address = jump.removeprefix("ssh://").rpartition("@")
        host, _, port = address.rpartition(":") if address.count(":") == 1 else (address, "", "")
        connection, _ = await asyncssh.create_connection(
            lambda: recorder,
            host.strip("[]"),
            int(port or "22"),
            tunnel=tunnel,
            **self._connect_options(pooled.route, user or None),
        )
        pooled.jumps.append(connection)
        return connection

    def _connect_options(self, route: Route, user: str | None) -> dict[str, object]:
        options: dict[str, object] = {
            "known_hosts": read_known_hosts(route.known_hosts),
            "keepalive_interval": self._limits.keepalive_interval_s,
            "keepalive_count_max": self._limits.max_missed_keepalives,
        }
        if user is not None:
            options["username"] = user
        if route.config is not None:
            options["config"] = [str(path) for path in route.config]
        if route.key_files:
            # Only the keys of the inventory: sshd counts every key that is tried.
            options |= {"client_keys": [str(path) for path in route.key_files], "agent_path": None}
        if route.password is None:
            options |= {"password_auth": False, "kbdint_auth": False}
        return options

    def _evict_idle(self) -> None:
        """Close the least recently used idle connection if the pool is full.

        Often none is: commands have slots for as many connections, and transfers have slots of their own.
        """
        opened = [line for line in self._connections.values() if line.connection is not None]
        if len(opened) >= self._limits.max_connections:
            for line in [line for line in opened if line.users == 0][:1]:
                self._close_if_unused(line)

    def _close_if_unused(self, pooled: _PooledConnection) -> None:
        if pooled.users == 0:
            if self._connections.get(pooled.node) is pooled:
                del self._connections[pooled.node]
            pooled.abort()

    async def _close_and_wait(self, pooled: _PooledConnection) -> None:
        connections = [c for c in (pooled.connection, *reversed(pooled.jumps)) if c is not None]
        pooled.abort()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._limits.close_timeout_s):
                for connection in connections:
                    await connection.wait_closed()


@dataclass(slots=True, eq=False)
class _PooledConnection:
    """One node's connection, its jump hosts' connections, and its users."""

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

    def abort(self) -> None:
        """Close the connections without waiting for the other side."""
        self.stop_idle_timer()
        if self.connection is not None:
            self.connection.close()
            self.connection = None
        while self.jumps:
            self.jumps.pop().close()


class _HostKeyRecorder(asyncssh.SSHClient):
    """Records the host key that known_hosts does not have, and rejects it."""

    def __init__(self) -> None:
        self.offered_key: asyncssh.SSHKey | None = None

    def validate_host_public_key(self, host: str, addr: str, port: int, key: asyncssh.SSHKey) -> bool:
        self.offered_key = key
        return False


def _no_answer_error(node: str, route: Route, timeout_s: float) -> NodeUnreachable:
    return NodeUnreachable(f"{node}: no answer from {route.address} within {timeout_s:g}s")


def _proxy_command(route: Route) -> str | tuple[()]:
    """Return the route's ProxyCommand with its tokens replaced (ssh_config(5), TOKENS)."""
    if route.proxy_command is None:
        return ()
    tokens = {"%%": "%", "%h": route.host, "%p": str(route.port), "%r": route.user or "", "%n": route.host}
    return re.sub("%.", lambda match: tokens.get(match[0], match[0]), route.proxy_command, flags=re.S)


def read_known_hosts(paths: tuple[Path, ...]) -> asyncssh.SSHKnownHosts:
    """Return the keys of all files; a missing file has none."""
    return _parse_known_hosts(tuple((path, _file_version(path)) for path in paths))


# Few: each version of a large fleet's file takes megabytes, and a fleet that grows writes it often.
@lru_cache(maxsize=4)
def _parse_known_hosts(files: tuple[tuple[Path, tuple[int, int]], ...]) -> asyncssh.SSHKnownHosts:
    # Once for each version of the files: every login needs them, and a fleet's file has thousands of lines.
    lines = [
        (f"{path} line {number}", line)
        for path, version in files
        if version[0]
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1)
    ]
    try:
        return asyncssh.import_known_hosts("\n".join(line for _, line in lines))
    except ValueError:  # asyncssh reads nothing then, and OpenSSH the other lines
        return asyncssh.import_known_hosts("\n".join(line for place, line in lines if _is_valid(place, line)))


def _is_valid(place: str, line: str) -> bool:
    """Return whether a line of known_hosts can be read; log one that cannot."""
    try:
        asyncssh.import_known_hosts(line)
    except ValueError as error:
        _log.warning("%s is left out: %s; correct or remove it", place, error)
        return False
    return True


def _file_version(path: Path) -> tuple[int, int]:
    try:
        status = path.stat()
    except FileNotFoundError:
        return 0, 0
    return status.st_mtime_ns, status.st_size
