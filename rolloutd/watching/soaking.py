"""Looks at finished canaries while they soak, and judges nodes beside their drivers.

A check of a canary that turns red during the soak takes the node from done to
failed, which pauses the rollout; nothing else is done to the node.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from machines.checks import checks_of
from machines.moves import move
from machines.plan import StepSpec
from machines.progress import may_redden, soaking
from machines.rollout import Target
from machines.states import Outcome, Trigger
from rolloutd.driving.contexts import step_context
from rolloutd.driving.gear import Gear
from rolloutd.errors import RolloutdError, StoreFailed
from rolloutd.ports import Failed, Ok, Unknown
from rolloutd.ports.border import answer_of, answering_for
from rolloutd.privacy import guarded
from rolloutd.state import State

log = logging.getLogger("rolloutd.watching.soaking")

WATCH_EVERY_S = 60.0
"""How often a soaking canary's checks are made again: a red one is known within a minute."""

RED_LOOKS = 2
"""How many looks in a row must be red: one lost packet is no regression."""

RED_MOST_S = 60.0
"""How long a check with a `within` must stay red at most: a busy minute passes, and red is known in two."""

RED_PAUSE_S = 5.0
"""Between two looks at such a check: whoever is overloaded is not helped by being asked more often."""


class Soaking:
    """The canaries that soak now."""

    def __init__(self, state: State, gear: Gear, every_s: float = WATCH_EVERY_S) -> None:
        self.every_s = every_s
        self._state = state
        self._gear = gear
        self._watched: set[tuple[str, str]] = set()

    def watch(self, tasks: asyncio.TaskGroup) -> None:
        """Look once at every canary that soaks and is not being looked at."""
        for target in soaking(self._state.index, self._state.now()):
            key = (target.rollout, target.node)
            if key not in self._watched and target.outcome is Outcome.CHANGED:
                self._watched.add(key)
                checks = checks_of(self._state.index.rollout(target.rollout).plan, target)
                tasks.create_task(self._watch(target, checks), name=f"soak {key[0]}/{key[1]}")

    async def judge(self, key: tuple[str, str], spec: StepSpec) -> Ok | Failed | Unknown:
        """Make one check once, outside any attempt; raises StoreFailed."""
        rollout, node = key
        try:
            ctx = await step_context(self._state, self._gear, rollout, node, spec, step=f"soak.{spec.name}")
            with answering_for(f"check {spec.kind}"):
                said = await self._gear.checks[spec.kind].check(ctx)
            return answer_of(f"check {spec.kind}", said, Ok, Failed, Unknown)
        except StoreFailed:
            raise  # our disk says nothing of the node
        except (RolloutdError, TimeoutError) as error:
            return Unknown(str(error) or "no answer in time")

    async def _watch(self, target: Target, checks: Sequence[StepSpec]) -> None:
        key = (target.rollout, target.node)
        try:
            for spec in checks:
                result = await self._lasting(key, spec)
                if not isinstance(result, Ok):
                    await self._redden(target, spec, guarded(result, spec.team).text)
                    return
        except StoreFailed as failure:
            self._state.trouble = str(failure)
        finally:
            self._watched.discard(key)

    async def _lasting(self, key: tuple[str, str], spec: StepSpec) -> Ok | Failed | Unknown:
        """Make a check until it passes, or has been red often and long enough to be believed."""
        patience_s = min(float(spec.params.get("within", 0) or 0), RED_MOST_S)
        until, looks = self._state.now() + patience_s, 0
        while True:
            result = await self.judge(key, spec)
            looks += 1
            if isinstance(result, Ok) or (looks >= RED_LOOKS and self._state.now() >= until):
                return result
            if patience_s:
                await self._state.clock.sleep(RED_PAUSE_S)

    async def _redden(self, seen: Target, spec: StepSpec, text: str) -> None:
        async with self._state.deciding() as commit:
            if not may_redden(self._state.index, seen):
                return
            moved = move(seen, Trigger.REDDENED, self._state.now(), step=f"soak.{spec.name}", text=text)
            log.warning("%s/%s: turned red during the soak: %s", seen.rollout, seen.node, text)
            await commit([moved], f"{spec.name} turned red during the soak: {text}")
