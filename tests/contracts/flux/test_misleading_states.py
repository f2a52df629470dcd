"""Each status that misleads, and the bug of believing it: every such bug is found by one of the states."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from machines.model.node import NodeHealth
from rolloutd.adapters.clusters import topology, views
from rolloutd.adapters.clusters.object_runner import Judgement
from rolloutd.adapters.flux import judgement
from rolloutd.ports import Failed, Ok
from tests.contracts.flux.environment import GOOD, NEWER
from tests.support.cluster_fleet import READY, condition
from tests.support.mutation import Mutant

JSON = Any

DIGEST, OTHER = (f"sha256:{digit * 64}" for digit in "ab")


def module(status: JSON, **spec: JSON) -> JSON:
    """Return an object of generation 2; its status overrides what a finished reconciliation shows."""
    done = {"conditions": [condition("Ready", "True", generation=2)], "observedGeneration": 2}
    return {"metadata": {"generation": 2}, "spec": spec, "status": {**done, **status}}


def kustomization(*conditions: JSON, suspend: bool = False, revision: str = NEWER, **status: JSON) -> str:
    shown = [condition("Ready", "True", generation=2), condition("Healthy", "True", generation=2)]
    merged = {each["type"]: each for each in (*shown, *conditions)}
    applied = {"lastAppliedRevision": f"sha1:{revision}", "lastAttemptedRevision": f"sha1:{NEWER}"}
    obj = module({**applied, "conditions": list(merged.values()), **status}, wait=True, suspend=suspend)
    return said(judgement.judge_kustomization("apps", obj, NEWER))


def release(*conditions: JSON, digest: str = DIGEST, state: str = "deployed") -> str:
    merged = {each["type"]: each for each in (condition("Ready", "True", generation=2), *conditions)}
    history = [{"version": 2, "chartVersion": "1.0.0", "ociDigest": digest, "status": state}]
    attempted = {"lastAttemptedRevision": "1.0.0", "lastAttemptedRevisionDigest": DIGEST}
    obj = module({**attempted, "conditions": list(merged.values()), "history": history})
    return said(judgement.judge_helm_release("db", obj, DIGEST))


def cluster(generation: int = 2, replicas: int = 3, **changes: str | int) -> JSON:
    """Return a Cluster of generation 2; a number is the generation of a condition."""
    conditions = [
        condition(
            kind,
            changed if isinstance(changed := changes.get(kind, status), str) else status,
            generation=changed if isinstance(changed, int) else generation,
        )
        for kind, status in READY.items()
    ]
    workers = {"desiredReplicas": 3, "replicas": 3, "upToDateReplicas": replicas}
    status = {"conditions": conditions, "workers": workers}
    status["initialization"] = {"controlPlaneInitialized": True}
    meta = {"name": "east", "namespace": "fleet", "uid": "u1", "generation": 2}
    return {"metadata": meta, "spec": {"topology": {"version": "v1.31.0"}}, "status": status}


def upgrade(**state: Any) -> str:
    return said(topology.judge_topology(cluster(**state), "v1.31.0"))


def sight(**state: Any) -> str:
    view = views.parse_cluster(cluster(**state))
    if view.status is not None:
        return str(view.status)
    return "held" if view.blocker else "up" if view.health is NodeHealth.UP else "down"


def said(found: Judgement) -> str:
    match found.result:
        case Ok():
            return "done"
        case Failed():
            return "failed"
        case _:
            return "failing" if found.is_failing else "continues"


OLD_READY = condition("Ready", "True", generation=1)
STATES: Mapping[str, tuple[Callable[[], str], str]] = {
    "all is done": (kustomization, "done"),
    "it is suspended and keeps Ready": (lambda: kustomization(suspend=True), "continues"),
    "Ready is of an older generation": (lambda: kustomization(OLD_READY), "continues"),
    "the generation is not observed": (lambda: kustomization(observedGeneration=1), "continues"),
    "the applied revision is the last one": (lambda: kustomization(revision=GOOD), "continues"),
    "health is not there yet": (lambda: kustomization(condition("Healthy", "Unknown")), "continues"),
    "a reconciliation goes on": (
        lambda: kustomization(condition("Ready", "Unknown", "Reconciling", generation=2)),
        "continues",
    ),
    "a dependency is not ready": (
        lambda: kustomization(condition("Ready", "False", "DependencyNotReady", generation=2)),
        "continues",
    ),
    "it stalled in an older generation": (
        lambda: kustomization(condition("Stalled", "True", generation=1)),
        "done",
    ),
    "the chart is deployed": (release, "done"),
    "the chart was only tried": (lambda: release(digest=OTHER), "continues"),
    "the release is pending": (lambda: release(state="pending-upgrade"), "continues"),
    "the release was undone": (lambda: release(condition("Remediated", "True", generation=2)), "failed"),
    "the test of the chart failed": (lambda: release(condition("TestSuccess", "False")), "continues"),
    "every machine has the version": (upgrade, "done"),
    "all conditions are of the version before": (lambda: upgrade(generation=1), "continues"),
    "the topology is of the version before": (lambda: upgrade(TopologyReconciled=1), "continues"),
    "up to date of the version before": (lambda: upgrade(WorkerMachinesUpToDate=1), "continues"),
    "machines still roll": (lambda: upgrade(RollingOut="True"), "continues"),
    "a machine is behind the conditions": (lambda: upgrade(replicas=2), "continues"),
    "the cluster is available": (sight, "up"),
    "initialised long ago and unreachable": (lambda: sight(RemoteConnectionProbe="False"), "offline"),
    "the probe does not know": (lambda: sight(RemoteConnectionProbe="Unknown"), "offline"),
    "Available is of an older generation": (lambda: sight(Available=1), "down"),
    "Cluster API replaces machines": (lambda: sight(RollingOut="True"), "held"),
}

_conditions, _kustomization = judgement._judge_conditions, judgement.judge_kustomization.__wrapped__  # type: ignore[attr-defined]
_release, _topology = judgement.judge_helm_release.__wrapped__, topology.judge_topology.__wrapped__  # type: ignore[attr-defined]
_cluster = views.parse_cluster.__wrapped__  # type: ignore[attr-defined]
MUTANTS = (
    Mutant("suspended is believed", _conditions, 'obj["spec"].get("suspend")', "False"),
    Mutant(
        "any generation is believed",
        judgement._is_present,
        'int(condition.get("observedGeneration") or 0) == int(obj["metadata"]["generation"])',
        "True",
    ),
    Mutant(
        "the generation need not be observed",
        _kustomization,
        'int(status.get("observedGeneration") or 0) != generation',
        "False",
    ),
    Mutant("any revision is believed", _kustomization, "not is_revision(revision, pin)", "False"),
    Mutant("an attempt is believed", _kustomization, '"lastAppliedRevision"', '"lastAttemptedRevision"'),
    Mutant("health is believed", _kustomization, 'healthy.get("status") != "True"', "False"),
    Mutant("Unknown is a failure", _conditions, 'ready["status"] == "False"', "True"),
    Mutant("every wait is a failure", _conditions, 'ready.get("reason") not in KEEPS_GOING', "True"),
    Mutant("any release is believed", _release, 'latest.get("status") != "deployed" or not is_pin', "False"),
    Mutant("a pending release is believed", _release, 'latest.get("status") != "deployed"', "False"),
    Mutant("an undone release is believed", _release, 'remediated.get("status") == "True"', "False"),
    Mutant("a failed test is believed", _release, 'found.get("status") != "True"', "False"),
    Mutant("an old topology is believed", _topology, "0 < topology.generation < generation", "False"),
    Mutant("old machines are believed", _topology, "found.generation < generation", "False"),
    Mutant("rolling machines are believed", _topology, "found.status != wanted", "False"),
    Mutant("conditions are believed over counts", _topology, "_replicas(status, part)[0] > 0", "False"),
    Mutant("initialised is believed", _cluster, 'probe.status != "True"', "False"),
    Mutant("unknown is believed", _cluster, 'probe.status != "True"', 'probe.status == "False"'),
    Mutant("an old Available is believed", views._health, "0 < available.generation < generation", "False"),
    Mutant("work of others is believed harmless", _cluster, 'each.status != "False"', "False"),
)


def wrong_states() -> list[str]:
    return [name for name, (ask, expected) in STATES.items() if ask() != expected]


def test_misleading_states_are_not_believed() -> None:
    assert wrong_states() == []


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda each: each.name)
def test_believed_state_is_detected(mutant: Mutant) -> None:
    with mutant.applied():
        assert wrong_states() != []
