"""Where playbooks come from, what traffic says of a node, and who is told."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rolloutd.ports.steps import Busy, Ok, StepContext, Unknown


@dataclass(frozen=True, slots=True)
class Pinned:
    """A source that can no longer change: a commit or a content hash."""

    kind: str
    pin: str


class Sources(Protocol):
    """Keeps the trees that plans are run from."""

    async def pin_git(self, url: str, ref: str) -> Pinned:
        """Resolve the ref to a commit and keep its tree; raises SourceFailed."""
        ...

    async def keep_upload(self, archive: bytes) -> Pinned:
        """Keep an uploaded tar archive under its content hash; raises Refused for a bad one."""
        ...

    def tree(self, pinned: Pinned) -> Path:
        """Return the directory of a kept tree; raises NotFound."""
        ...


class TrafficProbe(Protocol):
    """Says whether client traffic runs on a node; it changes nothing there.

    `Busy.text` and `Unknown.text` name the node and what was seen, as a whole
    sentence: people read it as the reason for which the node waits.
    """

    async def look(self, ctx: StepContext) -> Ok | Busy | Unknown:
        """Judge once; Unknown, or an error, where nobody can say: a node is never started on that."""
        ...


class Notifier(Protocol):
    """One way to reach people who do not look; it is not asked whether they read it."""

    @property
    def name(self) -> str:
        """What it is called in the log; never with a password in it."""
        ...

    async def send(self, title: str, text: str) -> None:
        """Send one message; raises NotifyFailed."""
        ...
