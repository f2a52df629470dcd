"""Consistency checks of a stored snapshot, independent of the daemon's invariants.

The daemon checks each change before it commits it; this file checks the stored result, whatever wrote it.
Each violation is one sentence that names rollout and node.
"""

from __future__ import annotations

from collections.abc import Iterator

from machines.facts.index import Index
from machines.model.plan import PILOT_WAVE, GateName
from machines.model.rollout import Rollout, Target
from machines.states import IN_FLIGHT_PHASES, Phase


def find_violations(index: Index) -> list[str]:
    """Return the violations, one sentence each."""
    return [
        fault
        for rollout in index.rollouts.values()
        for target in index.targets(rollout.id)
        for fault in _find_target_violations(index, rollout, target)
    ]


def _find_target_violations(index: Index, rollout: Rollout, target: Target) -> Iterator[str]:
    where = f"{target.node} of {rollout.id}"
    if target.phase in IN_FLIGHT_PHASES:
        others = [t.rollout for t in index.targets_on(target.node) if t.phase in IN_FLIGHT_PHASES]
        if len(others) > 1:
            yield f"{target.node} is in flight in {' and '.join(sorted(others))} at once"
        if not target.attempt:
            yield f"{where} is {target.phase} without ever having been admitted"
    if target.phase is Phase.FAILED and target.failure is None:
        yield f"{where} has failed without a failure"
    entry = GateName.PILOT if target.wave == PILOT_WAVE else GateName.START
    if target.attempt and not any(opened.gate is entry for opened in rollout.opened):
        yield f"{where} was admitted while the gate {entry} was never open"
    # A failed node that waits for its retry stays isolated, which is not a violation.
    retry = any(each.node == target.node and each.attempt == target.attempt for each in rollout.failures)
    if target.isolated and target.phase is Phase.PENDING and target.order is None and not retry:
        yield f"{where} is pending and still isolated by us"
