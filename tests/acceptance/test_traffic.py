"""Work on a node is traffic: the real daemon, real Ansible, an API server on loopback, and pods of jobs.

What happened is judged from outside: by the nodes and pods of the API server,
by what it was asked, and by the playbooks' own log.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

import pytest

from tests.support.cluster_environment import (
    ClusterEnvironment,
    assert_restored,
    cluster_environment,
    is_cordoned,
    pods_of,
    single_node_wave,
)
from tests.support.daemon_environment import WAIT_LIMIT_S
from tests.support.fake_kubernetes.errors import ApiRefusal
from tests.support.fake_kubernetes.server import ApiRequest

JSON = Any

pytestmark = pytest.mark.servers

KIND = "app.kubernetes.io/component"
PODS = f"{KIND}=job"


async def submit(made: ClusterEnvironment, name: str, **spec: JSON) -> str:
    """Submit a plan that looks for jobs, over all nodes."""
    return await made.submit(name, traffic=[{"kubernetes": {"pods": PODS}}], **spec)


async def job(made: ClusterEnvironment, node: str) -> None:
    """Let a job's pod run on a node."""
    await made.sandbox.pod("train-7", node, job="train", labels={KIND: "job"})


def busy_text(made: ClusterEnvironment, node: str) -> str:
    """Say what stands in the way of a node with the job on it."""
    return f"{node} is busy: pod {made.sandbox.namespace}/train-7 (Job train) runs there"


def touched(made: ClusterEnvironment, node: str) -> list[ApiRequest]:
    """Return what rolloutd has written to a node."""
    asked = list(made.kubernetes.server.requests)
    return [each for each in asked if each.verb == "patch" and each.name == node and not each.subresource]


def evicted(made: ClusterEnvironment) -> list[ApiRequest]:
    """Return the evictions that were meant, rehearsals left out."""
    asked = [each for each in made.kubernetes.server.requests if each.subresource == "eviction"]
    return [each for each in asked if not (each.body or {}).get("deleteOptions", {}).get("dryRun")]


def closes(asked: ApiRequest, node: str) -> bool:
    """Whether this is the request that cordons the node."""
    spec = (asked.body or {}).get("spec", {}) if asked.verb == "patch" and not asked.subresource else {}
    return asked.name == node and bool(spec.get("unschedulable"))


def probes(asked: ApiRequest) -> bool:
    """Whether this is a look of the traffic probe."""
    return asked.verb == "list" and asked.resource == "pods" and asked.query.get("labelSelector") == PODS


async def test_busy_node_waits_for_job_while_others_run(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    async with cluster_environment(tmp_path_factory.mktemp("k"), 8) as made:
        busy, mate, canary = made.nodes[0], made.nodes[4], made.nodes[2]
        await job(made, busy)
        rollout = await submit(made, "jobs", canary=single_node_wave(canary))
        await made.in_thread(made.daemon.wait_for_gate, rollout, "continue")
        await made.in_thread(made.daemon.vote, rollout, "continue")
        await made.wait_until(lambda: made.daemon.status(rollout)["done"] == 7, "all that are idle are done")

        nodes = await made.in_thread(made.daemon.nodes, rollout)
        assert nodes[mate]["phase"] == "done"
        assert (nodes[busy]["phase"], nodes[busy]["attempt"]) == ("pending", 0)
        reason = nodes[busy]["reason"]
        assert (reason["code"], reason["text"]) == ("traffic", busy_text(made, busy))
        assert reason["since"]
        status = await made.in_thread(made.daemon.status, rollout)
        assert status["reason"]["code"] == "traffic"
        assert status["traffic_probes"] == [f"client traffic: kubernetes pods {PODS}"]
        assert status["not_probed"] == []
        assert busy_text(made, busy) in await made.rolloutctl("why", rollout, busy)
        assert touched(made, busy) == []
        assert pods_of(made, busy) == ["train-7"]

        await made.sandbox.finish("train-7")
        await made.wait_until(lambda: made.daemon.status(rollout)["state"] == "done", "it goes as well")
        assert busy in {span.node for span in made.daemon.spans()}
        await assert_restored(made, busy)


@pytest.mark.parametrize("killed", [False, True], ids=["alive", "killed"])
async def test_job_after_probe_aborts_isolation_without_eviction(
    tmp_path_factory: pytest.TempPathFactory, killed: bool
) -> None:
    async with cluster_environment(tmp_path_factory.mktemp("k"), 2) as made:
        node = made.nodes[0]
        closed, held = asyncio.Event(), asyncio.Event()

        def meddle(asked: ApiRequest) -> Awaitable[None] | None:
            if closes(asked, node) and not closed.is_set():
                closed.set()
                return job(made, node)
            if killed and probes(asked) and is_cordoned(made, node):
                held.set()
                return asyncio.sleep(600)  # the daemon is gone long before, and its request with it
            return None

        made.kubernetes.server.interceptors.append(meddle)
        rollout = await submit(made, "race", canary=single_node_wave(node))
        if killed:
            async with asyncio.timeout(WAIT_LIMIT_S):
                await held.wait()
            await made.in_thread(made.daemon.kill_daemon)
            made.kubernetes.server.interceptors.remove(meddle)
            assert is_cordoned(made, node)
            await made.in_thread(made.daemon.start_daemon)

        def put_back() -> bool:
            told = made.daemon.nodes(rollout)[node]
            return bool(told["phase"] == "pending" and told["attempt"] == 1)

        await made.wait_until(put_back, "the node is put back")
        reason = (await made.in_thread(made.daemon.nodes, rollout))[node]["reason"]
        assert reason["code"] == "backoff"
        assert busy_text(made, node) in reason["text"]
        assert closed.is_set()
        await assert_restored(made, node)
        assert evicted(made) == []
        assert pods_of(made, node) == ["train-7"]
        assert made.daemon.spans() == []
        assert (await made.in_thread(made.daemon.status, rollout))["state"] == "running"


async def test_while_the_api_cannot_say_nobody_of_the_cluster_starts(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    async with cluster_environment(tmp_path_factory.mktemp("k"), 2) as made:

        def refuse(asked: ApiRequest) -> None:
            if probes(asked):
                raise ApiRefusal(500, "etcdserver: request timed out")

        made.kubernetes.server.interceptors.append(refuse)
        rollout = await submit(made, "blind", canary={"select": "role=worker", "max_parallel": 2})

        def unknown() -> bool:
            codes = [node["reason"]["code"] for node in made.daemon.nodes(rollout).values()]
            texts = [node["reason"]["text"] for node in made.daemon.nodes(rollout).values()]
            return codes == ["traffic-unknown"] * 2 and all("etcdserver" in text for text in texts)

        await made.wait_until(unknown, "nobody can say of both nodes")
        for node in made.nodes:
            assert touched(made, node) == []
        assert (await made.in_thread(made.daemon.status, rollout))["state"] == "running"

        made.kubernetes.server.interceptors.remove(refuse)
        await made.wait_until_done(rollout)
        assert sorted(span.node for span in made.daemon.spans()) == sorted(made.nodes)
