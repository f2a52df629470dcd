"""The pool lock: which nodes take a pool's slots, and whether one is left.

A node takes a slot of each of its pools while it is down for any cause (machines/facts/availability.py), and
also while it is unknown.  Which pending node gets a free slot is decided in machines/scheduler/admission.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from machines.facts.availability import CAUSE_PRECEDENCE, TAKEN_BY_OTHERS, Unavailability
from machines.facts.index import Index
from machines.facts.pool_index import Pool
from machines.model.node import natural_sort_key
from machines.model.reasons import Param, Reason, ReasonCode, Remedy, RemedyKind, UnavailabilityCause
from machines.model.rollout import Target

MAX_NAMED_NODES: Final = 3
"""Nodes named in one reason; more would not be read."""


def slot_holders(index: Index, pool: str, now: float) -> tuple[Unavailability, ...]:
    """Return the nodes that take slots of the pool, those known to be down first."""
    index = index.at(now)
    found = index.pool(pool)
    return tuple(_by_precedence(index, (*found.down, *found.unknown)))


def slot_blocker(index: Index, target: Target, now: float) -> Reason | None:
    """Return why no pool has a slot for this target, None when all have one.

    A node that is down already takes no second slot.
    """
    index = index.at(now)
    found = pool_without_slot(index, target)
    if found is None:
        return None
    pool, confirmed_down = found
    if confirmed_down is None:
        return _peer_reason(
            ReasonCode.PEER_UNKNOWN, pool, _by_precedence(index, pool.unknown, without=target.node)[0]
        )
    return full_pool_reason(index, pool, confirmed_down, without=target.node)


def pool_without_slot(
    index: Index, target: Target, reserved: Capacity | None = None
) -> tuple[Pool, int | None] | None:
    """Return the pool without a slot for this target, and how many of its nodes are known to be down.

    The number is None when only unknown nodes take the slots: an observation may free one.  This is the rule
    itself; slot_blocker() gives the reason.  `reserved` are the slots that the decision being made has given
    away.
    """
    node = target.node
    undecided: tuple[Pool, None] | None = None
    for pool in index.pools_for(target.rollout, node):
        reserved_count = 0 if reserved is None else reserved.slots[pool.id]
        limit = index.budget(pool)
        # A node that is down has its slot already: it must not wait for itself.
        confirmed_down = len(pool.down) + reserved_count - (node in pool.down)
        if confirmed_down >= limit:
            return pool, confirmed_down
        # Kept back while a later pool may be full for certain: observing nodes would be of no use then.
        if undecided is None and confirmed_down + len(pool.unknown) - (node in pool.unknown) >= limit:
            undecided = pool, None
    return undecided


def unobserved_peer(index: Index, target: Target) -> Unavailability | None:
    """Return the peer that a reason names when only unknown peers take the target's slots."""
    found = pool_without_slot(index, target)
    if found is None or found[1] is not None:
        return None
    return _by_precedence(index, found[0].unknown, without=target.node)[0]


def full_pool_reasons(index: Index) -> dict[str, Reason]:
    """Return the reason of each full pool with a waiting node.

    The keys are pool ids, or `rollout|id` for a pool that only plans name.
    """
    found: dict[str, Reason] = {}
    for pool in index.full_pools():
        if not index.pending_groups.has_waiting(pool.id):
            continue
        if pool.cached_reason is None:
            pool.cached_reason = full_pool_reason(index, pool, len(pool.down))
        if pool.key in index.limits.pools:
            found[pool.id] = pool.cached_reason
        else:
            # Only the rollouts whose plans add this key obey the pool.
            found |= {
                f"{rollout}|{pool.id}": pool.cached_reason
                for rollout in index.pending_groups.rollouts_waiting_for(pool.id)
            }
    return found


def full_pool_reason(index: Index, pool: Pool, confirmed_down: int, without: str = "") -> Reason:
    """Return why the pool has no slot, given how many of its nodes, `without` one, are known to be down."""
    limit, down = index.budget(pool), _by_precedence(index, pool.down, without)
    if limit == 0:
        return Reason(ReasonCode.POOL_CLOSED, pool.id, remedy=Remedy(RemedyKind.CHANGE_SETTINGS))
    if not down:  # this decision has given the slots away
        return Reason(ReasonCode.POOL_FULL, pool.id, _peer_params(down))
    if confirmed_down > limit:
        return over_budget_reason(index, pool, without)
    # One node that is down by itself is named by its outage, which people can repair, not as a full pool.
    first = down[0]
    is_outage = first.code is UnavailabilityCause.DOWN or first.code in TAKEN_BY_OTHERS
    if confirmed_down == len(down) == 1 and is_outage:
        return _peer_reason(ReasonCode.PEER_DOWN, pool, first)
    return Reason(ReasonCode.POOL_FULL, pool.id, _peer_params(down), first.since, first.remedy)


def over_budget_reason(index: Index, pool: Pool, without: str) -> Reason:
    """Return why a pool with more nodes down than its budget starts nothing."""
    down = _by_precedence(index, pool.down, without)
    params = {"budget": index.budget(pool), **_peer_params(down)}
    if not down:
        return Reason(ReasonCode.POOL_OVER_BUDGET, pool.id, params)
    return Reason(ReasonCode.POOL_OVER_BUDGET, pool.id, params, down[0].since, down[0].remedy)


@dataclass(slots=True)
class Capacity:
    """Starts and slots that a decision, not applied yet, has reserved."""

    nodes: set[str] = field(default_factory=set)
    admitted_by_rollout: Counter[str] = field(default_factory=Counter)
    slots: Counter[str] = field(default_factory=Counter)
    """By pool."""
    starts_by_runner: Counter[str] = field(default_factory=Counter)
    """How many nodes of a runner begin to be in flight."""

    def reserve(self, index: Index, target: Target) -> None:
        """Give the node a start, and a slot of each of its pools; a node that is down has these already."""
        kinds = index.rollout(target.rollout).plan.run_kinds
        # Only for a limit: which nodes a runner has in flight is counted again after each start.
        for rule in index.bounds_of(index.nodes[target.node], kinds):
            has_start = target.node in self.nodes | index.in_flight_of_runner(rule.name)
            self.starts_by_runner[rule.name] += not has_start
        self.nodes.add(target.node)
        self.admitted_by_rollout[target.rollout] += 1
        self.slots.update(pool.id for pool in index.all_pools(target.node) if target.node not in pool.down)


def _peer_reason(code: ReasonCode, pool: Pool, peer: Unavailability) -> Reason:
    return Reason(code, peer.node, {"pool": pool.id, **peer.params}, peer.since, peer.remedy)


def _peer_params(peers: list[Unavailability]) -> dict[str, Param]:
    named = tuple(peer.params for peer in peers[:MAX_NAMED_NODES])
    return {"peers": named, "more": max(0, len(peers) - MAX_NAMED_NODES)}


def _by_precedence(index: Index, nodes: Iterable[str], without: str = "") -> list[Unavailability]:
    """Return why the nodes are down: our own work first, unknown last; of those, last seen down first."""
    found = (index.unavailability(node) for node in nodes if node != without)
    return sorted(
        (each for each in found if each is not None),
        key=lambda each: (CAUSE_PRECEDENCE[each.code], not each.last_seen_down, natural_sort_key(each.node)),
    )
