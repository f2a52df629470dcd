"""A small kind of change, `note`: each node has one note, and a run replaces it.

The notes outlive the runner, as objects of a cluster outlive the daemon.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint
from typing import Any

from machines.model.node import NodeKind
from machines.model.plan import Capability
from machines.model.rollout import FailureCode
from rolloutd import plugin
from rolloutd.errors import NotFound, RunnerUnavailable
from rolloutd.planfile import change
from rolloutd.planfile.model import PlanDocument, Spec
from rolloutd.planfile.schema import schema_of_model
from rolloutd.planfile.steps import step_model
from rolloutd.plugin import CHANGES, Field, Params, Registration, Values
from rolloutd.ports import Failed, Host, Ok, RunEvent, RunnerStatus, RunRequest, RunState, Unknown


class NoteParams(Params):
    """Writes a note for the node."""

    text: str = Field(min_length=1, max_length=2000, description="What the note says.")
    by: str = Field(default=plugin.ABSENT, description="Who wrote it.")
    values: Values = Field(default=plugin.ABSENT, description="What the note names.")


NOTE = Registration(None, NoteParams, frozenset({Capability.RECORDS_PREVIOUS}))
FINAL_NOTE = Registration(None, NoteParams, node_kinds=frozenset({NodeKind.KUBERNETES}))
"""A kind that cannot be undone, for nodes of Kubernetes only."""


@contextmanager
def note_installed() -> Iterator[None]:
    """Install the kinds `note` and `final-note`, so that plans can name them.

    Inside another it does nothing: to build the models of plans takes a twentieth of a second.
    """
    if KINDS.keys() <= plugin.installed_adapters(CHANGES).keys():
        yield
        return
    real = plugin.entry_points

    def entry_points(*, group: str) -> Any:
        own = (EntryPoint(kind, f"{__name__}:{name}", CHANGES) for kind, name in KINDS.items())
        return [*real(group=group), *own] if group == CHANGES else real(group=group)

    before = Spec.model_fields["maintain"].annotation
    plugin.entry_points = entry_points
    try:
        plugin._load_entry_points.cache_clear()
        stage = step_model("Stage", "One run.", CHANGES, base=change._Stage)
        _rebuild(list[stage])  # type: ignore[valid-type]
        yield
    finally:
        plugin.entry_points = real
        plugin._load_entry_points.cache_clear()
        _rebuild(before)


KINDS = {"note": "NOTE", "final-note": "FINAL_NOTE"}


def noted_text(request: RunRequest) -> str:
    """Return what a run writes: the recorded text of a rollback, else that of the plan."""
    return str((json.loads(request.previous) if request.previous else request.params)["text"])


def _rebuild(stages: Any) -> None:
    Spec.model_fields["maintain"].annotation = stages
    Spec.model_rebuild(force=True)
    PlanDocument.model_rebuild(force=True)
    schema_of_model.cache_clear()


@dataclass(slots=True)
class Notes:
    """The notes of all nodes, and what was asked of their runner."""

    text: dict[str, str] = field(default_factory=dict)
    runs: dict[str, RunState] = field(default_factory=dict)
    applied: list[RunRequest] = field(default_factory=list)
    read: list[str] = field(default_factory=list)
    cleaned: list[str] = field(default_factory=list)
    is_down: bool = False
    silent: set[str] = field(default_factory=set)
    """Nodes whose notes alone are out of reach."""


class NoteRunner:
    """ports.Runner and RecordsPrevious of the kind `note`."""

    def __init__(self, notes: Notes, place: str = "notes") -> None:
        self._notes = notes
        self.status = RunnerStatus(parallel=4)
        self.place = place

    async def check_available(self) -> None:
        if self._notes.is_down:
            raise RunnerUnavailable("the notes are out of reach")

    async def find_part_problems(self) -> dict[str, str]:
        return dict.fromkeys(self._notes.silent, "its note is out of reach")

    async def read_previous(self, request: RunRequest) -> str:
        await self.check_available()
        self._notes.read.append(request.node)
        return json.dumps({"text": self._notes.text.get(request.node)})

    async def start(self, request: RunRequest) -> str:
        await self.check_available()
        if request.node in self._notes.silent:
            raise RunnerUnavailable("its note is out of reach", part=request.node)
        if request.run_id not in self._notes.runs:
            self._notes.applied.append(request)
            self._notes.text[request.node] = noted_text(request)
            is_bad = self._notes.text[request.node] == "bad"
            result = Failed(f"the note on {request.node} cannot be read") if is_bad else Ok("noted")
            self._notes.runs[request.run_id] = RunState(result, 100.0)
        return request.run_id

    async def get_state(self, handle: str) -> RunState:
        await self.check_available()
        if handle not in self._notes.runs:
            raise NotFound(f"{handle}: no such run")
        return self._notes.runs[handle]

    async def wait_for_change(self, handle: str) -> RunState:
        return await self.get_state(handle)

    async def read_events(self, handle: str, offset: int = 0) -> AsyncIterator[RunEvent]:
        for event in [RunEvent(1, 0.0, "task", "write the note")][offset:]:
            yield event

    async def cancel(self, handle: str) -> None:
        if handle in self._notes.runs and self._notes.runs[handle].result is None:
            self._notes.runs[handle] = RunState(Failed("cancelled", code=FailureCode.INTERFERENCE))

    async def discard(self, handle: str) -> None:
        self._notes.runs.pop(handle, None)

    async def clean_up_stale_runs(
        self, host: Host, *, timeout_s: float, fencing_token: str = ""
    ) -> Ok | Failed | Unknown:
        self._notes.cleaned.append(host.name)
        return Ok()
