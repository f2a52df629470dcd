"""A watch tells at once how nodes are, who took them out of service, and when the inventory changed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from machines.model.node import NodeHealth, NodeKind, Observation
from rolloutd.adapters.kubernetes.cluster import Cluster
from rolloutd.adapters.kubernetes.cluster_registry import CLUSTER_KEY, NODE_KEY, ClusterRegistry
from rolloutd.adapters.kubernetes.inventory import KubernetesInventory
from rolloutd.adapters.kubernetes.isolator import KubernetesIsolator
from rolloutd.adapters.kubernetes.node_watch import NodeWatch
from rolloutd.adapters.kubernetes.nodes import HOLD_ANNOTATION
from rolloutd.adapters.kubernetes.permissions import find_missing_permissions
from rolloutd.ports import MACHINE_ID, PROVIDER_ID, Clock
from tests.contracts.kubernetes.steps import step_context
from tests.support.cluster_sandbox import ClusterSandbox
from tests.support.waiting import wait_in_loop_until


@dataclass
class WatchRecorder:
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
async def watching(watch: NodeWatch) -> AsyncIterator[WatchRecorder]:
    """Run a watch beside the test."""
    core = WatchRecorder()
    task = asyncio.create_task(watch.run(core.seen, core.changed))
    try:
        yield core
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_unchanged_nodes_are_confirmed(sandbox: ClusterSandbox, cluster: Cluster, clock: Clock) -> None:
    node = await sandbox.node("a")
    watch, is_enough, confirmations = NodeWatch(cluster, clock, report_interval_s=0.05), True, 0

    def on_confirmed() -> bool:
        nonlocal confirmations
        confirmations += 1
        return is_enough

    watch.confirm_to(on_confirmed)
    async with watching(watch) as core:

        async def confirmed_twice() -> bool:
            return node in core.last and confirmations >= 2

        await wait_in_loop_until(confirmed_twice)
        seen, confirmations = core.last[node], 0
        await wait_in_loop_until(confirmed_twice)
        assert core.last[node] is seen
        is_enough = False

        async def reported_again() -> bool:
            return core.last[node] is not seen

        await wait_in_loop_until(reported_again)
        assert core.last[node].watch == watch.source


async def test_what_happens_to_a_node_is_seen(
    sandbox: ClusterSandbox, cluster: Cluster, clock: Clock
) -> None:
    node = await sandbox.node("a")
    async with watching(NodeWatch(cluster, clock)) as core:

        async def up() -> bool:
            seen = core.last.get(node)
            return seen is not None and seen.sight is NodeHealth.UP and not seen.cordoned_by_other

        async def foreign() -> bool:
            return core.last[node].cordoned_by_other

        async def down() -> bool:
            return core.last[node].sight is NodeHealth.DOWN

        await wait_in_loop_until(up)
        assert "kubelet v1.36.2" in core.last[node].why
        await sandbox.cordon(node)
        await wait_in_loop_until(foreign)
        assert "cordoned by kubectl" in core.last[node].why
        await sandbox.cordon(node, unschedulable=False)
        await wait_in_loop_until(up)
        await sandbox.annotate(node, HOLD_ANNOTATION, "mine")
        await wait_in_loop_until(foreign)
        await sandbox.annotate(node, HOLD_ANNOTATION, None)
        await wait_in_loop_until(up)
        sandbox.silent_nodes.add(node)
        await sandbox.post_heartbeat(node, ready="False")
        await wait_in_loop_until(down)
        assert "NotReady" in core.last[node].why


async def test_our_own_cordon_is_not_foreign(sandbox: ClusterSandbox, cluster: Cluster, clock: Clock) -> None:
    node = await sandbox.node("a")
    isolator = KubernetesIsolator(ClusterRegistry([cluster]), clock)
    async with watching(NodeWatch(cluster, clock)) as core:
        ctx = step_context(node)
        await isolator.isolate(ctx)

        async def ours() -> bool:
            return node in core.last and "isolated for r-1" in core.last[node].why

        await wait_in_loop_until(ours)
        assert not core.last[node].cordoned_by_other
        assert core.last[node].sight is NodeHealth.DOWN


async def test_who_joins_and_leaves_changes_the_inventory(
    sandbox: ClusterSandbox, cluster: Cluster, clock: Clock
) -> None:
    first = await sandbox.node("a", {"example.com/team": "payments"})
    watch = NodeWatch(cluster, clock)
    inventory = KubernetesInventory(cluster, labels={"team": "example.com/team"}, watch=watch)
    async with watching(watch) as core:
        found = {each.name: each for each in await inventory.refresh()}
        assert found[first].labels["team"] == "payments"
        assert found[first].kind is NodeKind.KUBERNETES
        assert found[first].connection == {
            CLUSTER_KEY: "test",
            NODE_KEY: first,
            PROVIDER_ID: f"world:///{first}",
            MACHINE_ID: "world",
            "ansible_host": "127.0.2.1",
        }
        before = core.changes
        second = await sandbox.node("b")

        async def noticed() -> bool:
            return core.changes > before

        await wait_in_loop_until(noticed)
        assert second in {each.name for each in await inventory.refresh()}
        await sandbox.api.delete(f"/api/v1/nodes/{first}")

        async def gone() -> bool:
            return core.last[first].sight is NodeHealth.UNKNOWN

        await wait_in_loop_until(gone)
        assert first not in {each.name for each in await inventory.refresh()}


async def test_without_a_watch_the_inventory_is_listed(sandbox: ClusterSandbox, cluster: Cluster) -> None:
    node = await sandbox.node("a")
    inventory = KubernetesInventory(cluster, prefix="ams-", address="")
    found = {each.name: each for each in await inventory.refresh()}
    assert found[f"ams-{node}"].connection[NODE_KEY] == node
    assert "ansible_host" not in found[f"ams-{node}"].connection


async def test_observations_stay_fresh_while_nothing_happens(
    sandbox: ClusterSandbox, cluster: Cluster, clock: Clock
) -> None:
    node = await sandbox.node("a")
    async with watching(NodeWatch(cluster, clock, report_interval_s=0.2)) as core:

        async def seen() -> bool:
            return node in core.last

        await wait_in_loop_until(seen)
        sandbox.silent_nodes.add(node)
        first = core.last[node].at

        async def again() -> bool:
            return core.last[node].at > first

        await wait_in_loop_until(again)


async def test_an_administrator_lacks_no_right(
    sandbox: ClusterSandbox, cluster: Cluster, tmp_path: Path
) -> None:
    assert await find_missing_permissions(cluster) == []
    [word] = await find_missing_permissions(Cluster("away", tmp_path / "none"))
    assert "away" in word
