"""A drain ends when the last pod that has to go is gone, and says by name what holds it up."""

from __future__ import annotations

import asyncio
import time

import pytest

from machines.model.selector import parse_selector
from rolloutd.adapters.kubernetes.budgets import BudgetWatch
from rolloutd.adapters.kubernetes.cluster import Cluster
from rolloutd.adapters.kubernetes.drain import (
    Evicted,
    EvictionBlocked,
    drain,
    dry_run_drain,
    evict,
    wait_until_unblocked,
)
from rolloutd.adapters.kubernetes.node_pods import list_pods_on
from rolloutd.adapters.kubernetes.pods import MIRROR_ANNOTATION, EvictionPolicy, Pod
from rolloutd.ports import Busy, Ok
from tests.support.cluster_sandbox import ClusterSandbox
from tests.support.waiting import wait_in_loop_until

REFUSE = EvictionPolicy()
DELETE = EvictionPolicy(delete_local_storage=True, delete_without_controller=True)
LONG_LIMIT_S = 60.0
PASS_S = 3.0
SHORT_LIMIT_S = 2.0


async def only_pod(cluster: Cluster, node: str) -> Pod:
    """Return the only pod of a node."""
    [pod] = await list_pods_on(cluster, node)
    return pod


async def passes_until(cluster: Cluster, node: str, text: str) -> str:
    """Drain in short passes until one says this, and return all that it said."""
    async with asyncio.timeout(LONG_LIMIT_S):
        while True:
            result = await drain(BudgetWatch(cluster), node, REFUSE, timeout_s=PASS_S)
            assert isinstance(result, Busy)
            if text in result.text:
                return result.text


async def test_drain_waits_until_pods_are_gone(sandbox: ClusterSandbox, cluster: Cluster) -> None:
    sandbox.end_s = 1.0
    node, _ = await sandbox.node("a"), await sandbox.node("b")
    await sandbox.workload("api", [node, node, node])
    await sandbox.cordon(node)
    assert isinstance(await drain(BudgetWatch(cluster), node, REFUSE, timeout_s=LONG_LIMIT_S), Ok)
    assert await sandbox.pods_on(node) == set()


async def test_what_belongs_to_the_node_stays(sandbox: ClusterSandbox, cluster: Cluster) -> None:
    node = await sandbox.node("a")
    await sandbox.pod("agent", node, daemon="agent", local=True)
    await sandbox.pod("static", node, annotations={MIRROR_ANNOTATION: "x"})
    finished = await sandbox.pod("job", node)
    await sandbox.api.patch(f"{sandbox.pods_path}/{finished}/status", {"status": {"phase": "Succeeded"}})
    assert isinstance(await drain(BudgetWatch(cluster), node, REFUSE, timeout_s=LONG_LIMIT_S), Ok)
    assert await sandbox.pods_on(node) == {"agent", "static", "job"}


async def test_unsafe_pods_named_and_nothing_evicted(sandbox: ClusterSandbox, cluster: Cluster) -> None:
    node, _ = await sandbox.node("a"), await sandbox.node("b")
    await sandbox.workload("api", [node])
    await sandbox.workload("cache", [node], local=True)
    await sandbox.pod("bare", node)
    await sandbox.cordon(node)
    there = await sandbox.pods_on(node)

    result = await drain(BudgetWatch(cluster), node, REFUSE, timeout_s=LONG_LIMIT_S)

    assert isinstance(result, Busy)
    assert f"{sandbox.namespace}/bare has no controller" in result.text
    assert f"{sandbox.namespace}/cache-" in result.text
    assert "local storage" in result.text
    assert await sandbox.pods_on(node) == there


async def test_pods_that_lose_something_go_where_the_plan_says_so(
    sandbox: ClusterSandbox, cluster: Cluster
) -> None:
    node, _ = await sandbox.node("a"), await sandbox.node("b")
    await sandbox.workload("cache", [node], local=True)
    await sandbox.pod("bare", node)
    await sandbox.cordon(node)
    assert isinstance(await drain(BudgetWatch(cluster), node, DELETE, timeout_s=LONG_LIMIT_S), Ok)
    assert await sandbox.pods_on(node) == set()


