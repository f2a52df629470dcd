"""Events of Kubernetes about an object.

An event has the name of its object and its key, so a repetition raises its count, also after a restart.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from machines.model.timefmt import format_rfc3339
from rolloutd.adapters.kubernetes.api_errors import ApiError
from rolloutd.adapters.kubernetes.cluster import FIELD_MANAGER, Cluster, api_path
from rolloutd.ports import JSON

NODES_NAMESPACE = "default"
"""The only namespace in which the API server accepts events about an object without a namespace."""

MAX_MESSAGE_LENGTH = 1000
"""The API server refuses events with longer messages than 1,024 bytes."""


@dataclass(frozen=True, slots=True)
class ObjectEvent:
    """One event; a repetition has the same `key`."""

    key: str
    reason: str
    message: str
    at: float
    is_warning: bool


async def write_event(cluster: Cluster, subject: Mapping[str, str], event: ObjectEvent) -> None:
    """Write an event about an object; raises ApiError and ClusterUnreachable.

    `subject` has apiVersion, kind, name and uid of the object, and its namespace if it has one.
    """
    body = _body(subject, event)
    namespace = body["metadata"]["namespace"]
    try:
        await cluster.post(api_path("events", namespace=namespace), body)
    except ApiError as error:
        # 409: an event of this name exists, so it is a repetition.
        if error.status != 409:
            raise
        await _repeat(cluster, body)


async def _repeat(cluster: Cluster, body: Mapping[str, JSON]) -> None:
    """Raise the count of an event that exists; the answer to a first patch has the present count."""
    path = api_path("events", body["metadata"]["name"], namespace=body["metadata"]["namespace"])
    present = await cluster.patch(path, {"message": body["message"], "lastTimestamp": body["lastTimestamp"]})
    await cluster.patch(path, {"count": int(present.get("count") or 1) + 1})


def _body(subject: Mapping[str, str], event: ObjectEvent) -> dict[str, JSON]:
    at = format_rfc3339(event.at)
    key = f"{subject['uid']}/{event.key}"
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {
            "name": f"{subject['name']}.{hashlib.sha256(key.encode()).hexdigest()[:16]}",
            "namespace": subject.get("namespace", NODES_NAMESPACE),
        },
        "involvedObject": dict(subject),
        "type": "Warning" if event.is_warning else "Normal",
        "reason": event.reason,
        "message": event.message[:MAX_MESSAGE_LENGTH],
        "source": {"component": FIELD_MANAGER},
        "reportingComponent": FIELD_MANAGER,
        "firstTimestamp": at,
        "lastTimestamp": at,
        "count": 1,
    }
