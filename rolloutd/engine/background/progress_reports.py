"""Reports of what happens to nodes, for the isolators that show them in their own system.

A report is a copy of a committed event for people.  One that cannot be shown is logged and lost, and no
rollout waits for it.  It knows isolators as ports.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from machines.model.events import Event, PhaseMoved, StepRecorded
from machines.model.plan import Capability
from machines.model.step_record import StepAction, StepRecord, StepState
from machines.model.timefmt import format_duration
from machines.states import IN_FLIGHT_PHASES, Trigger
from rolloutd.engine.drivers.node_session import AdapterSet, NodeSession
from rolloutd.engine.state import State
from rolloutd.engine.tasks import BackgroundJobs
from rolloutd.errors import RolloutdError
from rolloutd.ports import ProgressKind, ProgressReport, SupportsProgressReports
from rolloutd.ports.guards import adapter_errors

log = logging.getLogger(__name__)

MAX_CONCURRENT = 8
"""Nodes at a time, so that reports leave the external system's capacity to the isolations."""

MAX_QUEUED = 20
"""Reports that wait for one node; beyond that the oldest are lost."""

REPORT_TIMEOUT_S = 30.0
"""Time limit of one report; the next ones of its node wait for it."""

KINDS = {
    Trigger.ADMITTED: ProgressKind.ADMITTED,
    Trigger.ROLLBACK_ORDERED: ProgressKind.ADMITTED,
    Trigger.ISOLATED: ProgressKind.ISOLATED,
    Trigger.ISOLATION_ABORTED: ProgressKind.ISOLATION_ABORTED,
    Trigger.MAINTAINED: ProgressKind.MAINTAINED,
    Trigger.VERIFIED: ProgressKind.VERIFIED,
    Trigger.FAILED: ProgressKind.FAILED,
    Trigger.SOAK_CHECK_FAILED: ProgressKind.FAILED,
}


class ProgressReporter:
    """The reports that wait, in the order of their events for each node."""

    def __init__(self, state: State, adapters: AdapterSet) -> None:
        self._state = state
        self._adapters = adapters
        self._queues: dict[str, deque[ProgressReport]] = {}
        self._phases_began = {(t.rollout, t.node): t.since for t in state.index.needing_driver()}
        self._jobs: BackgroundJobs[str] = BackgroundJobs("progress-report", state, concurrency=MAX_CONCURRENT)
        state.commit_listeners.append(self._on_commit)

    def send_queued(self, tasks: asyncio.TaskGroup) -> None:
        for node in self._queues:
            self._jobs.start(tasks, self._send, node, name=f"reports {node}")

    def _on_commit(self, events: Sequence[Event], commit_s: float) -> None:
        for event in events:
            took_s = self._end_phase(event) if isinstance(event, PhaseMoved) else 0.0
            match event:
                case PhaseMoved() if event.trigger in KINDS:
                    text = _transition_text(event, took_s)
                    report = ProgressReport(
                        KINDS[event.trigger], event.rollout, event.attempt, event.at, text
                    )
                case StepRecorded() if (kind := _step_kind(event)) is not None:
                    record = event.record
                    report = ProgressReport(kind, record.rollout, record.attempt, record.at, record.text)
                case _:
                    continue
            self._enqueue(event.record.node if isinstance(event, StepRecorded) else event.node, report)

    def _end_phase(self, event: PhaseMoved) -> float:
        """Return the seconds that the phase took that this event ends, and note when the next one began."""
        key = (event.rollout, event.node)
        began = self._phases_began.pop(key, event.at)
        if event.target in IN_FLIGHT_PHASES:
            self._phases_began[key] = event.at
        return max(0.0, event.at - began)

    def _enqueue(self, node: str, report: ProgressReport) -> None:
        index = self._state.index
        plan = index.rollout(report.rollout).plan
        if any(Capability.PROGRESS_REPORTS in spec.capabilities for spec in plan.isolate):
            isolating = sorted((t.admitted_at, t.rollout) for t in index.targets_on(node) if t.isolated)
            report = replace(report, isolated_for=tuple(rollout for _, rollout in isolating))
            self._queues.setdefault(node, deque(maxlen=MAX_QUEUED)).append(report)

    async def _send(self, node: str) -> None:
        queue = self._queues[node]
        while queue:
            report = queue.popleft()
            try:
                async with asyncio.timeout(REPORT_TIMEOUT_S):
                    await self._show(node, report)
            except (RolloutdError, TimeoutError) as error:
                log.warning("%s: not reported: %s: %s", node, report.kind, str(error) or "no answer in time")
        # Nothing was awaited since the queue was empty: a later report makes a new one.
        self._queues.pop(node, None)

    async def _show(self, node: str, report: ProgressReport) -> None:
        if report.rollout not in self._state.index.rollouts:
            return
        plan = NodeSession(self._state, self._adapters, report.rollout, node).node_plan()
        able = (spec.kind for spec in plan.isolate if Capability.PROGRESS_REPORTS in spec.capabilities)
        for kind in dict.fromkeys(able):
            with adapter_errors(f"isolator {kind}"):
                isolator = self._adapters.isolators[kind]
                if isinstance(isolator, SupportsProgressReports):
                    await isolator.report(self._state.host(node), report)


def _transition_text(event: PhaseMoved, took_s: float) -> str:
    if event.failure is not None:
        return f"{event.failure.step}: {event.failure.message}"
    if event.trigger in (Trigger.ADMITTED, Trigger.ROLLBACK_ORDERED):
        return f"{event.rollout}, attempt {event.attempt}: isolation begins"
    took = f"{event.trigger.value} in {format_duration(took_s)}"
    return f"{took}: {event.text}" if event.text else took


def _step_kind(event: StepRecorded) -> ProgressKind | None:
    record: StepRecord = event.record
    if record.action is StepAction.APPLY and record.state is StepState.BUSY:
        return ProgressKind.BLOCKED
    if record.action is StepAction.REVERT and record.state is StepState.OK and event.isolated is False:
        return ProgressKind.RETURNED
    return None
