"""The example plan of clusters, over regions: a bad revision, pins, joins, and a daemon that is killed.

Real are the daemon, its process, and git; the management cluster is the fake, and the test plays Flux's
controllers in it.  What was done is judged by what reached the targets.  `make clusters` runs
the whole number.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from rolloutd.control.client import ApiError, DaemonUnreachable, api_path
from rolloutd.store import SqliteBackend
from tests.docs.example_previews import EXAMPLES
from tests.support.cluster_fleet import ClusterFleet
from tests.support.daemon_environment import WAIT_LIMIT_S, DaemonEnvironment
from tests.support.fake_kubernetes import FakeKubernetes
from tests.support.flux_controllers import Content, FluxControllers
from tests.support.git_repository import Repository, git_server

pytestmark = [pytest.mark.servers, pytest.mark.long]

CLUSTERS = int(os.environ.get("ROLLOUTD_TEST_CLUSTERS", "12"))
KILLS = int(os.environ.get("ROLLOUTD_TEST_CLUSTER_KILLS", "2"))
SEED = int(os.environ.get("ROLLOUTD_TEST_SEED", "1"))
REGIONS = 6
OFFLINE = CLUSTERS // 6
LONGEST_LIFE_S = 3.0
PHASES = 6


@dataclass
class Fleet:
    """Clusters, a daemon that walks them, and what its users do."""

    objects: ClusterFleet
    flux: FluxControllers
    daemon: DaemonEnvironment
    repository: Repository
    url: str
    offline: set[str] = field(default_factory=set)
    draw: random.Random = field(default_factory=lambda: random.Random(SEED))
    kills: int = 0
    phases: list[str] = field(default_factory=list)
    seen: Any = None

    def begin(self, phase: str) -> None:
        """Begin a phase, which gets its part of the kills while its end is waited for."""
        self.phases.append(phase)

    @property
    def is_kill_due(self) -> bool:
        return self.kills < KILLS * len(self.phases) // PHASES

    def online(self, *without: str) -> set[str]:
        return {f"c{number:02}" for number in range(CLUSTERS)} - self.offline - set(without)

    def commit(self, text: str, content: Content = Content.GOOD) -> str:
        """Make a revision of the module, and return its commit."""
        pin = self.repository.commit("apps.yaml", text)
        self.flux.content[pin] = content
        return pin

    async def submit(self, pin: str, **more: Any) -> str:
        """Submit the module at a commit, which replaces the rollout before, and vote for its start."""
        body = yaml.safe_load((EXAMPLES / "clusters" / "plan.yml").read_text())
        spec = body["spec"]
        spec |= {"source": {"git": self.url, "ref": pin}, "soak": "1s"}
        spec["maintain"]["flux"]["failing_for"] = "0s"
        upload: dict[str, Any] = {"supersede": True, **more}
        rollout = str(await self.ask(self.daemon.submit, body, {"unused.yml": "[]\n"}, **upload))
        await self.ask(self.daemon.vote, rollout, "start")
        return rollout

    async def ask(self, question: Callable[..., Any], *words: Any, **more: Any) -> Any:
        """Ask the daemon beside the loop in which the management cluster is; a killed one is asked again."""
        while True:
            try:
                return await asyncio.to_thread(question, *words, **more)
            except DaemonUnreachable:
                await asyncio.sleep(0.2)

    async def post(self, *path: str, **body: Any) -> None:
        await self.ask(self.daemon.client.post, api_path(*path), body)

    async def nodes(self, rollout: str) -> dict[str, Any]:
        found: dict[str, Any] = await self.ask(self.daemon.nodes, rollout)
        return found

    async def until(self, condition: Callable[[], Any], what: str) -> Any:
        """Wait until a question is answered with yes; a daemon that is not there is asked again."""
        clock = asyncio.get_running_loop()
        deadline, kill_at = clock.time() + WAIT_LIMIT_S, clock.time() + self.draw.uniform(0.3, LONGEST_LIFE_S)
        while clock.time() < deadline:
            try:
                if (found := await condition()) and not self.is_kill_due:
                    return found
                if self.is_kill_due and (found or clock.time() >= kill_at):
                    await self.kill_daemon()
                    kill_at = clock.time() + self.draw.uniform(0.3, LONGEST_LIFE_S)
            except (ApiError, DaemonUnreachable):
                pass
            await asyncio.sleep(0.2)
        raise AssertionError(f"waited in vain until {what}\n{self.seen}\n{self.daemon.log_tail()}")

    async def until_done(self, rollout: str, names: set[str]) -> None:
        """Vote where votes are asked for until these clusters are done."""

        async def are_done() -> bool:
            for gate in (await self.ask(self.daemon.status, rollout))["gates"]:
                if gate["state"] == "waiting":
                    await self.ask(self.daemon.vote, rollout, gate["gate"])
            nodes = await self.nodes(rollout)
            self.seen = {name: (each["phase"], each.get("reason")) for name, each in nodes.items()}
            return all(nodes.get(name, {}).get("phase") == "done" for name in names)

        await self.until(are_done, f"{sorted(names)} are done in {rollout}")

    async def kill_daemon(self) -> None:
        await asyncio.to_thread(self.daemon.kill_daemon)
        await asyncio.to_thread(self.daemon.start_daemon)
        self.kills += 1

    async def pins(self) -> dict[str, str]:
        """Return the commit that each cluster has by its own module's proof."""
        listed = await self.objects.list("kustomizations")
        return {
            each["metadata"]["name"].removesuffix("-apps"): str(
                (each.get("status") or {}).get("lastAppliedRevision", "")
            ).removeprefix("sha1:")
            for each in listed
        }


