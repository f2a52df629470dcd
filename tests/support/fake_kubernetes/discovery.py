"""What the API server says of itself: enough for kubectl to find its way."""

from __future__ import annotations

from typing import Any

from tests.support.fake_kubernetes.objects import ADMISSION, RBAC, RESOURCES

JSON = Any

VERBS = ["create", "delete", "get", "list", "patch", "update", "watch"]
GROUPS = (
    "apiextensions.k8s.io",
    "apps",
    "authentication.k8s.io",
    "authorization.k8s.io",
    "coordination.k8s.io",
    "policy",
    RBAC,
    ADMISSION,
    "rolloutd.io",
)
SHORT_NAMES = {"maintenancerollouts": ["mr"], "maintenancevotes": ["mv"]}
VERSION = {"major": "1", "minor": "36", "gitVersion": "v1.36.2", "platform": "linux/amd64"}


def discovery_document(path: str) -> JSON:
    """Return the document at a discovery path; None where it is none."""
    if path == "/version":
        return VERSION
    if path == "/api":
        return {"kind": "APIVersions", "versions": ["v1"]}
    if path == "/apis":
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": [_group(name) for name in GROUPS]}
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
    for group in GROUPS:
        if path == f"/apis/{group}/v1":
            return _resources(group, f"{group}/v1", [])
    return None


def _group(name: str) -> JSON:
    version = {"groupVersion": f"{name}/v1", "version": "v1"}
    return {"name": name, "versions": [version], "preferredVersion": version}


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
