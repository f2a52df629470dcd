"""Takes one node out of service and back, looks for traffic before, and sees that it stays out meanwhile.

Every doing has its intent recorded first, and what is found missing is recorded
as well: what follows from it is decided from the records, elsewhere.  While a
playbook runs, a look that tells nothing changes nothing: an API server that is
away for a minute is no loss of isolation.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from machines import actions, records
from machines.events import StepAction
from machines.plan import Plan, StepSpec
from rolloutd.driving.contexts import step_context
from rolloutd.driving.gear import Gear
from rolloutd.driving.logbook import Logbook
from rolloutd.driving.probing import look_for_traffic
from rolloutd.driving.turn import Turn
from rolloutd.ports import Busy, Failed, Look, Ok, StepResult, Unknown
from rolloutd.state import State

log = logging.getLogger("rolloutd.driving.isolation")

GUARD_EVERY_S = 15.0
"""How often the isolation is looked at under a run; a change that is seen calls for a look at once."""

Try = Callable[[Awaitable[Any]], Awaitable[Any]]
"""Acts, and makes of every error an outcome in words."""


class Isolation:
    """The isolation of one node in one rollout."""

    def __init__(
        self, state: State, gear: Gear, book: Logbook, rollout: str, node: str, attempt: Try
    ) -> None:
        self._state = state
        self._gear = gear
        self._book = book
        self._where = (state, gear, rollout, node)
        self._subject = f"{rollout}/{node}"
        self._try = attempt
        self._seen = Turn()
        self._face: object = None

    async def do(self, action: actions.Isolate) -> StepResult:
        """Isolate the node by one isolator."""
        spec = action.spec
        isolator = self._gear.isolators[spec.kind]
        ctx = await step_context(
            *self._where,
            spec,
            step=spec.name,
            number=action.number,
            prior=action.prior,
            gentle=action.gentle,
        )
        record = self._book.intend(spec.name, StepAction.DO, action.number, prior=action.prior)
        look = await self._try(isolator.look(ctx))
        if isinstance(look, Failed | Busy | Unknown):
            # Nothing was done yet, so nothing of ours stands there: a look is all that is recorded.
            await self._book.ended(replace(record, action=StepAction.LOOK), look)
            return look
        prior = action.prior if action.prior_known else look.prior
        record = replace(record, prior=prior)
        await self._book.write(record, isolated=True)
        # Out of service may be somebody else's doing: only what we know to have done need not be done again.
        if look.done and action.prior_known and records.did(spec.name, self._book.records):
            result: StepResult = Ok(look.text or "still isolated")
        else:
            result = await self._try(isolator.do(replace(ctx, prior=prior)))
        await self._book.ended(record, result)
        return result

    async def probe(self, action: actions.Probe) -> None:
        """Look for traffic by one probe; it changes nothing, so it needs no recorded intent."""
        record = self._book.intend(action.spec.name, StepAction.LOOK, action.number)
        seen = await self._try(look_for_traffic(*self._where, action.spec, number=action.number))
        await self._book.ended(record, seen)

    async def undo(self, action: actions.Undo) -> None:
        """Put the node back by one isolator."""
        spec = action.spec
        record = self._book.intend(spec.name, StepAction.UNDO, action.number)
        ctx = await step_context(*self._where, spec, step=spec.name, number=action.number, prior=action.prior)
        await self._book.write(record)
        result = await self._try(self._gear.isolators[spec.kind].undo(ctx))
        back = action.last and isinstance(result, Ok)
        await self._book.ended(record, result, isolated=False if back else None)

    async def stands(self, plan: Plan, *, running: bool) -> bool:
        """Look whether the isolation stands; have it again where it was lost; record what is missing.

        Who undid one part may have undone another that was looked at just before: all is looked at again.
        """
        for _ in range(2):
            lost = await self._lost(plan, running=running)
            if lost is None:
                return False
            if not lost:
                break
        return True

    async def _lost(self, plan: Plan, *, running: bool) -> bool | None:
        """Say whether some of the isolation was lost; None where it could not be had again."""
        lost = False
        for spec, prior in records.standing(plan.isolate, self._book.records):
            look = await self._try(self._look(spec, prior))
            number = 1 + max(r.number for r in self._book.records if r.step == spec.name)
            if isinstance(look, Failed | Busy | Unknown):
                if not running:
                    await self._book.ended(self._book.intend(spec.name, StepAction.LOOK, number), look)
                    return None
            elif look.done is False:
                lost = True
                again = actions.Isolate(spec, number, prior_known=True, prior=prior)
                if not isinstance(await self.do(again), Ok):
                    return None
        return lost

    def glance(self) -> None:
        """Look soon, if the node is observed otherwise than before."""
        seen = self._state.index.observation(self._where[-1])
        face = None if seen is None else (seen.sight, seen.foreign, seen.why)
        if face != self._face:
            self._face = face
            self._seen.call()

    async def until_lost(self, plan: Plan) -> None:
        """Return once an isolator says that what it did no longer stands."""
        while True:
            await self._seen.or_after(self._state.clock.sleep(GUARD_EVERY_S))
            for spec, prior in records.standing(plan.isolate, self._book.records):
                look = await self._try(self._look(spec, prior))
                if isinstance(look, Look) and look.done is False:
                    log.warning("%s: isolation was lost while a playbook runs: %s", self._subject, look.text)
                    return

    async def _look(self, spec: StepSpec, prior: Any) -> Look | Busy:
        ctx = await step_context(*self._where, spec, step=spec.name, number=0, prior=prior)
        return await self._gear.isolators[spec.kind].look(ctx)
