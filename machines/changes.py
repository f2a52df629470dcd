"""What each event makes of the values it is about.

The index and every store apply events with these functions, so that what is
remembered in memory and what is remembered on disk cannot drift apart.  They
know the table of phases and nothing of when a move is wise.
"""

from __future__ import annotations

from dataclasses import replace
from typing import assert_never

from machines.events import (
    GateOpened,
    LookedCurrent,
    NodeAdvanced,
    NodeOrdered,
    PhaseMoved,
    RolloutCancelled,
    RolloutEnded,
    RolloutOpened,
    RolloutPaused,
    RolloutResumed,
    StepRecorded,
    TargetChanged,
    TargetsJoined,
    VoteCast,
    VoteWithdrawn,
)
from machines.plan import Plan
from machines.rollout import Opened, Pause, Rollout, Target, Vote
from machines.states import FROM_ANEW, NEW_ATTEMPT, IllegalTransition, Phase, Trigger, edge

TargetEvent = PhaseMoved | StepRecorded | LookedCurrent | NodeOrdered | NodeAdvanced | TargetChanged
"""Events about one node of one rollout."""

RolloutEvent = (
    PhaseMoved
    | TargetsJoined
    | TargetChanged
    | VoteCast
    | VoteWithdrawn
    | GateOpened
    | RolloutPaused
    | RolloutResumed
    | RolloutCancelled
    | RolloutEnded
)
"""Events that change a rollout's own row."""


def opened(event: RolloutOpened, plan: Plan) -> Rollout:
    """Return the rollout that a submit makes; `plan` is its content, compiled."""
    return Rollout(
        id=event.rollout,
        plan=plan,
        digest=event.digest,
        submitted_by=event.submitted_by,
        submitted_at=event.at,
        approved_count=len(event.targets),
        supersedes=event.supersedes,
    )


def target_after(target: Target, event: TargetEvent) -> Target:
    """Return what the event makes of a target; raises IllegalTransition for a move that is none."""
    match event:
        case PhaseMoved():
            return _moved(target, event)
        case StepRecorded():
            return target if event.isolated is None else replace(target, isolated=event.isolated)
        case LookedCurrent():
            return replace(target, maybe_current=False, last_text=event.text or target.last_text)
        case NodeOrdered(order=None):
            return replace(target, order=None, order_by=None, ordered_at=0.0)
        case NodeOrdered():
            return replace(target, order=event.order, order_by=event.actor, ordered_at=event.at)
        case NodeAdvanced():
            return replace(target, position=event.position)
        case TargetChanged():
            return replace(target, team=event.team, pools=event.pools, needs_vote_of=event.needs_vote_of)
        case _:
            assert_never(event)


def rollout_after(rollout: Rollout, event: RolloutEvent) -> Rollout:
    """Return what the event makes of a rollout's own row."""
    match event:
        case PhaseMoved():
            if event.failure is None:
                return rollout
            return replace(rollout, failures=(*rollout.failures, event.failure))
        case TargetsJoined() | TargetChanged():
            return replace(rollout, amendments=rollout.amendments + 1)
        case VoteCast():
            return replace(rollout, votes=(*rollout.votes, event.vote))
        case VoteWithdrawn():
            return replace(rollout, votes=tuple(_withdrawn(vote, event) for vote in rollout.votes))
        case GateOpened():
            return replace(rollout, opened=(*rollout.opened, Opened(event.gate, event.wave, event.at)))
        case RolloutPaused():
            return replace(rollout, paused=Pause(event.actor, event.reason, event.at))
        case RolloutResumed():
            return replace(rollout, paused=None)
        case RolloutCancelled():
            return replace(rollout, cancelled=Pause(event.actor, event.reason, event.at))
        case RolloutEnded():
            return replace(rollout, ended_at=event.at)
        case _:
            assert_never(event)


def check_move(target: Target, event: PhaseMoved) -> None:
    """Raise IllegalTransition unless the table has this move and it starts where the target stands."""
    way = edge(event.trigger, event.source, event.outcome)
    name = f"{event.node} of {event.rollout}"
    if way.target is not event.target:
        raise IllegalTransition(
            f"{event.trigger} leads from {event.source} to {way.target}, not to {event.target}"
        )
    if target.phase is not event.source:
        raise IllegalTransition(f"{name} is {target.phase}, not {event.source}")
    attempts: tuple[int, ...] = (
        (target.attempt + 1,) if event.trigger is Trigger.ADMITTED else (target.attempt,)
    )
    if event.trigger is Trigger.ROLLBACK_ORDERED:
        attempts = (target.attempt, target.attempt + 1)
    if event.attempt not in attempts:
        raise IllegalTransition(
            f"{name} is in attempt {target.attempt}, which {event.trigger} in {event.attempt} does not follow"
        )
    if (event.failure is None) == (event.target is Phase.FAILED):
        raise IllegalTransition(f"{name}: a failure belongs to every move to failed and to no other")


def _moved(target: Target, event: PhaseMoved) -> Target:
    check_move(target, event)
    put_backs = target.put_backs
    if event.trigger is Trigger.PUT_BACK:
        put_backs += 1
    elif event.trigger in FROM_ANEW:
        put_backs = 0
    return replace(
        target,
        phase=event.target,
        outcome=event.outcome,
        attempt=event.attempt,
        rolling_back=event.rolling_back,
        isolated=target.isolated if event.isolated is None else event.isolated,
        since=event.at,
        not_before=event.not_before,
        put_backs=put_backs,
        last_text=event.text,
        failure=event.failure,
        admitted_at=event.at if event.trigger in NEW_ATTEMPT else target.admitted_at,
    )


def _withdrawn(vote: Vote, event: VoteWithdrawn) -> Vote:
    return replace(vote, withdrawn_at=event.at) if vote.id == event.vote else vote