@asynccontextmanager
async def fleet_of_clusters(directory: Path) -> AsyncIterator[Fleet]:
    (directory / "git").mkdir()
    repository = Repository(directory / "git" / "apps")
    async with FakeKubernetes() as server, git_server(directory / "git") as url:
        kubeconfig = server.kubeconfig(directory / "kubeconfig")
        async with ClusterFleet(kubeconfig) as objects:
            for number in range(CLUSTERS):
                labels = {"region": f"r{number % REGIONS}", "module": "apps"}
                labels["canary"] = "true" if number < REGIONS else "false"
                await objects.add_cluster(f"c{number:02}", labels)
            flux = FluxControllers(objects)
            playing = asyncio.create_task(flux.run())
            daemon = DaemonEnvironment(directory, {})
            source = {"name": "hub", "kubeconfig": str(kubeconfig), "namespace": objects.namespace}
            fleet = Fleet(objects, flux, daemon, repository, f"{url}/apps")
            try:
                await asyncio.to_thread(daemon.start_nodes)
                # An offline cluster takes a slot of its pools, like every node that is down.
                pools = {"region": {"max_unavailable": 3}, "team": {"max_unavailable": OFFLINE + REGIONS}}
                daemon.write_settings(inventory=[{"clusterapi": source}], pools=pools)
                await asyncio.to_thread(daemon.start_daemon)
                yield fleet
            finally:
                await asyncio.to_thread(daemon.stop)
                playing.cancel()
                await asyncio.gather(playing, return_exceptions=True)


async def test_module_is_rolled_over_clusters(tmp_path: Path) -> None:
    async with fleet_of_clusters(tmp_path) as fleet:
        await _walk(fleet)
        assert (fleet.kills, len(fleet.phases)) == (KILLS, PHASES)
        # Nothing was applied twice with another content, and nothing was taken away.
        assert {run: found for run, found in fleet.flux.contents_of_run.items() if len(found) > 1} == {}
        assert fleet.flux.pruned == []
    verdict = SqliteBackend(tmp_path / "state" / "rolloutd.sqlite").verify_chain()
    assert verdict.ok, verdict.message
    print(f"{CLUSTERS} clusters, {fleet.kills} kills, {len(fleet.flux.contents_of_run)} runs")


async def _walk(fleet: Fleet) -> None:
    fleet.begin("canaries and all")
    good = fleet.commit("v1")
    names = fleet.online()
    fleet.offline = set(sorted(names)[-OFFLINE:])
    for name in fleet.offline:
        await fleet.objects.set_conditions(name, RemoteConnectionProbe="False", Available="False")
    first = await fleet.submit(good)
    await fleet.until_done(first, fleet.online())
    assert await fleet.pins() == dict.fromkeys(fleet.online(), good)
    for name in fleet.online():
        region = f"r{int(name[1:]) % REGIONS}"
        values = (("cluster", name), ("host", f"{name}.example.com"), ("region", region))
        assert fleet.flux.applied[f"{name}-apps"][-1].values == values

    fleet.begin("bad revision")
    # A bad revision: exactly one canary has it, and the rest is untouched.
    second = await fleet.submit(fleet.commit("bad", Content.UNHEALTHY))

    async def is_failed() -> list[str]:
        return [name for name, each in (await fleet.nodes(second)).items() if each["phase"] == "failed"]

    (canary,) = await fleet.until(is_failed, "a canary has failed")
    sources = {each["metadata"]["name"]: each for each in await fleet.objects.list("kustomizations")}
    carried = {name: each["spec"]["sourceRef"]["name"] for name, each in sources.items()}
    assert [name for name, each in carried.items() if list(carried.values()).count(each) == 1] == [
        f"{canary}-apps"
    ]
    fleet.begin("rollback")
    await fleet.post("rollouts", second, "nodes", canary, "rollback", reason="it is bad")

    async def is_back() -> bool:
        return bool((await fleet.nodes(second))[canary]["outcome"] == "rolled-back")

    await fleet.until(is_back, f"{canary} is rolled back")
    assert await fleet.pins() == dict.fromkeys(fleet.online(), good)

    fleet.begin("pin")
    # One cluster is pinned, and the rest continues.
    pinned, newer = max(fleet.online()), fleet.commit("v2")
    third = await fleet.submit(newer)
    await fleet.post("rollouts", third, "nodes", pinned, "skip", reason="pinned")
    await fleet.until_done(third, fleet.online(pinned))
    assert await fleet.pins() == dict.fromkeys(fleet.online(pinned), newer) | {pinned: good}

    fleet.begin("join")
    # A cluster that joins gets the module; one that is deleted leaves, with its workload untouched.
    await fleet.objects.add_cluster("joined", {"region": "r0", "module": "apps", "canary": "false"})
    await fleet.until_done(third, {"joined"})
    assert (await fleet.pins())["joined"] == newer
    fleet.begin("leave")
    left = min(fleet.online(pinned, canary))
    await fleet.objects.delete("clusters", left)

    async def has_left() -> bool:
        inventory = await fleet.ask(fleet.daemon.client.get, "/v1/inventory")
        return left not in {each["node"] for each in inventory["nodes"]}

    await fleet.until(has_left, f"{left} has left")
    nodes = await fleet.nodes(third)
    assert {name for name, each in nodes.items() if each["phase"] == "pending"} == fleet.offline
