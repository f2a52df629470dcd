"""What the daemon's machine keeps of a change: its request, what was applied, its events and its result."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from machines.model.rollout import FailureCode
from rolloutd.ports import Artifact, Failed, Ok, RunEvent, RunRequest, RunState, Unknown

MAX_EVENTS = 200
"""Events of one run: a change has about ten, one that is retried for an hour some dozens."""

MAX_EVENT_CHARS = 1000
"""Characters of one event; a condition's message may hold the output of a build."""


class RunRecord:
    """One run in a file; without the file nothing is known of it here.

    `applied` has the uid, the generation and the fields of the object as this run wrote them.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._content: dict[str, Any] | None = None

    @property
    def content(self) -> Mapping[str, Any]:
        if self._content is None:
            self._content = self._read()
        return self._content

    def _read(self) -> dict[str, Any]:
        try:
            found = json.loads(self.path.read_text())
        except (FileNotFoundError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    @property
    def exists(self) -> bool:
        return bool(self.content)

    def write(self, **fields: Any) -> None:
        """Write fields durably; the file is complete or as it was."""
        self._content = {**self.content, **fields}
        draft = self.path.with_suffix(".new")
        with draft.open("w") as file:
            json.dump(self._content, file)
            file.flush()
            os.fsync(file.fileno())
        draft.chmod(0o600)
        draft.replace(self.path)

    def create(self, request: RunRequest, now: float, **about: Any) -> None:
        """Create the record unless it is there; it is written before anything is asked of the run."""
        if not self.exists:
            self.write(**describe(request), **about, began_at=now, events=[], applied=None, result=None)
        elif not self.content["node"]:
            # Another machine began it, and what it is of is not in its object.
            self.write(**{**describe(request), "timeout_s": self.content["timeout_s"]})

    @property
    def applied(self) -> Mapping[str, Any] | None:
        found: Mapping[str, Any] | None = self.content.get("applied")
        return found

    @property
    def result(self) -> Ok | Failed | Unknown | None:
        found = self.content.get("result")
        if not found:
            return None
        kind, text, code = found
        if kind == "Failed":
            return Failed(text, code=FailureCode(code))
        return Ok(text) if kind == "Ok" else Unknown(text)

    @property
    def failure_code(self) -> FailureCode:
        """The code of a failure that is not the change's own: a rollback must know of what was applied."""
        return FailureCode.INTERFERENCE if self.applied else FailureCode.NEVER_STARTED

    def note_since(self, field: str, now: float, *, holds: bool) -> float | None:
        """Note whether something holds, and return since when it does."""
        since: float | None = self.content.get(field)
        if holds != (since is not None):
            since = now if holds else None
            self.write(**{field: since})
        return since

    def store_result(self, result: Ok | Failed | Unknown, now: float) -> None:
        """Store the result once: what was unknown stays unknown."""
        if self.result is None:
            code = str(result.code) if isinstance(result, Failed) else ""
            self.note(result.text, 100.0 if isinstance(result, Ok) else None, now)
            self.write(result=[type(result).__name__, result.text, code])

    def note(self, text: str, percent: float | None, now: float) -> None:
        """Record what the run does now, if it is news."""
        events = list(self.content.get("events") or ())
        text = text[:MAX_EVENT_CHARS]
        if events and events[-1][1] == text:
            return
        events = [*events, [now, text]] if len(events) < MAX_EVENTS else events
        known = float(self.content.get("percent") or 0.0)
        self.write(events=events, percent=known if percent is None else percent)

    def events(self, offset: int) -> list[RunEvent]:
        listed = (self.content.get("events") or ())[offset:]
        return [
            RunEvent(offset + number, at, "log", text) for number, (at, text) in enumerate(listed, start=1)
        ]

    def state(self) -> RunState:
        events = self.content.get("events") or ()
        return RunState(
            self.result,
            float(self.content.get("percent") or 0.0),
            "" if not events else events[-1][1],
            self.content.get("began_at"),
        )

    def artifact(self) -> Artifact:
        return Artifact(self.path.stem, self.path.stat().st_mtime, str(self.content.get("rollout", "")))


def records_in(directory: Path) -> list[RunRecord]:
    """Return the records of a directory, each read."""
    found = (RunRecord(path) for path in sorted(directory.glob("*.json")))
    return [each for each in found if each.content.get("run")]


def artifacts_in(directory: Path) -> list[Artifact]:
    artifacts = []
    for each in records_in(directory):
        with suppress(FileNotFoundError):  # removed meanwhile
            artifacts.append(each.artifact())
    return artifacts


def describe(request: RunRequest) -> dict[str, Any]:
    """Return what a run is of; a secret is in it by its name."""
    source = request.source
    return {
        "run": request.run_id,
        "node": request.node,
        "rollout": request.rollout,
        "timeout_s": request.timeout_s,
        "token": request.fencing_token,
        "params": dict(request.params),
        "previous": request.previous,
        "source": source.to_record() if source.pin else {},
        "target": {
            key: value
            for key, value in request.host.connection.items()
            if key in ("cluster_management", "cluster_namespace", "cluster_name", "cluster_id")
        },
    }
