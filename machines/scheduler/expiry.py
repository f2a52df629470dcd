"""What time alone ends: holds and freezes, and soaks that a clock ahead of time began.

The daemon records each end as an event, so that the audit has it.  The rules ignore an ended hold or freeze
at once, whether its end is recorded or not.
"""

from __future__ import annotations

from machines.facts.index import Index
from machines.model.decision import EndFreeze, EndHold, RestartSoak
from machines.model.events import DeadlineExtended, FreezeLifted, HoldReleased
from machines.model.rollout import DAEMON, Hold, Rollout
from machines.model.windows import Freeze
from machines.rules import start_blockers
from machines.scheduler.decision_builder import DecisionBuilder
from machines.states import Phase


def collect_expired(index: Index, now: float, builder: DecisionBuilder) -> None:
    """Collect the holds and freezes whose time is over.

    A row that the audit does not account for stays: an event about it would hide that it was altered.
    """
    for hold in index.holds:
        # A doubtful row of one node keeps only the holds of that node from ending.
        if hold.until is None or start_blockers.mismatch_blocker(index, "all", f"node/{hold.node}"):
            continue
        if now < hold.until:
            builder.wake_by(hold.until)
        else:
            builder.add(EndHold(hold))
    for freeze in index.freezes:
        if freeze.until is None or start_blockers.mismatch_blocker(index, "all"):
            continue
        if freeze.is_active(now):
            builder.wake_by(freeze.until)
        else:
            builder.add(EndFreeze(freeze))


def end_hold(hold: Hold, now: float, text: str) -> HoldReleased:
    return HoldReleased(hold.node, hold.source, hold.id, DAEMON, now, text)


def end_freeze(freeze: Freeze, now: float, text: str) -> FreezeLifted:
    return FreezeLifted(freeze.id, DAEMON, now, freeze.scope, text)


def extend_deadlines(index: Index, silent_since: float, now: float) -> list[DeadlineExtended]:
    """Return the events that leave out, of each isolation's time, that in which no daemon was running.

    `silent_since` is the last sign of an earlier daemon.  It may have lived a little longer: so much more the
    isolation may take, because a daemon's absence must not end one.
    """
    return [
        DeadlineExtended(
            target.rollout, target.node, target.downtime_s + now - max(silent_since, target.since), now
        )
        for target in index.needing_driver()
        if target.phase is Phase.ISOLATING and now > max(silent_since, target.since)
    ]


def collect_soak_restarts(index: Index, rollout: Rollout, now: float, builder: DecisionBuilder) -> None:
    """Collect the nodes whose soak begins later than now: the clock was set back, so it counts from now."""
    for spec in rollout.plan.waves:
        # In this order: the end of a wave is searched among all its targets.
        if not spec.soak_s or not index.is_wave_over(rollout.id, spec.name):
            continue
        end = index.wave_end(rollout.id, spec.name)
        if end is not None and end > now:
            for target in index.targets(rollout.id):
                if target.wave == spec.name and target.phase is Phase.DONE and target.since > now:
                    builder.add(RestartSoak(target.rollout, target.node))
