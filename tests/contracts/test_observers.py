"""The contract of ports.Observer, for its fake and for `reachable` against a real sshd."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from machines.model.node import NodeHealth
from rolloutd.adapters.ssh import reachable
from rolloutd.adapters.ssh.reachable import ReachableObserver
from rolloutd.contracts import ObserverBackend, ObserverContract
from rolloutd.ports import Host, Observer
from tests.contracts.fakes.clock import FakeClock
from tests.contracts.fakes.observer import FakeObserver
from tests.contracts.fakes.shell import FakeShell
from tests.contracts.ssh_fixtures import host_of, real_sshd, serve_connections
from tests.support.sshd import Sshd


class FakeBackend:
    """The fake."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        observer = FakeObserver(self.clock)
        observer.health.update({"down": NodeHealth.DOWN, "unclear": NodeHealth.UNKNOWN})
        self.observer: Observer = observer
        self.up, self.down, self.unclear = Host("up"), Host("down"), Host("unclear")


class ReachableBackend:
    """The observer `reachable`, one sshd and a port where nobody listens."""

    def __init__(self, sshd: Sshd, closed_port: int) -> None:
        self.clock = FakeClock()
        self.observer: Observer = ReachableObserver(FakeShell(), self.clock)
        self.up, self.down = host_of(sshd, "up"), host_of(sshd, "down", ansible_port=closed_port)
        self.unclear = host_of(sshd, "unclear", ansible_host="{{ address }}")


@contextmanager
def closed_port() -> Iterator[int]:
    """Hold a port on which nobody listens."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


class TestFakeObserver(ObserverContract):
    @asynccontextmanager
    async def open_backend(self, directory: Path) -> AsyncIterator[ObserverBackend]:
        yield FakeBackend()


@pytest.mark.servers
class TestReachableObserver(ObserverContract):
    @asynccontextmanager
    async def open_backend(self, directory: Path) -> AsyncIterator[ObserverBackend]:
        with real_sshd(directory / "sshd") as sshd, closed_port() as port:
            yield ReachableBackend(sshd, port)


# -- `reachable` alone --------------------------------------------------------


@asynccontextmanager
async def serving(says: bytes, *, hang: bool = False) -> AsyncIterator[Host]:
    """Run a server that says something and hangs up, or does not."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(says)
        if hang:
            await reader.read()

    async with serve_connections(serve) as port:
        yield Host("n1", connection={"ansible_host": "127.0.0.1", "ansible_port": port})


@pytest.mark.parametrize(
    ("says", "sight", "why"),
    [
        (b"SSH-2.0-x\r\n", NodeHealth.UP, "answers as SSH-2.0-x"),
        (b"hello\r\nSSH-2.0-x\r\n", NodeHealth.UP, "answers as SSH-2.0-x"),
        (b"", NodeHealth.DOWN, "closed the connection before the ssh banner"),
        (b"HTTP/1.0 400 Bad\r\n" * 1000, NodeHealth.DOWN, "answers, but not as an ssh server"),
        (b"x" * 100_000, NodeHealth.DOWN, "broke off before the ssh banner"),
    ],
)
async def test_only_an_ssh_banner_is_up(says: bytes, sight: NodeHealth, why: str) -> None:
    async with serving(says) as host:
        (seen,) = await ReachableObserver(FakeShell(), FakeClock()).observe([host])
    assert seen.sight is sight
    assert why in seen.why


async def test_a_node_that_says_nothing_is_down(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reachable, "OBSERVE_TIMEOUT_S", 0.1)
    async with serving(b"", hang=True) as host:
        (seen,) = await ReachableObserver(FakeShell(), FakeClock()).observe([host])
    assert seen.sight is NodeHealth.DOWN
    assert "no ssh banner from 127.0.0.1:" in seen.why


async def test_nodes_behind_a_jump_host_are_asked_for_a_login() -> None:
    shell = FakeShell()
    shell.down.add("n2")
    variables = {"ansible_ssh_common_args": "-o ProxyJump=gate"}
    hosts = [Host("n1", connection=variables), Host("n2", connection=variables)]
    seen = await ReachableObserver(shell, FakeClock()).observe(hosts)
    assert [o.sight for o in seen] == [NodeHealth.UP, NodeHealth.DOWN]
    assert shell.calls == [("n1", "true", "")]
