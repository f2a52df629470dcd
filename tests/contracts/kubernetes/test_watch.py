"""A watch tells at once how nodes are, who took them out of service, and when the inventory changed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from machines.node import Kind, Observation, Sight
from rolloutd.adapters.kubernetes.cluster import Cluster
from rolloutd.adapters.kubernetes.clusters import CLUSTER, NODE, Clusters
from rolloutd.adapters.kubernetes.inventory import KubernetesInventory
from rolloutd.adapters.kubernetes.isolator import KubernetesIsolator
from rolloutd.adapters.kubernetes.nodes import HOLD
from rolloutd.adapters.kubernetes.rights import missing_rights
from rolloutd.adapters.kubernetes.watch import NodeWatch
from rolloutd.ports import PROVIDER_ID, Clock
from tests.contracts.kubernetes.steps import context
from tests.support.kubeworld import World


@dataclass
class Core:
    """What the core was told."""

    last: dict[str, Observation] = field(default_factory=dict)
    told: int = 0
    changes: int = 0

    def seen(self, observations: Sequence[Observation]) -> None:
        """Keep the latest of each node."""
        self.told += 1
        self.last.update({each.node: each for each in observations})

    def changed(self) -> None:
        """Count."""
        self.changes += 1


@asynccontextmanager
async def watching(watch: NodeWatch) -> AsyncIterator[Core]:
    """Run a watch beside the test."""
    core = Core()
    task = asyncio.create_task(watch.run(core.seen, core.changed))
    try:
        yield core
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_what_happens_to_a_node_is_seen(world: World, cluster: Cluster, clock: Clock) -> None:
    node = await world.node("a")
    async with watching(NodeWatch(cluster, clock)) as core:

        async def up() -> bool:
            seen = core.last.get(node)
            return seen is not None and seen.sight is Sight.UP and not seen.foreign

        async def foreign() -> bool:
            return core.last[node].foreign

        async def down() -> bool:
            return core.last[node].sight is Sight.DOWN

        await world.until(up)
        assert "kubelet v1.36.2" in core.last[node].why
        await world.cordon(node)
        await world.until(foreign)
        assert "cordoned by kubectl" in core.last[node].why
        await world.cordon(node, closed=False)
        await world.until(up)
        await world.annotate(node, HOLD, "mine")
        await world.until(foreign)
        await world.annotate(node, HOLD, None)
        await world.until(up)
        world.silent.add(node)
        await world.beat(node, ready="False")
        await world.until(down)
        assert "NotReady" in core.last[node].why


async def test_our_own_cordon_is_not_foreign(world: World, cluster: Cluster, clock: Clock) -> None:
    node = await world.node("a")
    isolator = KubernetesIsolator(Clusters([cluster]), clock)
    async with watching(NodeWatch(cluster, clock)) as core:
        ctx = context(node)
        await isolator.do(ctx)

        async def ours() -> bool:
            return node in core.last and "isolated for r-1" in core.last[node].why

        await world.until(ours)
        assert not core.last[node].foreign
        assert core.last[node].sight is Sight.DOWN


async def test_who_joins_and_leaves_changes_the_inventory(
    world: World, cluster: Cluster, clock: Clock
) -> None:
    first = await world.node("a", {"example.com/team": "payments"})
    watch = NodeWatch(cluster, clock)
    inventory = KubernetesInventory(cluster, labels={"team": "example.com/team"}, watch=watch)
    async with watching(watch) as core:
        found = {each.name: each for each in await inventory.refresh()}
        assert found[first].labels["team"] == "payments"
        assert found[first].kind is Kind.KUBERNETES
        assert found[first].connection == {
            CLUSTER: "test",
            NODE: first,
            PROVIDER_ID: f"world:///{first}",
            "ansible_host": "127.0.0.1",
        }
        before = core.changes
        second = await world.node("b")

        async def noticed() -> bool:
            return core.changes > before

        await world.until(noticed)
        assert second in {each.name for each in await inventory.refresh()}
        await world.api.delete(f"/api/v1/nodes/{first}")

        async def gone() -> bool:
            return core.last[first].sight is Sight.DOWN

        await world.until(gone)
        assert first not in {each.name for each in await inventory.refresh()}


async def test_without_a_watch_the_inventory_is_listed(world: World, cluster: Cluster) -> None:
    node = await world.node("a")
    inventory = KubernetesInventory(cluster, prefix="ams-", address="")
    found = {each.name: each for each in await inventory.refresh()}
    assert found[f"ams-{node}"].connection[NODE] == node
    assert "ansible_host" not in found[f"ams-{node}"].connection


async def test_observations_stay_fresh_while_nothing_happens(
    world: World, cluster: Cluster, clock: Clock
) -> None:
    node = await world.node("a")
    async with watching(NodeWatch(cluster, clock, beat_s=0.2)) as core:

        async def seen() -> bool:
            return node in core.last

        await world.until(seen)
        world.silent.add(node)
        first = core.last[node].at

        async def again() -> bool:
            return core.last[node].at > first

        await world.until(again)


async def test_an_administrator_lacks_no_right(world: World, cluster: Cluster, tmp_path: Path) -> None:
    assert await missing_rights(cluster) == []
    [word] = await missing_rights(Cluster("away", tmp_path / "none"))
    assert "away" in word
