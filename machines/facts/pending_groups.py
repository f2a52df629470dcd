"""Pending nodes in groups: those of one wave that share their team and all their pools.

Usually all nodes of a group can start or none can, so a decision examines the group and not each node.
`take_changed()` names the groups of which a node may have become able to start: one of its pools changed, a
node in it, its rollout, or everything.  Naming too many groups costs time; naming too few leaves a node
waiting although it could start.  In doubt, a group is named.

The sets of groups are dicts without values: they keep their order, so that a decision does not depend on
hashes.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Iterable, Sequence

from machines.facts.sharing import Forkable
from machines.model.decision import QueueGroup
from machines.model.rollout import Target

QueuePosition = tuple[bool, int, str]
"""Order of a wave's pending nodes: those that are still isolated hold a slot already and go first, then by
position.
"""


def queue_position(target: Target) -> QueuePosition:
    return (not target.isolated, target.position, target.node)


class PendingGroups(Forkable):
    """All groups of open rollouts, and which of them have changed."""

    def __init__(self) -> None:
        super().__init__()
        self._groups: dict[QueueGroup, list[QueuePosition]] = {}
        self._group_by_target: dict[tuple[str, str], QueueGroup] = {}
        self._groups_by_pool: dict[str, dict[QueueGroup, None]] = {}
        self._groups_by_rollout: dict[str, dict[QueueGroup, None]] = {}
        self._changed: dict[QueueGroup, None] = {}

    def __contains__(self, group: QueueGroup) -> bool:
        return group in self._groups

    @property
    def changed(self) -> Collection[QueueGroup]:
        """The groups that changed since they were last taken; some of them may have no node left."""
        return self._changed

    def take_changed(self) -> Collection[QueueGroup]:
        """Return the groups that changed since the last call."""
        taken, self._changed = self._changed, {}
        # The caller may keep what it has taken, so it must not be written to here.
        self._owned_ids.discard(id(taken))
        self._owned_ids.add(id(self._changed))
        return taken

    def clear(self) -> None:
        # Marked before they go, so that the queue of the daemon forgets them too.
        self.mark_all()
        self._groups, self._group_by_target = {}, {}
        self._groups_by_pool, self._groups_by_rollout = {}, {}

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
        self._mark((group,))

    def remove(self, target: Target) -> None:
        group = self._group_by_target.get((target.rollout, target.node))
        if group is None:
            return
        self._group_by_target = self._own(self._group_by_target)
        del self._group_by_target[target.rollout, target.node]
        self._groups = self._own(self._groups)
        positions = self._own_row(self._groups, group)
        del positions[bisect_left(positions, queue_position(target))]
        self._mark((group,))
        if positions:
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
        """Return whether any node waits for a slot of the pool."""
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
        """Return the rollouts with a node that waits for a slot of the pool."""
        return sorted({group.rollout for group in self._groups_by_pool.get(pool, ())})

    # -- what changed

    def mark_pool(self, pool: str) -> None:
        self._mark(self._groups_by_pool.get(pool, ()))

    def mark_node(self, node: str, rollouts: Iterable[str]) -> None:
        groups = (self._group_by_target.get((rollout, node)) for rollout in rollouts)
        self._mark([group for group in groups if group is not None])

    def mark_rollout(self, rollout: str) -> None:
        self._mark(self.of_rollout(rollout))

    def mark_all(self) -> None:
        self._mark(self._groups)

    def _mark(self, groups: Collection[QueueGroup] | Iterable[QueueGroup]) -> None:
        for group in groups:
            if group not in self._changed:
                self._changed = self._own(self._changed)
                self._changed[group] = None
