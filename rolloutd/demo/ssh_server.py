"""One node's sshd: an asyncssh server whose commands run in the node's directory.

Like a real sshd without a terminal, it leaves a command running when its client
disconnects; `stop` kills all commands.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Mapping
from typing import Any

import asyncssh

from rolloutd.demo.node import Fault, NodeDirectory

LOGIN_TIMEOUT_S = 60.0
"""Limit of a login, long enough for a loaded machine."""

COMMAND_NOT_STARTED = 126
"""The exit status of a shell for a command that it cannot run."""


class NodeSshServer:
    """The sshd of one node; `mark` is in the environment of every command."""

    def __init__(self, node: NodeDirectory, mark: Mapping[str, str]) -> None:
        self._node = node
        self._mark = mark
        self._commands: set[_Command] = set()
        self.connections: set[asyncssh.SSHServerConnection] = set()
        self._listener: asyncssh.SSHAcceptor | None = None

    @property
    def port(self) -> int:
        """The port; only after start()."""
        assert self._listener is not None
        return self._listener.get_port()

    async def start(self, host_key: asyncssh.SSHKey, client_keys: asyncssh.SSHAuthorizedKeys) -> None:
        """Listen on a loopback port that the system chooses."""
        self._listener = await asyncssh.listen(
            "127.0.0.1",
            0,
            server_factory=lambda: _Connection(self),
            server_host_keys=[host_key],
            authorized_client_keys=client_keys,
            encoding=None,
            line_editor=False,
            login_timeout=LOGIN_TIMEOUT_S,
            agent_forwarding=False,
            password_auth=False,
            kbdint_auth=False,
            gss_host=None,
        )

    async def stop(self) -> None:
        """Close the port and the connections, and kill the commands."""
        if self._listener is not None:
            self._listener.close()
            await self._listener.wait_closed()
        for connection in list(self.connections):
            connection.abort()
        for command in list(self._commands):
            command.signal("KILL")

    async def wait_ended(self) -> None:
        """Return when all commands, and all processes that hold their output open, have ended."""
        for command in list(self._commands):
            await command.ended.wait()

    def is_refusing(self) -> bool:
        """Return whether the node's fault makes sshd refuse connections."""
        return self._node.current_fault() is Fault.SSHD_REFUSES

    async def spawn(
        self, command: str | None, on_output: Callable[[bytes, int], None], on_exit: Callable[[int], None]
    ) -> _Command:
        """Start a command line, or a plain shell without one."""
        environment = {**self._node.environment(), **self._mark, "ROLLOUTD_NODE": self._node.root.name}
        arguments = ["/bin/sh"] if command is None else ["/bin/sh", "-c", command]
        loop = asyncio.get_running_loop()
        _, started = await loop.subprocess_exec(
            lambda: _Command(self._commands, on_output, on_exit),
            *arguments,
            cwd=self._node.root,
            env=environment,
            start_new_session=True,
        )
        return started


class _Connection(asyncssh.SSHServer):
    def __init__(self, server: NodeSshServer) -> None:
        self._server = server
        self._connection: asyncssh.SSHServerConnection | None = None

    def connection_made(self, conn: asyncssh.SSHServerConnection) -> None:
        self._connection = conn
        self._server.connections.add(conn)
        if self._server.is_refusing():
            conn.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._connection is not None:
            self._server.connections.discard(self._connection)

    def begin_auth(self, username: str) -> bool:
        return True

    def session_requested(self) -> asyncssh.SSHServerSession[bytes] | bool:
        assert self._connection is not None
        if self._server.is_refusing():
            self._connection.abort()
            return False
        return _Session(self._server)


