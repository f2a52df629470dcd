"""Port of removable data on disk outside the database: runs and trees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


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
