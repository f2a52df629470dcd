"""The inventory of a fleet of `bench scale`; it answers from memory."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from rolloutd.ports import DiscoveredNode

POOL_SIZE = 100
"""Nodes of one pool: a fleet of 100,000 has 1,000 pools, as the largest ones have racks."""


class BenchInventory:
    """ports.Inventory of so many nodes."""

    source = "bench"

    def __init__(self, nodes: int) -> None:
        self._nodes, self._relabelled = nodes, 0
        self.answering_s = 0.0
        """CPU seconds in which answers were made: they are no cost of the daemon."""

    async def refresh(self) -> Sequence[DiscoveredNode]:
        # Made again each time, as a source's answer is; in a thread, as a long answer is parsed.
        return await asyncio.to_thread(self._answer)

    def _answer(self) -> Sequence[DiscoveredNode]:
        began_s = time.thread_time()
        roles = ({"role": "spare"} if number < self._relabelled else {} for number in range(self._nodes))
        nodes = [self._node(number, **labels) for number, labels in enumerate(roles)]
        self.answering_s += time.thread_time() - began_s
        return nodes

    def relabel(self, count: int) -> None:
        """Let the next answer differ in so many nodes."""
        self._relabelled = count

    def _node(self, number: int, **labels: str) -> DiscoveredNode:
        # All are canaries, because only this wave lets many nodes fail at once.
        labels = {
            "canary": "yes",
            "team": f"t{number // POOL_SIZE}",
            "rack": f"r{number % POOL_SIZE}",
            **labels,
        }
        variables = {"ansible_host": f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}"}
        return DiscoveredNode(f"n{number:06}", self.source, labels=labels, connection=variables)
