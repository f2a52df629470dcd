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
from collections.abc import Iterable, Sequence

from machines.facts.sharing import Forkable
from machines.model.decision import QueueGroup
from machines.model.rollout import Target

QueuePosition = tuple[bool, int, str]
"""Order of a wave's pending nodes: those that are still isolated hold a slot already and go first, then by
position.
"""


def queue_position(target: Target) -> QueuePosition:
    return (not target.isolated, target.position, target.node)


class SchedulingQueue(Forkable):
    """All groups, and which of them are active."""

    def __init__(self) -> None:
        super().__init__()
        self._groups: dict[QueueGroup, list[QueuePosition]] = {}
        self._group_by_target: dict[tuple[str, str], QueueGroup] = {}
        self._groups_by_pool: dict[str, dict[QueueGroup, None]] = {}
        self._groups_by_rollout: dict[str, dict[QueueGroup, None]] = {}
        self._active: dict[tuple[str, str], dict[QueueGroup, None]] = {}
        self._wakeups: list[tuple[float, int, QueueGroup]] = []
        self._backoff_sequence = 0  # breaks ties in the heap, because teams may be None

    def clear(self) -> None:
        self._groups, self._group_by_target = {}, {}
        self._groups_by_pool, self._groups_by_rollout, self._active = {}, {}, {}
        self._wakeups = []

    def enqueue(self, target: Target, pools: tuple[str, ...]) -> None:
        group = QueueGroup(target.rollout, target.wave, target.team, pools)
        self._groups = self._own(self._groups)
        if group not in self._groups:
            self._groups_by_rollout = self._own(self._groups_by_rollout)
            self._own_row(self._groups_by_rollout, target.rollout, dict)[group] = None
            self._groups_by_pool = self._own(self._groups_by_pool)
            for pool in pools:
                self._own_row(self._groups_by_pool, pool, dict)[group] = None
        insort(self._own_row(self._groups, group, list), queue_position(target))
        self._group_by_target = self._own(self._group_by_target)
        self._group_by_target[target.rollout, target.node] = group
        self._activate(group)

    def remove(self, target: Target) -> None:
        group = self._group_by_target.get((target.rollout, target.node))
        if group is None:
            return
        self._group_by_target = self._own(self._group_by_target)
        del self._group_by_target[target.rollout, target.node]
        self._groups = self._own(self._groups)
        positions = self._own_row(self._groups, group)
        del positions[bisect_left(positions, queue_position(target))]
        if positions:
            self._activate(group)
            return
        del self._groups[group]
        self._groups_by_rollout = self._own(self._groups_by_rollout)
        self._own_row(self._groups_by_rollout, group.rollout).pop(group, None)
        self._deactivate(group)
        self._groups_by_pool = self._own(self._groups_by_pool)
        for pool in group.pools:
            groups = self._own_row(self._groups_by_pool, pool)
            groups.pop(group, None)
            if not groups:
                del self._groups_by_pool[pool]

    def active(self, rollout: str, wave: str) -> Iterable[QueueGroup]:
        """Return the active groups of a wave."""
        return self._active.get((rollout, wave), {})

    def positions(self, group: QueueGroup) -> Sequence[QueuePosition]:
        """Return the positions of a group's nodes, the next one first."""
        return self._groups[group]

    def back_off(self, group: QueueGroup, until: float) -> None:
        """Skip a group until something activates it, or until the instant (epoch seconds)."""
        self._deactivate(group)
        if not math.isinf(until):
            self._backoff_sequence += 1
            self._wakeups = self._own(self._wakeups)
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
        for group in self._groups:
            self._activate(group)

    def has_waiting(self, pool: str) -> bool:
        """Return whether any node waits for a slot of the pool."""
        return pool in self._groups_by_pool

    def has_competitors(self, pool: str, more_than: int = 1) -> bool:
        """Return whether more than this many nodes wait for a slot of the pool."""
        waiting = 0
        for group in self._groups_by_pool.get(pool, ()):
            waiting += len(self._groups[group])
            if waiting > more_than:
                return True
        return False

    def rollouts_waiting_for(self, pool: str) -> list[str]:
        """Return the rollouts with a node that waits for a slot of the pool."""
        return sorted({group.rollout for group in self._groups_by_pool.get(pool, ())})

    def is_due(self, now: float) -> bool:
        """Return whether a backoff is over at the instant (epoch seconds)."""
        return bool(self._wakeups) and self._wakeups[0][0] <= now

    def advance(self, now: float) -> None:
        """Activate the groups whose backoff is over."""
        while self._wakeups and (self._wakeups[0][0] <= now or self._wakeups[0][2] not in self._groups):
            self._wakeups = self._own(self._wakeups)
            group = heapq.heappop(self._wakeups)[2]
            if group in self._groups:
                self._activate(group)

    def next_wakeup(self) -> float:
        """Return when the next backoff is over (epoch seconds), infinity for none."""
        return self._wakeups[0][0] if self._wakeups else math.inf

    def _activate(self, group: QueueGroup) -> None:
        wave = (group.rollout, group.wave)
        if group in self._active.get(wave, ()):
            return
        self._active = self._own(self._active)
        self._own_row(self._active, wave, dict)[group] = None

    def _deactivate(self, group: QueueGroup) -> None:
        wave = (group.rollout, group.wave)
        if group in self._active.get(wave, ()):
            self._active = self._own(self._active)
            del self._own_row(self._active, wave)[group]
