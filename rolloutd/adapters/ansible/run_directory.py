"""Directory of one run: names, writers and formats of its files.

Only the daemon's user can read it, because host variables may hold passwords.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rolloutd.adapters.ansible import wrapper
from rolloutd.adapters.ansible.processes import Claim
from rolloutd.ports import handle_of_start

MAX_START_ATTEMPTS = 16
"""Directories of one run; each needs one crash of the daemon between preparation and claim."""

MAX_RESULT_OUTPUT_BYTES = 16 * 1024
"""The end of the output that a result contains: a screenful for a person, not the log."""

MAX_LINE_BYTES = 64 * 1024
"""The callback's lines are far shorter; a longer one is from another writer."""

EVENT_TEXTS = ("kind", "host", "task", "play", "text", "on")
"""Fields of an event that are texts, or null."""

MAX_READ_BYTES = 4 * 1024 * 1024
"""Limit of one read of events: a long run is read in parts."""


@dataclass(frozen=True, slots=True)
class RunStatus:
    """The end of a run: `ended` is exit, limit or cancelled, `code` is negative for a signal.

    `left`: processes that the run left.
    `cpu_s` is the CPU time on this machine.
    """

    ended: str
    code: int
    began_at: float
    duration_s: float
    left: int
    cpu_s: float = 0.0


