"""What the daemon's machine keeps of a run elsewhere: its events, its result, and what it is of."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from machines.model.rollout import FailureCode
from rolloutd.adapters.ansible.progress import Progress
from rolloutd.adapters.ansible.run_directory import RunDirectory
from rolloutd.adapters.kubernetes_jobs.report import parse_line
from rolloutd.ports import Artifact, Failed, Ok, RunRequest, RunState, Unknown


@dataclass(slots=True)
class RunRecord:
    """One run in a directory of its own; without what it is of, nothing is known of it here."""

    directory: RunDirectory
    last_line: int = -1
    _progress: Progress | None = None
    _offset: int = 0
    """Bytes of the events that are in the progress: a log has megabytes, and each second it is read."""

    @property
    def exists(self) -> bool:
        return bool(self.metadata)

    @property
    def metadata(self) -> Mapping[str, Any]:
        return self.directory.read_metadata()

    def create(self, **metadata: Any) -> None:
        """Create the record, or add what it lacks: another machine's run is found before it is described."""
        self.directory.path.mkdir(mode=0o700, exist_ok=True)
        known = self.metadata
        if not metadata.keys() <= known.keys():
            self._write_metadata({"began_at": time.time(), **metadata, **known})

    def set_uid(self, uid: str) -> None:
        self._write_metadata({**self.metadata, "uid": uid})

    def note_begun(self) -> None:
        """Remember that a container was started: without its pod the run is unknown from then on."""
        if not self.metadata.get("begun"):
            self._write_metadata({**self.metadata, "begun": True})

    @property
    def result(self) -> Ok | Failed | Unknown | None:
        try:
            kind, text, output, code = json.loads((self.directory.path / "result").read_text())
        except (FileNotFoundError, NotADirectoryError, ValueError):
            return None
        if kind == "Failed":
            return Failed(text, output, code=FailureCode(code))
        return Ok(text, output) if kind == "Ok" else Unknown(text)

    def store_result(self, result: Ok | Failed | Unknown) -> None:
        """Store the result once: what was unknown stays unknown."""
        code = str(result.code) if isinstance(result, Failed) else ""
        content = [type(result).__name__, result.text, getattr(result, "output", ""), code]
        draft = self.directory.path / "result.new"
        self.directory.write(draft, content)
        if self.result is None:
            draft.replace(self.directory.path / "result")

    @property
    def is_forgotten(self) -> bool:
        """Whether a restored database does not know the run, which may begin again."""
        return (self.directory.path / "forgotten").exists()

    def forget(self) -> None:
        (self.directory.path / "forgotten").touch(mode=0o600)

    def append(self, lines: Mapping[int, Mapping[str, Any]]) -> None:
        """Append the events that are new, each once and in order; a gap is an event too."""
        if self.last_line < 0:
            self.last_line = self._count()
        for number in sorted(each for each in lines if each > self.last_line):
            if number > self.last_line + 1:
                self._write({"kind": "log", "text": f"{number - self.last_line - 1} events are lost"})
            self._write({**lines[number], "n": number})
            self.last_line = number

    def state(self, result: Ok | Failed | Unknown | None, waits: str) -> RunState:
        metadata = self.metadata
        progress = self._progress or Progress(str(metadata.get("node", "")))
        while lines := self.directory.read_events(self._offset):
            for line in lines:
                progress = progress.apply_event(line.event)
            self._progress, self._offset = progress, lines[-1].offset
        state = progress.run_state(result, metadata.get("began_at"))
        return (
            state if progress.task or not waits else RunState(result, state.percent, waits, state.started_at)
        )

    def remove(self) -> None:
        # The mark last: without it, what a kill leaves would be a result.
        for path in sorted(self.directory.path.glob("*"), key=lambda each: each.name == "forgotten"):
            path.unlink(missing_ok=True)
        if self.directory.path.is_dir():
            self.directory.path.rmdir()
        self.last_line, self._progress, self._offset = -1, None, 0

    def artifact(self) -> Artifact:
        modified_at = self.directory.path.stat().st_mtime
        return Artifact(self.directory.path.name, modified_at, str(self.metadata.get("rollout", "")))

    def _count(self) -> int:
        last, offset = 0, 0
        while lines := self.directory.read_events(offset):
            last = max(last, *(int(line.event.get("n", 0)) for line in lines))
            offset = lines[-1].offset
        return last

    def _write_metadata(self, metadata: Mapping[str, Any]) -> None:
        """Write the metadata as a whole: a kill or a full disk leaves what was there."""
        draft = self.directory.path / "run.new"
        self.directory.write(draft, metadata)
        draft.replace(self.directory.path / "run.json")

    def _write(self, event: Mapping[str, Any]) -> None:
        with self.directory.events_file.open("a") as file:
            file.write(json.dumps(event) + "\n")


def describe(request: RunRequest) -> dict[str, Any]:
    return {
        "run": request.run_id,
        "node": request.node,
        "rollout": request.rollout,
        "attempt": request.attempt,
        "step": request.step,
        "playbook": request.playbook,
        "timeout_s": request.timeout_s,
    }


def numbered(text: str) -> dict[int, Mapping[str, Any]]:
    """Return the events of a log by their numbers; what is not a whole line of ours is left out."""
    return dict(filter(None, map(parse_line, text.splitlines())))


def records_in(directory: Path) -> list[RunRecord]:
    return [RunRecord(RunDirectory(path)) for path in sorted(directory.iterdir()) if path.is_dir()]
