"""Finds out beforehand, changing nothing, whether nodes could be isolated now.

What is not known in time is unknown, and holds nobody up.  It knows isolators as
ports; what they rehearse is theirs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from machines.decision import Rehearse
from machines.prospects import Prospect
from rolloutd.driving.contexts import step_context
from rolloutd.driving.gear import Gear
from rolloutd.errors import RolloutdError
from rolloutd.ports import Busy, Ok, Rehearsal
from rolloutd.ports.border import answer_of, answering_for
from rolloutd.state import State

AT_ONCE = 8
"""Nodes rehearsed at a time: a rehearsal is a request per pod, and drains go on beside it."""

LIMIT_S = 10.0
"""For one rehearsal: a node that waits for it could be at work."""


class Rehearsing:
    """Rehearsals on their way."""

    def __init__(self, state: State, gear: Gear) -> None:
        self._state = state
        self._gear = gear
        self._asked: set[Rehearse] = set()
        self._places = asyncio.Semaphore(AT_ONCE)

    def ask(self, tasks: asyncio.TaskGroup, wanted: Sequence[Rehearse]) -> None:
        """Rehearse beside the loop, what is already on its way left out."""
        for each in wanted:
            if each not in self._asked:
                self._asked.add(each)
                tasks.create_task(self._rehearse(each), name=f"rehearse {each.rollout}/{each.node}")

    async def _rehearse(self, asked: Rehearse) -> None:
        try:
            async with self._places:
                can, why = await self._judge(asked)
            self._state.index.foresaw(Prospect(asked.rollout, asked.node, can, self._state.now(), why))
        finally:
            self._asked.discard(asked)
            self._state.poke()

    async def _judge(self, asked: Rehearse) -> tuple[bool | None, str]:
        if asked.rollout not in self._state.index.rollouts:
            return None, "its rollout is over"
        try:
            async with asyncio.timeout(LIMIT_S):
                for spec in self._state.index.rollout(asked.rollout).plan.isolate:
                    isolator = self._gear.isolators[spec.kind]
                    if not isinstance(isolator, Rehearsal):
                        continue
                    ctx = await step_context(
                        self._state, self._gear, asked.rollout, asked.node, spec, step=spec.name
                    )
                    with answering_for(f"isolator {spec.kind}"):
                        said = await isolator.could(ctx)
                    result = answer_of(f"isolator {spec.kind}", said, Ok, Busy)
                    if isinstance(result, Busy):
                        return False, result.text
        except (RolloutdError, TimeoutError) as error:
            return None, str(error) or "no answer in time"
        return True, ""
