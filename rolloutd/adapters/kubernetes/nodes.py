"""Readers of node objects: readiness, owner of the cordon, inventory fields.

The node alone identifies the owner of its cordon, so the result survives a restart: our annotation records
what we did, and the server's field managers show whether the cordon is still ours.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum

from machines.model.node import NodeHealth, Observation
from rolloutd.adapters.kubernetes.api_errors import MALFORMED, malformed_answers, require_text
from rolloutd.adapters.kubernetes.cluster import DEFAULT_DOMAIN, FIELD_MANAGER
from rolloutd.ports import JSON

LEGACY_DOMAIN = "rolloutd"
"""Prefix of 0.1: still read; our next write of the node replaces it."""

ISOLATED_BY = "isolated-by"
"""On a node that we cordoned: JSON of rollout, attempt, since (RFC 3339) and the prior unschedulable."""

HOLD = "hold"
"""Set by a person to hold the node: rolloutd leaves its service state as it is; the value is the reason."""

KEPT_FOR = "kept-for"
"""On a node that we left cordoned because a hold was active at the end; the value is the hold's reason."""

SOFT_TAINT = "maintenance"
"""On a node that we will cordon soon, with the effect PreferNoSchedule; the value is since when, as epoch
seconds.
"""

ISOLATED_BY_ANNOTATION = f"{DEFAULT_DOMAIN}/{ISOLATED_BY}"
HOLD_ANNOTATION = f"{DEFAULT_DOMAIN}/{HOLD}"
KEPT_FOR_ANNOTATION = f"{DEFAULT_DOMAIN}/{KEPT_FOR}"

ADAPTER_KIND = "kubernetes"

DELETION_TAINTS = frozenset(
    {"ToBeDeletedByClusterAutoscaler", "karpenter.sh/disrupted", "karpenter.sh/disruption"}
)
"""Taints by which autoscalers announce that they remove a node; the last one is of Karpenter before 1.0."""

UNUSABLE_TAINTS = frozenset(
    {"node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable", "node.kubernetes.io/out-of-service"}
)
"""Taints of an unusable node, even if its Ready condition is still true."""

MAX_REASON_LENGTH = 160
"""Limit of a quoted annotation or condition."""


class CordonOwner(StrEnum):
    """The client that last cordoned or uncordoned a node."""

    NONE = "none"
    OURS = "ours"
    UNCORDONED_BY_OTHER = "lost"
    """rolloutd cordoned the node, and another client uncordoned it."""
    OTHER = "foreign"


@dataclass(frozen=True, slots=True)
class IsolationRecord:
    """The owner annotation: the isolation's rollout and attempt, and the cordon before it."""

    rollout: str
    attempt: int
    since: str
    was_cordoned: bool = False

    @property
    def annotation_value(self) -> str:
        record = {
            "rollout": self.rollout,
            "attempt": self.attempt,
            "since": self.since,
            "unschedulable": self.was_cordoned,
        }
        return json.dumps(record, sort_keys=True)

    def began_at(self, default: float) -> float:
        """Return the start of the isolation (epoch seconds)."""
        try:
            return datetime.fromisoformat(self.since).timestamp()
        except ValueError:  # another client has written the annotation
            return default


@dataclass(frozen=True, slots=True)
class CordonState:
    """The owner of a node's cordon, a sentence about it, and the reason of a hold annotation.

    `left_cordoned` means that the cordon is ours and was left for a hold.
    """

    cordon_owner: CordonOwner
    text: str = ""
    record: IsolationRecord | None = None
    hold_reason: str | None = None
    left_cordoned: bool = False


