"""Prometheus metrics, computed from the daemon's facts at each scrape.

Instants are epoch seconds and durations seconds; docs/metrics.md describes each metric and the alerts.  Every
local user who reaches the port or socket can read them, so they hold only names, numbers and reason codes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence

from aiohttp import web
from prometheus_client import CollectorRegistry, Histogram, ProcessCollector, generate_latest
from prometheus_client import Counter as Counted
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from machines.facts.index import Index
from machines.model.events import Event, PhaseMoved, StepRecorded
from machines.model.plan import GateName
from machines.model.rollout import Rollout
from machines.model.step_record import StepAction, StepState
from machines.rules import gates
from machines.scheduler.progress import rollout_progress
from machines.states import IN_FLIGHT_PHASES, Phase
from rolloutd.concurrency import threads
from rolloutd.engine.state import State
from rolloutd.plugin import LOCAL_RUNNER
from rolloutd.ports import RunnerStatus, StoredVolume, TunedRunnerStatus
from rolloutd.service.listen_socket import bind, bind_address
from rolloutd.service.memory import memory_bytes
from rolloutd.settings.listeners import Metrics

LAG_INTERVAL_S = 1.0
"""How often the loop's lag is measured."""

LATENCY_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
"""Buckets from a decision on an idle machine to a delay that users feel."""

SCRAPE_SHUTDOWN_S = 1.0
"""How long a scrape may still take when the daemon stops."""


class MetricsCollector:
    """The metrics of one daemon: durations are recorded, everything else is computed at a scrape."""

    def __init__(self, state: State, version: str) -> None:
        self._state = state
        self.registry = CollectorRegistry()
        self._decision = self._histogram("decision", "What one decision takes, without writing it.")
        self._commit = self._histogram("commit", "What one commit takes, from handing it in to its answer.")
        self._lag = self._histogram("loop_lag", "How late the event loop resumes.")
        self._transitions = self._counter("transitions", "Moves of nodes between phases.", "trigger")
        self._runs = self._counter("runs", "Playbook runs that have ended.", "result")
        self.registry.register(_StateCollector(state, version, state.now()))
        ProcessCollector(registry=self.registry)

    def record_decision(self, decision_s: float) -> None:
        self._decision.observe(decision_s)

    def record_commit(self, events: Sequence[Event], commit_s: float) -> None:
        self._commit.observe(commit_s)
        for event in events:
            if isinstance(event, PhaseMoved):
                self._transitions.labels(event.trigger.value).inc()
            elif isinstance(event, StepRecorded):
                record = event.record
                if record.action is StepAction.RUN and record.state is not StepState.INTENDED:
                    self._runs.labels(record.state.value).inc()

    async def measure_lag(self) -> None:
        """Measure how late the loop is, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            expected_at = loop.time() + LAG_INTERVAL_S
            await asyncio.sleep(LAG_INTERVAL_S)
            self._lag.observe(max(0.0, loop.time() - expected_at))

    async def render(self) -> bytes:
        await self._state.advance()
        # Of one moment of the facts; the text of 500 pools takes longer than the loop may pause.
        collected = CollectorRegistry()
        collected.register(_Collected([*self.registry.collect()]))
        return await threads.COMPUTATIONS.run(generate_latest, collected)

    def _histogram(self, name: str, what: str) -> Histogram:
        return Histogram(f"rolloutd_{name}_seconds", what, buckets=LATENCY_BUCKETS_S, registry=self.registry)

    def _counter(self, name: str, what: str, label: str) -> Counted:
        return Counted(f"rolloutd_{name}", what, [label], registry=self.registry)


@contextlib.asynccontextmanager
async def serve_metrics(collector: MetricsCollector, endpoint: Metrics) -> AsyncIterator[tuple[str, ...]]:
    """Serve the metrics while the context is open; raises CannotListen, AlreadyRunning."""

    async def handle_scrape(_: web.Request) -> web.Response:
        return web.Response(
            body=await collector.render(),
            headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"},
        )

    application = web.Application()
    application.router.add_get("/metrics", handle_scrape)
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=SCRAPE_SHUTDOWN_S)
    await runner.setup()
    bound = None
    try:
        if endpoint.path is not None:
            bound = await threads.ACCOUNTS.run(bind, endpoint.path, endpoint.group)
            await web.SockSite(runner, bound.sock).start()
        if endpoint.listen is not None:
            await web.SockSite(runner, bind_address(endpoint.listen, "metrics.listen")).start()
        yield tuple(str(where) for where in (endpoint.path, endpoint.listen) if where is not None)
    finally:
        if bound is not None:
            bound.remove()
        await runner.cleanup()


class _Collected(Collector):
    """Metrics that were collected before."""

    def __init__(self, metrics: Sequence[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics


class _StateCollector(Collector):
    """Metrics that are computed from the index at each scrape."""

    def __init__(self, state: State, version: str, started_at: float) -> None:
        self._state = state
        self._version = version
        self._started_at = started_at

    def describe(self) -> Iterable[Metric]:
        """Declare nothing in advance: the metrics depend on the rollouts."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics; the facts do not change meanwhile, because nothing is awaited."""
        state, now = self._state, self._state.now()
        live = [rollout for rollout in state.index.rollouts.values() if not rollout.closed]
        info = InfoMetricFamily("rolloutd", "The daemon.")
        info.add_metric([], {"version": self._version})
        yield info
        yield _make_gauge("epoch", "The daemon's term; it grows with every start.", state.index.epoch)
        yield _make_gauge("started_timestamp_seconds", "When this daemon started.", self._started_at)
        yield _make_gauge(
            "troubles", "What hinders the daemon; `rolloutctl status` says it.", len(state.problems())
        )
        failures = _make_labelled_gauge(
            "adapter_failures",
            "Failures in a row to reach an adapter's API; absent after an answer.",
            "adapter",
        )
        for failure in state.adapter_failures.failing.values():
            failures.add_metric([failure.adapter], failure.count)
        yield failures
        jobs = CounterMetricFamily(
            "rolloutd_job_failures", "Unexpected errors of background jobs since the start.", labels=["kind"]
        )
        for kind, count in state.job_failures.items():
            jobs.add_metric([kind], count)
        yield jobs
        yield from _collect_store(state.stored_volume)
        yield from _collect_fleet(state)
        yield from _collect_runs(state.runners)
        index = state.index.at(now)
        yield from _collect_rollouts(index, live, now)
        yield from _collect_pools(index, live)
        yield from _collect_gates(index, live, now)


