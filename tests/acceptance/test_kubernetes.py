"""A rollout over the nodes of a cluster: the real daemon, real Ansible, an API server on loopback.

What happened is judged from outside: by the pods and nodes of the API server,
and by the playbooks' own log.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from rolloutd.adapters.kubernetes.nodes import HOLD_ANNOTATION, ISOLATED_BY_ANNOTATION
from rolloutd.control.client import api_path
from tests.support.cluster_environment import (
    POOLS,
    ClusterEnvironment,
    assert_restored,
    cluster_environment,
    is_cordoned,
    is_in_progress,
    pods_of,
    single_node_wave,
)
from tests.support.cluster_sandbox import ClusterSandbox as Cluster
from tests.support.daemon_environment import WAIT_LIMIT_S
from tests.support.fake_kubernetes.server import ApiRequest
from tests.support.waiting import wait_in_loop_until

JSON = Any

pytestmark = pytest.mark.servers

JOIN_LIMIT_S = 60.0
"""Only that it is enrolled is judged here; the five seconds that are promised are bench/joiners.py's."""

NODES = 40
REPLICAS, NEEDED = 3, 2
WORKLOADS = 10


class ClusterObserver:
    """Somebody who only looks: the fewest pods serving, and the most nodes of a pool closed, at once."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.fewest: dict[str, int] = {}
        self.most: dict[str, int] = {}

    async def look(self) -> None:
        """Look until cancelled."""
        while True:
            pods = (await self._cluster.api.get(self._cluster.pods_path))["items"]
            for name in {pod["metadata"]["labels"]["app"] for pod in pods}:
                serving = sum(pod["metadata"]["labels"]["app"] == name and _serves(pod) for pod in pods)
                self.fewest[name] = min(serving, self.fewest.get(name, serving))
            nodes = (await self._cluster.api.get("/api/v1/nodes"))["items"]
            for team in {node["metadata"]["labels"]["example.com/team"] for node in nodes}:
                closed = sum(
                    _team(node) == team and bool(node["spec"].get("unschedulable")) for node in nodes
                )
                self.most[team] = max(closed, self.most.get(team, 0))
            await asyncio.sleep(0.02)


@pytest.mark.long
async def test_40_nodes_of_4_pools_and_no_budget_violated(tmp_path_factory: pytest.TempPathFactory) -> None:
    async with cluster_environment(tmp_path_factory.mktemp("k"), NODES) as made:
        for number in range(WORKLOADS):
            where = [made.nodes[(number * REPLICAS + each) % NODES] for each in range(REPLICAS)]
            await made.sandbox.workload(f"w{number}", where, min_available=NEEDED)
        outside = ClusterObserver(made.sandbox)
        looking = asyncio.create_task(outside.look())
        try:
            await made.wait_until_done(await made.submit("walk"))
        finally:
            looking.cancel()
        assert min(outside.fewest.values()) >= NEEDED
        assert len(outside.fewest) == WORKLOADS
        assert outside.most == dict.fromkeys(POOLS, 1)
        assert sorted(span.node for span in made.daemon.spans()) == sorted(made.nodes)
        for node in made.nodes:
            await assert_restored(made, node)


async def test_hopeless_node_waits_uncordoned_until_budget_is_gone(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    async with cluster_environment(tmp_path_factory.mktemp("k"), 8) as made:
        cordoned, stuck, mate, canary = made.nodes[0], made.nodes[1], made.nodes[5], made.nodes[2]
        await made.sandbox.cordon(cordoned)
        await made.sandbox.workload("db", [stuck], min_available=1)
        rollout = await made.submit(
            "stuck",
            isolate=[{"kubernetes": {"drain_timeout": "3s"}}],
            canary={"select": f"kubernetes.io/hostname={canary}"},
        )
        await made.in_thread(made.daemon.wait_for_gate, rollout, "continue")
        await made.in_thread(made.daemon.vote, rollout, "continue")
        await made.wait_until(lambda: made.daemon.status(rollout)["done"] == 5, "all that can go are done")

        nodes = await made.in_thread(made.daemon.nodes, rollout)
        assert nodes[mate]["phase"] == "done"
        assert "cordoned by kubectl" in nodes[cordoned]["reason"]["text"]
        assert (nodes[stuck]["phase"], nodes[stuck]["reason"]["code"]) == ("pending", "cannot-isolate")
        assert f"held by budget {made.sandbox.namespace}/db" in nodes[stuck]["reason"]["text"]
        assert (await made.in_thread(made.daemon.status, rollout))["state"] == "running"
        assert (await made.sandbox.get_node(cordoned))["spec"]["unschedulable"] is True
        writes = [r for r in made.kubernetes.server.requests if r.verb == "patch" and r.name == stuck]
        assert all(request.manager != "rolloutd" for request in writes)
        assert len(await made.sandbox.pods_on(stuck)) == 1

        await made.sandbox.api.delete(
            f"/apis/policy/v1/namespaces/{made.sandbox.namespace}/poddisruptionbudgets/db"
        )
        await made.wait_until(lambda: made.daemon.nodes(rollout)[stuck]["phase"] == "done", "it is done")


async def test_kill_during_drain_and_hold_keeps_outcome(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    async with cluster_environment(tmp_path_factory.mktemp("k"), 4) as made:
        first, held = made.nodes[0], made.nodes[1]
        made.sandbox.end_s = 3600.0
        await made.sandbox.workload("db", [first])
        canary = {"select": f"kubernetes.io/hostname in ({first},{held})", "max_parallel": 2}
        made.daemon.pause_playbooks()
        rollout = await made.submit("killed", canary=canary)

        async def drained_or_draining() -> bool:
            states = [await made.sandbox.get_node(node) for node in (first, held)]
            return all(node["spec"].get("unschedulable") for node in states)

        await wait_in_loop_until(drained_or_draining)
        await made.in_thread(made.daemon.kill_daemon)
        await made.sandbox.annotate(held, HOLD_ANNOTATION, "mine now")
        made.daemon.resume_playbooks()
        for pod in await made.sandbox.pods_on(first):
            await made.sandbox.api.delete(f"{made.sandbox.pods_path}/{pod}", gracePeriodSeconds=0)
        await made.in_thread(made.daemon.start_daemon)

        await made.wait_until(
            lambda: made.daemon.nodes(rollout)[first]["phase"] == "done", "the drained node is done"
        )
        await made.wait_until(
            lambda: not is_in_progress(made.daemon.nodes(rollout)[held]), "the held node is let go"
        )
        assert not (await made.sandbox.get_node(first))["spec"].get("unschedulable")
        assert (await made.sandbox.get_node(held))["spec"]["unschedulable"] is True
        for node in (first, held):
            assert ISOLATED_BY_ANNOTATION not in (
                (await made.sandbox.get_node(node))["metadata"].get("annotations") or {}
            )


async def test_uncordoned_while_its_playbook_runs_a_node_is_isolated_again(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    async with cluster_environment(tmp_path_factory.mktemp("k"), 2) as made:
        node = made.nodes[0]
        made.daemon.pause_playbooks()
        rollout = await made.submit("guarded", canary=single_node_wave(node))
        await made.wait_until(made.daemon.spans, "the playbook runs")
        await made.sandbox.cordon(node, unschedulable=False)

        async def isolated_again() -> bool:
            return bool((await made.sandbox.get_node(node))["spec"].get("unschedulable"))

        await wait_in_loop_until(isolated_again)
        assert made.daemon.spans()[0].end is None, "it was isolated again while the playbook ran"
        made.daemon.resume_playbooks()
        await made.wait_until(lambda: made.daemon.nodes(rollout)[node]["phase"] == "done", "it is done")
        assert len(made.daemon.spans()) == 1
        await assert_restored(made, node)


def cordoned_and_full(made: ClusterEnvironment, asked: ApiRequest) -> bool:
    """The first eviction after the cordon; rehearsals of nodes in service are none."""
    return asked.subresource == "eviction" and is_cordoned(made, made.nodes[0])


def drained_and_looked_at(made: ClusterEnvironment, asked: ApiRequest) -> bool:
    """The look at a drained node before its playbook; one look is still the drain's own."""
    mine = asked.verb == "get" and asked.resource == "nodes" and asked.name == made.nodes[0]
    drained = mine and is_cordoned(made, asked.name) and not pods_of(made, asked.name)
    made.probe_count += drained
    return drained and made.probe_count == 2


