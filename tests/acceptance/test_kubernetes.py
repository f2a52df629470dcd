"""A rollout over the nodes of a cluster: the real daemon, real Ansible, an API server on loopback.

What happened is judged from outside: by the pods and nodes of the API server,
and by the playbooks' own log.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from rolloutd.adapters.kubernetes.nodes import HOLD, ISOLATED_BY
from tests.support.kubetwin import Twin
from tests.support.kubetwin.server import Asked
from tests.support.kubeworld import Api
from tests.support.kubeworld import World as Cluster
from tests.support.sshd import Sshd
from tests.support.world import WAIT_LIMIT_S, World, plan

JSON = Any

pytestmark = pytest.mark.servers

WORK_PLAYBOOK = """\
- hosts: all
  gather_facts: false
  tasks:
    - name: work
      ansible.builtin.raw: |
        echo "begin {{ inventory_hostname }} $(date +%s.%N)" >> {{ log_file }}
        sleep {{ work_s | default(0) }}
        echo "end {{ inventory_hostname }} $(date +%s.%N)" >> {{ log_file }}
"""
"""One task and no module: what is walked here is the cluster."""

JOIN_LIMIT_S = 60.0
"""A joiner is known within five seconds on a machine that has them; on one that is doing much else, later."""

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
    looks: int = 0

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
        rollout = await self.ask(self.daemon.submit, full, {"change.yml": WORK_PLAYBOOK})
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


async def test_uncordoned_while_its_playbook_runs_a_node_is_isolated_again(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    async with stage(tmp_path_factory.mktemp("k"), 2) as made:
        node = made.nodes[0]
        rollout = await made.submit("guarded", canary=only(node), maintain=slow(made, 15))
        await made.until(made.daemon.spans, "the playbook runs")
        await made.cluster.cordon(node, closed=False)

        async def isolated_again() -> bool:
            return bool((await made.cluster.read(node))["spec"].get("unschedulable"))

        await made.cluster.until(isolated_again)
        assert made.daemon.spans()[0].end is None, "it was isolated again while the playbook ran"
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
        rollout = await made.submit("joiner", canary=canary, maintain=slow(made, 30), soak="1h")

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


def only(node: str) -> JSON:
    """Return the canary wave of one node; the others wait behind its gate."""
    return {"select": f"kubernetes.io/hostname={node}"}


def is_closed(made: Stage, node: str) -> bool:
    """Whether the node is cordoned, by the server's own books."""
    return bool(made.twin.server.objects.get("nodes", "", node)["spec"].get("unschedulable"))


def pods_of(made: Stage, node: str) -> list[str]:
    """Return the pods on a node, by the server's own books."""
    pods = made.twin.server.objects.all("pods", "")
    return [pod["metadata"]["name"] for pod in pods if pod["spec"].get("nodeName") == node]


async def is_as_before(made: Stage, node: str) -> None:
    """Assert that nothing of ours is left on the node."""
    after = await made.cluster.read(node)
    assert not after["spec"].get("unschedulable")
    assert ISOLATED_BY not in (after["metadata"].get("annotations") or {})


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
