"""What the API server says of itself: enough for kubectl to find its way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.support.fake_kubernetes.objects import (
    ADMISSION,
    CLUSTER_API,
    CLUSTER_PROFILES,
    FLUX_HELM,
    FLUX_KUSTOMIZE,
    FLUX_SOURCE,
    RBAC,
    RESOURCES,
)

JSON = Any

VERBS = ["create", "delete", "get", "list", "patch", "update", "watch"]
GROUPS: dict[str, str] = dict.fromkeys(
    (
        "apiextensions.k8s.io",
        "apps",
        "authentication.k8s.io",
        "authorization.k8s.io",
        "coordination.k8s.io",
        "policy",
        RBAC,
        ADMISSION,
        "rolloutd.io",
        FLUX_SOURCE,
        FLUX_KUSTOMIZE,
    ),
    "v1",
) | {FLUX_HELM: "v2", CLUSTER_API: "v1beta2", CLUSTER_PROFILES: "v1alpha1"}
"""The version of each group that is served, unless a server has another one."""

SHORT_NAMES = {"maintenancerollouts": ["mr"], "maintenancevotes": ["mv"]}
VERSION = {"major": "1", "minor": "36", "gitVersion": "v1.36.2", "platform": "linux/amd64"}


def discovery_document(path: str, groups: Mapping[str, str]) -> JSON:
    """Return the document at a discovery path; None where it is none."""
    if path == "/version":
        return VERSION
    if path == "/api":
        return {"kind": "APIVersions", "versions": ["v1"]}
    if path == "/apis":
        return {
            "kind": "APIGroupList",
            "apiVersion": "v1",
            "groups": [_group(*each) for each in groups.items()],
        }
    if path == "/api/v1":
        evictions = {
            "name": "pods/eviction",
            "singularName": "",
            "namespaced": True,
            "group": "policy",
            "version": "v1",
            "kind": "Eviction",
            "verbs": ["create"],
        }
        return _resources("", "v1", [evictions])
    for group, version in groups.items():
        if path == f"/apis/{group}":
            return {"kind": "APIGroup", "apiVersion": "v1"} | _group(group, version)
        if path == f"/apis/{group}/{version}":
            return _resources(group, f"{group}/{version}", [])
    return None


def _group(name: str, version: str) -> JSON:
    served = {"groupVersion": f"{name}/{version}", "version": version}
    return {"name": name, "versions": [served], "preferredVersion": served}


def _resources(group: str, version: str, more: list[JSON]) -> JSON:
    known = [
        {
            "name": name,
            "singularName": name.removesuffix("s"),
            "shortNames": SHORT_NAMES.get(name, []),
            "namespaced": each.namespaced,
            "kind": each.kind,
            "verbs": VERBS,
        }
        for name, each in RESOURCES.items()
        if each.group == group
    ]
    return {"kind": "APIResourceList", "groupVersion": version, "resources": known + more}