@dataclass(frozen=True, slots=True)
class RunEventLine:
    offset: int
    event: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class RunDirectory:
    path: Path

    @property
    def events_file(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def inventory_file(self) -> Path:
        return self.path / "inventory.json"

    @property
    def connection_file(self) -> Path:
        """The node's variables, by which an unfinished run is ended on the node."""
        return self.path / "connection.json"

    @property
    def node_inventory_file(self) -> Path:
        """The run's own variables of its node."""
        return self.path / "own.json"

    @property
    def fence_file(self) -> Path:
        return self.path / "fence.json"

    @property
    def variables_file(self) -> Path:
        return self.path / "variables.json"

    @property
    def ssh_wrapper_file(self) -> Path:
        """The script that the run uses as ssh."""
        return self.path / "ssh"

    def create(self) -> None:
        """Create the directory; raises FileExistsError."""
        self.path.mkdir(mode=0o700, parents=False)

    def write(self, path: Path, value: Any, mode: int = 0o600) -> None:
        """Write JSON, or a string as it is."""
        text = value if isinstance(value, str) else json.dumps(value, indent=1, ensure_ascii=True)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
        with os.fdopen(fd, "w") as file:
            file.write(text)

    def write_command(
        self,
        *,
        run_id: str,
        timeout_s: float,
        sockets: Path,
        shared_sockets: Path | None = None,
        cwd: Path,
        argv: Sequence[str],
        environment: Mapping[str, str],
    ) -> None:
        places = [str(sockets), str(shared_sockets or ""), str(cwd)]
        parts = [run_id, repr(timeout_s), *places, argv[0], str(len(argv)), *argv]
        parts += [f"{name}={value}" for name, value in sorted(environment.items())]
        if any("\0" in part for part in parts):
            raise ValueError("the run's command: an argument contains NUL; remove it")
        self.write(self.path / "command", "\0".join(parts))

    def write_metadata(self, metadata: Mapping[str, Any]) -> None:
        """Write what the runner needs after a restart."""
        self.write(self.path / "run.json", metadata)

    def read_metadata(self) -> Mapping[str, Any]:
        """Return what write_metadata() wrote, or an empty mapping."""
        found = _read_json(self.path / "run.json")
        return found if isinstance(found, dict) else {}

    def read_connection(self) -> Mapping[str, Any] | None:
        """Return the node's variables while the run is not over."""
        found = _read_json(self.connection_file) or self.read_metadata().get("connection")
        return found if isinstance(found, dict) else None

    def take_claim(self) -> bool:
        """Claim the run for the daemon, so that no wrapper begins it; return whether the claim succeeded."""
        taken = wrapper.take_claim(str(self.path / "claim"), "daemon", os.getpid())
        if taken:
            self.delete_secrets()
        return taken

    def abandon(self) -> None:
        """Keep a wrapper from beginning the run and, if none has, remove what it would have needed."""
        if not self.path.is_dir():
            return
        self.take_claim()
        claim = self.read_claim()
        if claim is not None and claim.holder == "daemon":
            self.delete_secrets()  # also what was written after the claim
            if sockets := self.read_metadata().get("sockets"):
                wrapper.remove_tree(str(sockets))

    def delete_secrets(self) -> None:
        """Remove the fleet's variables and Ansible's temporary files, which only an active run needs.

        The wrapper has done it, unless it was killed or is of rolloutd 0.1.
        """
        wrapper.remove_secrets(str(self.path))
        metadata = self.read_metadata()
        if "connection" in metadata:  # a run of rolloutd 0.1
            draft = self.path / "run.json.new"
            self.write(draft, {name: value for name, value in metadata.items() if name != "connection"})
            draft.replace(self.path / "run.json")

    def read_claim(self) -> Claim | None:
        try:
            return Claim.parse((self.path / "claim").read_text())
        except FileNotFoundError:
            return None

    def may_have_begun(self) -> bool:
        """Return whether a wrapper may begin the run or has begun it, or the run is over."""
        if not self.path.exists():
            return False
        claim = self.read_claim()
        if claim is None or claim.holder == "run":
            return True
        # A run that the daemon claimed never begins; it may have been refused or cancelled.
        return self.read_status() is not None or self.read_metadata().get("refused") is not None

    def read_status(self) -> RunStatus | None:
        found = _read_json(self.path / "status")
        return RunStatus(**found) if isinstance(found, dict) else None

    def record_cancelled(self, began_at: float) -> None:
        """Record the cancellation of a run whose wrapper is gone."""
        draft = self.path / f"status.daemon.{os.getpid()}"
        ended = {"ended": "cancelled", "code": 0, "began_at": began_at, "duration_s": 0.0, "left": 0}
        self.write(draft, ended)
        try:
            os.link(draft, self.path / "status")
        except FileExistsError:
            return  # the wrapper was first, and its status is the true one
        finally:
            draft.unlink()

    def read_environment(self) -> dict[str, str]:
        count, *rest = (self.path / "command").read_text().split("\0")[6:]
        return dict(line.split("=", 1) for line in rest[int(count) :])

    def append_event(self, text: str) -> None:
        """Append an event of the runner's own; on a full disk the log lacks it."""
        line = json.dumps({"at": round(time.time(), 3), "kind": "process", "text": text}) + "\n"
        with contextlib.suppress(OSError):
            fd = os.open(self.events_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            with os.fdopen(fd, "w") as file:
                file.write(line)

    def events_size(self) -> int:
        try:
            return self.events_file.stat().st_size
        except FileNotFoundError:
            return 0

    def iter_events(self, offset: int) -> Iterator[RunEventLine]:
        """Yield the complete events from `offset` on."""
        try:
            with self.events_file.open("rb") as file:
                file.seek(offset)
                chunk = file.read(MAX_READ_BYTES)
        except FileNotFoundError:
            return
        for raw in chunk.splitlines(keepends=True):
            if not raw.endswith(b"\n"):
                return  # still being written, or cut by the read limit: read again from here
            offset += len(raw)
            event = _parse_event(raw)
            if event is not None:
                yield RunEventLine(offset, event)

    def read_events(self, offset: int) -> list[RunEventLine]:
        """Return the complete events from `offset` on, at most one read."""
        return list(self.iter_events(offset))

    def read_output_tail(self) -> str:
        """Return the last MAX_RESULT_OUTPUT_BYTES of the output."""
        rotated = [path for n in (0, 1) if (path := self.path / f"output.{n}").exists()]
        rotated.sort(key=lambda path: path.stat().st_mtime_ns)
        tail = b""
        for path in [*reversed(rotated), self.path / "output"]:
            if len(tail) < MAX_RESULT_OUTPUT_BYTES:
                tail = _read_tail(path, MAX_RESULT_OUTPUT_BYTES - len(tail)) + tail
        total = sum(path.stat().st_size for path in [*rotated, self.path / "output"] if path.exists())
        text = tail.decode(errors="replace")
        return text if total <= MAX_RESULT_OUTPUT_BYTES else f"[... the beginning is left out ...]\n{text}"


def _read_tail(path: Path, limit: int) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - limit))
            return file.read(limit)
    except FileNotFoundError:
        return b""


def directories_of(runs_dir: Path, run_id: str) -> Iterator[RunDirectory]:
    """Yield the directories that a run may have: each is used if the run of the one before never began."""
    for number in range(1, MAX_START_ATTEMPTS + 1):
        yield RunDirectory(runs_dir / handle_of_start(run_id, number))


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return None


def _parse_event(raw: bytes) -> Mapping[str, Any] | None:
    if len(raw) > MAX_LINE_BYTES:
        return None
    try:
        event = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    if not isinstance(event, dict) or not _is_valid_event(event):
        return None
    # Ansible's texts keep bytes of the node that are not UTF-8 as lone surrogates, which nothing can print.
    return (
        json.loads(json.dumps(event, ensure_ascii=False).encode(errors="replace"))
        if b"\\ud" in raw
        else event
    )


def _is_valid_event(event: Mapping[str, Any]) -> bool:
    """Return whether the fields that are read have their types: another program may write to the file."""
    stats = event.get("stats") or {}
    return (
        all(isinstance(event.get(name, ""), str | None) for name in EVENT_TEXTS)
        and isinstance(event.get("at", 0.0), int | float)
        and isinstance(stats, dict)
        and all(isinstance(counts, dict) for counts in stats.values())
    )
