"""The store as one life of the daemon has it: the real one, and what can go wrong with it.

Every commit is an effect like those on nodes: it can fail before, and the power
can be cut right before and right after it.  What was committed is told to the
court; before each commit what became of the one before is judged.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Any

from machines.book import Snapshot
from machines.events import Actor, Event, PhaseMoved, StepRecorded, TargetChanged
from machines.invariants import violations
from machines.limits import Limits
from machines.node import Observation
from machines.traffic import Traffic
from rolloutd.errors import StoreFailed
from rolloutd.ports import Entry
from rolloutd.state import State
from rolloutd.store import SqliteStore
from rolloutd.store.ledger import Answer, Ledger, Transaction
from tests.sim.faults import Way
from tests.sim.loop import Process
from tests.sim.world import World


class Keeper:
    """ports.Store over the real one, for one life."""

    def __init__(self, inner: SqliteStore, world: World, process: Process) -> None:
        self.state: State | None = None
        self._inner = inner
        self._world = world
        self._process = process
        self._before: Snapshot | None = None
        self._seen: tuple[Observation, ...] = ()
        self._traffic: tuple[Traffic, ...] = ()
        self._limits: Limits | None = None
        self._at = 0.0
        self._waiting: deque[Sequence[Event]] = deque()

    async def commit(
        self, events: Sequence[Event], *, actor: Actor, cause: str, at: float
    ) -> tuple[Entry, ...]:
        """Commit, as the mischief will have it."""
        world = self._world
        if world.over:
            raise StoreFailed("all is over")
        label = "commit " + " ".join(_label(event) for event in events)
        way = world.mischief.way(label)
        for _ in range(world.chances.latency.randrange(4)):
            await asyncio.sleep(0)  # a write takes turns of the loop: others may come, and wait
        self.judge()
        if way is Way.CUT_BEFORE:
            await world.cut(self._process)
        if way in (Way.FAILS, Way.LOST):
            # What SQLite has committed it also says; its answer can be lost only by dying.
            raise StoreFailed(f"nothing was written: {label}")
        self._remember(at)
        self._waiting.append(events)
        try:
            entries = await self._inner.commit(events, actor=actor, cause=cause, at=at)
        finally:
            self._waiting = deque(each for each in self._waiting if each is not events)
        if way is Way.TWICE and not any(isinstance(event, TargetChanged) for event in events):
            await self._again(events, actor, cause, at)
        if way is Way.CUT_AFTER:
            await world.cut(self._process)
        return entries

    def overhear(self, ledger: Ledger) -> None:
        """Be told of each transaction at the moment it is on disk, whoever lives to hear the answer."""
        write = ledger.write

        def overheard(batch: Sequence[Transaction]) -> list[Answer]:
            asked = [self._waiting.popleft() if self._waiting else () for _ in batch]
            answers = write(batch)
            for events, answer in zip(asked, answers, strict=True):
                if isinstance(answer, tuple) and not self._world.over:
                    self._committed(events)
            return answers

        ledger.write = overheard  # type: ignore[method-assign]

    def _committed(self, events: Sequence[Event]) -> None:
        if not events:
            return
        self._world.note("commit " + " ".join(_label(event) for event in events))
        self._world.court.heard(events)
        for event in events:
            if isinstance(event, PhaseMoved):
                self._world.marks.hit(f"edge:{event.trigger}-{event.source}")

    def judge(self) -> None:
        """Judge what the last commit made of the facts."""
        if self.state is None or self._before is None:
            return
        index = self.state.index
        found = violations(
            self._before,
            index.snapshot(),
            limits=self._limits or index.limits,
            observations=self._seen,
            traffic=self._traffic,
            now=self._at,
        )
        for text in found:
            self._world.court.accuse(f"violation: {text}")
        self._before = None

    async def compare(self) -> None:
        """Compare what is remembered with what is known, while nothing else is written."""
        assert self.state is not None
        async with self.state.deciding():
            known, remembered = self.state.index.snapshot(), await self._inner.load()
        kept = {rollout.id for rollout in remembered.rollouts}
        mine: dict[str, Sequence[Any]] = {
            "rollouts": [each for each in known.rollouts if each.id in kept],
            "targets": [each for each in known.targets if each.rollout in kept],
        }
        for name in ("nodes", "holds", "freezes", "rollouts", "targets"):
            here: Sequence[Any] = mine.get(name, getattr(known, name, ()))
            there: Sequence[Any] = getattr(remembered, name)
            odds = [each for each in here if each not in there] + [each for each in there if each not in here]
            for odd in odds:
                self._world.court.accuse(f"{name} that are known are not those that are remembered: {odd}")

    def _remember(self, at: float) -> None:
        if self.state is not None:
            self._before = self.state.index.snapshot()
            self._seen = tuple(self.state.index.observations)
            self._traffic = tuple(self.state.index.traffic)
            self._limits = self.state.index.limits
            self._at = at

    async def _again(self, events: Sequence[Event], actor: Actor, cause: str, at: float) -> None:
        """Write the same once more: it is refused, or changes nothing."""
        try:
            await self._inner.commit(events, actor=actor, cause=cause, at=at)
        except StoreFailed:
            return

    async def steps(self, *args: Any, **named: Any) -> Any:
        """Read, unless the disk will not have it."""
        self._may_fail()
        return await self._inner.steps(*args, **named)

    async def unclean(self, node: str) -> bool:
        """Read, unless the disk will not have it."""
        self._may_fail()
        return await self._inner.unclean(node)

    async def content(self, rollout: str) -> Any:
        """Read, unless the disk will not have it."""
        self._may_fail()
        return await self._inner.content(rollout)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def _may_fail(self) -> None:
        if self._world.mischief.chance("read-fails", 0.02):
            raise StoreFailed("the disk answers with errors")


def _label(event: Event) -> str:
    match event:
        case PhaseMoved():
            return f"{event.trigger}:{event.node}"
        case StepRecorded(record=record):
            return f"{record.action}-{record.state}:{record.node}:{record.step}#{record.number}"
        case _:
            return type(event).__name__
