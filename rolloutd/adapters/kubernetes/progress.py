"""Progress that kubectl shows: Events about a node, and its condition MaintenanceInProgress.

Both are for people.  Nothing reads them back but the write of the next one, and a write that fails changes
nothing else.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from machines.model.timefmt import format_rfc3339
from rolloutd.adapters.kubernetes.api_errors import ApiError, ClusterUnreachable
from rolloutd.adapters.kubernetes.cluster import Cluster, retry_transient
from rolloutd.adapters.kubernetes.cordon import Patch, patch_node, read_node
from rolloutd.adapters.kubernetes.nodes import CordonOwner, IsolationRecord, parse_cordon_state
from rolloutd.adapters.kubernetes.object_events import MAX_MESSAGE_LENGTH, ObjectEvent, write_event
from rolloutd.ports import JSON, Ok, ProgressKind, ProgressReport

log = logging.getLogger(__name__)

CONDITION = "MaintenanceInProgress"

CLEAR_RETRY_S = 30.0
"""Limit of the retries of removing the condition: an election of etcd's leader takes seconds."""

REASONS = {
    ProgressKind.ADMITTED: "MaintenanceAdmitted",
    ProgressKind.BLOCKED: "DrainBlocked",
    ProgressKind.ISOLATED: "NodeDrained",
    ProgressKind.ISOLATION_ABORTED: "MaintenanceAborted",
    ProgressKind.MAINTAINED: "NodeMaintained",
    ProgressKind.VERIFIED: "MaintenanceVerified",
    ProgressKind.FAILED: "MaintenanceFailed",
    ProgressKind.RETURNED: "NodeReturned",
}

WARNINGS = frozenset({ProgressKind.BLOCKED, ProgressKind.FAILED, ProgressKind.ISOLATION_ABORTED})

UNCHANGED = Ok("the condition is as it should be")

CONDITION_REASONS = {
    ProgressKind.BLOCKED: "Isolating",
    ProgressKind.ISOLATED: "Maintaining",
    ProgressKind.MAINTAINED: "Verifying",
    ProgressKind.FAILED: "Failed",
}
"""The reports that change the condition of a node that we have isolated."""


async def show_report(cluster: Cluster, name: str, report: ProgressReport) -> None:
    """Write the report as an Event, and into the node's condition; raises ClusterUnreachable and ApiError."""
    try:
        await write_event(cluster, _subject(await read_node(cluster, name)), _event_of(report))
    except (ApiError, ClusterUnreachable):
        # Without the right to write events the condition must still be right.
        await _show_in_condition(cluster, name, report)
        raise
    await _show_in_condition(cluster, name, report)


async def _show_in_condition(cluster: Cluster, name: str, report: ProgressReport) -> None:
    reason = CONDITION_REASONS.get(report.kind)
    if reason is None:
        return

    def decide(node: Mapping[str, JSON]) -> Patch | Ok:
        record = _our_record(cluster, node)
        # The annotation names the first rollout of those that share the isolation; a report may be late.
        if record is None or record.rollout not in (report.rollout, *report.isolated_for):
            return UNCHANGED
        message = f"{report.rollout}, attempt {report.attempt}: {report.text}"
        if len(report.isolated_for) > 1:
            message = f"isolated for {', '.join(report.isolated_for)}; {message}"
        return _patch(node, _condition(record, reason, message, report.at))

    await patch_node(cluster, name, decide, subresource="status")


async def set_condition(cluster: Cluster, name: str, at: float) -> None:
    """Mark a node that we have cordoned; one that is marked stays as it is."""

    def decide(node: Mapping[str, JSON]) -> Patch | Ok:
        record, mark = _our_record(cluster, node), _find_mark(node)
        # A mark of another time was left by an attempt whose end could not be written.
        if record is None or (mark or {}).get("lastTransitionTime") == format_rfc3339(record.began_at(at)):
            return UNCHANGED
        return _patch(
            node, _condition(record, "Isolating", f"{record.rollout}, attempt {record.attempt}", at)
        )

    await _try_patch(cluster, name, decide)


async def clear_condition(cluster: Cluster, name: str) -> None:
    """Remove the mark of a node that no rollout has isolated any more."""

    def decide(node: Mapping[str, JSON]) -> Patch | Ok:
        if _our_record(cluster, node) is not None or _find_mark(node) is None:
            return UNCHANGED
        return _patch(node, {"$patch": "delete", "type": CONDITION})

    # Nothing removes it later.
    await _try_patch(cluster, name, decide, retry_s=CLEAR_RETRY_S)


async def _try_patch(
    cluster: Cluster,
    name: str,
    decide: Callable[[Mapping[str, JSON]], Patch | Ok],
    *,
    retry_s: float = 0.0,
) -> None:
    try:
        await retry_transient(
            lambda: patch_node(cluster, name, decide, subresource="status"), timeout_s=retry_s
        )
    except (ApiError, ClusterUnreachable) as error:
        log.warning("%s: the condition %s could not be written: %s", name, CONDITION, error)


def _our_record(cluster: Cluster, node: Mapping[str, JSON]) -> IsolationRecord | None:
    cordon = parse_cordon_state(node, domain=cluster.domain)
    return None if cordon.cordon_owner is CordonOwner.NONE else cordon.record


def _find_mark(node: Mapping[str, JSON]) -> Mapping[str, JSON] | None:
    conditions = (node.get("status") or {}).get("conditions") or ()
    return next((each for each in conditions if each.get("type") == CONDITION), None)


def _condition(record: IsolationRecord, reason: str, message: str, at: float) -> dict[str, JSON]:
    return {
        "type": CONDITION,
        "status": "True",
        "reason": reason,
        "message": message[:MAX_MESSAGE_LENGTH],
        "lastHeartbeatTime": format_rfc3339(at),
        "lastTransitionTime": format_rfc3339(record.began_at(at)),
    }


def _patch(node: Mapping[str, JSON], condition: dict[str, JSON]) -> Patch:
    """Return a patch of the version of the node that was read, so that no late write restores a condition."""
    meta = {"resourceVersion": node["metadata"]["resourceVersion"]}
    return {"metadata": meta, "status": {"conditions": [condition]}}, "changed the condition"


def _event_of(report: ProgressReport) -> ObjectEvent:
    return ObjectEvent(
        f"{report.rollout}/{report.attempt}/{report.kind}",
        REASONS[report.kind],
        report.text,
        report.at,
        is_warning=report.kind in WARNINGS,
    )


def _subject(node: Mapping[str, JSON]) -> dict[str, str]:
    meta = node["metadata"]
    return {"apiVersion": "v1", "kind": "Node", "name": meta["name"], "uid": meta["uid"]}
