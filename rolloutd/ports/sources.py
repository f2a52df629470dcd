"""Ports of playbook sources, traffic probes and notifiers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from machines.model.step_record import Busy, Ok, Unknown
from rolloutd.ports.steps import StepContext
from rolloutd.ports.types import PinnedSource


class SourceStore(Protocol):
    async def pin_git(self, url: str, ref: str) -> PinnedSource:
        """Resolve a branch, tag or commit, store its tree and install what it requires.

        Raises SourceFailed and Refused.
        """

    async def store_upload(self, archive: bytes) -> PinnedSource:
        """Store a plain or gzipped tar archive under its content hash; raises Refused for an invalid one."""

    async def pin_upload(self, upload: str) -> PinnedSource:
        """Return an upload by its content hash, with what is installed for it.

        Raises NotFound and SourceFailed.
        """

    def tree_path(self, pinned: PinnedSource) -> Path:
        """Return the directory of a tree on this machine; raises NotFound."""

    async def find_tree(self, pinned: PinnedSource) -> Path:
        """Return the directory of a stored tree, fetched first if only another machine has it.

        Raises NotFound and SourceFailed.
        """


class TrafficProbe(Protocol):
    """Reports whether client traffic runs on a node, without changing it.

    `Busy.text` and `Unknown.text` are sentences that name the node: users read them as the reason why it
    waits.
    """

    async def probe(self, ctx: StepContext) -> Ok | Busy | Unknown:
        """Probe once; a node is never started on Unknown or an error."""


class Anchor(Protocol):
    """A place outside this machine to which lines are appended."""

    @property
    def name(self) -> str:
        """Its name in the log and in sentences."""

    async def append(self, line: str) -> None:
        """Append one line; raises AdapterFailed, NodeUnreachable and TimeoutError."""

    async def read(self) -> Sequence[str]:
        """Return the last lines, at least a hundred if there are so many; raises like append()."""


@dataclass(frozen=True, slots=True)
class Notification:
    """One notification to people or services; `event` is a name of the setting `notify.events`."""

    event: str
    title: str
    text: str = ""
    rollout: str = ""
    node: str = ""
    gate: str = ""
    wave: str = ""
    adapter: str = ""
    """The adapter that it is about, which does not get it."""
    at: float = 0.0


@dataclass(frozen=True, slots=True)
class Message:
    """Notifications that are sent at once: as a text for people, one by one for services."""

    title: str
    text: str
    notifications: Sequence[Notification] = ()
    omitted: int = 0
    """Number of notifications that are only counted."""


class Notifier(Protocol):
    @property
    def name(self) -> str:
        """Its name in the log, without a password."""

    async def send(self, message: Message) -> None:
        """Send one message, in a repetition the same; raises NotifyFailed."""
