"""A rollout over the nodes of a cluster: the real daemon, real Ansible, an API server on loopback.

What happened is judged from outside: by the pods and nodes of the API server,
and by the playbooks' own log.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from rolloutd.adapters.kubernetes.nodes import HOLD, ISOLATED_BY
from tests.support.kubestage import (
    POOLS,
    Stage,
    is_as_before,
    is_closed,
    isolating,
    only,
    pods_of,
    stage,
)
from tests.support.kubetwin.server import Asked
from tests.support.kubeworld import World as Cluster
from tests.support.world import WAIT_LIMIT_S

JSON = Any

pytestmark = pytest.mark.servers

JOIN_LIMIT_S = 60.0
"""Only that it is enrolled is judged here; the five seconds that are promised are bench/joiners.py's."""

NODES = 40
REPLICAS, NEEDED = 3, 2
WORKLOADS = 10


class Outside:
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
    async with stage(tmp_path_factory.mktemp("k"), NODES) as made:
        for number in range(WORKLOADS):
            where = [made.nodes[(number * REPLICAS + each) % NODES] for each in range(REPLICAS)]
            await made.cluster.workload(f"w{number}", where, min_available=NEEDED)
        outside = Outside(made.cluster)
        looking = asyncio.create_task(outside.look())
        try:
            await made.until_done(await made.submit("walk"))
        finally:
            looking.cancel()
        assert min(outside.fewest.values()) >= NEEDED
        assert len(outside.fewest) == WORKLOADS
        assert outside.most == dict.fromkeys(POOLS, 1)
        assert sorted(span.node for span in made.daemon.spans()) == sorted(made.nodes)
        for node in made.nodes:
            await is_as_before(made, node)


