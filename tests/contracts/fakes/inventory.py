"""In-memory fakes of the inventory and of its watch: nodes that a test adds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from machines.model.node import NodeHealth, Observation
from rolloutd.errors import SourceFailed
from rolloutd.ports import Clock, DiscoveredNode

SOURCE = "fake"


class FakeInventory:
    """ports.Inventory; `error` makes the next refreshes fail."""

    source = SOURCE

    def __init__(self, *names: str) -> None:
        self.nodes = [DiscoveredNode(name, SOURCE) for name in names]
        self.error = ""

    async def refresh(self) -> Sequence[DiscoveredNode]:
        """Return the nodes; raises SourceFailed."""
        if self.error:
            raise SourceFailed(self.error)
        return list(self.nodes)


class FakeWatch:
    """ports.Watch of a fake inventory: all nodes are up, and `add` is noticed at once."""

    source = SOURCE

    def __init__(self, inventory: FakeInventory, clock: Clock) -> None:
        self._inventory = inventory
        self._clock = clock
        self._changed = asyncio.Event()

    def add(self, name: str) -> None:
        """Add a node to the source."""
        self._inventory.nodes.append(DiscoveredNode(name, SOURCE))
        self._changed.set()

    async def run(
        self,
        on_observed: Callable[[Sequence[Observation]], None],
        on_nodes_changed: Callable[[], None],
        on_tried: Callable[[str], None] = lambda error: None,
    ) -> None:
        """Observe until cancelled."""
        while True:
            now = self._clock.now()
            on_observed([Observation(n.name, NodeHealth.UP, now, "up") for n in self._inventory.nodes])
            await self._changed.wait()
            self._changed.clear()
            on_nodes_changed()
