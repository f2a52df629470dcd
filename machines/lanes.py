"""Which waiting nodes are worth asking about: so that a decision costs what changed, not the fleet.

A lane is the waiting nodes of one wave of one rollout that share their team and
all their pools, and so mostly their fate.  A lane is *hot* while one of its
nodes may be able to start; schedule.py asks hot lanes only.  A lane in which
nothing can start is *parked*, and whatever could change that heats it again:
a change of a pool of it, of a node in it, of its rollout, or an instant.

Parking is a memory, never a rule: an index built afresh has all lanes hot and
comes to the same decision.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass, field

from machines.rollout import Target

Place = tuple[bool, int, str]
"""Where a waiting node stands in its wave: still isolated ones first, then by position."""

Key = tuple[str, str, str | None, tuple[str, ...]]


@dataclass(slots=True, eq=False)
class Lane:
    """Waiting nodes that share rollout, wave, team and pools; the next one first."""

    key: Key
    places: list[Place] = field(default_factory=list)

    @property
    def rollout(self) -> str:
        """The rollout."""
        return self.key[0]

    @property
    def wave(self) -> str:
        """The wave's name."""
        return self.key[1]

    @property
    def pools(self) -> tuple[str, ...]:
        """The ids of the pools."""
        return self.key[3]


def place_of(target: Target) -> Place:
    """Return where a waiting node stands in its wave."""
    return (not target.isolated, target.position, target.node)


class Lanes:
    """All lanes, and which of them are hot."""

    def __init__(self) -> None:
        self._lanes: dict[Key, Lane] = {}
        self._of: dict[tuple[str, str], Lane] = {}
        self._in_pool: dict[str, dict[Lane, None]] = {}
        self._of_rollout: dict[str, dict[Lane, None]] = {}
        self._hot: dict[tuple[str, str], dict[Lane, None]] = {}
        self._wakes: list[tuple[float, int, Lane]] = []
        self._parked = 0

    def clear(self) -> None:
        """Forget all lanes and whoever waits in them."""
        for table in (self._lanes, self._of, self._in_pool, self._of_rollout, self._hot, self._wakes):
            table.clear()

    def place(self, target: Target, pools: tuple[str, ...]) -> None:
        """Let a pending node wait in the lane of its team and pools."""
        key = (target.rollout, target.wave, target.team, pools)
        lane = self._lanes.get(key)
        if lane is None:
            lane = self._lanes[key] = Lane(key)
            self._of_rollout.setdefault(target.rollout, {})[lane] = None
            for pool in pools:
                self._in_pool.setdefault(pool, {})[lane] = None
        insort(lane.places, place_of(target))
        self._of[target.rollout, target.node] = lane
        self._heat(lane)

    def unplace(self, target: Target) -> None:
        """Take a node out of its lane; one that is in none is fine."""
        lane = self._of.pop((target.rollout, target.node), None)
        if lane is None:
            return
        del lane.places[bisect_left(lane.places, place_of(target))]
        if lane.places:
            self._heat(lane)
            return
        del self._lanes[lane.key]
        self._of_rollout[lane.rollout].pop(lane, None)
        self._hot.get((lane.rollout, lane.wave), {}).pop(lane, None)
        for pool in lane.pools:
            waiting = self._in_pool[pool]
            waiting.pop(lane, None)
            if not waiting:
                del self._in_pool[pool]

    def hot(self, rollout: str, wave: str) -> Iterable[Lane]:
        """Return the hot lanes of a wave."""
        return self._hot.get((rollout, wave), {})

    def park(self, lane: Lane, until: float) -> None:
        """Ask no more about a lane, until something heats it, at the latest at `until` (epoch seconds)."""
        self._hot.get((lane.rollout, lane.wave), {}).pop(lane, None)
        if not math.isinf(until):
            self._parked += 1
            heapq.heappush(self._wakes, (until, self._parked, lane))

    def heat_pool(self, pool: str) -> None:
        """Ask again about all lanes of a pool."""
        for lane in self._in_pool.get(pool, ()):
            self._heat(lane)

    def heat_node(self, node: str, rollouts: Iterable[str]) -> None:
        """Ask again about the lanes of a node."""
        for rollout in rollouts:
            lane = self._of.get((rollout, node))
            if lane is not None:
                self._heat(lane)

    def heat_rollout(self, rollout: str) -> None:
        """Ask again about all lanes of a rollout."""
        for lane in self._of_rollout.get(rollout, ()):
            self._heat(lane)

    def heat_all(self) -> None:
        """Ask again about everything."""
        for lane in self._lanes.values():
            self._heat(lane)

    def waits_in(self, pool: str) -> bool:
        """Say whether any node waits for a slot of the pool."""
        return pool in self._in_pool

    def has_rivals(self, pool: str) -> bool:
        """Say whether more than one node waits for a slot of the pool."""
        waiting = self._in_pool.get(pool, {})
        return len(waiting) > 1 or any(len(lane.places) > 1 for lane in waiting)

    def rollouts_in(self, pool: str) -> list[str]:
        """Return the rollouts of which a node waits for a slot of the pool."""
        return sorted({lane.rollout for lane in self._in_pool.get(pool, ())})

    def advance(self, now: float) -> None:
        """Heat the lanes whose time has come."""
        while self._wakes and self._wakes[0][0] <= now:
            lane = heapq.heappop(self._wakes)[2]
            if self._lanes.get(lane.key) is lane:
                self._heat(lane)

    def next_wake(self) -> float:
        """Return the next instant at which a parked lane is asked about again; infinity for none."""
        while self._wakes and self._lanes.get(self._wakes[0][2].key) is not self._wakes[0][2]:
            heapq.heappop(self._wakes)
        return self._wakes[0][0] if self._wakes else math.inf

    def _heat(self, lane: Lane) -> None:
        self._hot.setdefault((lane.rollout, lane.wave), {})[lane] = None
