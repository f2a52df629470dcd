"""A drain ends when the last pod that has to go is gone, and says by name what holds it up."""

from __future__ import annotations

import asyncio

from rolloutd.adapters.kubernetes.cluster import Cluster
from rolloutd.adapters.kubernetes.drain import could_drain, drain, pods_on
from rolloutd.adapters.kubernetes.eviction import Gone, Held, evict
from rolloutd.adapters.kubernetes.pods import MIRROR, Pod, Policy
from rolloutd.ports import Busy, Ok
from tests.support.kubeworld import World

REFUSE = Policy()
DELETE = Policy(delete_local_storage=True, delete_without_controller=True)
LONG_S = 60.0
PASS_S = 3.0
SHORT_S = 2.0


async def the_pod(cluster: Cluster, node: str) -> Pod:
    """Return the only pod of a node."""
    [pod] = await pods_on(cluster, node)
    return pod


async def passes_until(cluster: Cluster, node: str, text: str) -> str:
    """Drain in short passes until one says this, and return all that it said."""
    async with asyncio.timeout(LONG_S):
        while True:
            result = await drain(cluster, node, REFUSE, for_s=PASS_S)
            assert isinstance(result, Busy)
            if text in result.text:
                return result.text


async def test_it_waits_until_pods_are_gone_not_only_told_to_end(world: World, cluster: Cluster) -> None:
    world.end_s = 1.0
    node, _ = await world.node("a"), await world.node("b")
    await world.workload("api", [node, node, node])
    await world.cordon(node)
    assert isinstance(await drain(cluster, node, REFUSE, for_s=LONG_S), Ok)
    assert await world.pods_on(node) == set()


async def test_what_belongs_to_the_node_stays(world: World, cluster: Cluster) -> None:
    node = await world.node("a")
    await world.pod("agent", node, daemon="agent", local=True)
    await world.pod("static", node, annotations={MIRROR: "x"})
    finished = await world.pod("job", node)
    await world.api.patch(f"{world.pods_path}/{finished}/status", {"status": {"phase": "Succeeded"}})
    assert isinstance(await drain(cluster, node, REFUSE, for_s=LONG_S), Ok)
    assert await world.pods_on(node) == {"agent", "static", "job"}


async def test_pods_that_lose_something_are_refused_by_name_and_nothing_is_evicted(
    world: World, cluster: Cluster
) -> None:
    node, _ = await world.node("a"), await world.node("b")
    await world.workload("api", [node])
    await world.workload("cache", [node], local=True)
    await world.pod("bare", node)
    await world.cordon(node)
    there = await world.pods_on(node)

    result = await drain(cluster, node, REFUSE, for_s=LONG_S)

    assert isinstance(result, Busy)
    assert f"{world.namespace}/bare has no controller" in result.text
    assert f"{world.namespace}/cache-" in result.text
    assert "local storage" in result.text
    assert await world.pods_on(node) == there


async def test_pods_that_lose_something_go_where_the_plan_says_so(world: World, cluster: Cluster) -> None:
    node, _ = await world.node("a"), await world.node("b")
    await world.workload("cache", [node], local=True)
    await world.pod("bare", node)
    await world.cordon(node)
    assert isinstance(await drain(cluster, node, DELETE, for_s=LONG_S), Ok)
    assert await world.pods_on(node) == set()


async def test_one_pod_after_the_other_as_the_budget_allows(world: World, cluster: Cluster) -> None:
    node, _, _ = await world.node("a"), await world.node("b"), await world.node("c")
    await world.workload("api", [node, node, node], min_available=2)
    await world.cordon(node)
    lowest = 3

    async def count() -> None:
        nonlocal lowest
        while True:
            found = await world.api.get(world.pods_path, labelSelector="app=api")
            lowest = min(lowest, sum(map(is_serving, found["items"])))
            await asyncio.sleep(0.01)

    counting = asyncio.create_task(count())
    try:
        assert isinstance(await drain(cluster, node, REFUSE, for_s=LONG_S), Ok)
    finally:
        counting.cancel()
    assert lowest >= 2
    assert await world.pods_on(node) == set()


async def test_a_pod_that_waits_for_its_budget_names_pod_budget_and_owner(
    world: World, cluster: Cluster
) -> None:
    world.ready_s = 3600.0  # replacements never become Ready
    node, _ = await world.node("a"), await world.node("b")
    world.ready_s, slow = 0.05, 3600.0
    await world.workload("api", [node, node, node], min_available=2)
    await world.cordon(node)
    world.ready_s = slow

    held = f"is held by budget {world.namespace}/api: needs 2 healthy, has 2"
    said = await passes_until(cluster, node, held)
    assert "pod of ConfigMap api" in said
    assert len(await world.pods_on(node)) == 2


