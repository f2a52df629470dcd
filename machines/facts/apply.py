"""Applies an event to the values that it changes.

The index and the stores use the same functions, so memory and disk cannot drift apart.
"""

from __future__ import annotations

from dataclasses import replace
from typing import assert_never

from machines.model import events
from machines.model.plan import Plan
from machines.model.rollout import Drift, GateOpening, Interruption, NodeOrder, Rollout, Target
from machines.states import NEW_ATTEMPT, RESETS_BACKOFF, IllegalTransition, Phase, Trigger, next_phase


def new_rollout(event: events.RolloutOpened, plan: Plan) -> Rollout:
    """Return the rollout of a submit; `plan` is its compiled content."""
    return Rollout(
        id=event.rollout,
        plan=plan,
        digest=event.digest,
        submitted_by=event.submitted_by,
        submitted_at=event.at,
        approved_count=len(event.targets),
        supersedes=event.supersedes,
        overrides=event.overrides,
        source=event.source,
    )


def apply_to_target(target: Target, event: events.TargetEvent) -> Target:
    """Return the target after the event; raises IllegalTransition when the table does not have it."""
    match event:
        case events.PhaseMoved():
            return _apply_transition(target, event)
        case events.StepRecorded():
            isolated = target.isolated if event.isolated is None else event.isolated
            return replace(target, isolated=isolated, content=event.content or target.content)
        case events.DeadlineExtended():
            return replace(target, downtime_s=event.downtime_s)
        case events.ChangeNeeded():
            return replace(target, maybe_current=False, last_text=event.text or target.last_text)
        case events.SoakRestarted() | events.DriftRecorded():
            return _change_done_target(target, event)
        case events.NodeOrdered(order=None):
            return replace(target, order=None, order_by=None, ordered_at=0.0)
        case events.NodeOrdered():
            return replace(target, order=event.order, order_by=event.actor, ordered_at=event.at)
        case events.NodeAdvanced():
            if target.phase is not Phase.PENDING:
                raise IllegalTransition(f"{event.node} of {event.rollout} is {target.phase}, not pending")
            return replace(target, position=event.position)
        case events.TargetChanged():
            return replace(target, team=event.team, pools=event.pools, needs_vote_of=event.needs_vote_of)
        case _:
            assert_never(event)


def _change_done_target(target: Target, event: events.SoakRestarted | events.DriftRecorded) -> Target:
    if target.phase is not Phase.DONE:
        raise IllegalTransition(f"{event.node} of {event.rollout} is {target.phase}, not done")
    if isinstance(event, events.SoakRestarted):
        return replace(target, since=event.at)
    since = event.at if target.drift is None else target.drift.since
    return replace(target, drift=Drift(since, event.tasks) if event.tasks else None)


def apply_to_rollout(rollout: Rollout, event: events.RolloutEvent) -> Rollout:
    """Return the rollout's own row after the event."""
    match event:
        case events.PhaseMoved():
            failure = event.failure
            return rollout if failure is None else replace(rollout, failures=(*rollout.failures, failure))
        case events.TargetsJoined() | events.TargetChanged():
            return replace(rollout, amendments=rollout.amendments + 1)
        case events.ArtifactsBuilt():
            built = {**rollout.built, event.stage: event.manifest}
            return replace(rollout, amendments=rollout.amendments + 1, built=built)
        case events.VoteCast():
            return replace(rollout, votes=(*rollout.votes, event.vote))
        case events.VoteWithdrawn():
            votes = (replace(v, withdrawn_at=event.at) if v.id == event.vote else v for v in rollout.votes)
            return replace(rollout, votes=tuple(votes))
        case events.GateOpened():
            return replace(rollout, opened=(*rollout.opened, GateOpening(event.gate, event.wave, event.at)))
        case events.PilotEvidenceAttached():
            return replace(rollout, pilot_evidence=event.evidence)
        case events.RolloutPaused():
            return replace(rollout, paused=Interruption(event.actor, event.reason, event.at))
        case events.RolloutResumed():
            return replace(rollout, paused=None)
        case events.RolloutCancelled():
            return replace(rollout, cancelled=Interruption(event.actor, event.reason, event.at))
        case events.RolloutEnded():
            return replace(rollout, ended_at=event.at)
        case _:
            assert_never(event)


def validate_edge(event: events.PhaseMoved) -> None:
    """Raise IllegalTransition unless the table has this transition, for a target in any state."""
    target_phase = next_phase(event.trigger, event.source, event.outcome)
    if target_phase is not event.target:
        raise IllegalTransition(
            f"{event.trigger} leads from {event.source} to {target_phase}, not {event.target}"
        )
    if (event.failure is None) == (event.target is Phase.FAILED):
        raise IllegalTransition(
            f"{event.node}: every transition to failed has a failure, and no other has one"
        )


def validate_transition(target: Target, event: events.PhaseMoved) -> None:
    """Raise IllegalTransition unless the table has this transition and the target is in its source phase."""
    validate_edge(event)
    name, trigger = f"{event.node} of {event.rollout}", event.trigger
    if target.phase is not event.source:
        raise IllegalTransition(f"{name} is {target.phase}, not {event.source}")
    # A rollback may repeat the attempt that failed or begin the next one.
    lowest = target.attempt + (trigger is Trigger.ADMITTED)
    highest = target.attempt + (trigger in NEW_ATTEMPT)
    if not lowest <= event.attempt <= highest:
        raise IllegalTransition(
            f"{name} is in attempt {target.attempt}; {trigger} cannot follow in attempt {event.attempt}"
        )


def _apply_transition(target: Target, event: events.PhaseMoved) -> Target:
    validate_transition(target, event)
    aborted_isolations = 0 if _resets_backoff(target, event.trigger) else target.aborted_isolations
    if target.order is NodeOrder.ROLLBACK and not _keeps_rollback_order(event):
        target = replace(target, order=None, order_by=None, ordered_at=0.0)
    return replace(
        target,
        phase=event.target,
        outcome=event.outcome,
        attempt=event.attempt,
        rolling_back=event.rolling_back,
        isolated=target.isolated if event.isolated is None else event.isolated,
        since=event.at,
        not_before=event.not_before,
        aborted_isolations=aborted_isolations + (event.trigger is Trigger.ISOLATION_ABORTED),
        last_text=event.text,
        failure=event.failure,
        admitted_at=event.at if event.trigger in NEW_ATTEMPT else target.admitted_at,
        downtime_s=0.0,
        drift=None,
        content="" if event.trigger in NEW_ATTEMPT else target.content,
    )


def _resets_backoff(target: Target, trigger: Trigger) -> bool:
    # A changed node with a backoff has had the isolation of its rollback aborted.
    is_again = target.phase is Phase.DONE and target.not_before > 0
    return trigger in RESETS_BACKOFF and not is_again


def _keeps_rollback_order(event: events.PhaseMoved) -> bool:
    """Return whether the rollback may have to begin again: it is being isolated, or that was aborted."""
    is_aborted = event.trigger is Trigger.ISOLATION_ABORTED and event.target is Phase.DONE
    return is_aborted or event.trigger is Trigger.ROLLBACK_ORDERED
