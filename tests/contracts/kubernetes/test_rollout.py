"""A rollout over a cluster: deadlines outlast restarts, and what is drained is finished."""

from __future__ import annotations

import asyncio
import re
import shutil
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from machines.model.reasons import ReasonCode
from machines.states import Outcome, Phase
from rolloutd.adapters.kubernetes.cluster import Cluster
from rolloutd.adapters.kubernetes.nodes import HOLD_ANNOTATION
from rolloutd.ports import Ok
from tests.contracts.fakes.runner import Script
from tests.contracts.kubernetes.cluster_daemon import LONG_PASS_S, ROLLOUT, ClusterDaemon
from tests.support.cluster_sandbox import ClusterSandbox
from tests.support.waiting import wait_in_loop_until

JSON = Any

TEAM = {"team": "payments"}
RESTART_S = 1.5
DRAIN_TIMEOUT_S = 8.0


@pytest.fixture
async def daemon(sandbox: ClusterSandbox, cluster: Cluster, tmp_path: Path) -> AsyncIterator[ClusterDaemon]:
    daemon = ClusterDaemon(sandbox, cluster, tmp_path)
    yield daemon
    await daemon.kill()


async def is_cordoned(sandbox: ClusterSandbox, node: str) -> bool:
    return bool((await sandbox.get_node(node))["spec"].get("unschedulable"))


async def test_daemon_that_restarts_often_returns_node(
    sandbox: ClusterSandbox, daemon: ClusterDaemon
) -> None:
    """The daemon restarts more often than drain_timeout, and `why` names no moment that has passed."""
    sandbox.end_s = 3600.0
    node, _ = await sandbox.node("a", TEAM), await sandbox.node("b", TEAM)
    await sandbox.workload("api", [node], grace_s=3600)
    await daemon.start()
    await daemon.submit(f"{DRAIN_TIMEOUT_S:.0f}s", [node])
    await wait_in_loop_until(lambda: is_cordoned(sandbox, node))
    admitted_at, deadlines = daemon.target(node).admitted_at, set()
    while daemon.target(node).phase is Phase.ISOLATING:
        await asyncio.sleep(RESTART_S)
        asked_at = time.time()
        reason, live = await daemon.why(node), daemon.state.step_progress.get((ROLLOUT, node))
        if reason is not None and reason.remedy is not None and reason.remedy.until is not None:
            assert reason.remedy.until > asked_at
        if live is not None and live.isolation_deadline:
            deadlines.add(round(live.isolation_deadline - admitted_at, 1))
        await daemon.kill()
        await daemon.start()
        assert time.time() < admitted_at + 5 * DRAIN_TIMEOUT_S
    assert deadlines == {DRAIN_TIMEOUT_S}
    assert daemon.target(node).aborted_isolations == 1
    assert "not isolated within" in daemon.target(node).last_text
    assert not await is_cordoned(sandbox, node)


@pytest.mark.parametrize("outage", ["kubelet", "deleted"])
async def test_drained_node_is_finished_when_peer_leaves(
    sandbox: ClusterSandbox, daemon: ClusterDaemon, outage: str
) -> None:
    sandbox.end_s = 3600.0
    node, peer = await sandbox.node("a", TEAM), await sandbox.node("b", TEAM)
    await sandbox.workload("api", [node], grace_s=3600)
    [pod] = await sandbox.pods_on(node)
    # A pass that ends between the outage and the pod's end would abort the isolation, which was not complete.
    daemon.drain_pass_s = LONG_PASS_S
    await daemon.start()
    await daemon.submit("10m", [node, peer])
    await wait_in_loop_until(lambda: is_cordoned(sandbox, node))

    sandbox.silent_nodes.add(peer)
    if outage == "kubelet":
        await sandbox.post_heartbeat(peer, ready="False")
    else:
        await sandbox.api.delete(f"/api/v1/nodes/{peer}")
    # Only an outage that the daemon knows before the drain is complete makes the node wait.
    await wait_in_loop_until(lambda: not daemon.is_up(peer))
    await sandbox.api.delete(f"{sandbox.pods_path}/{pod}", gracePeriodSeconds=0)
    if outage == "kubelet":

        async def waits_for_slot() -> bool:
            reason = await daemon.why(node)
            return reason is not None and reason.code is ReasonCode.POOL_OVER_BUDGET

        await wait_in_loop_until(waits_for_slot)
        assert await is_cordoned(sandbox, node)
        sandbox.silent_nodes.discard(peer)
        await sandbox.post_heartbeat(peer)

    await wait_in_loop_until(lambda: daemon.target(node).phase is Phase.DONE)
    assert (daemon.target(node).outcome, daemon.target(node).attempt) == (Outcome.CHANGED, 1)
    assert not await is_cordoned(sandbox, node)


