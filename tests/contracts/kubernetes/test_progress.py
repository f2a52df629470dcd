"""What kubectl shows of a node in maintenance, and what is left of it afterwards."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from rolloutd.adapters.kubernetes.cluster import Cluster
from rolloutd.adapters.kubernetes.cluster_registry import ClusterRegistry
from rolloutd.adapters.kubernetes.isolator import KubernetesIsolator
from rolloutd.adapters.kubernetes.nodes import HOLD, ISOLATED_BY, LEGACY_DOMAIN, parse_node
from rolloutd.adapters.kubernetes.pods import parse_pod
from rolloutd.ports import Busy, Clock, IsolationStatus, Ok, ProgressKind, ProgressReport, StepContext
from tests.contracts.kubernetes.steps import step_context
from tests.support.cluster_sandbox import ClusterSandbox

JSON = Any

EVENTS_PATH = "/api/v1/namespaces/default/events"
STORY = (
    ProgressKind.ADMITTED,
    ProgressKind.BLOCKED,
    ProgressKind.ISOLATED,
    ProgressKind.MAINTAINED,
    ProgressKind.VERIFIED,
    ProgressKind.RETURNED,
)


@pytest.fixture
def isolator(cluster: Cluster, clock: Clock) -> KubernetesIsolator:
    return KubernetesIsolator(ClusterRegistry([cluster]), clock, drain_pass_s=15.0, api_retry_s=1.0)


def progress(kind: ProgressKind, clock: Clock, text: str = "") -> ProgressReport:
    return ProgressReport(kind, "r-1", 1, clock.now(), text or f"it was {kind}")


async def inspected(isolator: KubernetesIsolator, ctx: StepContext) -> StepContext:
    status = await isolator.inspect(ctx)
    assert isinstance(status, IsolationStatus)
    return replace(ctx, prior=status.prior)


async def events_of(sandbox: ClusterSandbox, node: str) -> list[JSON]:
    """Return the node's events, by the query of `kubectl describe node`."""
    uid = (await sandbox.get_node(node))["metadata"]["uid"]
    selected = f"involvedObject.name={node},involvedObject.kind=Node,involvedObject.uid={uid}"
    found: list[JSON] = (await sandbox.api.get("/api/v1/events", fieldSelector=selected))["items"]
    return found


async def condition_of(sandbox: ClusterSandbox, node: str) -> JSON:
    conditions = (await sandbox.get_node(node))["status"]["conditions"]
    return next((each for each in conditions if each["type"] == "MaintenanceInProgress"), None)


async def test_events_show_each_step_of_node(
    sandbox: ClusterSandbox, isolator: KubernetesIsolator, clock: Clock
) -> None:
    node = await sandbox.node("a")
    for kind in STORY:
        await isolator.report(step_context(node).host, progress(kind, clock))
    shown = {event["reason"]: event for event in await events_of(sandbox, node)}
    assert set(shown) == {
        "MaintenanceAdmitted",
        "DrainBlocked",
        "NodeDrained",
        "NodeMaintained",
        "MaintenanceVerified",
        "NodeReturned",
    }
    assert shown["DrainBlocked"]["type"] == "Warning"
    assert shown["NodeReturned"]["source"]["component"] == "rolloutd"


async def test_repeated_event_is_counted_after_restart_too(
    sandbox: ClusterSandbox, cluster: Cluster, clock: Clock
) -> None:
    node = await sandbox.node("a")
    for text in ("api holds it", "api holds it", "db holds it"):
        restarted = KubernetesIsolator(ClusterRegistry([cluster]), clock)
        await restarted.report(step_context(node).host, progress(ProgressKind.BLOCKED, clock, text))
    [event] = await events_of(sandbox, node)
    assert (event["count"], event["message"]) == (3, "db holds it")


