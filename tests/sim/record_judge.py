"""The judge of configuration records: two contents that passed and one that failed, for each node.

It hears the committed events, and compares what a node's records must be with those on disk.
"""

from __future__ import annotations

from collections.abc import Sequence

from machines.model.configuration import NodeConfiguration
from machines.model.events import Event, PhaseMoved, StepRecorded
from machines.model.rollout import Failure, FailureCode
from machines.states import Outcome, Trigger

Given = tuple[str, str] | None
"""A content, and the rollout that gave it."""

_BLAMED = (FailureCode.FAILED, FailureCode.RESTORED_ITSELF)


class RecordJudge:
    """What the records must be, from the events alone."""

    def __init__(self) -> None:
        self._given: dict[tuple[str, str], str] = {}
        self._passed: dict[str, list[Given]] = {}
        self._failed: dict[str, Given] = {}

    def on_commit(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, StepRecorded) and event.content:
                self._given[event.record.rollout, event.record.node] = event.content
            elif isinstance(event, PhaseMoved):
                self._on_transition(event)

    def expected(self, node: str) -> tuple[Given, Given, Given]:
        """Return what must be current, previous and invalid."""
        previous, current = self._passed.get(node, [None, None])
        return current, previous, self._failed.get(node)

    def _on_transition(self, event: PhaseMoved) -> None:
        rollout, node = event.rollout, event.node
        if event.trigger in (Trigger.ADMITTED, Trigger.ROLLBACK_ORDERED):
            self._given.pop((rollout, node), None)
        passed = self._passed.setdefault(node, [None, None])
        is_current = passed[1] is not None and passed[1][1] == rollout
        content = self._given.get((rollout, node))
        if event.outcome is Outcome.ROLLED_BACK:
            if passed[0] is not None and passed[0][1] == rollout:
                passed[0] = None  # no rollback of a later rollout brings it back
            if is_current:
                passed[:] = [None, passed[0]]
        elif content is not None and event.trigger is Trigger.VERIFIED:
            if passed[1] is None or passed[1][0] != content:
                passed[0] = passed[1]
            passed[1] = content, rollout
            if (self._failed.get(node) or ("",))[0] == content:
                del self._failed[node]
        elif content is not None and _blames_change(event.failure):
            self._failed[node] = content, rollout
            if event.trigger is Trigger.SOAK_CHECK_FAILED and is_current:
                passed[:] = [None, passed[0]]


def _blames_change(failure: Failure | None) -> bool:
    # A restore without a daemon says nothing of the change.
    return failure is not None and failure.code in _BLAMED and failure.step != "guard.unattended"


def on_disk(records: NodeConfiguration) -> tuple[Given, Given, Given]:
    """Return the records in the form of expected()."""
    current, previous, invalid = (
        None if each is None else (each.content, each.rollout)
        for each in (records.current, records.previous, records.invalid)
    )
    return current, previous, invalid
