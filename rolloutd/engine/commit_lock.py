"""The order of commits: steps of different nodes are written together, every other commit alone.

What is written at once shares one transaction of the store, and so one wait for the disk.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager

from machines.model.events import Event, PhaseMoved, PreparationRecorded, StepRecorded
from machines.states import Trigger

MAX_SHARING = 64
"""Commits that are written together: to apply them delays the next decision by some milliseconds."""

ORDINARY_TRIGGERS = frozenset({Trigger.ISOLATED, Trigger.MAINTAINED, Trigger.VERIFIED})
"""Transitions that take no slot and record no failure: invariants judge them by their node alone."""


def nodes_of_steps(events: Sequence[Event]) -> frozenset[str]:
    """Return the nodes of events that concern nothing else; none if one of them does."""
    nodes = set()
    for event in events:
        match event:
            case StepRecorded():
                nodes.add(event.record.node)
            # A build is of the whole rollout.
            case PreparationRecorded(preparation=row) if row.node:
                nodes.add(row.node)
            case PhaseMoved(trigger=trigger) if trigger in ORDINARY_TRIGGERS:
                nodes.add(event.node)
            case _:
                return frozenset()
    return frozenset(nodes)


class CommitLock:
    """A lock that holders for different nodes share; first come, first served."""

    def __init__(self) -> None:
        self._is_exclusive = False
        self._sharing = 0
        self._nodes: set[str] = set()
        self._waiting: deque[tuple[Collection[str], asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def held(self, nodes: Collection[str] = ()) -> AsyncIterator[None]:
        """Hold the lock for these nodes; without nodes, hold it alone."""
        if self._waiting or not self._is_free_for(nodes):
            await self._wait(nodes)
        else:
            self._take(nodes)
        try:
            yield
        finally:
            self._release(nodes)

    async def _wait(self, nodes: Collection[str]) -> None:
        turn = asyncio.get_running_loop().create_future()
        waiting = (nodes, turn)
        self._waiting.append(waiting)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._release(nodes)
            elif waiting in self._waiting:
                self._waiting.remove(waiting)
                self._pass_on()  # it may have been in the way of those behind it
            raise

    def _is_free_for(self, nodes: Collection[str]) -> bool:
        if self._is_exclusive:
            return False
        if not nodes:
            return not self._sharing
        return self._sharing < MAX_SHARING and self._nodes.isdisjoint(nodes)

    def _take(self, nodes: Collection[str]) -> None:
        if nodes:
            self._sharing += 1
            self._nodes.update(nodes)
        else:
            self._is_exclusive = True

    def _release(self, nodes: Collection[str]) -> None:
        if nodes:
            self._sharing -= 1
            self._nodes.difference_update(nodes)
        else:
            self._is_exclusive = False
        self._pass_on()

    def _pass_on(self) -> None:
        """Give the lock to those who wait, in their order, as far as they may hold it together."""
        while self._waiting and self._is_free_for(self._waiting[0][0]):
            nodes, turn = self._waiting.popleft()
            if not turn.done():
                self._take(nodes)
                turn.set_result(None)
