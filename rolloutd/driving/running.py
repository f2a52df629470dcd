"""Runs one node's playbooks: begins or finds a run, follows it to its end, clears what older ones left.

A run lives without us, so each is asked for by its id before it is begun; one
that cannot be followed goes on and is found again.  What a run's end means is
decided from the records, elsewhere.
"""

from __future__ import annotations

from dataclasses import replace

from machines import actions
from machines.events import StepAction, StepRecord
from machines.plan import Plan
from machines.rollout import Target
from machines.states import BUSY
from rolloutd.driving.gear import Gear
from rolloutd.driving.interruption import beside
from rolloutd.driving.isolation import Isolation, Try
from rolloutd.driving.logbook import Logbook
from rolloutd.driving.turn import Turn
from rolloutd.ports import Failed, Ok, RunRequest, RunState, StepResult, Unknown
from rolloutd.state import Live, State

CLEAR_TIMEOUT_S = 120.0
"""How long an older run on a node is waited for before its processes are ended."""

FOLLOW_TRIES = 3
"""How often a run is looked for whose following failed: what passes (no memory left) has passed by then."""

FOLLOW_RETRY_S = 5.0
"""How long to wait before that: the run goes on meanwhile."""


class Running:
    """The runs of one node in one rollout."""

    def __init__(
        self,
        state: State,
        gear: Gear,
        book: Logbook,
        isolation: Isolation,
        rollout: str,
        node: str,
        turn: Turn,
        attempt: Try,
    ) -> None:
        self._state = state
        self._gear = gear
        self._book = book
        self._isolation = isolation
        self._rollout = rollout
        self._node = node
        self._turn = turn
        self._try = attempt

    async def clear(self, action: actions.Clear) -> None:
        """See to it that no process of an older run is left on the node."""
        record = self._book.intend("clear", StepAction.CLEAR, action.number)
        host = self._state.host(self._node)
        await self._book.write(record)
        result = await self._try(self._gear.runner.clear(host, keep=None, timeout_s=CLEAR_TIMEOUT_S))
        await self._book.ended(record, result)
        if isinstance(result, Ok):
            self._book.unclean = False

    async def run(self, action: actions.Run) -> None:
        """Run the playbook of a stage, or find its run again, and follow it to its end."""
        step = f"run.{action.stage.name}"
        run = f"{self._rollout}.{self._node}.{self._target.attempt}.{action.stage.name}.{action.number}"
        record = self._book.intend(step, StepAction.RUN, action.number, stage=action.stage.name, handle=run)
        running = action.begun and await self._is_known(self._book.known(record).handle)
        if not await self._isolation.stands(self._plan, running=running):
            return
        # Written again where it was begun: whoever may not write any more must not begin it either.
        await self._book.write(self._book.known(record))
        self._book.unclean = True
        result = await self._followed(action, record)
        if result is None:
            return
        await self._book.ended(self._book.known(record), result)
        self._book.unclean = await self._state.store.unclean(self._node)

    async def halt(self, action: actions.Halt) -> None:
        """End a run by a person's order, and record that it was ended."""
        trouble = await self._try(self._gear.runner.cancel(action.record.handle))
        said = action.text if trouble is None else f"{action.text}; it may go on: {trouble.text}"
        await self._book.ended(action.record, Failed(said))
        self._book.unclean = True

    async def _request(self, action: actions.Run, run: str) -> RunRequest:
        stage, fleet = action.stage, self._state.fleet()
        return RunRequest(
            run=run,
            node=self._node,
            tree=await self._gear.tree(self._rollout),
            playbook=stage.playbook,
            inventory=fleet.hosts,
            groups=fleet.groups,
            generation=fleet.generation,
            variables=dict(stage.variables),
            timeout_s=stage.timeout_s,
            fence=await self._state.token(),
            fence_dir=self._state.settings.ansible.fence_dir,
        )

    async def _followed(self, action: actions.Run, record: StepRecord) -> StepResult | None:
        """Follow the run to its end; None when the node left meanwhile.

        A run that cannot be followed goes on all the same, so it is found again
        as after a restart, and in the end cancelled: nothing may begin beside it.
        """
        failed: StepResult | None = Unknown("the run was not followed")
        for _ in range(FOLLOW_TRIES):
            seen = await self._try(self._follow(action, record))
            if seen is None or isinstance(seen, RunState):
                return None if seen is None else seen.result
            failed = seen
            await self._turn.or_after(self._state.clock.sleep(FOLLOW_RETRY_S))
            if self._target.phase not in BUSY:
                failed = None
                break
            # It may not have been begun yet: not on a node in service again, and not by whoever was deposed.
            running = await self._is_known(self._book.known(record).handle)
            if not await self._isolation.stands(self._plan, running=running):
                return None
            await self._book.write(self._book.known(record))
        await self._try(self._gear.runner.cancel(self._book.known(record).handle))
        return failed

    async def _follow(self, action: actions.Run, record: StepRecord) -> RunState | None:
        """Start or find the run and wait for its end; None when the node left, or its isolation is lost."""
        runner = self._gear.runner
        handle = await runner.start(await self._request(action, record.handle))
        if handle != self._book.known(record).handle:
            await self._book.write(replace(record, handle=handle))
        while True:
            async with beside(self._isolation.until_lost(self._plan)) as lost:
                lost.add_done_callback(lambda _: self._turn.call())
                while not lost.done():
                    seen = await runner.observe(handle)
                    self._progressed(seen)
                    if seen.result is not None:
                        return seen
                    if self._target.phase not in BUSY:
                        await runner.cancel(handle)
                        return None
                    await self._turn.or_after(runner.wait(handle))
            if not await self._isolation.stands(self._plan, running=True):
                return None

    async def _is_known(self, handle: str) -> bool:
        """Say whether a run whose intent is recorded was ever handed over, or may have been."""
        return not isinstance(await self._try(self._gear.runner.observe(handle)), Failed)

    def _progressed(self, seen: RunState) -> None:
        live = self._state.live.setdefault((self._rollout, self._node), Live())
        if (live.percent, live.task) != (seen.percent, seen.task):
            live.percent, live.task = seen.percent, seen.task
            self._state.feed.progressed()

    @property
    def _target(self) -> Target:
        return self._state.index.target(self._rollout, self._node)

    @property
    def _plan(self) -> Plan:
        return self._state.index.rollout(self._rollout).plan