class _Session(asyncssh.SSHServerSession[bytes]):
    def __init__(self, server: NodeSshServer) -> None:
        self._server = server
        self._channel: asyncssh.SSHServerChannel[bytes] | None = None
        self._line: str | None = None
        self._command: _Command | None = None
        self._buffered_input: list[bytes | None] = []

    def connection_made(self, chan: asyncssh.SSHServerChannel[bytes]) -> None:
        self._channel = chan

    def connection_lost(self, exc: Exception | None) -> None:
        self._channel = None
        if self._command is not None:
            self._command.close_input()
            self._command.set_reading(True)

    def pty_requested(self, term_type: str, term_size: Any, term_modes: Any) -> bool:
        return True

    def shell_requested(self) -> bool:
        return True

    def exec_requested(self, command: str) -> bool:
        self._line = command
        return True

    def session_started(self) -> None:
        assert self._channel is not None
        # A task of the connection: asyncssh calls this method, which may not wait.
        self._channel.get_connection().create_task(self._spawn())

    def data_received(self, data: bytes, datatype: int | None) -> None:
        if self._command is None:
            self._buffered_input.append(data)
        else:
            self._command.write(data)

    def eof_received(self) -> bool:
        if self._command is None:
            self._buffered_input.append(None)
        else:
            self._command.close_input()
        return True

    def signal_received(self, signal: str) -> None:
        if self._command is not None:
            self._command.signal(signal)

    def pause_writing(self) -> None:
        if self._command is not None:
            self._command.set_reading(False)

    def resume_writing(self) -> None:
        if self._command is not None:
            self._command.set_reading(True)

    async def _spawn(self) -> None:
        try:
            self._command = await self._server.spawn(self._line, self._write_output, self._exit)
        except OSError as error:
            self._write_output(f"/bin/sh: {error.strerror}\n".encode(), 2)
            self._exit(COMMAND_NOT_STARTED)
            return
        for data in self._buffered_input:
            if data is None:
                self._command.close_input()
            else:
                self._command.write(data)
        self._buffered_input.clear()

    def _write_output(self, data: bytes, descriptor: int) -> None:
        if self._channel is not None:
            with contextlib.suppress(BrokenPipeError):
                self._channel.write(data, asyncssh.EXTENDED_DATA_STDERR if descriptor == 2 else None)

    def _exit(self, status: int) -> None:
        if self._channel is None:
            return
        if status < 0:
            self._channel.exit_with_signal(signal.Signals(-status).name.removeprefix("SIG"))
        else:
            self._channel.exit(status)


class _Command(asyncio.SubprocessProtocol):
    def __init__(
        self, running: set[_Command], on_output: Callable[[bytes, int], None], on_exit: Callable[[int], None]
    ) -> None:
        self._running = running
        self._on_output = on_output
        self._on_exit = on_exit
        self._transport: asyncio.SubprocessTransport | None = None
        self.ended = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.SubprocessTransport)
        self._transport = transport
        self._running.add(self)

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        self._on_output(data, fd)

    def connection_lost(self, exc: Exception | None) -> None:
        assert self._transport is not None
        self._running.discard(self)
        self.ended.set()
        self._on_exit(self._transport.get_returncode() or 0)
        self._transport.close()

    def write(self, data: bytes) -> None:
        """Write to the command's stdin; unread data is lost when it ends."""
        pipe = self._pipe(0)
        if isinstance(pipe, asyncio.WriteTransport) and not pipe.is_closing():
            pipe.write(data)

    def close_input(self) -> None:
        pipe = self._pipe(0)
        if isinstance(pipe, asyncio.WriteTransport) and not pipe.is_closing():
            pipe.close()

    def set_reading(self, on: bool) -> None:
        """Read the command's output, or pause while the client is slow."""
        for descriptor in (1, 2):
            pipe = self._pipe(descriptor)
            if isinstance(pipe, asyncio.ReadTransport) and not pipe.is_closing():
                (pipe.resume_reading if on else pipe.pause_reading)()

    def signal(self, name: str) -> None:
        """Send a signal to the command's process group."""
        number = getattr(signal, f"SIG{name}", None)
        if number is not None and self._transport is not None and self._transport.get_returncode() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._transport.get_pid(), number)

    def _pipe(self, descriptor: int) -> asyncio.BaseTransport | None:
        return None if self._transport is None else self._transport.get_pipe_transport(descriptor)
