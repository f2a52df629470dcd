"""Pools with their members and which of them are down, kept up to date.

Memberships come from labels, availability from availability.py.  This file recomputes both where something
changed and nowhere else, and marks the groups of pending nodes that the change concerns.  It knows no plan.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any, Self

from machines.facts.availability import Unavailability, unavailability
from machines.facts.fleet_facts import FleetFacts
from machines.facts.pending_groups import PendingGroups
from machines.facts.sharing import Forkable
from machines.model.node import Node, id_of_pool, pool_value
from machines.model.reasons import Reason


@dataclass(slots=True)
class Pool:
    """The members of one pool: all, those known to be down, and those unknown.

    `cached_reason` says why the pool is full; it is dropped when that may have changed.
    `version` is another object after each change, so that forks never have the same one for other nodes.
    """

    key: str
    value: str
    id: str = ""
    members: set[str] = field(default_factory=set)
    down: set[str] = field(default_factory=set)
    unknown: set[str] = field(default_factory=set)
    cached_reason: Reason | None = field(default=None, compare=False)
    version: object = field(default_factory=object, compare=False)

    def __post_init__(self) -> None:
        self.id = f"{self.key}/{self.value}"

    def copy(self) -> Pool:
        nodes = (self.members.copy(), self.down.copy(), self.unknown.copy())
        return Pool(self.key, self.value, self.id, *nodes, self.cached_reason)


class PoolIndex(Forkable):
    """The pools of the facts that each question names; forks share the pools that neither changed."""

    def __init__(self, groups: PendingGroups) -> None:
        super().__init__()
        self._groups = groups
        self.pools: dict[str, Pool] = {}
        """All pools that have members, by id."""
        self._pool_ids_by_node: dict[str, tuple[str, ...]] = {}
        self._unavailable: dict[str, Unavailability] = {}
        self.full_pool_ids: set[str] = set()
        """The pools whose nodes known to be down use up the budget."""
        self._stale_nodes: dict[float, list[str]] = {}
        """By instant: a watch reports all its nodes at once, and so they expire together."""
        self._stale_instants: list[float] = []
        self._stale_at: dict[str, float] = {}
        """The instant of each node: one, however often the node is observed."""
        self._improvement_times: list[tuple[float, str]] = []
        self._due: dict[str, None] = {}
        """The nodes to judge again, whatever their instants."""

    def fork_for(self, groups: PendingGroups) -> Self:
        made = self.fork()
        made._groups = groups
        return made

    def pools_of_node(self, node: str) -> tuple[Pool, ...]:
        return tuple([self.pools[pool] for pool in self._pool_ids_by_node.get(node, ())])

    def ids_of_node(self, node: str) -> tuple[str, ...]:
        return self._pool_ids_by_node.get(node, ())

    def unavailability(self, node: str) -> Unavailability | None:
        return self._unavailable.get(node)

    def budget(self, facts: FleetFacts, pool: Pool) -> int:
        """Return how many of the pool's nodes may be down; 1 for a pool that only a plan names."""
        rule = facts.limits.pools.get(pool.key)
        return 1 if rule is None else rule.budget_for(pool.value).resolve(len(pool.members))

    # -- membership

    def rebuild(self, facts: FleetFacts, keys: tuple[str, ...]) -> None:
        self.pools, self._pool_ids_by_node, self._unavailable, self.full_pool_ids = {}, {}, {}, set()
        # By labels: a fleet has far fewer of them than nodes.
        groups: dict[tuple[str, ...], tuple[tuple[str, ...], list[str], list[str], list[str]]] = {}
        for name, node in facts.nodes.items():
            values = tuple([pool_value(node.labels, key) for key in keys])
            group = groups.get(values)
            if group is None:
                group = groups[values] = tuple(map(id_of_pool, keys, values)), [], [], []
            ids, members, down, unknown = group
            self._pool_ids_by_node[name] = ids
            members.append(name)
            found = unavailability(facts, name)
            if found is not None:
                self._unavailable[name] = found
                (down if found.confirmed else unknown).append(name)
        # Nothing shares the new pools yet, so nothing is copied before a write.
        for values, (ids, members, down, unknown) in groups.items():
            for key, value, pool_id in zip(keys, values, ids, strict=True):
                pool = self.pools.setdefault(pool_id, Pool(key, value))
                pool.members.update(members)
                pool.down.update(down)
                pool.unknown.update(unknown)
        # Once, when all are counted: of a hundred thousand nodes, once for each would cost a second.
        self._refresh_full_pools(facts, tuple(self.pools))

    def update_node(self, facts: FleetFacts, node: Node, keys: tuple[str, ...]) -> None:
        self.remove_node(facts, node.name)
        self._add_to_pools(node, keys)
        self.reevaluate(facts, (node.name,))
        self._refresh_full_pools(facts, self._pool_ids_by_node[node.name])

    def remove_node(self, facts: FleetFacts, node: str) -> None:
        self._unavailable = self._own(self._unavailable)
        self._unavailable.pop(node, None)
        self._pool_ids_by_node = self._own(self._pool_ids_by_node)
        left = self._pool_ids_by_node.pop(node, ())
        for pool in self._writable_pools(left):
            for nodes in (pool.members, pool.down, pool.unknown):
                nodes.discard(node)
        self._refresh_full_pools(facts, left)
        for pool_id in left:
            # Values of labels come and go; pools without members would pile up for the life of the daemon.
            if not self.pools[pool_id].members:
                del self.pools[pool_id]

    def _add_to_pools(self, node: Node, keys: tuple[str, ...]) -> None:
        values = [(key, pool_value(node.labels, key)) for key in keys]
        self.pools = self._own(self.pools)
        for key, value in values:
            if f"{key}/{value}" not in self.pools:
                self.pools[f"{key}/{value}"] = Pool(key, value)
        self._pool_ids_by_node = self._own(self._pool_ids_by_node)
        self._pool_ids_by_node[node.name] = tuple([id_of_pool(key, value) for key, value in values])
        for pool in self._writable_pools(self._pool_ids_by_node[node.name]):
            pool.members.add(node.name)

    def _writable_pools(self, pools: Iterable[str]) -> list[Pool]:
        self.pools = self._own(self.pools)
        writable = [self._own_row(self.pools, pool) for pool in pools]
        for pool in writable:
            pool.version = object()
        return writable

    # -- availability

    def reevaluate(self, facts: FleetFacts, nodes: Iterable[str], *, marks: bool = True) -> None:
        """Compute again whether these nodes are down; without `marks` only a change of that marks groups."""
        # Once for each pool: all observations of a fleet may expire at once.
        changed_pools: dict[str, None] = {}
        for node in nodes:
            if node not in self._pool_ids_by_node:
                continue
            # Its group may wait for what the node's first cause hides: a hold, or a cordon by another tool,
            # on a node that we have taken out of service ourselves.
            if marks:
                self._groups.mark_node(node, (target.rollout for target in facts.targets_on(node)))
            before, after = self._unavailable.get(node), unavailability(facts, node)
            if before == after:
                continue
            self._unavailable = self._own(self._unavailable)
            if after is None:
                del self._unavailable[node]
                _free_if_empty(self._unavailable)
            else:
                self._unavailable[node] = after
            # The reason names nodes and instants, so it is outdated even where the pool stays as full.
            pools = self._writable_pools(self._pool_ids_by_node[node])
            for pool in pools:
                pool.cached_reason = None
            if (before and (before.code, before.needs_observation)) != (
                after and (after.code, after.needs_observation)
            ):
                confirmed = after is not None and after.confirmed
                unknown = after is not None and not after.confirmed
                for pool in pools:
                    (pool.down.add if confirmed else pool.down.discard)(node)
                    (pool.unknown.add if unknown else pool.unknown.discard)(node)
                    _free_if_empty(pool.down)
                    _free_if_empty(pool.unknown)
                changed_pools |= dict.fromkeys(self._pool_ids_by_node[node])
        self._refresh_full_pools(facts, changed_pools)

    def _refresh_full_pools(self, facts: FleetFacts, changed: Iterable[str]) -> None:
        """Compute again which of these pools are full, and mark their groups."""
        for pool in self._writable_pools(changed):
            full = bool(pool.members) and len(pool.down) >= self.budget(facts, pool)
            if full != (pool.id in self.full_pool_ids):
                self.full_pool_ids = self._own(self.full_pool_ids)
                (self.full_pool_ids.add if full else self.full_pool_ids.discard)(pool.id)
            pool.cached_reason = None
            self._groups.mark_pool(pool.id)

    # -- time

    def schedule_reevaluation(self, node: str, at: float, *, improves: bool) -> None:
        """Reevaluate a node at an instant (epoch seconds); `improves` when it may be up then."""
        # Two heaps: the daemon wakes only for improvements; a node that gets worse lets nothing start.
        if improves:
            self._improvement_times = self._own(self._improvement_times)
            heapq.heappush(self._improvement_times, (at, node))
        elif node not in self._stale_at or at < self._stale_at[node]:
            self._stale_at = self._own(self._stale_at)
            self._stale_at[node] = at
            self._nodes_stale_at(at).append(node)

    def is_due(self, now: float) -> bool:
        """Return whether time alone may have changed a node by this instant (epoch seconds)."""
        if self._due or (self._stale_instants and self._stale_instants[0] <= now):
            return True
        return bool(self._improvement_times) and self._improvement_times[0][0] <= now

    def judge_again(self, nodes: Iterable[str]) -> None:
        """Let the next advances reevaluate these nodes, and schedule when their observations expire."""
        self._due = self._own(self._due)
        self._due.update(dict.fromkeys(nodes))

    def advance(
        self,
        facts: FleetFacts,
        now: float,
        is_current: Callable[[str, float], bool],
        covering_watches: Collection[str],
        at_most: int,
    ) -> None:
        """Reevaluate so many of the nodes that are due, and drop what `is_current` refuses."""
        looked_at = 0
        while looked_at < at_most and self._stale_instants and self._stale_instants[0] <= now:
            looked_at += self._take_stale(facts, now, covering_watches, at_most - looked_at)
        # An instant that another observation or hold has replaced goes now, or it would wake the daemon.
        queue = self._improvement_times
        while (
            looked_at < at_most and queue and (queue[0][0] <= now or not is_current(queue[0][1], queue[0][0]))
        ):
            queue = self._improvement_times = self._own(queue)
            at, node = heapq.heappop(queue)
            looked_at += 1
            if at <= now:
                self.judge_again((node,))
        if not self._due:
            return
        self._due = self._own(self._due)
        part = [self._due.popitem()[0] for _ in range(min(at_most, len(self._due)))]
        _free_if_empty(self._due)
        if self.is_due(now):  # many: their pools would mark all groups, one by one
            self._groups.mark_all()
        for node in part:
            seen = facts.reported_observation(node)
            if seen is None or seen.watch in covering_watches:
                continue
            expires_at = facts.observed_at(seen) + facts.limits.observe_within_s
            if expires_at > now:
                self.schedule_reevaluation(node, expires_at, improves=not seen.is_up)
        self.reevaluate(facts, part)

    def _take_stale(
        self, facts: FleetFacts, now: float, covering_watches: Collection[str], at_most: int
    ) -> int:
        """Take so many nodes of the first instant; those that were not observed since are due.

        A node of a covering watch needs no instant of its own: it is reevaluated when the coverage ends.
        Returns how many nodes it has taken.
        """
        at, within_s = self._stale_instants[0], facts.limits.observe_within_s
        self._stale_nodes = self._own(self._stale_nodes)
        left = self._own_row(self._stale_nodes, at)
        nodes = left[-at_most:]
        del left[-at_most:]
        if not left:
            del self._stale_nodes[at]
            self._stale_instants = self._own(self._stale_instants)
            heapq.heappop(self._stale_instants)
        stale_at = self._stale_at = self._own(self._stale_at)
        due = self._due = self._own(self._due)
        later_at, later = at, nodes
        # Each node of a fleet at rest comes here once a minute.
        for node in nodes:
            if stale_at.get(node) != at:
                continue  # an earlier instant has replaced it
            seen = facts.reported_observation(node)
            # A bad observation has an instant among the improvements.
            if seen is None or not seen.is_up or seen.watch in covering_watches:
                del stale_at[node]
            elif (until := facts.observed_at(seen) + within_s) > now:
                stale_at[node] = until
                if until != later_at:
                    later_at, later = until, self._nodes_stale_at(until)
                later.append(node)
            else:
                del stale_at[node]
                due[node] = None
        return len(nodes)

    def _nodes_stale_at(self, at: float) -> list[str]:
        """Return the nodes of an instant, for writing."""
        self._stale_nodes = self._own(self._stale_nodes)
        if at not in self._stale_nodes:
            self._stale_instants = self._own(self._stale_instants)
            heapq.heappush(self._stale_instants, at)
        return self._own_row(self._stale_nodes, at, list)

    def next_change(self) -> float:
        """Return when time alone may next bring a node up (epoch seconds); infinity for never."""
        return self._improvement_times[0][0] if self._improvement_times else math.inf


def _free_if_empty(table: dict[str, Any] | set[str]) -> None:
    """Free what a table keeps of its largest size: at a start, it has all nodes, and soon none."""
    if not table:
        table.clear()
