"""Ends a playbook run early, by a person's order or because isolation was lost.

As in next_action.py, the answer follows from the records alone, so a restarted daemon continues the stop.
"""

from __future__ import annotations

from collections.abc import Sequence

from machines.model import actions
from machines.model.causes import Cause, CauseCode
from machines.model.rollout import FailureCode, Target
from machines.model.step_record import StepAction, StepRecord, StepState
from machines.states import IN_FLIGHT_PHASES, Trigger

REISOLATE_TIMEOUT_S = 30.0
"""Grace period before a run is stopped because isolation was lost (two drain passes)."""


def next_stop_action(target: Target, records: Sequence[StepRecord]) -> actions.Action:
    """Return the next action for a node that a person ordered to stop.

    The node then fails where it is, isolated or not, so that people can inspect it and decide.
    """
    if target.phase not in IN_FLIGHT_PHASES:
        return actions.CompleteOrder(succeeded=False, causes=(Cause(CauseCode.NOTHING_TO_STOP),))
    requester = "" if target.order_by is None else target.order_by.name
    causes = (Cause(CauseCode.STOPPED, {"phase": target.phase.value, "by": requester}),)
    running = [r for r in records if r.handle and r.state is StepState.INTENDED]
    if running:
        return actions.StopRun(running[-1], causes)
    # The failure names the step that was stopped, because people judge by it what the node has.
    steps = [r.step for r in records if r.attempt == target.attempt]
    step = steps[-1] if steps else str(target.phase)
    return actions.Transition(Trigger.FAILED, step=step, causes=causes, code=FailureCode.INTERFERENCE)


def on_isolation_lost(
    target: Target,
    next_step: actions.Action,
    records: Sequence[StepRecord],
    run_record: StepRecord | None,
    now: float,
    elapsed_s: float,
    isolate_timeout_s: float,
) -> actions.Action:
    """Return what comes next for an isolator that is no longer in effect.

    `next_step` is what the isolator needs; `records` are its own records of this attempt, oldest first;
    `run_record` is the run that is in progress, None before a run.
    """
    attempts = [r for r in records if r.action in (StepAction.APPLY, StepAction.INSPECT)]
    lost_at = now
    for record in reversed(attempts):
        if record.state is StepState.OK:
            break
        lost_at = min(lost_at, record.at)  # a clock that was set back must not extend the grace period
    latest = attempts[-1]
    # Before a run nothing was harmed, so the isolator has as long as for a first isolation.  During a run the
    # node takes traffic while it is changed.  An inspection that failed is no proof of that: only a refused
    # APPLY is.
    is_urgent = run_record is not None and latest.action is StepAction.APPLY
    # Time without a daemon does not count below, because no isolator was asked meanwhile.
    timeout_s = REISOLATE_TIMEOUT_S if is_urgent else isolate_timeout_s
    if not isinstance(next_step, actions.Transition) and min(now - lost_at, elapsed_s) < timeout_s:
        return next_step
    lost = Cause(CauseCode.ISOLATION_LOST, {"node": target.node, "text": latest.text})
    if run_record is not None:
        return actions.StopRun(run_record, (lost, Cause(CauseCode.RUN_STOPPED)))
    causes = (lost, Cause(CauseCode.RUN_NOT_STARTED))
    return actions.Transition(Trigger.FAILED, step=latest.step, causes=causes, code=FailureCode.NEVER_STARTED)
