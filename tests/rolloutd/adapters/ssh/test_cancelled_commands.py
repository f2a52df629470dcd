"""What becomes of a command that is given up, or whose connection is lost, while the node is starting it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import asyncssh
import pytest

from rolloutd.adapters.ssh.shell import SshShell
from rolloutd.errors import LeadershipLost, NodeUnreachable
from rolloutd.ports import Host
from tests.contracts.ssh_fixtures import LIMIT_S, serve_connections


class SlowServer(asyncssh.SSHServer):
    """A node that starts commands, and whose word of it is held back on the way."""

    def __init__(self, world: SlowSshd) -> None:
        self._world = world

    def begin_auth(self, username: str) -> bool:
        return False

    def session_requested(self) -> asyncssh.SSHServerSession[bytes]:
        self._world.asked.set()
        if self._world.hold_open:
            self._world.flowing.clear()
        return SlowSession(self._world)


class SlowSession(asyncssh.SSHServerSession[bytes]):
    """One command that never ends by itself."""

    def __init__(self, world: SlowSshd) -> None:
        self._world = world

    def exec_requested(self, command: str) -> bool:
        self._world.said.append(command)
        self._world.flowing.clear()
        return True

    def signal_received(self, signal: str) -> None:
        self._world.said.append(signal)

    def connection_lost(self, exc: Exception | None) -> None:
        self._world.closed.set()


class SlowSshd:
    """What the slow node was asked, and the tap on its way back to us."""

    def __init__(self, *, hold_open: bool) -> None:
        self.hold_open = hold_open
        self.asked, self.closed, self.flowing = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.flowing.set()
        self.said: list[str] = []
        self._writers: list[asyncio.StreamWriter] = []

    @asynccontextmanager
    async def host(self, directory: Path) -> AsyncIterator[Host]:
        """Yield the node, behind its tap."""
        key = asyncssh.generate_private_key("ssh-ed25519")
        server = await asyncssh.listen(
            "127.0.0.1", 0, server_factory=lambda: SlowServer(self), server_host_keys=[key]
        )
        async with server, serve_connections(lambda *ends: self._tap(server.get_port(), *ends)) as port:
            known = directory / "known_hosts"
            known.write_text(f"[127.0.0.1]:{port} {key.export_public_key().decode()}")
            arguments = f'-F /dev/null -o UserKnownHostsFile="{known}" -o GlobalKnownHostsFile=/dev/null'
            variables = {"ansible_host": "127.0.0.1", "ansible_port": port, "ansible_user": "somebody"}
            yield Host("n1", connection={**variables, "ansible_ssh_common_args": arguments})

    async def _tap(self, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        behind, to_behind = await asyncio.open_connection("127.0.0.1", port)
        self._writers.append(writer)

        async def back() -> None:
            while chunk := await behind.read(65536):
                await self.flowing.wait()
                writer.write(chunk)

        returning = asyncio.create_task(back())
        try:
            while chunk := await reader.read(65536):
                to_behind.write(chunk)
        finally:
            returning.cancel()
            to_behind.transport.abort()

    def lose_connections(self) -> None:
        """End the connections to us, without what is held back on them."""
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()
        self.flowing.set()


@pytest.mark.parametrize(("hold_open", "said"), [(False, ["work", "TERM"]), (True, [])])
async def test_a_command_given_up_while_it_is_being_started_is_ended(
    tmp_path: Path, hold_open: bool, said: list[str]
) -> None:
    world, shell = SlowSshd(hold_open=hold_open), SshShell()
    async with asyncio.timeout(LIMIT_S), world.host(tmp_path) as host:
        running = asyncio.create_task(shell.run(host, "work", timeout_s=LIMIT_S))
        await world.asked.wait()
        while world.flowing.is_set():
            await asyncio.sleep(0.01)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        world.flowing.set()
        await world.closed.wait()
        assert world.said == said
        await shell.close()


async def test_command_that_may_have_started_is_not_repeated(tmp_path: Path) -> None:
    world, shell = SlowSshd(hold_open=False), SshShell()
    async with asyncio.timeout(LIMIT_S), world.host(tmp_path) as host:
        running = asyncio.create_task(shell.run(host, "work", timeout_s=5.0))
        await world.asked.wait()
        while world.flowing.is_set():
            await asyncio.sleep(0.01)
        world.lose_connections()
        with pytest.raises(NodeUnreachable, match="n1: the connection was lost while `work` ran"):
            await running
        assert world.said == ["work"]
        await shell.close()


async def test_lost_leader_begins_no_transfer(tmp_path: Path) -> None:
    def lost() -> None:
        raise LeadershipLost("another daemon has taken over")

    world, shell = SlowSshd(hold_open=False), SshShell(before_command=lost)
    async with asyncio.timeout(LIMIT_S), world.host(tmp_path) as host:
        with pytest.raises(LeadershipLost):
            async with shell.open_sftp(host):
                pass
        assert not world.asked.is_set()
        await shell.close()