@dataclass(frozen=True, slots=True)
class NodeView:
    """The used fields of a node: a tenth of its object, which lists every image on the node."""

    name: str
    uid: str
    is_ready: bool
    ready_message: str
    cordon_state: CordonState
    taints: tuple[str, ...] = ()
    is_being_removed: bool = False
    left_isolated_by: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    addresses: Mapping[str, str] = field(default_factory=dict)
    provider_id: str = ""
    boot_id: str = ""
    machine_id: str = ""
    kubelet_version: str = ""
    lock: str = ""
    """By which annotation another tool has locked the node; "" for none."""

    @property
    def inventory_fields(self) -> tuple[JSON, ...]:
        # A reinstalled machine may register under the old node object: then only its machine id differs.
        return (self.uid, self.labels, self.addresses, self.provider_id, self.machine_id)

    def to_observation(self, node: str, at: float, watch: str, lease_holder: str = "") -> Observation:
        """Return the observation that the watch makes of the node, by the fleet's name.

        `lease_holder` has a lease of it.
        """
        health, why, by_other = self._health()
        # A tool locks a node before it cordons it, and a person's annotation says more than their cordon.
        held = (self.cordon_state.hold_reason or "") if self.is_ready else ""
        lock = held or self.lock or (f"{lease_holder} holds its lease" if lease_holder else "")
        if lock:
            why, by_other = lock, True
        return Observation(
            node,
            health,
            at,
            why,
            cordoned_by_other=by_other,
            left_isolated_by=self.left_isolated_by,
            is_leaving=self.is_being_removed,
            is_locked=bool(lock),
            watch=watch,
        )

    def _health(self) -> tuple[NodeHealth, str, bool]:
        """Return the health, its cause, and whether another client keeps the node out of service."""
        cordon = self.cordon_state
        is_foreign = cordon.cordon_owner is CordonOwner.OTHER
        if not self.is_ready:
            return NodeHealth.DOWN, self.ready_message, is_foreign
        if cordon.hold_reason is not None:
            return NodeHealth.UP, cordon.hold_reason, True
        if is_foreign:
            return NodeHealth.UP, cordon.text, True
        if cordon.cordon_owner is CordonOwner.OURS:
            return NodeHealth.DOWN, cordon.text, False
        taints = ", ".join(self.taints)
        if self.is_being_removed:
            return NodeHealth.UP, f"it is being removed: {taints}", True
        why = f"Ready; kubelet {self.kubelet_version}; boot {self.boot_id[:8]}"
        return NodeHealth.UP, why + (f"; taints {taints}" if taints else ""), False


def find_annotation(node: Mapping[str, JSON], name: str, domain: str = DEFAULT_DOMAIN) -> str | None:
    """Return one of our annotations, from before an upgrade too; None if the node has none."""
    annotations = node["metadata"].get("annotations") or {}
    found = (annotations.get(f"{each}/{name}") for each in (domain, LEGACY_DOMAIN))
    return next((str(value) for value in found if value is not None), None)


@malformed_answers()
def parse_node(
    node: Mapping[str, JSON],
    uncordoned_record: str | None = None,
    domain: str = DEFAULT_DOMAIN,
    lock_annotations: Sequence[str] = (),
) -> NodeView:
    """Return the used fields of a node object; `uncordoned_record` as for parse_cordon_state."""
    meta, spec, status = node["metadata"], node.get("spec") or {}, node.get("status") or {}
    taints = tuple(sorted(str(taint["key"]) for taint in spec.get("taints") or ()))
    ready, condition = _parse_readiness(node, taints)
    node_info = status.get("nodeInfo") or {}
    return NodeView(
        name=require_text(meta["name"]),
        uid=require_text(meta["uid"]),
        is_ready=ready,
        ready_message=condition,
        cordon_state=parse_cordon_state(node, uncordoned_record=uncordoned_record, domain=domain),
        taints=taints,
        is_being_removed=bool(meta.get("deletionTimestamp") or DELETION_TAINTS.intersection(taints)),
        left_isolated_by=ADAPTER_KIND
        if find_annotation(node, KEPT_FOR, domain) is not None and find_annotation(node, HOLD, domain) is None
        else "",
        labels=dict(meta.get("labels") or {}),
        # Reversed, so that the first of several addresses of a type wins.
        addresses={a["type"]: a["address"] for a in reversed(status.get("addresses") or ())},
        provider_id=str(spec.get("providerID") or ""),
        boot_id=str(node_info.get("bootID") or ""),
        machine_id=str(node_info.get("machineID") or ""),
        kubelet_version=str(node_info.get("kubeletVersion") or ""),
        lock=_find_lock(meta.get("annotations") or {}, lock_annotations),
    )


def _find_lock(annotations: Mapping[str, JSON], keys: Sequence[str]) -> str:
    found = next((key for key in keys if annotations.get(key) is not None), None)
    return "" if found is None else f"annotated {found}: {str(annotations[found])[:MAX_REASON_LENGTH]}"


@malformed_answers()
def readiness(node: Mapping[str, JSON]) -> tuple[bool, str]:
    return _parse_readiness(
        node, tuple(taint["key"] for taint in (node.get("spec") or {}).get("taints") or ())
    )


