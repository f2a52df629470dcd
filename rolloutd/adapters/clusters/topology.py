"""Runs of the change `clusterapi`: the version of a cluster's topology, followed to all of its machines."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rolloutd.adapters.clusters.cluster_watch import VERSIONS
from rolloutd.adapters.clusters.inventory import MANAGEMENT_KEY, NAME_KEY, NAMESPACE_KEY
from rolloutd.adapters.clusters.object_runner import Judgement, NotPossible, ObjectRunner
from rolloutd.adapters.clusters.object_store import ObjectRef, ObjectStore
from rolloutd.adapters.clusters.run_records import RunRecord
from rolloutd.adapters.clusters.views import CLUSTER_API, PAUSED_ANNOTATION, read_conditions
from rolloutd.adapters.kubernetes.api_errors import malformed_answers
from rolloutd.ports import Ok, RunRequest

WAITS = frozenset(
    {
        *("ControlPlaneUpgradePending", "MachineDeploymentsUpgradePending", "MachinePoolsUpgradePending"),
        *("MachineDeploymentsUpgradeDeferred", "MachinePoolsUpgradeDeferred", "LifecycleHookBlocking"),
        *("MachineDeploymentsCreatePending", "MachinePoolsCreatePending", "ClusterUpgrading", "Paused"),
    }
)
"""Reasons of TopologyReconciled=False for what Cluster API waits for."""

SETTLES_S = 60.0
"""How long the proofs must last: up to Cluster API 1.11 the topology counts as reconciled once the version
is written to the control plane and the workers, and conditions of the same generation follow later."""

PROOFS = {"ControlPlaneMachinesUpToDate": "True", "WorkerMachinesUpToDate": "True", "RollingOut": "False"}
"""What the conditions must say once every machine has the version."""


class TopologyRunner(ObjectRunner):
    """ports.Runner of Kubernetes upgrades by Cluster API; it cannot undo one, as Kubernetes cannot."""

    kind = "clusterapi"
    settles_s = SETTLES_S

    @property
    def lists(self) -> Sequence[ObjectRef]:
        versions = {each.version for each in self._clusters.watches.values()}
        return [_cluster(version) for version in sorted(versions)]

    def object_of(self, target: Mapping[str, Any], params: Mapping[str, Any]) -> ObjectRef:
        watch = self._clusters.watches.get(str(target.get(MANAGEMENT_KEY)))
        if watch is None or watch.group != CLUSTER_API:
            raise NotPossible(f"{target.get(NAME_KEY)} is no Cluster of Cluster API; use another change")
        return _cluster(watch.version, str(target[NAMESPACE_KEY]), str(target[NAME_KEY]))

    def pin_of(self, request: RunRequest) -> str:
        return str(request.params["version"])

    def may_create(self, params: Mapping[str, Any]) -> bool:
        return False

    async def prepare(self, store: ObjectStore, record: RunRecord) -> str:
        return ""

    def waits_before_apply(self, obj: Mapping[str, Any]) -> str:
        annotations = obj["metadata"].get("annotations") or {}
        if obj["spec"].get("paused") or PAUSED_ANNOTATION in annotations:
            return f"Cluster {obj['metadata']['name']} is paused"
        if not obj["spec"].get("topology"):
            raise NotPossible(
                f"Cluster {obj['metadata']['name']} has no topology; upgrade it by its machines"
            )
        return ""

    def spec_of(self, record: RunRecord) -> Mapping[str, Any]:
        return {"topology": {"version": record.content["pin"]}}

    def judge(self, record: RunRecord, obj: Mapping[str, Any]) -> Judgement:
        return judge_topology(obj, record.content["pin"])

    async def previous_of(self, store: ObjectStore, obj: Mapping[str, Any]) -> str:
        return json.dumps({"version": (obj["spec"].get("topology") or {}).get("version")})


@malformed_answers()
def judge_topology(obj: Mapping[str, Any], version: str) -> Judgement:
    """Return how far a cluster is with a version; a condition of an older generation says nothing."""
    name, generation = f"Cluster {obj['metadata']['name']}", int(obj["metadata"]["generation"])
    status = obj.get("status") or {}
    conditions = read_conditions(status)
    topology = conditions.get("TopologyReconciled")
    percent = _percent(status)
    if topology is None or 0 < topology.generation < generation or not topology.generation:
        return Judgement(f"{name}: no controller has judged generation {generation} yet", 30.0)
    if topology.status != "True":
        is_failing = topology.status == "False" and topology.reason not in WAITS
        return Judgement(f"{name}: {topology.text}", percent, is_failing=is_failing)
    for kind, wanted in PROOFS.items():
        found = conditions.get(kind)
        if found is None or found.generation < generation:
            return Judgement(f"{name}: {kind} is not yet of generation {generation}", percent)
        if found.status != wanted:
            return Judgement(f"{name}: {found.text}", percent)
    behind = [part for part in ("controlPlane", "workers") if _replicas(status, part)[0] > 0]
    if behind:
        return Judgement(f"{name}: machines of {' and '.join(behind)} have not {version} yet", percent)
    text = f"{name}: every machine has {version}"
    return Judgement(text, 100.0, Ok(text))


def _replicas(status: Mapping[str, Any], part: str) -> tuple[int, int]:
    """Return how many machines of a part are not up to date, and how many there should be."""
    found = status.get(part) or {}
    desired = int(found.get("desiredReplicas") or 0)
    present = max(desired, int(found.get("replicas") or 0))
    return present - int(found.get("upToDateReplicas") or 0), present


def _percent(status: Mapping[str, Any]) -> float:
    counts = [_replicas(status, part) for part in ("controlPlane", "workers")]
    total = sum(present for _, present in counts)
    done = total - sum(behind for behind, _ in counts)
    return 30.0 + (60.0 * done / total if total else 0.0)


def _cluster(version: str, namespace: str = "", name: str = "") -> ObjectRef:
    version = version or VERSIONS[CLUSTER_API][0]
    return ObjectRef(f"{CLUSTER_API}/{version}", "Cluster", "clusters", namespace, name)
