"""Pending nodes in groups, and the queue of the groups in which one may be able to start.

A group is the nodes of one wave that share their team and all their pools: usually all of them can start or
none can, so a decision asks about the group.  A group is ready, or it is backed off: nothing of it can
start until a mark or an instant makes it ready again.  A mark names a group of which a node may have become
able to start: one of its pools changed, a node in it, its rollout, or everything.  A mark too many costs
time; a mark too few leaves a node waiting although it could start.  In doubt, a group is marked.

A backoff is a cache, never a rule: facts that are built again have all groups ready, and must give the same
decision.  The tests compare the two after every step.

The sets of groups are dicts without values: they keep their order, so that a decision does not depend on
hashes.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence

from machines.facts.sharing import Forkable
from machines.model.decision import BackOff, QueueGroup
from machines.model.rollout import Target

QueuePosition = tuple[bool, int, str]
"""Order of a wave's pending nodes: those that are still isolated hold a slot already and go first, then by
position.
"""

QueueEntry = tuple[QueuePosition, QueueGroup]
"""A ready group and the position of its first node.  No two groups of a wave share a node, so entries have an
order without a comparison of groups.
"""


def queue_position(target: Target) -> QueuePosition:
    return (not target.isolated, target.position, target.node)


class PendingGroups(Forkable):
    """All groups of open rollouts, and which of them are ready."""

    def __init__(self) -> None:
        super().__init__()
        self._groups: dict[QueueGroup, list[QueuePosition]] = {}
        self._group_by_node: dict[str, dict[str, QueueGroup]] = {}
        """By rollout and node."""
        self._groups_by_pool: dict[str, dict[QueueGroup, None]] = {}
        self._groups_by_rollout: dict[str, dict[QueueGroup, None]] = {}
        self._ready: dict[tuple[str, str], list[QueueEntry]] = {}
        """By rollout and wave, in order."""
        self._backed_off: dict[QueueGroup, float] = {}
        """Until when, infinity for a mark alone."""
        self._waiting: dict[tuple[str, str], dict[QueueGroup, QueueEntry]] = {}
        """By rollout and wave: the entries of groups that are backed off, for when they are ready again."""
        self._by_instant: dict[float, dict[QueueGroup, None]] = {}
        """The groups that are ready again at an instant: one instant for all of them."""
        self._instants: list[float] = []
        """A heap of the keys of _by_instant; the first one has groups."""

    def __contains__(self, group: QueueGroup) -> bool:
        return group in self._groups

    def clear(self) -> None:
        self._groups, self._group_by_node = {}, {}
        self._groups_by_pool, self._groups_by_rollout = {}, {}
        self._ready, self._backed_off, self._waiting = {}, {}, {}
        self._by_instant, self._instants = {}, []

    def enqueue(self, target: Target, position: QueuePosition, pools: tuple[str, ...]) -> None:
        """Add a node at its position; its group is ready."""
        group = QueueGroup(target.rollout, target.wave, target.team, pools)
        self._groups = self._own(self._groups)
        if group not in self._groups:
            self._groups_by_rollout = self._own(self._groups_by_rollout)
            self._own_row(self._groups_by_rollout, target.rollout, dict)[group] = None
            self._groups_by_pool = self._own(self._groups_by_pool)
            for pool in pools:
                self._own_row(self._groups_by_pool, pool, dict)[group] = None
        else:
            self._end_backoff(group)
            self._remove_entry(group)
        insort(self._own_row(self._groups, group, list), position)
        self._add_entry(group)
        self._group_by_node = self._own(self._group_by_node)
        self._own_row(self._group_by_node, target.rollout, dict)[target.node] = group

    def remove(self, target: Target) -> None:
        """Remove a node; the rest of its group is ready, because the node may have kept it back."""
        group = self._group_of(target.rollout, target.node)
        if group is None:
            return
        self._group_by_node = self._own(self._group_by_node)
        del self._own_row(self._group_by_node, target.rollout)[target.node]
        self._end_backoff(group)
        self._remove_entry(group)
        self._groups = self._own(self._groups)
        positions = self._own_row(self._groups, group)
        del positions[bisect_left(positions, queue_position(target))]
        if positions:
            self._add_entry(group)
            return
        del self._groups[group]
        self._groups_by_rollout = self._own(self._groups_by_rollout)
        self._own_row(self._groups_by_rollout, group.rollout).pop(group, None)
        self._groups_by_pool = self._own(self._groups_by_pool)
        for pool in group.pools:
            groups = self._own_row(self._groups_by_pool, pool)
            groups.pop(group, None)
            if not groups:
                del self._groups_by_pool[pool]

    def positions(self, group: QueueGroup) -> Sequence[QueuePosition]:
        """Return the positions of a group's nodes, the next one first."""
        return self._groups[group]

    def of_rollout(self, rollout: str) -> Iterable[QueueGroup]:
        return self._groups_by_rollout.get(rollout, ())

    def has_waiting(self, pool: str) -> bool:
        return pool in self._groups_by_pool

    def has_competitors(self, pool: str, more_than: int = 1) -> bool:
        """Return whether more than this many nodes wait for a slot of the pool."""
        waiting = 0
        for group in self._groups_by_pool.get(pool, ()):
            waiting += len(self._groups[group])
            # Counting all would cost the size of the pool, and the rules ask this for every candidate.
            if waiting > more_than:
                return True
        return False

    def rollouts_waiting_for(self, pool: str) -> list[str]:
        return sorted({group.rollout for group in self._groups_by_pool.get(pool, ())})

    # -- the queue

    def ready(self, rollout: str, wave: str) -> Sequence[QueueEntry]:
        """Return the ready groups of a wave in the order of their first nodes."""
        return self._ready.get((rollout, wave), ())

    def back_off(self, backoffs: Iterable[BackOff]) -> None:
        """Skip the groups in which a decision could start nothing."""
        for each in backoffs:
            group, until = each.group, each.until
            if group not in self._groups or self._backed_off.get(group) == until:
                continue
            self._end_backoff(group)
            self._remove_entry(group)
            self._backed_off, self._waiting = self._own(self._backed_off), self._own(self._waiting)
            self._backed_off[group] = until
            self._own_row(self._waiting, group[:2], dict)[group] = self._groups[group][0], group
            if not math.isinf(until):
                self._by_instant = self._own(self._by_instant)
                if until not in self._by_instant:
                    self._instants = self._own(self._instants)
                    heapq.heappush(self._instants, until)
                self._own_row(self._by_instant, until, dict)[group] = None

    def is_due(self, now: float) -> bool:
        """Return whether a backoff is over by this instant (epoch seconds)."""
        return bool(self._instants) and self._instants[0] <= now

    def end_due(self, now: float) -> None:
        """Make the groups ready whose backoff is over by this instant (epoch seconds)."""
        while self.is_due(now):
            groups = self._by_instant[self._instants[0]]
            if len(groups) == len(self._backed_off):
                self.mark_all()
            else:
                self._make_ready(tuple(groups))

    @property
    def instants(self) -> list[float]:
        """The instants at which backoffs end (epoch seconds); a later one may have no group left."""
        return self._instants

    def next_instant(self) -> float:
        """Return when the next backoff is over (epoch seconds), infinity for never."""
        return self._instants[0] if self._instants else math.inf

    def mark_pool(self, pool: str) -> None:
        if self._backed_off:
            self._make_ready(self._groups_by_pool.get(pool, ()))

    def mark_node(self, node: str, rollouts: Iterable[str]) -> None:
        if self._backed_off:
            groups = (self._group_of(rollout, node) for rollout in rollouts)
            self._make_ready([group for group in groups if group is not None])

    def mark_rollout(self, rollout: str) -> None:
        if self._backed_off:
            self._make_ready(self._groups_by_rollout.get(rollout, ()))

    def mark_all(self) -> None:
        # A wave at a time: one by one, a hundred thousand groups hold the loop for a fifth of a second.
        waiting, self._waiting, self._backed_off = self._waiting, {}, {}
        self._by_instant, self._instants = {}, []
        for wave, entries in waiting.items():
            self._add_entries(wave, list(entries.values()))

    def _group_of(self, rollout: str, node: str) -> QueueGroup | None:
        return self._group_by_node.get(rollout, {}).get(node)

    def _make_ready(self, groups: Iterable[QueueGroup]) -> None:
        by_wave: dict[tuple[str, str], list[QueueEntry]] = {}
        for group in groups:
            if (entry := self._end_backoff(group)) is not None:
                by_wave.setdefault(group[:2], []).append(entry)
        for wave, entries in by_wave.items():
            self._add_entries(wave, entries)

    def _add_entries(self, wave: tuple[str, str], entries: Sequence[QueueEntry]) -> None:
        self._ready = self._own(self._ready)
        ready = self._own_row(self._ready, wave, list)
        if len(entries) == 1:
            insort(ready, entries[0])
        else:  # one sort costs less than as many insertions as a window opening has groups
            ready += entries
            ready.sort()

    def _end_backoff(self, group: QueueGroup) -> QueueEntry | None:
        """Forget a group's backoff; return its entry if it had one, which the caller adds."""
        until, wave = self._backed_off.get(group), group[:2]
        if until is None:
            return None
        self._backed_off, self._waiting = self._own(self._backed_off), self._own(self._waiting)
        del self._backed_off[group]
        waiting = self._own_row(self._waiting, wave)
        entry = waiting.pop(group)
        if not waiting:
            del self._waiting[wave]
        if until in self._by_instant:
            self._by_instant = self._own(self._by_instant)
            del self._own_row(self._by_instant, until)[group]
            # Later empty instants stay until they are the first, so that none is pushed twice.
            while self._instants and not self._by_instant[self._instants[0]]:
                self._instants = self._own(self._instants)
                del self._by_instant[heapq.heappop(self._instants)]
        return entry

    def _add_entry(self, group: QueueGroup) -> None:
        self._add_entries(group[:2], [(self._groups[group][0], group)])

    def _remove_entry(self, group: QueueGroup) -> None:
        """Remove a group from the ready ones, if it is among them."""
        wave = (group.rollout, group.wave)
        ready = self._ready.get(wave, ())
        place = bisect_left(ready, self._groups[group][0], key=_position)
        if place == len(ready) or ready[place][1] != group:
            return
        self._ready = self._own(self._ready)
        if len(ready) == 1:
            del self._ready[wave]
        else:
            del self._own_row(self._ready, wave)[place]


def _position(entry: QueueEntry) -> QueuePosition:
    return entry[0]
