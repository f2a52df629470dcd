"""A management cluster of tests: objects of Cluster API and Flux, made through the API by a person.

A real server needs the definitions of both; nothing else of them runs there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support.cluster_sandbox import KubernetesApi

JSON = Any

GROUPS = {
    "clusters": "cluster.x-k8s.io/v1beta2",
    "clusterprofiles": "multicluster.x-k8s.io/v1alpha1",
    "gitrepositories": "source.toolkit.fluxcd.io/v1",
    "ocirepositories": "source.toolkit.fluxcd.io/v1",
    "kustomizations": "kustomize.toolkit.fluxcd.io/v1",
    "helmreleases": "helm.toolkit.fluxcd.io/v2",
}
KINDS = {
    "clusters": "Cluster",
    "clusterprofiles": "ClusterProfile",
    "gitrepositories": "GitRepository",
    "ocirepositories": "OCIRepository",
    "kustomizations": "Kustomization",
    "helmreleases": "HelmRelease",
}
NOW = "2026-11-26T12:00:00Z"
"""The time of everything that the tests' controllers write."""

READY: Mapping[str, str] = {
    "Available": "True",
    "RemoteConnectionProbe": "True",
    "RollingOut": "False",
    "Remediating": "False",
    "TopologyReconciled": "True",
    "ControlPlaneMachinesUpToDate": "True",
    "WorkerMachinesUpToDate": "True",
}
"""The conditions of a cluster that may be changed."""


def condition(
    kind: str, status: str, reason: str = "", message: str = "", generation: int | None = 1
) -> dict[str, JSON]:
    found = {"type": kind, "status": status, "reason": reason or kind, "message": message}
    found["lastTransitionTime"] = NOW
    return found if generation is None else {**found, "observedGeneration": generation}


class ClusterFleet:
    """Objects of one namespace of a management cluster."""

    def __init__(self, kubeconfig: Path, namespace: str = "fleet", person: str = "kubectl") -> None:
        self.api = KubernetesApi(kubeconfig, person)
        self.namespace = namespace

    async def __aenter__(self) -> ClusterFleet:
        await self.api.open()
        namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": self.namespace}}
        await self.api.post("/api/v1/namespaces", namespace)
        return self

    async def __aexit__(self, *_: object) -> None:
        for resource in GROUPS:
            for obj in await self.list(resource):
                await self.api.delete(self.path(resource, obj["metadata"]["name"]))
        await self.api.delete(f"/api/v1/namespaces/{self.namespace}")
        await self.api.close()

    def path(self, resource: str, name: str = "", part: str = "") -> str:
        rest = "".join(f"/{each}" for each in (name, part) if each)
        return f"/apis/{GROUPS[resource]}/namespaces/{self.namespace}/{resource}{rest}"

    async def list(self, resource: str) -> Sequence[JSON]:
        return list((await self.api.get(self.path(resource)))["items"] or ())

    async def get(self, resource: str, name: str) -> JSON:
        return await self.api.get(self.path(resource, name))

    async def find(self, resource: str, name: str) -> JSON:
        return await self.api.find(self.path(resource, name))

    async def create(
        self, resource: str, name: str, spec: JSON, *, labels: Mapping[str, str] | None = None
    ) -> JSON:
        body = {
            "apiVersion": GROUPS[resource],
            "kind": KINDS[resource],
            "metadata": {"name": name, "namespace": self.namespace, "labels": dict(labels or {})},
            "spec": spec,
        }
        return await self.api.post(self.path(resource), body)

    async def edit(self, resource: str, name: str, body: JSON) -> JSON:
        """Merge into an object, as `kubectl patch --type=merge`."""
        return await self.api.merge(self.path(resource, name), body)

    async def set_status(self, resource: str, name: str, status: JSON) -> JSON:
        """Merge into the status, as a controller writes it."""
        return await self.api.merge(self.path(resource, name, "status"), {"status": status})

    async def delete(self, resource: str, name: str) -> None:
        await self.api.delete(self.path(resource, name))

    async def add_cluster(
        self, name: str, labels: Mapping[str, str] | None = None, version: str = "v1.30.0", host: str = ""
    ) -> JSON:
        """Create a cluster that is ready."""
        spec = {
            "controlPlaneEndpoint": {"host": host or f"{name}.example.com", "port": 6443},
            "topology": {"classRef": {"name": "base"}, "version": version},
        }
        await self.create("clusters", name, spec, labels=labels)
        return await self.set_conditions(name)

    async def set_conditions(self, name: str, *, initialized: bool = True, **changes: str) -> JSON:
        """Set the status of a cluster: that of a ready one, with some conditions changed."""
        generation = (await self.get("clusters", name))["metadata"]["generation"]
        conditions = [
            condition(kind, status, f"{kind}Reason", f"{kind} is {status}", generation)
            for kind, status in {**READY, **changes}.items()
        ]
        status = {
            "conditions": conditions,
            "initialization": {"controlPlaneInitialized": initialized},
            "observedGeneration": generation,
        }
        return await self.set_status("clusters", name, status)