async def test_one_pod_after_the_other_as_the_budget_allows(
    sandbox: ClusterSandbox, cluster: Cluster
) -> None:
    node, _, _ = await sandbox.node("a"), await sandbox.node("b"), await sandbox.node("c")
    await sandbox.workload("api", [node, node, node], min_available=2)
    await sandbox.cordon(node)
    lowest = 3

    async def count() -> None:
        nonlocal lowest
        while True:
            found = await sandbox.api.get(sandbox.pods_path, labelSelector="app=api")
            lowest = min(lowest, sum(map(is_serving, found["items"])))
            await asyncio.sleep(0.01)

    counting = asyncio.create_task(count())
    try:
        assert isinstance(await drain(BudgetWatch(cluster), node, REFUSE, timeout_s=LONG_LIMIT_S), Ok)
    finally:
        counting.cancel()
    assert lowest >= 2
    assert await sandbox.pods_on(node) == set()


async def test_budget_that_allows_more_wakes_drain_at_once(sandbox: ClusterSandbox, cluster: Cluster) -> None:
    node, _ = await sandbox.node("a"), await sandbox.node("b")
    await sandbox.workload("api", [node, node], min_available=1)
    sandbox.ready_s = 3600.0  # the replacement never becomes Ready
    await sandbox.cordon(node)
    draining = asyncio.create_task(drain(BudgetWatch(cluster), node, REFUSE, timeout_s=LONG_LIMIT_S))
    await sandbox.wait_for_budget("api", 1)
    await asyncio.wait((draining,), timeout=PASS_S)
    assert len(await sandbox.pods_on(node)) == 1
    path = f"/apis/policy/v1/namespaces/{sandbox.namespace}/poddisruptionbudgets/api"
    await sandbox.api.patch(path, {"spec": {"minAvailable": 0}})
    async with asyncio.timeout(SHORT_LIMIT_S):
        assert isinstance(await draining, Ok)


async def test_large_drain_leaves_requests_for_small_one(sandbox: ClusterSandbox, cluster: Cluster) -> None:
    large, small, _ = await sandbox.node("a"), await sandbox.node("b"), await sandbox.node("c")
    await sandbox.workload("large", [large] * 30)
    await sandbox.workload("small", [small] * 3)
    for node in (large, small):
        await sandbox.cordon(node)
    budgets = BudgetWatch(cluster)
    first, second = (
        asyncio.create_task(drain(budgets, node, REFUSE, timeout_s=LONG_LIMIT_S)) for node in (large, small)
    )
    await asyncio.wait((first, second), return_when=asyncio.FIRST_COMPLETED)
    assert second.done()
    assert isinstance(await first, Ok)


async def test_blocked_pod_names_budget_and_owner(sandbox: ClusterSandbox, cluster: Cluster) -> None:
    sandbox.ready_s = 3600.0  # replacements never become Ready
    node, _ = await sandbox.node("a"), await sandbox.node("b")
    sandbox.ready_s, slow = 0.05, 3600.0
    await sandbox.workload("api", [node, node, node], min_available=2)
    await sandbox.cordon(node)
    sandbox.ready_s = slow

    held = f"is held by budget {sandbox.namespace}/api: needs 2 healthy, has 2"
    said = await passes_until(cluster, node, held)
    assert "pod of ConfigMap api" in said
    assert len(await sandbox.pods_on(node)) == 2


async def test_zero_budget_is_named_and_evicts_nothing(sandbox: ClusterSandbox, cluster: Cluster) -> None:
    node, _ = await sandbox.node("a"), await sandbox.node("b")
    await sandbox.workload("db", [node], min_available=1)
    await sandbox.workload("api", [node])
    await sandbox.cordon(node)
    there = await sandbox.pods_on(node)

    budgets = BudgetWatch(cluster)
    await drain(budgets, node, REFUSE, timeout_s=SHORT_LIMIT_S)
    result = await drain(budgets, node, REFUSE, timeout_s=SHORT_LIMIT_S)  # a later pass evicts nothing either

    assert isinstance(result, Busy)
    held = f"is held by budget {sandbox.namespace}/db: needs 1 healthy, has 1 (pod of ConfigMap db)"
    assert f"{held}, permanently: it expects 1 pod" in result.text
    assert await sandbox.pods_on(node) == there


async def test_two_budgets_over_one_pod(sandbox: ClusterSandbox, cluster: Cluster) -> None:
    node, _ = await sandbox.node("a"), await sandbox.node("b")
    await sandbox.workload("api", [node, node], min_available=1)
    await sandbox.budget("also", {"app": "api"}, minAvailable=1)
    await sandbox.wait_for_budget("also", 2)
    await sandbox.cordon(node)
    result = await drain(BudgetWatch(cluster), node, REFUSE, timeout_s=SHORT_LIMIT_S)
    assert isinstance(result, Busy)
    assert f"held by two budgets ({sandbox.namespace}/also and {sandbox.namespace}/api)" in result.text


