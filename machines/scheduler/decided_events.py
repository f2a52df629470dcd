"""A decision as events: what its commands change, in the order and the groups in which it is committed.

What a command asks
of the shell alone, such as an observation or a probe, has no event.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby

from machines.facts.apply import rollout_of
from machines.facts.index import Index
from machines.facts.node_work import is_isolated
from machines.model.causes import Cause, CauseCode, Causes, Describe
from machines.model.decision import (
    Admit,
    Decision,
    EndFreeze,
    EndHold,
    EndRollout,
    OpenGate,
    Requeue,
    RestartSoak,
    RollBack,
    SkipQuarantined,
)
from machines.model.events import Event, GateOpened, RolloutEnded, SoakRestarted
from machines.model.reasons import Params
from machines.model.rollout import Target
from machines.scheduler.expiry import end_freeze, end_hold
from machines.scheduler.membership import target_changes
from machines.states import Outcome, Trigger
from machines.workflow.phase_transitions import transition


class GroupKind(StrEnum):
    EXPIRED = "expired"
    """Holds and freezes whose time is over."""
    SOAKS_RESTARTED = "soaks-restarted"
    DECIDED = "decided"


@dataclass(frozen=True, slots=True)
class EventGroup:
    """Events that are committed together; `rollout` is "" unless they are of one."""

    kind: GroupKind
    rollout: str
    events: tuple[Event, ...]


def events_of(index: Index, decision: Decision, now: float, describe: Describe) -> tuple[EventGroup, ...]:
    """Return what a decision changes; each group is legal after those before it.

    `index` has the facts of the decision.  A group for each rollout, in the decision's order, because a
    refused one must not stop the others.
    """
    is_over = describe((Cause(CauseCode.TIME_IS_OVER),))
    expired: list[Event] = [end_hold(each.hold, now, is_over) for each in decision.of(EndHold)]
    expired += [end_freeze(each.freeze, now, is_over) for each in decision.of(EndFreeze)]
    restarted = tuple(SoakRestarted(each.rollout, each.node, now) for each in decision.of(RestartSoak))
    groups = [
        EventGroup(GroupKind.EXPIRED, "", tuple(expired)),
        EventGroup(GroupKind.SOAKS_RESTARTED, "", restarted),
    ]
    for rollout, events in groupby(_decided(index, decision, now, describe), key=rollout_of):
        assert rollout is not None
        groups.append(EventGroup(GroupKind.DECIDED, rollout, tuple(events)))
    return tuple(group for group in groups if group.events)


def _decided(index: Index, decision: Decision, now: float, describe: Describe) -> Iterator[Event]:
    for opening in decision.of(OpenGate):
        yield GateOpened(opening.rollout, opening.gate, opening.wave, now)
    # As decide() orders them: a rollback may obey a pool of its plan that a later admission does not.
    for rollback in decision.of(RollBack):
        target = index.target(rollback.rollout, rollback.node)
        yield transition(
            target, Trigger.ROLLBACK_ORDERED, now, text=describe(_why_rolled_back(rollback, target))
        )
        # In the same commit: the next decision could start a node by its old team, without a vote of the new.
        yield from target_changes(index, target, now)
    for start in decision.of(Admit):
        target = index.target(start.rollout, start.node)
        joins = not target.isolated and is_isolated(index, start.node)
        traffic = index.traffic_of(start.rollout, start.node) if index.plan_for(target).traffic else None
        busy_s = None if traffic is None else round(traffic.busy_s, 1)
        yield transition(target, Trigger.ADMITTED, now, joins_outage=joins, busy_s=busy_s)
    for skip in decision.of(SkipQuarantined):
        target = index.target(skip.rollout, skip.node)
        text = describe((Cause(CauseCode.QUARANTINED),))
        yield transition(target, Trigger.SKIPPED, now, outcome=Outcome.SKIPPED, text=text)
    for requeued in decision.of(Requeue):
        target = index.target(requeued.rollout, requeued.node)
        tasks: Params = {} if target.drift is None else {"tasks": target.drift.tasks}
        yield transition(target, Trigger.DRIFTED, now, text=describe((Cause(CauseCode.DRIFTED, tasks),)))
        yield from target_changes(index, target, now)
    for ended in decision.of(EndRollout):
        yield RolloutEnded(ended.rollout, now)


def _why_rolled_back(rollback: RollBack, target: Target) -> Causes:
    if target.order_by is not None:
        return (Cause(CauseCode.ORDERED, {"by": target.order_by.name}),)
    return () if rollback.reason is None else (Cause(CauseCode.REASON, reason=rollback.reason),)
