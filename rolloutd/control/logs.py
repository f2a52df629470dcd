"""A node's log: its steps, and inside them what their runs said, in order.

The log of one attempt only ever grows at its end, so the number of a line is
where a reader resumes.  It reads records and runs and writes nothing.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

from machines.events import RunsRemoved, StepRecord, StepState
from machines.moments import span
from rolloutd.control import wire
from rolloutd.control.identity import Identity
from rolloutd.control.times import moment
from rolloutd.errors import NotFound
from rolloutd.ports import RunEvent, Runner, Store

LONGEST_TEXT = 16_384
"""Characters of one line; a task's output is longer only by mistake."""


class Reader:
    """Reads the log of one node on behalf of one person."""

    def __init__(self, store: Store, runner: Runner, key: tuple[str, str], who: Identity) -> None:
        self._store = store
        self._runner = runner
        self._key = key
        self._who = who

    async def lines(self, attempt: int, offset: int) -> AsyncIterator[wire.LogLine]:
        """Yield the attempt's lines from number `offset` on, and end where there is no more for now."""
        number = 0
        records = await self._store.steps(*self._key, attempt)
        async for at, kind, text, fields, step in self._said(list(records)):
            number += 1
            if number > offset:
                line: wire.LogLine = {
                    "offset": number,
                    "at": moment(at),
                    "kind": kind,
                    "text": text[:LONGEST_TEXT],
                    "attempt": attempt,
                    "step": step,
                }
                if fields:
                    line["fields"] = dict(fields)
                yield line

    async def _said(
        self, records: list[StepRecord]
    ) -> AsyncIterator[tuple[float, str, str, Mapping[str, Any], str]]:
        for place, record in enumerate(records):
            visible = may_see(record, self._who)
            yield record.began_at, "begun", f"{record.action} {record.step}", {}, record.step
            if record.handle and visible:
                async for event in self._events(record):
                    yield event.at, event.kind, event.text, event.fields, record.step
            if record.state is StepState.INTENDED:
                if place < len(records) - 1:
                    continue
                return
            for text in record.output.splitlines() if visible and not record.handle else ():
                yield record.at, "output", text, {}, record.step
            said = f"{record.action} {record.step}: {record.state}" + (
                f": {record.text}" if record.text else ""
            )
            yield record.at, str(record.state), said, {}, record.step

    async def _events(self, record: StepRecord) -> AsyncIterator[RunEvent]:
        """Yield what the run has said; where it is kept no more, that, and why."""
        try:
            async for event in self._runner.events(record.handle):
                yield event
        except NotFound:
            if record.state is not StepState.INTENDED:  # else it waits for its turn to begin
                yield RunEvent(0, record.at, "removed", await self._removal())

    async def _removal(self) -> str:
        rollout, _ = self._key
        told = await self._store.audit(limit=1, rollout=rollout, event=RunsRemoved.__name__)
        if not told:
            return "the output is not on this machine's disk, and it was not rolloutd that removed it"
        kept = span(json.loads(told[0].text)["fields"]["keep_s"])
        return f"the output was removed {kept} after the rollout's end, by the settings' keep"


def sign_of_life(offset: int, now: float) -> wire.LogLine:
    """Return a line that says only that the stream lives."""
    return {"offset": offset, "at": moment(now), "kind": "heartbeat", "text": ""}


def may_see(record: StepRecord, who: Identity) -> bool:
    """Say whether a person may see a step's output: everybody, or the members of the team it belongs to."""
    return record.visible_to is None or who.member_of(record.visible_to) or who.admin
