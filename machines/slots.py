"""Who is down in which pool, kept up to date for the index.

Memberships come from labels, stands from stands.stand(); this file only sees to
it that both are recomputed where something changed and nowhere else, and that
the lanes which that concerns are asked again.  It knows no order and no plan.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from machines.book import Book
from machines.lanes import Lanes
from machines.node import NO_LABEL, Node
from machines.rollout import Reason
from machines.stands import Stand, stand


@dataclass(slots=True)
class Pool:
    """The members of one pool, those known to be down, and those of which nobody knows.

    `told` is kept for whoever says why it is full: it is None again once that may have changed.
    """

    key: str
    value: str
    id: str = ""
    members: set[str] = field(default_factory=set)
    down: set[str] = field(default_factory=set)
    unknown: set[str] = field(default_factory=set)
    told: Reason | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        self.id = f"{self.key}/{self.value}"


class Slots:
    """The pools of a book at its instant."""

    def __init__(self, book: Book, lanes: Lanes) -> None:
        self._book = book
        self._lanes = lanes
        self._pools: dict[str, Pool] = {}
        self._of: dict[str, tuple[Pool, ...]] = {}
        self._stands: dict[str, Stand] = {}
        self._full: set[str] = set()
        self._fresh_until: list[tuple[float, str]] = []
        self._bad_until: list[tuple[float, str]] = []

    @property
    def pools(self) -> Mapping[str, Pool]:
        """All pools that have members, by id."""
        return self._pools

    @property
    def full(self) -> set[str]:
        """The ids of the pools in which as many nodes are known to be down as may be."""
        return self._full

    def of(self, node: str) -> tuple[Pool, ...]:
        """Return all pools of a node, in the order of their keys; none for an unknown node."""
        return self._of.get(node, ())

    def stand(self, node: str) -> Stand | None:
        """Return why a node is down."""
        return self._stands.get(node)

    def budget(self, pool: Pool) -> int:
        """Return how many of the pool's nodes may be down; 1 for a pool that only a plan names."""
        rule = self._book.limits.pools.get(pool.key)
        return 1 if rule is None else rule.budget(pool.value).of(len(pool.members))

    # -- membership

    def rebuild(self, nodes: Iterable[Node], keys: tuple[str, ...]) -> None:
        """Lay out all pools anew."""
        known = tuple(nodes)
        for table in (self._pools, self._of, self._stands, self._full):
            table.clear()
        for node in known:
            self._enter(node, keys)
        for node in known:
            found = stand(self._book, node.name)
            if found is not None:
                self._stands[node.name] = found
                for pool in self._of[node.name]:
                    (pool.down if found.sure else pool.unknown).add(node.name)
        # Once, when all are counted: of a hundred thousand nodes, once for each would cost a second.
        self._refill(self._pools.values())

    def join(self, node: Node, keys: tuple[str, ...]) -> None:
        """Let a node into the pools of its labels, out of those it was in."""
        self.leave(node.name)
        self._enter(node, keys)
        self.judge((node.name,))
        self._refill(self._of[node.name])

    def leave(self, node: str) -> None:
        """Take a node out of all pools."""
        self._stands.pop(node, None)
        left = self._of.pop(node, ())
        for pool in left:
            for nodes in (pool.members, pool.down, pool.unknown):
                nodes.discard(node)
            if not pool.members:
                self._pools.pop(pool.id, None)
        self._refill(left)

    def _enter(self, node: Node, keys: tuple[str, ...]) -> None:
        entered = []
        for key in keys:
            value = node.labels.get(key, NO_LABEL)
            pool = self._pools.get(f"{key}/{value}")
            if pool is None:
                pool = Pool(key, value)
                self._pools[pool.id] = pool
            pool.members.add(node.name)
            entered.append(pool)
        self._of[node.name] = tuple(entered)

    # -- stands

    def judge(self, nodes: Iterable[str]) -> None:
        """Judge again whether these nodes are down."""
        for node in nodes:
            if node not in self._of:
                continue
            # Its lane may wait for what no stand shows: a hold or a foreign cordon of a node of ours.
            self._lanes.heat_node(node, (target.rollout for target in self._book.targets_on(node)))
            before, after = self._stands.get(node), stand(self._book, node)
            if before == after:
                continue
            if after is None:
                del self._stands[node]
            else:
                self._stands[node] = after
            for pool in self._of[node]:
                pool.told = None
            if (before and (before.code, before.stale)) != (after and (after.code, after.stale)):
                self._count(node, after)

    def _count(self, node: str, found: Stand | None) -> None:
        sure = found is not None and found.sure
        unsure = found is not None and not found.sure
        for pool in self._of[node]:
            (pool.down.add if sure else pool.down.discard)(node)
            (pool.unknown.add if unsure else pool.unknown.discard)(node)
        self._refill(self._of[node])

    def _refill(self, changed: Iterable[Pool]) -> None:
        """See again which of these pools are full, and ask again about their lanes."""
        for pool in changed:
            full = bool(pool.members) and len(pool.down) >= self.budget(pool)
            (self._full.add if full else self._full.discard)(pool.id)
            pool.told = None
            self._lanes.heat_pool(pool.id)

    # -- time

    def expires(self, node: str, at: float, *, lifts: bool) -> None:
        """Judge a node again at an instant (epoch seconds); `lifts` when it may be better then."""
        heapq.heappush(self._bad_until if lifts else self._fresh_until, (at, node))

    def advance(self, now: float) -> None:
        """Judge the nodes again whose time has come."""
        due: dict[str, None] = {}
        for queue in (self._fresh_until, self._bad_until):
            while queue and queue[0][0] <= now:
                due[heapq.heappop(queue)[1]] = None
        if due:
            self.judge(due)

    def next_change(self, is_current: Callable[[str, float], bool]) -> float:
        """Return when next a node may be better by time alone (epoch seconds); infinity for never."""
        queue = self._bad_until
        while queue and not is_current(queue[0][1], queue[0][0]):
            heapq.heappop(queue)
        return queue[0][0] if queue else math.inf
