"""The traffic probes `ssh` and `command` on a real sshd, with real connections."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from rolloutd.adapters.ssh.command import CommandProbe
from rolloutd.adapters.ssh.connections_probe import (
    Connection,
    ConnectionsProbe,
    UnreadableOutput,
    list_command,
    read_connections,
)
from rolloutd.adapters.ssh.shell import SshShell
from rolloutd.contracts import TrafficProbeBackend, TrafficProbeContract
from rolloutd.ports import Busy, Host, Ok, ShellResult, Unknown
from tests.contracts.fakes.clock import FakeClock
from tests.contracts.fakes.shell import FakeShell
from tests.contracts.ssh_fixtures import host_of, real_sshd, serve_connections, step_context

pytestmark = pytest.mark.servers


async def hold_open(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()


@dataclass(slots=True)
class ConnectionsBackend:
    """A node with a server on a port; open connections to it are the traffic."""

    host: Host
    shell: SshShell
    port: int
    clock: FakeClock = field(default_factory=FakeClock)
    clients: list[asyncio.StreamWriter] = field(default_factory=list)

    @property
    def params(self) -> dict[str, Any]:
        return {"established": [str(self.port)]}

    @property
    def probe(self) -> ConnectionsProbe:
        return ConnectionsProbe(self.shell, self.clock)

    async def start_traffic(self) -> None:
        _, client = await asyncio.open_connection("127.0.0.1", self.port)
        self.clients.append(client)

    async def stop_traffic(self) -> None:
        for client in self.clients:
            client.close()
            await client.wait_closed()
        self.clients.clear()

    async def hide_traffic(self) -> None:
        self.host = Host(self.host.name, connection={**self.host.connection, "ansible_port": 1})


@asynccontextmanager
async def connections_backend(directory: Path) -> AsyncIterator[ConnectionsBackend]:
    async with AsyncExitStack() as stack:
        sshd = stack.enter_context(real_sshd(directory / "sshd"))
        shell = SshShell(sshd.known_hosts)
        stack.push_async_callback(shell.close)
        port = await stack.enter_async_context(serve_connections(hold_open))
        backend = ConnectionsBackend(host_of(sshd), shell, port)
        stack.push_async_callback(backend.stop_traffic)
        yield backend


class TestConnectionsProbe(TrafficProbeContract):
    @asynccontextmanager
    async def open_backend(self, directory: Path) -> AsyncIterator[TrafficProbeBackend]:
        async with connections_backend(directory) as backend:
            yield backend


class CommandBackend(ConnectionsBackend):
    """The same node, judged by a command: a file is the traffic."""

    flag: Path

    @property
    def params(self) -> dict[str, Any]:
        return {"run": f"test ! -e {shlex.quote(str(self.flag))}", "on": "node"}

    @property
    def probe(self) -> Any:
        return CommandProbe(self.shell, self.clock)

    async def start_traffic(self) -> None:
        self.flag.touch()

    async def stop_traffic(self) -> None:
        self.flag.unlink(missing_ok=True)


class DaemonCommandBackend(CommandBackend):
    """The command runs on the daemon's machine; it ends with a status that means neither."""

    hidden = False

    @property
    def params(self) -> dict[str, Any]:
        check = f"test ! -e {shlex.quote(str(self.flag))}"
        return {"run": "exit 2" if self.hidden else check, "on": "daemon"}

    async def hide_traffic(self) -> None:
        self.hidden = True


class TestCommandProbe(TrafficProbeContract):
    backend_type: type[CommandBackend] = CommandBackend

    @asynccontextmanager
    async def open_backend(self, directory: Path) -> AsyncIterator[TrafficProbeBackend]:
        async with connections_backend(directory) as backend:
            command = self.backend_type(backend.host, backend.shell, backend.port)
            command.flag = directory / "busy"
            yield command


class TestDaemonCommandProbe(TestCommandProbe):
    backend_type = DaemonCommandBackend


async def test_own_session_is_not_counted(tmp_path: Path) -> None:
    async with connections_backend(tmp_path) as backend:
        port = str(backend.host.connection["ansible_port"])
        params = {"established": [port]}
        assert isinstance(await backend.probe.probe(step_context(backend.host, params)), Ok)
        other = SshShell(None)
        try:
            same_node = Host("other", connection=backend.host.connection)
            await other.run(same_node, "true", timeout_s=30.0)
            found = await backend.probe.probe(step_context(backend.host, params))
        finally:
            await other.close()
        assert found == Busy(f"n1 is busy: 1 connection on :{port} from 1 address", count=1)


async def test_ignored_ranges_and_maximum_are_idle(tmp_path: Path) -> None:
    async with connections_backend(tmp_path) as backend:
        await backend.start_traffic()
        for more in ({"ignore": ["127.0.0.0/8"]}, {"max": 1}):
            result = await backend.probe.probe(step_context(backend.host, backend.params | more))
            assert isinstance(result, Ok)


