"""Starting rollbacks: the nodes that are due begin under the same rules of slots as any other node.

Of one pool the newest node begins first; a node that waits for its pools lets those of other pools begin.
"""

from __future__ import annotations

from machines.facts.index import Index
from machines.model.decision import ProbeTraffic, RollBack
from machines.model.plan import WaveDef
from machines.model.reasons import Reason, ReasonCode
from machines.model.rollout import Rollout, Target
from machines.rules import parallelism, pools, rollbacks, start_blockers
from machines.rules.runners import runner_blocker
from machines.scheduler import admission
from machines.scheduler.decision_builder import DecisionBuilder


def admit_rollbacks(index: Index, rollout: Rollout, now: float, builder: DecisionBuilder) -> None:
    """Start the rollbacks of a rollout that may start, also of one that has ended."""
    capacity = builder.capacity
    if not parallelism.remaining_capacity(index, rollout, None, capacity, is_rollback=True):
        return
    due = rollbacks.due_rollbacks(index, rollout)
    if not due.targets or _rollout_blocker(index, rollout) is not None:
        return
    reason = rollbacks.rollbacks_reason(index, rollout) if due.failure is not None else None
    for target in due.targets:
        if not _may_begin(index, rollout, target, now, builder):
            continue
        builder.add(RollBack(rollout.id, target.node, None if target.order else reason))
        capacity.reserve(index, target)
        if not parallelism.remaining_capacity(index, rollout, None, capacity, is_rollback=True):
            return


def _may_begin(index: Index, rollout: Rollout, target: Target, now: float, builder: DecisionBuilder) -> bool:
    """Return whether a node that is due may begin; what may lift its blocker is requested."""
    capacity = builder.capacity
    if target.node in capacity.nodes:
        return False
    # The pool goes first: that question is cheap, and with a full pool the others do not matter.
    blocked = pools.pool_without_slot(index, target, capacity)
    if blocked is not None and blocked[1] is not None:
        return False  # the event that frees the slot makes the next decision
    if not parallelism.remaining_capacity(index, rollout, _wave(rollout, target), capacity, is_rollback=True):
        return False
    blocker = start_blockers.rollback_blocker(index, rollout, target, now)
    if blocker is not None or blocked is not None:
        _prepare_for(index, target, blocker, builder)
        return False
    if runner_blocker(index, target, capacity) is not None:
        return False
    return not _awaits_idle(index, rollout, target, now, builder)


def queue_reason(index: Index, target: Target, now: float) -> Reason:
    """Return why a node that is due waits for its rollback."""
    rollout = index.rollout(target.rollout)
    own = start_blockers.rollback_blocker(index, rollout, target, now)
    slot = pools.slot_blocker(index, target, now)
    if own is not None and own.code in start_blockers.NEEDS_OBSERVATION:
        own, slot = slot or own, None  # the node is observed once its pools have a slot
    return (
        _rollout_blocker(index, rollout)
        or own
        or slot
        or parallelism.capacity_blocker(
            index, rollout, _wave(rollout, target), pools.Capacity(), node=target.node, is_rollback=True
        )
        or (None if target.isolated else start_blockers.traffic_blocker(index, target))
        or Reason(ReasonCode.ROLLBACK_QUEUED, target.node, since=target.ordered_at or None)
    )


def _rollout_blocker(index: Index, rollout: Rollout) -> Reason | None:
    return (
        start_blockers.doubt_blocker(index, rollout.id)
        or start_blockers.observe_only_blocker(index)
        or rollbacks.failed_rollback_blocker(index, rollout)
    )


def _prepare_for(index: Index, target: Target, blocker: Reason | None, builder: DecisionBuilder) -> None:
    """Request what may lift the blocker, None for unknown peers: an observation, or time."""
    if blocker is None or blocker.code in start_blockers.NEEDS_OBSERVATION:
        admission.request_observations(index, (target.node,), builder)
        admission.request_peer_observations(index, target, builder)
    elif blocker.code is ReasonCode.BACKOFF:
        builder.wake_by(target.not_before)


def _awaits_idle(
    index: Index, rollout: Rollout, target: Target, now: float, builder: DecisionBuilder
) -> bool:
    """Return whether a node in service has client traffic, or needs a probe first."""
    if target.isolated or not index.plan_for(target).traffic:
        return False
    result = index.traffic_of(target.rollout, target.node)
    if result is not None and result.is_idle(now, rollout.plan.idle_for_s):
        return False
    due_at = now if result is None else start_blockers.reprobe_at(index, target, result)
    if result is None or not result.at <= now < due_at:
        builder.add(ProbeTraffic(target.rollout, target.node))
        due_at = now + rollout.plan.poll_s
    builder.wake_by(due_at)
    return True


def _wave(rollout: Rollout, target: Target) -> WaveDef:
    return next(spec for spec in rollout.plan.waves if spec.name == target.wave)
