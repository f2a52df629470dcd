"""What the Kubernetes adapter does when an API server is away, too busy, forgetful or strict.

These faults are asked of a twin; what any cluster does is tests/contracts/kubernetes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from machines.node import Observation, Sight
from rolloutd.adapters.kubernetes.answers import ApiError
from rolloutd.adapters.kubernetes.cluster import CONNECTIONS, Cluster
from rolloutd.adapters.kubernetes.clusters import Clusters
from rolloutd.adapters.kubernetes.cordon import close, reopen
from rolloutd.adapters.kubernetes.drain import drain
from rolloutd.adapters.kubernetes.eviction import Held, evict
from rolloutd.adapters.kubernetes.inventory import KubernetesInventory
from rolloutd.adapters.kubernetes.isolator import KubernetesIsolator
from rolloutd.adapters.kubernetes.pods import Pod, Policy
from rolloutd.adapters.kubernetes.rights import missing_rights
from rolloutd.adapters.kubernetes.watch import NodeWatch
from rolloutd.app import SystemClock
from rolloutd.errors import SourceFailed
from rolloutd.ports import Busy, Ok
from tests.contracts.kubernetes.steps import context
from tests.support.kubetwin import Twin
from tests.support.kubetwin.objects import instant

JSON = Any

ROLE = Path(__file__).parents[2] / "deploy/kubernetes/rolloutd.yaml"
LIMIT_S = 90.0


@pytest.fixture
async def twin() -> AsyncIterator[Twin]:
    """An API server."""
    async with Twin() as twin:
        yield twin


@pytest.fixture
async def cluster(twin: Twin, tmp_path: Path) -> AsyncIterator[Cluster]:
    """The same as the adapter sees it."""
    cluster = Cluster("ams", twin.kubeconfig(tmp_path / "kubeconfig"))
    yield cluster
    await cluster.close()


def add_node(twin: Twin, name: str) -> None:
    """Put a Ready node into the twin."""
    ready = {"type": "Ready", "status": "True", "lastHeartbeatTime": instant()}
    status = {"conditions": [ready], "nodeInfo": {"bootID": "b", "kubeletVersion": "v1.36.2"}}
    twin.objects.create("nodes", {"metadata": {"name": name, "labels": {}}, "spec": {}, "status": status})


def add_pod(twin: Twin, name: str, node: str, **labels: str) -> Pod:
    """Put a running pod of some controller into the twin."""
    if twin.objects.find("namespaces", "", "shop") is None:
        twin.objects.create("namespaces", {"metadata": {"name": "shop"}})
    owner = {"kind": "ReplicaSet", "name": "api", "uid": "u", "controller": True}
    made = twin.objects.create(
        "pods",
        {
            "metadata": {"name": name, "namespace": "shop", "labels": labels, "ownerReferences": [owner]},
            "spec": {"nodeName": node},
            "status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]},
        },
    )
    return Pod("shop", name, made["metadata"]["uid"], owner="ReplicaSet api")


class Seen:
    """What a watch told."""

    def __init__(self) -> None:
        self.last: dict[str, Observation] = {}
        self.changes = 0

    def changed(self) -> None:
        """Count how often the inventory is to be asked again."""
        self.changes += 1

    def seen(self, observations: Sequence[Observation]) -> None:
        """Keep the latest of each node."""
        self.last.update({each.node: each for each in observations})

    def sight(self, node: str) -> Sight | None:
        """Return how a node was last seen."""
        return self.last[node].sight if node in self.last else None


@asynccontextmanager
async def watching(*watches: NodeWatch) -> AsyncIterator[Seen]:
    """Run watches beside the test."""
    seen = Seen()
    tasks = [asyncio.create_task(watch.run(seen.seen, seen.changed)) for watch in watches]
    try:
        yield seen
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def until(happened: Callable[[], bool]) -> None:
    """Wait for a condition."""
    async with asyncio.timeout(LIMIT_S):
        while not happened():
            await asyncio.sleep(0.02)


# -- flow control and budgets ---------------------------------------------------


async def test_flow_control_is_waited_out(twin: Twin, cluster: Cluster) -> None:
    add_node(twin, "n1")
    twin.server.throttled = 1
    assert (await cluster.get("/api/v1/nodes/n1"))["metadata"]["name"] == "n1"


async def test_flow_control_is_no_budget(twin: Twin, cluster: Cluster) -> None:
    add_node(twin, "n1")
    pod = add_pod(twin, "api-1", "n1")
    twin.server.throttled = 1
    answer = await evict(cluster, pod)
    assert isinstance(answer, Held)
    assert not answer.lasting
    assert "too busy" in answer.text
    assert answer.retry_after_s == 1.0


async def test_a_budget_that_was_just_changed_is_given_its_time(twin: Twin, cluster: Cluster) -> None:
    twin.controllers.delay_s = 3600.0
    add_node(twin, "n1")
    pod = add_pod(twin, "api-1", "n1", app="api")
    spec = {"selector": {"matchLabels": {"app": "api"}}, "minAvailable": 0}
    twin.objects.create(
        "poddisruptionbudgets", {"metadata": {"name": "api", "namespace": "shop"}, "spec": spec}
    )
    answer = await evict(cluster, pod)
    assert isinstance(answer, Held)
    assert "shop/api-1 is held by budget shop/api, which was just changed" in answer.text
    assert answer.retry_after_s == 10.0
    assert not answer.lasting


async def test_evictions_without_the_right_say_so(twin: Twin, tmp_path: Path) -> None:
    add_node(twin, "n1")
    pod = add_pod(twin, "api-1", "n1")
    rules = [{"apiGroups": [""], "resources": ["nodes", "pods"], "verbs": ["*"]}]
    cluster = Cluster("ams", twin.kubeconfig(tmp_path / "k", token=twin.token(rules)))
    answer = await evict(cluster, pod)
    assert isinstance(answer, Held)
    assert "we may not evict shop/api-1" in answer.text
    await cluster.close()


# -- rights ---------------------------------------------------------------------


async def test_the_role_that_we_ship_is_all_we_need_and_no_more(twin: Twin, tmp_path: Path) -> None:
    role = next(d for d in yaml.safe_load_all(ROLE.read_text()) if d["kind"] == "ClusterRole")
    cluster = Cluster("ams", twin.kubeconfig(tmp_path / "k", token=twin.token(role["rules"])))
    add_node(twin, "n1")
    twin.objects.create("namespaces", {"metadata": {"name": "shop"}})
    add_pod(twin, "done", "n1")
    pods = twin.objects.all("pods")
    twin.objects.amend("pods", next(pods), lambda pod: pod.update(status={"phase": "Succeeded"}))
    assert await missing_rights(cluster) == []
    assert isinstance(await close(cluster, "n1", rollout="r", attempt=1, at=0.0), Ok)
    assert isinstance(await drain(cluster, "n1", Policy(), for_s=30.0), Ok)
    assert isinstance(await reopen(cluster, "n1", rollout="r", was_closed=False), Ok)
    for gone in role["rules"]:
        rest = [rule for rule in role["rules"] if rule is not gone]
        less = Cluster("ams", twin.kubeconfig(tmp_path / "less", token=twin.token(rest)))
        words = " ".join(await missing_rights(less))
        assert all(f"{verb} {gone['resources'][0]}" in words for verb in gone["verbs"])
        await less.close()
    await cluster.close()


# -- watches --------------------------------------------------------------------


async def test_nothing_is_vouched_for_between_two_watches(twin: Twin, cluster: Cluster) -> None:
    add_node(twin, "n1")
    first, opened = asyncio.Event(), asyncio.Event()

    async def held_back() -> None:
        opened.set()
        await asyncio.Event().wait()

    def hold_back(asked: Any) -> Awaitable[None] | None:
        if asked.verb != "watch":
            return None
        if first.is_set():
            return held_back()
        first.set()
        asked.query["timeoutSeconds"] = "1.2"
        return None

    twin.server.interferences.append(hold_back)
    watch = NodeWatch(cluster, SystemClock(), beat_s=0.05)
    async with watching(watch) as core:
        await until(opened.is_set)
        told = core.last["n1"].at
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await until(lambda: core.last["n1"].at > told)


async def test_a_version_too_old_is_listed_again(twin: Twin, cluster: Cluster) -> None:
    add_node(twin, "n1")
    async with watching(NodeWatch(cluster, SystemClock())) as core:
        await until(lambda: core.sight("n1") is Sight.UP)
        await twin.stop()
        await until(lambda: core.sight("n1") is Sight.UNKNOWN)
        add_node(twin, "n2")
        twin.objects.compact()
        await twin.start()
        await until(lambda: core.sight("n2") is Sight.UP)
        assert core.sight("n1") is Sight.UP


async def test_a_server_restored_from_a_backup_is_listed_again(twin: Twin, cluster: Cluster) -> None:
    add_node(twin, "n1")
    async with watching(NodeWatch(cluster, SystemClock())) as core:
        await until(lambda: core.sight("n1") is Sight.UP)
        await twin.stop()
        twin.objects.version -= 1
        await until(lambda: core.sight("n1") is Sight.UNKNOWN)
        await twin.start()
        twin.objects.amend(
            "nodes", twin.objects.get("nodes", "", "n1"), lambda n: n["spec"].update(unschedulable=True)
        )
        await until(lambda: core.last["n1"].foreign)


async def test_a_cluster_without_credentials_holds_back_only_its_own_nodes(
    twin: Twin, tmp_path: Path
) -> None:
    add_node(twin, "n1")
    async with Twin() as other:
        add_node(other, "m1")
        good = Cluster("ams", twin.kubeconfig(tmp_path / "ams"))
        bad = Cluster("fra", other.kubeconfig(tmp_path / "fra"))
        watches = [NodeWatch(each, SystemClock(), beat_s=0.2) for each in (good, bad)]
        inventory = KubernetesInventory(bad, watch=watches[1])
        async with watching(*watches) as core:
            await until(lambda: core.sight("n1") is Sight.UP and core.sight("m1") is Sight.UP)
            rules = other.access.tokens.pop(other.admin_token)
            await until(lambda: core.sight("m1") is Sight.UNKNOWN)
            assert "401" in core.last["m1"].why
            assert core.sight("n1") is Sight.UP
            with pytest.raises(SourceFailed, match="fra"):
                await inventory.refresh()
            asked = core.changes
            other.access.tokens["renewed"] = rules
            other.kubeconfig(tmp_path / "fra", token="renewed")
            await until(lambda: core.sight("m1") is Sight.UP)
            await until(lambda: core.changes > asked)
            assert [found.name for found in await inventory.refresh()] == ["m1"]
        await good.close()
        await bad.close()


async def test_100_clusters_are_watched_over_few_connections(tmp_path: Path) -> None:
    async with contextlib.AsyncExitStack() as stack:
        watches, twins = [], []
        for number in range(100):
            twin = await stack.enter_async_context(Twin())
            for node in range(50):
                add_node(twin, f"c{number}-n{node}")
            cluster = Cluster(f"c{number}", twin.kubeconfig(tmp_path / f"k{number}"))
            stack.push_async_callback(cluster.close)
            watches.append(NodeWatch(cluster, SystemClock()))
            twins.append(twin)
        twins[7].access.tokens.clear()
        async with watching(*watches) as core:
            await until(lambda: len(core.last) == 99 * 50)
            assert all(each.sight is Sight.UP for each in core.last.values())
            await until(lambda: "401" in watches[7].why_blind)
            assert watches[7].observe("c7-n1").sight is Sight.UNKNOWN
            most = [twin.most_connections for twin in twins]
            assert max(most) <= CONNECTIONS
            # A connection that was given up on a slow machine is counted until the server has noticed too.
            assert sum(most) <= 4 * len(twins) < CONNECTIONS * len(twins)


# -- whose cordon ---------------------------------------------------------------


async def test_without_field_managers_the_watch_remembers_whose_cordon(twin: Twin, cluster: Cluster) -> None:
    def forget(asked: JSON) -> None:
        for node in twin.objects.all("nodes"):
            node["metadata"].pop("managedFields", None)

    def cordon(closed: bool) -> None:
        def change(node: JSON) -> None:
            node["spec"]["unschedulable"] = closed
            node["metadata"].pop("managedFields", None)

        twin.objects.amend("nodes", twin.objects.get("nodes", "", "n1"), change)

    twin.server.interferences.append(forget)
    add_node(twin, "n1")
    async with watching(NodeWatch(cluster, SystemClock())) as core:
        assert isinstance(await close(cluster, "n1", rollout="r", attempt=1, at=0.0), Ok)
        await until(lambda: core.sight("n1") is Sight.DOWN)
        cordon(False)
        await until(lambda: core.sight("n1") is Sight.UP)
        cordon(True)
        await until(lambda: core.last["n1"].foreign)
        assert isinstance(await close(cluster, "n1", rollout="r", attempt=1, at=1.0), Busy)
        await reopen(cluster, "n1", rollout="r", was_closed=False)
        assert twin.objects.get("nodes", "", "n1")["spec"]["unschedulable"] is True


async def test_a_restart_of_the_api_server_is_waited_for(twin: Twin, cluster: Cluster) -> None:
    add_node(twin, "n1")
    isolator = KubernetesIsolator(Clusters([cluster]), SystemClock())
    ctx = with_cluster(context("n1"), "ams")
    await twin.stop()
    looking = asyncio.create_task(isolator.look(ctx))
    await asyncio.sleep(0)
    await twin.start()
    look = await looking
    assert not isinstance(look, Busy)
    assert look.done is False


def with_cluster(ctx: JSON, name: str) -> JSON:
    """Return a step's context in another cluster."""
    return replace(
        ctx, host=replace(ctx.host, connection={**ctx.host.connection, "kubernetes_cluster": name})
    )


async def refused(asking: Awaitable[JSON]) -> ApiError:
    """Return the refusal that a request meets."""
    with pytest.raises(ApiError) as caught:
        await asking
    return caught.value


async def test_a_refusal_is_told_by_its_causes(twin: Twin, cluster: Cluster) -> None:
    gone = await refused(cluster.get("/api/v1/nodes/never"))
    assert (gone.status, gone.reason, gone.causes) == (404, "NotFound", {})
