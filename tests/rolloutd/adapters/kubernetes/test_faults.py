"""What the Kubernetes adapter does when an API server is away, too busy, forgetful or strict.

These faults are asked of a fake; what any cluster does is tests/contracts/kubernetes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from machines.model.node import NodeHealth, Observation
from rolloutd.adapters.kubernetes import cluster as cluster_module
from rolloutd.adapters.kubernetes import list_watch
from rolloutd.adapters.kubernetes.answer_slices import unchanged
from rolloutd.adapters.kubernetes.api_errors import ApiError, ClusterUnreachable, parse_error
from rolloutd.adapters.kubernetes.budgets import BudgetWatch
from rolloutd.adapters.kubernetes.cluster import Cluster
from rolloutd.adapters.kubernetes.cluster_registry import ClusterRegistry
from rolloutd.adapters.kubernetes.cordon import cordon_node, uncordon_node
from rolloutd.adapters.kubernetes.drain import EvictionBlocked, drain, evict
from rolloutd.adapters.kubernetes.inventory import KubernetesInventory
from rolloutd.adapters.kubernetes.isolator import KubernetesIsolator
from rolloutd.adapters.kubernetes.node_watch import NodeWatch
from rolloutd.adapters.kubernetes.nodes import ISOLATED_BY_ANNOTATION
from rolloutd.adapters.kubernetes.pods import EvictionPolicy, Pod
from rolloutd.adapters.timers import SystemClock
from rolloutd.errors import SourceFailed
from rolloutd.ports import Busy, Ok, reported_waits
from tests.contracts.kubernetes.steps import step_context
from tests.support.fake_kubernetes import FakeKubernetes
from tests.support.fake_kubernetes.errors import ApiRefusal
from tests.support.fake_kubernetes.objects import format_time
from tests.support.fake_kubernetes.server import ApiRequest
from tests.support.waiting import wait_in_loop_until

JSON = Any


@pytest.fixture
async def fake() -> AsyncIterator[FakeKubernetes]:
    """An API server."""
    async with FakeKubernetes() as fake:
        yield fake


@pytest.fixture
async def cluster(fake: FakeKubernetes, tmp_path: Path) -> AsyncIterator[Cluster]:
    """The same as the adapter sees it."""
    cluster = Cluster("ams", fake.kubeconfig(tmp_path / "kubeconfig"))
    yield cluster
    await cluster.close()


def add_node(fake: FakeKubernetes, name: str) -> None:
    """Put a Ready node into the fake."""
    ready = {"type": "Ready", "status": "True", "lastHeartbeatTime": format_time()}
    status = {"conditions": [ready], "nodeInfo": {"bootID": "b", "kubeletVersion": "v1.36.2"}}
    fake.objects.create("nodes", {"metadata": {"name": name, "labels": {}}, "spec": {}, "status": status})


def add_pod(fake: FakeKubernetes, name: str, node: str, *, grace_s: int = 30, **labels: str) -> Pod:
    """Put a running pod of some controller into the fake cluster."""
    if fake.objects.find("namespaces", "", "shop") is None:
        fake.objects.create("namespaces", {"metadata": {"name": "shop"}})
    owner = {"kind": "ReplicaSet", "name": "api", "uid": "u", "controller": True}
    made = fake.objects.create(
        "pods",
        {
            "metadata": {"name": name, "namespace": "shop", "labels": labels, "ownerReferences": [owner]},
            "spec": {"nodeName": node, "terminationGracePeriodSeconds": grace_s},
            "status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]},
        },
    )
    return Pod("shop", name, made["metadata"]["uid"], owner="ReplicaSet api")


class WatchRecorder:
    """What a watch told."""

    def __init__(self) -> None:
        self.last: dict[str, Observation] = {}
        self.changes = 0
        self.tries: list[str] = []

    def changed(self) -> None:
        """Count how often the inventory is to be asked again."""
        self.changes += 1

    def seen(self, observations: Sequence[Observation]) -> None:
        """Keep the latest of each node."""
        self.last.update({each.node: each for each in observations})

    def sight(self, node: str) -> NodeHealth | None:
        """Return how a node was last seen."""
        return self.last[node].sight if node in self.last else None


@asynccontextmanager
async def watching(*watches: NodeWatch) -> AsyncIterator[WatchRecorder]:
    """Run watches beside the test."""
    seen = WatchRecorder()
    tasks = [asyncio.create_task(watch.run(seen.seen, seen.changed, seen.tries.append)) for watch in watches]
    try:
        yield seen
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


# -- flow control and budgets ---------------------------------------------------


async def test_flow_control_is_waited_out(fake: FakeKubernetes, cluster: Cluster) -> None:
    add_node(fake, "n1")
    fake.server.throttled = 1
    assert (await cluster.get("/api/v1/nodes/n1"))["metadata"]["name"] == "n1"


async def test_flow_control_is_reported_while_it_lasts(fake: FakeKubernetes, cluster: Cluster) -> None:
    add_node(fake, "n1")
    fake.server.throttled = 1
    waits: list[str] = []
    with reported_waits(waits.append):
        await cluster.get("/api/v1/nodes/n1")
    assert waits[0].startswith(f"cluster {cluster.name} returned 429")
    assert waits[-1] == ""


async def test_flow_control_is_no_budget(fake: FakeKubernetes, cluster: Cluster) -> None:
    add_node(fake, "n1")
    pod = add_pod(fake, "api-1", "n1")
    fake.server.throttled = 1
    answer = await evict(cluster, pod)
    assert isinstance(answer, EvictionBlocked)
    assert not answer.is_permanent
    assert "too busy" in answer.text
    assert answer.retry_after_s == 1.0


async def test_a_budget_that_was_just_changed_is_given_its_time(
    fake: FakeKubernetes, cluster: Cluster
) -> None:
    fake.controllers.delay_s = 3600.0
    add_node(fake, "n1")
    pod = add_pod(fake, "api-1", "n1", app="api")
    spec = {"selector": {"matchLabels": {"app": "api"}}, "minAvailable": 0}
    fake.objects.create(
        "poddisruptionbudgets", {"metadata": {"name": "api", "namespace": "shop"}, "spec": spec}
    )
    answer = await evict(cluster, pod)
    assert isinstance(answer, EvictionBlocked)
    assert "still being processed" in answer.text
    assert answer.retry_after_s == 10.0
    assert not answer.is_permanent


async def test_evictions_without_the_right_say_so(fake: FakeKubernetes, tmp_path: Path) -> None:
    add_node(fake, "n1")
    pod = add_pod(fake, "api-1", "n1")
    rules = [{"apiGroups": [""], "resources": ["nodes", "pods"], "verbs": ["*"]}]
    cluster = Cluster("ams", fake.kubeconfig(tmp_path / "k", token=fake.token(rules)))
    answer = await evict(cluster, pod)
    assert isinstance(answer, EvictionBlocked)
    assert "rolloutd may not evict shop/api-1" in answer.text
    await cluster.close()


async def test_drain_asks_only_for_what_budgets_allow(fake: FakeKubernetes, cluster: Cluster) -> None:
    spec = {"selector": {"matchLabels": {"app": "api"}}, "minAvailable": 10}
    for node in ("n1", "n2"):
        add_node(fake, node)
    for number in range(20):
        add_pod(fake, f"api-{number}", "n1" if number < 10 else "n2", grace_s=0, app="api")
    fake.objects.create(
        "poddisruptionbudgets", {"metadata": {"name": "api", "namespace": "shop"}, "spec": spec}
    )
    policy = EvictionPolicy(delete_without_controller=True)
    assert isinstance(await drain(BudgetWatch(cluster), "n1", policy, timeout_s=30.0), Ok)
    evictions = [each for each in fake.server.requests if each.subresource == "eviction"]
    assert len(evictions) <= 11  # ten pods, and at most one that the server refuses
    assert len(fake.server.requests) <= 3 * 10


async def test_large_drains_do_not_starve_a_small_one(fake: FakeKubernetes, cluster: Cluster) -> None:
    nodes = {"large-1": 100, "large-2": 100, "small": 10}
    for node, pods in nodes.items():
        add_node(fake, node)
        for number in range(pods):
            add_pod(fake, f"{node}-{number}", node, grace_s=0)
    order: list[str] = []
    fake.server.interceptors.append(lambda asked: order.append(asked.name) if asked.subresource else None)
    budgets = BudgetWatch(cluster)
    policy = EvictionPolicy(delete_without_controller=True)
    async with asyncio.TaskGroup() as tasks:
        for node in nodes:
            tasks.create_task(drain(budgets, node, policy, timeout_s=60.0))
    small = [place for place, name in enumerate(order) if name.startswith("small")]
    assert len(small) == 10
    assert small[-1] < len(order) / 2


class ListCounter:
    """A WatchHandler that counts the lists and refuses to be disconnected."""

    def __init__(self) -> None:
        self.lists = 0

    parse = staticmethod(unchanged)

    def on_list(self, objects: object) -> None:
        self.lists += 1

    def on_event(self, kind: str, obj: object) -> None:
        """Ignore."""

    def on_connected(self) -> None:
        """Ignore."""

    def on_watch_ended(self) -> None:
        """Ignore."""

    def on_disconnected(self, reason: str) -> None:
        """Fail: an expired version is not an outage."""
        raise AssertionError(reason)


async def test_expired_watch_lists_again_at_once(
    fake: FakeKubernetes, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(list_watch, "WATCH_TIMEOUT_S", 2)
    monkeypatch.setattr(list_watch, "INITIAL_BACKOFF_S", 3600.0)
    watches = 0

    def expire_second(asked: ApiRequest) -> None:
        nonlocal watches
        watches += asked.verb == "watch"
        if asked.verb == "watch" and watches == 2:
            raise ApiRefusal(410, "too old resource version: 1 (3174)")

    fake.server.interceptors.append(expire_second)
    handler = ListCounter()
    watching_nodes = asyncio.create_task(list_watch.run_list_watch(cluster, "/api/v1/nodes", {}, handler))
    try:
        await wait_in_loop_until(lambda: fake.server.watches == 1)
        add_node(fake, "n1")  # a watch that brought an event is followed by the next one at once
        await wait_in_loop_until(lambda: handler.lists == 2)
    finally:
        watching_nodes.cancel()


# -- rights ---------------------------------------------------------------------


# -- watches --------------------------------------------------------------------


async def test_nothing_is_vouched_for_between_two_watches(fake: FakeKubernetes, cluster: Cluster) -> None:
    add_node(fake, "n1")
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

    fake.server.interceptors.append(hold_back)
    watch = NodeWatch(cluster, SystemClock(), report_interval_s=0.05)
    async with watching(watch) as core:
        await wait_in_loop_until(opened.is_set)
        told = core.last["n1"].at
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await wait_in_loop_until(lambda: core.last["n1"].at > told)
        assert watch.observe("n1").sight is NodeHealth.UNKNOWN


async def test_a_version_too_old_is_listed_again(fake: FakeKubernetes, cluster: Cluster) -> None:
    add_node(fake, "n1")
    async with watching(NodeWatch(cluster, SystemClock())) as core:
        # The nodes are listed before the watch is open.
        await wait_in_loop_until(lambda: core.tries == [""] and core.sight("n1") is NodeHealth.UP)
        await fake.stop()
        await wait_in_loop_until(lambda: core.sight("n1") is NodeHealth.UNKNOWN)
        assert "ams" in core.tries[-1]
        add_node(fake, "n2")
        fake.objects.compact()
        await fake.start()
        await wait_in_loop_until(lambda: core.sight("n2") is NodeHealth.UP)
        await wait_in_loop_until(lambda: core.tries[-1] == "")
        assert core.sight("n1") is NodeHealth.UP


async def test_a_server_restored_from_a_backup_is_listed_again(
    fake: FakeKubernetes, cluster: Cluster
) -> None:
    add_node(fake, "n1")
    async with watching(NodeWatch(cluster, SystemClock())) as core:
        await wait_in_loop_until(lambda: core.sight("n1") is NodeHealth.UP)
        await fake.stop()
        fake.objects.version -= 1
        await wait_in_loop_until(lambda: core.sight("n1") is NodeHealth.UNKNOWN)
        await fake.start()
        fake.objects.modify(
            "nodes", fake.objects.get("nodes", "", "n1"), lambda n: n["spec"].update(unschedulable=True)
        )
        await wait_in_loop_until(lambda: core.last["n1"].cordoned_by_other)


async def test_a_cluster_without_credentials_holds_back_only_its_own_nodes(
    fake: FakeKubernetes, tmp_path: Path
) -> None:
    add_node(fake, "n1")
    async with FakeKubernetes() as other:
        add_node(other, "m1")
        good = Cluster("ams", fake.kubeconfig(tmp_path / "ams"))
        bad = Cluster("fra", other.kubeconfig(tmp_path / "fra"))
        watches = [NodeWatch(each, SystemClock(), report_interval_s=0.2) for each in (good, bad)]
        inventory = KubernetesInventory(bad, watch=watches[1])
        async with watching(*watches) as core:
            await wait_in_loop_until(
                lambda: core.sight("n1") is NodeHealth.UP and core.sight("m1") is NodeHealth.UP
            )
            rules = other.access.tokens.pop(other.admin_token)
            await wait_in_loop_until(lambda: core.sight("m1") is NodeHealth.UNKNOWN)
            assert "401" in core.last["m1"].why
            assert core.sight("n1") is NodeHealth.UP
            with pytest.raises(SourceFailed, match="fra"):
                await inventory.refresh()
            asked = core.changes
            other.access.tokens["renewed"] = rules
            other.kubeconfig(tmp_path / "fra", token="renewed")
            await wait_in_loop_until(lambda: core.sight("m1") is NodeHealth.UP)
            await wait_in_loop_until(lambda: core.changes > asked)
            assert [found.name for found in await inventory.refresh()] == ["m1"]
        await good.close()
        await bad.close()


async def test_100_clusters_are_watched_over_few_connections(tmp_path: Path) -> None:
    async with contextlib.AsyncExitStack() as stack:
        watches, fakes = [], []
        for number in range(100):
            fake = await stack.enter_async_context(FakeKubernetes())
            for node in range(50):
                add_node(fake, f"c{number}-n{node}")
            cluster = Cluster(f"c{number}", fake.kubeconfig(tmp_path / f"k{number}"))
            stack.push_async_callback(cluster.close)
            watches.append(NodeWatch(cluster, SystemClock()))
            fakes.append(fake)
        fakes[7].access.tokens.clear()
        async with watching(*watches) as core:
            await wait_in_loop_until(lambda: len(core.last) == 99 * 50)
            assert all(each.sight is NodeHealth.UP for each in core.last.values())
            await wait_in_loop_until(lambda: "401" in watches[7].disconnect_reason)
            assert watches[7].observe("c7-n1").sight is NodeHealth.UNKNOWN
            # A connection that was given up on a slow machine is counted until the server has noticed too.
            assert sum(fake.max_connections for fake in fakes) <= 4 * len(fakes)


# -- whose cordon ---------------------------------------------------------------


async def test_without_field_managers_the_watch_remembers_whose_cordon(
    fake: FakeKubernetes, cluster: Cluster
) -> None:
    def forget(asked: JSON) -> None:
        for node in fake.objects.all("nodes"):
            node["metadata"].pop("managedFields", None)

    def cordon(closed: bool) -> None:
        def change(node: JSON) -> None:
            node["spec"]["unschedulable"] = closed
            node["metadata"].pop("managedFields", None)

        fake.objects.modify("nodes", fake.objects.get("nodes", "", "n1"), change)

    fake.server.interceptors.append(forget)
    add_node(fake, "n1")
    async with watching(NodeWatch(cluster, SystemClock())) as core:
        assert isinstance(await cordon_node(cluster, "n1", rollout="r", attempt=1, at=0.0), Ok)
        await wait_in_loop_until(lambda: core.sight("n1") is NodeHealth.DOWN)
        cordon(False)
        await wait_in_loop_until(lambda: core.sight("n1") is NodeHealth.UP)
        cordon(True)
        await wait_in_loop_until(lambda: core.last["n1"].cordoned_by_other)
        assert isinstance(await cordon_node(cluster, "n1", rollout="r", attempt=1, at=1.0), Busy)
        await uncordon_node(cluster, "n1", rollout="r", was_cordoned=False)
        assert fake.objects.get("nodes", "", "n1")["spec"]["unschedulable"] is True


async def test_a_restart_of_the_api_server_is_waited_for(fake: FakeKubernetes, cluster: Cluster) -> None:
    add_node(fake, "n1")
    isolator = KubernetesIsolator(ClusterRegistry([cluster]), SystemClock())
    ctx = with_cluster(step_context("n1"), "ams")
    await fake.stop()
    looking = asyncio.create_task(isolator.inspect(ctx))
    await asyncio.sleep(0)
    await fake.start()
    look = await looking
    assert not isinstance(look, Busy)
    assert look.is_isolated is False


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


async def test_a_refusal_is_told_by_its_causes(fake: FakeKubernetes, cluster: Cluster) -> None:
    gone = await refused(cluster.get("/api/v1/nodes/never"))
    assert (gone.status, gone.reason, gone.causes) == (404, "NotFound", {})


async def test_error_longer_than_the_limit_has_no_message(
    fake: FakeKubernetes, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_module, "MAX_ERROR_BYTES", 100)
    cut = await refused(cluster.get("/api/v1/nodes/uid"))
    assert (cut.status, cut.message) == (404, "no message")


async def test_reopened_budget_watch_knows_the_budgets(fake: FakeKubernetes, cluster: Cluster) -> None:
    add_node(fake, "n1")
    pod = add_pod(fake, "api-1", "n1", app="api")
    spec = {"selector": {"matchLabels": {"app": "api"}}, "minAvailable": 1}
    fake.objects.create(
        "poddisruptionbudgets", {"metadata": {"name": "api", "namespace": "shop"}, "spec": spec}
    )
    budgets, labelled = BudgetWatch(cluster), replace(pod, labels={"app": "api"}, is_ready=True)
    for _ in range(3):  # at once: the cancelled watch ends after its successor began
        async with budgets.opened():
            assert budgets.is_synced
            assert [each.id for each in budgets.covering(labelled)] == ["shop/api"]
    async with budgets.opened():
        budgets.on_disconnected("a lost connection")
        assert budgets.covering(labelled)
        budgets.on_connected()
        assert budgets.is_synced


@pytest.mark.parametrize(
    "record", ['{"rollout": "r", "attempt": Infinity, "since": "s"}', "[" * 20_000], ids=["infinity", "deep"]
)
async def test_hostile_annotation_hides_no_other_node(
    fake: FakeKubernetes, cluster: Cluster, record: str
) -> None:
    add_node(fake, "n1")
    metadata = {"name": "n2", "labels": {}, "annotations": {ISOLATED_BY_ANNOTATION: record}}
    fake.objects.create("nodes", {"metadata": metadata, "spec": {"unschedulable": True}, "status": {}})
    async with watching(NodeWatch(cluster, SystemClock())) as seen:
        await wait_in_loop_until(lambda: seen.sight("n1") is NodeHealth.UP)
        assert seen.last["n2"].cordoned_by_other


def test_requested_wait_is_limited() -> None:
    assert parse_error(429, "", "", {"Retry-After": "86400"}).retry_after_s == 30.0


async def test_answer_without_end_is_an_unreachable_cluster(
    fake: FakeKubernetes, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_node(fake, "n1")
    monkeypatch.setattr(cluster_module, "MAX_PAGES", 0)
    with pytest.raises(ClusterUnreachable, match="more than 0 pages"):
        await cluster.list("/api/v1/nodes")
    monkeypatch.setattr(cluster_module, "MAX_RESPONSE_BYTES", 100)
    with pytest.raises(ClusterUnreachable, match="the answer is longer"):
        await cluster.get("/api/v1/nodes")
