"""Puts nodes back in service that stayed out of it for somebody's hold, once nobody holds them.

What is kept is told by the nodes themselves, so a hold that is released while
the daemon is down, or runs out, ends alike.  A node that failed, or that a
rollout still has isolated, waits for that.  It knows isolators as ports.
"""

from __future__ import annotations

import asyncio
import logging

from machines.node import Observation
from machines.stands import held
from machines.states import Phase
from rolloutd.driving.gear import Gear
from rolloutd.errors import RolloutdError
from rolloutd.ports import Keeping, Ok
from rolloutd.ports.border import answering_for
from rolloutd.state import State

log = logging.getLogger("rolloutd.watching.keeping")

AGAIN_S = 5.0
"""Before a kept node that could not be put back is tried again; the word that it is back takes less."""


class Kept:
    """The kept nodes that are being put back."""

    def __init__(self, state: State, gear: Gear) -> None:
        self._state = state
        self._gear = gear
        self._asked: set[str] = set()

    def ask(self, tasks: asyncio.TaskGroup) -> None:
        """Put back beside the loop whom nobody holds any more, what is already on its way left out."""
        for seen in self._state.index.kept():
            if seen.node not in self._asked and self._may_go(seen):
                self._asked.add(seen.node)
                tasks.create_task(self._let_go(seen), name=f"let go {seen.node}")

    def _may_go(self, seen: Observation) -> bool:
        index = self._state.index
        if index.limits.observe_only or seen.node not in index.nodes:
            return False
        if seen.foreign and held(index, seen.node) is not None:
            return False
        return not any(each.isolated or each.phase is Phase.FAILED for each in index.targets_on(seen.node))

    async def _let_go(self, seen: Observation) -> None:
        try:
            await self._try(seen)
            await self._state.clock.sleep(AGAIN_S)
        finally:
            self._asked.discard(seen.node)
            self._state.poke()

    async def _try(self, seen: Observation) -> None:
        try:
            isolator = self._gear.isolators[seen.kept]
            assert isinstance(isolator, Keeping)
            with answering_for(f"isolator {seen.kept}"):
                result = await isolator.let_go(self._state.host(seen.node))
        except (RolloutdError, TimeoutError) as error:
            why = str(error) or "no answer in time"
            log.warning("%s: it could not be put back after its hold: %s", seen.node, why)
            return
        say = log.info if isinstance(result, Ok) else log.warning
        say("%s: nobody holds it any more: %s", seen.node, result.text)
