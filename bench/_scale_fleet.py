"""One fleet of `bench scale`: a daemon in this process, and what each thing that happens to it costs.

    python -m bench._scale_fleet pauses|idle|transitions|decision

The loop, the drivers and the store are real; nodes, playbooks and the inventory answer at once from memory.
A pause is the CPU time that the loop's thread needs for one callback, so other load does not change it.
Prints one JSON object of figures.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench._scale_inventory import POOL_SIZE, BenchInventory
from bench.decide import decision_times
from machines.facts.counters import RolloutCounters
from machines.facts.projection import Projection
from machines.model.events import DaemonStarted, PhaseMoved
from machines.model.node import NodeHealth, Observation
from machines.model.plan import GateName
from machines.states import Outcome, Phase, Trigger
from rolloutd import planfile
from rolloutd.adapters.timers import ApschedulerTimers
from rolloutd.commands import rollout_commands
from rolloutd.commands.submit import submit
from rolloutd.commands.voting import Ballot, vote
from rolloutd.concurrency import garbage
from rolloutd.control.identity import Identity
from rolloutd.engine.background.node_observations import run_watch
from rolloutd.engine.change_notifier import ChangeNotifier
from rolloutd.engine.daemon import Daemon
from rolloutd.engine.drivers.node_session import AdapterSet
from rolloutd.engine.forecasts import OWN_TIME_LIMIT_S, Forecaster
from rolloutd.engine.state import State
from rolloutd.errors import StoreFailed
from rolloutd.ports import (
    Failed,
    OnConfirmed,
    OnNodesChanged,
    OnObserved,
    OnTried,
    ignore_tries,
)
from rolloutd.service.reload import TeamPlanCompiler
from rolloutd.settings import Settings
from rolloutd.settings.compile import compile_limits
from rolloutd.store import open_store
from tests.contracts.fakes.check import FakeCheck
from tests.contracts.fakes.isolator import FakeIsolator
from tests.contracts.fakes.observer import FakeObserver
from tests.contracts.fakes.runner import FakeRunHost, FakeRunner, Script
from tests.contracts.fakes.sources import FakeSourceStore, find_source
from tests.sim.sim_clock import SimTimers
from tests.support.virtual_loop import VirtualLoop

URL = "https://git.example/playbooks.git"
OWNER = Identity(1001, "olga", frozenset(), admin=True, teams=frozenset({"infra"}))

AT_WORK = 500
"""Nodes that are in work at once, fail and are retried."""

MOVED = 500
"""Nodes that go through all phases while their transitions are timed."""

SMALL_FLEET = 1000
"""Nodes of the fleet whose transitions are timed in turns with the larger one's."""

UNTIL_WINDOW_S = 13 * 3600.0

WAIT_S = 600.0
"""When a step of the measurement is given up."""

TEN = 10
"""Nodes in which an answer of the inventory differs."""

WARM_UP_S = HALF_HOUR_S = 1800.0
APART_S = 7200.0
"""Between two half hours whose most resident memory is compared."""

WATCH_S = 15.0

PLAN = f"""\
apiVersion: rolloutd/v1
kind: MaintenancePlan
metadata: {{name: bench, owner: infra}}
spec:
  source: {{git: "{URL}", ref: main}}
  targets: ""
  canary: {{select: "canary=yes", max_parallel: {AT_WORK}}}
  windows: [{{days: DAYS, from: "00:00", to: "24:00", zone: UTC}}]
  isolate: [{{command: {{do: "true", undo: "true"}}}}]
  maintain: {{playbook: site.yml, vars: {{round: ROUND}}}}
  verify: [{{reachable: {{}}}}]
  max_parallel: {AT_WORK}
  gates: {{start: {{owner: 1}}}}
"""

T0 = 1_800_014_400.0
"""A Friday, 12:00 UTC: a window of Saturdays opens in twelve hours."""


