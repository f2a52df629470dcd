"""Tells people who do not look: a gate waits, a node failed, a rollout ended, nothing moves.

What happened is read from the audit by its numbers, what waits is asked of the
core; so a slow or failing channel misses nothing of what it still has room for.
Nothing here may hold a rollout up: every channel has a bounded queue and a task
of its own, and what a channel does not take is given up in the end, in the log.
It knows ports, never an adapter.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from machines import gates, schedule
from machines.moments import span
from machines.plan import GateName
from machines.rollout import Rollout
from rolloutd.errors import RolloutdError, StoreFailed
from rolloutd.ports import Notifier
from rolloutd.ports.border import answering_for
from rolloutd.state import State

log = logging.getLogger("rolloutd.notifying")

GATE_WAITS = "gate-waits"
NODE_FAILED = "node-failed"
ROLLOUT_ENDED = "rollout-ended"
NOTHING_MOVED = "nothing-moved"
OCCASIONS = (GATE_WAITS, NODE_FAILED, ROLLOUT_ENDED, NOTHING_MOVED)

GATHER_S = 1.0
"""What happens within so long is looked at together: people read no faster."""

LOOK_S = 60.0
"""How often it is looked at whether anything has moved."""

LEAST_PAUSE_S = 5.0
"""Between two messages of one channel; what comes meanwhile becomes one message."""

MOST_WAITING = 200
"""Messages that wait for one channel; beyond that the oldest are counted, not told."""

MOST_TOLD = 20
"""Messages told one by one in one; the others are counted."""

FIRST_BACKOFF_S = 5.0
LONGEST_BACKOFF_S = 300.0
TRIES = 10
"""Tries of one message, half an hour in all: a mail server that is longer away is somebody's incident."""

SEND_TIMEOUT_S = 60.0
"""One try; services that answer at all answer within seconds."""

PAGE = 500


@dataclass(frozen=True, slots=True)
class Notice:
    """Something to be told."""

    title: str
    text: str = ""


@dataclass(slots=True)
class _Channel:
    """One way to people, and what waits for it."""

    notifier: Notifier
    waiting: deque[Notice] = field(default_factory=deque)
    dropped: int = 0
    bell: asyncio.Event = field(default_factory=asyncio.Event)

    def put(self, notice: Notice) -> None:
        if len(self.waiting) >= MOST_WAITING:
            self.waiting.popleft()
            self.dropped += 1
        self.waiting.append(notice)
        self.bell.set()

    def take(self) -> Notice:
        """Return all that waits as one message."""
        notices, dropped = list(self.waiting), self.dropped
        self.waiting.clear()
        self.dropped = 0
        self.bell.clear()
        if len(notices) == 1 and not dropped:
            return notices[0]
        lines = [f"{each.title}\n{each.text}".strip() for each in notices[:MOST_TOLD]]
        left = dropped + len(notices[MOST_TOLD:])
        if left:
            lines.append(f"and {left} more: rolloutctl status")
        return Notice(f"rolloutd: {len(notices) + dropped} messages", "\n\n".join(lines))


