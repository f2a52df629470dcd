"""The in-memory fake of a Shelf: things with the instant they were touched at, some of them at work."""

from __future__ import annotations

import errno
from collections.abc import Sequence

from rolloutd.ports import Artifact


class FakeArtifactStore:
    """ports.Shelf; `things` are instants by name, `busy` those that are at work."""

    def __init__(self, **things: float) -> None:
        self.artifacts = dict(things)
        self.in_use: set[str] = set()
        self.stuck: set[str] = set()
        """Those that cannot be removed."""
        self.error: Exception | None = None
        """What each list raises."""

    async def list_artifacts(self) -> Sequence[Artifact]:
        """Return all things."""
        if self.error is not None:
            raise self.error
        return [Artifact(name, at, name.partition(".")[0]) for name, at in sorted(self.artifacts.items())]

    async def remove(self, name: str, *, unmodified_since: float) -> bool:
        """Remove a thing."""
        if name in self.stuck:
            raise PermissionError(errno.EPERM, "Operation not permitted")
        if name in self.in_use or self.artifacts.get(name, 0.0) > unmodified_since:
            return False
        self.artifacts.pop(name, None)
        return True
