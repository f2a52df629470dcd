"""A node's log: its steps, with the output of their runs, in order.

The log of one attempt grows only at its end, so a reader resumes at the number
of a line.  It writes nothing.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace

from machines.model.events import RunOutputPruned
from machines.model.preparation import LOCALHOST, Preparation, PreparationState
from machines.model.step_record import StepRecord, StepState
from machines.model.timefmt import format_duration
from machines.workflow.steps import StepPrefix, step_id
from rolloutd.control.formats import format_timestamp
from rolloutd.control.identity import Identity
from rolloutd.control.nodes import wire_nodes
from rolloutd.errors import NotFound, RunnerUnavailable
from rolloutd.ports import RunEvent, Runners
from rolloutd.store import Store
from rolloutd.texts.formats import format_size

MAX_LINE_CHARS = 16_384
"""Maximum characters of one line; a task's output is longer only by mistake."""


class RunOutput:
    """The events of runs for one stream: each event is read once, however often the stream asks."""

    def __init__(self, runner: Runners) -> None:
        self._runner = runner
        self._read: dict[str, tuple[int, int]] = {}
        """How many events of each run were read, and where the next one starts."""

    def handle_here(self, row: Preparation) -> str:
        """Return the handle of a stage's run on this machine; an ended stage names none."""
        return self._runner.run_id_for(row.run_name, row.node or LOCALHOST)

    def events_read(self, handle: str) -> int:
        return self._read.get(handle, (0, 0))[0]

    async def new_events(self, handle: str) -> AsyncIterator[RunEvent]:
        """Yield the events that were not read yet; raises NotFound for an unknown run."""
        count, offset = self._read.get(handle, (0, 0))
        async for event in self._runner.read_events(handle, offset):
            count += 1
            self._read[handle] = count, event.offset
            yield event


class LogReader:
    def __init__(self, store: Store, runner: Runners, key: tuple[str, str], identity: Identity) -> None:
        self._store = store
        self._output = RunOutput(runner)
        self._key = key
        self._identity = identity

    async def lines(self, attempt: int, offset: int) -> AsyncIterator[wire_nodes.LogLine]:
        """Yield the attempt's lines from number `offset` on, up to the latest; an offset never decreases."""
        number = 0
        records = await self._store.load_steps(*self._key, attempt)
        async for step, event, already_read in self._entries(list(records)):
            number += already_read + 1
            if number > offset:
                yield _line(number, event, attempt, step)

    async def _entries(self, records: list[StepRecord]) -> AsyncIterator[tuple[str, RunEvent, int]]:
        """Yield each step's name and line, and how many lines before it were read by an earlier call."""
        skipped = 0
        for position, record in enumerate(records):
            visible = may_see_output(record, self._identity)
            name = f"{record.action} {record.step}"
            yield record.step, RunEvent(0, record.began_at, "begun", name), skipped
            skipped = 0
            if record.handle and visible:
                skipped = self._output.events_read(record.handle)
                async for event in self._run_events(record):
                    yield record.step, event, skipped
                    skipped = 0
            if record.state is StepState.INTENDED:
                # The last step is in progress; an earlier one without an end was lost in a crash.
                if position < len(records) - 1:
                    continue
                return
            for text in record.output.splitlines() if visible and not record.handle else ():
                yield record.step, RunEvent(0, record.at, "output", text), 0
            summary = f"{name}: {record.state}: {record.text}" if record.text else f"{name}: {record.state}"
            yield record.step, RunEvent(0, record.at, str(record.state), summary), skipped
            skipped = 0

    async def _run_events(self, record: StepRecord) -> AsyncIterator[RunEvent]:
        """Yield the run's output, or one line that says why there is none."""
        try:
            async for event in self._output.new_events(record.handle):
                yield event
        except NotFound:
            if record.state is not StepState.INTENDED:  # an intended run may not have begun
                yield RunEvent(0, record.at, "removed", await self._removal_notice())
        except RunnerUnavailable as error:
            if record.state is not StepState.INTENDED:  # that of a run in progress comes later
                yield RunEvent(0, record.at, "unavailable", f"the output cannot be read now: {error}")

    async def _removal_notice(self) -> str:
        rollout, _ = self._key
        entries = await self._store.read_audit(limit=1, rollout=rollout, event=RunOutputPruned.__name__)
        if not entries:
            return "the output is not on this machine's disk; rolloutd did not remove it"
        kept_for = format_duration(json.loads(entries[0].text)["fields"]["keep_s"])
        return f"the output was removed {kept_for} after the rollout's end (`keep` in the settings)"


async def stage_lines(
    output: RunOutput, row: Preparation, attempt: int, offset: int
) -> AsyncIterator[wire_nodes.LogLine]:
    """Yield the lines of one attempt of a prepare stage from number `offset` on, up to the latest."""
    number, is_latest = 0, attempt == row.attempt
    async for event, already_read in _stage_events(output, row, attempt, is_latest=is_latest):
        number += already_read + 1
        if number > offset:
            yield _line(number, event, attempt, step_id(StepPrefix.PREPARE, row.stage))


async def _stage_events(
    output: RunOutput, row: Preparation, attempt: int, *, is_latest: bool
) -> AsyncIterator[tuple[RunEvent, int]]:
    """Yield how the stage began, its run's new output if it has a run, and how it ended.

    With each goes how many lines before it were read by an earlier call.
    """
    if is_latest:
        yield RunEvent(0, row.began_at, "begun", f"prepare stage {row.stage}"), 0
    handle = (is_latest and row.handle) or output.handle_here(replace(row, attempt=attempt))
    skipped = output.events_read(handle)
    try:
        async for event in output.new_events(handle):
            yield event, skipped
            skipped = 0
    except (NotFound, RunnerUnavailable):
        pass  # the stage has no run, its output was removed, or its runner does not answer now
    if is_latest and row.state is not PreparationState.RUNNING:
        sent = f", {format_size(row.bytes)} sent" if row.bytes else ""
        summary = f"prepare stage {row.stage}: {row.state}{sent}"
        text = f"{summary}: {row.text}" if row.text else summary
        yield RunEvent(0, row.at, row.state.value, text), skipped


def _line(number: int, event: RunEvent, attempt: int, step: str) -> wire_nodes.LogLine:
    line: wire_nodes.LogLine = {
        "offset": number,
        "at": format_timestamp(event.at),
        "kind": event.kind,
        "text": event.text[:MAX_LINE_CHARS],
        "attempt": attempt,
        "step": step,
    }
    if event.fields:
        line["fields"] = dict(event.fields)
    return line


def heartbeat(offset: int, now: float) -> wire_nodes.LogLine:
    return {"offset": offset, "at": format_timestamp(now), "kind": "heartbeat", "text": ""}


def may_see_output(record: StepRecord, identity: Identity) -> bool:
    """Return whether a person may see a step's output: all may, unless it belongs to a team."""
    return record.visible_to is None or identity.is_member_of(record.visible_to) or identity.admin
