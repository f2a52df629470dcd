"""Cluster and ClusterProfile objects: the used fields, and what their conditions say."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from machines.model.node import NodeHealth, Observation
from rolloutd.adapters.kubernetes.api_errors import malformed_answers, require_text
from rolloutd.ports import JSON

CLUSTER_API: Final = "cluster.x-k8s.io"
CLUSTER_PROFILES: Final = "multicluster.x-k8s.io"
PAUSED_ANNOTATION: Final = "cluster.x-k8s.io/paused"

CLUSTER_PROPERTY: Final = "cluster.clusterset.k8s.io"
"""Property of a ClusterProfile with an identity that survives renaming (KEP-2149)."""

MAX_OBJECT_BYTES = 16 * 1024
"""Limit of the object that plans may read: the scalars of a Cluster are below 4 KiB."""

MAX_DEPTH = 8
"""Depth of the object that plans may read; a Cluster's topology variables are at five."""

MAX_MESSAGE_CHARS = 200
"""Characters of a condition's message in a reason."""


class Availability(StrEnum):
    """Values of the variable `status`, which quarantine a cluster: it must not be changed now."""

    PLANNED = "planned"
    """Its control plane is not initialised."""
    PAUSED = "paused"
    OFFLINE = "offline"
    """Its API does not answer the management cluster."""


@dataclass(frozen=True, slots=True)
class Condition:
    """One condition; `status` is True, False or Unknown."""

    type: str
    status: str
    reason: str = ""
    message: str = ""
    generation: int = 0

    @property
    def text(self) -> str:
        detail = f": {self.message[:MAX_MESSAGE_CHARS]}" if self.message else ""
        return f"{self.type} is {self.status}, {self.reason or 'without a reason'}{detail}"


@dataclass(frozen=True, slots=True)
class ClusterView:
    """The used fields of a Cluster or ClusterProfile.

    `name` is `NAMESPACE/NAME`.  `content` is what plans may read of the object.  `blocker` is why it may not
    be disturbed while it is up.
    """

    name: str
    uid: str
    identity: str
    labels: Mapping[str, str] = field(default_factory=dict)
    content: Mapping[str, JSON] = field(default_factory=dict)
    is_initialized: bool = False
    is_being_removed: bool = False
    status: Availability | None = None
    health: NodeHealth = NodeHealth.UNKNOWN
    why: str = ""
    blocker: str = ""

    @property
    def namespace(self) -> str:
        return self.name.partition("/")[0]

    @property
    def object_name(self) -> str:
        return self.name.partition("/")[2]

    @property
    def inventory_fields(self) -> tuple[JSON, ...]:
        return (self.uid, self.identity, self.labels, self.content, self.is_initialized, self.status)

    def to_observation(self, node: str, at: float, watch: str) -> Observation:
        """Return the observation that the watch makes of the cluster."""
        held = bool(self.blocker or self.is_being_removed)
        why = "it is being deleted" if self.is_being_removed else self.blocker or self.why
        return Observation(
            node,
            self.health,
            at,
            why,
            cordoned_by_other=held,
            is_leaving=self.is_being_removed,
            is_locked=bool(self.blocker),
            watch=watch,
        )


@malformed_answers()
def parse_cluster(obj: Mapping[str, JSON]) -> ClusterView:
    """Return the used fields of a Cluster of either version of the API."""
    meta, spec, status = obj["metadata"], obj.get("spec") or {}, obj.get("status") or {}
    conditions = read_conditions(status)
    initialized = _is_initialized(status, conditions)
    paused = bool(spec.get("paused")) or PAUSED_ANNOTATION in (meta.get("annotations") or {})
    probe = conditions.get("RemoteConnectionProbe")
    availability = None
    if not initialized:
        availability = Availability.PLANNED
    elif paused:
        availability = Availability.PAUSED
    elif probe is not None and probe.status != "True":
        availability = Availability.OFFLINE
    health, why = _health(meta, conditions, initialized, probe)
    disturbed = (conditions.get(kind) for kind in ("RollingOut", "Remediating"))
    blockers = [each.text for each in disturbed if each is not None and each.status != "False"]
    uid = require_text(meta["uid"])
    return ClusterView(
        name=f"{require_text(meta['namespace'])}/{require_text(meta['name'])}",
        uid=uid,
        identity=uid,
        labels=dict(meta.get("labels") or {}),
        content=_readable(obj),
        is_initialized=initialized,
        is_being_removed=bool(meta.get("deletionTimestamp")),
        status=availability,
        health=health,
        why=why,
        blocker="it is paused" if paused else "; ".join(blockers) if health is NodeHealth.UP else "",
    )


