"""Port of the files that runs and guards leave on a node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from rolloutd.ports.nodes import Host


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
