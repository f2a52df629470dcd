"""A real daemon in virtual time, over nodes whose steps each take as long as a function says.

The loop, the drivers and the store are real.  Only the durations are the world's: an adapter sleeps for as
long as its step takes.  People vote so long after a gate is asked as the test says.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from machines.facts.projection import Projection
from machines.facts.votes import was_opened
from machines.model.events import DaemonStarted, Event, VoteCast
from machines.model.node import NodeHealth, NodeKind, Observation
from machines.model.plan import GateName
from machines.model.rollout import Actor, ActorKind, Vote
from machines.model.step_record import StepAction
from machines.rules import gates
from machines.states import Trigger
from machines.workflow.phase_transitions import transition
from rolloutd.adapters.directory_store import DirectoryStore
from rolloutd.concurrency.slots import Slots
from rolloutd.configuration.target_values import OBJECT_KEY
from rolloutd.engine.change_notifier import ChangeNotifier
from rolloutd.engine.daemon import Daemon
from rolloutd.engine.drivers.node_session import AdapterSet, PreparationAdapters
from rolloutd.engine.state import State
from rolloutd.errors import NotFound
from rolloutd.ports import (
    Busy,
    Checkpoint,
    DiscoveredNode,
    Failed,
    Host,
    IsolationStatus,
    Ok,
    RunEvent,
    RunnerStatus,
    RunRequest,
    RunState,
    Staged,
    StagedFile,
    StagingRequest,
    StepContext,
    TakeBytes,
)
from rolloutd.service.reload import TeamPlanCompiler
from rolloutd.settings import Settings
from rolloutd.settings.compile import compile_limits
from rolloutd.store import open_store
from tests.contracts.fakes.sources import find_source
from tests.sim import plans
from tests.sim.sim_clock import SimTimers
from tests.support.virtual_loop import VirtualLoop

DurationOf = Callable[[str, str, str, StepAction], float]
"""Seconds of a step: of a rollout, a node, the step and its action."""

POLL_S = 5.0
"""How often a test looks, in virtual time."""


class TimedClock:
    """ports.Clock on the virtual loop."""

    def __init__(self, began_at: float) -> None:
        self._began_at = began_at
        self._loop = asyncio.get_running_loop()

    def now(self) -> float:
        return self._began_at + self._loop.time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class TimedRunner:
    """ports.Runner: a run ends when its time is over, and fails if `fails` says so of its id."""

    def __init__(
        self, clock: TimedClock, duration_of: DurationOf, parallel: int, fails: Callable[[str], bool]
    ) -> None:
        self.status = RunnerStatus(parallel=parallel)
        self.statuses = {"local": self.status}
        self._clock, self._duration_of, self._fails = clock, duration_of, fails
        self._began: dict[str, float] = {}
        self._slots = Slots(lambda: self.status.parallel)
        self._ends: dict[str, asyncio.Event] = {}

    def run_id_for(self, name: str, node: str, kind: str = "") -> str:
        return name

    def is_elsewhere(self, handle: str) -> bool:
        return False

    async def start(self, request: RunRequest) -> str:
        if request.run_id not in self._ends:
            await self._slots.acquire()
            self._began[request.run_id] = self._clock.now()
            ended = self._ends[request.run_id] = asyncio.Event()
            seconds = self._duration_of(request.rollout, request.node, request.step, StepAction.RUN)
            asyncio.get_running_loop().call_later(seconds, self._end, ended)
        return request.run_id

    def _end(self, ended: asyncio.Event) -> None:
        ended.set()
        self._slots.release()

    async def read_previous(self, request: RunRequest) -> str | None:
        return '{"text": "old"}' if request.kind else None

    async def get_state(self, handle: str) -> RunState:
        if handle not in self._ends:
            raise NotFound(f"there is no run {handle}")
        if not self._ends[handle].is_set():
            return RunState(None, started_at=self._began[handle])
        result = Failed("drawn") if self._fails(handle) else Ok("changed")
        return RunState(result, started_at=self._began[handle])

    async def wait_for_change(self, handle: str) -> RunState:
        await self._ends[handle].wait()
        return await self.get_state(handle)

    async def read_events(self, handle: str, offset: int = 0) -> AsyncIterator[RunEvent]:
        for event in ():
            yield event

    async def cancel(self, handle: str) -> None:
        self._ends[handle].set()

    async def discard(self, handle: str) -> None:
        self._ends.pop(handle, None)

    async def keep_connections(self, nodes: Collection[str]) -> None:
        pass

    async def clean_up_stale_runs(self, host: Host, *, timeout_s: float, fencing_token: str = "") -> Ok:
        return Ok()

    async def close(self) -> None:
        pass


class TimedIsolator:
    """ports.Isolator whose actions take their time; an inspection takes none."""

    def __init__(self, duration_of: DurationOf) -> None:
        self._duration_of = duration_of
        self._isolated: set[str] = set()

    async def inspect(self, ctx: StepContext) -> IsolationStatus:
        is_isolated = ctx.host.name in self._isolated
        return IsolationStatus(is_isolated, {"isolated": False} if ctx.prior is None else ctx.prior)

    async def isolate(self, ctx: StepContext) -> Ok:
        await asyncio.sleep(self._duration_of(ctx.rollout, ctx.host.name, ctx.step, StepAction.APPLY))
        self._isolated.add(ctx.host.name)
        return Ok()

    async def return_to_service(self, ctx: StepContext) -> Ok:
        await asyncio.sleep(self._duration_of(ctx.rollout, ctx.host.name, ctx.step, StepAction.REVERT))
        self._isolated.discard(ctx.host.name)
        return Ok()


class TimedCheck:
    """ports.Check that passes after its time."""

    def __init__(self, duration_of: DurationOf) -> None:
        self._duration_of = duration_of

    async def check(self, ctx: StepContext) -> Ok:
        await asyncio.sleep(self._duration_of(ctx.rollout, ctx.host.name, ctx.step, StepAction.CHECK))
        return Ok()


class TimedProbe:
    """ports.TrafficProbe: `busy_until` is when the traffic of a node ends."""

    def __init__(self, clock: TimedClock) -> None:
        self._clock = clock
        self.busy_until: dict[str, float] = {}

    async def probe(self, ctx: StepContext) -> Ok | Busy:
        is_busy = self._clock.now() < self.busy_until.get(ctx.host.name, 0.0)
        return Busy("busy") if is_busy else Ok()


class TimedStager:
    """ports.Stager and ports.StagedFiles: the artifact `app` takes its time, and the others none."""

    def __init__(self, seconds_of: Callable[[str], float]) -> None:
        self._seconds_of = seconds_of

    async def stage(self, request: StagingRequest, *, take: TakeBytes, timeout_s: float) -> Staged:
        if request.artifact.name == "app":
            await asyncio.sleep(self._seconds_of(request.host.name))
        return Staged(0)

    async def remove(self, host: Host, to: str, digests: Collection[str], *, timeout_s: float) -> None:
        pass

    async def compare(
        self, host: Host, files: Sequence[StagedFile], *, timeout_s: float
    ) -> Mapping[str, str]:
        return {}


class _NodeFacts:
    """ports.NodeSnapshots and ports.Checkpoints of nodes on which nothing is disturbed."""

    async def snapshot(self, host: Host, *, timeout_s: float) -> Mapping[str, str]:
        return {"boot-id": "1"}

    async def read(self, host: Host, *, timeout_s: float) -> Mapping[tuple[str, str], Checkpoint]:
        return {}

    async def write(self, host: Host, checkpoint: Checkpoint, *, timeout_s: float) -> None:
        pass

    async def remove(self, host: Host, rollout: str, *, timeout_s: float) -> None:
        pass


class _Observer:
    """ports.Observer of nodes that are up."""

    def __init__(self, clock: TimedClock) -> None:
        self._clock = clock

    async def observe(self, hosts: Sequence[Host]) -> Sequence[Observation]:
        return [Observation(host.name, NodeHealth.UP, self._clock.now()) for host in hosts]


class _Inventory:
    source = "hosts"

    def __init__(self, labels: Mapping[str, Mapping[str, str]], kind: NodeKind) -> None:
        self._labels, self._kind = labels, kind

    async def refresh(self) -> Sequence[DiscoveredNode]:
        return [
            DiscoveredNode(
                name,
                self.source,
                self._kind,
                labels,
                {"ansible_host": name, OBJECT_KEY: {"spec": {"endpoint": f"{name}.example"}}},
            )
            for name, labels in self._labels.items()
        ]


class _World:
    """What SimTimers needs of its world."""

    is_finished = False

    def __init__(self, clock: TimedClock) -> None:
        self.now = clock.now


@dataclass(slots=True)
class TimedDaemon:
    """A daemon that runs, and the people around it."""

    state: State
    clock: TimedClock
    daemon: Daemon
    compiler: TeamPlanCompiler
    probe: TimedProbe
    approve_after_s: float
    _asked: set[tuple[str, GateName, str, tuple[str, ...]]] = field(default_factory=set)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _votes: int = 0

    @property
    def index(self) -> Projection:
        return self.state.index

    async def commit(self, *events: Event, actor: Actor | None = None) -> None:
        await self.state.commit(list(events), actor=actor or SUBMITTER, cause="test")

    def submit(self, rollout: str, spec: Mapping[str, Any]) -> Event:
        """Return the submit of a plan over the nodes that it selects."""
        content = plans.content_of(rollout.lower(), {**SPEC, **spec})
        content = plans.with_values(content, self.compiler(content), self.state)
        plan, now = self.compiler(content), self.clock.now()
        return plans.rollout_opened(rollout, content, plan, self.index, SUBMITTER, now, maybe_current=False)

    def watch_gates(self) -> None:
        """Vote at each gate so long after it is asked."""
        for rollout in self.index.rollouts.values():
            for gate, wave in (*rollout.plan.gates_in_order, (GateName.PROCEED, "")):
                failures = tuple(each.id for each in self.index.unresolved_failures(rollout.id))
                key = (rollout.id, gate, wave, failures if gate is GateName.PROCEED else ())
                is_asked = gates.is_voting_open(self.index, rollout, gate, wave)
                if is_asked and key not in self._asked and not was_opened(rollout, gate, wave):
                    self._asked.add(key)
                    task = asyncio.get_running_loop().create_task(self._vote_later(*key))
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)

    async def _vote_later(self, name: str, gate: GateName, wave: str, shown: tuple[str, ...]) -> None:
        # Gates that are asked in two decisions, 10 ms apart, are voted at one instant: else a vote and the
        # loop's next decision come at the same one, and their order is that of the timers in a heap.
        at = round(self.clock.now() + self.approve_after_s, 1)
        await asyncio.sleep(at - self.clock.now())
        rollout = self.index.rollout(name)
        teams = sorted({"infra", *self.index.counters(name).teams})
        for team in teams:
            self._votes += 1
            voter = Actor(ActorKind.PERSON, f"{team}-{self._votes}", 2000 + self._votes)
            vote = Vote(
                f"vote{self._votes}",
                gate,
                rollout.digest_at(gate),
                voter,
                True,
                "seen",
                self.clock.now(),
                (team,),
                wave,
                shown,
            )
            await self.commit(VoteCast(name, vote), actor=voter)
        if gate is GateName.PROCEED:
            for node in sorted(self.index.counters(name).failed):
                target = self.index.target(name, node)
                await self.commit(transition(target, Trigger.RETRIED, self.clock.now()))

    async def until(self, is_reached: Callable[[], bool], limit_s: float = 90 * 86_400.0) -> None:
        """Let virtual time pass until something is so."""
        limit_at = self.clock.now() + limit_s
        while not is_reached():
            assert self.clock.now() < limit_at, "it does not come about"
            await asyncio.sleep(POLL_S)

    async def until_ended(self, *rollouts: str) -> None:
        await self.until(lambda: all(self.index.rollout(each).ended_at is not None for each in rollouts))

    def times(self, rollout: str) -> dict[str, tuple[float, float]]:
        """Return when the last attempt of each node began and ended."""
        return {each.node: (each.admitted_at, each.since) for each in self.index.targets(rollout)}


SUBMITTER = Actor(ActorKind.PERSON, "sam", 1000)

SPEC: Mapping[str, Any] = {
    "targets": "",
    "isolate": [{"command": {"do": "out", "undo": "in"}}],
    "maintain": {"playbook": "change.yml", "expected": "10m", "timeout": "2h"},
    "verify": [{"reachable": {}}],
    "gates": {"start": {"owner": 1}, "continue": {"owner": 1}, "proceed": {"owner": 1}},
}
"""A plan with every kind of step, which tests change."""


@asynccontextmanager
async def timed_daemon(
    labels: Mapping[str, Mapping[str, str]],
    duration_of: DurationOf,
    *,
    began_at: float,
    approve_after_s: float = 0.0,
    parallel_runs: int = 100_000,
    fails: Callable[[str], bool] = lambda _: False,
    kind: NodeKind = NodeKind.HOST,
    **settings: Any,
) -> AsyncIterator[TimedDaemon]:
    """Run a daemon over these nodes; the inventory is known when this begins.

    `fails` returns whether the run of an id fails.
    """
    teams = {"infra", *(each["team"] for each in labels.values())}
    content = {
        "pools": {"team": {"max_unavailable": 1}},
        "teams": {team: {} for team in sorted(teams)},
        "inventory_refresh": "10m",
        "observe_within": "90d",
        **settings,
    }
    content["teams"] = {team: {} for team in sorted(teams)} | dict(settings.get("teams", {}))
    configured = Settings.model_validate(content)
    clock, compiler = TimedClock(began_at), TeamPlanCompiler(configured.teams)
    with tempfile.TemporaryDirectory(prefix="rolloutd-timed-") as directory:
        store = await open_store(Path(directory), compile_plan=compiler, inline=True, now=clock.now)
        snapshot = await store.load_snapshot()
        index = Projection.build(snapshot, compile_limits(configured), compiler)
        state = State(index, store, clock, configured, ChangeNotifier(), epoch=snapshot.epoch)
        await state.commit([DaemonStarted(snapshot.epoch, "timed", "", clock.now())], cause="test")
        probe, timers = TimedProbe(clock), SimTimers(_World(clock))  # type: ignore[arg-type]
        facts = _NodeFacts()
        stager = TimedStager(lambda node: duration_of("", node, "stage", StepAction.RUN))
        place = Path(directory)
        prepare = PreparationAdapters(
            {"ssh": stager}, facts, facts, stager, lambda _: place, DirectoryStore(place)
        )
        adapters = AdapterSet(
            TimedRunner(clock, duration_of, parallel_runs, fails),
            {each: TimedIsolator(duration_of) for each in ("command", "playbook")},
            {each: TimedCheck(duration_of) for each in ("reachable", "ssh", "cluster")},
            find_source,
            {"ssh": probe},
            preparation=prepare,
        )
        inventories, observers = [_Inventory(labels, kind)], [_Observer(clock)]
        daemon = Daemon(state, adapters, inventories=inventories, observers=observers, timers=timers)
        made = TimedDaemon(state, clock, daemon, compiler, probe, approve_after_s)
        daemon.iteration_listeners.append(lambda _: made.watch_gates())
        running = asyncio.create_task(daemon.run())
        try:
            await made.until(state.inventory_refreshed.is_set)
            await asyncio.sleep(1.0)
            yield made
        finally:
            for task in (running, *made._tasks):
                task.cancel()
            await asyncio.wait((running, *made._tasks))
            timers.close()
            await store.close()


def run_virtual(work: Callable[[], Any]) -> Any:
    """Run a coroutine function in virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work())
