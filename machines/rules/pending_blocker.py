"""Why a pending node may not start: what all rules together say against it.

An explanation asks every rule and shows the most certain answer.  Admission (scheduler/admission.py) asks the
same rules for the nodes of whole groups, in the order of their cost, and stops at the first no.  Three of its
questions are others, because it may request an answer, which an explanation never does:

- remaining_capacity() is how many more may start after those of this decision; capacity_blocker() says which
  limit is reached.  Both read one list of limits.
- is_idle() asks for a result of the last seconds; traffic_blocker() says what the last one saw, however old.
- needs_comparison() asks for a recent comparison; comparison_blocker() says why the last one has no answer.

tests/machines/test_properties.py compares what both say: who is said to start is who starts.
"""

from __future__ import annotations

from machines.facts.index import Index
from machines.model.reasons import Reason
from machines.model.rollout import Rollout, Target
from machines.rules import parallelism, pools, preparing, start_blockers, trains
from machines.rules.node_claims import quarantine_blocker
from machines.rules.waves import WaveProgress


def pending_blocker(
    index: Index, rollout: Rollout, target: Target, shared: Reason | None, progress: WaveProgress, now: float
) -> Reason | None:
    """Return why a pending node may not start, None when it is queued at most.

    `shared` is what blocks all nodes of the rollout.
    """
    reason = shared or quarantine_blocker(index, target) or start_blockers.wave_blocker(progress, target)
    if reason is not None:
        return reason
    wave = next(spec for spec in rollout.plan.waves if spec.name == target.wave)
    own_blocker = start_blockers.node_blocker(index, rollout, target, now)
    if own_blocker is not None and own_blocker.code not in start_blockers.NEEDS_OBSERVATION:
        return own_blocker  # nothing is more certain, and a pool's reason costs a look at its nodes
    if target.is_checked_first:  # checked first, without a slot
        return own_blocker or start_blockers.observe_only_blocker(index)
    reasons = (
        own_blocker,
        pools.slot_blocker(index, target, now),
        parallelism.capacity_blocker(index, rollout, wave, pools.Capacity(), node=target.node),
        start_blockers.traffic_blocker(index, target),
        preparing.comparison_blocker(index, target),
        start_blockers.observe_only_blocker(index),
        trains.turn_blocker(index, target, now),
    )
    # All of them are asked: what is certain is shown before what an observation may lift.
    blockers = [reason for reason in reasons if reason is not None]
    return min(
        blockers, key=lambda reason: start_blockers.reason_certainty(index, target, reason), default=None
    )
