"""One command on a given ssh connection: input, limited output and exit status."""

from __future__ import annotations

import asyncio
import contextlib
import signal

import asyncssh

from rolloutd.errors import NodeUnreachable
from rolloutd.ports import ShellResult

_Opened = tuple[asyncssh.SSHClientChannel[bytes], asyncssh.SSHClientSession[bytes]]

MAX_COMMAND_LENGTH = 120
"""Limit of a quoted command: enough to recognise it."""


def describe_command(command: str) -> str:
    """Return a command as an error names it; rolloutd's own scripts have more than one line."""
    first, newline, _ = command.partition("\n")
    return "a script" if newline else f"`{first[:MAX_COMMAND_LENGTH]}`"


class NotStartedError(Exception):
    """A session could not be opened, so the command was not started."""


class _OutputBuffer:
    """The beginning of an output, and its whole length."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._bytes = bytearray()
        self._length = 0

    def add(self, chunk: bytes) -> None:
        self._length += len(chunk)
        self._bytes += chunk[: max(0, self._limit - len(self._bytes))]

    def text(self) -> str:
        text = self._bytes.decode(errors="replace")
        if self._length > self._limit:
            text += f"\n[cut: the first {self._limit} of {self._length} bytes]"
        return text


class OutputCollector(asyncssh.SSHClientSession[bytes]):
    """Collects a command's output up to a limit and its exit status."""

    def __init__(self, limit: int) -> None:
        self._outputs = (_OutputBuffer(limit), _OutputBuffer(limit))
        self._status: int | None = None
        self._loss_reason: Exception | None = None
        self.ended = asyncio.Event()
        self.is_abandoned = False

    def connection_made(self, chan: asyncssh.SSHClientChannel[bytes]) -> None:
        if self.is_abandoned:  # the session is open, the command not yet asked for: it never is
            chan.close()
            raise NotStartedError("the caller was cancelled")

    def data_received(self, data: bytes, datatype: int | None) -> None:
        self._outputs[0 if datatype is None else 1].add(data)

    def exit_status_received(self, status: int) -> None:
        self._status = status

    def exit_signal_received(self, signal: str, core_dumped: bool, msg: str, lang: str) -> None:
        self._status = 128 + _signal_number(signal)

    def connection_lost(self, exc: Exception | None) -> None:
        self._loss_reason = exc
        self.ended.set()

    def result(self, node: str, command: str) -> ShellResult:
        """Return the command's result; raises NodeUnreachable if the connection was lost before its end."""
        if self._status is None:
            raise NodeUnreachable(
                f"{node}: the connection was lost while {describe_command(command)} ran, "
                f"so how it ended is not known: {self._loss_reason or 'closed by the node'}"
            )
        return ShellResult(self._status, self._outputs[0].text(), self._outputs[1].text())


async def run_session(
    connection: asyncssh.SSHClientConnection, command: str, stdin: bytes, limit: int
) -> OutputCollector:
    collector = OutputCollector(limit)
    # As bytes: asyncssh drops a connection whose output is not valid in the encoding.
    opening = asyncio.ensure_future(connection.create_session(lambda: collector, command, encoding=None))
    try:
        channel, _ = await asyncio.shield(opening)
    except (asyncssh.Error, OSError) as error:
        # Its session was open: the node may have started the command, and only its word of it was lost.
        if collector.ended.is_set():
            return collector
        raise NotStartedError(str(error)) from error
    except asyncio.CancelledError:
        # The node may still start the command, so it is ended as soon as its session is open.
        collector.is_abandoned = True
        opening.add_done_callback(_terminate_late)
        raise
    try:
        with contextlib.suppress(BrokenPipeError):  # the command ended without reading
            channel.write(stdin)
            channel.write_eof()
        # The end of the channel, because output may still follow the exit status (RFC 4254, 6.10).
        await collector.ended.wait()
    finally:
        if not collector.ended.is_set():
            _terminate(channel)
    return collector


def _terminate(channel: asyncssh.SSHClientChannel[bytes]) -> None:
    with contextlib.suppress(OSError):
        channel.terminate()
    channel.close()


def _terminate_late(opening: asyncio.Future[_Opened]) -> None:
    """End an abandoned command, if it was started."""
    if not opening.cancelled() and opening.exception() is None:
        _terminate(opening.result()[0])


def _signal_number(name: str) -> int:
    try:
        return signal.Signals[f"SIG{name}"].value
    except KeyError:
        return 127  # a signal that this machine does not have: 255, as ssh reports an unknown end
