"""Looks for client traffic on nodes that would start otherwise, beside the loop, a few at a time.

It looks at whom the core names and nobody else; what was seen is told to the
core and remembered nowhere else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from machines.decision import Probe
from rolloutd.driving.gear import Gear
from rolloutd.driving.probing import look_by_all
from rolloutd.state import State

AT_ONCE = 8
"""Nodes looked at at a time: it is somebody else's server that is asked."""


class Probing:
    """Looks on their way."""

    def __init__(self, state: State, gear: Gear) -> None:
        self._state = state
        self._gear = gear
        self._asked: set[Probe] = set()
        self._places = asyncio.Semaphore(AT_ONCE)

    def ask(self, tasks: asyncio.TaskGroup, wanted: Sequence[Probe]) -> None:
        """Look beside the loop, what is already on its way left out."""
        for each in wanted:
            if each not in self._asked:
                self._asked.add(each)
                tasks.create_task(self._look(each), name=f"look for traffic on {each.rollout}/{each.node}")

    async def _look(self, asked: Probe) -> None:
        index = self._state.index
        try:
            async with self._places:
                # It may have left, or its rollout be over, while it waited for its place.
                if asked.rollout in index.rollouts and asked.node in index.nodes:
                    await look_by_all(self._state, self._gear, asked.rollout, asked.node)
        finally:
            self._asked.discard(asked)
            self._state.poke()
