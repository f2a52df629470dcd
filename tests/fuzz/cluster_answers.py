"""Answers of a management cluster: clusters, profiles, and the modules and sources of a run of `flux`."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from machines.model.node import NodeKind
from rolloutd.adapters.clusters.cluster_watch import ClusterWatch
from rolloutd.adapters.clusters.object_store import _Watch
from rolloutd.adapters.clusters.run_records import RunRecord
from rolloutd.adapters.clusters.views import CLUSTER_API, CLUSTER_PROFILES, parse_cluster, parse_profile
from rolloutd.adapters.flux.runner import FluxRunner
from rolloutd.adapters.kubernetes.cluster import Cluster
from rolloutd.adapters.kubernetes.list_watch import ListWatch
from rolloutd.adapters.timers import SystemClock
from rolloutd.errors import RolloutdError
from rolloutd.ports import Host, InventorySnapshot, PinnedSource, RunnerContext, RunRequest
from tests.contracts.fakes.shell import FakeShell

JSON = Any

PIN = "a" * 40
CONDITION = {"type": "Ready", "status": "True", "reason": "r", "message": "m", "observedGeneration": 2}
META = {
    "name": "east",
    "namespace": "fleet",
    "uid": "u1",
    "resourceVersion": "7",
    "generation": 2,
    "labels": {"region": "eu"},
    "annotations": {
        "rolloutd.io/run": "r1",
        "rolloutd.io/token": "1.2 a 1",
        "rolloutd.io/limit": "1.0 300.0",
    },
    "managedFields": [
        {
            "manager": "rolloutd",
            "operation": "Apply",
            "fieldsV1": {"f:spec": {"f:sourceRef": {"f:name": {}}}},
        },
        {"manager": "kubectl", "operation": "Update", "fieldsV1": {"f:spec": {"f:path": {}}}},
    ],
}
CLUSTER = {
    "metadata": META,
    "spec": {"controlPlaneEndpoint": {"host": "h", "port": 6443}, "topology": {"version": "v1.31.0"}},
    "status": {
        "conditions": [{**CONDITION, "type": "Available"}, {**CONDITION, "type": "RemoteConnectionProbe"}],
        "initialization": {"controlPlaneInitialized": True},
        "v1beta2": {"conditions": [CONDITION]},
    },
}
PROFILE = {
    "metadata": META,
    "spec": {"clusterManager": {"name": "ocm"}},
    "status": {
        "conditions": [{**CONDITION, "type": "ControlPlaneHealthy"}],
        "properties": [{"name": "cluster.clusterset.k8s.io", "value": "id"}],
    },
}
SOURCE = {
    "metadata": {**META, "annotations": {"rolloutd.io/used": "3600"}, "name": "rolloutd-1"},
    "spec": {"url": "https://git.example/apps.git", "ref": {"commit": PIN}, "interval": "1h"},
    "status": {"conditions": [CONDITION], "artifact": {"revision": f"sha1:{PIN}"}},
}
KUSTOMIZATION = {
    "kind": "Kustomization",
    "metadata": META,
    "spec": {
        "sourceRef": {"kind": "GitRepository", "name": "rolloutd-1"},
        "postBuild": {"substitute": {"a": "1"}, "substituteFrom": [{"kind": "Secret", "name": "s"}]},
        "wait": True,
        "suspend": False,
    },
    "status": {
        "conditions": [CONDITION, {**CONDITION, "type": "Healthy"}],
        "observedGeneration": 2,
        "lastAppliedRevision": f"sha1:{PIN}",
        "inventory": {"entries": []},
    },
}
RELEASE = {
    "kind": "HelmRelease",
    "metadata": META,
    "spec": {"chart": {"spec": {"sourceRef": {"kind": "GitRepository", "name": "rolloutd-1"}}}},
    "status": {
        "conditions": [CONDITION, {**CONDITION, "type": "Released"}],
        "history": [{"version": 1, "chartVersion": f"1.0.0+{PIN[:12]}", "status": "deployed"}],
    },
}


def _listed(kind: str, obj: JSON) -> JSON:
    events = [{"type": "MODIFIED", "object": obj}, {"type": "DELETED", "object": obj}]
    return {"kind": kind, "answer": {"metadata": {"resourceVersion": "1"}, "items": [obj]}, "events": events}


CLUSTER_ANSWERS = (
    _listed("clusters", CLUSTER),
    _listed("profiles", PROFILE),
    *({"kind": "module", "answer": each, "source": SOURCE} for each in (KUSTOMIZATION, RELEASE)),
)


class _MemoryRecord(RunRecord):
    """A run's record that is not on disk: a file for each input would take most of the time."""

    def write(self, **fields: Any) -> None:
        self._content = {**self.content, **json.loads(json.dumps(fields))}


