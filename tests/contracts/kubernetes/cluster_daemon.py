"""A whole daemon over a cluster, in this process; a restart is a new daemon over the same stored facts."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from machines.facts.projection import Projection
from machines.model.events import VoteCast
from machines.model.node import NodeHealth
from machines.model.plan import GateName
from machines.model.reasons import Reason
from machines.model.rollout import Actor, ActorKind, Target, Vote
from machines.model.train import Train, TrainStored
from machines.scheduler.why import why
from rolloutd import planfile
from rolloutd.adapters.kubernetes.cluster import Cluster
from rolloutd.adapters.kubernetes.cluster_registry import ClusterRegistry
from rolloutd.adapters.kubernetes.factory import WatchObserver
from rolloutd.adapters.kubernetes.inventory import KubernetesInventory
from rolloutd.adapters.kubernetes.isolator import KubernetesIsolator
from rolloutd.adapters.kubernetes.node_watch import NodeWatch
from rolloutd.adapters.timers import ApschedulerTimers, SystemClock
from rolloutd.engine.background.node_observations import run_watch
from rolloutd.engine.change_notifier import ChangeNotifier
from rolloutd.engine.daemon import Daemon
from rolloutd.engine.drivers.node_session import AdapterSet
from rolloutd.engine.state import State
from rolloutd.ports import DiscoveredNode
from rolloutd.settings import Settings
from rolloutd.settings.compile import compile_limits, compile_plan
from tests.contracts.fakes.check import FakeCheck
from tests.contracts.fakes.runner import FakeRunHost, FakeRunner, Script
from tests.contracts.fakes.sources import find_source
from tests.contracts.fakes.store import MemoryStore
from tests.sim.plans import rollout_opened
from tests.support.cluster_sandbox import ClusterSandbox
from tests.support.waiting import wait_in_loop_until

JSON = Any

ROLLOUT = "r-1"
DRAIN_PASS_S = 7.0
"""Longer than a permanent blocker takes to be confirmed, shorter than in a daemon."""

LONG_PASS_S = 600.0
"""Outlasts a test: the daemon aborts no isolation between two passes."""

OLGA = Actor(ActorKind.PERSON, "olga", 1001)
SETTINGS: dict[str, JSON] = {
    "teams": {"infra": {"members": ["olga"]}},
    "pools": {"team": {"max_unavailable": 1}},
}
PLAN = """\
apiVersion: rolloutd/v1
kind: MaintenancePlan
metadata: {{name: {name}, owner: infra}}
spec:
  source: {{git: "https://git.example/x.git", ref: main}}
  targets: "rolloutd-world={prefix}"
  canary: {{select: "rolloutd-world={prefix}", max_parallel: 9}}
  isolate: [{{kubernetes: {{drain_timeout: {drain_timeout}}}}}]
  maintain: {{playbook: site.yml}}
  verify: [{{reachable: {{}}}}]
  gates: {{start: {{owner: 1}}}}
"""


class ClusterDaemon:
    """A daemon whose only rollout is over the sandbox's nodes; the playbooks are fakes."""

    def __init__(self, sandbox: ClusterSandbox, cluster: Cluster, tmp_path: Path) -> None:
        self._sandbox = sandbox
        self._cluster = cluster
        self._settings = Settings.model_validate(SETTINGS)
        self._store = MemoryStore(compile=self._compile)
        self._tasks: tuple[asyncio.Task[None], ...] = ()
        self.runs = FakeRunHost({"site.yml": Script.OK})
        self.drain_pass_s = DRAIN_PASS_S
        self.state: State

    async def start(self) -> None:
        """Start a daemon over the stored facts."""
        snapshot, limits = await self._store.load_snapshot(), compile_limits(self._settings)
        index = Projection.build(snapshot, limits, self._compile)
        clock = SystemClock()
        self.state = state = State(
            index, self._store, clock, self._settings, ChangeNotifier(), redaction_key=b"test"
        )
        await state.load_connections()
        watch = NodeWatch(self._cluster, clock, report_interval_s=1.0)
        clusters = ClusterRegistry([self._cluster])
        isolators = {"kubernetes": KubernetesIsolator(clusters, clock, drain_pass_s=self.drain_pass_s)}
        adapters = AdapterSet(FakeRunner(self.runs), isolators, {"reachable": FakeCheck()}, find_source)
        daemon = Daemon(
            state,
            adapters,
            inventories=[_SandboxInventory(self._sandbox, self._cluster, watch)],
            observers=[WatchObserver({self._cluster.name: watch}, clock)],
            timers=ApschedulerTimers(),
        )
        watching = run_watch(state, watch, daemon.refresh_inventory)
        self._tasks = (asyncio.create_task(daemon.run()), asyncio.create_task(watching))

    async def kill(self) -> None:
        """End the daemon where it is."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def submit(
        self, drain_timeout: str, nodes: Sequence[str], *, rollouts: Sequence[str] = (ROLLOUT,)
    ) -> None:
        """Submit the plan once these nodes are known, and vote for it; several rollouts are a train."""
        await wait_in_loop_until(lambda: self._knows(nodes))
        votes = [await self._open(rollout, drain_timeout) for rollout in rollouts]
        if len(rollouts) > 1:
            now, approved = self.state.now(), dict.fromkeys(rollouts, "olga")
            train = Train("t", tuple(rollouts), 3600.0, OLGA, now, approved)
            await self.state.commit([TrainStored(train, OLGA, "week", now)], cause="test")
        for vote in votes:
            await self.state.commit([vote], cause="test")

    async def _open(self, rollout: str, drain_timeout: str) -> VoteCast:
        """Open a rollout; return the vote that starts it."""
        text = PLAN.format(name=rollout, prefix=self._sandbox.prefix, drain_timeout=drain_timeout)
        content = planfile.read(text.encode(), "plan.yaml").content
        plan, now = self._compile(content), self.state.now()
        opened = rollout_opened(rollout, content, plan, self.state.index, OLGA, now, maybe_current=False)
        await self.state.commit([opened], cause="test")
        vote = Vote(
            f"v-{rollout}", GateName.START, opened.digest.whole, OLGA, True, "", now, teams=("infra",)
        )
        return VoteCast(rollout, vote)

    async def _knows(self, nodes: Sequence[str]) -> bool:
        index = self.state.index
        return all(name in index.nodes and index.observation(name) is not None for name in nodes)

    def target(self, node: str, rollout: str = ROLLOUT) -> Target:
        return self.state.index.target(rollout, node)

    def is_up(self, node: str) -> bool:
        """Return whether the daemon has observed the node to be up."""
        observation = self.state.index.observation(node)
        return observation is not None and observation.sight is NodeHealth.UP

    async def why(self, node: str) -> Reason | None:
        """Return why the node does not move, as `rolloutctl why` has it."""
        return why(self.state.index, self.target(node), self.state.now(), self.state.live)

    def _compile(self, content: JSON) -> JSON:
        return compile_plan(content, teams=self._settings.teams)


class _SandboxInventory(KubernetesInventory):
    """The nodes of one test: a real cluster has others."""

    def __init__(self, sandbox: ClusterSandbox, cluster: Cluster, watch: NodeWatch) -> None:
        super().__init__(cluster, watch=watch)
        self._prefix_of_test = sandbox.prefix

    async def refresh(self) -> Sequence[DiscoveredNode]:
        return [node for node in await super().refresh() if node.name.startswith(self._prefix_of_test)]
