"""Moves along the table: the one place where a target's next phase becomes an event."""

from __future__ import annotations

from machines.events import PhaseMoved
from machines.rollout import Failure, Target
from machines.states import NEW_ATTEMPT, Outcome, Phase, Trigger, edge


def move(
    target: Target,
    trigger: Trigger,
    at: float,
    *,
    outcome: Outcome | None = None,
    step: str = "",
    text: str = "",
    not_before: float = 0.0,
) -> PhaseMoved:
    """Return the event of a target that takes an edge; `step` is where a failure happened.

    Raises IllegalTransition when the table has no such edge.
    """
    way = edge(trigger, target.phase, outcome)
    attempt = target.attempt + (trigger in NEW_ATTEMPT)
    keeps_direction = way.target is not Phase.DONE and trigger is not Trigger.RETRIED
    return PhaseMoved(
        rollout=target.rollout,
        node=target.node,
        trigger=trigger,
        source=target.phase,
        target=way.target,
        attempt=attempt,
        at=at,
        outcome=outcome,
        failure=_failure(target, at, step, text, trigger) if way.target is Phase.FAILED else None,
        rolling_back=trigger is Trigger.ROLLBACK_ORDERED or (target.rolling_back and keeps_direction),
        not_before=not_before,
        text=text,
    )


def _failure(target: Target, at: float, step: str, text: str, trigger: Trigger) -> Failure:
    """Name a failure; a node that turned red after its attempt has failed a second time in it."""
    second = ".2" if trigger is Trigger.REDDENED else ""
    return Failure(f"{target.node}#{target.attempt}{second}", target.node, target.attempt, step, text, at)
