"""Walks the waiting nodes of a wave in their order, and starts whom every rule lets go.

Whoever passes takes its slots before the next one is asked.  What is not known
and would have to be is asked for: observations, rehearsals, looks at traffic.
It knows one wave of one rollout at a time; whether that wave may start is
decided before.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, nsmallest
from typing import Final

from machines import pools, prospects, rules, traffic
from machines.decision import Look, Open, Probe, PutBack, Rehearse, Start
from machines.index import Index
from machines.lanes import Lane, Place
from machines.node import natural
from machines.plan import WaveSpec
from machines.rollout import Reason, Rollout, Target
from machines.stands import sight

OBSERVE_MOST: Final = 256
"""Nodes asked to be observed by one decision: what one batch of connections can carry."""


@dataclass(slots=True)
class Draft:
    """A decision being made; `quiet` is why nothing may be done in it."""

    quiet: Reason | None = None
    room: rules.Room = field(default_factory=rules.Room)
    starts: list[Start] = field(default_factory=list)
    looks: list[Look] = field(default_factory=list)
    rehearse: list[Rehearse] = field(default_factory=list)
    probes: list[Probe] = field(default_factory=list)
    probed: traffic.Looks = field(default_factory=traffic.Looks)
    put_backs: list[PutBack] = field(default_factory=list)
    opens: list[Open] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)
    observe: dict[str, None] = field(default_factory=dict)
    asked: dict[str, bool] = field(default_factory=dict)
    reasons: dict[str, Reason] = field(default_factory=dict)
    wake_at: float = math.inf

    def wake(self, at: float) -> None:
        """Ask again at this instant (epoch seconds) at the latest."""
        self.wake_at = min(self.wake_at, at)


def walk(index: Index, rollout: Rollout, wave: WaveSpec, now: float, draft: Draft) -> None:
    """Ask the hot lanes' nodes in the order of their places, and start whom every rule lets go.

    A lane of which nobody can start, whatever else this decision starts, is parked.
    """
    heads: list[tuple[Place, int, Lane, _Asked]] = []
    for number, lane in enumerate(index.lanes.hot(rollout.id, wave.name)):
        heads.append((lane.places[0], number, lane, _Asked()))
    heapify(heads)
    walking = _Walk(index, rollout, wave, now, draft)
    while heads and rules.has_room(index, rollout, wave, draft.room):
        place, number, lane, asked = heappop(heads)
        if walking.ask(index.target(rollout.id, place[2]), asked):
            asked.at += 1
            if asked.at < len(lane.places):
                heappush(heads, (lane.places[asked.at], number, lane, asked))
                continue
        if not asked.hot:
            index.lanes.park(lane, asked.until)
    walking.start_passed()


def observe_mates(index: Index, target: Target, draft: Draft) -> bool:
    """Ask for the node's pool mates to be observed where that is too long ago; say whether any is."""
    stale = False
    for pool in index.pools_for(target.rollout, target.node):
        if pool.id not in draft.asked:
            draft.asked[pool.id] = _observe(index, nsmallest(OBSERVE_MOST, pool.unknown, key=natural), draft)
        stale |= draft.asked[pool.id]
    return stale


def _observe(index: Index, nodes: Iterable[str], draft: Draft) -> bool:
    stale = [node for node in nodes if (seen := sight(index, node)) is not None and seen.stale]
    for node in stale[: OBSERVE_MOST - len(draft.observe)]:
        draft.observe[node] = None
    return bool(stale)


@dataclass(slots=True)
class _Asked:
    """How far a lane has been asked; `hot` says that it must be asked again next time."""

    at: int = 0
    hot: bool = False
    until: float = math.inf


