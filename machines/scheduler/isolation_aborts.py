"""Isolations to abort: isolating nodes that free a slot for an outage or a hold.

An isolating node was not changed yet, so its isolation can be undone.  A node in a later phase finishes.
"""

from __future__ import annotations

from machines.facts.availability import active_hold
from machines.facts.index import Index
from machines.facts.pool_index import Pool
from machines.model.decision import AbortIsolation
from machines.model.node import natural_sort_key
from machines.model.reasons import Reason, ReasonCode
from machines.model.rollout import Target
from machines.rules import pools
from machines.states import Phase


def to_free_slots(index: Index, now: float) -> dict[str, list[AbortIsolation]]:
    """Return, by pool over its budget, the latest admitted of its isolating nodes, no more than needed."""
    found: dict[str, list[AbortIsolation]] = {}
    for pool in index.over_budget():
        over = len(pool.down) - index.budget(pool)
        for target in _abortable_targets(index, pool)[:over]:
            params = pools.over_budget_reason(index, pool, without=target.node).params
            reason = Reason(ReasonCode.POOL_OVER_BUDGET, pool.id, params, now)
            found.setdefault(pool.id, []).append(AbortIsolation(target.rollout, target.node, reason))
    return found


def to_yield_to_holds(index: Index) -> list[AbortIsolation]:
    """Return the isolating nodes that a user or a tool has taken a hold of meanwhile."""
    found = []
    for target in index.needing_driver():
        hold = active_hold(index, target.node)
        if hold is not None and _is_abortable(index, target):
            reason = Reason(ReasonCode.HELD, target.node, hold.params, hold.since, hold.remedy)
            found.append(AbortIsolation(target.rollout, target.node, reason))
    return found


def _abortable_targets(index: Index, pool: Pool) -> list[Target]:
    """Return the pool's nodes whose isolation can be aborted, the latest admitted first."""
    found = [
        target
        for node in pool.down
        for target in index.targets_on(node)
        if _is_abortable(index, target) and pool in index.pools_for(target.rollout, node)
    ]
    return sorted(found, key=lambda target: (-target.since, natural_sort_key(target.node)))


def _is_abortable(index: Index, target: Target) -> bool:
    """Return whether undoing the isolation restores a node that was in service.

    A node that failed before was not in service when it started: undoing its isolation would put it in
    service without having passed.
    """
    isolating = target.phase is Phase.ISOLATING and not target.rolling_back
    return isolating and not index.has_failed(target.rollout, target.node)
