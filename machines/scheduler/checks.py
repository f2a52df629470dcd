"""Checks of nodes in service, in rounds over a rollout: of what soaks, and for drift.

A check needs no slot, and only other work on its node delays it.
"""

from __future__ import annotations

import math
from typing import Final

from machines.facts.index import Index
from machines.facts.node_work import WorkKind, conflicting_work
from machines.model.decision import CheckDrift, CheckRounds, CheckSoaking, NextRound
from machines.model.rollout import Rollout, Target
from machines.rules import waves
from machines.scheduler.decision_builder import DecisionBuilder
from machines.states import CARRIES_CHANGE, Outcome, Phase

SOAK_ROUND_S: Final = 60.0
"""Interval between the checks of a soaking node: a failure is known within a minute."""

DRIFT_LOOK_S: Final = 60.0
"""Pause before nodes are looked for again, while none has had its change for the plan's interval."""


def collect_checks(index: Index, rollout: Rollout, now: float, builder: DecisionBuilder) -> None:
    """Collect the checks of an open rollout whose round begins now."""
    if any(wave.soak_s for wave in rollout.plan.waves):
        _collect_soak_checks(index, rollout, now, builder)
    if rollout.plan.drift_every_s is not None:
        _collect_drift_checks(index, rollout, rollout.plan.drift_every_s, now, builder)


def _collect_soak_checks(index: Index, rollout: Rollout, now: float, builder: DecisionBuilder) -> None:
    if waves.wave_progress(index, rollout, now).soak_ends_at is None:
        return
    if not _begins_round(index, rollout, CheckRounds.SOAK, SOAK_ROUND_S, now, builder):
        return
    for target in soaking_targets(index, rollout, now):
        if target.outcome is Outcome.CHANGED:
            builder.add(CheckSoaking(rollout.id, target.node))
    _end_round(rollout, CheckRounds.SOAK, now + SOAK_ROUND_S, builder)


def _collect_drift_checks(
    index: Index, rollout: Rollout, every_s: float, now: float, builder: DecisionBuilder
) -> None:
    """Check the nodes that have had their change for the interval.

    A restart forgets the last round: the next one comes early, which changes nothing on the nodes.
    """
    if not _begins_round(index, rollout, CheckRounds.DRIFT, every_s, now, builder):
        return
    due = (each for each in index.targets(rollout.id) if each.since <= now - every_s)
    nodes = tuple(each.node for each in due if can_drift(index, each))
    if nodes:
        builder.add(CheckDrift(rollout.id, nodes))
    _end_round(rollout, CheckRounds.DRIFT, now + (every_s if nodes else min(every_s, DRIFT_LOOK_S)), builder)


def _begins_round(
    index: Index, rollout: Rollout, checks: CheckRounds, every_s: float, now: float, builder: DecisionBuilder
) -> bool:
    at = index.next_round(rollout.id, checks)
    # An instant beyond the interval is from before the clock was set back.  In a forecast no round begins.
    if now < at <= now + every_s or math.isinf(at):
        builder.wake_by(at)
        return False
    return True


def _end_round(rollout: Rollout, checks: CheckRounds, at: float, builder: DecisionBuilder) -> None:
    builder.add(NextRound(rollout.id, checks, at))
    builder.wake_by(at)


def soaking_targets(index: Index, rollout: Rollout, now: float) -> tuple[Target, ...]:
    """Return the done nodes of the rollout's wave that soaks now.

    A node that another rollout works on is left out: its checks say nothing about this one.
    """
    progress = waves.wave_progress(index, rollout, now)
    if progress.soak_ends_at is None or progress.wave is None:
        return ()
    name = progress.wave.name
    done = (each for each in index.targets(rollout.id) if each.wave == name and each.phase is Phase.DONE)
    return tuple(target for target in done if not is_at_work(index, target.node))


def can_fail_soak(index: Index, checked: Target) -> bool:
    """Return whether a check that began while a node soaked may still fail it.

    A check takes time: meanwhile the rollout may have ended, or another one may work on the node.
    """
    rollout = index.rollouts.get(checked.rollout)
    if rollout is None or rollout.closed or checked.node not in index.nodes:
        return False
    return index.target(checked.rollout, checked.node) == checked and not is_at_work(index, checked.node)


def can_drift(index: Index, target: Target) -> bool:
    """Return whether a node has the change of a rollout, and is still in the inventory."""
    return target.outcome in CARRIES_CHANGE and target.node in index.nodes


def is_at_work(index: Index, node: str) -> bool:
    """Return whether any rollout works on the node, prepares it, failed on it or has it isolated."""
    return conflicting_work(index, WorkKind.CHECKS, node, index.now) is not None
