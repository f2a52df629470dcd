"""Turns a transition of a target into its event; the only place that does."""

from __future__ import annotations

from machines.model.events import PhaseMoved
from machines.model.rollout import Failure, FailureCode, Target
from machines.states import NEW_ATTEMPT, Outcome, Phase, Trigger, next_phase


def transition(
    target: Target,
    trigger: Trigger,
    at: float,
    *,
    outcome: Outcome | None = None,
    step: str = "",
    text: str = "",
    not_before: float = 0.0,
    code: FailureCode = FailureCode.FAILED,
    suffix: str = "",
    joins_outage: bool = False,
    busy_s: float | None = None,
) -> PhaseMoved:
    """Return the event of a target that takes an edge; `step` is the step that failed.

    `suffix` distinguishes failures with one attempt's number.

    Raises IllegalTransition when the table has no such edge.
    """
    target_phase = next_phase(trigger, target.phase, outcome)
    failure = None
    if target_phase is Phase.FAILED:
        # Stored ids of failures during the soak end like this.  A node that soaks has not failed in its
        # attempt, but a prepare stage may disturb it before the next one: that has a suffix of its own.
        suffix = ".2" if trigger is Trigger.SOAK_CHECK_FAILED else suffix
        id_ = f"{target.node}#{target.attempt}{suffix}"
        # Nothing runs on a node before it is isolated.
        if target.phase is Phase.ISOLATING and code is FailureCode.FAILED:
            code = FailureCode.NEVER_STARTED
        failure = Failure(id_, target.node, target.attempt, step, text, at, code)
    # A node that is pending again gets the change, so its next attempt is no rollback.  One that leaves in
    # its rollback counts to `at_most`: a rollback that makes nodes vanish must not go through the fleet.
    keeps_rolling_back = trigger is Trigger.LEFT or target_phase not in (Phase.PENDING, Phase.DONE)
    return PhaseMoved(
        rollout=target.rollout,
        node=target.node,
        trigger=trigger,
        source=target.phase,
        target=target_phase,
        attempt=target.attempt + (trigger in NEW_ATTEMPT),
        at=at,
        outcome=outcome,
        failure=failure,
        rolling_back=trigger is Trigger.ROLLBACK_ORDERED or (target.rolling_back and keeps_rolling_back),
        not_before=not_before,
        text=text,
        joins_outage=joins_outage,
        busy_s=busy_s,
    )
