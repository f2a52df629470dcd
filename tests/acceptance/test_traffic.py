"""Work on a node is traffic: the real daemon, real Ansible, an API server on loopback, and pods of jobs.

What happened is judged from outside: by the nodes and pods of the API server,
by what it was asked, and by the playbooks' own log.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

import pytest

from tests.support.kubestage import Stage, is_as_before, is_closed, only, pods_of, stage
from tests.support.kubetwin.errors import Refusal
from tests.support.kubetwin.server import Asked
from tests.support.world import WAIT_LIMIT_S

JSON = Any

pytestmark = pytest.mark.servers

KIND = "app.kubernetes.io/component"
PODS = f"{KIND}=job"


async def submit(made: Stage, name: str, **spec: JSON) -> str:
    """Submit a plan that looks for jobs, over all nodes."""
    return await made.submit(name, traffic=[{"kubernetes": {"pods": PODS}}], **spec)


async def job(made: Stage, node: str) -> None:
    """Let a job's pod run on a node."""
    await made.cluster.pod("train-7", node, job="train", labels={KIND: "job"})


def busy_text(made: Stage, node: str) -> str:
    """Say what stands in the way of a node with the job on it."""
    return f"{node} is busy: pod {made.cluster.namespace}/train-7 (Job train) runs there"


def touched(made: Stage, node: str) -> list[Asked]:
    """Return what rolloutd has written to a node."""
    asked = list(made.twin.server.requests)
    return [each for each in asked if each.verb == "patch" and each.name == node and not each.part]


def evicted(made: Stage) -> list[Asked]:
    """Return the evictions that were meant, rehearsals left out."""
    asked = [each for each in made.twin.server.requests if each.part == "eviction"]
    return [each for each in asked if not (each.body or {}).get("deleteOptions", {}).get("dryRun")]


def closes(asked: Asked, node: str) -> bool:
    """Whether this is the request that cordons the node."""
    spec = (asked.body or {}).get("spec", {}) if asked.verb == "patch" and not asked.part else {}
    return asked.name == node and bool(spec.get("unschedulable"))


def probes(asked: Asked) -> bool:
    """Whether this is a look of the traffic probe."""
    return asked.verb == "list" and asked.resource == "pods" and asked.query.get("labelSelector") == PODS


async def test_a_node_with_a_job_waits_by_name_the_others_go_and_it_goes_when_the_job_has_finished(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    async with stage(tmp_path_factory.mktemp("k"), 8) as made:
        busy, mate, canary = made.nodes[0], made.nodes[4], made.nodes[2]
        await job(made, busy)
        rollout = await submit(made, "jobs", canary=only(canary))
        await made.ask(made.daemon.wait_for_gate, rollout, "continue")
        await made.ask(made.daemon.vote, rollout, "continue")
        await made.until(lambda: made.daemon.status(rollout)["done"] == 7, "all that are idle are done")

        nodes = await made.ask(made.daemon.nodes, rollout)
        assert nodes[mate]["phase"] == "done"
        assert (nodes[busy]["phase"], nodes[busy]["attempt"]) == ("pending", 0)
        reason = nodes[busy]["reason"]
        assert (reason["code"], reason["text"]) == ("traffic-busy", busy_text(made, busy))
        assert reason["since"]
        status = await made.ask(made.daemon.status, rollout)
        assert status["reason"]["code"] == "traffic-busy"
        assert status["looked_at"] == [f"client traffic: kubernetes pods {PODS}"]
        assert status["not_looked_at"] == []
        assert busy_text(made, busy) in await made.rolloutctl("why", rollout, busy)
        assert touched(made, busy) == []
        assert pods_of(made, busy) == ["train-7"]

        await made.cluster.finish("train-7")
        await made.until(lambda: made.daemon.status(rollout)["state"] == "done", "it goes as well")
        assert busy in {span.node for span in made.daemon.spans()}
        await is_as_before(made, busy)


@pytest.mark.parametrize("killed", [False, True], ids=["alive", "killed"])
async def test_a_job_that_comes_between_the_look_and_the_cordon_puts_the_node_back_and_is_not_evicted(
    tmp_path_factory: pytest.TempPathFactory, killed: bool
) -> None:
    async with stage(tmp_path_factory.mktemp("k"), 2) as made:
        node = made.nodes[0]
        closed, held = asyncio.Event(), asyncio.Event()

        def meddle(asked: Asked) -> Awaitable[None] | None:
            if closes(asked, node) and not closed.is_set():
                closed.set()
                return job(made, node)
            if killed and probes(asked) and is_closed(made, node):
                held.set()
                return asyncio.sleep(600)  # the daemon is gone long before, and its request with it
            return None

        made.twin.server.interferences.append(meddle)
        rollout = await submit(made, "race", canary=only(node))
        if killed:
            async with asyncio.timeout(WAIT_LIMIT_S):
                await held.wait()
            await made.ask(made.daemon.kill_daemon)
            made.twin.server.interferences.remove(meddle)
            assert is_closed(made, node)
            await made.ask(made.daemon.start_daemon)

        def put_back() -> bool:
            told = made.daemon.nodes(rollout)[node]
            return bool(told["phase"] == "pending" and told["attempt"] == 1)

        await made.until(put_back, "the node is put back")
        reason = (await made.ask(made.daemon.nodes, rollout))[node]["reason"]
        assert reason["code"] == "backoff"
        assert busy_text(made, node) in reason["text"]
        assert closed.is_set()
        await is_as_before(made, node)
        assert evicted(made) == []
        assert pods_of(made, node) == ["train-7"]
        assert made.daemon.spans() == []
        assert (await made.ask(made.daemon.status, rollout))["state"] == "running"


async def test_while_the_api_cannot_say_nobody_of_the_cluster_starts(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    async with stage(tmp_path_factory.mktemp("k"), 2) as made:

        def refuse(asked: Asked) -> None:
            if probes(asked):
                raise Refusal(500, "etcdserver: request timed out")

        made.twin.server.interferences.append(refuse)
        rollout = await submit(made, "blind", canary={"select": "role=worker", "max_parallel": 2})

        def unknown() -> bool:
            codes = [node["reason"]["code"] for node in made.daemon.nodes(rollout).values()]
            texts = [node["reason"]["text"] for node in made.daemon.nodes(rollout).values()]
            return codes == ["traffic-unknown"] * 2 and all("etcdserver" in text for text in texts)

        await made.until(unknown, "nobody can say of both nodes")
        for node in made.nodes:
            assert touched(made, node) == []
        assert (await made.ask(made.daemon.status, rollout))["state"] == "running"

        made.twin.server.interferences.remove(refuse)
        await made.until_done(rollout)
        assert sorted(span.node for span in made.daemon.spans()) == sorted(made.nodes)