class Notifying:
    """Watches the facts and feeds the channels; `nothing_moved_s` None never says that nothing moves."""

    def __init__(
        self,
        state: State,
        notifiers: Sequence[Notifier],
        occasions: Sequence[str] = OCCASIONS,
        nothing_moved_s: float | None = None,
    ) -> None:
        self._state = state
        self._channels = [_Channel(notifier) for notifier in notifiers]
        self._occasions = frozenset(occasions)
        self._nothing_moved_s = nothing_moved_s
        self._after = state.feed.latest
        self._waiting: set[tuple[str, str, str]] = set()
        self._moved: dict[str, float] = {}
        self._stalled: set[str] = set()

    async def run(self) -> None:
        """Tell until cancelled; without a channel there is nothing to do."""
        if not self._channels:
            return
        async with asyncio.TaskGroup() as tasks:
            for channel in self._channels:
                tasks.create_task(self._deliver(channel), name=f"notify {channel.notifier.name}")
            tasks.create_task(self._watch(), name="notify watch")

    # -- what there is to tell

    async def _watch(self) -> None:
        with self._state.feed.listening() as bell:
            while True:
                bell.clear()
                try:
                    await self._look()
                except StoreFailed as failure:
                    log.warning("what is to be told cannot be read: %s", failure)
                await self._state.clock.sleep(GATHER_S)
                if not bell.is_set():
                    await self._rung(bell)

    async def _rung(self, bell: asyncio.Event) -> None:
        """Wait for the bell, but look now and then whether anything moves at all."""
        rung = asyncio.ensure_future(bell.wait())
        late = asyncio.ensure_future(self._state.clock.sleep(LOOK_S))
        try:
            await asyncio.wait({rung, late}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            rung.cancel()
            late.cancel()

    async def _look(self) -> None:
        for notice in [*await self._happened(), *self._asked(), *self._still()]:
            for channel in self._channels:
                channel.put(notice)

    async def _happened(self) -> list[Notice]:
        found: list[Notice] = []
        while True:
            page = await self._state.store.audit(after=self._after, limit=PAGE)
            for entry in page:
                self._after = entry.seq
                told = json.loads(entry.text)
                if told["rollout"] is not None and told["event"] != "CallRefused":
                    self._moved[told["rollout"]] = told["at"]
                    self._stalled.discard(told["rollout"])
                found += self._of_entry(told)
            if len(page) < PAGE:
                return found

    def _of_entry(self, told: Mapping[str, Any]) -> Iterator[Notice]:
        rollout, fields = told["rollout"], told["fields"]
        match told["event"]:
            case "PhaseMoved" if fields["target"] == "failed" and NODE_FAILED in self._occasions:
                failure = fields["failure"]
                text = f"{failure['step']}: {failure['message']}\nrolloutctl status {rollout}"
                yield Notice(f"{told['node']} failed in {rollout}", text)
            case "RolloutEnded" if ROLLOUT_ENDED in self._occasions:
                yield Notice(f"{rollout} has ended", f"every node is done\nrolloutctl status {rollout}")
            case "RolloutCancelled" if ROLLOUT_ENDED in self._occasions:
                by = told["actor"]["name"]
                yield Notice(f"{rollout} was cancelled by {by}", str(fields.get("reason", "")))

    def _asked(self) -> Iterator[Notice]:
        """Yield a notice for each gate that has begun to wait for votes."""
        if GATE_WAITS not in self._occasions:
            return
        now, waiting = self._state.now(), set()
        for rollout in self._state.index.rollouts.values():
            for gate, wave in () if rollout.closed else _gates(rollout):
                view = gates.gate_view(self._state.index, rollout, gate, wave, now)
                if view.state != "waiting":
                    continue
                key = (rollout.id, gate.value, wave)
                waiting.add(key)
                if key not in self._waiting:
                    after = f" after {wave}" if wave else ""
                    text = f"{view.missing}\nrolloutctl approve {rollout.id} {gate} --reason ..."
                    yield Notice(f"{rollout.id} waits at {gate}{after}", text)
        self._waiting = waiting

    def _still(self) -> Iterator[Notice]:
        """Yield a notice for each rollout of which nothing has moved for too long, once per standstill."""
        if self._nothing_moved_s is None or NOTHING_MOVED not in self._occasions:
            return
        now, index = self._state.now(), self._state.index
        for rollout in index.rollouts.values():
            since = self._moved.setdefault(rollout.id, now)
            if rollout.closed or rollout.id in self._stalled or now - since < self._nothing_moved_s:
                continue
            self._stalled.add(rollout.id)
            reason = schedule.rollout_reason(index, rollout.id, now)
            at_work = ", ".join(sorted(index.tally(rollout.id).busy))
            why = (
                reason.text if reason is not None else f"at work: {at_work}" if at_work else "no reason known"
            )
            title = f"{rollout.id} has not moved for {span(now - since)}"
            yield Notice(title, f"{why}\nrolloutctl status {rollout.id}")

    # -- telling it

    async def _deliver(self, channel: _Channel) -> None:
        while True:
            await channel.bell.wait()
            await self._send(channel, channel.take())
            await self._state.clock.sleep(LEAST_PAUSE_S)

    async def _send(self, channel: _Channel, notice: Notice) -> None:
        backoff_s = FIRST_BACKOFF_S
        for number in range(1, TRIES + 1):
            try:
                async with asyncio.timeout(SEND_TIMEOUT_S):
                    with answering_for(f"channel {channel.notifier.name}"):
                        await channel.notifier.send(notice.title, notice.text)
            except (RolloutdError, TimeoutError) as error:
                log.warning("%s: try %d of %d: %s", channel.notifier.name, number, TRIES, error)
            else:
                return
            if number < TRIES:
                await self._state.clock.sleep(backoff_s)
                backoff_s = min(backoff_s * 2, LONGEST_BACKOFF_S)
        log.error("%s: given up: %s", channel.notifier.name, notice.title)


def _gates(rollout: Rollout) -> Iterator[tuple[GateName, str]]:
    yield GateName.START, ""
    for spec in rollout.plan.waves:
        if spec.gate is GateName.CONTINUE:
            yield GateName.CONTINUE, spec.name
    yield GateName.PROCEED, ""
