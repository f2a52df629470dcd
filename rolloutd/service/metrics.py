"""What Prometheus may know: counted from the daemon's facts at the moment it asks.

Instants are epoch seconds and durations seconds, as Prometheus has them; what a
metric means, and which alerts are worth a night's sleep, is in docs/metrics.md.
It is served on this machine alone, to whoever can reach the port or the socket:
so nothing is in it but names, numbers and reasons' codes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence

from aiohttp import web
from prometheus_client import CollectorRegistry, Histogram, ProcessCollector, generate_latest
from prometheus_client import Counter as Counted
from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from machines import gates
from machines.events import Event, PhaseMoved, StepAction, StepRecorded, StepState
from machines.index import Index
from machines.plan import GateName
from machines.progress import progress
from machines.rollout import Rollout
from machines.states import BUSY, Phase
from rolloutd.service.binding import CannotListen, bind
from rolloutd.settings.metering import Metrics
from rolloutd.state import State

LAG_LOOK_S = 1.0
"""How often the loop's lag is measured."""

FAST_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
"""Buckets from what a decision takes on an idle machine to what would be felt by everybody."""

SCRAPE_SHUTDOWN_S = 1.0
"""How long a scrape may still take when the daemon stops."""


class Meter:
    """The metrics of one daemon: told of what takes time, asked for everything else."""

    def __init__(self, state: State, version: str) -> None:
        self._state = state
        self.registry = CollectorRegistry()
        self._decision = self._histogram("decision", "What one decision takes, without writing it.")
        self._commit = self._histogram("commit", "What one commit takes, from handing it in to its answer.")
        self._lag = self._histogram("loop_lag", "How much later than asked for the event loop goes on.")
        self._moves = self._counter("transitions", "Moves of nodes between phases.", "trigger")
        self._runs = self._counter("runs", "Playbook runs that have ended.", "result")
        self.registry.register(_Standing(state, version, state.now()))
        ProcessCollector(registry=self.registry)

    def decided(self, decision_s: float) -> None:
        """Note what a decision took."""
        self._decision.observe(decision_s)

    def committed(self, events: Sequence[Event], commit_s: float) -> None:
        """Note a commit, and what happened in it."""
        self._commit.observe(commit_s)
        for event in events:
            if isinstance(event, PhaseMoved):
                self._moves.labels(event.trigger.value).inc()
            elif isinstance(event, StepRecorded) and _is_ended_run(event):
                self._runs.labels(event.record.state.value).inc()

    async def measure_lag(self) -> None:
        """Measure how late the loop is, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            asked = loop.time() + LAG_LOOK_S
            await asyncio.sleep(LAG_LOOK_S)
            self._lag.observe(max(0.0, loop.time() - asked))

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def _histogram(self, name: str, what: str) -> Histogram:
        return Histogram(f"rolloutd_{name}_seconds", what, buckets=FAST_S, registry=self.registry)

    def _counter(self, name: str, what: str, label: str) -> Counted:
        return Counted(f"rolloutd_{name}", what, [label], registry=self.registry)


@contextlib.asynccontextmanager
async def serving(meter: Meter, place: Metrics) -> AsyncIterator[tuple[str, ...]]:
    """Serve the metrics while the context is open; yields where.  Raises CannotListen, AlreadyRunning."""

    async def answer(_: web.Request) -> web.Response:
        return web.Response(
            body=meter.text(), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        )

    application = web.Application()
    application.router.add_get("/metrics", answer)
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=SCRAPE_SHUTDOWN_S)
    await runner.setup()
    bound = None
    try:
        if place.path is not None:
            bound = await asyncio.to_thread(bind, place.path)
            await web.SockSite(runner, bound.sock).start()
        if place.listen is not None:
            await _listen(runner, place.listen)
        yield tuple(str(where) for where in (place.path, place.listen) if where is not None)
    finally:
        if bound is not None:
            bound.remove()
        await runner.cleanup()


async def _listen(runner: web.AppRunner, address: str) -> None:
    host, _, port = address.rpartition(":")
    try:
        await web.TCPSite(runner, host.strip("[]"), int(port)).start()
    except OSError as error:
        raise CannotListen(
            f"metrics cannot be served at {address}: {error.strerror or error}; name another `metrics.listen`"
        ) from error


def _is_ended_run(event: StepRecorded) -> bool:
    return event.record.action is StepAction.RUN and event.record.state is not StepState.INTENDED


class _Standing(Collector):
    """What is counted from the index whenever somebody asks."""

    def __init__(self, state: State, version: str, began_at: float) -> None:
        self._state = state
        self._version = version
        self._began_at = began_at

    def describe(self) -> Iterable[Metric]:
        """Name nothing beforehand: what there is depends on the rollouts."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield everything; the facts do not change meanwhile, since nothing is awaited."""
        state, now = self._state, self._state.now()
        live = [rollout for rollout in state.index.rollouts.values() if not rollout.closed]
        about = InfoMetricFamily("rolloutd", "The daemon.")
        about.add_metric([], {"version": self._version})
        yield about
        yield _gauge("epoch", "The daemon's tenure; it grows with every start.", state.index.epoch)
        yield _gauge("started_timestamp_seconds", "When this daemon took up its work.", self._began_at)
        yield _gauge(
            "troubles", "What hinders the daemon; `rolloutctl status` says it.", len(state.troubles())
        )
        yield from _fleet(state)
        yield from _rollouts(state.index, live, now)
        yield from _pools(state.index, live)
        yield from _gates(state.index, live, now)