def _make_gauge(name: str, what: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"rolloutd_{name}", what, value=value)


def _collect_store(volume: StoredVolume) -> Iterable[Metric]:
    """Yield what the database held at the last pass of the retention, at most an hour ago."""
    yield _make_gauge("database_bytes", "Size of the database's file.", volume.file_bytes)
    yield _make_gauge("database_free_bytes", "Free space in the database's file.", volume.free_bytes)
    yield _make_gauge("database_growth_bytes_per_day", "About how much it grows.", volume.bytes_a_day)
    yield _make_gauge("audit_entries", "Audit entries in the database.", volume.entries)
    yield _make_gauge("audit_exported_entries", "Audit entries in segments.", volume.exported_entries)
    yield _make_gauge("audit_entries_per_day", "Entries a day in the last week.", volume.entries_a_day)
    yield _make_gauge("closed_rollouts", "Closed rollouts with records.", volume.closed_rollouts)


def _make_labelled_gauge(name: str, what: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"rolloutd_{name}", what, labels=labels)


def _collect_fleet(state: State) -> Iterator[Metric]:
    yield _make_gauge("known_nodes", "Nodes that the inventory has.", len(state.index.nodes))
    yield _make_gauge("in_flight_nodes", "Nodes being worked on.", state.index.in_flight())
    yield _make_gauge("max_parallel", "Nodes that may be worked on at once.", state.index.limits.max_parallel)
    runs = sum(target.phase is Phase.MAINTAINING for target in state.index.needing_driver())
    yield _make_gauge("maintaining_nodes", "Nodes on which a playbook runs or is about to.", runs)
    sources = _make_labelled_gauge(
        "source_up", "Whether the inventory source answered when last asked.", "source"
    )
    age = _make_labelled_gauge(
        "source_age_seconds",
        "Age of the source's last answer; absent if it never answered.",
        "source",
    )
    stale = _make_labelled_gauge(
        "source_stale", "Whether the last answer is too old to start a node of the source by it.", "source"
    )
    held = _make_labelled_gauge("source_held", "Whether an answer waits for an admin.", "source")
    now = state.now()
    for source in state.sources.values():
        sources.add_metric([source.source], 0 if source.error else 1)
        if source.refreshed_at is not None:
            age.add_metric([source.source], max(0.0, now - source.refreshed_at))
        stale.add_metric([source.source], int(source.freshness.is_stale(now)))
        held.add_metric([source.source], int(source.held is not None))
    yield from (sources, age, stale, held)
    quarantined = sum(node.quarantined for node in state.index.nodes.values())
    yield _make_gauge(
        "quarantined_nodes", "Nodes that contradictions between sources keep from work.", quarantined
    )


def _collect_runs(runners: Mapping[str, RunnerStatus]) -> Iterator[Metric]:
    gauges = (
        ("active_runs", "Playbook runs of a runner.", lambda each: each.active),
        ("parallel_runs", "Runs that a runner may have at once.", lambda each: each.parallel),
        ("waiting_runs", "Runs that wait for a runner.", lambda each: len(each.waiting)),
        ("runner_available", "1 for a runner that begins runs.", lambda each: each.problem is None),
    )
    for name, what, value in gauges:
        gauge = _make_labelled_gauge(name, what, "runner")
        for runner, status in runners.items():
            gauge.add_metric([runner], value(status))
        yield gauge
    local = runners.get(LOCAL_RUNNER)
    if not isinstance(local, TunedRunnerStatus):
        return
    started = CounterMetricFamily(
        "rolloutd_started_runs", "Runs started, by how: as a fork or as a new process.", labels=["way"]
    )
    for way, number in local.started.items():
        started.add_metric([way], number)
    yield started
    yield _make_gauge(
        "fork_servers", "Processes that have imported Ansible and fork runs.", len(local.servers)
    )
    yield _make_gauge("fork_server_memory_bytes", "Memory of these processes.", memory_bytes(local.servers))


