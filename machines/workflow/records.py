"""Questions about one node's step records."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from machines.model.plan import StepDef
from machines.model.rollout import FailureCode, Target
from machines.model.step_record import StepAction, StepRecord, StepState

_ISOLATOR_ACTIONS = (StepAction.APPLY, StepAction.INSPECT, StepAction.REVERT)


def active_isolations(
    specs: Iterable[StepDef], records: Sequence[StepRecord]
) -> tuple[tuple[StepDef, Any], ...]:
    """Return the isolators that were begun and not reverted, each with the state that it found.

    That state is the `prior` of the first APPLY since the last finished REVERT: a second APPLY of a node that
    we isolated would find our own isolation, and reverting to that would leave the node out of service.
    """
    found = []
    for spec in specs:
        first: StepRecord | None = None
        for record in records:
            if record.step != spec.name:
                continue
            if record.action is StepAction.APPLY and first is None:
                first = record
            elif record.action is StepAction.REVERT and record.state is StepState.OK:
                first = None
        if first is not None:
            found.append((spec, first.prior))
    return tuple(found)


def isolated_in_earlier_attempt(
    specs: Sequence[StepDef], target: Target, records: Sequence[StepRecord]
) -> bool:
    """Return whether the node has been isolated since an earlier attempt, so since it failed in that one."""
    # Begun then and not reverted now, so in effect ever since.
    earlier = [record for record in records if record.attempt < target.attempt]
    return all(active_isolations(specs, subset) for subset in (earlier, records))


def in_service_since(
    target: Target, records: Sequence[StepRecord], probation_steps: Collection[str]
) -> float:
    """Return when a node was back in service and had passed its checks in this attempt (epoch seconds).

    The checks of the probation itself do not count.
    """
    passed = [
        record.at
        for record in records
        if record.attempt == target.attempt
        and record.action in (StepAction.REVERT, StepAction.CHECK)
        and record.state is StepState.OK
        and record.step not in probation_steps
    ]
    return max(passed, default=target.since)


def completed_since_revert(step: str, records: Sequence[StepRecord]) -> bool:
    """Return whether an isolator was applied successfully since it was last reverted."""
    ended = (r for r in reversed(records) if r.step == step and r.state is StepState.OK)
    return next((r.action is StepAction.APPLY for r in ended if r.action is not StepAction.INSPECT), False)


@dataclass(frozen=True, slots=True)
class RepeatedTry:
    """An isolation, or a return to service, that is tried again: since when, how often, the last answer."""

    is_return: bool
    since: float
    tries: int
    text: str


def repeated_try(records: Sequence[StepRecord], target: Target) -> RepeatedTry | None:
    """Return the latest unbroken series of "busy" and of lost answers.

    The answers are all to isolations, or all to returns to service.  None when the last step was carried out,
    or when no isolator was asked in this attempt.
    """
    found: RepeatedTry | None = None
    for record in reversed(records):
        if record.attempt != target.attempt or record.action not in _ISOLATOR_ACTIONS:
            continue
        if record.state is StepState.INTENDED:
            continue
        is_return = record.action is StepAction.REVERT
        is_tried_again = record.state in (StepState.BUSY, StepState.UNKNOWN)
        if not is_tried_again or (found is not None and is_return != found.is_return):
            break
        text, tries = (record.text, 0) if found is None else (found.text, found.tries)
        found = RepeatedTry(is_return, record.at, tries + 1, text)
    return found


def upsert(records: Sequence[StepRecord], record: StepRecord) -> tuple[StepRecord, ...]:
    """Return the records with this one added, or in the place of its own intent."""
    updated = list(records)
    # From the end, where the intent is: a long attempt has hundreds of records.
    for position in reversed(range(len(updated))):
        if record_key(updated[position]) == record_key(record):
            updated[position] = replace(record, began_at=updated[position].began_at)
            return tuple(updated)
    return (*updated, record)


def record_key(record: StepRecord) -> tuple[int, str, StepAction, int]:
    """Return the identity of a record among its node's records; an intent and its result share it."""
    return (record.attempt, record.step, record.action, record.number)


def first_change(step: str, records: Sequence[StepRecord]) -> StepRecord | None:
    """Return the first run of a step that may have changed the node and recorded the state before it."""
    runs = (r for r in records if r.step == step and r.action is StepAction.RUN and r.prior is not None)
    return next((r for r in runs if r.code is not FailureCode.NEVER_STARTED), None)


def has_begun_run(records: Sequence[StepRecord]) -> bool:
    """Return whether a run of these records reached the node, which may have a part of the change."""
    runs = (record for record in records if record.action is StepAction.RUN)
    return any(r.state is not StepState.INTENDED and r.code is not FailureCode.UNREACHABLE for r in runs)
