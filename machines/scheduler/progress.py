"""Progress of a rollout, computed from its targets and gates, stored nowhere.

Counting: total = done + failed + skipped + pending + in flight, for a rollout and for each of its pools.
Nodes that left are not in the total.  `skipped` counts all nodes that are done without the change, and
`rolled_back` those of them whose change was undone.  The percentage is counters.percent_done().
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from machines.facts.counters import percent_done
from machines.facts.index import Index
from machines.model.reasons import Reason, ReasonCode
from machines.model.rollout import Rollout, Target
from machines.rules import start_blockers, waves
from machines.rules.waves import WaveProgress
from machines.scheduler.why import why
from machines.states import Phase


class RolloutState(StrEnum):
    """The state of a whole rollout; with a closed window or a freeze it is running, with a reason."""

    AWAITING_APPROVAL = "awaiting-approval"
    RUNNING = "running"
    SOAKING = "soaking"
    PAUSED = "paused"
    DONE = "done"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class RolloutProgress:
    """A rollout's state and counts.

    `prepared` counts the nodes without a prepare stage left, None if the plan has no stage.  `slot_s` is how
    long nodes were in a slot, `prepare_s` how long they were prepared, of all nodes together.
    """

    rollout: str
    state: RolloutState
    wave: str
    percent: float
    total: int
    done: int
    failed: int
    skipped: int
    rolled_back: int
    pending: int
    reason: Reason | None
    prepared: int | None
    slot_s: float
    prepare_s: float


def rollout_progress(index: Index, rollout_id: str, now: float) -> RolloutProgress:
    """Return a rollout's progress; raises KeyError."""
    index = index.at(now)
    rollout, counters = index.rollout(rollout_id), index.counters(rollout_id)
    wave_progress = waves.wave_progress(index, rollout, now)
    state = _state(index, rollout, wave_progress, now)
    total = counters.phases.total() - counters.left
    is_done = state is RolloutState.DONE
    preparations = index.preparations(rollout_id)
    return RolloutProgress(
        rollout=rollout_id,
        state=state,
        wave=(wave_progress.wave or rollout.plan.waves[-1]).name,
        percent=percent_done(counters.done, total, counters.skipped, ended=is_done),
        total=total,
        done=counters.done,
        failed=counters.phases[Phase.FAILED],
        skipped=counters.skipped,
        rolled_back=counters.rolled_back,
        pending=counters.phases[Phase.PENDING],
        reason=why(index, rollout, now),
        prepared=None if preparations is None else total - counters.skipped - preparations.unprepared,
        slot_s=counters.slot_s(now if rollout.cancelled is None else rollout.cancelled.at),
        prepare_s=0.0 if preparations is None else preparations.spent_s(now),
    )


def slot_s(target: Target, now: float) -> float:
    """Return how long the latest attempt of a node kept a slot, or has kept it."""
    # Pending again after an aborted isolation: it has given its slot back.
    if not target.admitted_at or target.phase is Phase.PENDING:
        return 0.0
    return max(0.0, (target.since if target.phase is Phase.DONE else now) - target.admitted_at)


def _state(index: Index, rollout: Rollout, wave_progress: WaveProgress, now: float) -> RolloutState:
    if rollout.cancelled is not None:
        return RolloutState.CANCELLED
    if rollout.ended_at is not None:
        return RolloutState.DONE
    blocker = start_blockers.rollout_blocker(index, rollout, now)
    if blocker is not None:
        is_new = blocker.code in (ReasonCode.GATE_PILOT, ReasonCode.GATE_START)
        return RolloutState.AWAITING_APPROVAL if is_new else RolloutState.PAUSED
    # Before "waiting for votes": while a wave soaks, no vote lets the next one start.
    if wave_progress.soak_ends_at is not None:
        return RolloutState.SOAKING
    if rollout.plan.drift_every_s is not None and index.all_done(rollout.id):
        return RolloutState.DONE
    return RolloutState.RUNNING if wave_progress.blocker is None else RolloutState.AWAITING_APPROVAL
