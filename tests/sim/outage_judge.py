"""Judges the outages of nodes that several rollouts share: who begins, and when the node returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from machines.model.events import Event, PhaseMoved, StepRecorded
from machines.model.plan import Plan
from machines.model.step_record import StepAction, StepRecord, StepState
from machines.states import IN_FLIGHT_PHASES, NEW_ATTEMPT, Phase

Place = tuple[str, str]
"""Rollout and node."""


@dataclass(slots=True)
class _Attempt:
    """What was committed of the latest attempt of a node."""

    phase: Phase
    is_isolated: bool = False
    is_leaving: bool = False
    checks: dict[str, StepRecord] = field(default_factory=dict)


class OutageJudge:
    """Gets every commit, and what the world sees of nodes that come back."""

    def __init__(self, plans: Mapping[str, Plan], report_violation: Callable[[str], None]) -> None:
        self._plans = plans
        self.on_joined: Callable[[], None] = lambda: None
        self._report_violation = report_violation
        self._attempts: dict[str, dict[str, _Attempt]] = {}
        """By node, then by rollout: a fleet of 100,000 must not be searched for each event."""
        self.joined: set[Place] = set()
        """The attempts that began in the outage of another."""

    def on_commit(self, events: Sequence[Event]) -> None:
        """Hear what was committed."""
        for event in events:
            if isinstance(event, PhaseMoved):
                self._on_transition(event)
            elif isinstance(event, StepRecorded):
                self._on_step(event)

    def on_back(self, node: str) -> None:
        """Hear that a node is back in service: nobody may hold its isolation but who is leaving it."""
        for rollout, attempt in self._attempts.get(node, {}).items():
            holds = attempt.is_isolated and not attempt.is_leaving
            if holds and attempt.phase in IN_FLIGHT_PHASES:
                self._report_violation(f"{node} came back while {rollout} is {attempt.phase} on it")

    def on_run_started(self, rollout: str, node: str) -> None:
        """Hear that a playbook begins: the others on the node must have passed their checks."""
        for other, attempt in self._attempts.get(node, {}).items():
            if other == rollout or attempt.phase not in IN_FLIGHT_PHASES:
                continue
            if attempt.phase is not Phase.VERIFYING:
                self._report_violation(f"{rollout} runs on {node} while {other} is {attempt.phase}")
            elif (failed := self._failed_check(other, attempt)) is not None:
                self._report_violation(f"{rollout} runs on {node}, where {failed} of {other} has not passed")

    def was_shared(self, node: str) -> bool:
        """Return whether an attempt on the node ever joined the outage of another."""
        return any(name == node for _, name in self.joined)

    def is_held_by_others(self, rollout: str, node: str) -> bool:
        """Return whether another rollout holds the isolation of the node."""
        attempts = self._attempts.get(node, {})
        return any(each.is_isolated for other, each in attempts.items() if other != rollout)

    def _on_transition(self, event: PhaseMoved) -> None:
        attempts = self._attempts.setdefault(event.node, {})
        before = attempts.get(event.rollout)
        if event.trigger not in NEW_ATTEMPT and before is not None:
            before.phase = event.target
            return
        is_isolated = before is not None and before.is_isolated
        others = [each for rollout, each in attempts.items() if rollout != event.rollout]
        attempts[event.rollout] = _Attempt(event.target, is_isolated)
        if any(each.is_isolated and each.phase in IN_FLIGHT_PHASES for each in others):
            self.joined.add((event.rollout, event.node))
            self.on_joined()

    def _on_step(self, event: StepRecorded) -> None:
        record = event.record
        attempt = self._attempts.get(record.node, {}).get(record.rollout)
        if attempt is None:
            return
        if record.action is StepAction.CHECK:
            attempt.checks[record.step] = record
        if record.action in (StepAction.REVERT, StepAction.APPLY):
            attempt.is_leaving = record.action is StepAction.REVERT
        if event.isolated is not None:
            attempt.is_isolated = event.isolated

    def _failed_check(self, rollout: str, attempt: _Attempt) -> str | None:
        """Return a check of an attempt that says that its change is not well, None when all are."""
        for spec in self._plans[rollout].verify:
            record, before = attempt.checks.get(spec.name), attempt.checks.get(f"baseline.{spec.name}")
            if record is None or record.state in (StepState.OK, StepState.INTENDED):
                continue
            was_broken = before is not None and before.state is StepState.FAILED
            if not (spec.baseline and was_broken) and not spec.accepts_unknown:
                return spec.name
        return None
