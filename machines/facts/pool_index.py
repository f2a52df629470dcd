"""Pools with their members and which of them are down, kept up to date.

Memberships come from labels, availability from availability.py.  This file recomputes both where something
changed and nowhere else, and activates the queue groups that the change concerns.  It does not know plans.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from machines.facts.availability import Unavailability, unavailability
from machines.facts.fleet_facts import FleetFacts
from machines.facts.scheduling_queue import SchedulingQueue
from machines.model.node import UNLABELED, Node
from machines.model.reasons import Reason


@dataclass(slots=True)
class Pool:
    """The members of one pool: all, those known to be down, and those unknown.

    `cached_reason` says why the pool is full; it is dropped when that may have changed.
    """

    key: str
    value: str
    id: str = ""
    members: set[str] = field(default_factory=set)
    down: set[str] = field(default_factory=set)
    unknown: set[str] = field(default_factory=set)
    cached_reason: Reason | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        self.id = f"{self.key}/{self.value}"


class PoolIndex:
    def __init__(self, facts: FleetFacts, queue: SchedulingQueue) -> None:
        self._facts = facts
        self._queue = queue
        self._pools: dict[str, Pool] = {}
        self._pools_by_node: dict[str, tuple[Pool, ...]] = {}
        self._unavailable: dict[str, Unavailability] = {}
        self._full_pool_ids: set[str] = set()
        self._stale_times: list[tuple[float, str]] = []
        self._improvement_times: list[tuple[float, str]] = []

    @property
    def pools(self) -> Mapping[str, Pool]:
        """All pools that have members, by id."""
        return self._pools

    @property
    def full_pool_ids(self) -> set[str]:
        """The ids of the pools whose nodes known to be down use up the budget."""
        return self._full_pool_ids

    def pools_of_node(self, node: str) -> tuple[Pool, ...]:
        """Return all pools of a node, in the order of their keys; none for an unknown node."""
        return self._pools_by_node.get(node, ())

    def unavailability(self, node: str) -> Unavailability | None:
        return self._unavailable.get(node)

    def budget(self, pool: Pool) -> int:
        """Return how many of the pool's nodes may be down; 1 for a pool that only a plan names."""
        rule = self._facts.limits.pools.get(pool.key)
        return 1 if rule is None else rule.budget_for(pool.value).resolve(len(pool.members))

    # -- membership

    def rebuild(self, nodes: Iterable[Node], keys: tuple[str, ...]) -> None:
        all_nodes = tuple(nodes)
        for table in (self._pools, self._pools_by_node, self._unavailable, self._full_pool_ids):
            table.clear()
        for node in all_nodes:
            self._add_to_pools(node, keys)
        for node in all_nodes:
            found = unavailability(self._facts, node.name)
            if found is not None:
                self._unavailable[node.name] = found
                for pool in self._pools_by_node[node.name]:
                    (pool.down if found.confirmed else pool.unknown).add(node.name)
        # Once, when all are counted: of a hundred thousand nodes, once for each would cost a second.
        self._refresh_full_pools(self._pools.values())

    def update_node(self, node: Node, keys: tuple[str, ...]) -> None:
        self.remove_node(node.name)
        self._add_to_pools(node, keys)
        self.reevaluate((node.name,))
        self._refresh_full_pools(self._pools_by_node[node.name])

    def remove_node(self, node: str) -> None:
        self._unavailable.pop(node, None)
        left = self._pools_by_node.pop(node, ())
        for pool in left:
            for nodes in (pool.members, pool.down, pool.unknown):
                nodes.discard(node)
            if not pool.members:
                self._pools.pop(pool.id, None)
        self._refresh_full_pools(left)

    def _add_to_pools(self, node: Node, keys: tuple[str, ...]) -> None:
        node_pools = []
        for key in keys:
            value = node.labels.get(key, UNLABELED)
            pool = self._pools.get(f"{key}/{value}")
            if pool is None:
                pool = Pool(key, value)
                self._pools[pool.id] = pool
            pool.members.add(node.name)
            node_pools.append(pool)
        self._pools_by_node[node.name] = tuple(node_pools)

    # -- availability

    def reevaluate(self, nodes: Iterable[str]) -> None:
        """Compute again whether these nodes are down."""
        for node in nodes:
            if node not in self._pools_by_node:
                continue
            # Its group may wait for what the node's first cause hides: a hold, or a cordon by another tool,
            # on a node that we have taken out of service ourselves.
            self._queue.activate_node(node, (target.rollout for target in self._facts.targets_on(node)))
            before, after = self._unavailable.get(node), unavailability(self._facts, node)
            if before == after:
                continue
            if after is None:
                del self._unavailable[node]
            else:
                self._unavailable[node] = after
            for pool in self._pools_by_node[node]:
                pool.cached_reason = None
            if (before and (before.code, before.needs_observation)) != (
                after and (after.code, after.needs_observation)
            ):
                self._record_unavailability(node, after)

    def _record_unavailability(self, node: str, found: Unavailability | None) -> None:
        confirmed = found is not None and found.confirmed
        unknown = found is not None and not found.confirmed
        for pool in self._pools_by_node[node]:
            (pool.down.add if confirmed else pool.down.discard)(node)
            (pool.unknown.add if unknown else pool.unknown.discard)(node)
        self._refresh_full_pools(self._pools_by_node[node])

    def _refresh_full_pools(self, changed: Iterable[Pool]) -> None:
        """Compute again which of these pools are full, and activate their queue groups."""
        for pool in changed:
            full = bool(pool.members) and len(pool.down) >= self.budget(pool)
            (self._full_pool_ids.add if full else self._full_pool_ids.discard)(pool.id)
            pool.cached_reason = None
            self._queue.activate_pool(pool.id)

    # -- time

    def schedule_reevaluation(self, node: str, at: float, *, improves: bool) -> None:
        """Reevaluate a node at an instant (epoch seconds); `improves` when it may be up then."""
        heapq.heappush(self._improvement_times if improves else self._stale_times, (at, node))

    def advance(self, now: float) -> None:
        due: dict[str, None] = {}
        for queue in (self._stale_times, self._improvement_times):
            while queue and queue[0][0] <= now:
                due[heapq.heappop(queue)[1]] = None
        if due:
            self.reevaluate(due)

    def next_change(self, is_current: Callable[[str, float], bool]) -> float:
        """Return when time alone may next bring a node up (epoch seconds); infinity for never."""
        queue = self._improvement_times
        while queue and not is_current(queue[0][1], queue[0][0]):
            heapq.heappop(queue)
        return queue[0][0] if queue else math.inf
