"""The step records of one node in one rollout.

A record is committed before it enters `records`, so a driver never uses a record that its successor could not
read.  It knows neither the plan nor what a step does.
"""

from __future__ import annotations

from typing import Any

from machines.model.events import StepRecorded
from machines.model.step_record import StepAction, StepRecord
from machines.workflow import records
from machines.workflow.recording import RecordedAction, intent_of, record_of
from rolloutd.configuration.documents import Configuration
from rolloutd.engine.drivers.node_session import NodeSession
from rolloutd.engine.outcomes import redact_for_team
from rolloutd.ports import StepResult


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

    def begin(self, action: RecordedAction, *, handle: str = "") -> StepRecord:
        """Return the record of an action that is about to begin; nothing is written yet."""
        return intent_of(action, self._session.target, self._state.now(), handle=handle)

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
        finished = record_of(record, redact_for_team(result, record.visible_to), self._state.now())
        await self.write(finished, isolated=isolated)

    async def write(
        self,
        record: StepRecord,
        *,
        isolated: bool | None = None,
        configuration: Configuration | None = None,
    ) -> None:
        """Write a record; `isolated` is the target's new value, None leaves it unchanged.

        `configuration` is what a run that begins gives to the node.
        """
        if configuration is None:
            event = StepRecorded(record, isolated)
        else:
            event = StepRecorded(record, isolated, configuration.hash, configuration.document)
        await self._state.commit([event], cause=f"{record.step} {record.state}")
        self.records = records.upsert(self.records, record)
