"""The checker: the oracle, the core's invariants, and the facts of the simulated world.

The oracle gets the observations and the committed events in their order.  The
rules here need the state of the world:
whether a run was doubled, whether a node that is said to be changed is changed,
whether a node was put back as late although no daemon was there to see.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

from machines.model.causes import Cause, CauseCode
from machines.model.events import (
    DeadlineExtended,
    Event,
    GateOpened,
    PhaseMoved,
    RolloutEnded,
    StepRecorded,
    TargetsJoined,
)
from machines.model.rollout import FailureCode
from machines.model.step_record import StepAction
from machines.states import Outcome, Phase, Trigger
from rolloutd.ports import GuardState
from rolloutd.texts.cause_text import describe_causes
from tests import oracle
from tests.sim.budget_judge import BudgetJudge
from tests.sim.change_judge import ChangeJudge
from tests.sim.clean_judge import CleanJudge
from tests.sim.cluster_judge import ClusterJudge
from tests.sim.outage_judge import OutageJudge
from tests.sim.prepare_judge import PrepareJudge
from tests.sim.record_judge import RecordJudge
from tests.sim.supersede_judge import SupersedeJudge
from tests.sim.work_judge import WorkJudge
from tests.support.oracle_feed import EFFECT_KINDS, OracleFeed

if TYPE_CHECKING:
    from tests.sim.sim_node import SimGuard, SimNode

ISOLATION_TIMED_OUT = "not isolated within"
"""How a put-back begins whose reason is that the isolation took too long."""

ROUNDING_S = 0.001
"""Instants of this century, as floats, are exact to a microsecond."""

JUMP_S = 1.0
"""The wall clock was set if it and the monotonic clock differ by more."""

ABORT_CONTINUED = describe_causes((Cause(CauseCode.ABORT_CONTINUED),))
"""What is said of an abort that another process has begun."""

UNHEALTHY_GRACE_S = 300.0
"""A soaking node that turns red was unwell at some time so shortly before."""


class Checker(OracleFeed):
    """Gets every event and collects violations."""

    def __init__(
        self, now: Callable[[], float], monotonic: Callable[[], float], epoch: Callable[[], int]
    ) -> None:
        super().__init__(now)
        self.nodes: Mapping[str, SimNode] = {}
        self.guards: Mapping[tuple[str, str, int], SimGuard] = {}
        self.unhealthy_until: dict[str, float] = {}
        """Until when, by the monotonic clock, a node was unwell."""
        self.uncertain_runs: set[str] = set()
        self._monotonic = monotonic
        self._epoch = epoch
        self.records = RecordJudge()
        self.preparations = PrepareJudge(self.plans, self.report_violation, monotonic)
        self.cleaning = CleanJudge(self.plans, self.report_violation)
        self.superseded = SupersedeJudge(self.plans, self.report_violation)
        self.outages = OutageJudge(self.plans, self.report_violation)
        self.changes = ChangeJudge(self.report_violation)
        seen = lambda: self.oracle.observations  # noqa: E731  # the oracle replaces them
        self.clusters = ClusterJudge(self.plans, self.report_violation, monotonic, seen)
        self.work = WorkJudge(now, self.report_violation)
        self.oracle.has_other_work = self.work.has_other_work
        self.budgets = BudgetJudge(lambda: self.oracle, now, monotonic, self.report_violation)
        self._started_runs: dict[str, list[str]] = {}
        self._succeeded_runs: set[str] = set()
        self._maybe_isolated: set[tuple[str, str]] = set()
        self._rollback_attempts: set[tuple[str, str, int]] = set()
        self._idle_probes: dict[tuple[str, str, int], bool] = {}
        self._undo_began_at: dict[tuple[str, str, int], float] = {}
        self._admitted_at: dict[tuple[str, str, int], float] = {}
        self._step_times: dict[tuple[str, str, int], list[float]] = {}
        self._downtimes_s: dict[tuple[str, str, int], float] = {}
        self._extended_s: dict[tuple[str, str, int], float] = {}
        self._isolated_from: dict[tuple[str, str, int], float] = {}
        self._isolated_until: dict[tuple[str, str, int], float] = {}
        """When an isolation began and when its undo did, by the monotonic clock."""
        self._last_start = 0.0
        """When the latest daemon started, by the monotonic clock."""
        self._absences: list[tuple[float, float]] = []
        """When no daemon lived, by the monotonic clock."""

    def feed_oracle(self, kind: str, **fields: Any) -> None:
        """Pass one entry to the oracle."""
        for text in self.oracle.check_entry({"kind": kind, "at": self._now(), **fields}):
            # One that we may have isolated has its slot already.
            if (
                text.endswith(oracle.NOT_SEEN_UP)
                and (fields["rollout"], fields["node"]) in self._maybe_isolated
            ):
                continue
            self.report_violation(f"{kind}: {text}")
        if kind in ("saw", "settings"):
            self.budgets.look()

    # -- what the world saw

    def on_run_started(
        self,
        handle: str,
        node: str,
        rollout: str,
        isolating_rollouts: set[str],
        missing_isolators: Sequence[str],
    ) -> None:
        """Hear that a playbook begins on a node."""
        slot = handle.partition("~")[0].rpartition(".")[0]
        earlier_runs = self._started_runs.setdefault(slot, [])
        if handle in earlier_runs:
            self.report_violation(f"run {handle} began twice")
        for earlier in earlier_runs:
            if earlier in self._succeeded_runs and earlier not in self.uncertain_runs:
                self.report_violation(f"run {handle} repeats {earlier}, which had ended well")
        earlier_runs.append(handle)
        for kind in missing_isolators:
            self.report_violation(f"run {handle} begins although {node} is not isolated by {kind}")
        self.feed_oracle("maintain", rollout=rollout, node=node)
        self.outages.on_run_started(rollout, node)

    def on_run_ended(self, node: str, rollout: str) -> None:
        """Hear that a playbook has no process left on a node."""
        self.feed_oracle("maintained", rollout=rollout, node=node)

    def on_run_succeeded(self, handle: str) -> None:
        """Hear that a run ended well and could say so."""
        self._succeeded_runs.add(handle)

    def on_probe_result(self, rollout: str, node: str, attempt: int, *, idle: bool) -> None:
        """Hear what a probe saw of a node's traffic."""
        self._idle_probes[rollout, node, attempt] = idle
        self.feed_oracle("probe", rollout=rollout, node=node, idle=idle)

    def is_in_progress(self, rollout: str, node: str) -> bool:
        """Say whether a rollout is at work on a node."""
        return rollout in self.oracle.in_progress.get(node, [])

    def may_be_isolated(self, node: str) -> bool:
        """Say whether some rollout's records have the node isolated."""
        return any(name == node for _, name in self._maybe_isolated)

    def on_drain(self, rollout: str, node: str, attempt: int) -> None:
        """Hear that a node's work is driven off: only what its traffic probes found idle in this attempt."""
        if not self.plans[rollout].traffic or (rollout, node, attempt) in self._rollback_attempts:
            return
        if not self._idle_probes.get((rollout, node, attempt), False):
            self.report_violation(
                f"{rollout} drove work off {node}, which was not seen idle in attempt {attempt}"
            )

    # -- what was committed

    def on_commit(self, events: Sequence[Event]) -> None:
        """Hear what was committed."""
        self.records.on_commit(events)
        self.preparations.on_commit(events)
        self.cleaning.on_commit(events)
        self.superseded.on_commit(events)
        self.outages.on_commit(events)
        self.work.on_commit(events)
        self.changes.on_commit(events, self.nodes)
        self.clusters.on_commit(events, self.nodes)
        decided = {event.rollout for event in events if _is_decided(event)}
        if len(decided) > 1:
            self.report_violation(f"one refused row would stop {' and '.join(sorted(decided))}")
        for event in events:
            self.on_event(event)
        self.budgets.on_commit(events)

    def on_event(self, event: Event) -> None:
        """Hear one committed event."""
        if isinstance(event, PhaseMoved):
            self._on_transition(event)
            return
        super().on_event(event)
        match event:
            case TargetsJoined():
                for target in event.targets:
                    if target.node not in self.nodes:
                        self.report_violation(f"{target.node} joins as new and is another name of a machine")
            case DeadlineExtended():
                self._on_deadline_extended(event)
            case StepRecorded(record=record, isolated=isolated):
                place = (record.rollout, record.node)
                self._record_step_time((*place, record.attempt), record.at)
                if record.action is StepAction.REVERT:
                    self._undo_began_at.setdefault((*place, record.attempt), record.at)
                    self._isolated_until.setdefault((*place, record.attempt), self._monotonic())
                if isolated is not None:
                    (self._maybe_isolated.add if isolated else self._maybe_isolated.discard)(place)
            case _:
                pass

    def _on_transition(self, event: PhaseMoved) -> None:
        self._compare_with_guard(event)
        attempt = event.rollout, event.node, event.attempt
        if event.target is Phase.ISOLATING:
            self._admitted_at[attempt] = event.at
            self._isolated_from[attempt] = self._monotonic()
            self._record_step_time(attempt, event.at)
            if event.rolling_back:
                self._rollback_attempts.add(attempt)
        super().on_event(event)
        if event.trigger in EFFECT_KINDS:
            self._compare_with_world(event)

    def _compare_with_guard(self, event: PhaseMoved) -> None:
        """Judge the end of a guarded change: it stays if it was confirmed, and is gone if it was restored."""
        if event.source is not Phase.MAINTAINING or event.trigger is Trigger.LEFT:
            return
        if self.plans[event.rollout].guard is None:
            return
        guard = self.guards.get((event.rollout, event.node, event.attempt))
        state = GuardState.NONE if guard is None else guard.state
        if event.target is Phase.VERIFYING and state is not GuardState.CONFIRMED:
            self.report_violation(f"{event.node} goes on with a guard that is {state}")
        if event.target is Phase.FAILED and state is GuardState.ARMED:
            self.report_violation(f"{event.node} fails with a guard that is armed")
        is_restored = event.failure is not None and event.failure.code is FailureCode.RESTORED_ITSELF
        if is_restored and (guard is None or self.nodes[event.node].version != guard.version):
            self.report_violation(f"{event.node} is said to have restored itself and is not as before")

    def _record_step_time(self, attempt: tuple[str, str, int], at: float) -> None:
        # The clock may have been set back since `at`, and the entry in the audit has the commit's instant.
        self._step_times.setdefault(attempt, []).append(min(at, self._now()))

    def _on_deadline_extended(self, event: DeadlineExtended) -> None:
        attempt, times = next(
            (key, times)
            for key, times in reversed(self._step_times.items())
            if key[:2] == (event.rollout, event.node)
        )
        # The latest sign of a daemon, not the greatest time: the clock may have been set back since.
        if event.downtime_s - self._extended_s.get(attempt, 0.0) > event.at - times[-1] + ROUNDING_S:
            self.report_violation(f"{event.node}: its deadline was extended by more than the downtime")
        self._extended_s[attempt] = event.downtime_s
        times.append(event.at)
        # An undo that began at the old deadline ends after the downtime: the new deadline is not its.
        if attempt not in self._undo_began_at:
            self._downtimes_s[attempt] = event.downtime_s

    def on_daemon_start(self, lived_until: float | None) -> None:
        """Take note that no daemon lived from an instant until now."""
        self._last_start = self._monotonic()
        self.feed_oracle("start")
        if lived_until is not None:
            self._absences.append((lived_until, self._monotonic()))

    def _judge_absence(self, attempt: tuple[str, str, int], limit_s: float, by_wall_s: float) -> None:
        """Accuse a put-back whose isolation had its time only because no daemon lived in it."""
        began = self._isolated_from[attempt]
        ended = self._isolated_until.get(attempt, self._monotonic())
        if abs(by_wall_s - (ended - began)) > JUMP_S:
            return  # the clock was set meanwhile
        absent_s = sum(max(0.0, min(ended, end) - max(began, start)) for start, end in self._absences)
        if ended - began - absent_s < limit_s - JUMP_S:
            self.report_violation(f"{attempt[1]} was put back because no daemon was there")

    def _compare_with_world(self, event: PhaseMoved) -> None:
        machine = self.nodes[event.node]
        # A node whose rollback is aborted is done again without a check, and may have drifted since.
        if (
            event.outcome is Outcome.CHANGED
            and event.trigger is Trigger.VERIFIED
            and machine.version != "new"
            # There is one version for all rollouts: another one of the train may have taken it back.
            and not self.outages.was_shared(event.node)
        ):
            self.report_violation(f"{event.node} is said to be changed and is not")
        # A node that a superseded rollout finished is taken over without a check, and may have drifted since.
        is_checked = event.outcome is Outcome.ALREADY_CURRENT and event.text.startswith("check mode")
        if is_checked and machine.version != "new":
            self.report_violation(f"{event.node} is said to need nothing and is not current")
        if event.trigger is Trigger.ADMITTED and (checks := machine.checks_of(self._epoch())):
            self.report_violation(f"{event.node} is admitted while {', '.join(checks)} runs")
        is_isolated = event.rollout in machine.isolating_rollouts
        is_left = self.outages.is_held_by_others(event.rollout, event.node)
        if event.trigger is Trigger.VERIFIED and is_isolated and not is_left:
            self.report_violation(f"{event.node} is said to be done and is still isolated")
        if event.trigger is Trigger.ISOLATION_ABORTED and event.text == ABORT_CONTINUED:
            began = self._isolated_until.get((event.rollout, event.node, event.attempt), 0.0)
            if self._last_start < began:
                self.report_violation(f"{event.node}: the daemon that put it back has forgotten why")
        if event.trigger is Trigger.ISOLATION_ABORTED and event.text.startswith(ISOLATION_TIMED_OUT):
            undo_began_at = self._undo_began_at.get((event.rollout, event.node, event.attempt), event.at)
            attempt = (event.rollout, event.node, event.attempt)
            limit_s = self.plans[event.rollout].isolate_timeout_s + self._downtimes_s.get(attempt, 0.0)
            if 0.0 <= undo_began_at - self._admitted_at.get(attempt, -limit_s) < limit_s:
                self.report_violation(f"{event.node} was put back before its deadline")
            if attempt in self._isolated_from:
                by_wall_s = undo_began_at - self._admitted_at[attempt]
                self._judge_absence(attempt, self.plans[event.rollout].isolate_timeout_s, by_wall_s)
        if event.trigger is Trigger.SOAK_CHECK_FAILED:
            is_well = machine.up and machine.available and not machine.fails_checks
            is_unhealthy = not is_well or machine.version != "new"
            if (
                not is_unhealthy
                and self.unhealthy_until.get(event.node, 0.0) < self._monotonic() - UNHEALTHY_GRACE_S
            ):
                self.report_violation(f"{event.node} was said to turn red and was well")


def _is_decided(event: Event) -> TypeGuard[PhaseMoved | GateOpened | RolloutEnded]:
    """Return whether the event is a decision of the loop about one rollout."""
    if isinstance(event, PhaseMoved):
        return event.trigger in (Trigger.ADMITTED, Trigger.ROLLBACK_ORDERED, Trigger.DRIFTED)
    return isinstance(event, GateOpened | RolloutEnded)
