"""A rollout over the nodes of a cluster: the real daemon, real Ansible, an API server on loopback.

What happened is judged from outside: by the pods and nodes of the API server,
and by the playbooks' own log.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from rolloutd.adapters.kubernetes.nodes import HOLD, ISOLATED_BY
from tests.support.kubetwin import Twin
from tests.support.kubeworld import Api
from tests.support.kubeworld import World as Cluster
from tests.support.sshd import Sshd
from tests.support.world import CHANGE_PLAYBOOK, World, plan

JSON = Any

pytestmark = pytest.mark.servers

NODES, TEAMS = 40, 4
POOLS = tuple(f"t{number}" for number in range(1, TEAMS + 1))
REPLICAS, NEEDED = 3, 2
WORKLOADS = 10


@dataclass
class Stage:
    """A cluster, and a daemon that walks it."""

    twin: Twin
    cluster: Cluster
    daemon: World
    nodes: list[str] = field(default_factory=list)

    async def ask(self, question: Callable[..., JSON], *words: JSON) -> JSON:
        """Ask the daemon beside the loop in which its API server lives."""
        return await asyncio.to_thread(question, *words)

    async def submit(self, name: str, **spec: JSON) -> str:
        """Submit a plan over all nodes and open its start."""
        usual: dict[str, JSON] = {
            "isolate": [{"kubernetes": {"drain_timeout": "10m"}}],
            "maintain": {"playbook": "change.yml", "vars": {"log_file": str(self.daemon.log_file)}},
            "verify": [{"kubernetes": {"ready": True, "within": "1m"}}],
            "soak": "1s",
        }
        full = plan(name, **{**usual, **spec})
        rollout = await self.ask(self.daemon.submit, full, {"change.yml": CHANGE_PLAYBOOK})
        await self.ask(self.daemon.vote, rollout, "start")
        return str(rollout)

    async def until(self, true: Callable[[], JSON], what: str) -> JSON:
        """Wait for something that the daemon says."""
        return await self.ask(self.daemon.until, true, what)

    async def until_done(self, rollout: str) -> None:
        """Vote where the rollout asks, and wait for its end."""
        await self.ask(self.daemon.wait_for_gate, rollout, "continue")
        await self.ask(self.daemon.vote, rollout, "continue")

        def done() -> bool:
            status = self.daemon.status(rollout)
            assert status["state"] != "paused", status["reason"]
            return bool(status["state"] == "done")

        await self.until(done, f"{rollout} is done")


@contextlib.asynccontextmanager
async def stage(directory: Path, nodes: int, **settings: JSON) -> AsyncIterator[Stage]:
    """Start an API server with nodes of TEAMS pools, one sshd that is all of them, and a daemon."""
    async with contextlib.AsyncExitStack() as stack:
        twin = await stack.enter_async_context(Twin())
        kubeconfig = twin.kubeconfig(directory / "kubeconfig")
        api = Api(kubeconfig)
        await api.open()
        stack.push_async_callback(api.close)
        cluster = await stack.enter_async_context(Cluster(api, ready_s=0.3, end_s=0.2))
        made = Stage(
            twin, cluster, World(directory, {f"t{n}": {"team": f"t{n}"} for n in range(1, TEAMS + 1)})
        )
        for number in range(nodes):
            name = f"n{number + 1}"
            labels = {"example.com/team": POOLS[number % TEAMS], "role": "worker"}
            labels["kubernetes.io/hostname"] = f"{cluster.prefix}-{name}"
            made.nodes.append(await cluster.node(name, labels))
        sshd = await asyncio.to_thread(Sshd().start, directory / "sshd")
        stack.push_async_callback(asyncio.to_thread, sshd.stop)
        (directory / "known_hosts").write_text(sshd.known_hosts.read_text())
        hosts = {node: dict(sshd.connection()) for node in made.nodes}
        (directory / "hosts.yml").write_text(yaml.safe_dump({"all": {"hosts": hosts}}))
        source = {"name": "ams", "kubeconfig": str(kubeconfig), "labels": {"team": "example.com/team"}}
        inventory = [{"ansible": {"path": str(directory / "hosts.yml")}}, {"kubernetes": source}]
        made.daemon.write_settings(inventory=inventory, **settings)
        stack.push_async_callback(asyncio.to_thread, made.daemon.stop)
        await made.ask(made.daemon.start_daemon)
        yield made


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
            after = await made.cluster.read(node)
            assert not after["spec"].get("unschedulable")
            assert ISOLATED_BY not in (after["metadata"].get("annotations") or {})


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
        rollout = await made.submit("killed", canary=canary, maintain=slow(made, 3))

        async def drained_or_draining() -> bool:
            states = [await made.cluster.read(node) for node in (first, held)]
            return all(node["spec"].get("unschedulable") for node in states)

        await made.cluster.until(drained_or_draining)
        await made.ask(made.daemon.kill_daemon)
        await made.cluster.annotate(held, HOLD, "mine now")
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


async def test_who_joins_is_enrolled_and_who_leaves_has_left(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    async with stage(tmp_path_factory.mktemp("k"), 4) as made:
        rollout = await made.submit("joiner", soak="1h")
        new = await made.cluster.node("new", {"example.com/team": "t1", "role": "worker"})
        await made.until(lambda: new in made.daemon.nodes(rollout), "the joiner is enrolled")
        await made.cluster.api.delete(f"/api/v1/nodes/{new}")
        await made.until(lambda: made.daemon.nodes(rollout)[new]["outcome"] == "left", "it has left")
        assert (await made.ask(made.daemon.status, rollout))["state"] != "paused"


def slow(made: Stage, work_s: int) -> JSON:
    """Return a stage that takes its time."""
    return {"playbook": "change.yml", "vars": {"log_file": str(made.daemon.log_file), "work_s": work_s}}


def isolating(node: JSON) -> bool:
    """Whether something is still done to a node."""
    return node["phase"] in ("isolating", "maintaining", "verifying")


def _team(node: JSON) -> str:
    return str(node["metadata"]["labels"]["example.com/team"])


def _serves(pod: JSON) -> bool:
    conditions = pod["status"].get("conditions") or ()
    ready = any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)
    return ready and "deletionTimestamp" not in pod["metadata"]
