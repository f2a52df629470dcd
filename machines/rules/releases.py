"""What keeps a node out of service that an isolator left so for a hold."""

from __future__ import annotations

from machines.facts.index import Index
from machines.facts.node_work import NodeWork, WorkKind
from machines.model.node import Observation
from machines.model.reasons import Reason, ReasonCode
from machines.rules.node_claims import work_blocker, work_reason
from machines.rules.start_blockers import observe_only_blocker


def release_blocker(index: Index, left: Observation, now: float) -> Reason | None:
    """Return why a node that was left out of service does not return; None if it may.

    The observation alone shows it, so a node also returns whose hold ended while the daemon was down.
    """
    if left.node not in index.nodes:
        return Reason(ReasonCode.NODE_GONE, left.node)
    active = (each for each in index.holds_on(left.node) if each.until is None or now < each.until)
    if left.cordoned_by_other and (hold := next(iter(active), None)) is not None:
        return work_reason(index, NodeWork(WorkKind.HOLD, left.node, cause=hold))
    return observe_only_blocker(index) or work_blocker(index, WorkKind.RELEASE, left.node, now)