def _gauge(name: str, what: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"rolloutd_{name}", what, value=value)


def _labelled(name: str, what: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"rolloutd_{name}", what, labels=labels)


def _fleet(state: State) -> Iterator[Metric]:
    yield _gauge("known_nodes", "Nodes that the inventory has.", len(state.index.nodes))
    yield _gauge("in_flight_nodes", "Nodes being worked on.", state.index.in_flight())
    yield _gauge("max_parallel", "Nodes that may be worked on at once.", state.index.limits.max_parallel)
    runs = sum(target.phase is Phase.MAINTAINING for target in state.index.busy())
    yield _gauge("maintaining_nodes", "Nodes on which a playbook runs or is about to.", runs)
    sources = _labelled("source_up", "Whether the inventory source answered when last asked.", "source")
    for source in state.sources.values():
        sources.add_metric([source.source], 0 if source.error else 1)
    yield sources


def _rollouts(index: Index, live: Sequence[Rollout], now: float) -> Iterator[Metric]:
    nodes = _labelled("nodes", "Targets of a live rollout by phase.", "rollout", "phase")
    states = _labelled("rollout_state", "1 for the state a live rollout is in.", "rollout", "state")
    reasons = _labelled("rollout_waits", "1 for the reason a rollout waits for.", "rollout", "code")
    moved = _labelled(
        "last_progress_timestamp_seconds", "When a node of the rollout last changed its phase.", "rollout"
    )
    for rollout in live:
        tally, far = index.tally(rollout.id), progress(index, rollout.id, now)
        for phase in Phase:
            nodes.add_metric([rollout.id, phase.value], tally.phases[phase])
        states.add_metric([rollout.id, far.state.value], 1)
        if far.reason is not None:
            reasons.add_metric([rollout.id, far.reason.code], 1)
        latest = max((target.since for target in index.targets(rollout.id)), default=rollout.submitted_at)
        moved.add_metric([rollout.id], max(latest, rollout.submitted_at))
    yield from (nodes, states, reasons, moved)


def _pools(index: Index, live: Sequence[Rollout]) -> Iterator[Metric]:
    nodes = _labelled("pool_nodes", "Targets of all live rollouts by pool and phase.", "pool", "phase")
    counted: Counter[tuple[str, Phase]] = Counter(
        (pool, target.phase) for target in index.busy() if target.phase in BUSY for pool in target.pools
    )
    for rollout in live:
        for pool_id, tally in index.tally(rollout.id).pools.items():
            counted[pool_id, Phase.DONE] += tally.done
            counted[pool_id, Phase.FAILED] += tally.failed
            counted[pool_id, Phase.PENDING] += tally.total - tally.done - tally.failed - tally.in_flight
    for (pool_id, phase), number in sorted(counted.items()):
        nodes.add_metric([pool_id, phase.value], number)
    yield nodes
    slots = _labelled("pool_slots", "Nodes of the pool that may be down at once.", "pool")
    down = _labelled("pool_down_nodes", "Nodes of the pool that are down, for whatever reason.", "pool")
    for pool_id in sorted(index.pool_ids()):
        pool = index.pool(pool_id)
        slots.add_metric([pool_id], index.budget(pool))
        down.add_metric([pool_id], len(pool.down))
    yield from (slots, down)


def _gates(index: Index, live: Sequence[Rollout], now: float) -> Iterator[Metric]:
    waiting = _labelled(
        "gate_waiting_since_timestamp_seconds",
        "Since when a gate waits for votes.",
        "rollout",
        "gate",
        "wave",
    )
    failed = _labelled(
        "failure_since_timestamp_seconds", "Since when a failure waits for people.", "rollout", "node"
    )
    for rollout in live:
        for gate, wave, since in _asked(index, rollout):
            if gates.gate_view(index, rollout, gate, wave, now).state == "waiting":
                waiting.add_metric([rollout.id, gate.value, wave], since)
        for node, at in {failure.node: failure.at for failure in index.unsettled(rollout.id)}.items():
            failed.add_metric([rollout.id, node], at)
    yield from (waiting, failed)


def _asked(index: Index, rollout: Rollout) -> Iterator[tuple[GateName, str, float]]:
    """Yield every gate of a rollout, and since when it is asked once it is."""
    yield GateName.START, "", rollout.submitted_at
    for spec in rollout.plan.waves:
        if spec.gate is not None:
            yield GateName.CONTINUE, spec.name, index.wave_end(rollout.id, spec.name) or rollout.submitted_at
    failures = [failure.at for failure in index.unsettled(rollout.id)]
    yield GateName.PROCEED, "", min(failures, default=rollout.submitted_at)
