"""The in-memory twin of the TrafficProbe: nodes are idle unless a test says otherwise."""

from __future__ import annotations

from rolloutd.ports import Busy, Ok, StepContext, Unknown


class FakeTrafficProbe:
    """ports.TrafficProbe; `busy` says what of nodes with traffic, `unknown` is who cannot be judged."""

    def __init__(self) -> None:
        self.busy: dict[str, str] = {}
        self.unknown: set[str] = set()
        self.asked: list[str] = []

    async def look(self, ctx: StepContext) -> Ok | Busy | Unknown:
        """Say what the test said."""
        node = ctx.host.name
        self.asked.append(node)
        if node in self.unknown:
            return Unknown(f"nobody can say whether {node} is busy")
        if node in self.busy:
            return Busy(self.busy[node])
        return Ok(f"{node} has no client traffic")
