"""Rights that inventories and changes of clusters need; deploy/kubernetes/clusters.yaml grants no others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rolloutd.adapters.clusters.cluster_watch import RESOURCES
from rolloutd.adapters.clusters.views import CLUSTER_API
from rolloutd.adapters.kubernetes.api_errors import ApiError
from rolloutd.adapters.kubernetes.cluster import Cluster
from rolloutd.adapters.kubernetes.permissions import Permission, find_missing_permissions

SOURCES = "source.toolkit.fluxcd.io"
MODULES: Mapping[str, str] = {
    "kustomize.toolkit.fluxcd.io": "kustomizations",
    "helm.toolkit.fluxcd.io": "helmreleases",
}
_MODULE_VERBS: Mapping[str, str] = {
    "get": "to read a module before it is changed",
    "list": "to find the module of a run",
    "watch": "to follow the runs",
    "create": "to create a module that the plan creates",
    "patch": "to move a module to a source",
}


async def find_missing_cluster_permissions(
    cluster: Cluster, group: str, namespace: str, *, reads_secrets: bool
) -> Sequence[str]:
    """Return one sentence per missing right of the inventory and of the served kinds of changes."""
    rights = [
        Permission(verb, RESOURCES[group], purpose, group, namespace=namespace)
        for verb, purpose in (("list", "to know the clusters"), ("watch", "to see their conditions"))
    ]
    if group == CLUSTER_API:
        rights += [
            Permission(verb, RESOURCES[group], purpose, group, namespace=namespace)
            for verb, purpose in (("get", "to read a cluster"), ("patch", "to set a topology's version"))
        ]
    if reads_secrets:
        rights.append(Permission("get", "secrets", "to check the kubeconfigs", namespace=namespace))
    if await _is_served(cluster, SOURCES):
        for kind in ("gitrepositories", "ocirepositories"):
            purposes = (("get", "to read a source"), ("create", "to make one for each pin"))
            unused = (("list", "to look for unused ones"), ("delete", "to remove an unused one"))
            for verb, purpose in (*purposes, ("patch", "to apply one"), *unused):
                rights.append(Permission(verb, kind, purpose, SOURCES, namespace=namespace))
        for module_group, kind in MODULES.items():
            for verb, purpose in _MODULE_VERBS.items():
                rights.append(Permission(verb, kind, purpose, module_group, namespace=namespace))
    return await find_missing_permissions(cluster, permissions=rights)


async def _is_served(cluster: Cluster, group: str) -> bool:
    try:
        await cluster.get(f"/apis/{group}")
    except ApiError as error:
        if error.status == 404:
            return False
        raise
    return True