async def test_a_budget_over_pods_without_a_controller(sandbox: ClusterSandbox, cluster: Cluster) -> None:
    node = await sandbox.node("a")
    await sandbox.pod("bare", node, labels={"app": "bare"})
    await wait_in_loop_until(lambda: is_ready(sandbox, "bare"))
    await sandbox.budget("bare", {"app": "bare"}, maxUnavailable=1)
    await sandbox.wait_for_budget("bare", 1)
    result = await drain(BudgetWatch(cluster), node, DELETE, timeout_s=SHORT_LIMIT_S)
    assert isinstance(result, Busy)
    assert "permanently" in result.text


async def test_a_rehearsal_tells_which_node_could_go_and_changes_nothing(
    sandbox: ClusterSandbox, cluster: Cluster
) -> None:
    free, stuck = await sandbox.node("a"), await sandbox.node("b")
    await sandbox.workload("api", [free, free], min_available=1)
    await sandbox.workload("db", [stuck], min_available=1)
    there = await sandbox.pods_on(free) | await sandbox.pods_on(stuck)
    assert isinstance(await dry_run_drain(BudgetWatch(cluster), free, REFUSE), Ok)
    result = await dry_run_drain(BudgetWatch(cluster), stuck, REFUSE)
    assert isinstance(result, Busy)
    assert f"budget {sandbox.namespace}/db" in result.text
    assert await sandbox.pods_on(free) | await sandbox.pods_on(stuck) == there


@pytest.mark.parametrize("blocker", ["budget", "pod"])
async def test_hopeless_node_is_reported_until_blocker_changes(
    sandbox: ClusterSandbox, cluster: Cluster, blocker: str
) -> None:
    node, _ = await sandbox.node("a"), await sandbox.node("b")
    if blocker == "budget":
        await sandbox.workload("db", [node], min_available=1)
    else:
        await sandbox.pod("bare", node)
    budgets = BudgetWatch(cluster)
    result = await dry_run_drain(budgets, node, REFUSE)
    assert isinstance(result, Busy)
    assert result.is_permanent

    unblocked = asyncio.create_task(wait_until_unblocked(budgets, node, REFUSE))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(unblocked), 1.0)
    if blocker == "budget":
        path = f"/apis/policy/v1/namespaces/{sandbox.namespace}/poddisruptionbudgets/db"
        await sandbox.api.delete(path)
    else:
        await sandbox.api.delete(f"{sandbox.pods_path}/bare", gracePeriodSeconds=0)
    async with asyncio.timeout(SHORT_LIMIT_S * 5):
        await unblocked
    assert isinstance(await dry_run_drain(budgets, node, REFUSE), Ok)


async def test_temporary_blocker_is_not_hopeless(sandbox: ClusterSandbox, cluster: Cluster) -> None:
    node, _ = await sandbox.node("a"), await sandbox.node("b")
    await sandbox.workload("api", [node, node], min_available=1)
    sandbox.ready_s = 3600.0  # the replacement never becomes Ready
    [first, _] = sorted(await sandbox.pods_on(node))
    await sandbox.cordon(node)
    await sandbox.api.delete(f"{sandbox.pods_path}/{first}")
    await sandbox.wait_for_budget("api", 1)
    result = await dry_run_drain(BudgetWatch(cluster), node, REFUSE)
    assert isinstance(result, Busy)
    assert not result.is_permanent


async def test_drain_that_becomes_hopeless_ends(sandbox: ClusterSandbox, cluster: Cluster) -> None:
    node, _ = await sandbox.node("a"), await sandbox.node("b")
    await sandbox.workload("api", [node, node], min_available=1)
    sandbox.ready_s = 3600.0
    await sandbox.cordon(node)
    draining = asyncio.create_task(drain(BudgetWatch(cluster), node, REFUSE, timeout_s=LONG_LIMIT_S))
    await sandbox.wait_for_budget("api", 1)
    path = f"/apis/policy/v1/namespaces/{sandbox.namespace}/poddisruptionbudgets/api"
    await sandbox.api.patch(path, {"spec": {"minAvailable": 2}})
    async with asyncio.timeout(LONG_LIMIT_S / 2):
        result = await draining
    assert isinstance(result, Busy)
    assert result.is_permanent


async def test_finished_pods_are_evicted_where_plan_says_so(
    sandbox: ClusterSandbox, cluster: Cluster
) -> None:
    node = await sandbox.node("a")
    await sandbox.finish(await sandbox.pod("job", node))
    policy = EvictionPolicy(evict_finished=True)
    assert isinstance(await drain(BudgetWatch(cluster), node, policy, timeout_s=LONG_LIMIT_S), Ok)
    assert await sandbox.pods_on(node) == set()