async def test_missing_ss_is_unknown(tmp_path: Path) -> None:
    async with connections_backend(tmp_path) as backend:
        host = Host("n1", connection=backend.host.connection)
        shell = backend.shell
        result = await shell.run(
            host, list_command([443]).replace("ss -Htn", "/nonexistent/ss"), timeout_s=30.0
        )
        with pytest.raises(UnreadableOutput, match="ss ended with status 127"):
            read_connections(result.stdout)


# -- what ss prints ------------------------------------------------------------------

LISTED = """\
own 192.0.2.7 51000 192.0.2.1 22
0      0      192.0.2.1:22             192.0.2.7:51000
0      0      192.0.2.1:443            198.51.100.9:40000
0      0      [::ffff:192.0.2.1]:443   [::ffff:198.51.100.9]:40001
0      0      [2001:db8::1]:443        [2001:db8::9]:40002
0      0      [fe80::1%eth0]:443       [fe80::9]%eth0:40003
0      0      192.0.2.1%eth0:443       198.51.100.10:40004 timer:(keepalive,9sec,0)
end 0
"""


async def judge(output: str, clock: FakeClock | None = None, **more: Any) -> Ok | Busy | Unknown:
    clock = clock or FakeClock()
    shell = FakeShell({list_command([443]): ShellResult(0, output, "")})
    probe = more.pop("probe", None) or ConnectionsProbe(shell, clock)
    return await probe.probe(step_context(Host("n1"), {"established": ["443"], **more}))


async def test_all_address_families_are_counted() -> None:
    assert await judge(LISTED) == Busy("n1 is busy: 5 connections on :443 from 4 addresses", count=5)


async def test_ignored_ipv4_range_covers_mapped_addresses() -> None:
    found = await judge(LISTED, ignore=["198.51.100.0/24", "fe80::/10"])
    assert found == Busy("n1 is busy: 1 connection on :443 from 1 address", count=1)


async def test_longest_connection_is_named_from_a_minute_on() -> None:
    clock = FakeClock()
    shell = FakeShell({list_command([443]): ShellResult(0, LISTED, "")})
    probe = ConnectionsProbe(shell, clock)
    assert "longest" not in getattr(await judge(LISTED, probe=probe), "text", "")
    clock.advance(14 * 60)
    assert getattr(await judge(LISTED, probe=probe), "text", "").endswith("from 4 addresses, longest 14m")


@pytest.mark.parametrize(
    "output",
    [
        "",
        "Netid Recv-Q\n",
        "own \nend 127\n",
        "own \n0 0 nonsense\nend 0\n",
        "own \n0 0 1.2.3.4:443\nend 0\n",
        "own \n0 0 1.2.3.4:443 5.6.7.8:http\nend 0\n",
        "own a b c d\nend 0\n",
    ],
)
async def test_unreadable_list_is_unknown(output: str) -> None:
    found = await judge(output)
    assert isinstance(found, Unknown)
    assert found.text.startswith("n1: traffic is unknown: ")


async def test_cut_list_counts_at_least_and_is_never_idle() -> None:
    cut = LISTED.replace("end 0\n", "0   0  192.0.2.1:4")
    found = await judge(cut)
    assert found == Busy("n1 is busy: at least 5 connections on :443 from 4 addresses", count=5)
    assert isinstance(await judge(cut, ignore=["0.0.0.0/0", "::/0"]), Unknown)


@pytest.mark.parametrize("port", ["0", "65536", "http", "443 or 1=1", "-1", ""])
async def test_rendered_text_that_is_no_port_is_unknown(port: str) -> None:
    probe = ConnectionsProbe(FakeShell(), FakeClock())
    found = await probe.probe(step_context(Host("n1"), {"established": [port]}))
    assert isinstance(found, Unknown)


def test_own_session_is_the_only_one_left_out() -> None:
    found, is_complete = read_connections(f"a banner\n{LISTED}")
    assert is_complete
    assert len(found) == 5
    assert Connection(22, found[0].peer, 51000) not in found


async def test_command_over_its_limit_is_unknown() -> None:
    context = step_context(Host("n1"), {"run": "sleep 600", "on": "daemon"})
    clock = FakeClock()
    clock.advance(60)
    probe = CommandProbe(FakeShell(), clock)
    found = await probe.probe(context)
    assert isinstance(found, Unknown)
    assert "did not end within 1s" in found.text


async def test_flood_of_a_command_is_bounded() -> None:
    probe = CommandProbe(FakeShell(), FakeClock())
    run = "head -c 3000000 /dev/zero | tr '\\0' x; exit 1"
    found = await probe.probe(step_context(Host("n1"), {"run": run, "on": "daemon"}))
    assert found == Busy("n1 is busy: " + "x" * 200)


async def test_unreachable_node_is_unknown() -> None:
    shell = FakeShell()
    shell.down.add("n1")
    for probe in (ConnectionsProbe(shell, FakeClock()), CommandProbe(shell, FakeClock())):
        found = await probe.probe(step_context(Host("n1"), {"established": ["443"], "run": "true"}))
        assert found == Unknown("n1: traffic is unknown: n1: tcp connect refused")