@dataclass(slots=True)
class _Walk:
    """One wave of one rollout, in one decision."""

    index: Index
    rollout: Rollout
    wave: WaveSpec
    now: float
    draft: Draft
    queue: prospects.Queue = field(default_factory=prospects.Queue)
    probes: int = 0

    def ask(self, target: Target, asked: _Asked) -> bool:
        """Start the node if every rule lets it go; say whether the next one of its lane is worth asking."""
        index, draft = self.index, self.draft
        if target.node in draft.room.taken.nodes:
            asked.hot = True
            return True
        blocked = pools.blocked_by(index, target, draft.room.taken)
        if blocked is not None and blocked[1] is not None:
            asked.hot = asked.hot or not _is_full_anyway(index, target)
            return target.isolated
        own = rules.own_block(index, self.rollout, target, self.now)
        if own is not None and own.code not in rules.UNSEEN:
            asked.until = min(asked.until, rules.until(index, self.rollout, target, own, self.now))
            return True
        if own is not None or blocked is not None:
            stale = _observe(index, (target.node,), draft) | observe_mates(index, target, draft)
            asked.hot |= stale or pools.blocked_by(index, target) != blocked
            return blocked is None or target.isolated
        if self.rollout.plan.traffic and not target.maybe_current and not self._is_idle(target):
            return self._ask_for_traffic(target, asked)
        asked.hot = True
        return draft.quiet is None and self._start(target)

    def start_passed(self) -> None:
        """Start nodes that were passed over where nobody else took their slots."""
        for target in self.queue.passed:
            if self.queue.is_unsure(self._pools(target)):
                continue
            blocked = pools.blocked_by(self.index, target, self.draft.room.taken)
            if blocked is None and rules.has_room(self.index, self.rollout, self.wave, self.draft.room):
                self.draft.room.take(self.index, target)
                self.draft.starts.append(Start(target.rollout, target.node))

    def _start(self, target: Target) -> bool:
        """Start a node that no rule holds, unless another of its pools should go first."""
        draft = self.draft
        if target.maybe_current:
            draft.looks.append(Look(target.rollout, target.node))
        else:
            if self.rollout.plan.traffic and draft.probed.is_unsure(self._pools(target)):
                return False
            if prospects.is_rehearsed(self.rollout.plan, target):
                goes_on = self._ask_to_rehearse(target)
                if goes_on is not None:
                    return goes_on
            draft.starts.append(Start(target.rollout, target.node))
        draft.room.take(self.index, target)
        return True

    def _ask_to_rehearse(self, target: Target) -> bool | None:
        """Return None for a node that goes now; else say whether the next one is worth asking."""
        told, mine = self.index.prospects.fresh(target, self.now), self._pools(target)
        rivals = any(self.index.lanes.has_rivals(pool) for pool in mine)
        if self.queue.is_full(mine):
            return False
        if rivals and self.queue.pass_over(target, mine, told):
            if told is None:
                self.draft.rehearse.append(Rehearse(target.rollout, target.node))
                self.draft.wake(self.now + prospects.GOOD_FOR_S)
            return True
        return False if self.queue.is_unsure(mine) else None

    def _is_idle(self, target: Target) -> bool:
        told = self.index.traffic_of(target.rollout, target.node)
        return told is not None and told.is_idle(self.now)

    def _ask_for_traffic(self, target: Target, asked: _Asked) -> bool:
        """Ask for a look at a node that is not known to be idle; say whether the next one is worth asking.

        One that was never seen, or last seen idle, keeps its place until it was
        looked at; who was busy or unknown lets others go first meanwhile.
        """
        draft, mine = self.draft, self._pools(target)
        told = self.index.traffic_of(target.rollout, target.node)
        if told is not None and not told.is_due(self.now):
            asked.until = min(asked.until, told.again_at)
            return True
        passes = told is not None and told.busy is not False
        asked.hot = True
        if draft.probed.is_full(mine) or self.probes >= self._most_probes():
            return passes
        self.probes += 1
        draft.probed.add(mine, unsure=not passes)
        draft.probes.append(Probe(target.rollout, target.node))
        draft.wake(self.now + traffic.AGAIN_S)
        return True

    def _most_probes(self) -> int:
        """Return how many nodes are worth a look for those that may still start."""
        return traffic.AHEAD * rules.room_left(self.index, self.rollout, self.wave, self.draft.room)

    def _pools(self, target: Target) -> list[str]:
        return [pool.id for pool in self.index.all_pools(target.node)]


def _is_full_anyway(index: Index, target: Target) -> bool:
    """Say whether a pool is full also without what this decision starts."""
    blocked = pools.blocked_by(index, target)
    return blocked is not None and blocked[1] is not None