async def test_a_budget_that_never_lets_go_is_named_and_nothing_is_evicted(
    world: World, cluster: Cluster
) -> None:
    node, _ = await world.node("a"), await world.node("b")
    await world.workload("db", [node], min_available=1)
    await world.workload("api", [node])
    await world.cordon(node)
    there = await world.pods_on(node)

    result = await drain(cluster, node, REFUSE, for_s=SHORT_S)

    assert isinstance(result, Busy)
    held = f"is held by budget {world.namespace}/db: needs 1 healthy, has 1 (pod of ConfigMap db)"
    assert f"{held}, for ever: it expects 1 pod" in result.text
    assert await world.pods_on(node) == there


async def test_two_budgets_over_one_pod(world: World, cluster: Cluster) -> None:
    node, _ = await world.node("a"), await world.node("b")
    await world.workload("api", [node, node], min_available=1)
    await world.budget("also", {"app": "api"}, minAvailable=1)
    await world.counted("also", 2)
    await world.cordon(node)
    result = await drain(cluster, node, REFUSE, for_s=SHORT_S)
    assert isinstance(result, Busy)
    assert f"held by two budgets ({world.namespace}/also and {world.namespace}/api)" in result.text


async def test_a_budget_over_pods_without_a_controller(world: World, cluster: Cluster) -> None:
    node = await world.node("a")
    await world.pod("bare", node, labels={"app": "bare"})
    await world.until(lambda: is_ready(world, "bare"))
    await world.budget("bare", {"app": "bare"}, maxUnavailable=1)
    await world.counted("bare", 1)
    result = await drain(cluster, node, DELETE, for_s=SHORT_S)
    assert isinstance(result, Busy)
    assert "for ever" in result.text


async def test_a_rehearsal_tells_which_node_could_go_and_changes_nothing(
    world: World, cluster: Cluster
) -> None:
    free, stuck = await world.node("a"), await world.node("b")
    await world.workload("api", [free, free], min_available=1)
    await world.workload("db", [stuck], min_available=1)
    there = await world.pods_on(free) | await world.pods_on(stuck)
    assert isinstance(await could_drain(cluster, free, REFUSE), Ok)
    result = await could_drain(cluster, stuck, REFUSE)
    assert isinstance(result, Busy)
    assert f"budget {world.namespace}/db" in result.text
    assert await world.pods_on(free) | await world.pods_on(stuck) == there


async def test_a_pod_that_takes_its_time_is_named_with_its_grace_period(
    world: World, cluster: Cluster
) -> None:
    world.end_s = 3600.0
    node, _ = await world.node("a"), await world.node("b")
    await world.workload("slow", [node], grace_s=120)
    await world.cordon(node)
    assert "grace period 120 s" in await passes_until(cluster, node, "is ending")


async def test_only_the_very_pod_is_evicted(world: World, cluster: Cluster) -> None:
    node = await world.node("a")
    await world.pod("bare", node)
    pod = await the_pod(cluster, node)
    other = Pod(pod.namespace, pod.name, "00000000-0000-0000-0000-000000000000")
    assert isinstance(await evict(cluster, other), Gone)
    assert await world.pods_on(node) == {"bare"}


async def test_a_namespace_that_is_going_is_no_budget(world: World, cluster: Cluster) -> None:
    world.end_s = 3600.0
    node = await world.node("a")
    await world.pod("bare", node, grace_s=600)
    pod = await the_pod(cluster, node)
    await world.api.delete(f"/api/v1/namespaces/{world.namespace}")
    answer = await evict(cluster, pod)
    if isinstance(answer, Held):  # a server may also let the eviction pass, since the pod is ending
        assert "being deleted" in answer.text


def is_serving(pod: dict[str, object]) -> bool:
    """Whether a budget counts the pod."""
    meta, status = pod["metadata"], pod.get("status") or {}
    assert isinstance(meta, dict)
    assert isinstance(status, dict)
    conditions = status.get("conditions") or ()
    ready = any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)
    return ready and "deletionTimestamp" not in meta


async def is_ready(world: World, pod: str) -> bool:
    """Whether a pod has become Ready."""
    return is_serving(await world.api.get(f"{world.pods_path}/{pod}"))
