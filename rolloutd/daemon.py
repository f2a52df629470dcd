"""The loop: ask the core what to do now, write it down, let the drivers do it.

The loop decides nothing and does nothing itself; it carries decisions out and
sees to it that every node that needs a driver has one.  Whatever pokes it (a
commit, an observation, an alarm, a refresh) only makes it ask again.  It knows
ports and the core, never an adapter.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from machines.checks import checks_of
from machines.decision import Decision, Look
from machines.events import Event, GateOpened, LookedCurrent, PhaseMoved, RolloutEnded
from machines.moves import move
from machines.plan import StepSpec
from machines.rollout import Order, Target
from machines.schedule import decide
from machines.states import BUSY, Outcome, Phase, Trigger
from rolloutd.driving.driver import Driver
from rolloutd.driving.gear import Gear
from rolloutd.errors import StoreFailed, TenureLost
from rolloutd.ports import Alarm, Inventory, Observer, Ok
from rolloutd.privacy import guarded
from rolloutd.state import State
from rolloutd.watching.keeping import Kept
from rolloutd.watching.observing import Observing
from rolloutd.watching.probing import Probing
from rolloutd.watching.refreshing import Refreshing
from rolloutd.watching.rehearsing import Rehearsing
from rolloutd.watching.soaking import Soaking

log = logging.getLogger("rolloutd.daemon")

LEAST_PAUSE_S = 0.01
"""Between two decisions: pokes that come in a burst are answered by one decision."""

STORE_RETRY_S = 5.0
"""How long to wait before deciding again when the store could not write."""


class Daemon:
    """Carries out decisions until it is cancelled."""

    def __init__(
        self,
        state: State,
        gear: Gear,
        *,
        inventories: Sequence[Inventory],
        observers: Sequence[Observer],
        alarm: Alarm,
    ) -> None:
        self._state = state
        self._gear = gear
        self._alarm = alarm
        self._bell = asyncio.Event()
        self._began_at = state.now()
        self._drivers: dict[tuple[str, str], Driver] = {}
        self._looks: set[tuple[str, str]] = set()
        self._observing = Observing(state, observers)
        self._refreshing = Refreshing(state, inventories)
        self._soaking = Soaking(state, gear)
        self._rehearsing = Rehearsing(state, gear)
        self._kept = Kept(state, gear)
        self._probing = Probing(state, gear)
        self._decision_s = 0.0
        self.turned: Callable[[float], None] = lambda decision_s: None
        self.settled = asyncio.Event()
        state.poke = self._bell.set

    async def run(self) -> None:
        """Refresh the inventory, then decide whenever something has changed.

        Raises TenureLost, in a group, once another daemon has taken over.
        """
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            tasks.create_task(self._end_when_deposed(), name="tenure")
            self._drive()
            # What is in hand goes on at once; nothing new is started on what may have changed meanwhile.
            await self._refreshing.refresh()
            self.retime()
            self._alarm.every("soak", self._soaking.every_s, self._watch_soaks)
            self._bell.set()
            while True:
                await self._bell.wait()
                self._bell.clear()
                await self._turn()
                self.turned(self._decision_s)
                await self._state.clock.sleep(LEAST_PAUSE_S)

    async def _end_when_deposed(self) -> None:
        """End everything as soon as a write has shown that another daemon is at it: two must not act."""
        await self._state.deposed.wait()
        raise TenureLost("another daemon has taken over the state directory: this one ends")

    async def observe(self, nodes: Sequence[str]) -> None:
        """Look at these nodes now; for a hold, which is granted by what is known."""
        await self._observing.look(nodes)

    def refresh(self) -> None:
        """Ask the inventory sources again, beside the loop."""
        self._tasks.create_task(self._refreshing.refresh())

    def retime(self) -> None:
        """Ask the inventory sources as often as the settings say now."""
        self._alarm.every("inventory", self._state.settings.inventory_refresh_s, self.refresh)

    def turn(self) -> None:
        """Decide again, soon, whether or not anything has changed."""
        self._bell.set()

    # -- one turn of the loop

    async def _turn(self) -> None:
        try:
            decision = await self._decide()
        except StoreFailed as failure:
            log.error("a decision could not be written: %s", failure)
            self._state.trouble = str(failure)
            self._alarm.at("store", self._state.now() + STORE_RETRY_S, self._bell.set)
            self._drive()  # what people have ordered meanwhile waits for no decision
            return
        self._state.reasons = decision.reasons
        for back in decision.put_backs:
            driver = self._drivers.get((back.rollout, back.node))
            if driver is not None:
                driver.put_back(back.reason.text)
        if decision.observe:
            self._observing.ask(self._tasks, decision.observe)
        if decision.rehearse:
            self._rehearsing.ask(self._tasks, decision.rehearse)
        if decision.probes:
            self._probing.ask(self._tasks, decision.probes)
        for look in decision.looks:
            self._look(look)
        self._kept.ask(self._tasks)
        if decision.wake_at is not None:
            self._alarm.at("wake", decision.wake_at, self._bell.set)
        self._drive()
        self.settled.set()

    async def _decide(self) -> Decision:
        """Decide and write the decision with nothing else written in between."""
        async with self._state.deciding() as commit:
            now = self._state.now()
            began = asyncio.get_running_loop().time()
            decision = decide(self._state.index, now)
            self._decision_s = asyncio.get_running_loop().time() - began
            events: list[Event] = [GateOpened(o.rollout, o.gate, o.wave, now) for o in decision.opens]
            events += [
                self._admitted(self._state.index.target(s.rollout, s.node), now) for s in decision.starts
            ]
            events += [RolloutEnded(rollout, now) for rollout in decision.ends]
            # Judged by the very instant at which it was decided: what was fresh then may be old by now.
            await commit(events, "decided", now)
        return decision

    def _admitted(self, target: Target, now: float) -> PhaseMoved:
        return move(target, Trigger.ADMITTED, now)

    # -- drivers

    def _drive(self) -> None:
        """See to it that every node that needs a driver has one."""
        for target in self._state.index.busy():
            key = (target.rollout, target.node)
            if key in self._drivers:
                continue
            driver = Driver(self._state, self._gear, *key, alive_since=self._began_at)
            self._drivers[key] = driver
            self._tasks.create_task(self._driven(key, driver), name=f"drive {key[0]}/{key[1]}")
        for key, driver in self._drivers.items():
            if key[0] not in self._state.index.rollouts:
                driver.turn()  # deleted while its last step ends
                continue
            driver.glance()
            target = self._state.index.target(*key)
            if target.order is Order.STOP:
                driver.stop_now()
            elif target.phase not in BUSY:
                driver.turn()

    async def _driven(self, key: tuple[str, str], driver: Driver) -> None:
        try:
            await driver.drive()
        finally:
            del self._drivers[key]
            self._bell.set()

    # -- what happens beside the nodes in flight

    def _look(self, look: Look) -> None:
        key = (look.rollout, look.node)
        if key not in self._looks:
            self._looks.add(key)
            target = self._state.index.target(*key)
            checks = checks_of(self._state.index.rollout(key[0]).plan, target)
            self._tasks.create_task(self._looked(key, target, checks))

    async def _looked(self, key: tuple[str, str], target: Target, checks: Sequence[StepSpec]) -> None:
        """Judge by the plan's checks whether a pending node needs the change at all."""
        try:
            red = ""
            for spec in checks:
                result = await self._soaking.judge(key, spec)
                if not isinstance(result, Ok):
                    red = f"{spec.name}: {guarded(result, spec.team).text}"
                    break
            await self._tell_look(target, red)
        except StoreFailed as failure:
            self._state.trouble = str(failure)
        finally:
            self._looks.discard(key)

    async def _tell_look(self, seen: Target, red: str) -> None:
        async with self._state.deciding() as commit:
            rollout = self._state.index.rollouts.get(seen.rollout)
            if rollout is None or rollout.closed:
                return  # cancelled, and perhaps deleted, while it was looked at
            target, now = self._state.index.target(seen.rollout, seen.node), self._state.now()
            if target.phase is not Phase.PENDING:
                return
            if red:
                needed = LookedCurrent(target.rollout, target.node, now, red)
                await commit([needed], f"needs the change: {red}")
                return
            why = "all checks pass without the change"
            current = move(target, Trigger.FOUND_CURRENT, now, outcome=Outcome.ALREADY_CURRENT, text=why)
            await commit([current], "already current")

    def _watch_soaks(self) -> None:
        self._soaking.watch(self._tasks)
