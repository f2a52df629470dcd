"""The contract of ports.TrafficProbe; an adapter joins by one line in WORLDS."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import pytest

from rolloutd.ports import Busy, Host, Ok, TrafficProbe
from tests.contracts.twins.traffic import FakeTrafficProbe
from tests.contracts.worlds import context


class World(Protocol):
    """A probe with its parameters, and a node whose traffic the test makes."""

    probe: TrafficProbe
    host: Host
    params: Mapping[str, Any]

    def start_traffic(self) -> None: ...

    def stop_traffic(self) -> None: ...

    def blind(self) -> None: ...


class TwinWorld:
    """The twin."""

    def __init__(self) -> None:
        self.host, self.params = Host("n1"), {}
        self._probe = FakeTrafficProbe()
        self.probe: TrafficProbe = self._probe

    def start_traffic(self) -> None:
        self._probe.busy["n1"] = "n1 has 12 connections on port 443"

    def stop_traffic(self) -> None:
        self._probe.busy.clear()

    def blind(self) -> None:
        self._probe.unknown.add("n1")


WORLDS: list[Callable[[], World]] = [TwinWorld]


@pytest.fixture(params=WORLDS)
def world(request: pytest.FixtureRequest) -> World:
    """Each world in turn."""
    made: World = request.param()
    return made


async def test_an_idle_node_is_ok(world: World) -> None:
    assert isinstance(await world.probe.look(context(world.host, world.params)), Ok)


async def test_traffic_is_busy_until_it_ends(world: World) -> None:
    world.start_traffic()
    found = await world.probe.look(context(world.host, world.params))
    assert isinstance(found, Busy)
    assert "n1" in found.text
    world.stop_traffic()
    assert isinstance(await world.probe.look(context(world.host, world.params)), Ok)


async def test_what_cannot_be_seen_is_busy(world: World) -> None:
    world.blind()
    found = await world.probe.look(context(world.host, world.params))
    assert isinstance(found, Busy)
    assert "n1" in found.text
