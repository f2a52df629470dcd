"""The in-memory fake of the Observer: nodes are up unless a test says otherwise."""

from __future__ import annotations

from collections.abc import Sequence

from machines.model.node import NodeHealth, Observation
from rolloutd.ports import Clock, Host


class FakeObserver:
    """ports.Observer; `sights` and `foreign` are what a test says of nodes, `asked` who was looked at."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.health: dict[str, NodeHealth] = {}
        self.cordoned_by_other: set[str] = set()
        self.observed_nodes: list[str] = []

    async def observe(self, hosts: Sequence[Host]) -> Sequence[Observation]:
        """Say what the test said."""
        self.observed_nodes += [host.name for host in hosts]
        return [self._observe(host.name) for host in hosts]

    def _observe(self, node: str) -> Observation:
        sight = self.health.get(node, NodeHealth.UP)
        return Observation(
            node, sight, self._clock.now(), f"said to be {sight}", node in self.cordoned_by_other
        )
