"""The objects of a cluster, their versions, and everybody who watches them.

One counter gives every write its version, as etcd does.  The events of the past
are kept until they are compacted; whoever wants to watch from before that is
told that the version is too old.
"""

from __future__ import annotations

import asyncio
import copy
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from tests.support.fake_kubernetes import patches
from tests.support.fake_kubernetes.errors import ApiRefusal, conflict, not_found

JSON = Any

CHANGES_KEPT = 20_000
"""Events kept for watches that come back: far more than any test makes while one is away."""

Key = tuple[str, str, str]
"""Resource, namespace (empty where there is none), name."""


RBAC = "rbac.authorization.k8s.io"
ADMISSION = "admissionregistration.k8s.io"
CLUSTER_API = "cluster.x-k8s.io"
FLUX_SOURCE = "source.toolkit.fluxcd.io"
FLUX_KUSTOMIZE = "kustomize.toolkit.fluxcd.io"
FLUX_HELM = "helm.toolkit.fluxcd.io"
CLUSTER_PROFILES = "multicluster.x-k8s.io"


@dataclass(frozen=True, slots=True)
class Resource:
    """What the server knows of one kind; `strict`: it judges every field.

    `default_status` is what the schema gives to an object without a status.
    """

    kind: str
    group: str = ""
    namespaced: bool = True
    generation: bool = False
    strict: bool = False
    default_status: JSON = None
    api: str = "v1"

    @property
    def version(self) -> str:
        """The apiVersion of its objects."""
        return f"{self.group}/{self.api}" if self.group else self.api


UNOBSERVED = {"observedGeneration": -1}
"""The status of an object that no controller has seen."""

RESOURCES: dict[str, Resource] = {
    "namespaces": Resource("Namespace", namespaced=False),
    "nodes": Resource("Node", namespaced=False),
    "pods": Resource("Pod"),
    "configmaps": Resource("ConfigMap"),
    "secrets": Resource("Secret"),
    "jobs": Resource("Job", "batch", strict=True),
    "events": Resource("Event"),
    "replicasets": Resource("ReplicaSet", "apps", generation=True),
    "statefulsets": Resource("StatefulSet", "apps", generation=True),
    "daemonsets": Resource("DaemonSet", "apps", generation=True),
    "poddisruptionbudgets": Resource("PodDisruptionBudget", "policy", generation=True),
    "serviceaccounts": Resource("ServiceAccount", strict=True),
    "persistentvolumeclaims": Resource("PersistentVolumeClaim", strict=True),
    "deployments": Resource("Deployment", "apps", generation=True, strict=True),
    "clusterroles": Resource("ClusterRole", RBAC, namespaced=False, strict=True),
    "clusterrolebindings": Resource("ClusterRoleBinding", RBAC, namespaced=False, strict=True),
    "roles": Resource("Role", RBAC, strict=True),
    "rolebindings": Resource("RoleBinding", RBAC, strict=True),
    "leases": Resource("Lease", "coordination.k8s.io"),
    # What is defined here does nothing: the fake serves our two kinds in any case.
    "customresourcedefinitions": Resource(
        "CustomResourceDefinition", "apiextensions.k8s.io", namespaced=False, generation=True
    ),
    "maintenancerollouts": Resource(
        "MaintenanceRollout", "rolloutd.io", generation=True, default_status=UNOBSERVED
    ),
    "maintenancevotes": Resource("MaintenanceVote", "rolloutd.io", generation=True),
    "validatingadmissionpolicies": Resource(
        "ValidatingAdmissionPolicy", ADMISSION, namespaced=False, generation=True
    ),
    "validatingadmissionpolicybindings": Resource(
        "ValidatingAdmissionPolicyBinding", ADMISSION, namespaced=False, generation=True
    ),
    "clusters": Resource("Cluster", CLUSTER_API, generation=True, api="v1beta2"),
    "clusterprofiles": Resource("ClusterProfile", CLUSTER_PROFILES, generation=True, api="v1alpha1"),
    "gitrepositories": Resource("GitRepository", FLUX_SOURCE, generation=True, default_status=UNOBSERVED),
    "ocirepositories": Resource("OCIRepository", FLUX_SOURCE, generation=True, default_status=UNOBSERVED),
    "kustomizations": Resource("Kustomization", FLUX_KUSTOMIZE, generation=True, default_status=UNOBSERVED),
    "helmreleases": Resource("HelmRelease", FLUX_HELM, generation=True, api="v2", default_status=UNOBSERVED),
}
FLEET_KINDS = tuple(RESOURCES)[-6:]
"""What a management cluster has: each with a status of its own, and patched without a schema's merge keys."""


@dataclass(frozen=True, slots=True)
class Change:
    """One event of the past: what a thing was before and is after; None where it did not exist."""

    version: int
    resource: str
    before: JSON
    after: JSON


