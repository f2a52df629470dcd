"""The in-memory fake of what runs and guards leave on nodes."""

from __future__ import annotations

from collections.abc import Sequence

from rolloutd.errors import NodeUnreachable
from rolloutd.ports import Host, NodeFile


class FakeNodeFiles:
    """ports.NodeFiles: `files` of each node; nodes in `down` do not answer."""

    def __init__(self) -> None:
        self.files: dict[str, list[NodeFile]] = {}
        self.down: set[str] = set()
        self.calls = 0

    async def clean(self, host: Host, *, dry_run: bool, timeout_s: float) -> Sequence[NodeFile]:
        self.calls += 1
        if host.name in self.down:
            raise NodeUnreachable(f"{host.name}: no answer")
        found = self.files.get(host.name, [])
        if not dry_run:
            self.files[host.name] = [each for each in found if each.reason]
        return list(found)
