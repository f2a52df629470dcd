"""Who has a node: what keeps every playbook of ours from it."""

from __future__ import annotations

from dataclasses import replace

from machines.facts.availability import Unavailability, target_unavailability
from machines.facts.index import Index
from machines.facts.node_work import NodeWork, WorkKind, conflicting_work
from machines.model.node import ACCEPTED_BY_PIN
from machines.model.reasons import Params, Reason, ReasonCode, Remedy, RemedyKind, UnavailabilityCause
from machines.model.rollout import Hold, Target
from machines.states import IN_FLIGHT_PHASES


def quarantine_blocker(index: Index, target: Target) -> Reason | None:
    """Return the values of the node in which the inventory sources contradict each other."""
    if not index.is_quarantined(target.node):
        return None
    found = [each for each in index.nodes[target.node].conflicts if not each.is_warning]
    conflicts: tuple[Params, ...] = tuple(
        {"kind": each.kind.value, "about": each.about, "values": dict(each.values)} for each in found
    )
    remedy = Remedy(RemedyKind.CHANGE_INVENTORY)
    if any(each.kind in ACCEPTED_BY_PIN for each in found):
        remedy = Remedy(RemedyKind.PIN_IDENTITY, {"node": target.node})
    since = min(each.since for each in found)
    return Reason(ReasonCode.QUARANTINED, target.node, {"conflicts": conflicts}, since, remedy)


def work_blocker(index: Index, wanted: WorkKind, node: str, now: float, rollout: str = "") -> Reason | None:
    """Return the work on the node that the wanted work of a rollout waits for."""
    work = conflicting_work(index, wanted, node, now, rollout)
    return None if work is None else work_reason(index, work)


def work_reason(index: Index, work: NodeWork) -> Reason:
    match work.cause:
        case Hold() as hold:
            held = Unavailability(work.node, UnavailabilityCause.HELD, hold)
            reason = availability_reason(ReasonCode.HELD, held)
            # In a train others may work on a node that one has left; `return` is refused meanwhile.
            at_work = next((t for t in index.targets_on(work.node) if t.phase in IN_FLIGHT_PHASES), None)
            if at_work is None or held.remedy.kind is not RemedyKind.RETURN:
                return reason
            return replace(reason, remedy=target_unavailability(index, at_work).remedy)
        case Target() as other:
            return availability_reason(ReasonCode.OTHER_ROLLOUT, target_unavailability(index, other))
    if work.kind is WorkKind.STAGE:
        remedy = Remedy(RemedyKind.WAIT_FOR_PREPARATION)
        return Reason(ReasonCode.PREPARING, work.node, {"rollout": work.rollout}, remedy=remedy)
    return Reason(ReasonCode(work.kind.value), work.node, remedy=Remedy(RemedyKind.WAIT_FOR_WORK))


def availability_reason(code: ReasonCode, found: Unavailability) -> Reason:
    return Reason(code, found.node, found.params, found.since, found.remedy)
