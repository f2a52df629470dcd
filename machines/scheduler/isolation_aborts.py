"""Isolating nodes that must give way to an outage, to a hold, or to another user's cordon.

An isolating node was not changed yet, so its isolation can be undone.  A node in a later phase finishes.  A
node that is isolated already has cost most: it stays so, and waits until its pools have a slot for it.
"""

from __future__ import annotations

from machines.facts.availability import TAKEN_BY_OTHERS, active_hold, observed_unavailability
from machines.facts.index import Index
from machines.facts.pool_index import Pool
from machines.facts.records import Records
from machines.model.causes import Cause, CauseCode
from machines.model.decision import AbortIsolation, Decision, DeferMaintenance
from machines.model.node import Observation, natural_sort_key
from machines.model.reasons import Reason, ReasonCode, UnavailabilityCause
from machines.model.rollout import Target
from machines.rules import pools, start_blockers
from machines.scheduler.decision_builder import DecisionBuilder
from machines.states import Phase


def collect(index: Index, now: float, builder: DecisionBuilder) -> None:
    """Collect the isolating nodes that give way to an outage or a hold.

    A node may be over the budget of two pools and held: one abort is enough.
    """
    aborts: dict[tuple[str, str], AbortIsolation] = {}
    deferrals: dict[tuple[str, str], DeferMaintenance] = {}
    for pool in index.over_budget():
        # A node that its owner removes never comes back, so giving way to it would be of no use.
        over = sum(not _is_leaving(index, node) for node in pool.down) - index.budget(pool)
        # Those that have cost least, and no more than needed.
        for target in _abortable_targets(index, pool)[: max(0, over)]:
            params = pools.over_budget_reason(index, pool, without=target.node).params
            reason = builder.reasons[pool.id] = Reason(ReasonCode.POOL_OVER_BUDGET, pool.id, params, now)
            key = (target.rollout, target.node)
            if index.isolation_progress(target).is_complete:
                deferrals.setdefault(key, DeferMaintenance(*key, reason))
            else:
                aborts.setdefault(key, AbortIsolation(*key, reason))
    for target in index.needing_driver():
        # First what few of them are: a decision asks this of every node in flight.
        if _is_abortable(index, target) and (hold_reason := _hold_reason(index, target)) is not None:
            key = (target.rollout, target.node)
            aborts.setdefault(key, AbortIsolation(*key, hold_reason))
    commands: list[AbortIsolation | DeferMaintenance] = [*aborts.values(), *deferrals.values()]
    for command in commands:
        builder.add(command)


def decide_giving_way(index: Index, now: float) -> Decision:
    """Return which isolations give way, and nothing else: the part of a decision that drivers need."""
    builder = DecisionBuilder(start_blockers.observe_only_blocker(index))
    if builder.dry_reason is None:
        collect(index, now, builder)
    return builder.build()


def record_giving_way(facts: Records, decision: Decision) -> set[tuple[str, str]]:
    """Record which isolations give way by a decision; return the (rollout, node) for which that is new.

    The details of a reason change with each decision: only a slot that comes or goes is new.
    """
    over_budget, changed = dict[tuple[str, str], Reason](), set[tuple[str, str]]()
    for each in decision.commands:
        if not isinstance(each, AbortIsolation | DeferMaintenance):
            continue
        key = (each.rollout, each.node)
        if each.reason.code is ReasonCode.POOL_OVER_BUDGET:
            over_budget[key] = each.reason
        elif not facts.abort_causes(*key):
            facts.record_abort(*key, (Cause(CauseCode.REASON, reason=each.reason),))
            changed.add(key)
    changed |= set(facts.over_budget_targets) ^ over_budget.keys()
    facts.record_over_budget(over_budget)
    return changed


def _hold_reason(index: Index, target: Target) -> Reason | None:
    """Return the user or tool that has held, cordoned or locked the node since its isolation began."""
    code, taken = ReasonCode.HELD, active_hold(index, target.node)
    if taken is None:
        taken = observed_unavailability(index, target.node)
        if taken is None or taken.code not in TAKEN_BY_OTHERS:
            return None
        is_locked = taken.code is UnavailabilityCause.LOCKED_BY_OTHER
        code = ReasonCode.FOREIGN_LOCK if is_locked else ReasonCode.FOREIGN_CORDON
    return Reason(code, target.node, taken.params, taken.since, taken.remedy)


def _abortable_targets(index: Index, pool: Pool) -> list[Target]:
    """Return the pool's nodes whose isolation can be aborted, the one that has cost least first."""
    found = [
        target
        for node in pool.down
        for target in index.targets_on(node)
        if _is_abortable(index, target) and pool in index.pools_for(target.rollout, node)
    ]

    def cost(target: Target) -> tuple[object, ...]:
        progress = index.isolation_progress(target)
        return (progress.is_complete, progress.moved, -target.since, natural_sort_key(target.node))

    return sorted(found, key=cost)


def _is_abortable(index: Index, target: Target) -> bool:
    """Return whether undoing the isolation restores a node that was in service.

    A node that failed before was not in service when it started: undoing its isolation would put it in
    service without having passed.
    """
    # A rollback that gives way would leave a change in service that was found to be bad.
    isolating = target.phase is Phase.ISOLATING and not target.rolling_back
    # A node that its train isolates stays down without this attempt.
    others = (each for each in index.targets_on(target.node) if each.rollout != target.rollout)
    if isolating and any(each.isolated for each in others):
        return False
    return isolating and not index.has_failed(target.rollout, target.node)


def _is_leaving(index: Index, node: str) -> bool:
    """Return whether the node is down only because its owner removes it from the fleet."""
    found = index.unavailability(node)
    return found is not None and isinstance(found.cause, Observation) and found.cause.is_leaving
