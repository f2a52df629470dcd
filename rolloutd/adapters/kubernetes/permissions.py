"""Permissions that rolloutd needs in a cluster; the ClusterRole under deploy/ grants no others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rolloutd.adapters.kubernetes.api_errors import ApiError, ClusterUnreachable
from rolloutd.adapters.kubernetes.cluster import Cluster, api_path
from rolloutd.adapters.kubernetes.object_events import NODES_NAMESPACE


@dataclass(frozen=True, slots=True)
class Permission:
    verb: str
    resource: str
    purpose: str
    group: str = ""
    subresource: str = ""
    namespace: str = ""

    @property
    def text(self) -> str:
        part = f"/{self.subresource}" if self.subresource else ""
        group = f" ({self.group})" if self.group else ""
        return f"{self.verb} {self.resource}{part}{group}"


REQUIRED_PERMISSIONS = (
    Permission("get", "nodes", "to inspect a node before isolating it"),
    Permission("list", "nodes", "to know the cluster's nodes"),
    Permission("watch", "nodes", "to see at once when a node changes"),
    Permission("patch", "nodes", "to cordon and uncordon"),
    Permission("patch", "nodes", "to show the condition of a node in maintenance", subresource="status"),
    Permission("create", "events", "to show a node's progress to kubectl", namespace=NODES_NAMESPACE),
    Permission("patch", "events", "to count an event that repeats", namespace=NODES_NAMESPACE),
    Permission("list", "pods", "to know which pods are on a node"),
    Permission("watch", "pods", "to see when the last pod has left a node"),
    Permission("create", "pods", "to drain", subresource="eviction"),
    Permission("list", "poddisruptionbudgets", "to know which evictions a budget allows", group="policy"),
    Permission("watch", "poddisruptionbudgets", "to evict as soon as a budget allows it", group="policy"),
    Permission(
        "create",
        "selfsubjectaccessreviews",
        "to report which rights are missing",
        group="authorization.k8s.io",
    ),
)


async def find_missing_permissions(
    cluster: Cluster,
    lease_namespace: str = "",
    permissions: Sequence[Permission] = REQUIRED_PERMISSIONS,
) -> list[str]:
    """Return one sentence per missing permission, or one if the cluster does not answer the review."""
    missing: list[str] = []
    of_leases = [
        Permission(
            verb,
            "leases",
            "to see which nodes other tools lock",
            group="coordination.k8s.io",
            namespace=lease_namespace,
        )
        for verb in ("list", "watch")
        if lease_namespace
    ]
    for permission in (*permissions, *of_leases):
        try:
            reason_text = await _denial_reason(cluster, permission)
        except ClusterUnreachable as error:
            # Each of the other questions would wait for the same silent server.
            return [str(error)]
        except ApiError as error:
            return [f"cluster {cluster.name} refused the review of our rights: {error}"]
        if reason_text is not None:
            reason = f": {reason_text}" if reason_text else ""
            missing.append(
                f"cluster {cluster.name}: may not {permission.text}, needed {permission.purpose}{reason}"
            )
    return missing


async def _denial_reason(cluster: Cluster, permission: Permission) -> str | None:
    """Return the server's reason for a denied permission, perhaps empty; None if it is granted."""
    attributes = {"verb": permission.verb, "resource": permission.resource, "group": permission.group}
    if permission.subresource:
        attributes["subresource"] = permission.subresource
    if permission.namespace:
        attributes["namespace"] = permission.namespace
    review = await cluster.post(
        api_path("selfsubjectaccessreviews", group="authorization.k8s.io/v1"),
        {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": attributes},
        },
    )
    status = review["status"]
    return None if status.get("allowed") else str(status.get("reason") or "")
