"""The check says that a node is well only when it and what belongs on it are."""

from __future__ import annotations

from pathlib import Path

import pytest

from machines.model.rollout import FailureCode
from rolloutd.adapters.kubernetes.check import KubernetesCheck
from rolloutd.adapters.kubernetes.cluster import Cluster
from rolloutd.adapters.kubernetes.cluster_registry import ClusterRegistry
from rolloutd.adapters.kubernetes.isolator import KubernetesIsolator
from rolloutd.ports import Clock, Failed, IsolationStatus, Ok, Unknown
from tests.contracts.kubernetes.steps import step_context
from tests.support.cluster_sandbox import ClusterSandbox
from tests.support.waiting import wait_in_loop_until


@pytest.fixture
def check(cluster: Cluster) -> KubernetesCheck:
    """The adapter under test."""
    return KubernetesCheck(ClusterRegistry([cluster]))


async def test_ready(sandbox: ClusterSandbox, check: KubernetesCheck) -> None:
    node = await sandbox.node("a")
    assert isinstance(await check.check(step_context(node, ready=True)), Ok)
    sandbox.silent_nodes.add(node)
    await sandbox.post_heartbeat(node, ready="False")
    result = await check.check(step_context(node, ready=True))
    assert isinstance(result, Failed)
    assert "NotReady" in result.text
    assert "the world says so" in result.text
    assert result.code is FailureCode.LOST


async def test_a_reboot_is_told(
    sandbox: ClusterSandbox, check: KubernetesCheck, cluster: Cluster, clock: Clock
) -> None:
    node = await sandbox.node("a")
    look = await KubernetesIsolator(ClusterRegistry([cluster]), clock).inspect(step_context(node))
    assert isinstance(look, IsolationStatus)
    await sandbox.reboot(node)
    result = await check.check(step_context(node, prior=look.prior, ready=True))
    assert isinstance(result, Ok)
    assert "after a reboot" in result.text


async def test_every_daemon_that_was_there_is_there_again(
    sandbox: ClusterSandbox, check: KubernetesCheck, cluster: Cluster, clock: Clock
) -> None:
    node = await sandbox.node("a")
    await sandbox.pod("agent-1", node, daemon="agent")
    await wait_in_loop_until(lambda: ready(check, node))
    look = await KubernetesIsolator(ClusterRegistry([cluster]), clock).inspect(step_context(node))
    assert isinstance(look, IsolationStatus)
    asked = step_context(node, prior=look.prior, daemonsets_ready=True)
    assert isinstance(await check.check(asked), Ok)

    await sandbox.api.delete(f"{sandbox.pods_path}/agent-1", gracePeriodSeconds=0)
    result = await check.check(asked)
    assert isinstance(result, Failed)
    assert f"the pod of DaemonSet {sandbox.namespace}/agent is not back" in result.text

    sandbox.ready_s = 3600.0
    await sandbox.pod("agent-2", node, daemon="agent")
    result = await check.check(asked)
    assert isinstance(result, Failed)
    assert "is not Ready" in result.text


async def test_pods_of_a_selector(sandbox: ClusterSandbox, check: KubernetesCheck) -> None:
    node = await sandbox.node("a")
    asked = step_context(node, pods_ready="app in (gpu),tier!=test")
    result = await check.check(asked)
    assert isinstance(result, Failed)
    assert "no pod of" in result.text
    await sandbox.pod("plugin", node, labels={"app": "gpu"})

    async def green() -> bool:
        return isinstance(await check.check(asked), Ok)

    await wait_in_loop_until(green)


async def test_missing_node_fails_and_unreachable_cluster_is_unknown(
    sandbox: ClusterSandbox, check: KubernetesCheck, tmp_path: Path
) -> None:
    gone = await check.check(step_context(f"{sandbox.prefix}-never", ready=True))
    assert isinstance(gone, Failed)
    assert "no longer in cluster" in gone.text
    away = KubernetesCheck(ClusterRegistry([Cluster("test", tmp_path / "none")]))
    assert isinstance(await away.check(step_context("n1", ready=True)), Unknown)


async def ready(check: KubernetesCheck, node: str) -> bool:
    """Whether all daemons that are there are Ready."""
    return isinstance(await check.check(step_context(node, daemonsets_ready=True)), Ok)
