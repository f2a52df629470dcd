"""Rollbacks: which nodes are taken back, in which order, and what blocks all of them.

A person orders one node by node.  A plan with `on_failure` orders them by itself: while a failure that it
counts is unresolved, the changed nodes of its scope are due.  Nothing of that is stored, so a vote that
resolves the failure also ends the rollbacks that have not begun.  The order is: newest first, canaries last.
This file does not know pools and slots; the scheduler does.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Final

from machines.facts.availability import failure_remedy
from machines.facts.index import Index
from machines.facts.node_work import WorkKind
from machines.model.decision import DueRollbacks
from machines.model.node import natural_sort_key
from machines.model.plan import PILOT_WAVE, OnFailure
from machines.model.reasons import Params, Reason, ReasonCode, Remedy, RemedyKind
from machines.model.rollout import UNATTENDED_RESTORE, Failure, FailureCode, Rollout, Target
from machines.rules.node_claims import quarantine_blocker, work_blocker
from machines.rules.waves import CANARY
from machines.states import Outcome, Phase

NOT_BEGUN: Final = frozenset(
    {FailureCode.NEVER_STARTED, FailureCode.UNREACHABLE, FailureCode.PREPARE_DISTURBED}
)
"""Failures before the run began: they changed nothing."""

NOT_COUNTED: Final = NOT_BEGUN | {FailureCode.INTERFERENCE}
"""Failures that say nothing against the change, so they roll nothing back by themselves."""


def due_rollbacks(index: Index, rollout: Rollout) -> DueRollbacks:
    """Return the rollout's nodes to roll back; those in flight are no longer due."""
    # Each decision and each explanation asks, and the answer is a sort of all targets.
    known = index.due_rollbacks.get(rollout.id)
    if known is None:
        known = index.due_rollbacks[rollout.id] = _find_due(index, rollout)
    return known


def _find_due(index: Index, rollout: Rollout) -> DueRollbacks:
    begun = index.counters(rollout.id).rollbacks_due
    ordered = [index.target(rollout.id, node) for node in begun if node in index.nodes]
    failure = _answered_failure(index, rollout)
    if failure is None:
        return DueRollbacks(_in_order(ordered))
    scope = [each for each in _scope(index, rollout) if each.node not in begun]
    automatic = _in_order(each for each in scope if each.node in index.nodes)
    if rollout.plan.at_most is None:
        allowed = len(automatic)
    else:
        # Of the whole rollout, those that have ended too: otherwise each decision would allow as many again.
        taken = sum(t.rolling_back or t.outcome is Outcome.ROLLED_BACK for t in index.targets(rollout.id))
        allowed = max(0, rollout.plan.at_most - taken)
    return DueRollbacks(_in_order([*ordered, *automatic[:allowed]]), automatic[allowed:], failure)


def failed_rollback_blocker(index: Index, rollout: Rollout) -> Reason | None:
    """Return the failed rollback that people have not settled: it stops all others of the rollout."""
    unresolved = index.unresolved_failures(rollout.id)
    targets = ((failure, index.target(rollout.id, failure.node)) for failure in unresolved)
    failed = ((f, t) for f, t in targets if t.phase is Phase.FAILED and _stops_rollbacks(t, f))
    found = next(failed, None)
    if found is None:
        return None
    first, target = found
    params: Params = {**first.params}
    remedy = failure_remedy(target, rollout)
    return Reason(ReasonCode.ROLLBACK_FAILED, first.node, params, first.at, remedy)


def rollbacks_reason(index: Index, rollout: Rollout) -> Reason | None:
    """Return what the rollout waits for because of its rollbacks; None when it has none."""
    if (stopped := failed_rollback_blocker(index, rollout)) is not None:
        return stopped
    due = due_rollbacks(index, rollout)
    moving = sum(index.target(rollout.id, n).rolling_back for n in index.counters(rollout.id).in_flight)
    left, cause = len(due.targets) + moving, due.failure
    first = {} if cause is None else {"node": cause.node, **cause.params}
    if left:
        since = None if cause is None else cause.at
        return Reason(ReasonCode.ROLLING_BACK, rollout.id, {"left": left, **first}, since)
    if due.beyond_limit and cause is not None:
        limits: Params = {"at_most": rollout.plan.at_most, "left": len(due.beyond_limit), **first}
        remedy = _order_remedy(index, rollout, due.beyond_limit)
        return Reason(ReasonCode.ROLLBACK_LIMIT, rollout.id, limits, cause.at, remedy)
    return None


