"""The queue of pending nodes: which of them are worth a decision now.

How it works.  A decision must cost what changed, not the size of the fleet.  Pending nodes of one wave that
share their team and all their pools mostly share their fate, so they form a group, as pods with equal
requirements do in a scheduler.  A group is active while one of its nodes may be able to start; decide()
examines active groups only.  A group in which nothing can start backs off: it is skipped until something
activates it again.  That is a change of one of its pools, of a node in it or of its rollout, a new node in
it, or an instant (the end of a window or of a hold).

A backoff is a cache, never a rule.  A new index has all groups active and must come to the same decision; the
tests compare the two after every step.  So activating too much costs time, and activating too little leaves a
node waiting for nothing.  When in doubt, activate.

The sets of groups are dicts without values: they keep their order, so that a decision does not depend on
hashes.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass, field

from machines.model.rollout import Target

QueuePosition = tuple[bool, int, str]
"""Order of a wave's pending nodes: those that are still isolated hold a slot already and go first, then by
position.
"""

GroupKey = tuple[str, str, str | None, tuple[str, ...]]


@dataclass(slots=True, eq=False)
class QueueGroup:
    """Pending nodes that share rollout, wave, team and pools; the next one first."""

    key: GroupKey
    positions: list[QueuePosition] = field(default_factory=list)

    @property
    def rollout(self) -> str:
        return self.key[0]

    @property
    def wave(self) -> str:
        return self.key[1]

    @property
    def pools(self) -> tuple[str, ...]:
        return self.key[3]


def queue_position(target: Target) -> QueuePosition:
    return (not target.isolated, target.position, target.node)


class SchedulingQueue:
    """All groups, and which of them are active."""

    def __init__(self) -> None:
        self._groups: dict[GroupKey, QueueGroup] = {}
        self._group_by_target: dict[tuple[str, str], QueueGroup] = {}
        self._groups_by_pool: dict[str, dict[QueueGroup, None]] = {}
        self._groups_by_rollout: dict[str, dict[QueueGroup, None]] = {}
        self._active: dict[tuple[str, str], dict[QueueGroup, None]] = {}
        self._wakeups: list[tuple[float, int, QueueGroup]] = []
        self._backoff_sequence = 0  # breaks ties in the heap, because groups have no order

    def clear(self) -> None:
        for table in (self._groups, self._group_by_target, self._groups_by_pool, self._groups_by_rollout):
            table.clear()
        self._active.clear()
        self._wakeups.clear()

    def enqueue(self, target: Target, pools: tuple[str, ...]) -> None:
        key = (target.rollout, target.wave, target.team, pools)
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = QueueGroup(key)
            self._groups_by_rollout.setdefault(target.rollout, {})[group] = None
            for pool in pools:
                self._groups_by_pool.setdefault(pool, {})[group] = None
        insort(group.positions, queue_position(target))
        self._group_by_target[target.rollout, target.node] = group
        self._activate(group)

    def remove(self, target: Target) -> None:
        group = self._group_by_target.pop((target.rollout, target.node), None)
        if group is None:
            return
        del group.positions[bisect_left(group.positions, queue_position(target))]
        if group.positions:
            self._activate(group)
            return
        del self._groups[group.key]
        self._groups_by_rollout[group.rollout].pop(group, None)
        self._active.get((group.rollout, group.wave), {}).pop(group, None)
        for pool in group.pools:
            groups = self._groups_by_pool[pool]
            groups.pop(group, None)
            if not groups:
                del self._groups_by_pool[pool]

    def active(self, rollout: str, wave: str) -> Iterable[QueueGroup]:
        """Return the active groups of a wave."""
        return self._active.get((rollout, wave), {})

    def back_off(self, group: QueueGroup, until: float) -> None:
        """Skip a group until something activates it, or until the instant (epoch seconds)."""
        self._active.get((group.rollout, group.wave), {}).pop(group, None)
        if not math.isinf(until):
            self._backoff_sequence += 1
            heapq.heappush(self._wakeups, (until, self._backoff_sequence, group))

    def activate_pool(self, pool: str) -> None:
        for group in self._groups_by_pool.get(pool, ()):
            self._activate(group)

    def activate_node(self, node: str, rollouts: Iterable[str]) -> None:
        for rollout in rollouts:
            group = self._group_by_target.get((rollout, node))
            if group is not None:
                self._activate(group)

    def activate_rollout(self, rollout: str) -> None:
        for group in self._groups_by_rollout.get(rollout, ()):
            self._activate(group)

    def activate_all(self) -> None:
        for group in self._groups.values():
            self._activate(group)

    def has_waiting(self, pool: str) -> bool:
        """Return whether any node waits for a slot of the pool."""
        return pool in self._groups_by_pool

    def has_competitors(self, pool: str, more_than: int = 1) -> bool:
        """Return whether more than this many nodes wait for a slot of the pool."""
        waiting = 0
        for group in self._groups_by_pool.get(pool, ()):
            waiting += len(group.positions)
            if waiting > more_than:
                return True
        return False

    def rollouts_waiting_for(self, pool: str) -> list[str]:
        """Return the rollouts with a node that waits for a slot of the pool."""
        return sorted({group.rollout for group in self._groups_by_pool.get(pool, ())})

    def advance(self, now: float) -> None:
        """Activate the groups whose backoff is over."""
        while self._wakeups and self._wakeups[0][0] <= now:
            group = heapq.heappop(self._wakeups)[2]
            if self._groups.get(group.key) is group:
                self._activate(group)

    def next_wakeup(self) -> float:
        """Return when the next backoff is over (epoch seconds), infinity for none."""
        while self._wakeups and self._groups.get(self._wakeups[0][2].key) is not self._wakeups[0][2]:
            heapq.heappop(self._wakeups)
        return self._wakeups[0][0] if self._wakeups else math.inf

    def _activate(self, group: QueueGroup) -> None:
        self._active.setdefault((group.rollout, group.wave), {})[group] = None
