"""The contract of ports.TrafficProbe; an adapter joins by one line in WORLDS."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

import pytest

from rolloutd.adapters.kit import PROBES, kinds
from rolloutd.adapters.kubernetes.cluster import Cluster
from rolloutd.adapters.kubernetes.clusters import Clusters
from rolloutd.adapters.kubernetes.probe import KubernetesProbe
from rolloutd.planfile import steps
from rolloutd.ports import Busy, Host, Ok, TrafficProbe, Unknown
from tests.contracts.kubernetes.steps import host as kubernetes_host
from tests.contracts.twins.traffic import FakeTrafficProbe
from tests.contracts.worlds import context
from tests.support.kubetwin import Twin
from tests.support.kubeworld import Api
from tests.support.kubeworld import World as ClusterWorld


class World(Protocol):
    """A probe with its parameters, and a node whose traffic the test makes."""

    probe: TrafficProbe
    host: Host
    params: Mapping[str, Any]

    async def start_traffic(self) -> None: ...

    async def stop_traffic(self) -> None: ...

    async def blind(self) -> None: ...


class TwinWorld:
    """The twin."""

    def __init__(self) -> None:
        self.host, self.params = Host("n1"), {}
        self._probe = FakeTrafficProbe()
        self.probe: TrafficProbe = self._probe

    async def start_traffic(self) -> None:
        self._probe.busy["n1"] = "n1 is busy: it has 12 connections on port 443"

    async def stop_traffic(self) -> None:
        self._probe.busy.clear()

    async def blind(self) -> None:
        self._probe.unknown.add("n1")


class KubernetesWorld:
    """The probe `kubernetes`: a pod is the traffic, and a cluster without a kubeconfig is blindness."""

    def __init__(self, world: ClusterWorld, cluster: Cluster, node: str) -> None:
        self._world = world
        self.host, self.params = kubernetes_host(node), {"pods": "kind=job"}
        nowhere = Cluster("nowhere", Path("/nonexistent/kubeconfig"))
        self.probe: TrafficProbe = KubernetesProbe(Clusters([cluster, nowhere]))

    async def start_traffic(self) -> None:
        await self._world.pod("train-7", self.host.name, labels={"kind": "job"})

    async def stop_traffic(self) -> None:
        await self._world.api.delete(f"{self._world.pods_path}/train-7", gracePeriodSeconds=0)

    async def blind(self) -> None:
        self.host = kubernetes_host(self.host.name, "nowhere")


@asynccontextmanager
async def twin(tmp_path: Path) -> AsyncIterator[World]:
    """Nothing but memory."""
    yield TwinWorld()


@asynccontextmanager
async def kubernetes(tmp_path: Path) -> AsyncIterator[World]:
    """A cluster of one node."""
    async with Twin() as server:
        kubeconfig = server.kubeconfig(tmp_path / "kubeconfig")
        api, cluster = Api(kubeconfig), Cluster("test", kubeconfig)
        await api.open()
        async with ClusterWorld(api) as world:
            yield KubernetesWorld(world, cluster, await world.node("w3"))
        await api.close()
        await cluster.close()


WORLDS: list[Callable[[Path], AbstractAsyncContextManager[World]]] = [twin, kubernetes]


@pytest.fixture(params=WORLDS, ids=lambda make: make.__name__)
async def world(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[World]:
    """Each world in turn."""
    async with request.param(tmp_path) as made:
        yield made


async def test_an_idle_node_is_ok(world: World) -> None:
    assert isinstance(await world.probe.look(context(world.host, world.params)), Ok)


async def test_traffic_is_busy_until_it_ends(world: World) -> None:
    await world.start_traffic()
    found = await world.probe.look(context(world.host, world.params))
    assert isinstance(found, Busy)
    assert f"{world.host.name} is busy" in found.text
    await world.stop_traffic()
    assert isinstance(await world.probe.look(context(world.host, world.params)), Ok)


async def test_to_look_changes_nothing_and_may_be_repeated(world: World) -> None:
    await world.start_traffic()
    answers = [await world.probe.look(context(world.host, world.params)) for _ in range(2)]
    assert answers[0] == answers[1]


async def test_what_cannot_be_seen_is_unknown_and_names_the_node(world: World) -> None:
    await world.blind()
    found = await world.probe.look(context(world.host, world.params))
    assert isinstance(found, Unknown)
    assert world.host.name in found.text


def test_every_probe_of_the_plan_file_is_installed_and_in_this_suite() -> None:
    assert kinds(PROBES) == steps.PROBES.keys()
    assert {make.__name__ for make in WORLDS} - {"twin"} == kinds(PROBES)
