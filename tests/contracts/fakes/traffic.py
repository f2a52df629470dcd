"""The in-memory fake of the TrafficProbe: nodes are idle unless a test says otherwise."""

from __future__ import annotations

from rolloutd.ports import Busy, Ok, StepContext, Unknown


class FakeTrafficProbe:
    """ports.TrafficProbe; `busy` says what of nodes with traffic, `unknown` is who cannot be judged."""

    def __init__(self) -> None:
        self.busy: dict[str, str] = {}
        self.unknown: set[str] = set()
        self.probed_nodes: list[str] = []

    async def probe(self, ctx: StepContext) -> Ok | Busy | Unknown:
        """Say what the test said."""
        node = ctx.host.name
        self.probed_nodes.append(node)
        if node in self.unknown:
            return Unknown(f"{node}: traffic is unknown")
        if node in self.busy:
            return Busy(self.busy[node])
        return Ok(f"{node} has no client traffic")
