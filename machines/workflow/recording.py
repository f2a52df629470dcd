"""What is recorded of an action: its intent when it begins, and its result.

What an action needs, such as an inspection before an isolation, the caller does; it records each with these.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from machines.model.actions import CleanUpStaleRuns, Isolate, Probe, Revert, RunCheck, RunPlaybook, UseGuard
from machines.model.rollout import Target
from machines.model.step_record import (
    MAX_OUTPUT_CHARS,
    Busy,
    Failed,
    Ok,
    StepAction,
    StepRecord,
    StepResult,
    StepState,
    Unknown,
)
from machines.workflow.steps import CLEAN_UP

RecordedAction = Isolate | Probe | Revert | CleanUpStaleRuns | RunPlaybook | RunCheck | UseGuard

_STATE_OF_RESULT: Mapping[type[Any], StepState] = {
    Ok: StepState.OK,
    Failed: StepState.FAILED,
    Busy: StepState.BUSY,
    Unknown: StepState.UNKNOWN,
}


def intent_of(action: RecordedAction, target: Target, at: float, *, handle: str = "") -> StepRecord:
    """Return the record of an action that is about to begin; `handle` is that of its run."""
    fields: dict[str, Any] = {}
    match action:
        case Isolate(spec=spec, prior=prior):
            step, kind, fields = spec.name, StepAction.APPLY, {"prior": prior}
        case Probe(spec=spec):
            step, kind = spec.name, StepAction.INSPECT
        case Revert(spec=spec):
            step, kind = spec.name, StepAction.REVERT
        case CleanUpStaleRuns():
            step, kind = CLEAN_UP.id, StepAction.CLEAN_UP
        case RunPlaybook(stage=stage):
            step, kind, fields = stage.step, StepAction.RUN, {"stage": stage.name}
        case RunCheck(spec=spec):
            step, kind, fields = action.step, StepAction.CHECK, {"visible_to": spec.team}
        case UseGuard(spec=spec):
            step, kind = spec.name, action.action
    return StepRecord(
        target.rollout,
        target.node,
        target.attempt,
        step,
        kind,
        action.number,
        StepState.INTENDED,
        at=at,
        began_at=at,
        handle=handle,
        **fields,
    )


def record_of(record: StepRecord, result: StepResult, at: float) -> StepRecord:
    # The end: the error is in the last lines.
    output = result.output[-MAX_OUTPUT_CHARS:] if isinstance(result, Ok | Failed) else ""
    if isinstance(result, Ok) and result.value is not None:
        record = replace(record, prior=result.value)
    if isinstance(result, Failed):
        record = replace(record, code=result.code)
    return replace(record, state=_STATE_OF_RESULT[type(result)], at=at, text=result.text, output=output)


def is_isolated_after(action: RecordedAction, result: StepResult | None) -> bool | None:
    """Return whether the node is isolated once this is recorded; None: as before.  No result: its intent."""
    match action, result:
        # Before the isolator acts: after a crash the node counts as isolated, so it is returned to service.
        case Isolate(), None:
            return True
        # Until the last isolator is reverted, the node is not in service and keeps its slots.
        case Revert(is_last=True), Ok():
            return False
        case _:
            return None
