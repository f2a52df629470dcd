"""How work on a node ends badly: runs that are stopped, and what comes before a node fails.

A run is stopped by a person's order or because isolation was lost.  Before a failure its processes end, and
its guard restores the node.

An armed guard restores the node unless it is disarmed.  So a change ends in one of two ways: the guard was
disarmed (DISARM is OK), or the node was restored (RESTORE is OK).  The node decides which; the records only
repeat it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from machines.model.actions import (
    FAILED_RUN_TIMEOUT_S,
    Action,
    CleanUpStaleRuns,
    CompleteOrder,
    StopRun,
    Transition,
    UseGuard,
    Wait,
)
from machines.model.causes import Cause, CauseCode, said
from machines.model.plan import Guard
from machines.model.rollout import BLAMES_CHANGE, UNATTENDED_RESTORE, FailureCode, Target
from machines.model.step_record import StepAction, StepRecord, StepState
from machines.states import IN_FLIGHT_PHASES, Trigger
from machines.workflow.steps import UNKNOWN_RETRY_S, Retry, Rule, next_try

REISOLATE_TIMEOUT_S = 30.0
"""Grace period before a run is stopped because isolation was lost (two drain passes)."""

ANSWER_S = 300.0
"""How long a node may take to answer after its guard has restored it: a network or an sshd that restarts."""

BY_DAEMON = "daemon"
"""What a restore's value names as `by` if the daemon asked for it; else the node began it alone."""

# Without a limit of tries: how long the node may take follows from the guard's `after_s`.
_RESTORE = Rule(
    StepAction.RESTORE,
    retries={StepState.BUSY: Retry(UNKNOWN_RETRY_S), StepState.UNKNOWN: Retry(UNKNOWN_RETRY_S)},
)


def clean_up_before_failure(
    action: Action, records: Sequence[StepRecord], *, has_unfinished_run: bool, is_guarded: bool
) -> Action:
    """Return the action; before a failure, the end of what the failed run left on the node.

    Users may leave a failed node for days, while processes of its run would change it.  `records` are those
    of the attempt.  `is_guarded`: a guard may restore the node, and nothing may change it after that.
    """
    if not isinstance(action, Transition) or action.trigger is not Trigger.FAILED:
        return action
    runs = [position for position, record in enumerate(records) if record.action is StepAction.RUN]
    if not runs:
        return action
    run = records[runs[-1]]
    has_failed = run.state is StepState.FAILED and run.code is FailureCode.FAILED
    if not has_failed and not is_guarded:
        return action
    clean_ups = [record for record in records[runs[-1] :] if record.action is StepAction.CLEAN_UP]
    # Tried, not done: a node that the change has cut off must fail, and be restored, all the same.
    tried = [record for record in clean_ups if record.state is not StepState.INTENDED]
    if not tried and has_unfinished_run:
        before = [record.number for record in records if record.action is StepAction.CLEAN_UP]
        number = clean_ups[-1].number if clean_ups else max(before, default=0) + 1
        return CleanUpStaleRuns(number, FAILED_RUN_TIMEOUT_S)
    if has_failed and tried and tried[-1].state is not StepState.OK:
        left = Cause(CauseCode.PROCESSES_LEFT, {"text": tried[-1].text})
        return replace(action, causes=(*action.causes, left))
    return action


def may_be_armed(records: Sequence[StepRecord]) -> bool:
    """Return whether a guard of this attempt may be armed on the node, or may have restored it."""
    # An arm without an answer may have armed it; only a refusal is certain.
    is_armed = any(r.action is StepAction.ARM and r.state is not StepState.FAILED for r in records)
    is_disarmed = any(r.action is StepAction.DISARM and r.state is StepState.OK for r in records)
    return is_armed and not is_disarmed


def stop_unguarded_run(records: Sequence[StepRecord]) -> Action | None:
    """Return the end of a run whose node has restored itself meanwhile; None if its guard did not end."""
    ended = [record for record in records if record.action is StepAction.DISARM]
    if not ended or ended[-1].state is not StepState.FAILED:
        return None
    causes = said(ended[-1].text)
    running = [record for record in records if record.handle and record.state is StepState.INTENDED]
    if running:
        return StopRun(running[-1], (*causes, Cause(CauseCode.RUN_STOPPED)))
    runs = [record for record in records if record.action is StepAction.RUN]
    has_begun = any(record.code is not FailureCode.NEVER_STARTED for record in runs)
    code = FailureCode.FAILED if has_begun else FailureCode.NEVER_STARTED
    return Transition(Trigger.FAILED, step=ended[-1].step, causes=causes, code=code)


