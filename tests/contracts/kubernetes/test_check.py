"""The check says that a node is well only when it and what belongs on it are."""

from __future__ import annotations

from pathlib import Path

import pytest

from rolloutd.adapters.kubernetes.check import KubernetesCheck
from rolloutd.adapters.kubernetes.cluster import Cluster
from rolloutd.adapters.kubernetes.clusters import Clusters
from rolloutd.adapters.kubernetes.isolator import KubernetesIsolator
from rolloutd.ports import Clock, Failed, Look, Ok, Unknown
from tests.contracts.kubernetes.steps import context
from tests.support.kubeworld import World


@pytest.fixture
def check(cluster: Cluster) -> KubernetesCheck:
    """The adapter under test."""
    return KubernetesCheck(Clusters([cluster]))


async def test_ready(world: World, check: KubernetesCheck) -> None:
    node = await world.node("a")
    assert isinstance(await check.check(context(node, ready=True)), Ok)
    world.silent.add(node)
    await world.beat(node, ready="False")
    result = await check.check(context(node, ready=True))
    assert isinstance(result, Failed)
    assert "NotReady" in result.text
    assert "the world says so" in result.text


async def test_a_reboot_is_told(world: World, check: KubernetesCheck, cluster: Cluster, clock: Clock) -> None:
    node = await world.node("a")
    look = await KubernetesIsolator(Clusters([cluster]), clock).look(context(node))
    assert isinstance(look, Look)
    await world.reboot(node)
    result = await check.check(context(node, prior=look.prior, ready=True))
    assert isinstance(result, Ok)
    assert "after a reboot" in result.text


async def test_every_daemon_that_was_there_is_there_again(
    world: World, check: KubernetesCheck, cluster: Cluster, clock: Clock
) -> None:
    node = await world.node("a")
    await world.pod("agent-1", node, daemon="agent")
    await world.until(lambda: ready(check, node))
    look = await KubernetesIsolator(Clusters([cluster]), clock).look(context(node))
    assert isinstance(look, Look)
    asked = context(node, prior=look.prior, daemonsets_ready=True)
    assert isinstance(await check.check(asked), Ok)

    await world.api.delete(f"{world.pods_path}/agent-1", gracePeriodSeconds=0)
    result = await check.check(asked)
    assert isinstance(result, Failed)
    assert f"the pod of DaemonSet {world.namespace}/agent is not back" in result.text

    world.ready_s = 3600.0
    await world.pod("agent-2", node, daemon="agent")
    result = await check.check(asked)
    assert isinstance(result, Failed)
    assert "is not Ready" in result.text


async def test_pods_of_a_selector(world: World, check: KubernetesCheck) -> None:
    node = await world.node("a")
    asked = context(node, pods_ready="app in (gpu),tier!=test")
    result = await check.check(asked)
    assert isinstance(result, Failed)
    assert "no pod of" in result.text
    await world.pod("plugin", node, labels={"app": "gpu"})

    async def green() -> bool:
        return isinstance(await check.check(asked), Ok)

    await world.until(green)


async def test_a_node_that_left_is_a_failure_and_a_cluster_away_is_unknown(
    world: World, check: KubernetesCheck, tmp_path: Path
) -> None:
    gone = await check.check(context(f"{world.prefix}-never", ready=True))
    assert isinstance(gone, Failed)
    assert "no longer in cluster" in gone.text
    away = KubernetesCheck(Clusters([Cluster("test", tmp_path / "none")]))
    assert isinstance(await away.check(context("n1", ready=True)), Unknown)


async def ready(check: KubernetesCheck, node: str) -> bool:
    """Whether all daemons that are there are Ready."""
    return isinstance(await check.check(context(node, daemonsets_ready=True)), Ok)