def uncordoned(made: ClusterEnvironment, asked: ApiRequest) -> bool:
    """The put-back of a node that has passed its checks."""
    wanted = (asked.body or {}).get("spec", {}) if asked.verb == "patch" else {}
    return asked.name == made.nodes[0] and "unschedulable" in wanted and wanted["unschedulable"] is None


@pytest.mark.long
@pytest.mark.parametrize(
    "moment", [cordoned_and_full, drained_and_looked_at, uncordoned], ids=lambda moment: moment.__name__
)
async def test_kill_between_steps_keeps_outcome(
    tmp_path_factory: pytest.TempPathFactory, moment: Callable[[ClusterEnvironment, ApiRequest], bool]
) -> None:
    async with cluster_environment(tmp_path_factory.mktemp("k"), 2) as made:
        node = made.nodes[0]
        await made.sandbox.workload("web", [node])
        reached = asyncio.Event()

        def hold_back(asked: ApiRequest) -> Awaitable[None] | None:
            if not reached.is_set() and not moment(made, asked):
                return None
            reached.set()
            return asyncio.sleep(600)  # the daemon is gone long before, and its request with it

        made.kubernetes.server.interceptors.append(hold_back)
        rollout = await made.submit("killed", canary=single_node_wave(node))
        async with asyncio.timeout(WAIT_LIMIT_S):
            await reached.wait()
        await made.in_thread(made.daemon.kill_daemon)
        made.kubernetes.server.interceptors.remove(hold_back)
        assert is_cordoned(made, node)
        assert len(made.daemon.spans()) == (1 if moment is uncordoned else 0)
        await made.in_thread(made.daemon.start_daemon)

        await made.wait_until(lambda: made.daemon.nodes(rollout)[node]["phase"] == "done", "it is done")
        assert made.daemon.nodes(rollout)[node]["outcome"] == "changed"
        assert [span.node for span in made.daemon.spans()] == [node]
        await assert_restored(made, node)
        assert pods_of(made, node) == []
        assert len(pods_of(made, made.nodes[1])) == 1


