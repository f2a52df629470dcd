"""The step records of one node in one rollout: written before they are believed.

A record is committed first and remembered second, so what a driver knows by
heart is never more than what the next one will read.  It knows neither the plan
nor what a step does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from machines import records
from machines.events import StepAction, StepRecord, StepRecorded, StepState
from rolloutd.ports import Busy, Failed, Ok, StepResult, Unknown
from rolloutd.privacy import guarded
from rolloutd.state import State

OUTPUT_KEPT = 64 * 1024
"""Characters of evidence kept of one step: enough for a stack trace, not for a log."""

_STATES: Mapping[type[Any], StepState] = {
    Ok: StepState.OK,
    Failed: StepState.FAILED,
    Busy: StepState.BUSY,
    Unknown: StepState.UNKNOWN,
}


class Logbook:
    """What was recorded of one node; `records` are oldest first."""

    def __init__(self, state: State, rollout: str, node: str) -> None:
        self._state = state
        self._rollout = rollout
        self._node = node
        self.records: tuple[StepRecord, ...] = ()
        self.unclean = False
        self._is_open = False

    async def open(self) -> None:
        """Read what is recorded, and whether an older run may have left something on the node; once."""
        if self._is_open:
            return
        self.records = tuple(await self._state.store.steps(self._rollout, self._node))
        self.unclean = await self._state.store.unclean(self._node)
        self._is_open = True

    def close(self) -> None:
        """Read again before the next step: what was to be written may not have been."""
        self._is_open = False

    def intend(self, step: str, action: StepAction, number: int, **more: Any) -> StepRecord:
        """Return the record of a step that is about to be done; nothing is written yet."""
        now = self._state.now()
        attempt = self._state.index.target(self._rollout, self._node).attempt
        return StepRecord(
            self._rollout,
            self._node,
            attempt,
            step,
            action,
            number,
            StepState.INTENDED,
            at=now,
            began_at=now,
            **more,
        )

    def prior_of(self, kind: str) -> Any:
        """Return what the isolator of this kind found before it did anything; None where there is none."""
        for record in reversed(self.records):
            if record.action is StepAction.DO and record.step.rpartition(".")[2] == kind:
                return record.prior
        return None

    def known(self, record: StepRecord) -> StepRecord:
        """Return this step as it is recorded: a run's handle may have become another one's."""
        return next((known for known in self.records if records.key(known) == records.key(record)), record)

    async def ended(self, record: StepRecord, result: StepResult, *, isolated: bool | None = None) -> None:
        """Write how a step ended; what a team's own check has said is for its members."""
        result = guarded(result, record.visible_to)
        output = result.output[-OUTPUT_KEPT:] if isinstance(result, Ok | Failed) else ""
        state = _STATES[type(result)]
        over = replace(record, state=state, at=self._state.now(), text=result.text, output=output)
        await self.write(over, isolated=isolated)

    async def write(self, record: StepRecord, *, isolated: bool | None = None) -> None:
        """Write a record; `isolated` is the target's new value, None where it stays."""
        await self._state.commit([StepRecorded(record, isolated)], cause=f"{record.step} {record.state}")
        self.records = records.put(self.records, record)