async def test_hold_during_drain_returns_slot_at_once(sandbox: ClusterSandbox, daemon: ClusterDaemon) -> None:
    sandbox.end_s = 3600.0
    node, _ = await sandbox.node("a", TEAM), await sandbox.node("b", TEAM)
    await sandbox.workload("api", [node], grace_s=3600)
    await daemon.start()
    await daemon.submit("10m", [node])
    await wait_in_loop_until(lambda: is_cordoned(sandbox, node))
    await daemon.kill()
    await sandbox.annotate(node, HOLD_ANNOTATION, "disk, alice")
    await daemon.start()
    await wait_in_loop_until(lambda: daemon.target(node).phase is Phase.PENDING)
    assert "disk, alice" in daemon.target(node).last_text
    assert await is_cordoned(sandbox, node)


async def test_train_isolates_node_once(sandbox: ClusterSandbox, daemon: ClusterDaemon) -> None:
    node, _ = await sandbox.node("a", TEAM), await sandbox.node("b", TEAM)
    rollouts = (ROLLOUT, "r-2", "r-3")
    await daemon.start()
    await daemon.submit("10m", [node], rollouts=rollouts)
    await wait_in_loop_until(lambda: all(daemon.target(node, each).phase is Phase.DONE for each in rollouts))
    assert [daemon.target(node, each).joined_outage for each in rollouts] == [False, True, True]
    assert not await is_cordoned(sandbox, node)


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
async def test_kubectl_describe_shows_each_phase(
    sandbox: ClusterSandbox, daemon: ClusterDaemon, kubeconfig: Path
) -> None:
    node, other = await sandbox.node("a", TEAM), await sandbox.node("b", TEAM)
    await sandbox.workload("api", [node, node], min_available=1)
    sandbox.ready_s = 3600.0  # no replacement becomes Ready, so the second pod is held by the budget
    before = await sandbox.get_node(node)
    daemon.runs.scripts = {"site.yml": Script.LONG}
    await daemon.start()
    await daemon.submit("10m", [node, other])

    async def described(reason: str, phase: Phase) -> str:
        """Return what `kubectl describe node` shows once this event is there and the node in this phase."""

        async def is_there() -> bool:
            found = await sandbox.api.get("/api/v1/events", fieldSelector=f"involvedObject.name={node}")
            reasons = {event["reason"] for event in found["items"]}
            return reason in reasons and daemon.target(node).phase is phase

        await wait_in_loop_until(is_there)
        return await kubectl(kubeconfig, "describe", "node", node)

    blocked = await described("DrainBlocked", Phase.ISOLATING)
    assert "MaintenanceAdmitted" in blocked
    assert f"is held by budget {sandbox.namespace}/api" in blocked
    assert re.search(r"MaintenanceInProgress +True .* Isolating ", blocked)
    path = f"/apis/policy/v1/namespaces/{sandbox.namespace}/poddisruptionbudgets/api"
    await sandbox.api.delete(path)
    assert "MaintenanceInProgress" in await described("NodeDrained", Phase.MAINTAINING)
    [run] = daemon.runs.runs.values()
    daemon.runs.scripts = {"site.yml": Script.OK}
    run.end(Ok("changed"))
    over = await described("MaintenanceVerified", Phase.DONE)
    assert "NodeMaintained" in over
    assert "NodeReturned" in over
    assert "MaintenanceInProgress" not in over
    after = await sandbox.get_node(node)
    for part in ("annotations", "labels"):
        assert ours(after["metadata"].get(part)) == ours(before["metadata"].get(part))
    assert after["spec"] == before["spec"]


def ours(mapping: JSON) -> JSON:
    return {key: value for key, value in (mapping or {}).items() if "rolloutd.io" in key}


async def kubectl(kubeconfig: Path, *arguments: str) -> str:
    command = ("kubectl", f"--kubeconfig={kubeconfig}", *arguments)
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    output, _ = await process.communicate()
    return output.decode()
