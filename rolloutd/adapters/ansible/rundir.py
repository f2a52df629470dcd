"""The directory of one run: what is in which file, who may write it and how it is read.

It knows names and formats; what a run is for and what its events mean is not
its business.  Everything in it is readable by the daemon's user alone, because
host variables may hold passwords.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rolloutd.adapters.ansible import wrapper
from rolloutd.adapters.ansible.processes import Claim

EVIDENCE_BYTES = 16 * 1024
"""The end of the output that goes into a result: a screenful for a person, not the log."""

LINE_LIMIT_BYTES = 64 * 1024
"""The callback's lines are far shorter; a longer one is not the callback's."""

READ_LIMIT_BYTES = 4 * 1024 * 1024
"""Events read at once: a long run is followed in pieces, never in one gulp."""


@dataclass(frozen=True, slots=True)
class Status:
    """How a run ended; `ended` is exit, limit or cancelled, `code` negative for a signal."""

    ended: str
    code: int
    began_at: float
    duration_s: float
    left: int


@dataclass(frozen=True, slots=True)
class Line:
    """One event as it was written; `offset` is where the next one starts."""

    offset: int
    event: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class RunDir:
    """One run's directory by its path."""

    path: Path

    @property
    def events_file(self) -> Path:
        """What the callback writes."""
        return self.path / "events.jsonl"

    @property
    def inventory_file(self) -> Path:
        """The static inventory of all hosts, under this run's own name for it."""
        return self.path / "inventory.json"

    @property
    def own_inventory_file(self) -> Path:
        """What this run alone knows of its node."""
        return self.path / "own.json"

    @property
    def fence_file(self) -> Path:
        """The play that goes before the user's."""
        return self.path / "fence.json"

    @property
    def variables_file(self) -> Path:
        """The variables that the plan and we give the playbook."""
        return self.path / "variables.json"

    @property
    def ssh_file(self) -> Path:
        """The script that stands for ssh in this run."""
        return self.path / "ssh"

    @property
    def local_tmp(self) -> Path:
        """Ansible's own temporary files on this machine."""
        return self.path / "tmp"

    def make(self) -> None:
        """Make the directory; raises FileExistsError when somebody was here before."""
        self.path.mkdir(mode=0o700, parents=False)

    def write(self, path: Path, value: Any, mode: int = 0o600) -> None:
        """Write JSON, or text as it is, for our eyes only."""
        text = value if isinstance(value, str) else json.dumps(value, indent=1, ensure_ascii=True)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
        with os.fdopen(fd, "w") as file:
            file.write(text)

    def write_command(
        self,
        *,
        run: str,
        limit_s: float,
        sockets: Path,
        cwd: Path,
        argv: Sequence[str],
        environment: Mapping[str, str],
    ) -> None:
        """Write what the wrapper runs, in the wrapper's own format."""
        parts = [run, repr(limit_s), str(sockets), str(cwd), argv[0], str(len(argv)), *argv]
        parts += [f"{name}={value}" for name, value in sorted(environment.items())]
        if any("\0" in part for part in parts):
            raise ValueError("a command holds no NUL")
        self.write(self.path / "command", "\0".join(parts))

    def write_facts(self, facts: Mapping[str, Any]) -> None:
        """Write what the runner must know of its run after a restart."""
        self.write(self.path / "run.json", facts)

    def facts(self) -> Mapping[str, Any]:
        """Return what `write_facts` wrote; empty when it was not reached."""
        found = _read_json(self.path / "run.json")
        return found if isinstance(found, dict) else {}

    def take_claim(self) -> bool:
        """Claim the run for the daemon: a late wrapper does not begin it, and nothing needs its secrets."""
        taken = wrapper.claim(str(self.path / "claim"), "daemon", os.getpid())
        if taken:
            self.forget_secrets()
        return taken

    def forget_secrets(self) -> None:
        """Remove what only a run under way needs: the fleet's variables, and Ansible's temporary files."""
        shutil.rmtree(self.local_tmp, ignore_errors=True)
        for path in (self.inventory_file, self.variables_file, self.ssh_file):
            path.unlink(missing_ok=True)
        facts = self.facts()
        if "connection" in facts:
            draft = self.path / "run.json.new"
            self.write(draft, {name: value for name, value in facts.items() if name != "connection"})
            draft.replace(self.path / "run.json")

    def claim(self) -> Claim | None:
        """Return who holds the run; None when nobody does."""
        try:
            return Claim.parse((self.path / "claim").read_text())
        except FileNotFoundError:
            return None

    def status(self) -> Status | None:
        """Return how the run ended; None while nobody has written it."""
        found = _read_json(self.path / "status")
        return Status(**found) if isinstance(found, dict) else None

    def close_as_cancelled(self, began_at: float) -> None:
        """Record the end of a run whose wrapper cannot do it any more."""
        draft = self.path / f"status.daemon.{os.getpid()}"
        ended = {"ended": "cancelled", "code": 0, "began_at": began_at, "duration_s": 0.0, "left": 0}
        self.write(draft, ended)
        try:
            os.link(draft, self.path / "status")
        except FileExistsError:
            return  # the wrapper was quicker, and it knows better
        finally:
            draft.unlink()

    def events_size(self) -> int:
        """Return how many bytes the events have by now."""
        try:
            return self.events_file.stat().st_size
        except FileNotFoundError:
            return 0

    def lines(self, offset: int) -> Iterator[Line]:
        """Yield the whole events from `offset` on; half a line is left for the next time."""
        try:
            with self.events_file.open("rb") as file:
                file.seek(offset)
                chunk = file.read(READ_LIMIT_BYTES)
        except FileNotFoundError:
            return
        for raw in chunk.splitlines(keepends=True):
            if not raw.endswith(b"\n"):
                return
            offset += len(raw)
            event = _parse(raw)
            if event is not None:
                yield Line(offset, event)

    def read_lines(self, offset: int) -> list[Line]:
        """Return the whole events from `offset` on, as many as are read at once."""
        return list(self.lines(offset))

    def output(self, limit: int = EVIDENCE_BYTES) -> str:
        """Return the end of the output, cut to `limit` bytes; says what was left out."""
        turns = [path for n in (0, 1) if (path := self.path / f"output.{n}").exists()]
        turns.sort(key=lambda path: path.stat().st_mtime_ns)
        kept = b""
        for path in [*reversed(turns), self.path / "output"]:
            if len(kept) < limit:
                kept = _tail(path, limit - len(kept)) + kept
        total = sum(path.stat().st_size for path in [*turns, self.path / "output"] if path.exists())
        text = kept.decode(errors="replace")
        return text if total <= limit else f"[... the beginning is left out ...]\n{text}"


def _tail(path: Path, limit: int) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - limit))
            return file.read(limit)
    except FileNotFoundError:
        return b""


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return None


def _parse(raw: bytes) -> Mapping[str, Any] | None:
    if len(raw) > LINE_LIMIT_BYTES:
        return None
    try:
        event = json.loads(raw)
    except ValueError:
        return None
    return event if isinstance(event, dict) else None
