"""Step records as a list: which is which, what replaces what, and what of ours still stands."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from machines.events import StepAction, StepRecord, StepState
from machines.plan import StepSpec
from machines.rollout import Target


def standing(specs: Iterable[StepSpec], records: Sequence[StepRecord]) -> tuple[tuple[StepSpec, Any], ...]:
    """Return the isolators that were begun and not undone, with what was there before them.

    The prior state is that of the first `do` since the last finished `undo`: a
    second look at a node that we isolated would find our own doing.
    """
    found = []
    for spec in specs:
        first: StepRecord | None = None
        for record in records:
            if record.step != spec.name:
                continue
            if record.action is StepAction.DO and first is None:
                first = record
            elif record.action is StepAction.UNDO and record.state is StepState.OK:
                first = None
        if first is not None:
            found.append((spec, first.prior))
    return tuple(found)


def stood_before(specs: Sequence[StepSpec], target: Target, records: Sequence[StepRecord]) -> bool:
    """Say whether the node has been isolated since an attempt before this one: it failed then."""
    earlier = [record for record in records if record.attempt < target.attempt]
    return all(standing(specs, some) for some in (earlier, records))


def in_service_since(target: Target, records: Sequence[StepRecord]) -> float:
    """Return when a node was back in service and judged so, in this attempt (epoch seconds)."""
    undone = [
        record.at
        for record in records
        if record.attempt == target.attempt
        and record.action in (StepAction.UNDO, StepAction.CHECK)
        and record.state is StepState.OK
        and not record.step.startswith("probation.")
    ]
    return max(undone, default=target.since)


def did(step: str, records: Sequence[StepRecord]) -> bool:
    """Say whether an isolator is known to have ended well since it was last undone."""
    ended = (r for r in reversed(records) if r.step == step and r.state is StepState.OK)
    return next((r.action is StepAction.DO for r in ended if r.action is not StepAction.LOOK), False)


def waiting(records: Sequence[StepRecord], target: Target) -> StepRecord | None:
    """Return the first of the latest asks in a row that found the node not to be isolated yet.

    Its text is the latest's; None where isolation was had, or was not asked for in this attempt.
    """
    first = last = None
    for record in reversed(records):
        if record.attempt != target.attempt or record.action not in (StepAction.DO, StepAction.LOOK):
            continue
        if record.state is StepState.INTENDED:
            continue
        if record.state is not StepState.BUSY:
            break
        first, last = record, last or record
    return None if first is None or last is None else replace(first, text=last.text)


def put(records: Sequence[StepRecord], record: StepRecord) -> tuple[StepRecord, ...]:
    """Return the records with this one added, or in the place of its own intent."""
    kept = list(records)
    for place in range(len(kept) - 1, -1, -1):
        if key(kept[place]) == key(record):
            kept[place] = replace(record, began_at=kept[place].began_at)
            return tuple(kept)
    kept.append(record)
    return tuple(kept)


def key(record: StepRecord) -> tuple[int, str, StepAction, int]:
    """Return what tells a node's records apart; an intent and its outcome have the same."""
    return (record.attempt, record.step, record.action, record.number)