async def test_who_cannot_go_is_named_and_put_back_and_the_others_go(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    async with stage(tmp_path_factory.mktemp("k"), 8) as made:
        cordoned, stuck, mate, canary = made.nodes[0], made.nodes[1], made.nodes[5], made.nodes[2]
        await made.cluster.cordon(cordoned)
        await made.cluster.workload("db", [stuck], min_available=1)
        rollout = await made.submit(
            "stuck",
            isolate=[{"kubernetes": {"drain_timeout": "3s"}}],
            canary={"select": f"kubernetes.io/hostname={canary}"},
        )
        await made.ask(made.daemon.wait_for_gate, rollout, "continue")
        await made.ask(made.daemon.vote, rollout, "continue")
        await made.until(lambda: made.daemon.status(rollout)["done"] == 5, "all that can go are done")

        nodes = await made.ask(made.daemon.nodes, rollout)
        assert nodes[mate]["phase"] == "done"
        assert "cordoned by kubectl" in nodes[cordoned]["reason"]["text"]
        await made.until(lambda: made.daemon.nodes(rollout)[stuck]["phase"] == "pending", "it is put back")
        records = await made.ask(made.daemon.client.get, f"/v1/rollouts/{rollout}/nodes/{stuck}")
        assert f"held by budget {made.cluster.namespace}/db" in str(records["steps"])
        assert (await made.ask(made.daemon.status, rollout))["state"] == "running"
        assert (await made.cluster.read(cordoned))["spec"]["unschedulable"] is True
        assert not (await made.cluster.read(stuck))["spec"].get("unschedulable")
        assert len(await made.cluster.pods_on(stuck)) == 1


async def test_killed_during_a_drain_and_a_hold_it_ends_as_without_the_kill(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    async with stage(tmp_path_factory.mktemp("k"), 4) as made:
        first, held = made.nodes[0], made.nodes[1]
        await made.cluster.workload("db", [first], min_available=1)
        canary = {"select": f"kubernetes.io/hostname in ({first},{held})", "max_parallel": 2}
        made.daemon.hold()
        rollout = await made.submit("killed", canary=canary)

        async def drained_or_draining() -> bool:
            states = [await made.cluster.read(node) for node in (first, held)]
            return all(node["spec"].get("unschedulable") for node in states)

        await made.cluster.until(drained_or_draining)
        await made.ask(made.daemon.kill_daemon)
        await made.cluster.annotate(held, HOLD, "mine now")
        made.daemon.release()
        await made.cluster.api.delete(
            f"/apis/policy/v1/namespaces/{made.cluster.namespace}/poddisruptionbudgets/db"
        )
        await made.ask(made.daemon.start_daemon)

        await made.until(
            lambda: made.daemon.nodes(rollout)[first]["phase"] == "done", "the drained node is done"
        )
        await made.until(lambda: not isolating(made.daemon.nodes(rollout)[held]), "the held node is let go")
        assert not (await made.cluster.read(first))["spec"].get("unschedulable")
        assert (await made.cluster.read(held))["spec"]["unschedulable"] is True
        for node in (first, held):
            assert ISOLATED_BY not in ((await made.cluster.read(node))["metadata"].get("annotations") or {})


async def test_uncordoned_while_its_playbook_runs_a_node_is_isolated_again(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    async with stage(tmp_path_factory.mktemp("k"), 2) as made:
        node = made.nodes[0]
        made.daemon.hold()
        rollout = await made.submit("guarded", canary=only(node))
        await made.until(made.daemon.spans, "the playbook runs")
        await made.cluster.cordon(node, closed=False)

        async def isolated_again() -> bool:
            return bool((await made.cluster.read(node))["spec"].get("unschedulable"))

        await made.cluster.until(isolated_again)
        assert made.daemon.spans()[0].end is None, "it was isolated again while the playbook ran"
        made.daemon.release()
        await made.until(lambda: made.daemon.nodes(rollout)[node]["phase"] == "done", "it is done")
        assert len(made.daemon.spans()) == 1
        await is_as_before(made, node)


def cordoned_and_full(made: Stage, asked: Asked) -> bool:
    """The first eviction after the cordon; rehearsals of nodes in service are none."""
    return asked.part == "eviction" and is_closed(made, made.nodes[0])


def drained_and_looked_at(made: Stage, asked: Asked) -> bool:
    """The look at a drained node before its playbook; one look is still the drain's own."""
    mine = asked.verb == "get" and asked.resource == "nodes" and asked.name == made.nodes[0]
    drained = mine and is_closed(made, asked.name) and not pods_of(made, asked.name)
    made.looks += drained
    return drained and made.looks == 2


def uncordoned(made: Stage, asked: Asked) -> bool:
    """The put-back of a node that has passed its checks."""
    wanted = (asked.body or {}).get("spec", {}) if asked.verb == "patch" else {}
    return asked.name == made.nodes[0] and "unschedulable" in wanted and wanted["unschedulable"] is None


@pytest.mark.long
@pytest.mark.parametrize(
    "moment", [cordoned_and_full, drained_and_looked_at, uncordoned], ids=lambda moment: moment.__name__
)
async def test_killed_between_two_steps_a_node_ends_as_without_the_kill(
    tmp_path_factory: pytest.TempPathFactory, moment: Callable[[Stage, Asked], bool]
) -> None:
    async with stage(tmp_path_factory.mktemp("k"), 2) as made:
        node = made.nodes[0]
        await made.cluster.workload("web", [node])
        reached = asyncio.Event()

        def hold_back(asked: Asked) -> Awaitable[None] | None:
            if not reached.is_set() and not moment(made, asked):
                return None
            reached.set()
            return asyncio.sleep(600)  # the daemon is gone long before, and its request with it

        made.twin.server.interferences.append(hold_back)
        rollout = await made.submit("killed", canary=only(node))
        async with asyncio.timeout(WAIT_LIMIT_S):
            await reached.wait()
        await made.ask(made.daemon.kill_daemon)
        made.twin.server.interferences.remove(hold_back)
        assert is_closed(made, node)
        assert len(made.daemon.spans()) == (1 if moment is uncordoned else 0)
        await made.ask(made.daemon.start_daemon)

        await made.until(lambda: made.daemon.nodes(rollout)[node]["phase"] == "done", "it is done")
        assert made.daemon.nodes(rollout)[node]["outcome"] == "changed"
        assert [span.node for span in made.daemon.spans()] == [node]
        await is_as_before(made, node)
        assert pods_of(made, node) == []
        assert len(pods_of(made, made.nodes[1])) == 1


async def test_who_joins_is_enrolled_and_who_leaves_in_the_middle_has_left(
    tmp_path_factory: pytest.TempPathFactory, record_property: Callable[[str, object], None]
) -> None:
    async with stage(tmp_path_factory.mktemp("k"), 8) as made:
        leaver, mate = made.nodes[0], made.nodes[4]
        canary = {"select": "example.com/team=t1", "max_parallel": 2}
        made.daemon.hold()
        rollout = await made.submit("joiner", canary=canary, soak="1h")

        began_at = asyncio.get_running_loop().time()
        new = await made.cluster.node("new", {"example.com/team": "t2", "role": "worker"})
        await made.until(lambda: new in made.daemon.nodes(rollout), "the joiner is enrolled")
        joined_s = asyncio.get_running_loop().time() - began_at
        record_property("joined_within_s", round(joined_s, 2))
        assert joined_s < JOIN_LIMIT_S
        assert made.daemon.nodes(rollout)[new]["wave"] != made.daemon.nodes(rollout)[leaver]["wave"]
        assert made.daemon.nodes(rollout)[new]["phase"] == "pending"

        await made.until(made.daemon.spans, "the playbook runs")
        leaver, mate = (leaver, mate) if made.daemon.spans()[0].node == leaver else (mate, leaver)
        assert not isolating(made.daemon.nodes(rollout)[mate])
        await made.cluster.api.delete(f"/api/v1/nodes/{leaver}")
        await made.until(lambda: made.daemon.nodes(rollout)[leaver]["outcome"] == "left", "it has left")
        await made.until(lambda: isolating(made.daemon.nodes(rollout)[mate]), "its slot is free")
        assert (await made.ask(made.daemon.status, rollout))["state"] == "running"


def _team(node: JSON) -> str:
    return str(node["metadata"]["labels"]["example.com/team"])


def _serves(pod: JSON) -> bool:
    conditions = pod["status"].get("conditions") or ()
    ready = any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)
    return ready and "deletionTimestamp" not in pod["metadata"]