async def test_joiner_enrolled_and_leaver_finishes_in_quarantine(
    tmp_path_factory: pytest.TempPathFactory, record_property: Callable[[str, object], None]
) -> None:
    async with cluster_environment(tmp_path_factory.mktemp("k"), 8) as made:
        leaver, mate = made.nodes[0], made.nodes[4]
        canary = {"select": "example.com/team=t1", "max_parallel": 2}
        made.daemon.pause_playbooks()
        rollout = await made.submit("joiner", canary=canary, soak="1h")

        began_at = asyncio.get_running_loop().time()
        new = await made.sandbox.node("new", {"example.com/team": "t2", "role": "worker"})
        await made.wait_until(lambda: new in made.daemon.nodes(rollout), "the joiner is enrolled")
        joined_s = asyncio.get_running_loop().time() - began_at
        record_property("joined_within_s", round(joined_s, 2))
        assert joined_s < JOIN_LIMIT_S
        assert made.daemon.nodes(rollout)[new]["wave"] != made.daemon.nodes(rollout)[leaver]["wave"]
        assert made.daemon.nodes(rollout)[new]["phase"] == "pending"

        await made.wait_until(made.daemon.spans, "the playbook runs")
        leaver, mate = (leaver, mate) if made.daemon.spans()[0].node == leaver else (mate, leaver)
        assert not is_in_progress(made.daemon.nodes(rollout)[mate])
        await made.sandbox.api.delete(f"/api/v1/nodes/{leaver}")
        await made.wait_until(
            lambda: "removed-in-flight" in conflicts_of(made, leaver),
            "it is quarantined",
        )
        assert is_in_progress(made.daemon.nodes(rollout)[leaver])
        assert not is_in_progress(made.daemon.nodes(rollout)[mate]), "its slot is taken"
        made.daemon.resume_playbooks()
        # The check of a node that its cluster no longer has cannot pass.
        await made.wait_until(lambda: made.daemon.nodes(rollout)[leaver]["phase"] == "failed", "it has ended")
        assert len([span for span in made.daemon.spans() if span.node == leaver]) == 1
        pin = api_path("inventory", leaver, "pin")
        await made.in_thread(made.daemon.client.post, pin, {"reason": "scrapped"})
        await made.wait_until(lambda: made.daemon.nodes(rollout)[leaver]["outcome"] == "left", "it has left")
        assert (await made.in_thread(made.daemon.status, rollout))["state"] == "paused", "it failed"


def conflicts_of(made: Any, node: str) -> list[str]:
    found = made.daemon.client.get(api_path("inventory", node))["node"]["conflicts"]
    return [each["kind"] for each in found]


def _team(node: JSON) -> str:
    return str(node["metadata"]["labels"]["example.com/team"])


def _serves(pod: JSON) -> bool:
    conditions = pod["status"].get("conditions") or ()
    ready = any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)
    return ready and "deletionTimestamp" not in pod["metadata"]
