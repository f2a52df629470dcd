"""The outage of a node, which the attempts of a train share: who holds its isolation, and who may join.

An isolation belongs to the node.  The targets with `isolated` hold it: an attempt joins with its first
isolator and leaves with its last return, and only the last holder of an isolator undoes it on the node.
How far each attempt is in the outage, its driver reports; the store keeps none of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from machines.model.outage import OutageProgress, change_key
from machines.model.rollout import Target
from machines.model.train import Train
from machines.states import IN_FLIGHT_PHASES, Phase


class OutageFacts(Protocol):
    """The facts of one node that say who shares its outage."""

    def targets_on(self, node: str) -> Iterable[Target]: ...
    def train_of(self, rollout: str) -> Train | None: ...
    def outage_progress(self, target: Target) -> OutageProgress:
        """Return how far the target's attempt is, as its driver has reported."""


def is_isolated(facts: OutageFacts, node: str) -> bool:
    """Return whether any attempt holds the isolation of the node."""
    return any(target.isolated for target in facts.targets_on(node))


def in_flight_on(facts: OutageFacts, node: str) -> list[Target]:
    """Return the targets in flight on a node, in the order in which they joined its outage."""
    found = [target for target in facts.targets_on(node) if target.phase in IN_FLIGHT_PHASES]
    return sorted(found, key=_joined)


def _joined(target: Target) -> tuple[float, str]:
    return target.admitted_at, target.rollout


def may_share_outage(facts: OutageFacts, own: Target, other: Target) -> bool:
    """Return whether an attempt of `own` may begin while `other` is in flight on the node.

    The other one must wait, after checks that have passed, also those after each later change: a check that
    fails after two changes would not say which one broke it.  A target that still holds the isolation begins
    again in its outage; any other joins the isolation of an earlier member of its train.
    """
    progress = facts.outage_progress(other)
    if other.phase is not Phase.VERIFYING or not (progress.has_passed and progress.waits):
        return False
    later = (each for each in in_flight_on(facts, other.node) if _joined(other) < _joined(each))
    if any(progress.judged.get(change_key(each)) != "" for each in later):
        return False
    if own.isolated:
        return True
    train = facts.train_of(own.rollout)
    joins = own.phase is Phase.PENDING and train is not None and train.precedes(other.rollout, own.rollout)
    return joins and is_isolated(facts, own.node)
