"""The in-memory fake of checkpoints: nodes whose facts are a dictionary."""

from __future__ import annotations

from collections.abc import Mapping

from rolloutd.errors import NodeUnreachable
from rolloutd.ports import Checkpoint, Host, without_rollout


class FakeCheckpoints:
    """ports.Checkpoints; nodes in `down` do not answer."""

    def __init__(self) -> None:
        self.facts: dict[str, dict[tuple[str, str], Checkpoint]] = {}
        self.down: set[str] = set()

    async def read(self, host: Host, *, timeout_s: float) -> Mapping[tuple[str, str], Checkpoint]:
        """Return the checkpoints of a node."""
        if host.name in self.down:
            raise NodeUnreachable(f"{host.name}: no answer")
        return dict(self.facts.get(host.name, {}))

    async def write(self, host: Host, checkpoint: Checkpoint, *, timeout_s: float) -> None:
        """Add or replace a checkpoint."""
        known = await self.read(host, timeout_s=timeout_s)
        self.facts[host.name] = {**known, (checkpoint.plan, checkpoint.stage): checkpoint}

    async def remove(self, host: Host, rollout: str, *, timeout_s: float) -> None:
        """Remove the checkpoints of a rollout."""
        known = await self.read(host, timeout_s=timeout_s)
        self.facts[host.name] = without_rollout(known, rollout)