class ClusterAnswers:
    """Gives answers to the watches of clusters, and to a run of the change `flux`."""

    def __init__(self, directory: Path) -> None:
        params = {
            "name": "hub",
            "kubeconfig": "/nonexistent",
            "namespace": "fleet",
            "prefix": "",
            "labels": {},
        }
        source = SimpleNamespace(kind="clusterapi", params=params)
        settings = SimpleNamespace(inventory=[source], state_dir=directory)
        clock = SystemClock()
        self._runner = FluxRunner(
            RunnerContext(
                "", FakeShell(), clock, lambda: InventorySnapshot({}), settings, lambda _: directory
            )
        )
        self._directory = directory

    async def watch(self, cluster: Cluster, kind: str) -> None:
        group, parse = (
            (CLUSTER_API, parse_cluster) if kind == "clusters" else (CLUSTER_PROFILES, parse_profile)
        )
        watch = ClusterWatch(cluster, SystemClock(), group, parse, kind=kind)
        await ListWatch(cluster, "/clusters", {}, watch).list_and_watch()
        watch.observe("fleet/east", "east")
        modules = _Watch(cluster, "/kustomizations")
        await ListWatch(cluster, "/kustomizations", {}, modules).list_and_watch()
        for view in watch.nodes.values():
            json.dumps(view.inventory_fields)

    async def run(self, cluster: Cluster, kind: JSON) -> None:
        """Begin, follow and read a run; whatever the cluster answers, its record stays."""
        runner, name = self._runner, "helm_release" if kind == "HelmRelease" else "kustomization"
        runner._clusters.watches["hub"].cluster = cluster
        runner._stores.clear()
        target = {"cluster_management": "hub", "cluster_namespace": "fleet", "cluster_name": "east"}
        params = {name: "east", "failing_for": 60.0, "values": {"a": "1"}, "chart": "./db"}
        host, source = (
            Host("east", NodeKind.CLUSTER, connection=target),
            PinnedSource("git", PIN, "https://g"),
        )
        request = RunRequest("r1", host, source, "", timeout_s=60.0, kind="flux", params=params)
        ref = runner.object_of(target, params)
        store = runner._store(target)
        store.watched = store.get  # type: ignore[method-assign]
        for applied in (None, {"uid": "u1", "generation": 2, "spec": {"wait": True}}):
            record = _MemoryRecord(self._directory / "record")
            runner._create(record, request)
            record.write(applied=applied)
            with contextlib.suppress(RolloutdError), runner._unavailable(target):
                await runner._advance(record)
            assert record.content["run"] == "r1"
            record.state()
        with contextlib.suppress(RolloutdError), runner._unavailable(target):
            found = await store.get(ref)
            if found is not None:
                await runner.previous_of(store, found)
        with contextlib.suppress(RolloutdError), runner._unavailable(target):
            await store.find_run(runner.lists, "r1")
        for artifact in await runner._unused_sources.list_artifacts():
            await runner.remove(artifact.name, unmodified_since=1e12)


def part_of(found: Mapping[str, JSON], path: str) -> JSON:
    """Return what a management cluster answers at a path: an object, a source, or a list of each."""
    part = found.get("source") if "repositories" in path else found.get("answer")
    is_list = path.endswith(("repositories", "kustomizations", "helmreleases"))
    return {"metadata": {"resourceVersion": "1"}, "items": [part]} if is_list else part
