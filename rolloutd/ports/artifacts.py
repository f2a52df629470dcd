"""Ports of what is removed in time: runs and trees on disk here, files of ended rollouts on nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rolloutd.ports.nodes import Host


@dataclass(frozen=True, slots=True)
class Artifact:
    """A stored object; `rollout` is whose it is, if the object names it."""

    name: str
    modified_at: float
    rollout: str = ""


class ArtifactStore(Protocol):
    """Stored objects by name; each is complete or absent, also after a crash."""

    async def list_artifacts(self) -> Sequence[Artifact]:
        """Return all objects, sorted by name."""

    async def remove(self, name: str, *, unmodified_since: float) -> bool:
        """Remove an object and return whether it is gone; a missing one is gone.

        An object that is in use, or was modified after `unmodified_since` (epoch seconds), stays.  The next
        call finishes a removal that a crash interrupted.
        """


class SharedDirectories(ArtifactStore, Protocol):
    """Directories that daemons on other machines need too; a name may be a path below another name."""

    async def find(self, name: str) -> Path | None:
        """Return a directory, fetched first if only another machine has it; raises SourceFailed."""

    async def share(self, name: str) -> None:
        """Let other machines find a directory of this machine; raises SourceFailed."""


@dataclass(frozen=True, slots=True)
class NodeFile:
    """A file or directory on a node, as `what` it is; `reason` is why it stays, empty if it does not."""

    what: str
    path: str
    reason: str = ""


class NodeFiles(Protocol):
    """The files of runs and guards: fences and guards' directories."""

    async def clean(self, host: Host, *, dry_run: bool, timeout_s: float) -> Sequence[NodeFile]:
        """Remove them, and return them; an armed guard stays, and with it all that it needs.

        The caller makes sure that no run and no guard begins meanwhile.  `dry_run` removes nothing.
        Idempotent.  Raises NodeUnreachable, TimeoutError, and AdapterFailed if something cannot be removed.
        """
