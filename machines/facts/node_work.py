"""Who works on a node: every kind of work, and which of them waits for which.

Attempts, holds and stages follow from what is stored.  Other work is known to this process only, which
records it before it begins: after a crash no process does it any more.

The isolation of a node belongs to the node, and the attempts of a train share it.  The targets with
`isolated` hold it: an attempt joins with its first isolator and leaves with its last return, and only the
last holder of an isolator undoes it on the node.  How far each attempt is in the outage, its driver reports;
the store keeps none of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Protocol

from machines.model.reasons import ReasonCode
from machines.model.rollout import Hold, Target
from machines.model.train import OutageProgress, Train, change_key
from machines.states import IN_FLIGHT_PHASES, Phase


class WorkKind(StrEnum):
    """Kinds of work; those that no stored fact shows have the code of the reason that names them."""

    ATTEMPT = "attempt"
    """A target in flight, with its slots."""
    KEPT_DOWN = "kept-down"
    """A target at rest that failed or is isolated: it keeps its slots until people have decided."""
    HOLD = "hold"
    STAGE = "stage"
    """A prepare stage, or a build whose host is the node."""
    CHECKS = ReasonCode.CHECKING.value
    """Checks of a node in service: whether it soaks well, or needs no change."""
    CHECK_MODE = ReasonCode.CHECK_MODE.value
    CLEANING = ReasonCode.CLEANING.value
    """What ended rollouts left is being removed."""
    RELEASE = ReasonCode.RELEASING.value
    """An isolation that a hold left is being undone."""


_ROLLOUTS: Final = frozenset({WorkKind.ATTEMPT, WorkKind.KEPT_DOWN})

WAITS_FOR: Final[Mapping[WorkKind, frozenset[WorkKind]]] = {
    WorkKind.ATTEMPT: frozenset(set(WorkKind) - {WorkKind.CHECKS}),
    # People and tools take a failed node to repair it.
    WorkKind.HOLD: frozenset(
        {WorkKind.ATTEMPT, WorkKind.HOLD, WorkKind.STAGE, WorkKind.CLEANING, WorkKind.RELEASE}
    ),
    WorkKind.STAGE: _ROLLOUTS | {WorkKind.HOLD, WorkKind.STAGE, WorkKind.CHECK_MODE, WorkKind.CLEANING},
    WorkKind.CHECKS: _ROLLOUTS | {WorkKind.STAGE, WorkKind.CLEANING},
    WorkKind.CHECK_MODE: _ROLLOUTS | {WorkKind.STAGE, WorkKind.CHECK_MODE, WorkKind.CLEANING},
    WorkKind.CLEANING: frozenset(set(WorkKind) - {WorkKind.RELEASE}),
    WorkKind.RELEASE: _ROLLOUTS | {WorkKind.RELEASE},
}
"""What each kind of work waits for.

Work that only reads waits for what changes the node, and an attempt does not wait for checks: it makes their
result worthless, and who asked for them asks again.  A target at rest is kept down by no start.
"""


@dataclass(frozen=True, slots=True)
class NodeWork:
    """One piece of work on a node; `rollout` is empty for that of none, `cause` is the stored fact if any."""

    kind: WorkKind
    node: str
    rollout: str = ""
    cause: Target | Hold | None = None


class WorkFacts(Protocol):
    """The facts of one node that say who works on it, and who shares its outage."""

    def targets_on(self, node: str) -> Iterable[Target]: ...
    def train_of(self, rollout: str) -> Train | None: ...
    def outage_progress(self, target: Target) -> OutageProgress:
        """Return how far the target's attempt is, as its driver has reported."""

    def holds_on(self, node: str) -> Iterable[Hold]: ...
    def preparing_rollouts(self, node: str) -> Iterable[str]: ...
    def recorded_work(self, node: str) -> Iterable[NodeWork]:
        """Return the work of this process that no stored fact shows."""


def work_on(facts: WorkFacts, node: str, now: float) -> Iterator[NodeWork]:
    """Yield the work on a node; what people can end goes first."""
    for hold in facts.holds_on(node):
        if hold.until is None or now < hold.until:
            yield NodeWork(WorkKind.HOLD, node, cause=hold)
    for target in facts.targets_on(node):
        if (kind := _kind_of(target)) is not None:
            yield NodeWork(kind, node, target.rollout, target)
    for rollout in sorted(facts.preparing_rollouts(node)):
        yield NodeWork(WorkKind.STAGE, node, rollout)
    yield from facts.recorded_work(node)


def conflicts(
    facts: WorkFacts, wanted: WorkKind, node: str, now: float, rollout: str = ""
) -> Iterator[NodeWork]:
    """Yield the work on the node that the wanted work of a rollout waits for; without any it may begin.

    The rollout's own target on the node is no obstacle to it, nor an attempt that shares its outage.
    """
    own = next((each for each in facts.targets_on(node) if each.rollout == rollout), None)
    for work in work_on(facts, node, now):
        if work.kind not in WAITS_FOR[wanted] or _may_share(own, work.cause):
            continue
        other = work.cause if wanted is WorkKind.ATTEMPT and isinstance(work.cause, Target) else None
        # The attempts of a train take turns in one outage.
        if own is None or other is None or not may_share_outage(facts, own, other):
            yield work


def conflicting_work(
    facts: WorkFacts, wanted: WorkKind, node: str, now: float, rollout: str = ""
) -> NodeWork | None:
    """Return the first work that the wanted work waits for; None if it may begin."""
    return next(conflicts(facts, wanted, node, now, rollout), None)


def _may_share(own: Target | None, other: Target | Hold | None) -> bool:
    if own is None or not isinstance(other, Target):
        return False
    # Two rollouts that failed on a node in service would wait for each other.
    have_failed = own.phase is other.phase is Phase.FAILED
    return other is own or (have_failed and not other.isolated)


def _kind_of(target: Target) -> WorkKind | None:
    if target.phase in IN_FLIGHT_PHASES:
        return WorkKind.ATTEMPT
    # In service or not: what a failed node carries is unknown until a person has decided about it.
    return WorkKind.KEPT_DOWN if target.phase is Phase.FAILED or target.isolated else None


def is_isolated(facts: WorkFacts, node: str) -> bool:
    """Return whether any attempt holds the isolation of the node."""
    return any(target.isolated for target in facts.targets_on(node))


def in_flight_on(facts: WorkFacts, node: str) -> list[Target]:
    """Return the targets in flight on a node, in the order in which they joined its outage."""
    found = [target for target in facts.targets_on(node) if target.phase in IN_FLIGHT_PHASES]
    return sorted(found, key=_joined)


def _joined(target: Target) -> tuple[float, str]:
    return target.admitted_at, target.rollout


def may_share_outage(facts: WorkFacts, own: Target, other: Target) -> bool:
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
