"""The contract of ports.Observer, for its twin and for `reachable` against a real sshd."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Protocol

import pytest

from machines.node import Sight
from rolloutd.adapters.ssh import reachable
from rolloutd.adapters.ssh.reachable import ReachableObserver
from rolloutd.ports import Host, Observer
from tests.contracts.twins.clock import START, FakeClock
from tests.contracts.twins.observer import FakeObserver
from tests.contracts.twins.shell import FakeShell
from tests.contracts.worlds import host_of, listening, real_sshd
from tests.support.sshd import Sshd


class World(Protocol):
    """An observer and three nodes: one up, one down, one nobody can judge."""

    observer: Observer
    clock: FakeClock
    up: Host
    down: Host
    unclear: Host


class TwinWorld:
    """The twin."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        observer = FakeObserver(self.clock)
        observer.sights.update({"down": Sight.DOWN, "unclear": Sight.UNKNOWN})
        self.observer: Observer = observer
        self.up, self.down, self.unclear = Host("up"), Host("down"), Host("unclear")


class ReachableWorld:
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


@pytest.fixture(params=["twin", pytest.param("reachable", marks=pytest.mark.servers)])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    """Each world in turn."""
    if request.param == "twin":
        yield TwinWorld()
        return
    with real_sshd(tmp_path / "sshd") as sshd, closed_port() as port:
        yield ReachableWorld(sshd, port)


async def test_says_of_each_node_how_it_is_and_why(world: World) -> None:
    seen = await world.observer.observe([world.down, world.up, world.unclear])
    assert [o.node for o in seen] == ["down", "up", "unclear"]
    assert [o.sight for o in seen] == [Sight.DOWN, Sight.UP, Sight.UNKNOWN]
    assert all(o.why for o in seen)
    assert not any(o.foreign for o in seen)


async def test_says_when_it_looked(world: World) -> None:
    world.clock.advance(90.0)
    assert [o.at for o in await world.observer.observe([world.up])] == [START + 90.0]


async def test_nobody_to_look_at_is_fine(world: World) -> None:
    assert list(await world.observer.observe([])) == []


async def test_many_nodes_are_all_answered(world: World) -> None:
    hosts = [Host(f"n{n}", connection=world.up.connection) for n in range(200)]
    seen = await world.observer.observe(hosts)
    assert [o.node for o in seen] == [host.name for host in hosts]
    assert {o.sight for o in seen} == {Sight.UP}


# -- `reachable` alone --------------------------------------------------------


@asynccontextmanager
async def serving(says: bytes, *, hang: bool = False) -> AsyncIterator[Host]:
    """Run a server that says something and hangs up, or does not."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(says)
        if hang:
            await reader.read()

    async with listening(serve) as port:
        yield Host("n1", connection={"ansible_host": "127.0.0.1", "ansible_port": port})


@pytest.mark.parametrize(
    ("says", "sight", "why"),
    [
        (b"SSH-2.0-x\r\n", Sight.UP, "answers as SSH-2.0-x"),
        (b"hello\r\nSSH-2.0-x\r\n", Sight.UP, "answers as SSH-2.0-x"),
        (b"", Sight.DOWN, "closed the connection before the ssh banner"),
        (b"HTTP/1.0 400 Bad\r\n" * 1000, Sight.DOWN, "answers, but not as an ssh server"),
        (b"x" * 100_000, Sight.DOWN, "broke off before the ssh banner"),
    ],
)
async def test_only_an_ssh_banner_is_up(says: bytes, sight: Sight, why: str) -> None:
    async with serving(says) as host:
        (seen,) = await ReachableObserver(FakeShell(), FakeClock()).observe([host])
    assert seen.sight is sight
    assert why in seen.why


async def test_a_node_that_says_nothing_is_down(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reachable, "OBSERVE_TIMEOUT_S", 0.1)
    async with serving(b"", hang=True) as host:
        (seen,) = await ReachableObserver(FakeShell(), FakeClock()).observe([host])
    assert seen.sight is Sight.DOWN
    assert "no ssh banner from 127.0.0.1:" in seen.why


async def test_nodes_behind_a_jump_host_are_asked_for_a_login() -> None:
    shell = FakeShell()
    shell.down.add("n2")
    variables = {"ansible_ssh_common_args": "-o ProxyJump=gate"}
    hosts = [Host("n1", connection=variables), Host("n2", connection=variables)]
    seen = await ReachableObserver(shell, FakeClock()).observe(hosts)
    assert [o.sight for o in seen] == [Sight.UP, Sight.DOWN]
    assert shell.calls == [("n1", "true", "")]
