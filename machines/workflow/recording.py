"""What is recorded of an action: its intent when it begins, and its result.

What an action needs, such as an inspection before an isolation, the caller does; it records each with these.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from machines.model.actions import CleanUpStaleRuns, Isolate, Probe, Revert, RunCheck, RunPlaybook, UseGuard
from machines.model.decision import Prepare
from machines.model.preparation import TRIED_AGAIN, Preparation, PreparationState
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
from machines.workflow.steps import CLEAN_UP, backoff_s

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


def preparation_intent(wanted: Prepare, earlier: Preparation | None, at: float) -> Preparation:
    """Return the row of a try of a prepare stage that is about to begin, or that runs already."""
    if (
        earlier is not None
        and earlier.attempt == wanted.attempt
        and earlier.state is PreparationState.RUNNING
    ):
        return earlier
    key = (wanted.rollout, wanted.node, wanted.stage)
    row = Preparation(*key, wanted.attempt, PreparationState.RUNNING, content="", at=at, began_at=at)
    if earlier is not None and earlier.state in TRIED_AGAIN:
        # What an earlier try may have disturbed is compared with its own snapshot.
        row = replace(row, before=earlier.before, handle=earlier.handle)
    if earlier is not None and earlier.state is PreparationState.WAITING:
        row = replace(row, text=earlier.text)
    return row


def preparation_result(row: Preparation, result: StepResult, at: float) -> Preparation:
    """Return the row of a prepare stage that ended like this; one that failed is tried again later."""
    if isinstance(result, Ok):
        return replace(row, state=PreparationState.DONE, text=row.text or result.text, at=at)
    not_before = at + backoff_s(row.attempt - 1)
    return replace(row, state=PreparationState.FAILED, text=result.text, at=at, not_before=not_before)


def preparation_again(row: Preparation, problem: str, at: float) -> Preparation:
    """Return the row of a stage that is due again, because its files differ on the node."""
    # At once for the first time: what differs again and again may be a disk that fails.
    delay_s = backoff_s(row.attempt - 2) if row.attempt > 1 else 0.0
    return replace(row, state=PreparationState.WAITING, text=problem, at=at, not_before=at + delay_s)
