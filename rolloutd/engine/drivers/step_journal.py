"""The step records of one node in one rollout.

A record is committed before it enters `records`, so a driver never uses a record that its successor could not
read.  It knows neither the plan nor what a step does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from machines.model.events import StepAction, StepRecord, StepRecorded, StepState
from machines.workflow import records
from rolloutd.configuration import content_hash
from rolloutd.engine.drivers.node_session import NodeSession
from rolloutd.ports import JSON, Busy, Failed, Ok, StepResult, Unknown
from rolloutd.redaction import redact_for_team

MAX_OUTPUT_CHARS = 64 * 1024
"""Characters of evidence kept of one step: enough for a stack trace, not for a log."""

_STATE_OF_RESULT: Mapping[type[Any], StepState] = {
    Ok: StepState.OK,
    Failed: StepState.FAILED,
    Busy: StepState.BUSY,
    Unknown: StepState.UNKNOWN,
}


class StepJournal:
    """The records of one node; `records` are oldest first."""

    def __init__(self, session: NodeSession) -> None:
        self._session = session
        self._state = session.state
        self.records: tuple[StepRecord, ...] = ()
        self.has_unfinished_run = False
        self._is_loaded = False

    async def load(self) -> None:
        """Read the records, and whether a run may have left processes, unless both are valid."""
        if self._is_loaded:
            return
        self.records = tuple(await self._state.store.load_steps(self._session.rollout, self._session.node))
        await self.update_unfinished_run()
        self._is_loaded = True

    async def update_unfinished_run(self) -> None:
        """Read again whether a run may have left processes on the node."""
        self.has_unfinished_run = await self._state.has_unfinished_run(self._session.node)

    def invalidate(self) -> None:
        """Make the next load() read the store again: the last write may have failed or been cancelled."""
        self._is_loaded = False

    def begin(self, step: str, action: StepAction, number: int, **fields: Any) -> StepRecord:
        """Return the record of a step that is about to begin; nothing is written yet."""
        now = self._state.now()
        return StepRecord(
            self._session.rollout,
            self._session.node,
            self._session.target.attempt,
            step,
            action,
            number,
            StepState.INTENDED,
            at=now,
            began_at=now,
            **fields,
        )

    def prior_of_kind(self, kind: str) -> Any:
        """Return the state that the isolator of this kind found before it changed anything, else None."""
        steps = {spec.name for spec in self._session.plan.isolate if spec.kind == kind}
        for record in reversed(self.records):
            if record.action is StepAction.APPLY and record.step in steps:
                return record.prior
        return None

    def recorded_version(self, record: StepRecord) -> StepRecord:
        """Return the recorded version of this step: the runner may have given its run another handle."""
        return next(
            (known for known in self.records if records.record_key(known) == records.record_key(record)),
            record,
        )

    async def finish(self, record: StepRecord, result: StepResult, *, isolated: bool | None = None) -> None:
        """Write how a step ended; only its team reads the result of a team's own check."""
        result = redact_for_team(result, record.visible_to)
        # The end: the error is in the last lines.
        output = result.output[-MAX_OUTPUT_CHARS:] if isinstance(result, Ok | Failed) else ""
        state = _STATE_OF_RESULT[type(result)]
        if isinstance(result, Ok) and result.value is not None:
            record = replace(record, prior=result.value)
        if isinstance(result, Failed):
            record = replace(record, code=result.code)
        finished = replace(record, state=state, at=self._state.now(), text=result.text, output=output)
        await self.write(finished, isolated=isolated)

    async def write(
        self,
        record: StepRecord,
        *,
        isolated: bool | None = None,
        configuration: Mapping[str, JSON] | None = None,
    ) -> None:
        """Write a record; `isolated` is the target's new value, None leaves it unchanged.

        `configuration` is what a run that begins gives to the node.
        """
        content = "" if configuration is None else content_hash(configuration)
        event = StepRecorded(record, isolated, content, configuration)
        await self._state.commit([event], cause=f"{record.step} {record.state}")
        self.records = records.upsert(self.records, record)
