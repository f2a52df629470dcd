"""One walk of the fleet in virtual time: the scheduler and the workflow, without the engine.

How it works.  The walk repeats what the daemon does: decide, apply the decision's events, ask next_action()
for each node at work, record its result when its time is over.  Only time is not waited for: the next instant
is that of the next result, or when the decision says that time alone may change it.  It has no rule of its
own; what it adds are the answers of the world: how long a step takes, who votes when, and that nodes are
healthy.  Runs wait for a slot of the runner by the queue that the runner has (SlotQueue).

A step that changes no slot, such as a check, asks for no new decision: decide() looks at facts, and none that
it looks at has changed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from machines.facts.dry_runs import DryRunResult
from machines.facts.fleet_facts import IsolationProgress
from machines.facts.node_work import in_flight_on, is_isolated
from machines.facts.projection import Projection
from machines.forecast.agenda import Agenda
from machines.forecast.approvals import Approvals
from machines.forecast.assumed_health import assume_healthy
from machines.forecast.attempt import Attempt, Lane, NodeKey, WalkedOutages, kind_of, later_by
from machines.forecast.model import Assumptions, StepDurations
from machines.forecast.pending_jobs import PendingJobs
from machines.forecast.timeline import Timeline
from machines.model.actions import (
    Action,
    CompleteOrder,
    Isolate,
    NoAction,
    Revert,
    RunCheck,
    StopRun,
    Transition,
    Wait,
    starts_run,
)
from machines.model.decision import (
    Admit,
    AwaitTurn,
    CheckIfCurrent,
    CompareStaged,
    Decision,
    DocumentPilot,
    DryRun,
    EndFreeze,
    EndHold,
    NextRound,
    OpenGate,
    Prepare,
    ProbeTraffic,
    Requeue,
    RestartSoak,
    RollBack,
    SkipQuarantined,
)
from machines.model.events import Event, NodeOrdered, PhaseMoved, StepRecorded
from machines.model.preparation import StagedComparison
from machines.model.rollout import FailureCode, Target
from machines.model.step_record import Failed, Ok, StepAction, StepRecord
from machines.model.traffic import TrafficResult
from machines.scheduler.admission import MAX_STARTS
from machines.scheduler.decide import decide
from machines.scheduler.decided_events import events_of
from machines.scheduler.isolation_aborts import record_giving_way
from machines.scheduler.membership import carry_over
from machines.scheduler.shared_outage import next_shared_action
from machines.states import IN_FLIGHT_PHASES, Outcome, Phase, Trigger
from machines.workflow.next_action import SLOT_STEP
from machines.workflow.outage import OUTAGE_STEP, held_isolators
from machines.workflow.phase_transitions import transition
from machines.workflow.recording import RecordedAction, intent_of, is_isolated_after, record_of
from machines.workflow.situation import Situation
from machines.workflow.steps import StepPrefix, names_after

HORIZON_S = 366 * 86_400.0
"""How far ahead a walk goes: a plan that needs more than a year ends on no useful date."""

MAX_IDLE_DECISIONS = 1_000
"""Decisions in a row, each at its own instant, that change nothing: more than the days of the horizon."""

MAX_ANSWERS = 10_000
"""Answers that nodes share: some ten for each kind of node; with durations of their own none is shared."""

_ASKED_AGAIN = (OpenGate, RollBack, Requeue, SkipQuarantined, EndHold, EndFreeze, RestartSoak)
"""Commands after whose events something else may be due at the same instant."""


@dataclass(slots=True)
class Walk:
    """A walk over its own fork of the facts, which it changes.

    `choose` takes one of the durations that a step may have.  `records` are those of the nodes at work at the
    start.
    """

    index: Projection
    now: float
    durations: StepDurations
    choose: Callable[[Sequence[float]], float]
    assumptions: Assumptions = Assumptions()
    records: Mapping[NodeKey, Sequence[StepRecord]] = field(default_factory=dict)
    later: Sequence[tuple[float, Event]] = ()
    """What else happens, and when."""
    failing: frozenset[NodeKey] = frozenset()
    """Nodes whose next run of a playbook fails once."""
    approvals: Approvals = field(init=False)
    timeline: Timeline = field(init=False)
    agenda: Agenda = field(init=False)
    outages: WalkedOutages = field(init=False)
    unhealthy: int = 0
    """How many nodes were not known to be up."""
    began_at: float = field(init=False)
    is_cut_off: bool = False
    """Whether it ended at the horizon."""
    _current: dict[NodeKey, Attempt] = field(default_factory=dict)
    _lanes: dict[NodeKey, Lane] = field(default_factory=dict)
    _busy_until: dict[NodeKey, float] = field(default_factory=dict)
    _jobs: PendingJobs = field(init=False)
    _ended_records: dict[NodeKey, tuple[StepRecord, ...]] = field(default_factory=dict)
    _answers: dict[tuple[object, ...], Action] = field(default_factory=dict)
    _to_fail: set[NodeKey] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.began_at = self.now
        self.agenda = Agenda(self.assumptions, self.choose)
        self.outages = WalkedOutages(self.now)
        self._jobs = PendingJobs(self.index, self.agenda, self.durations)
        self.approvals = Approvals(self.assumptions.approve_after_s)
        self.unhealthy = assume_healthy(self.index, self.now)
        # Each group is asked again, so that the walk learns why it waits.
        self.index.pending_groups.mark_all()
        self.timeline = Timeline(self.now)
        self.timeline.prepare(self.index)
        self._to_fail = set(self.failing)
        for at, event in self.later:
            self.agenda.add(max(at, self.now), partial(self._happen, event))
        # Those that share an outage in the order in which they joined it.
        for target in sorted(self.index.needing_driver(), key=lambda each: each.admitted_at):
            if target.phase in IN_FLIGHT_PHASES:
                attempt = self._begin_attempt(target, target.admitted_at or target.since)
                attempt.is_running = True

    def run(self) -> None:
        """Walk until nothing more happens, or the horizon."""
        idle, wake_at = 0, self._decide()
        while idle < MAX_IDLE_DECISIONS:
            now = min(
                self.agenda.next_at(),
                math.inf if wake_at is None else wake_at,
                self.approvals.next_due(),
            )
            if now > self.began_at + HORIZON_S:
                self.is_cut_off = not math.isinf(now)
                return
            self.now = now
            changed = wake_at is not None and self.now >= wake_at
            idle = idle + 1 if changed else idle
            for happen in self.agenda.take_due(now):
                changed, idle = happen(now) or changed, 0
            for event in list(self.approvals.due_events(self.index, self.now)):
                self.index.apply(event)
                changed, idle = True, 0
            if changed:
                wake_at = self._decide()

    def again(self, index: Projection, assumptions: Assumptions | None = None) -> Walk:
        """Return the walk over other facts of the same instant, to its end."""
        same = (self.records, self.later, self.failing)
        assumptions = assumptions or self.assumptions
        other = Walk(index, self.began_at, self.durations, self.choose, assumptions, *same)
        other.run()
        return other

    # -- decisions

    def _decide(self) -> float | None:
        """Decide and carry out, until nothing is left to do at this instant; return when to decide again."""
        while True:
            self.index.advance(self.now)
            decision = decide(self.index, self.now)
            self.index.record_backoffs(decision.backoffs)
            for group in events_of(self.index, decision, self.now, lambda causes: ""):
                for event in group.events:
                    self._apply(event)
            is_asked_again = self._carry_out(decision)
            new = (
                each for each in self.index.needing_driver() if (each.rollout, each.node) not in self._lanes
            )
            # Runs that have begun before the walk have their slots in the order in which they asked.
            for target in sorted(new, key=self._asked_at):
                is_asked_again |= self._begin(target)
            for key in self.outages.take_woken(self._lanes):
                is_asked_again |= self._drive(key)
            self.approvals.ask(self.index, self.now)
            self.timeline.note(self.index, decision, self.now)
            # What only starts nodes leaves less to start, so the same question again has no other answer,
            # unless these were as many as one decision may start.
            is_asked_again |= sum(isinstance(each, Admit) for each in decision.commands) >= MAX_STARTS
            if not is_asked_again and not any(isinstance(each, _ASKED_AGAIN) for each in decision.commands):
                return decision.wake_at

    def _apply(self, event: Event) -> None:
        self.index.apply(event)
        if not isinstance(event, PhaseMoved):
            return
        key = (event.rollout, event.node)
        if event.trigger in (Trigger.ADMITTED, Trigger.ROLLBACK_ORDERED):
            target = self.index.target(*key)
            self._begin_attempt(target, self.now)
            self.timeline.take_slots(self.index, target, self.now)
        elif event.source in IN_FLIGHT_PHASES and event.target not in IN_FLIGHT_PHASES:
            attempt = self._current[key]
            attempt.ends_at, attempt.has_failed = self.now, event.target is Phase.FAILED
            self.timeline.free_slots(self.index.target(*key), self.now)

    def _begin_attempt(self, target: Target, at: float) -> Attempt:
        key = (target.rollout, target.node)
        first = next(iter(in_flight_on(self.index, target.node)), target)
        starter = None if first.rollout == target.rollout else self._current[first.rollout, target.node]
        node, kinds = self.index.nodes[target.node], self.index.rollout(target.rollout).plan.run_kinds
        attempt = self._current[key] = Attempt(
            *key,
            "",
            at,
            target.wave,
            node.team,
            tuple(pool.id for pool in self.index.pools_for(*key)),
            {rule.name: rule.parallel or 1 for rule in self.index.bounds_of(node, kinds)},
            is_rollback=target.rolling_back,
            outage_of=starter,
            needed_s=self.index.expected_s(target.rollout),
            waits=self.timeline.waits_of(key, self.now),
        )
        self.agenda.begin_attempt(attempt)
        return attempt

    def _asked_at(self, target: Target) -> float:
        records = self.records.get((target.rollout, target.node), ())
        return records[-1].at if records and records[-1].state == "intended" else self.now

    def _carry_out(self, decision: Decision) -> bool:
        """Carry out the commands without events; return whether their results are known at once."""
        is_known = False
        for command in decision.commands:
            match command:
                case DryRun():
                    result = DryRunResult(command.rollout, command.node, succeeds=True, at=self.now)
                    self.index.record_dry_run(result)
                    is_known = True
                case CompareStaged():
                    whole = StagedComparison(command.rollout, command.node, self.now)
                    self.index.record_comparison(whole)
                    is_known = True
                case AwaitTurn():
                    self.index.record_train_wait(command.rollout, command.node, self.now)
                case ProbeTraffic():
                    is_known |= self._probe_traffic(command)
                case CheckIfCurrent():
                    self._jobs.check_if_current(command, self.now)
                case Prepare():
                    is_known |= self._jobs.prepare(command, self.now)
                case NextRound():
                    # Nodes in service are healthy here, so their checks would tell nothing.
                    self.index.record_next_round(replace(command, at=math.inf))
                case DocumentPilot():
                    self._jobs.document_pilot(command, self.now)
                    is_known = True
                case _:
                    pass
        return self._pass_on_slots(decision) or is_known

    def _pass_on_slots(self, decision: Decision) -> bool:
        """Pass on which isolations give way, and which have a slot again; return whether any has ended."""
        is_relevant = False
        for key in sorted(record_giving_way(self.index, decision)):
            # A step that has begun continues to its end.
            if key in self._lanes and isinstance(self._lanes[key].action, Wait):
                is_relevant |= self._drive(key)
        return is_relevant

    def _probe_traffic(self, command: ProbeTraffic) -> bool:
        key = (command.rollout, command.node)
        if key not in self._busy_until:
            busy_s = self.assumptions.busy_s
            self._busy_until[key] = self.now + ((busy_s(*key) if busy_s is not None else None) or 0.0)
        self.index.record_traffic(TrafficResult(*key, self.now < self._busy_until[key], self.now))
        return True

    # -- nodes at work

    def _begin(self, target: Target) -> bool:
        """Begin to drive a node; return whether a decision follows at once."""
        key = (target.rollout, target.node)
        records = tuple(self._records_of(key))
        lane = self._lanes[key] = Lane(self.index.plan_for(target), records, self.now)
        attempt = self._current.get(key)
        is_running = attempt is not None and attempt.is_running
        # A node that is to fail takes other steps than those of its kind.
        if not records and not is_running and not target.rolling_back and key not in self._to_fail:
            lane.kind = kind_of(target, lane.plan)
        action = self._next_action(target, lane)
        if is_running and records and not isinstance(action, Transition | Wait | NoAction | CompleteOrder):
            # It has begun before the walk did: only the rest of its time is left.
            latest = records[-1]
            began_at = latest.began_at if latest.state == "intended" else latest.at
            return self._start(key, target, lane, action, min(began_at, self.now))
        return self._drive(key)

    def _next_action(self, target: Target, lane: Lane) -> Action:
        """Return the next action; nodes of one kind that have taken as long so far share the answer."""
        key = (target.rollout, target.node)
        gives_way = self.index.abort_causes(*key) or self.index.over_budget_reason(*key)
        if lane.kind is None or gives_way or target.order is not None or self._may_share(target):
            return self._ask_next_action(target, lane)
        question = (lane.kind, lane.passed, round(self.now - lane.began_at, 3))
        action = self._answers.get(question)
        if action is not None:
            return later_by(action, self.now)
        action = self._ask_next_action(target, lane)
        if len(self._answers) < MAX_ANSWERS:
            self._answers[question] = later_by(action, -self.now)
        return action

    def _may_share(self, target: Target) -> bool:
        """Return whether the node is verified in an outage that others share or may join."""
        in_train = self.index.train_of(target.rollout) is not None
        return target.phase is Phase.VERIFYING and (in_train or bool(self._sharing(target)))

    def _sharing(self, target: Target) -> list[Target]:
        """Return the others that are at work on the node or keep it isolated."""
        others = (each for each in self.index.targets_on(target.node) if each.rollout != target.rollout)
        return [each for each in others if each.isolated or each.phase in IN_FLIGHT_PHASES]

    def _ask_next_action(self, target: Target, lane: Lane) -> Action:
        began = target.since + (target.downtime_s if target.phase is Phase.ISOLATING else 0.0)
        situation = Situation(
            lane.plan,
            target,
            lane.records,
            self.now,
            max(0.0, self.now - began),
            abort=self.index.abort_causes(target.rollout, target.node),
            over_budget=self.index.over_budget_reason(target.rollout, target.node),
            failed_before=self.index.has_failed(target.rollout, target.node, target.attempt - 1),
        )
        action, has_moved = next_shared_action(self.index, situation, self._held(target, lane))
        if has_moved:
            self.outages.moved.add(target.node)
        return action

    def _held(self, target: Target, lane: Lane) -> Mapping[str, Any]:
        """Return which isolators of the attempt others have in effect on the node."""
        keys = [(each.rollout, each.node) for each in self._sharing(target) if each.isolated]
        holders = [(self.index.rollout(key[0]).plan.isolate, self._records_of(key)) for key in keys]
        return held_isolators(lane.plan.isolate, holders)

    def _records_of(self, key: NodeKey) -> Sequence[StepRecord]:
        if key in self._lanes:
            return self._lanes[key].records
        return self._ended_records.get(key) or tuple(self.records.get(key, ()))

    def _drive(self, key: NodeKey) -> bool:
        """Take the node's steps that need no time; return whether a slot or a wave may have changed."""
        lane, is_relevant = self._lanes[key], False
        while True:
            target = self.index.target(*key)
            action = self._next_action(target, lane)
            if isinstance(action, Wait) and action.step == OUTAGE_STEP:
                self.outages.wait(key, self.now)
            elif (since := self.outages.resume(key)) is not None:
                sharing = ((each.rollout, each.node) for each in self._sharing(target))
                others = [self._current[each] for each in sharing if each in self._lanes]
                self.agenda.resume(self._current[key], since, others, self.now)
            match action:
                case NoAction():
                    del self._lanes[key]
                    self._ended_records[key] = lane.records
                    return True
                case Transition():
                    if self._sharing(target):
                        self.outages.moved.add(target.node)
                    self._transition(target, action)
                    lane.passed += ((round(self.now - lane.began_at, 3), ""),)
                    is_relevant |= self.index.target(*key).phase not in IN_FLIGHT_PHASES
                case CompleteOrder():
                    self._complete_order(target, action)
                    is_relevant = True
                case Wait():
                    lane.action = action
                    if target.phase is Phase.ISOLATING:
                        progress = IsolationProgress(target.attempt, action.step == SLOT_STEP)
                        self.index.record_isolation(*key, progress)
                    if not math.isinf(action.until):
                        resume = partial(self._resume, key, lane, action)
                        self.agenda.add(max(action.until, self.now), resume)
                    return is_relevant or target.node in self.outages.moved
                case _:
                    is_relevant |= self._start(key, target, lane, action, self.now)
                    return is_relevant or target.node in self.outages.moved

    def _resume(self, key: NodeKey, lane: Lane, action: Action, now: float) -> bool:
        # An abort has driven it on meanwhile.
        return self._lanes.get(key) is lane and lane.action is action and self._drive(key)

    def _happen(self, event: Event, now: float) -> bool:
        self.index.apply(event)
        return True

    def _start(self, key: NodeKey, target: Target, lane: Lane, action: Action, began_at: float) -> bool:
        assert not isinstance(action, NoAction | Transition | CompleteOrder | Wait)
        if isinstance(action, StopRun):
            lane.add(record_of(action.record, Failed("", code=FailureCode.INTERFERENCE), self.now))
            return self._drive(key)
        record = intent_of(action, target, began_at)
        self._record_isolation(target, record, is_isolated_after(action, None))
        lane.action = action
        durations = self._durations_of(target, action, record)
        end = partial(self._finish, key, lane, action, record)
        attempt = self._current.get(key)
        if starts_run(action):
            is_slowed = record.action is StepAction.RUN
            self.agenda.queue_run(durations, attempt, end, at=began_at, now=self.now, is_slowed=is_slowed)
        else:
            self.agenda.begin_step(durations, attempt, end, at=began_at, now=self.now)
        return False

    def _durations_of(self, target: Target, action: RecordedAction, record: StepRecord) -> Sequence[float]:
        key = (target.rollout, target.node)
        match action:
            # Only the first attempt of an outage isolates the node, and only the last one returns it.
            case Isolate(spec=spec) | Revert(spec=spec) if spec.name in self._held(target, self._lanes[key]):
                return (0.0,)
            case RunCheck(spec=spec) if names_after(StepPrefix.AFTER, record.step):
                return self.durations(*key, spec.name, record.action)
            case _:
                return self.durations(*key, record.step, record.action)

    def _finish(
        self, key: NodeKey, lane: Lane, action: RecordedAction, record: StepRecord, now: float
    ) -> bool:
        if self._lanes.get(key) is not lane or lane.action is not action:
            return False  # an abort has ended it
        result: Ok | Failed = Ok()
        if key in self._to_fail and record.action is StepAction.RUN:
            self._to_fail.discard(key)
            result = Failed("")
        lane.add(record_of(record, result, now))
        self._record_isolation(self.index.target(*key), record, is_isolated_after(action, result))
        return self._drive(key)

    def _record_isolation(self, target: Target, record: StepRecord, isolated: bool | None) -> None:
        if isolated is None or isolated is target.isolated:
            return
        was_isolated = is_isolated(self.index, target.node)
        self.index.apply(StepRecorded(record, isolated))
        if not was_isolated:
            self.outages.isolate(target.node, self.now)
        elif not is_isolated(self.index, target.node):
            self.outages.end(target.node, self.now)
        if self._sharing(target):
            self.outages.moved.add(target.node)

    def _transition(self, target: Target, action: Transition) -> None:
        moved = transition(
            target,
            action.trigger,
            self.now,
            outcome=action.outcome,
            step=action.step,
            not_before=action.not_before,
            code=action.code,
        )
        for event in (moved, *carry_over(self.index, moved, lambda causes: "")):
            self._apply(event)

    def _complete_order(self, target: Target, action: CompleteOrder) -> None:
        assert target.order_by is not None
        key = (target.rollout, target.node)
        self.index.apply(NodeOrdered(*key, None, target.order_by, "", self.now))
        if action.succeeded and target.phase is Phase.FAILED:
            after = self.index.target(*key)
            self._apply(transition(after, Trigger.SKIPPED, self.now, outcome=Outcome.SKIPPED))
