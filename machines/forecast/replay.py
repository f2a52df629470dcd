"""Draws: a walk again with other durations, without asking the scheduler again.

How it works.  A walk has shown the order in which nodes start, and what each waited for: slots of its pools
and limits, its turn (a wave, a gate, a soak), windows, its own hold or freeze.  A draw keeps the order and
these causes, and computes the instants from drawn durations: a node starts when its turn has come, a slot of
each of its pools and limits is free, and the windows are open for as long as it needs.  What the walk waited
for without such a cause stays as long as it was.

So a draw with the durations of the walk gives the instants of the walk.  With others it is an approximation:
a node never overtakes another one by more than its slots allow, and a wait without a known cause does not
become shorter.  The assumption `order-of-one-walk` says so.

Two things depend on the order of instants instead: which run gets the next slot of the runner, and which
nodes a failure keeps from starting.  So where runs queue or attempts fail, a draw places its items as they
arrive.
"""

from __future__ import annotations

import heapq
import math
from array import array
from bisect import bisect_right, insort
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from machines.forecast.attempt import Attempt, NodeKey
from machines.forecast.distributions import Distributions
from machines.forecast.model import RandomSource
from machines.forecast.walk import HORIZON_S
from machines.model import windows
from machines.model.plan import GateName
from machines.model.windows import Window

TOLERANCE_S = 1e-3
"""Instants that differ by less are one: sums of the same durations in another order do."""

MAX_TRIES = 10
"""Tries of a node that fails again and again: people would not try it more often."""

Durations: TypeAlias = "tuple[Sequence[float], int]"
"""The durations of a step in the present draw, all equally likely, and their number."""

Draw: TypeAlias = "tuple[array[float], array[float]]"
"""The start and the end of each item."""


@dataclass(slots=True)
class Turn:
    """When nodes of a rollout may start: so long after these items have ended, or at an instant."""

    after: list[int]
    lag_s: float

    def at(self, ends: Sequence[float]) -> float:
        return max([ends[number] for number in self.after], default=0.0) + self.lag_s


@dataclass(slots=True)
class Openings:
    """When the windows of a plan and a team are open together; searched as far as it is asked."""

    groups: tuple[tuple[Window, ...], ...]
    since: float
    _opens: list[float] = field(default_factory=list)
    _closes: list[float] = field(default_factory=list)

    def earliest(self, at: float, needed_s: float) -> float:
        """Return the first instant from `at` on with so much time before the windows close."""
        position = bisect_right(self._closes, at)
        while position < len(self._closes) or self._search():
            start = max(at, self._opens[position])
            if start + needed_s <= self._closes[position]:
                return start
            position += 1
        return math.inf

    def _search(self) -> bool:
        """Find the next opening; return whether there is one before the horizon."""
        after = self._closes[-1] if self._closes else self.since
        if after > self.since + HORIZON_S:
            return False
        opens = windows.next_common_opening(self.groups, after)
        if opens is None:
            return False
        closings = (windows.open_until(group, opens) for group in self.groups)
        self._opens.append(opens)
        self._closes.append(min(each for each in closings if each is not None))
        return True


@dataclass(slots=True)
class Item:
    """One part of an attempt of the walk, or a prepare stage, with what its start waits for.

    An attempt is one part, unless the runner had no slot at some time: then each of its runs is a part, and
    so is what comes before and after a run.  What an attempt does after it has waited for another one in the
    outage of its node is a part too.
    """

    attempt: Attempt
    walked_at: float
    """When it started in the walk."""
    fixed_s: float
    """What is not drawn of its time: steps with one duration, and waits such as the probation."""
    drawn_s: float
    """What the walk took for the steps that are drawn."""
    drawn: tuple[Durations, ...]
    rollout: str
    is_running: bool = False
    """It began before the walk; its `bound` is its start."""
    keeps_order: bool = False
    """It starts after those that took its slots before it in the walk: of the first part of an attempt."""
    bound: float = 0.0
    needed_s: float = 0.0
    turn: int = -1
    after: tuple[int, ...] = ()
    slots: tuple[int, ...] = ()
    """What it takes at its start."""
    freed: tuple[int, ...] = ()
    """What is free at its end; of a whole attempt the same tuple as `slots`.

    What a node took for an outage is free when the last attempt ends that shares it.
    """
    openings: Openings | None = None
    slack_s: float = 0.0
    """How much longer the walk waited than by these causes."""
    failure: Failure | None = None
    """How its attempt fails; None of a part that is not the last one."""

    @property
    def walked_end(self) -> float:
        return self.walked_at + self.fixed_s + self.drawn_s

    def earliest(self, turn_at: float, ends: Sequence[float], slots: Sequence[Sequence[float]]) -> float:
        """Return when it could start by its causes; draw() computes the same."""
        after, free = (ends[each] for each in self.after), (slots[each][0] for each in self.slots)
        start = max(self.bound, turn_at, *after, *free)
        return start if self.openings is None else self.openings.earliest(start, self.needed_s)


