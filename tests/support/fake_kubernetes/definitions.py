"""What the definitions of Flux and Cluster API require, and the values that they fill in.

Only what rolloutd and its tests could get wrong is here, as a server with the definitions answered.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.support.fake_kubernetes.errors import ApiRefusal

JSON = Any

SOURCE = ("spec.interval", "spec.url")
ARTIFACT = tuple(
    f"status.artifact.{name}" for name in ("digest", "lastUpdateTime", "path", "revision", "url")
)
REQUIRED: Mapping[str, tuple[str, ...]] = {
    "clusters": ("spec",),
    "clusterprofiles": ("spec.clusterManager.name",),
    "gitrepositories": (*SOURCE, *ARTIFACT),
    "helmreleases": ("spec.interval",),
    "kustomizations": ("spec.interval", "spec.prune", "spec.sourceRef.kind", "spec.sourceRef.name"),
    "ocirepositories": (*SOURCE, *ARTIFACT),
}
DEFAULTS: Mapping[str, Mapping[str, JSON]] = {
    "gitrepositories": {"timeout": "60s"},
    "kustomizations": {"force": False},
    "ocirepositories": {"timeout": "60s", "provider": "generic"},
}
TOPOLOGY = ("spec.topology.classRef.name", "spec.topology.version")


def judge(resource: str, thing: JSON) -> None:
    """Fill in the default values; raise a 422 for a field that is missing."""
    if resource not in REQUIRED:
        return
    spec = thing.get("spec") or {}
    for name, value in DEFAULTS.get(resource, {}).items():
        spec.setdefault(name, value)
    for reference in (spec.get("postBuild") or {}).get("substituteFrom") or ():
        reference.setdefault("optional", False)
    required = [*REQUIRED[resource], *(TOPOLOGY if resource == "clusters" and "topology" in spec else ())]
    if not (thing.get("status") or {}).get("artifact"):
        required = [path for path in required if not path.startswith("status.")]
    missing = [path for path in required if _is_missing(thing, path)]
    if resource == "helmreleases" and ("chart" in spec) == ("chartRef" in spec):
        missing.append("spec.chart or spec.chartRef")
    if missing:
        text = f"{resource} is invalid: {': Required value, '.join(missing)}: Required value"
        raise ApiRefusal(422, text, reason="Invalid")


def _is_missing(thing: JSON, path: str) -> bool:
    for name in path.split("."):
        if not isinstance(thing, dict) or thing.get(name) in (None, {}):
            return True
        thing = thing[name]
    return False