class BenchClock:
    """ports.Clock that starts at T0 and can be set forward."""

    def __init__(self) -> None:
        self._offset_s = 0.0
        self._time = asyncio.get_running_loop().time
        self._began = self._time()

    def now(self) -> float:
        return T0 + self._offset_s + self._time() - self._began

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def advance(self, seconds: float) -> None:
        self._offset_s += seconds


class VirtualWorld:
    """What SimTimers needs of its world."""

    is_finished = False

    def __init__(self, clock: BenchClock) -> None:
        self.now = clock.now


@contextmanager
def longest_pause() -> Iterator[list[float]]:
    """Yield a list that gets the longest CPU time of a callback of this thread's loop (ms)."""
    run, longest = asyncio.Handle._run, 0.0
    found: list[float] = []

    def timed(self: asyncio.Handle) -> None:
        nonlocal longest
        began = time.thread_time()
        run(self)
        longest = max(longest, time.thread_time() - began)

    asyncio.Handle._run = timed  # type: ignore[method-assign]
    try:
        yield found
    finally:
        asyncio.Handle._run = run  # type: ignore[method-assign]
        found.append(longest * 1000)


class Fleet:
    """A daemon over so many nodes, and ways to wait for it."""

    def __init__(
        self,
        state: State,
        clock: BenchClock,
        daemon: Daemon,
        inventory: BenchInventory,
        run_host: FakeRunHost,
        directory: Path,
    ) -> None:
        self.state, self.clock, self.daemon = state, clock, daemon
        self.inventory, self.run_host, self.directory = inventory, run_host, directory
        self.running: asyncio.Task[None]
        self.sources = FakeSourceStore(directory / "trees")
        self.sources.commit(URL, {"site.yml": "- hosts: all\n"}, ["main"])

    async def submit(self, days: str, number: int, **more: Any) -> str:
        text = PLAN.replace("DAYS", days).replace("ROUND", str(number)).encode()
        plan = planfile.read(text, "p")
        return (await submit(self.state, self.sources, plan, None, OWNER, **more)).rollout

    async def open_start_gate(self, rollout: str) -> None:
        found = self.state.index.rollout(rollout)
        ballot = Ballot(GateName.START, yes=True, reason="bench")
        await self.state.commit(vote(self.state, OWNER, found, ballot, ()), actor=OWNER.actor, cause="bench")
        await self.until(lambda: bool(self.state.index.rollout(rollout).opened))

    async def open_window(self) -> None:
        """Set the clock to an instant in the plan's window."""
        self.clock.advance(UNTIL_WINDOW_S)
        await self.daemon._inventory_refresher.refresh()  # else its source would be stale

    async def settle(self) -> None:
        """Wait for two decisions, the second of which has nothing to do any more."""
        for _ in range(2):
            decided = asyncio.Event()
            listen = lambda _, event=decided: event.set()  # noqa: E731
            self.daemon.iteration_listeners.append(listen)
            self.state.wake_up()
            await asyncio.wait_for(decided.wait(), WAIT_S)
            self.daemon.iteration_listeners.remove(listen)

    async def until(self, is_reached: Callable[[], bool]) -> None:
        began = time.monotonic()
        while not is_reached():
            if time.monotonic() - began > WAIT_S:
                raise TimeoutError("the fleet does not reach the next step")
            await asyncio.sleep(0.05)


