"""One command on one ssh connection: its input, its output up to a limit, and how it ended.

Connections are not its affair: it is given one and leaves it as it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal

import asyncssh

from rolloutd.errors import NodeUnreachable
from rolloutd.ports import ShellResult

_Opened = tuple[asyncssh.SSHClientChannel[bytes], asyncssh.SSHClientSession[bytes]]

COMMAND_LENGTH = 120
"""Kept of a command in a sentence: enough to recognise it."""


class NotStartedError(Exception):
    """A session could not be opened, so the command was not started."""


class _Kept:
    """The beginning of an output, and how long it was."""

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


class Collector(asyncssh.SSHClientSession[bytes]):
    """Takes what a command says, up to a limit, and how it ended."""

    def __init__(self, limit: int) -> None:
        self._outputs = (_Kept(limit), _Kept(limit))
        self._status: int | None = None
        self._lost: Exception | None = None
        self.ended = asyncio.Event()
        self.abandoned = False

    def connection_made(self, chan: asyncssh.SSHClientChannel[bytes]) -> None:
        if self.abandoned:  # the session is open, the command not yet asked for: it never is
            chan.close()
            raise NotStartedError("nobody waits for this command any more")

    def data_received(self, data: bytes, datatype: int | None) -> None:
        self._outputs[0 if datatype is None else 1].add(data)

    def exit_status_received(self, status: int) -> None:
        self._status = status

    def exit_signal_received(self, signal: str, core_dumped: bool, msg: str, lang: str) -> None:
        self._status = 128 + _signal_number(signal)

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = exc
        self.ended.set()

    def result(self, node: str, command: str) -> ShellResult:
        """Return how the command ended; raises NodeUnreachable when nobody was told."""
        if self._status is None:
            raise NodeUnreachable(
                f"{node}: the connection was lost while `{command[:COMMAND_LENGTH]}` ran, "
                f"so how it ended is not known: {self._lost or 'closed by the node'}"
            )
        return ShellResult(self._status, self._outputs[0].text(), self._outputs[1].text())


async def run_session(
    connection: asyncssh.SSHClientConnection, command: str, stdin: bytes, limit: int
) -> Collector:
    collector = Collector(limit)
    opening = asyncio.ensure_future(connection.create_session(lambda: collector, command, encoding=None))
    try:
        channel, _ = await asyncio.shield(opening)
    except (asyncssh.Error, OSError) as error:
        raise NotStartedError(str(error)) from error
    except asyncio.CancelledError:
        # The node may start the command all the same, so it is ended as soon as it is known to run.
        collector.abandoned = True
        opening.add_done_callback(_end_late)
        raise
    try:
        with contextlib.suppress(BrokenPipeError):  # the command ended without reading
            channel.write(stdin)
            channel.write_eof()
        await collector.ended.wait()
    finally:
        if not collector.ended.is_set():
            _end(channel)
    return collector


def _end(channel: asyncssh.SSHClientChannel[bytes]) -> None:
    with contextlib.suppress(OSError):
        channel.terminate()
    channel.close()


def _end_late(opening: asyncio.Future[_Opened]) -> None:
    """End a command that nobody waits for any more; one that was not started needs no end."""
    if not opening.cancelled() and opening.exception() is None:
        _end(opening.result()[0])


def _signal_number(name: str) -> int:
    try:
        return signal.Signals[f"SIG{name}"].value
    except KeyError:
        return 127  # a signal that this machine does not have: 255, as ssh itself says of an unknown end
