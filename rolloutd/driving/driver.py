"""Drives one node through one rollout: look, decide, record the intent, act, record the outcome.

The driver decides nothing: machines.reconcile says what comes next, from the
records; the driver does it and writes down how it ended.  It may be killed
between any two lines: whoever drives the node next reads the same records.
This is one of the borders where an unexpected exception becomes a recorded
outcome.  It knows ports, never an adapter.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable
from dataclasses import replace
from typing import Any, TypeVar

from machines import actions, reconcile
from machines.events import Event, HoldReleased, NodeOrdered, PhaseMoved, StepAction
from machines.moves import move
from machines.records import waiting
from machines.rollout import Order, Target
from machines.states import BUSY, Outcome, Phase, Trigger
from machines.takeover import carried
from rolloutd.driving.contexts import step_context
from rolloutd.driving.gear import Gear
from rolloutd.driving.interruption import Interruptible
from rolloutd.driving.isolation import Isolation
from rolloutd.driving.logbook import Logbook
from rolloutd.driving.running import Running
from rolloutd.driving.turn import Turn
from rolloutd.errors import NotFound, RolloutdError, StoreFailed
from rolloutd.ports import Check, Failed, Ok, StepContext, StepResult, Unknown
from rolloutd.privacy import guarded
from rolloutd.state import InvariantBroken, Live, State

log = logging.getLogger("rolloutd.driving.driver")

T = TypeVar("T")

CHECK_TRY_S = 60.0
"""The limit of one try of a check whose parameters name none."""

CHECK_EVERY_S = 1.0
"""The first pause between two tries of a check that may take a while to turn green."""

CHECK_EVERY_MOST_S = 5.0
"""The longest such pause: a node that is back is noticed within five seconds."""

STUCK_RETRY_S = 60.0
"""How long to wait before trying again what was refused: only a person or a new version changes it."""

GONE_LOOK_S = 5.0
"""How long to wait for the word that a node has left, once the inventory no longer has it."""

STORE_RETRY_S = 5.0
"""How long to wait before writing again when the store could not: a full disk is emptied by a person."""


class Driver:
    """One node of one rollout, from its admission to where it needs nobody."""

    def __init__(self, state: State, gear: Gear, rollout: str, node: str, *, alive_since: float) -> None:
        self.rollout = rollout
        self.node = node
        self._state = state
        self._gear = gear
        self._where = (state, gear, rollout, node)
        self._alive_since = alive_since
        self._withdraw = ""
        self._turn = Turn()
        self._book = Logbook(state, rollout, node)
        self._isolation = Isolation(state, gear, self._book, rollout, node, self._try)
        self._running = Running(
            state, gear, self._book, self._isolation, rollout, node, self._turn, self._try
        )
        self._subject = f"{rollout}/{node}"
        self._step = Interruptible()
        self._halting = False
        self._set_back = (0.0, 0.0)

    # -- what the daemon says to it

    def put_back(self, why: str) -> None:
        """Ask for the node to be put back, if it is still isolating."""
        if not self._withdraw:
            self._withdraw = why
            self._turn.call()

    def turn(self) -> None:
        """Look again: the target was changed by somebody else."""
        self._turn.call()

    def glance(self) -> None:
        """Look at the isolation soon, if the node is seen otherwise than before."""
        self._isolation.glance()

    def stop_now(self) -> None:
        """End what is done this moment, because the target carries a person's order to stop."""
        self._turn.call()
        if not self._halting:
            self._step.stop()

    # -- its life

    async def drive(self) -> None:
        """Do what comes next until the node needs nobody."""
        try:
            # A node that left is no reason to keep its rollout: it may be deleted while the last step ends.
            while self.rollout in self._state.index.rollouts and await self._one():
                pass
        finally:
            self._state.live.pop((self.rollout, self.node), None)
            self._state.lasting.pop(self._subject, None)

    async def _one(self) -> bool:
        """Do one thing; say whether there is more."""
        before = self._target
        try:
            await self._book.open()
            action = self._next()
            if isinstance(action, actions.Idle):
                return False
            self._halting = self._target.order is Order.STOP
            if not await self._step.run(self._act(action), f"act {self.rollout}/{self.node}"):
                self._book.close()
        except InvariantBroken as refusal:
            if (self._target.phase, self._target.attempt) == (before.phase, before.attempt):
                await self._stuck(f"what comes next was refused: {refusal}")
            self._book.close()  # where it was moved meanwhile, as a node that left is: look again
        except NotFound as gone:
            if self.node in self._state.index.nodes:
                await self._stuck(str(gone))
            self._book.close()  # else it left in the middle of a step: look again
        except StoreFailed as failure:
            log.error("%s/%s: the store could not write: %s", self.rollout, self.node, failure)
            self._state.trouble = str(failure)
            self._book.close()
            await self._pause(STORE_RETRY_S)
        except Exception as error:
            log.exception("%s/%s: unexpected error", self.rollout, self.node)
            await self._stuck(f"unexpected {type(error).__name__}: {error}")
        else:
            self._state.lasting.pop(self._subject, None)
        return True

    async def _stuck(self, why: str) -> None:
        """Say that this node does not move, and look again later: a person may have changed something."""
        log.critical("%s: stuck: %s", self._subject, why)
        self._state.lasting[self._subject] = f"{self.node} of {self.rollout} does not move: {why}"
        self._book.close()
        await self._pause(STUCK_RETRY_S)

    def _next(self) -> actions.Action:
        target = self._target
        now = self._state.now()
        if self.node not in self._state.index.nodes:
            return self._gone(target, now)
        return reconcile.next_action(
            self._plan,
            target,
            self._book.records,
            now,
            elapsed_s=self._elapsed_s(target, now),
            unclean=self._book.unclean,
            withdraw=self._withdraw,
        )

    def _elapsed_s(self, target: Target, now: float) -> float:
        """Return how long the node is in its phase while somebody was there to see.

        Where the clock was set back behind its beginning, that counts from the moment on in which we see so.
        """
        began = max(target.since, self._alive_since)
        if now >= began:
            return now - began
        if self._set_back[0] != began or now < self._set_back[1]:
            self._set_back = (began, now)
        return now - self._set_back[1]

    def _gone(self, target: Target, now: float) -> actions.Action:
        """Say what comes next for a node that nobody knows how to reach; that it left is told in a moment."""
        text = f"the inventory no longer has {self.node}"
        if target.phase in BUSY:
            return actions.Wait(now + GONE_LOOK_S, text)
        return actions.Idle() if target.order is None else actions.Settle(done=False, text=text)

    async def _act(self, action: actions.Action) -> None:
        self._show(action)
        match action:
            case actions.Isolate():
                await self._isolation.do(action)
            case actions.Probe():
                await self._isolation.probe(action)
            case actions.Undo():
                await self._isolation.undo(action)
            case actions.Clear():
                await self._running.clear(action)
            case actions.Run():
                await self._running.run(action)
            case actions.Verify():
                await self._verify(action)
            case actions.Wait():
                await self._pause(max(0.0, action.until - self._state.now()))
            case actions.Move():
                await self._move(action)
            case actions.Halt():
                await self._running.halt(action)
            case actions.Settle():
                await self._settle(action)
            case actions.Idle():
                pass

    # -- checks

    async def _verify(self, action: actions.Verify) -> None:
        spec = action.spec
        record = self._book.intend(action.step, StepAction.CHECK, action.number, visible_to=spec.team)
        check = self._gear.checks[spec.kind]
        prior = self._book.prior_of(spec.kind)
        ctx = await step_context(*self._where, spec, step=action.step, number=action.number, prior=prior)
        # A check changes nothing, so it needs no recorded intent: after a crash it is simply made again.
        result = await self._try(self._until_green(check, ctx, spec.team))
        await self._book.ended(record, result)

    async def _until_green(self, check: Check, ctx: StepContext, team: str | None) -> StepResult:
        """Check until it passes or its `within` is over; without one it is judged once."""
        pause_s = CHECK_EVERY_S
        until = self._state.now() + float(ctx.params.get("within", 0))
        while True:
            one_try_s = float(ctx.params.get("timeout", CHECK_TRY_S))
            deadline = min(ctx.deadline, self._state.now() + one_try_s)
            result = await self._try(check.check(replace(ctx, deadline=deadline)))
            left_s = until - self._state.now()
            if isinstance(result, Ok) or left_s <= 0 or self._target.outcome is Outcome.LEFT:
                return result
            live = self._live()
            live.red, live.red_until = guarded(result, team).text, until
            await self._state.clock.sleep(min(pause_s, left_s))
            pause_s = min(pause_s * 2, CHECK_EVERY_MOST_S)

    # -- along the table

    async def _move(self, action: actions.Move) -> None:
        moved = move(
            self._target,
            action.trigger,
            self._state.now(),
            outcome=action.outcome,
            step=action.step,
            text=action.text,
            not_before=action.not_before,
        )
        why = action.text or action.trigger.value
        await self._state.commit(
            [*self._stopped(moved), moved, *carried(self._state.index, moved)], cause=why
        )
        log.info("%s/%s: %s -> %s (%s)", self.rollout, self.node, moved.source, moved.target, why)

    def _stopped(self, moved: PhaseMoved) -> list[Event]:
        """Return the end of a person's order to stop, which every move out of a busy phase is.

        A move between busy phases may have been decided before the order came: the order stands.
        """
        stops = self._target.order is Order.STOP and moved.target not in BUSY
        by = self._target.order_by if stops else None
        return [] if by is None else [NodeOrdered(self.rollout, self.node, None, by, moved.text, moved.at)]

    async def _settle(self, action: actions.Settle) -> None:
        target = self._target
        now = self._state.now()
        by = target.order_by
        assert by is not None
        events: list[Event] = [NodeOrdered(self.rollout, self.node, None, by, action.text, now)]
        if action.done and target.phase is Phase.FAILED:
            events.append(move(target, Trigger.SKIPPED, now, outcome=Outcome.SKIPPED, text=action.text))
        if action.done:
            events += [
                HoldReleased(hold.node, hold.source, hold.id, by, now)
                for hold in self._state.index.holds
                if hold.node == self.node and hold.source == "left" and hold.id.startswith(f"{self.rollout}/")
            ]
        await self._state.commit(events, actor=by, cause=f"{target.order}: {action.text}")

    # -- small things

    @property
    def _target(self) -> Target:
        return self._state.index.target(self.rollout, self.node)

    @property
    def _plan(self) -> Any:
        return self._state.index.rollout(self.rollout).plan

    def _live(self) -> Live:
        return self._state.live.setdefault((self.rollout, self.node), Live())

    def _show(self, action: actions.Action) -> None:
        """Let everybody see which step the node is in."""
        step = actions.step_of(action)
        if step is None:
            return
        live = self._live()
        if live.step != step:
            live.step, live.percent, live.task, live.since = step, 0.0, "", self._state.now()
            self._state.feed.progressed()
        live.red = ""
        live.waits = waiting(self._book.records, self._target)

    async def _try(self, acting: Awaitable[T]) -> T | Failed | Unknown:
        """Act; make of every error an outcome in words.  The driver's border."""
        try:
            return await acting
        except TimeoutError as late:
            return Unknown(str(late) or "no answer in time")
        except StoreFailed:
            raise
        except RolloutdError as error:
            return Failed(str(error))
        except OSError as error:
            return Failed(f"this machine could not do it: {error}; look at its disk and limits")
        except Exception as error:
            log.exception("%s/%s: unexpected error in a step", self.rollout, self.node)
            return Failed(f"unexpected {type(error).__name__}: {error}")

    async def _pause(self, seconds: float) -> None:
        await self._turn.or_after(self._state.clock.sleep(seconds))
