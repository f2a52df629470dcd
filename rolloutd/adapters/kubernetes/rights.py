"""Which rights rolloutd needs in a cluster, and which of them it lacks, in words.

The table is the whole of what the adapter asks of the API server; the
ClusterRole under deploy/ grants this and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass

from rolloutd.adapters.kubernetes.answers import ApiError, ClusterUnreachable
from rolloutd.adapters.kubernetes.cluster import Cluster, path_of


@dataclass(frozen=True, slots=True)
class Right:
    """One verb on one resource, and what it is needed for."""

    verb: str
    resource: str
    purpose: str
    group: str = ""
    subresource: str = ""

    @property
    def words(self) -> str:
        """The right as a person would look for it in a role."""
        part = f"/{self.subresource}" if self.subresource else ""
        group = f" ({self.group})" if self.group else ""
        return f"{self.verb} {self.resource}{part}{group}"


RIGHTS = (
    Right("get", "nodes", "to look at a node before anything is done to it"),
    Right("list", "nodes", "to know the cluster's nodes"),
    Right("watch", "nodes", "to see at once when a node changes"),
    Right("patch", "nodes", "to cordon and uncordon"),
    Right("get", "pods", "to look at a pod"),
    Right("list", "pods", "to know which pods are on a node"),
    Right("watch", "pods", "to see when the last pod has left a node"),
    Right("create", "pods", "to drain", subresource="eviction"),
    Right("get", "poddisruptionbudgets", "to say why a budget holds a pod", group="policy"),
    Right("list", "poddisruptionbudgets", "to say which budgets hold a pod", group="policy"),
    Right(
        "create", "selfsubjectaccessreviews", "to tell which rights are missing", group="authorization.k8s.io"
    ),
)


async def missing_rights(cluster: Cluster) -> list[str]:
    """Return one sentence per missing right; none when all is well.

    A cluster that cannot be asked, or does not let us ask, is one sentence too.
    """
    missing: list[str] = []
    for right in RIGHTS:
        try:
            why = await _denied(cluster, right)
        except ClusterUnreachable as error:
            return [str(error)]
        except ApiError as error:
            return [f"cluster {cluster.name} does not let us ask for our rights: {error}"]
        if why is not None:
            reason = f": {why}" if why else ""
            missing.append(f"cluster {cluster.name}: may not {right.words}, needed {right.purpose}{reason}")
    return missing


async def _denied(cluster: Cluster, right: Right) -> str | None:
    """Return why the right is not ours, in the server's words; None when it is."""
    asked = {"verb": right.verb, "resource": right.resource, "group": right.group}
    if right.subresource:
        asked["subresource"] = right.subresource
    review = await cluster.post(
        path_of("selfsubjectaccessreviews", group="authorization.k8s.io/v1"),
        {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": asked},
        },
    )
    status = review["status"]
    return None if status.get("allowed") else str(status.get("reason") or "")
