"""Which nodes that are being isolated are put back as they were, and why.

A node that is isolating has not been harmed, so it makes room: where its pool
came over its budget by a later outage, and where somebody holds it for
themselves.  One that has gone further finishes.
"""

from __future__ import annotations

from machines import pools
from machines.decision import PutBack
from machines.index import Index
from machines.node import natural
from machines.rollout import Reason, Target
from machines.slots import Pool
from machines.stands import held
from machines.states import Phase


def for_room(index: Index, now: float) -> dict[str, list[PutBack]]:
    """Return, by pool over its budget, the latest admitted of its isolating nodes, no more than needed."""
    found: dict[str, list[PutBack]] = {}
    for pool in index.crowded():
        over = len(pool.down) - index.budget(pool)
        for target in _retractable_in(index, pool)[:over]:
            others = pools.others(index, pool, target.node)
            text = f"pool {pool.id} is over its budget of {index.budget(pool)}: {others}"
            reason = Reason("pool-over-budget", text, now, "")
            found.setdefault(pool.id, []).append(PutBack(target.rollout, target.node, reason))
    return found


def for_holds(index: Index) -> list[PutBack]:
    """Return the isolating nodes that somebody has taken for themselves meanwhile."""
    found = []
    for target in index.busy():
        taken = held(index, target.node)
        if taken is not None and _retractable(index, target):
            reason = Reason("held", taken.text, taken.since, taken.lifted_by)
            found.append(PutBack(target.rollout, target.node, reason))
    return found


def _retractable_in(index: Index, pool: Pool) -> list[Target]:
    """Return the pool's nodes that can still be put back as they were, the latest admitted first."""
    found = [
        target
        for node in pool.down
        for target in index.targets_on(node)
        if _retractable(index, target) and pool in index.pools_for(target.rollout, node)
    ]
    return sorted(found, key=lambda target: (-target.since, natural(target.node)))


def _retractable(index: Index, target: Target) -> bool:
    """Say whether the node can still be put back as it was.

    One that failed before was not in service when it started: putting it back
    would put it in service without having passed.
    """
    isolating = target.phase is Phase.ISOLATING and not target.rolling_back
    return isolating and not index.has_failed(target.rollout, target.node)
