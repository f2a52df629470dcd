"""The pool lock: who takes the slots of a pool, and whether one is left.

A node takes a slot of every pool it is in for as long as it is down, for
whatever reason (stands.py).  A node of which nobody can say that it is up takes
one as well.  Which of the waiting nodes gets a free slot is decided in
schedule.py; this file knows no order, no gate and no window.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from machines.index import Index
from machines.node import natural
from machines.rollout import Reason, Target
from machines.slots import Pool
from machines.stands import RANK, Stand

NAMED_HOLDERS: Final = 3
"""Nodes named in one sentence: more than three nobody reads."""


def down(index: Index, node: str, now: float) -> Stand | None:
    """Return why the node counts as down at `now`, None when it is known to be up."""
    index.advance(now)
    return index.stand(node)


def holders(index: Index, pool: str, now: float) -> tuple[Stand, ...]:
    """Return the nodes that take slots of the pool, those we are sure of first; for `locks`."""
    index.advance(now)
    found = index.pool(pool)
    return tuple(_ordered(index, (*found.down, *found.unknown)))


def budget(index: Index, pool: str) -> int:
    """Return how many nodes of the pool may be down; 1 for a pool that only a plan names."""
    return index.budget(index.pool(pool))


def excess(index: Index, pool: str, now: float) -> int:
    """Return by how many nodes the pool is over its budget, counting only those known to be down."""
    index.advance(now)
    found = index.pool(pool)
    return max(0, len(found.down) - index.budget(found))


def may_start(index: Index, target: Target, now: float, taken: Taken | None = None) -> Reason | None:
    """Return why no pool has a slot for this target, None when all have one.

    A node that is down already takes no second slot.  `taken` are the slots
    that the decision being made has given away.
    """
    index.advance(now)
    found = blocked_by(index, target, taken)
    if found is None:
        return None
    pool, surely = found
    return _unknown(index, pool, target) if surely is None else _full(index, pool, target.node, surely)


def blocked_by(index: Index, target: Target, taken: Taken | None = None) -> tuple[Pool, int | None] | None:
    """Return the pool without a slot for this target, and how many of its nodes are known to be down.

    None in place of the number says that only unknown nodes are in the way.
    The rule itself; may_start() is the same in words.
    """
    node = target.node
    unsure: tuple[Pool, None] | None = None
    for pool in index.pools_for(target.rollout, node):
        more = 0 if taken is None else taken.of(pool.id)
        budget = index.budget(pool)
        surely = len(pool.down) + more - (node in pool.down)
        if surely >= budget:
            return pool, surely
        if unsure is None and surely + len(pool.unknown) - (node in pool.unknown) >= budget:
            unsure = pool, None
    return unsure


def doubted(index: Index, target: Target) -> Stand | None:
    """Return the mate that is named where only unknown ones are in the target's way."""
    found = blocked_by(index, target)
    return None if found is None or found[1] is not None else _first_unknown(index, found[0], target.node)


def explain(index: Index, pool: Pool) -> Reason:
    """Return why a full pool is full."""
    return _full(index, pool, "", len(pool.down))


def reasons(index: Index) -> dict[str, Reason]:
    """Return why the full pools are full in which somebody waits.

    The keys are pool ids, or `rollout|id` for a pool that only plans name.
    """
    found: dict[str, Reason] = {}
    for pool in index.full_pools():
        if not index.lanes.waits_in(pool.id):
            continue
        if pool.told is None:
            pool.told = explain(index, pool)
        if pool.key in index.limits.pools:
            found[pool.id] = pool.told
        else:
            found |= {f"{rollout}|{pool.id}": pool.told for rollout in index.lanes.rollouts_in(pool.id)}
    return found


def others(index: Index, pool: Pool, node: str) -> str:
    """Name those of a pool's nodes besides this one that are known to be down."""
    texts = [stand.text for stand in holders(index, pool.id, index.now) if stand.sure and stand.node != node]
    return "; ".join(texts[:NAMED_HOLDERS])


class Taken:
    """Slots given away by a decision that is not carried out yet."""

    __slots__ = ("_slots", "nodes")

    def __init__(self) -> None:
        self._slots: dict[str, int] = {}
        self.nodes: set[str] = set()

    def of(self, pool: str) -> int:
        """Return how many slots of the pool were given away."""
        return self._slots.get(pool, 0)

    def take(self, node: str, pools: Iterable[Pool]) -> None:
        """Give the node a slot of each pool; one that is down has them already."""
        self.nodes.add(node)
        for pool in pools:
            if node not in pool.down:
                self._slots[pool.id] = self._slots.get(pool.id, 0) + 1


def _full(index: Index, pool: Pool, node: str, surely: int) -> Reason:
    budget = index.budget(pool)
    named = list(_ordered(index, pool.down, without=node))
    if budget == 0:
        return Reason(
            "pool-closed", f"pool {pool.id} is closed: its max_unavailable is 0", None, "the settings"
        )
    if not named:
        return Reason("pool-full", f"pool {pool.id} is full: another node of it is starting")
    first = named[0]
    if surely == len(named) == 1 and first.code in ("down", "foreign"):
        return Reason("mate-down", _mate(first, pool), first.since, first.lifted_by)
    over = surely > budget
    more = "" if len(named) <= NAMED_HOLDERS else f" and {len(named) - NAMED_HOLDERS} more"
    texts = "; ".join(each.text for each in named[:NAMED_HOLDERS]) + more
    state = f"over its budget of {budget}" if over else "full"
    code = "pool-over-budget" if over else "pool-full"
    return Reason(code, f"pool {pool.id} is {state}: {texts}", first.since, first.lifted_by)


def _unknown(index: Index, pool: Pool, target: Target) -> Reason:
    first = _first_unknown(index, pool, target.node)
    return Reason("mate-unknown", _mate(first, pool), first.since, first.lifted_by)


def _first_unknown(index: Index, pool: Pool, node: str) -> Stand:
    return next(_ordered(index, pool.unknown, without=node))


def _mate(mate: Stand, pool: Pool) -> str:
    return f"mate {mate.text}".replace(mate.node, f"{mate.node} of {pool.id}", 1)


def _ordered(index: Index, nodes: Iterable[str], without: str = "") -> Iterator[Stand]:
    """Yield the stands of the nodes: worked on first, unknown last and suspect ones before those; by name."""
    stands = [index.stand(node) for node in nodes if node != without]
    known = [each for each in stands if each is not None]
    yield from sorted(known, key=lambda each: (RANK[each.code], not each.suspect, natural(each.node)))