@dataclass(slots=True)
class Objects:
    """All objects of the cluster; `changed` is called after each write."""

    listeners: list[Callable[[Change], None]] = field(default_factory=list)
    version: int = 1
    compacted: int = 0
    _things: dict[Key, JSON] = field(default_factory=dict)
    _changes: list[Change] = field(default_factory=list)
    _written: asyncio.Event = field(default_factory=asyncio.Event)

    # -- reading

    def find(self, resource: str, namespace: str, name: str) -> JSON:
        """Return a copy of an object, or None."""
        return copy.deepcopy(self._things.get((resource, namespace, name)))

    def get(self, resource: str, namespace: str, name: str) -> JSON:
        """Return a copy of an object; raises a 404."""
        found = self.find(resource, namespace, name)
        if found is None:
            raise not_found(resource, name)
        return found

    def all(self, resource: str, namespace: str = "") -> Iterator[JSON]:
        """Yield the objects themselves, in order; not to be changed."""
        wanted = (k for k in self._things if k[0] == resource and (not namespace or k[1] == namespace))
        for key in sorted(wanted):
            if key in self._things:
                yield self._things[key]

    def changes_after(self, resource: str, after: int) -> list[Change]:
        """Return the changes of a resource after a version."""
        start = len(self._changes)
        while start and self._changes[start - 1].version > after:
            start -= 1
        return [change for change in self._changes[start:] if change.resource == resource]

    async def wait(self, after: int) -> None:
        """Return once something was written after this version."""
        while self.version <= after:
            written = self._written
            await written.wait()

    # -- writing

    def create(self, resource: str, thing: JSON, *, manager: str = "fake", operation: str = "Update") -> JSON:
        """Make an object; raises a 409 when there is one of its name."""
        kind = RESOURCES[resource]
        thing = copy.deepcopy(thing)
        meta = thing.setdefault("metadata", {})
        namespace = meta.get("namespace", "") if kind.namespaced else ""
        if "name" not in meta:
            meta["name"] = meta.pop("generateName") + uuid.uuid4().hex[:5]
        if (resource, namespace, meta["name"]) in self._things:
            raise ApiRefusal(409, f'{resource} "{meta["name"]}" already exists', reason="AlreadyExists")
        meta |= {"uid": str(uuid.uuid4()), "creationTimestamp": format_time()}
        if kind.generation:
            meta["generation"] = 1
        if kind.default_status is not None:
            thing.setdefault("status", copy.deepcopy(kind.default_status))
        thing |= {"apiVersion": kind.version, "kind": kind.kind}
        applied = patches.paths_of(thing) if operation == "Apply" else None
        patches.record_manager(None, thing, manager, "", format_time(), applied)
        return self._put(resource, None, thing)

    def update(
        self,
        resource: str,
        before: JSON,
        after: JSON,
        *,
        manager: str = "fake",
        subresource: str = "",
        applied: patches.Paths | None = None,
    ) -> JSON:
        """Write an object that was read as `before`; raises a 409 when it has changed since.

        `applied` are the fields of a server-side apply.
        """
        meta = after["metadata"]
        key = (resource, meta.get("namespace", ""), meta["name"])
        current = self._things.get(key)
        if current is None:
            raise not_found(resource, meta["name"])
        if meta.get("resourceVersion", "") not in ("", current["metadata"]["resourceVersion"]):
            raise conflict(resource, meta["name"])
        after = copy.deepcopy(after)
        kept = ("uid", "creationTimestamp", "managedFields", "generation", "deletionTimestamp")
        after["metadata"] |= {k: current["metadata"][k] for k in kept if k in current["metadata"]}
        if RESOURCES[resource].generation and after.get("spec") != current.get("spec"):
            after["metadata"]["generation"] = current["metadata"].get("generation", 0) + 1
        after["metadata"]["resourceVersion"] = current["metadata"]["resourceVersion"]
        if after == current and applied is None:
            return copy.deepcopy(current)
        patches.record_manager(current, after, manager, subresource, format_time(), applied)
        if _without_times(after) == _without_times(current):
            return copy.deepcopy(current)
        return self._put(resource, current, after)

    def modify(self, resource: str, thing: JSON, change: Callable[[JSON], None]) -> JSON:
        """Change an object in place, as the server's own controllers do, whatever its version."""
        meta = thing["metadata"]
        current = self._things.get((resource, meta.get("namespace", ""), meta["name"]))
        if current is None or current["metadata"]["uid"] != meta["uid"]:
            return None
        after = copy.deepcopy(current)
        change(after)
        return copy.deepcopy(current) if after == current else self._put(resource, current, after)

    def remove(self, resource: str, thing: JSON) -> None:
        """Take an object away."""
        meta = thing["metadata"]
        before = self._things.pop((resource, meta.get("namespace", ""), meta["name"]))
        last = copy.deepcopy(before)
        self.version += 1
        last["metadata"]["resourceVersion"] = str(self.version)
        self._publish(Change(self.version, resource, last, None))

    def compact(self) -> None:
        """Forget the past: watches that begin before now are told that they are too old; open ones go on."""
        self.compacted = self.version
        self.version += 1

    def _put(self, resource: str, before: JSON, after: JSON) -> JSON:
        self.version += 1
        after["metadata"]["resourceVersion"] = str(self.version)
        meta = after["metadata"]
        self._things[resource, meta.get("namespace", ""), meta["name"]] = after
        self._publish(Change(self.version, resource, before, after))
        return copy.deepcopy(after)

    def _publish(self, change: Change) -> None:
        self._changes.append(change)
        if len(self._changes) > 2 * CHANGES_KEPT:
            del self._changes[:CHANGES_KEPT]
            self.compacted = self._changes[0].version
        written, self._written = self._written, asyncio.Event()
        written.set()
        for each in self.listeners:
            each(change)


def _without_times(thing: JSON) -> JSON:
    """Return an object without the times of its field managers: an apply that changes nothing is no write."""
    managed = [{**each, "time": ""} for each in thing["metadata"].get("managedFields") or ()]
    return {**thing, "metadata": {**thing["metadata"], "managedFields": managed}}


def format_time(after_s: float = 0.0) -> str:
    """Return an instant as the API server writes it."""
    at = datetime.fromtimestamp(datetime.now(UTC).timestamp() + after_s, UTC)
    return at.strftime("%Y-%m-%dT%H:%M:%SZ")


def condition(thing: Mapping[str, JSON], kind: str) -> Mapping[str, JSON]:
    """Return one condition of an object's status, or an empty one."""
    for each in (thing.get("status") or {}).get("conditions") or ():
        if each.get("type") == kind:
            return each
    return {}
