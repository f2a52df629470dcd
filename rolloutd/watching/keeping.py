"""Puts nodes back in service that stayed out of it for somebody's hold, once nobody holds them.

What is kept is told by the nodes themselves, so a hold that is released while
the daemon is down, or runs out, ends alike.  A node that failed, or that a
rollout still has isolated, waits for that.  It knows isolators as ports.
"""

from __future__ import annotations

import asyncio
import logging

from machines.events import NodeLetGo
from machines.node import Observation
from machines.stands import held
from machines.states import BUSY, Phase
from rolloutd.driving.gear import Gear
from rolloutd.errors import RolloutdError
from rolloutd.ports import Busy, Failed, Keeping, Ok, Unknown
from rolloutd.ports.border import answer_of, answering_for
from rolloutd.state import State

log = logging.getLogger("rolloutd.watching.keeping")

AGAIN_S = 5.0
"""Before a kept node that could not be put back is tried again; the word that it is back takes less.

Doubled with every try: each is in the audit.
"""

AGAIN_MOST_S = 300.0
"""The longest such wait."""


class Kept:
    """The kept nodes that are being put back."""

    def __init__(self, state: State, gear: Gear) -> None:
        self._state = state
        self._gear = gear
        self._asked: set[str] = set()
        self._tries: dict[str, int] = {}

    def ask(self, tasks: asyncio.TaskGroup) -> None:
        """Put back beside the loop whom nobody holds any more, what is already on its way left out."""
        kept = self._state.index.kept()
        names = {seen.node for seen in kept}
        self._tries = {node: tries for node, tries in self._tries.items() if node in names}
        for seen in kept:
            if seen.node not in self._asked and self._may_go(seen):
                self._asked.add(seen.node)
                tasks.create_task(self._let_go(seen), name=f"let go {seen.node}")

    def _may_go(self, seen: Observation) -> bool:
        index = self._state.index
        if index.limits.observe_only or seen.node not in index.nodes:
            return False
        targets = index.targets_on(seen.node)
        if seen.foreign and held(index, seen.node) is not None:
            return False
        ours = (each.phase in BUSY or each.phase is Phase.FAILED or each.isolated for each in targets)
        return not any(ours)

    async def _let_go(self, seen: Observation) -> None:
        try:
            await self._try(seen)
            tries = self._tries[seen.node] = self._tries.get(seen.node, 0) + 1
            await self._state.clock.sleep(min(AGAIN_S * 2 ** (tries - 1), AGAIN_MOST_S))
        finally:
            self._asked.discard(seen.node)
            self._state.poke()

    async def _try(self, seen: Observation) -> None:
        try:
            with answering_for(f"isolator {seen.kept}"):
                isolator = self._gear.isolators[seen.kept]
                assert isinstance(isolator, Keeping), f"{seen.kept} keeps no nodes"
            async with self._state.deciding() as commit:
                if not self._may_go(seen):
                    return  # somebody holds it again, or has it in hand
                # Written first: whoever was deposed meanwhile must not touch it.
                event = NodeLetGo(seen.node, seen.kept, self._state.now())
                await commit([event], "nobody holds it any more")
            with answering_for(f"isolator {seen.kept}"):
                said = await isolator.let_go(self._state.host(seen.node))
            result = answer_of(f"isolator {seen.kept}", said, Ok, Failed, Busy, Unknown)
        except (RolloutdError, TimeoutError) as error:
            why = str(error) or "no answer in time"
            log.warning("%s: it could not be put back after its hold: %s", seen.node, why)
            return
        say = log.info if isinstance(result, Ok) else log.warning
        say("%s: nobody holds it any more: %s", seen.node, result.text)