async def with_fleet(
    nodes: int, measure: Callable[[Fleet], Awaitable[dict[str, float]]], *, virtual: bool = False
) -> dict[str, float]:
    """Run a daemon over so many nodes, and return what `measure` finds."""
    with tempfile.TemporaryDirectory(prefix="rolloutd-scale-") as directory:
        settings = Settings.model_validate(
            {
                "state_dir": str(Path(directory, "state")),
                "teams": {"infra": {"members": ["olga"]}},
                "pools": {key: {"max_unavailable": "100%"} for key in ("team", "rack")},
                "max_parallel": AT_WORK,
            }
        )
        clock, compiler = BenchClock(), TeamPlanCompiler(settings.teams)
        store = await open_store(
            Path(directory, "state"), compile_plan=compiler, inline=virtual, now=clock.now
        )
        snapshot = await store.load_snapshot()
        index = Projection.build(snapshot, compile_limits(settings), compiler)
        garbage.tune()  # as the daemon does at its start
        state = State(index, store, clock, settings, ChangeNotifier(), epoch=snapshot.epoch)
        await state.commit([DaemonStarted(snapshot.epoch, "bench", "", clock.now())], cause="bench")
        inventory = BenchInventory(nodes)
        timers: Any = SimTimers(VirtualWorld(clock)) if virtual else ApschedulerTimers()  # type: ignore[arg-type]
        run_host = FakeRunHost({"site.yml": Script.OK})
        adapters = AdapterSet(
            FakeRunner(run_host), {"command": FakeIsolator()}, {"reachable": FakeCheck()}, find_source
        )
        observer = FakeObserver(clock)
        daemon = Daemon(state, adapters, inventories=[inventory], observers=[observer], timers=timers)
        fleet = Fleet(state, clock, daemon, inventory, run_host, Path(directory))
        fleet.running = asyncio.create_task(daemon.run())
        try:
            await fleet.until(state.inventory_refreshed.is_set)
            return await measure(fleet)
        finally:
            fleet.running.cancel()
            await asyncio.wait((fleet.running,))
            timers.close()
            await store.close()


# -- the figures -------------------------------------------------------------------


async def measure_pauses(fleet: Fleet) -> dict[str, float]:
    """Let a change go its way, and return the longest pause of the loop in each part (ms)."""
    state, figures = fleet.state, {}
    nodes = len(state.index.nodes)
    tasks = asyncio.all_tasks()

    async def pause_of(name: str, work: Awaitable[object]) -> float:
        """Do the work, and return its CPU seconds."""
        began_s = time.process_time()
        with longest_pause() as found:
            await work
        cpu_s = time.process_time() - began_s
        figures[f"loop pause {name}"] = found[0]
        gc.collect()
        return cpu_s

    await fleet.settle()
    fleet.inventory.relabel(TEN)
    answering_s = fleet.inventory.answering_s
    refresh_s = await pause_of("refresh", fleet.daemon._inventory_refresher.refresh())
    figures["refresh cpu"] = refresh_s - (fleet.inventory.answering_s - answering_s)
    await pause_of("submit", _then_settle(fleet, fleet.submit("sat", 1)))
    rollouts: list[str] = []
    await pause_of("supersede", _then_settle(fleet, _keep(rollouts, fleet.submit("sat", 2, supersede=True))))
    (rollout,) = rollouts
    await fleet.open_start_gate(rollout)
    # A failure stops all further starts, so none comes before all nodes are in work.
    fleet.run_host.scripts = {"site.yml": Script.LONG}
    expected = min(AT_WORK, nodes)

    def counters() -> RolloutCounters:
        return state.index.counters(rollout)

    async def open_window() -> None:
        # As after a sleep of the machine: until the refresh the inventory is stale, so all groups back off.
        fleet.clock.advance(UNTIL_WINDOW_S)
        state.wake_up()
        await fleet.until(lambda: not state.index.pending_groups.ready(rollout, "canary"))
        # With its refresh: what that lets start begins before it returns.
        await fleet.daemon._inventory_refresher.refresh()
        state.wake_up()
        await fleet.until(lambda: len(counters().in_flight) >= expected)

    async def fail_all() -> None:
        fleet.run_host.scripts = {"site.yml": Script.FAIL}
        for run in fleet.run_host.runs.values():
            run.end(Failed("bench"))
        await fleet.until(lambda: len(counters().failed) >= expected)

    await pause_of("window", open_window())
    await pause_of("failures", fail_all())
    await pause_of("retry", _retry_all(fleet, rollout, sorted(counters().failed)))
    assert tasks <= asyncio.all_tasks(), "the daemon has ended"
    return figures


