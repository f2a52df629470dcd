"""Whether what the database says can be so: judged on one snapshot, by rules of its own.

The daemon judges every change before it is made; here is judged what lies there,
whoever wrote it.  Each sentence names rollout and node, for the person who must
decide what to do about it.
"""

from __future__ import annotations

from collections.abc import Iterator

from machines.index import Index
from machines.plan import GateName
from machines.rollout import Rollout, Target
from machines.states import BUSY, Phase


def faults(index: Index) -> list[str]:
    """Return what cannot be, one sentence each."""
    return [
        fault
        for rollout in index.rollouts.values()
        for target in index.targets(rollout.id)
        for fault in _of_target(index, rollout, target)
    ]


def _of_target(index: Index, rollout: Rollout, target: Target) -> Iterator[str]:
    where = f"{target.node} of {rollout.id}"
    if target.phase in BUSY:
        others = [t.rollout for t in index.targets_on(target.node) if t.phase in BUSY]
        if len(others) > 1:
            yield f"{target.node} is in flight in {' and '.join(sorted(others))} at once"
        if not target.attempt:
            yield f"{where} is {target.phase} without ever having been admitted"
    if target.phase is Phase.FAILED and target.failure is None:
        yield f"{where} has failed without a failure"
    if target.attempt and not any(opened.gate is GateName.START for opened in rollout.opened):
        yield f"{where} was admitted while the gate start was never open"
    if (
        target.isolated
        and target.phase is Phase.PENDING
        and target.order is None
        and not _is_retried(rollout, target)
    ):
        yield f"{where} is pending and still isolated by us"


def _is_retried(rollout: Rollout, target: Target) -> bool:
    """Say whether it failed and is to be tried again: it stays isolated until its turn comes."""
    return any(each.node == target.node and each.attempt == target.attempt for each in rollout.failures)