@malformed_answers()
def parse_profile(obj: Mapping[str, JSON]) -> ClusterView:
    meta, status = obj["metadata"], obj.get("status") or {}
    healthy = read_conditions(status).get("ControlPlaneHealthy")
    properties = {each["name"]: each["value"] for each in status.get("properties") or ()}
    uid = require_text(meta["uid"])
    if healthy is None:
        health, why = NodeHealth.UNKNOWN, "its manager reports no ControlPlaneHealthy"
    else:
        sights = {"True": NodeHealth.UP, "False": NodeHealth.DOWN}
        health, why = sights.get(healthy.status, NodeHealth.UNKNOWN), healthy.text
    return ClusterView(
        name=f"{require_text(meta['namespace'])}/{require_text(meta['name'])}",
        uid=uid,
        identity=require_text(properties.get(CLUSTER_PROPERTY) or uid),
        labels=dict(meta.get("labels") or {}),
        content=_readable(obj),
        is_initialized=healthy is not None,
        is_being_removed=bool(meta.get("deletionTimestamp")),
        status=None if healthy is not None else Availability.PLANNED,
        health=health,
        why=why,
    )


def _health(
    meta: Mapping[str, JSON],
    conditions: Mapping[str, Condition],
    initialized: bool,
    probe: Condition | None,
) -> tuple[NodeHealth, str]:
    """Return the health by the conditions that follow the present state; initialised says nothing of it."""
    if not initialized:
        return NodeHealth.DOWN, "its control plane is not initialised"
    if probe is not None and probe.status != "True":
        return NodeHealth.DOWN, probe.text
    available = conditions.get("Available") or conditions.get("Ready")
    if available is None:
        return NodeHealth.UNKNOWN, "it reports no condition Available"
    generation = int(meta.get("generation") or 0)
    # What the controller wrote of an older spec says nothing of this one.
    if 0 < available.generation < generation:
        return NodeHealth.DOWN, f"Available is of generation {available.generation}, not yet of {generation}"
    if available.status == "True":
        return NodeHealth.UP, available.text
    return NodeHealth.DOWN if available.status == "False" else NodeHealth.UNKNOWN, available.text


def read_conditions(status: Mapping[str, JSON]) -> dict[str, Condition]:
    """Return the conditions; an object of v1beta1 has the present ones below `v1beta2`."""
    later = status.get("v1beta2") or {}
    return _parse_conditions(later.get("conditions") or status.get("conditions"))


def _is_initialized(status: Mapping[str, JSON], conditions: Mapping[str, Condition]) -> bool:
    condition = conditions.get("ControlPlaneInitialized")
    return (
        bool((status.get("initialization") or {}).get("controlPlaneInitialized"))
        or bool(status.get("controlPlaneReady"))
        or (condition is not None and condition.status == "True")
    )


def _parse_conditions(found: JSON) -> dict[str, Condition]:
    return {
        require_text(each["type"]): Condition(
            require_text(each["type"]),
            str(each.get("status")),
            str(each.get("reason") or ""),
            str(each.get("message") or ""),
            int(each.get("observedGeneration") or 0),
        )
        for each in found or ()
    }


def _readable(obj: Mapping[str, JSON]) -> Mapping[str, JSON]:
    """Return what plans may read of an object: names and labels, and the scalars of its spec."""
    meta = obj["metadata"]
    kept = {
        "metadata": {key: meta[key] for key in ("name", "namespace", "uid", "labels") if key in meta},
        "spec": _scalars(obj.get("spec") or {}, MAX_DEPTH),
    }
    if len(json.dumps(kept)) > MAX_OBJECT_BYTES:
        # A part could lack what a plan reads without a word of it, so all of the spec is left out.
        return {"metadata": kept["metadata"]}
    return kept


def _scalars(value: JSON, depth: int) -> JSON:
    """Return an object's fields that are scalars, without its lists."""
    if not depth:
        return {}
    return {
        key: _scalars(each, depth - 1) if isinstance(each, dict) else each
        for key, each in value.items()
        if isinstance(each, dict | str | int | float | bool)
    }