def _collect_rollouts(index: Index, live: Sequence[Rollout], now: float) -> Iterator[Metric]:
    nodes = _make_labelled_gauge("nodes", "Targets of a live rollout by phase.", "rollout", "phase")
    states = _make_labelled_gauge(
        "rollout_state", "1 for the state a live rollout is in.", "rollout", "state"
    )
    reasons = _make_labelled_gauge(
        "rollout_waits", "1 for the reason a rollout waits for.", "rollout", "code"
    )
    percent = _make_labelled_gauge(
        "rollout_percent", "Percentage of nodes that carry the change, of those not skipped.", "rollout"
    )
    rolled_back = _make_labelled_gauge(
        "rolled_back_nodes", "Targets of a live rollout whose change was undone.", "rollout"
    )
    prepared = _make_labelled_gauge(
        "prepared_nodes", "Prepared nodes of a live rollout; absent without prepare stages.", "rollout"
    )
    last_progress = _make_labelled_gauge(
        "last_progress_timestamp_seconds", "When a node of the rollout last changed its phase.", "rollout"
    )
    for rollout in live:
        tally, current = index.counters(rollout.id), rollout_progress(index, rollout.id, now)
        for phase in Phase:
            nodes.add_metric([rollout.id, phase.value], tally.phases[phase])
        states.add_metric([rollout.id, current.state.value], 1)
        percent.add_metric([rollout.id], current.percent)
        rolled_back.add_metric([rollout.id], current.rolled_back)
        if current.prepared is not None:
            prepared.add_metric([rollout.id], current.prepared)
        if current.reason is not None:
            reasons.add_metric([rollout.id, current.reason.code], 1)
        latest = max((target.since for target in index.targets(rollout.id)), default=rollout.submitted_at)
        last_progress.add_metric([rollout.id], max(latest, rollout.submitted_at))
    yield from (nodes, states, percent, rolled_back, prepared, reasons, last_progress)


def _collect_pools(index: Index, live: Sequence[Rollout]) -> Iterator[Metric]:
    nodes = _make_labelled_gauge(
        "pool_nodes", "Targets of all live rollouts by pool and phase.", "pool", "phase"
    )
    counted: Counter[tuple[str, Phase]] = Counter(
        (pool, target.phase)
        for target in index.needing_driver()
        if target.phase in IN_FLIGHT_PHASES
        for pool in target.pools
    )
    for rollout in live:
        for pool_id, tally in index.counters(rollout.id).pools.items():
            is_done = tally.done + tally.skipped
            counted[pool_id, Phase.DONE] += is_done
            counted[pool_id, Phase.FAILED] += tally.failed
            counted[pool_id, Phase.PENDING] += tally.total - is_done - tally.failed - tally.in_flight
    for (pool_id, phase), number in sorted(counted.items()):
        nodes.add_metric([pool_id, phase.value], number)
    yield nodes
    slots = _make_labelled_gauge("pool_slots", "Nodes of the pool that may be down at once.", "pool")
    down = _make_labelled_gauge(
        "pool_down_nodes", "Nodes of the pool that are down, for whatever reason.", "pool"
    )
    for pool_id in sorted(index.pool_ids()):
        pool = index.pool(pool_id)
        slots.add_metric([pool_id], index.budget(pool))
        down.add_metric([pool_id], len(pool.down))
    yield from (slots, down)


def _collect_gates(index: Index, live: Sequence[Rollout], now: float) -> Iterator[Metric]:
    waiting = _make_labelled_gauge(
        "gate_waiting_since_timestamp_seconds",
        "Since when a gate waits for votes.",
        "rollout",
        "gate",
        "wave",
    )
    failed = _make_labelled_gauge(
        "failure_since_timestamp_seconds", "Since when a failure waits for people.", "rollout", "node"
    )
    for rollout in live:
        for gate, wave, since in _gates_with_start(index, rollout):
            if gates.gate_view(index, rollout, gate, wave, now).state == "waiting":
                waiting.add_metric([rollout.id, gate.value, wave], since)
        for node, at in {
            failure.node: failure.at for failure in index.unresolved_failures(rollout.id)
        }.items():
            failed.add_metric([rollout.id, node], at)
    yield from (waiting, failed)


def _gates_with_start(index: Index, rollout: Rollout) -> Iterator[tuple[GateName, str, float]]:
    """Yield every gate of a rollout, and since when it waits for votes."""
    previous = ["", *(spec.name for spec in rollout.plan.waves if spec.gate is not None)]
    for (gate, wave), after in zip(rollout.plan.gates_in_order, previous, strict=True):
        end = index.wave_end(rollout.id, after) if after else None
        yield gate, wave, end or rollout.submitted_at
    failures = [failure.at for failure in index.unresolved_failures(rollout.id)]
    yield GateName.PROCEED, "", min(failures, default=rollout.submitted_at)