async def _keep(found: list[str], work: Awaitable[str]) -> None:
    found.append(await work)


async def _then_settle(fleet: Fleet, work: Awaitable[object]) -> None:
    await work
    await fleet.settle()


async def _retry_all(fleet: Fleet, rollout: str, nodes: Sequence[str]) -> None:
    """Retry nodes one by one, as clients do, while the daemon decides."""
    state = fleet.state
    for node in nodes:
        async with state.exclusive_commit(OWNER.actor) as commit:
            index = state.index
            events = rollout_commands.retry(
                state, OWNER, index.rollout(rollout), index.target(rollout, node), "bench"
            )
            await commit(events, "retry")
    await fleet.settle()


async def measure_idle(fleet: Fleet) -> dict[str, float]:
    """Wait some hours of virtual time in a closed window, under a watch."""
    watching = asyncio.create_task(run_watch(fleet.state, BenchWatch(fleet), lambda: None))
    await wait_in_closed_window(fleet)
    gc.collect()
    warm_kib, cpu_s = memory_kib("VmRSS"), time.process_time()
    first_kib = await _most_resident_kib(HALF_HOUR_S)
    await asyncio.sleep(APART_S - HALF_HOUR_S)
    last_kib = await _most_resident_kib(HALF_HOUR_S)
    cpu_s = time.process_time() - cpu_s
    watching.cancel()
    return {
        "idle cpu": cpu_s / (APART_S + HALF_HOUR_S) * 100,
        "memory growth": max(0.0, (last_kib - first_kib) / 1024 / (APART_S / 3600)),
        "resident": warm_kib,
    }


async def _most_resident_kib(during_s: float) -> float:
    """Return the most resident memory, which is while the inventory's answer is compared.

    The least one grows for some hours by up to what an answer needs for a moment, 64 MiB of 100,000 nodes,
    while the bytes in use stay the same: small objects keep more and more of the interpreter's arenas, of
    which the next answer uses the free parts.
    """
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from now on
    await asyncio.sleep(during_s)
    return memory_kib("VmHWM")


async def wait_in_closed_window(fleet: Fleet) -> dict[str, float]:
    await fleet.settle()
    await fleet.open_start_gate(await fleet.submit("sat", 1))
    await asyncio.sleep(WARM_UP_S)
    return {}


class BenchWatch:
    """ports.Watch under which all nodes stay up."""

    source = BenchInventory.source

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._on_confirmed: OnConfirmed = lambda: False

    def confirm_to(self, on_confirmed: OnConfirmed) -> None:
        self._on_confirmed = on_confirmed

    async def run(
        self, on_observed: OnObserved, on_nodes_changed: OnNodesChanged, on_tried: OnTried = ignore_tries
    ) -> None:
        state = self._fleet.state
        has_reported = False
        while True:
            if not has_reported or not self._on_confirmed():
                now, up = state.now(), NodeHealth.UP
                on_observed([Observation(node, up, now, watch=self.source) for node in state.index.nodes])
                has_reported = True
            await asyncio.sleep(WATCH_S)


def memory_kib(name: str) -> float:
    """Return a figure of this process's memory: VmRSS is the resident one, VmHWM its peak."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith(f"{name}:"))


async def measure_forecast(fleet: Fleet) -> dict[str, float]:
    """Ask the forecast's process about all nodes; return the pause (ms), none if it is too late."""
    rollout = next(iter(fleet.state.index.rollouts), None) or await fleet.submit("sat", 1)
    await fleet.settle()
    gc.collect()
    forecaster = Forecaster(fleet.state)
    with longest_pause() as found:
        try:  # with the limit of the daemon's own forecasts: the process takes more than a minute
            await forecaster._make(forecaster.request(rollouts=(rollout,)), OWN_TIME_LIMIT_S)
        except StoreFailed:  # too late, so nothing was read in the loop
            return {}
    return {"loop pause forecast": found[0]}