def end_guard_before(
    action: Action,
    guard: Guard | None,
    records: Sequence[StepRecord],
    now: float,
    *,
    elapsed_s: float,
) -> Action:
    """Return the action; before a failure, the restore by a guard that may still be armed.

    A change that failed is not confirmed, so the node must not keep it.  `records` are those of the attempt.
    """
    if not isinstance(action, Transition) or action.trigger is not Trigger.FAILED:
        return action
    if guard is None or not may_be_armed(records):
        return action
    restores = [record for record in records if record.action is StepAction.RESTORE]
    latest = restores[-1] if restores else None
    # It must have restored itself by then.  Time without a daemon does not count: the node was not asked.
    asked_s = min(now - min((each.began_at for each in restores), default=now), elapsed_s)
    if asked_s <= guard.after_s + ANSWER_S:
        match next_try(_RESTORE, latest, now):
            case Wait() as wait:
                return wait
            case int() as number:
                return UseGuard(guard.step, number, StepAction.RESTORE)
    assert latest is not None
    return _restored_failure(action, latest, records, now, elapsed_s)


def _restored_failure(
    failed: Transition, restore: StepRecord, records: Sequence[StepRecord], now: float, elapsed_s: float
) -> Transition:
    """Return the failure with what the guard did; the last restore is final, or its answer overdue."""
    failed = replace(failed, causes=(*failed.causes, *said(restore.text)))
    # Without a value nothing had been armed.
    is_restored = restore.state is StepState.OK and restore.prior is not None
    # A change that cuts its node off looks like a node that is lost, until it has restored itself.
    if not is_restored or failed.code not in BLAMES_CHANGE | {FailureCode.LOST}:
        return failed
    began = [record.began_at for record in records if record.action is StepAction.RUN]
    # The daemon that asks now was not there when the run began, so its absence may be the cause.
    was_away = bool(began) and elapsed_s < now - began[-1]
    by_daemon = restore.prior.get("by") == BY_DAEMON
    step = UNATTENDED_RESTORE if was_away and not by_daemon else failed.step
    return replace(failed, step=step, code=FailureCode.RESTORED_ITSELF)


def next_stop_action(target: Target, records: Sequence[StepRecord]) -> Action:
    """Return the next action for a node that a person ordered to stop.

    The node then fails where it is, isolated or not, so that people can inspect it and decide.
    """
    if target.phase not in IN_FLIGHT_PHASES:
        return CompleteOrder(succeeded=False, causes=(Cause(CauseCode.NOTHING_TO_STOP),))
    requester = "" if target.order_by is None else target.order_by.name
    causes = (Cause(CauseCode.STOPPED, {"phase": target.phase.value, "by": requester}),)
    running = [r for r in records if r.handle and r.state is StepState.INTENDED]
    if running:
        return StopRun(running[-1], causes)
    # The failure names the step that was stopped, because people judge by it what the node has.
    steps = [r.step for r in records if r.attempt == target.attempt]
    step = steps[-1] if steps else str(target.phase)
    return Transition(Trigger.FAILED, step=step, causes=causes, code=FailureCode.INTERFERENCE)


def on_isolation_lost(
    target: Target,
    next_step: Action,
    records: Sequence[StepRecord],
    run_record: StepRecord | None,
    now: float,
    elapsed_s: float,
    isolate_timeout_s: float,
) -> Action:
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
    if not isinstance(next_step, Transition) and min(now - lost_at, elapsed_s) < timeout_s:
        return next_step
    lost = Cause(CauseCode.ISOLATION_LOST, {"node": target.node, "text": latest.text})
    if run_record is not None:
        return StopRun(run_record, (lost, Cause(CauseCode.RUN_STOPPED)))
    causes = (lost, Cause(CauseCode.RUN_NOT_STARTED))
    return Transition(Trigger.FAILED, step=latest.step, causes=causes, code=FailureCode.NEVER_STARTED)
