"""The sentences of causes, and the words for what a node's driver does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from machines.model import actions
from machines.model.causes import Cause, CauseCode, Causes
from machines.model.step_record import StepAction
from rolloutd.texts.reason_text import describe

Params = Mapping[str, Any]


def describe_causes(causes: Causes) -> str:
    return "; ".join(map(_clause, causes))


def describe_action(action: actions.Action) -> str | None:
    """Return the step that people see during this action; None when the action takes no time."""
    match action:
        case actions.CleanUpStaleRuns():
            return "waiting for an older run to end"
        case actions.StopRun():
            return f"stopping {action.record.step}"
        case actions.Revert():
            return f"revert {action.spec.name}"
        case actions.UseGuard():
            return _GUARD_STEPS[action.action]
        case actions.Isolate() | actions.Probe():
            return action.spec.name
        case actions.RunPlaybook():
            return action.stage.step
        case actions.RunCheck() | actions.Wait():
            return action.step
        case actions.Transition() | actions.CompleteOrder() | actions.NoAction():
            return None


_GUARD_STEPS = {
    StepAction.ARM: "arming the guard",
    StepAction.DISARM: "disarming the guard",
    StepAction.RESTORE: "restoring by the guard",
}


def _clause(cause: Cause) -> str:
    params = cause.params if cause.reason is None else {**cause.params, "text": describe(cause.reason)}
    return _CLAUSES[cause.code](params)


def _not_isolated(params: Params) -> str:
    answer = f": {params['text']}" if "text" in params else ""
    return f"not isolated within {params['limit_s']:.0f} s{answer}"


_CLAUSES: Mapping[CauseCode, Callable[[Params], str]] = {
    CauseCode.SAID: lambda p: f"{p['text']}",
    CauseCode.REASON: lambda p: f"{p['text']}",
    CauseCode.NO_SLOT: lambda p: f"no slot within {p['limit_s']:.0f} s: {p['text']}",
    CauseCode.NOT_ISOLATED: _not_isolated,
    CauseCode.ABORT_CONTINUED: lambda _: (
        "the daemon stopped while the isolation was being aborted; the reason was not recorded"
    ),
    CauseCode.ISOLATION_LOST: lambda p: (
        f"{p['node']} lost its isolation and could not be isolated again: {p['text']}"
    ),
    CauseCode.NOT_ISOLATED_AGAIN: lambda p: f"and it could not be isolated again: {p['text']}",
    CauseCode.NOT_RETURNED: lambda p: f"could not be returned to service: {p['text']}",
    CauseCode.RUN_STOPPED: lambda _: "its playbook was stopped",
    CauseCode.RUN_NOT_STARTED: lambda _: "no playbook was started",
    CauseCode.RERUN_ENDED_ALIKE: lambda _: "the rerun ended the same way",
    CauseCode.REPAIR_FAILED: lambda p: f"and its repair failed: {p['text']}",
    CauseCode.REPAIR_USELESS: lambda _: "its repair did not help",
    CauseCode.PROCESSES_LEFT: lambda p: f"processes of its run may be left: {p['text']}",
    CauseCode.STOPPED: lambda p: f"stopped while {p['phase']} by order of {p['by'] or 'a person'}",
    CauseCode.NOTHING_TO_STOP: lambda _: "there was nothing left to stop",
    CauseCode.RETURNED: lambda _: "returned",
    CauseCode.NOT_REVERTED: lambda p: f"{p['step']} could not be reverted: {p['text']}",
    CauseCode.CHECK_FAILED: lambda p: f"{p['check']}: {p['text']}",
    CauseCode.TIME_IS_OVER: lambda _: "its time is over",
    CauseCode.CLOCK_SET_BACK: lambda _: "the clock was set back to before the soak began",
    CauseCode.QUARANTINED: lambda _: "by rolloutd, after a day in quarantine",
    CauseCode.DRIFTED: lambda p: f"drifted: {', '.join(p['tasks'])}" if "tasks" in p else "drifted",
    CauseCode.ORDERED: lambda p: f"ordered by {p['by']}",
    CauseCode.NODE_GONE: lambda _: "the inventory no longer has this node",
    CauseCode.NODE_BACK: lambda _: "the inventory has this node again",
    CauseCode.RENAMED: lambda p: f"it was {p['outcome']} as {p['name']}",
    CauseCode.DONE_BEFORE: lambda p: f"done in {p['rollout']} with the same change",
}