@dataclass(frozen=True, slots=True)
class Failure:
    """How an attempt fails: so long before its end, and what its next try takes."""

    before_end_s: float
    fixed_s: float
    drawn: tuple[Durations, ...]

    def draw_s(self, draw_number: Callable[[], float]) -> float:
        """Return how long the next try takes."""
        drawn = (durations[int(draw_number() * count)] for durations, count in self.drawn)
        return sum(drawn, self.fixed_s)


@dataclass(slots=True)
class Replay:
    """The parts of a walk's attempts in their order, and the slots and turns that they wait for."""

    began_at: float
    distributions: Distributions
    items: list[Item] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    slots: list[list[float]] = field(default_factory=list)
    """The instants at which each slot of a pool or limit is free, before any item, sorted."""
    gates: dict[tuple[str, GateName, str], Turn] = field(default_factory=dict)
    """When each gate is asked."""
    ends: dict[str, Turn] = field(default_factory=dict)
    """When each rollout ends."""
    parts: dict[NodeKey, tuple[int, int]] = field(default_factory=dict)
    """The first part of each node's first attempt, and the last one of its last attempt."""
    failure_rate: float = 0.0
    approve_after_s: float | None = 0.0
    follows_arrival: bool = False
    """Whether items are placed by their arrival: where runs queue, and where failures hold others up."""
    needs: list[int] = field(default_factory=list)
    """How many others must be placed before each item, and after the items before each turn."""
    unlocks: list[list[int]] = field(default_factory=list)
    """The items and turns of which each is one of `needs`."""

    def walked(self) -> Draw:
        starts = array("d", [item.walked_at for item in self.items])
        return starts, array("d", [item.walked_end for item in self.items])

    def draw(self, random: RandomSource) -> Draw:
        draw_number = random.random
        self.distributions.draw(draw_number)
        times_s = []
        for item in self.items:
            took_s = item.fixed_s
            for durations, count in item.drawn:
                took_s += durations[int(draw_number() * count)]
            times_s.append(took_s)
        return self._place(times_s, draw_number)

    def _place(  # noqa: C901  # calls would double its time
        self, times_s: Sequence[float], draw_number: Callable[[], float]
    ) -> Draw:
        """Return when each item starts and ends."""
        starts, ends = (array("d", bytes(8 * len(times_s))) for _ in range(2))
        slots = [list(each) for each in self.slots]
        turns: dict[int, float] = {-1: 0.0}
        pauses: dict[str, list[tuple[float, float]]] = defaultdict(list)
        failure_rate = self.failure_rate
        order = self._by_arrival(turns, ends, slots) if self.follows_arrival else range(len(times_s))
        for position in order:
            item = self.items[position]
            if item.turn not in turns:
                turns[item.turn] = self.turns[item.turn].at(ends)
            start = turns[item.turn]
            if item.bound > start:
                start = item.bound
            for number in item.after:
                if ends[number] > start:
                    start = ends[number]
            for number in item.slots:
                free_at = slots[number][0]
                if free_at > start:
                    start = free_at
            if item.openings is not None:
                start = item.openings.earliest(start, item.needed_s)
            start += item.slack_s
            if failure_rate:
                start = _after_pauses(start, pauses[item.rollout])
            if item.openings is not None:
                start = item.openings.earliest(start, item.needed_s)
            if item.is_running:
                start = item.bound
            end = start + times_s[position]
            if item.is_running and end < self.began_at:
                end = self.began_at
            if failure_rate and item.failure is not None and draw_number() < failure_rate:
                end = self._fail(end, item.failure, pauses[item.rollout], draw_number)
            is_whole = item.freed is item.slots
            for number in item.slots:
                free = slots[number]
                if is_whole and len(free) == 1:
                    free[0] = end
                else:
                    _take(free, start, end if is_whole else math.inf)
            if not is_whole:
                for number in item.freed:
                    _free(slots[number], end)
            starts[position] = start
            ends[position] = end
        return starts, ends

    def _by_arrival(
        self, turns: dict[int, float], ends: Sequence[float], slots: Sequence[Sequence[float]]
    ) -> Iterator[int]:
        """Yield the items in the order in which they can start, each after those that it needs."""
        needs = list(self.needs)
        ready = [number for number, count in enumerate(needs) if not count]
        arrivals: list[tuple[float, int]] = []
        while ready or arrivals:
            if ready:
                number = ready.pop()
                item = self.items[number] if number < len(self.items) else None
                if item is not None and item.slots:  # it waits for a slot among others
                    if item.turn not in turns:
                        turns[item.turn] = self.turns[item.turn].at(ends)
                    heapq.heappush(arrivals, (item.earliest(turns[item.turn], ends, slots), number))
                    continue
            else:
                number = heapq.heappop(arrivals)[1]
            if number < len(self.items):
                yield number
            for following in self.unlocks[number]:
                needs[following] -= 1
                if not needs[following]:
                    ready.append(following)

    def _fail(
        self,
        end: float,
        failure: Failure,
        pauses: list[tuple[float, float]],
        draw_number: Callable[[], float],
    ) -> float:
        """Pause the rollout of a node that fails; return when a next try has ended well."""
        for _ in range(MAX_TRIES):
            failed_at = end - failure.before_end_s
            until = _after_pauses(failed_at, pauses)
            # A failure during a pause is settled by the same votes.
            if until == failed_at:
                until = math.inf if self.approve_after_s is None else failed_at + self.approve_after_s
                pauses.append((failed_at, until))
            end = until + failure.draw_s(draw_number)
            if draw_number() >= self.failure_rate:
                break
        return end

    def link(self) -> None:
        """Find what must be placed before each item; after settle()."""
        self.needs = [0] * (len(self.items) + len(self.turns))
        self.unlocks = [[] for _ in self.needs]
        freed_by = {
            (item.attempt.outage, slot): number
            for number, item in enumerate(self.items)
            for slot in item.freed
        }
        users: list[list[int]] = [[] for _ in self.slots]
        for turn, each in enumerate(self.turns, len(self.items)):
            for number in each.after:
                self._let(number, turn)
        for number, item in enumerate(self.items):
            for before in item.after:
                self._let(before, number)
            if item.turn >= 0:
                self._let(len(self.items) + item.turn, number)
            for slot in item.slots:
                # Attempts keep their order; the one that took a slot so many starts ago has given it back.
                usable = sum(at < math.inf for at in self.slots[slot])
                if item.keeps_order and 0 < usable <= len(users[slot]):
                    self._let(freed_by[users[slot][-usable], slot], number)
                users[slot].append(item.attempt.outage)

    def _let(self, before: int, number: int) -> None:
        if before != number:
            self.unlocks[before].append(number)
            self.needs[number] += 1

    def settle(self) -> None:
        """Measure what the walk waited for beyond the known causes."""
        slots, ends = [list(each) for each in self.slots], array("d")
        dropped: dict[int, set[int]] = defaultdict(set)
        for item in self.items:
            start = item.walked_at
            is_whole = item.freed is item.slots
            if not item.is_running:
                # Not a slot that the walk did not wait for, such as that of a node that keeps its own.
                free = tuple(each for each in item.slots if slots[each][0] <= start + TOLERANCE_S)
                dropped[item.attempt.outage].update(set(item.slots) - set(free))
                item.slots = free
                turn_at = 0.0 if item.turn < 0 else self.turns[item.turn].at(ends)
                slack_s = start - item.earliest(turn_at, ends, slots)
                item.slack_s = slack_s if abs(slack_s) > TOLERANCE_S else 0.0
            gone = dropped[item.attempt.outage]
            freed = tuple(each for each in item.freed if each not in gone)
            item.freed = item.slots if is_whole else freed
            end = item.walked_end
            for number in item.slots:
                _take(slots[number], start, end if is_whole else math.inf)
            if not is_whole:
                for number in item.freed:
                    _free(slots[number], end)
            ends.append(end)


def _take(free: list[float], start: float, until: float) -> None:
    """Take a slot at an instant; it is free again at `until`, infinity as long as this is not known."""
    # The one that was free last: those free before stay for nodes that start before.
    del free[max(0, bisect_right(free, start + TOLERANCE_S) - 1)]
    insort(free, until)


def _free(free: list[float], at: float) -> None:
    """Let a slot be free that was taken until a time that was not known."""
    free.pop()
    insort(free, at)


def _after_pauses(start: float, pauses: list[tuple[float, float]]) -> float:
    # A pause is recorded when its failure is drawn, so they are not in order.
    while True:
        until = max((until for since, until in pauses if since <= start < until), default=start)
        if until == start:
            return start
        start = until
