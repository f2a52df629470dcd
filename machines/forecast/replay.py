"""Draws: a walk again with other durations, without asking the scheduler again.

How it works.  A walk has shown the order in which nodes start, and what each waited for: slots of its pools
and limits, its turn (a wave, a gate, a soak), windows, its own hold or freeze.  A draw keeps the order and
these causes, and computes the instants from drawn durations: a node starts when its turn has come, a slot of
each of its pools and limits is free, and the windows are open for as long as it needs.  What the walk waited
for without such a cause stays as long as it was.

So a draw with the durations of the walk gives the instants of the walk, exactly.  With others it is an
approximation: a node never overtakes another one by more than its slots allow, and a wait without a known
cause does not become shorter.  The assumption `order-of-one-walk` says so.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right, insort
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from machines.facts.index import Index
from machines.facts.preparations import BUILD_NODE
from machines.forecast.attempt import Attempt, NodeKey
from machines.forecast.model import RandomSource
from machines.forecast.timeline import own_bound
from machines.forecast.walk import HORIZON_S, Walk
from machines.model import windows
from machines.model.plan import GateName
from machines.model.windows import Window
from machines.rules.start_blockers import window_groups
from machines.states import Phase

TOLERANCE_S = 1e-3
"""Instants that differ by less are one: sums of the same durations in another order do."""

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
    """One attempt or prepare stage of the walk, with what its start waits for."""

    attempt: Attempt
    rollout: str
    is_running: bool
    """Its `bound` is then its start."""
    bound: float
    needed_s: float
    fixed_s: float
    """What is not drawn of its time: steps with one duration, and waits such as the probation."""
    drawn_s: float
    """What the walk took for the steps that are drawn."""
    drawn: tuple[tuple[Sequence[float], int], ...]
    """The durations of each such step, and their number."""
    turn: int = -1
    after: tuple[int, ...] = ()
    slots: tuple[int, ...] = ()
    openings: Openings | None = None
    slack_s: float = 0.0
    """How much longer the walk waited than by these causes."""

    def earliest(self, turn_at: float, ends: Sequence[float], slots: Sequence[Sequence[float]]) -> float:
        """Return when it could start by its causes; draw() computes the same."""
        after, free = (ends[each] for each in self.after), (slots[each][0] for each in self.slots)
        start = max(self.bound, turn_at, *after, *free)
        return start if self.openings is None else self.openings.earliest(start, self.needed_s)


@dataclass(slots=True)
class Replay:
    """The attempts of a walk in their order, and the slots and turns that they wait for."""

    began_at: float
    items: list[Item] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    slots: list[list[float]] = field(default_factory=list)
    """The instants at which each slot of a pool or limit is free, before any item, sorted."""
    gates: dict[tuple[str, GateName, str], Turn] = field(default_factory=dict)
    """When each gate is asked."""
    ends: dict[str, Turn] = field(default_factory=dict)
    """When each rollout ends."""
    failure_rate: float = 0.0
    approve_after_s: float | None = 0.0

    def draw(self, random: RandomSource | None) -> Draw:  # noqa: C901  # calls would double its time
        """Return one draw; without `random` the durations are those of the walk."""
        starts, ends = array("d"), array("d")
        slots = [list(each) for each in self.slots]
        turns: dict[int, float] = {-1: 0.0}
        pauses: dict[str, list[tuple[float, float]]] = defaultdict(list)
        failure_rate, draw_number = self.failure_rate, None if random is None else random.random
        for item in self.items:
            took_s = item.fixed_s
            if draw_number is None:
                took_s += item.drawn_s
            else:
                for durations, count in item.drawn:
                    took_s += durations[int(draw_number() * count)]
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
            end = start + took_s
            if item.is_running and end < self.began_at:
                end = self.began_at
            if failure_rate and draw_number is not None and draw_number() < failure_rate:
                end = self._fail(end, took_s, pauses[item.rollout])
            for number in item.slots:
                free = slots[number]
                # The one that was free last: those free before stay for nodes that start before.
                if len(free) == 1:
                    free[0] = end
                else:
                    del free[max(0, bisect_right(free, start + TOLERANCE_S) - 1)]
                    insort(free, end)
            starts.append(start)
            ends.append(end)
        return starts, ends

    def _fail(self, failed_at: float, service_s: float, pauses: list[tuple[float, float]]) -> float:
        """Pause the rollout of a node that fails; return when its next try has ended."""
        until = _after_pauses(failed_at, pauses)
        if until == failed_at:
            until = math.inf if self.approve_after_s is None else failed_at + self.approve_after_s
            pauses.append((failed_at, until))
        # A failure during a pause is settled by the same votes.
        return until + service_s

    def settle(self) -> None:
        """Measure what the walk waited for beyond the known causes."""
        slots, ends = [list(each) for each in self.slots], array("d")
        for item in self.items:
            start = item.attempt.starts_at
            if not item.is_running:
                # Not a slot that the walk did not wait for, such as that of a node that keeps its own.
                item.slots = tuple(each for each in item.slots if slots[each][0] <= start + TOLERANCE_S)
                turn_at = 0.0 if item.turn < 0 else self.turns[item.turn].at(ends)
                slack_s = start - item.earliest(turn_at, ends, slots)
                item.slack_s = slack_s if abs(slack_s) > TOLERANCE_S else 0.0
            end = start + item.fixed_s + item.drawn_s
            for number in item.slots:
                free = slots[number]
                del free[max(0, bisect_right(free, start + TOLERANCE_S) - 1)]
                insort(free, end)
            ends.append(end)


def _after_pauses(start: float, pauses: list[tuple[float, float]]) -> float:
    for since, until in pauses:
        if since <= start < until:
            start = until
    return start


# -- from a walk ---------------------------------------------------------------


def replay_of(walk: Walk, before: Index) -> Replay:
    """Return the replay of a walk that has ended; `before` are the facts that it began with."""
    made = _Builder(walk, before, Replay(before.now, approve_after_s=walk.assumptions.approve_after_s))
    return made.build()


@dataclass(slots=True)
class _Builder:
    walk: Walk
    before: Index
    replay: Replay
    _slots: dict[str, int] = field(default_factory=dict)
    _openings: dict[tuple[str, str | None], Openings | None] = field(default_factory=dict)
    _first_start: dict[str, float] = field(default_factory=dict)
    _last_stage: dict[NodeKey, int] = field(default_factory=dict)
    _stage_first: dict[tuple[str, str], int] = field(default_factory=dict)
    _turn_of: dict[tuple[str, int], int] = field(default_factory=dict)
    _next_epoch: dict[str, int] = field(default_factory=dict)

    def build(self) -> Replay:
        attempts = [each for each in self.walk.attempts if each.ends_at is not None]
        for attempt in attempts:
            if not attempt.is_running and not attempt.stage:
                self._first_start.setdefault(attempt.node, attempt.starts_at)
        shared = self._shared_nodes()
        for number, attempt in enumerate(attempts):
            self.replay.items.append(self._item(number, attempt, shared))
        for gate, asked_at in self.walk.approvals.asked_at.items():
            self.replay.gates[gate] = self._turn(gate[0], asked_at)
        for rollout in self.before.rollouts.values():
            ended_at = self.walk.index.rollout(rollout.id).ended_at
            if ended_at is None:
                ends = (each.ends_at for each in attempts if each.rollout == rollout.id)
                ended_at = max((each for each in ends if each is not None), default=self.before.now)
            self.replay.ends[rollout.id] = self._turn(rollout.id, ended_at)
        self.replay.settle()
        return self.replay

    def _shared_nodes(self) -> frozenset[str]:
        """Return the nodes that are targets of two open rollouts: only one of them works on a node."""
        counts: dict[str, int] = defaultdict(int)
        for rollout in self.before.rollouts.values():
            if not rollout.closed:
                for target in self.before.targets(rollout.id):
                    counts[target.node] += target.phase is not Phase.DONE
        return frozenset(node for node, count in counts.items() if count > 1)

    def _item(self, number: int, attempt: Attempt, shared: frozenset[str]) -> Item:
        assert attempt.ends_at is not None
        drawn = [(each, seconds) for each, seconds in attempt.steps if len(each) > 1]
        drawn_s = sum(seconds for _, seconds in drawn)
        item = Item(
            attempt,
            attempt.rollout,
            attempt.is_running,
            attempt.starts_at if attempt.is_running else self.before.now,
            attempt.needed_s,
            attempt.ends_at - attempt.starts_at - drawn_s,
            drawn_s,
            tuple((each, len(each)) for each, _ in drawn),
        )
        if attempt.stage:
            return self._stage_item(number, attempt, item)
        names = [*attempt.pools, *self._limits(attempt)]
        if attempt.node in shared:
            names.append(f"node/{attempt.node}")
        item.slots = tuple(self._slot(name, attempt) for name in names)
        if attempt.is_running:
            return item
        target = self.before.target(*attempt.key)
        item.bound = own_bound(self.before, target, self.before.now)[0]
        if attempt.key in self._last_stage:
            item.after = (self._last_stage[attempt.key],)
        if not attempt.is_rollback:
            item.turn = self._turn_number(attempt)
            item.openings = self._openings_of(attempt)
        return item

    def _stage_item(self, number: int, attempt: Attempt, item: Item) -> Item:
        rollout = self.before.rollout(attempt.rollout)
        stage = next((each for each in rollout.prepare_stages if each.name == attempt.stage), None)
        first = self._stage_first.setdefault((attempt.rollout, attempt.stage), number)
        build = (attempt.rollout, BUILD_NODE)
        after = {self._last_stage.get(key, number) for key in (attempt.key, build)}
        # An install runs on one node alone first.
        first_end = self.replay.items[first].attempt.ends_at if first != number else None
        if first_end is not None and attempt.starts_at >= first_end - TOLERANCE_S:
            after.add(first)
        item.after = tuple(sorted(after - {number}))
        if stage is not None:
            name = f"prepare/{attempt.rollout}/{stage.name}"
            if name not in self._slots:
                self._add_slots(name, [-math.inf] * stage.max_parallel)
            item.slots = (self._slots[name],)
        self._last_stage[attempt.key] = number
        return item

    # slots

    def _limits(self, attempt: Attempt) -> list[str]:
        plan = self.before.rollout(attempt.rollout).plan
        names = ["fleet"]
        if plan.max_parallel is not None:
            names.append(f"rollout/{attempt.rollout}")
        wave = next((each for each in plan.waves if each.name == attempt.wave), None)
        if wave is not None and wave.max_parallel is not None and not attempt.is_rollback:
            names.append(f"wave/{attempt.rollout}/{wave.name}")
        return names

    def _slot(self, name: str, attempt: Attempt) -> int:
        if name in self._slots:
            return self._slots[name]
        plan = self.before.rollout(attempt.rollout).plan
        match name.partition("/")[0]:
            case "fleet" if name == "fleet":
                return self._add_slots(name, [-math.inf] * self.before.limits.max_parallel)
            case "rollout" if name == f"rollout/{attempt.rollout}":
                return self._add_slots(name, [-math.inf] * (plan.max_parallel or 1))
            case "wave" if name == f"wave/{attempt.rollout}/{attempt.wave}":
                most = next(each.max_parallel for each in plan.waves if each.name == attempt.wave)
                return self._add_slots(name, [-math.inf] * (most or 1))
            case "node" if name == f"node/{attempt.node}":
                return self._add_slots(name, [-math.inf])
            case _:
                return self._add_slots(name, self._pool_slots(name))

    def _add_slots(self, name: str, free_at: list[float]) -> int:
        self._slots[name] = len(self.replay.slots)
        self.replay.slots.append(sorted(free_at))
        return self._slots[name]

    def _pool_slots(self, name: str) -> list[float]:
        """Return when each slot of a pool is free of what takes it before the walk and is not of it."""
        pool = self.before.pool(name)
        budget = self.before.budget(pool)
        taken = [self._released_at(node) for node in pool.down if not self._is_running(node)]
        # Of a pool over its budget the last ones count: a node starts once fewer are down than may be.
        return sorted([-math.inf] * budget + taken)[-budget:] if budget else [math.inf]

    def _is_running(self, node: str) -> bool:
        return any(target.needs_driver for target in self.before.targets_on(node))

    def _released_at(self, node: str) -> float:
        if node in self._first_start:
            return self._first_start[node]
        untils = [math.inf if each.until is None else each.until for each in self.before.holds_on(node)]
        is_kept = any(t.phase is Phase.FAILED or t.isolated for t in self.before.targets_on(node))
        return math.inf if is_kept or not untils else max(untils)

    # turns

    def _turn_number(self, attempt: Attempt) -> int:
        epochs = self.walk.timeline.epochs.get(attempt.rollout, [])
        number = self._next_epoch.get(attempt.rollout, 0)
        while number + 1 < len(epochs) and epochs[number + 1].begins_at <= attempt.starts_at + TOLERANCE_S:
            number += 1
        self._next_epoch[attempt.rollout] = number
        key = (attempt.rollout, number)
        if number >= len(epochs):
            return -1
        if key not in self._turn_of:
            self._turn_of[key] = len(self.replay.turns)
            self.replay.turns.append(self._turn(attempt.rollout, epochs[number].begins_at))
        return self._turn_of[key]

    def _turn(self, rollout: str, at: float) -> Turn:
        """Return an instant of a rollout as so long after the attempts that had ended by then."""
        ended = [
            number
            for number, item in enumerate(self.replay.items)
            if item.attempt.rollout == rollout
            and not item.attempt.stage
            and item.attempt.ends_at is not None
            and item.attempt.ends_at <= at + TOLERANCE_S
        ]
        last = max((self.replay.items[number].attempt.ends_at or 0.0 for number in ended), default=None)
        return Turn([], at) if last is None else Turn(ended, max(0.0, at - last))

    # windows

    def _openings_of(self, attempt: Attempt) -> Openings | None:
        key = (attempt.rollout, attempt.team)
        if key not in self._openings:
            rollout = self.before.rollout(attempt.rollout)
            groups = tuple(
                tuple(group) for _, group in window_groups(self.before, rollout, attempt.team) if group
            )
            self._openings[key] = Openings(groups, self.before.now) if groups else None
        return self._openings[key]