async def measure_expiry(fleet: Fleet) -> dict[str, float]:
    """Let the observations of all nodes expire at once, as when a watch ends; return the pause (ms)."""
    state, now = fleet.state, fleet.state.now()
    seen = [Observation(each, NodeHealth.UP, now) for each in state.index.nodes]
    state.index.record_observations(seen, now)
    await fleet.settle()
    fleet.clock.advance(state.index.limits.observe_within_s + 1.0)
    with longest_pause() as found:
        await fleet.settle()
    return {"loop pause expiry": found[0]}


async def measure_transitions(fleet: Fleet) -> dict[str, float]:
    """Return how many times the CPU time of a small fleet's durable transition one of this fleet takes."""
    return await with_fleet(SMALL_FLEET, lambda small: _compare_transitions(fleet, small))


async def _compare_transitions(*fleets: Fleet) -> dict[str, float]:
    """Return the ratio of the first fleet's time to the second one's, with the invariants' time in both."""
    rollouts = [await _prepare_transitions(each) for each in fleets]
    times: list[list[float]] = [[], []]
    for number in range(min(MOVED, *(len(each.state.index.nodes) for each in fleets))):
        # By turns: what else the machine does meanwhile changes both.
        for fleet, rollout, taken in zip(fleets, rollouts, times, strict=True):
            began = time.process_time()
            await _move(fleet.state, rollout, f"n{number:06}")
            taken.append(time.process_time() - began)
    # The fastest tenth: on a busy machine the CPU time of most nodes is that of missed caches too, and two
    # fleets of the same size differ by a tenth in their medians.
    large, small = (statistics.quantiles(each, n=10)[0] for each in times)
    return {"transitions ratio": large / small}


async def _prepare_transitions(fleet: Fleet) -> str:
    """Submit a rollout whose nodes may start, and let the daemon decide nothing itself; return its id."""
    state = fleet.state
    rollout = await fleet.submit("sat", 1)
    await fleet.open_start_gate(rollout)
    fleet.running.cancel()
    await asyncio.wait((fleet.running,))
    await fleet.open_window()
    now = state.now()
    state.index.record_observations(
        [Observation(each, NodeHealth.UP, now) for each in state.index.nodes], now
    )
    return rollout


async def _move(state: State, rollout: str, node: str) -> None:
    """Take a node through all phases."""
    edges = (
        (Trigger.ADMITTED, Phase.PENDING, Phase.ISOLATING, None),
        (Trigger.ISOLATED, Phase.ISOLATING, Phase.MAINTAINING, None),
        (Trigger.MAINTAINED, Phase.MAINTAINING, Phase.VERIFYING, None),
        (Trigger.VERIFIED, Phase.VERIFYING, Phase.DONE, Outcome.CHANGED),
    )
    now = state.now()
    for trigger, source, target, outcome in edges:
        event = PhaseMoved(rollout, node, trigger, source, target, 1, now, outcome, isolated=False)
        async with state.exclusive_commit() as commit:
            await commit([event], "bench", now)


def main() -> None:
    """Measure what is asked for."""
    logging.disable(logging.ERROR)
    wanted, nodes = sys.argv[1], int(sys.argv[2])
    if wanted == "decision":
        # Ten plans: each wave has its own queue, and the fleet is in work.
        _, times = decision_times(nodes, max(2, nodes // POOL_SIZE), 10)
        found = {"decision": statistics.median(times)}
    elif wanted == "idle":
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            found = runner.run(with_fleet(nodes, measure_idle, virtual=True))
    else:
        measure = {"pauses": measure_pauses, "transitions": measure_transitions}[wanted]
        found = asyncio.run(with_fleet(nodes, measure))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