@malformed_answers()
def parse_cordon_state(
    node: Mapping[str, JSON],
    rollout: str | None = None,
    *,
    uncordoned_record: str | None = None,
    domain: str = DEFAULT_DOMAIN,
) -> CordonState:
    """Return the owner of a node's cordon.

    With `rollout`, another rollout's isolation counts as another client's.  `uncordoned_record` is the owner
    annotation seen when another client uncordoned the node: if the server keeps no field managers, a later
    cordon under the same annotation is not ours.
    """
    is_cordoned = bool((node.get("spec") or {}).get("unschedulable"))
    isolated_by, kept_for = (find_annotation(node, name, domain) for name in (ISOLATED_BY, KEPT_FOR))
    record, held = parse_isolation_record(isolated_by), find_annotation(node, HOLD, domain)
    hold = (
        None
        if held is None
        else f"annotated {domain}/{HOLD}: {held[:MAX_REASON_LENGTH] or 'no reason given'}"
    )
    if not is_cordoned:
        lost = CordonState(
            CordonOwner.UNCORDONED_BY_OTHER,
            "another client uncordoned it after rolloutd cordoned it",
            record,
            hold,
        )
        return CordonState(CordonOwner.NONE, hold_reason=hold) if record is None else lost
    managers = cordon_managers(node)
    if record is None:
        who = f" by {', '.join(sorted(managers))}" if managers else ""
        if kept_for is not None and not managers - {FIELD_MANAGER}:
            text = f"it stays cordoned after our attempt: {kept_for[:MAX_REASON_LENGTH]}"
            return CordonState(CordonOwner.OTHER, text, hold_reason=hold, left_cordoned=True)
        text = "our annotation was removed" if managers == {FIELD_MANAGER} else "not by rolloutd"
        return CordonState(CordonOwner.OTHER, f"cordoned{who}, {text}", hold_reason=hold)
    others = managers - {FIELD_MANAGER}
    if others or (not managers and uncordoned_record == isolated_by):
        who = ", ".join(sorted(others)) or "another client"
        return CordonState(CordonOwner.OTHER, f"cordoned by {who} after rolloutd cordoned it", record, hold)
    text = f"isolated for {record.rollout}, attempt {record.attempt}, since {record.since}"
    if rollout is not None and record.rollout != rollout:
        return CordonState(CordonOwner.OTHER, text, record, hold)
    return CordonState(CordonOwner.OURS, text, record, hold)


def parse_isolation_record(text: JSON) -> IsolationRecord | None:
    """Return the owner annotation's record; None if it is missing or invalid."""
    try:
        fields = json.loads(text)
        return IsolationRecord(
            str(fields["rollout"]),
            int(fields["attempt"]),
            str(fields["since"]),
            bool(fields.get("unschedulable", False)),
        )
    except MALFORMED:  # anyone who may annotate a node writes this text
        return None


def cordon_managers(node: Mapping[str, JSON]) -> frozenset[str]:
    """Return the field managers that own `spec.unschedulable`; empty if the server keeps no record."""
    return frozenset(
        str(entry.get("manager"))
        for entry in node["metadata"].get("managedFields") or ()
        if "f:unschedulable" in ((entry.get("fieldsV1") or {}).get("f:spec") or {})
        and entry.get("manager") != "ancient-changes"  # into which the server folds its oldest entries
    )


def _parse_readiness(node: Mapping[str, JSON], taints: tuple[str, ...]) -> tuple[bool, str]:
    if node["metadata"].get("deletionTimestamp"):
        return False, "the node is being deleted"
    for condition in (node.get("status") or {}).get("conditions") or ():
        if condition.get("type") != "Ready":
            continue
        since = condition.get("lastTransitionTime", "some time")
        why = str(condition.get("message") or condition.get("reason") or "no reason given")[
            :MAX_REASON_LENGTH
        ]
        unusable = UNUSABLE_TAINTS.intersection(taints)
        if condition.get("status") == "True" and not unusable:
            return True, ""
        if condition.get("status") == "True":
            return False, f"tainted {', '.join(sorted(unusable))}"
        # The server sets Unknown once the kubelet has stopped reporting.
        state = "NotReady" if condition.get("status") == "False" else "silent (Ready is unknown)"
        return False, f"{state} since {since}: {why}"
    return False, "its kubelet has never reported"