async def test_condition_follows_isolation_and_nothing_is_left(
    sandbox: ClusterSandbox, isolator: KubernetesIsolator, clock: Clock
) -> None:
    node = await sandbox.node("a")
    ctx = await inspected(isolator, step_context(node))
    before = await sandbox.get_node(node)

    assert isinstance(await isolator.isolate(ctx), Ok)
    isolating = await condition_of(sandbox, node)
    await isolator.report(ctx.host, progress(ProgressKind.ISOLATED, clock))
    maintaining = await condition_of(sandbox, node)
    assert isinstance(await isolator.return_to_service(ctx), Ok)
    await isolator.report(ctx.host, progress(ProgressKind.MAINTAINED, clock))  # late

    assert (isolating["status"], isolating["reason"]) == ("True", "Isolating")
    assert (maintaining["status"], maintaining["reason"]) == ("True", "Maintaining")
    assert maintaining["lastTransitionTime"] == isolating["lastTransitionTime"]
    assert await condition_of(sandbox, node) is None
    after = await sandbox.get_node(node)
    for each in (before, after):
        each["metadata"].pop("resourceVersion")
        each["metadata"].pop("managedFields", None)
        for condition in each["status"]["conditions"]:
            condition.pop("lastHeartbeatTime", None)
    assert after["metadata"].get("annotations", {}) == before["metadata"].get("annotations", {})
    assert after["status"]["conditions"] == before["status"]["conditions"]


async def test_node_kept_for_hold_is_not_in_maintenance(
    sandbox: ClusterSandbox, isolator: KubernetesIsolator
) -> None:
    node = await sandbox.node("a")
    ctx = await inspected(isolator, step_context(node))
    await isolator.isolate(replace(ctx, cordon_only=True))
    assert await condition_of(sandbox, node) is not None
    await isolator.return_to_service(replace(ctx, hold_reason="held by alice"))
    assert await condition_of(sandbox, node) is None


async def test_annotations_use_domain_of_settings(
    sandbox: ClusterSandbox, cluster: Cluster, clock: Clock
) -> None:
    cluster.domain = "example.com"
    isolator = KubernetesIsolator(ClusterRegistry([cluster]), clock)
    node = await sandbox.node("a")
    ctx = await inspected(isolator, step_context(node))
    assert isinstance(await isolator.isolate(ctx), Ok)
    annotations = (await sandbox.get_node(node))["metadata"]["annotations"]
    assert [key for key in annotations if key.endswith(ISOLATED_BY)] == [f"example.com/{ISOLATED_BY}"]
    await isolator.return_to_service(ctx)
    assert f"example.com/{ISOLATED_BY}" not in (
        (await sandbox.get_node(node))["metadata"].get("annotations") or {}
    )


async def test_annotations_of_older_version_still_count(
    sandbox: ClusterSandbox, isolator: KubernetesIsolator
) -> None:
    node, held = await sandbox.node("a"), await sandbox.node("b")
    record = json.dumps({"rollout": "r-1", "attempt": 1, "since": "2026-11-01T00:00:00+00:00"})
    # As 0.1 wrote it, by its own field manager.
    body = {
        "metadata": {"annotations": {f"{LEGACY_DOMAIN}/{ISOLATED_BY}": record}},
        "spec": {"unschedulable": True},
    }
    sandbox.api.person = "rolloutd"
    await sandbox.api.patch(f"/api/v1/nodes/{node}", body)
    sandbox.api.person = "kubectl"
    await sandbox.annotate(held, f"{LEGACY_DOMAIN}/{HOLD}", "disk")
    assert parse_node(await sandbox.get_node(node)).cordon_state.record is not None

    ctx = step_context(node, prior={"unschedulable": False})
    assert isinstance(await isolator.return_to_service(ctx), Ok)

    after = await sandbox.get_node(node)
    assert not after["spec"].get("unschedulable")
    assert not [key for key in after["metadata"].get("annotations") or {} if key.startswith("rolloutd")]
    result = await isolator.isolate(await inspected(isolator, step_context(held)))
    assert isinstance(result, Busy)
    assert "disk" in result.text


def test_pod_of_deployment_names_deployment() -> None:
    def owner(name: str, **labels: str) -> str:
        reference = {"kind": "ReplicaSet", "name": name, "controller": True}
        meta = {
            "namespace": "shop",
            "name": "p",
            "uid": "u",
            "labels": labels,
            "ownerReferences": [reference],
        }
        return parse_pod({"metadata": meta}).owner

    assert owner("api-5c4d", **{"pod-template-hash": "5c4d"}) == "Deployment api"
    assert owner("api-5c4d", **{"pod-template-hash": "other"}) == "ReplicaSet api-5c4d"
    assert owner("api") == "ReplicaSet api"