async def test_pods_of_selector_stay(sandbox: ClusterSandbox, cluster: Cluster) -> None:
    node, _ = await sandbox.node("a"), await sandbox.node("b")
    await sandbox.pod("agent", node, labels={"tier": "infra"})
    await sandbox.workload("api", [node])
    policy = EvictionPolicy(leave=parse_selector("tier=infra"))
    await sandbox.cordon(node)
    assert isinstance(await drain(BudgetWatch(cluster), node, policy, timeout_s=LONG_LIMIT_S), Ok)
    assert await sandbox.pods_on(node) == {"agent"}


async def test_grace_period_of_plan_replaces_that_of_pod(sandbox: ClusterSandbox, cluster: Cluster) -> None:
    sandbox.end_s = 3600.0
    node, _ = await sandbox.node("a"), await sandbox.node("b")
    await sandbox.workload("api", [node], grace_s=600)
    await sandbox.cordon(node)
    await drain(BudgetWatch(cluster), node, EvictionPolicy(grace_s=7), timeout_s=PASS_S)
    [pod] = await list_pods_on(cluster, node)
    assert pod.grace_s == 7


async def test_pod_of_dead_kubelet_is_not_awaited(sandbox: ClusterSandbox, cluster: Cluster) -> None:
    sandbox.end_s = 3600.0
    node, _ = await sandbox.node("a"), await sandbox.node("b")
    await sandbox.workload("api", [node], grace_s=1)
    await sandbox.cordon(node)
    policy = EvictionPolicy(skip_terminating_after_s=1.0)
    assert isinstance(await drain(BudgetWatch(cluster), node, policy, timeout_s=LONG_LIMIT_S), Ok)
    assert len(await sandbox.pods_on(node)) == 1


async def test_job_may_finish_until_its_limit(sandbox: ClusterSandbox, cluster: Cluster) -> None:
    node = await sandbox.node("a")
    done, endless = await sandbox.pod("done", node, job="a"), await sandbox.pod("endless", node, job="b")
    limit_at = time.time() + 6.0
    policy = EvictionPolicy(jobs_until=limit_at)
    draining = asyncio.create_task(drain(BudgetWatch(cluster), node, policy, timeout_s=LONG_LIMIT_S))
    await asyncio.wait((draining,), timeout=1.0)
    pods = {pod.name: pod for pod in await list_pods_on(cluster, node)}
    assert not any(pod.terminating_since for pod in pods.values())
    await sandbox.finish(done)
    assert isinstance(await draining, Ok)
    assert time.time() >= limit_at
    assert await sandbox.pods_on(node) == {done}
    assert endless not in await sandbox.pods_on(node)


async def test_slow_pod_named_with_grace_period(sandbox: ClusterSandbox, cluster: Cluster) -> None:
    sandbox.end_s = 3600.0
    node, _ = await sandbox.node("a"), await sandbox.node("b")
    await sandbox.workload("slow", [node], grace_s=120)
    await sandbox.cordon(node)
    assert "grace period 120 s" in await passes_until(cluster, node, "is ending")


async def test_only_the_very_pod_is_evicted(sandbox: ClusterSandbox, cluster: Cluster) -> None:
    node = await sandbox.node("a")
    await sandbox.pod("bare", node)
    pod = await only_pod(cluster, node)
    other = Pod(pod.namespace, pod.name, "00000000-0000-0000-0000-000000000000")
    assert await evict(cluster, other) is Evicted.GONE
    assert await sandbox.pods_on(node) == {"bare"}


async def test_a_namespace_that_is_going_is_no_budget(sandbox: ClusterSandbox, cluster: Cluster) -> None:
    sandbox.end_s = 3600.0
    node = await sandbox.node("a")
    await sandbox.pod("bare", node, grace_s=600)
    pod = await only_pod(cluster, node)
    await sandbox.api.delete(f"/api/v1/namespaces/{sandbox.namespace}")
    answer = await evict(cluster, pod)
    if isinstance(
        answer, EvictionBlocked
    ):  # a server may also let the eviction pass, since the pod is ending
        assert "being deleted" in answer.text


def is_serving(pod: dict[str, object]) -> bool:
    """Whether a budget counts the pod."""
    meta, status = pod["metadata"], pod.get("status") or {}
    assert isinstance(meta, dict)
    assert isinstance(status, dict)
    conditions = status.get("conditions") or ()
    ready = any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)
    return ready and "deletionTimestamp" not in meta


async def is_ready(sandbox: ClusterSandbox, pod: str) -> bool:
    """Whether a pod has become Ready."""
    return is_serving(await sandbox.api.get(f"{sandbox.pods_path}/{pod}"))
