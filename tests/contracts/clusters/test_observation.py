"""Which clusters are ready, by the conditions that follow their present state."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from machines.model.node import NodeHealth, NodeKind, Observation
from rolloutd.adapters.clusters.cluster_watch import ClusterWatch
from rolloutd.adapters.clusters.inventory import ClusterInventory
from rolloutd.adapters.clusters.views import (
    CLUSTER_API,
    CLUSTER_PROFILES,
    Availability,
    parse_cluster,
    parse_profile,
)
from rolloutd.adapters.kubernetes.cluster import Cluster
from rolloutd.ports import CLUSTER_ID, STATUS, Clock, DiscoveredNode
from tests.support.cluster_fleet import ClusterFleet, condition
from tests.support.waiting import wait_in_loop_until


@dataclass
class Watched:
    """A watch that runs, its inventory, and what it reported."""

    watch: ClusterWatch
    inventory: ClusterInventory
    last: dict[str, Observation] = field(default_factory=dict)
    changes: int = 0

    def on_observed(self, observations: Sequence[Observation]) -> None:
        self.last.update({each.node: each for each in observations})

    def on_changed(self) -> None:
        self.changes += 1

    async def until(self, name: str, sight: NodeHealth, why: str = "") -> Observation:
        def reported() -> Observation | None:
            seen = self.last.get(name)
            return seen if seen is not None and seen.sight is sight and why in seen.why else None

        seen: Observation = await wait_in_loop_until(reported)
        return seen

    async def discovered(self) -> dict[str, DiscoveredNode]:
        return {each.name: each for each in await self.inventory.refresh()}


@asynccontextmanager
async def watching(watch: ClusterWatch) -> AsyncIterator[Watched]:
    watched = Watched(watch, ClusterInventory(watch, labels={"site": "region"}))
    task = asyncio.create_task(watch.run(watched.on_observed, watched.on_changed))
    try:
        yield watched
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def watch_of(fleet: ClusterFleet, cluster: Cluster, clock: Clock, prefix: str = "") -> ClusterWatch:
    return ClusterWatch(
        cluster,
        clock,
        CLUSTER_API,
        parse_cluster,
        kind="clusterapi",
        namespace=fleet.namespace,
        prefix=prefix,
        report_interval_s=0.2,
    )


async def test_ready_cluster_is_node_with_its_identity(
    fleet: ClusterFleet, cluster: Cluster, clock: Clock
) -> None:
    made = await fleet.add_cluster("east", {"region": "eu", "tier": "dev"})
    async with watching(watch_of(fleet, cluster, clock, "hub-")) as watched:
        seen = await watched.until("hub-east", NodeHealth.UP)
        assert not seen.cordoned_by_other
        node = (await watched.discovered())["hub-east"]
    assert node.kind is NodeKind.CLUSTER
    assert node.labels == {"region": "eu", "tier": "dev", "site": "eu"}
    assert node.connection[CLUSTER_ID] == made["metadata"]["uid"]
    assert node.id == f"uid/{made['metadata']['uid']}"
    assert node.connection["cluster_object"]["spec"]["controlPlaneEndpoint"]["host"] == "east.example.com"
    assert STATUS not in node.connection


NOT_READY: dict[str, tuple[dict[str, str], NodeHealth, Availability | None]] = {
    "Available": ({"Available": "False"}, NodeHealth.DOWN, None),
    "RemoteConnectionProbe": ({"RemoteConnectionProbe": "False"}, NodeHealth.DOWN, Availability.OFFLINE),
    "RemoteConnectionProbe is Unknown": (
        {"RemoteConnectionProbe": "Unknown"},
        NodeHealth.DOWN,
        Availability.OFFLINE,
    ),
    "Available is Unknown": ({"Available": "Unknown"}, NodeHealth.UNKNOWN, None),
}


async def test_condition_that_fails_is_the_reason(
    fleet: ClusterFleet, cluster: Cluster, clock: Clock
) -> None:
    await fleet.add_cluster("east")
    async with watching(watch_of(fleet, cluster, clock)) as watched:
        for text, (changes, health, status) in NOT_READY.items():
            await fleet.set_conditions("east", **changes)
            await watched.until("east", health, text.partition(" ")[0])
            node = (await watched.discovered())["east"]
            assert node.connection.get(STATUS) == (None if status is None else str(status)), text


async def test_work_of_cluster_api_holds_its_cluster(
    fleet: ClusterFleet, cluster: Cluster, clock: Clock
) -> None:
    await fleet.add_cluster("east")
    async with watching(watch_of(fleet, cluster, clock)) as watched:
        for kind in ("RollingOut", "Remediating"):
            await fleet.set_conditions("east", **{kind: "True"})
            seen = await watched.until("east", NodeHealth.UP, kind)
            assert (seen.is_locked, seen.cordoned_by_other) == (True, True)
        await fleet.set_conditions("east")
        assert (await watched.until("east", NodeHealth.UP, "Available")).is_up


async def test_initialised_long_ago_is_not_ready_now(
    fleet: ClusterFleet, cluster: Cluster, clock: Clock
) -> None:
    """The field that is never updated again is true, and the API does not answer."""
    await fleet.add_cluster("east")
    await fleet.set_conditions("east", initialized=True, RemoteConnectionProbe="False", Available="False")
    async with watching(watch_of(fleet, cluster, clock)) as watched:
        await watched.until("east", NodeHealth.DOWN, "RemoteConnectionProbe")
        assert (await watched.discovered())["east"].connection["cluster_initialized"] is True


async def test_uninitialised_cluster_is_planned(fleet: ClusterFleet, cluster: Cluster, clock: Clock) -> None:
    await fleet.create("clusters", "east", {"controlPlaneEndpoint": {"port": 6443}})
    async with watching(watch_of(fleet, cluster, clock)) as watched:
        await watched.until("east", NodeHealth.DOWN, "not initialised")
        node = (await watched.discovered())["east"]
        assert (node.connection[STATUS], node.connection["cluster_initialized"]) == ("planned", False)
        await fleet.set_conditions("east", Available="False")
        await watched.until("east", NodeHealth.DOWN, "Available")
        assert STATUS not in (await watched.discovered())["east"].connection


async def test_paused_cluster_is_not_changed(fleet: ClusterFleet, cluster: Cluster, clock: Clock) -> None:
    await fleet.add_cluster("east")
    await fleet.add_cluster("west")
    await fleet.edit("clusters", "east", {"spec": {"paused": True}})
    await fleet.edit("clusters", "west", {"metadata": {"annotations": {"cluster.x-k8s.io/paused": "true"}}})
    await fleet.set_conditions("east")
    async with watching(watch_of(fleet, cluster, clock)) as watched:
        for name in ("east", "west"):
            assert (await watched.until(name, NodeHealth.UP, "paused")).is_locked
            assert (await watched.discovered())[name].connection[STATUS] == "paused"


async def test_status_of_older_generation_is_not_believed(
    fleet: ClusterFleet, cluster: Cluster, clock: Clock
) -> None:
    await fleet.add_cluster("east")
    async with watching(watch_of(fleet, cluster, clock)) as watched:
        await watched.until("east", NodeHealth.UP)
        await fleet.edit("clusters", "east", {"spec": {"topology": {"version": "v1.31.0"}}})
        await watched.until("east", NodeHealth.DOWN, "generation 1")


async def test_deleted_cluster_leaves(fleet: ClusterFleet, cluster: Cluster, clock: Clock) -> None:
    await fleet.add_cluster("east")
    await fleet.add_cluster("west")
    async with watching(watch_of(fleet, cluster, clock)) as watched:
        await watched.until("east", NodeHealth.UP)
        await fleet.delete("clusters", "east")
        await watched.until("east", NodeHealth.UNKNOWN, "no longer")
        assert list(await watched.discovered()) == ["west"]


def test_objects_of_v1beta1_are_read() -> None:
    meta = {"name": "east", "namespace": "fleet", "uid": "u1", "generation": 3}
    old = {
        "metadata": meta,
        "status": {
            "controlPlaneReady": True,
            "conditions": [condition("Ready", "True", generation=None)],
        },
    }
    assert parse_cluster(old).health is NodeHealth.UP
    # The conditions that follow the present state are below, and contradict the old one.
    old["status"]["v1beta2"] = {
        "conditions": [
            condition("Available", "False", "Unreachable", "no answer", 3),
            condition("RemoteConnectionProbe", "False", "ProbeFailed", "no answer", 3),
        ]
    }
    seen = parse_cluster(old)
    assert (seen.health, seen.status) == (NodeHealth.DOWN, Availability.OFFLINE)


async def test_profile_is_known_by_its_property(fleet: ClusterFleet, cluster: Cluster, clock: Clock) -> None:
    await fleet.create("clusterprofiles", "east", {"clusterManager": {"name": "ocm"}})
    watch = ClusterWatch(
        cluster,
        clock,
        CLUSTER_PROFILES,
        parse_profile,
        kind="clusterprofile",
        namespace=fleet.namespace,
        report_interval_s=0.2,
    )
    async with watching(watch) as watched:
        await watched.until("east", NodeHealth.UNKNOWN, "ControlPlaneHealthy")
        assert (await watched.discovered())["east"].connection[STATUS] == "planned"
        status = {
            "conditions": [condition("ControlPlaneHealthy", "True")],
            "properties": [{"name": "cluster.clusterset.k8s.io", "value": "id-of-east"}],
        }
        await fleet.set_status("clusterprofiles", "east", status)
        await watched.until("east", NodeHealth.UP)
        assert (await watched.discovered())["east"].connection[CLUSTER_ID] == "id-of-east"


@pytest.mark.parametrize("content", [{}, {"metadata": {"name": 1}}, {"metadata": None}])
def test_malformed_object_is_an_error_of_its_server(content: dict[str, object]) -> None:
    from rolloutd.adapters.kubernetes.api_errors import ApiError

    with pytest.raises(ApiError, match="unexpected shape"):
        parse_cluster(content)