def _order_remedy(index: Index, rollout: Rollout, targets: Iterable[Target]) -> Remedy | None:
    """Return the command that rolls these nodes back; if it is refused for all, what lifts that."""
    blockers = {each.node: order_blocker(index, each, index.now) for each in targets}
    nodes = [node for node, blocker in blockers.items() if blocker is None]
    if nodes:
        return Remedy(RemedyKind.ROLL_BACK, {"rollout": rollout.id, "nodes": " ".join(nodes[:3])})
    return next(blocker.remedy for blocker in blockers.values() if blocker is not None)


def order_blocker(index: Index, target: Target, now: float) -> Reason | None:
    """Return why a person may not order the node's rollback: that of a failed node starts at once."""
    if target.phase is not Phase.FAILED:
        return None
    work = work_blocker(index, WorkKind.ATTEMPT, target.node, now, target.rollout)
    return quarantine_blocker(index, target) or work


def _counts(failure: Failure) -> bool:
    return failure.code not in NOT_COUNTED and failure.step != UNATTENDED_RESTORE


def _answered_failure(index: Index, rollout: Rollout) -> Failure | None:
    """Return the first failure that the plan answers with rollbacks; none while a person has paused it."""
    plan = rollout.plan
    # A user who pauses a rollout decides alone, so the plan orders nothing meanwhile.
    if plan.on_failure is OnFailure.PAUSE or not plan.rollback or rollout.closed or rollout.paused:
        return None
    unresolved = index.unresolved_failures(rollout.id)
    targets = ((failure, index.target(rollout.id, failure.node)) for failure in unresolved)
    # Clouds replace broken nodes: rollbacks that break nodes must not go through the fleet like that.
    if any(
        target.outcome is Outcome.LEFT and _stops_rollbacks(target, failure) for failure, target in targets
    ):
        return None
    return next(filter(_counts, unresolved), None)


def _stops_rollbacks(target: Target, failure: Failure) -> bool:
    """Return whether this is the failure of the node's rollback itself, and may happen to other nodes."""
    # A node that was dead before its undo began says nothing about the undo; its slots stay taken.
    is_dead = failure.code is FailureCode.UNREACHABLE
    return target.rolling_back and failure.attempt == target.attempt and not is_dead


def _scope(index: Index, rollout: Rollout) -> list[Target]:
    """Return the changed nodes that the plan takes back after the rollout's unresolved failures."""
    failed = {failure.node for failure in filter(_counts, index.unresolved_failures(rollout.id))}
    waves = {index.target(rollout.id, node).wave for node in failed}
    begun = {f.node for f in rollout.failures if f.code not in NOT_BEGUN}
    changed = (target for target in index.targets(rollout.id) if _is_changed(target, begun))
    match rollout.plan.on_failure:
        case OnFailure.ROLLBACK_NODE:
            return [target for target in changed if target.node in failed and target.phase is Phase.FAILED]
        case OnFailure.ROLLBACK_WAVE:
            return [target for target in changed if target.wave in waves]
        case _:
            return list(changed)


def _is_changed(target: Target, begun: Collection[str]) -> bool:
    """Return whether the node has the change or a part of it; `begun`: a run of theirs began and failed."""
    if target.phase is Phase.FAILED:
        return not target.rolling_back and target.order is None and target.node in begun
    return target.outcome is Outcome.CHANGED


def _in_order(targets: Iterable[Target]) -> tuple[Target, ...]:
    """Return the nodes in the order of their rollbacks: newest first, canaries last."""

    def position(target: Target) -> tuple[object, ...]:
        # The newest nodes have served least with the change; canaries are what people examine meanwhile.
        is_canary = target.wave in (CANARY, PILOT_WAVE)
        return (is_canary, -target.since, natural_sort_key(target.node))

    return tuple(sorted(targets, key=position))
