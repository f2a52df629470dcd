"""A node is taken out of service and put back exactly as it was, and nobody else's hand is moved."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rolloutd.adapters.kubernetes.cluster import Cluster
from rolloutd.adapters.kubernetes.cluster_registry import ClusterRegistry
from rolloutd.adapters.kubernetes.isolator import KubernetesIsolator
from rolloutd.adapters.kubernetes.nodes import (
    HOLD_ANNOTATION,
    ISOLATED_BY_ANNOTATION,
    KEPT_FOR_ANNOTATION,
    parse_node,
)
from rolloutd.ports import Busy, Clock, IsolationStatus, Ok, StepContext
from tests.contracts.kubernetes.steps import step_context
from tests.support.cluster_sandbox import ClusterSandbox
from tests.support.waiting import wait_in_loop_until

JSON = Any

WRITTEN_BY_OTHERS = ("taints", "podCIDR", "podCIDRs")


@pytest.fixture
def isolator(cluster: Cluster, clock: Clock) -> KubernetesIsolator:
    """The adapter under test; its passes are short."""
    return KubernetesIsolator(ClusterRegistry([cluster]), clock, drain_pass_s=15.0, api_retry_s=1.0)


async def inspect_isolation(isolator: KubernetesIsolator, ctx: StepContext) -> StepContext:
    """Look as the driver does, and keep what was there before."""
    look = await isolator.inspect(ctx)
    assert isinstance(look, IsolationStatus)
    return replace(ctx, prior=look.prior)


def spec_and_annotations(node: JSON) -> tuple[JSON, JSON]:
    """Return what of a node must be as before; what a control plane writes by itself is left out."""
    spec = {key: value for key, value in node["spec"].items() if key not in WRITTEN_BY_OTHERS}
    notes = node["metadata"].get("annotations") or {}
    return spec, {key: value for key, value in notes.items() if "kubernetes.io/" not in key}


async def test_a_node_is_cordoned_drained_and_put_back_exactly(
    sandbox: ClusterSandbox, isolator: KubernetesIsolator
) -> None:
    node, _ = await sandbox.node("a"), await sandbox.node("b")
    await sandbox.workload("api", [node, node])
    before = spec_and_annotations(await sandbox.get_node(node))
    ctx = await inspect_isolation(isolator, step_context(node))

    assert isinstance(await isolator.isolate(ctx), Ok)

    assert await sandbox.pods_on(node) == set()
    closed = await sandbox.get_node(node)
    assert closed["spec"]["unschedulable"] is True
    said = json.loads(closed["metadata"]["annotations"][ISOLATED_BY_ANNOTATION])
    assert (said["rollout"], said["attempt"], said["unschedulable"]) == ("r-1", 1, False)
    look = await isolator.inspect(ctx)
    assert isinstance(look, IsolationStatus)
    assert look.is_isolated
    assert isinstance(await isolator.return_to_service(ctx), Ok)
    assert spec_and_annotations(await sandbox.get_node(node)) == before


async def test_all_is_safe_to_repeat(sandbox: ClusterSandbox, isolator: KubernetesIsolator) -> None:
    node = await sandbox.node("a")
    before = spec_and_annotations(await sandbox.get_node(node))
    ctx = await inspect_isolation(isolator, step_context(node))
    for _ in range(2):
        assert isinstance(await isolator.isolate(ctx), Ok)
    for _ in range(2):
        assert isinstance(await isolator.return_to_service(ctx), Ok)
    assert spec_and_annotations(await sandbox.get_node(node)) == before


async def test_a_later_attempt_takes_up_what_an_earlier_one_left(
    sandbox: ClusterSandbox, isolator: KubernetesIsolator
) -> None:
    node = await sandbox.node("a")
    first = await inspect_isolation(isolator, step_context(node))
    await isolator.isolate(first)
    second = replace(first, attempt=2, prior=None)
    second = await inspect_isolation(isolator, second)
    assert isinstance(await isolator.isolate(second), Ok)
    assert isinstance(await isolator.return_to_service(second), Ok)
    assert not (await sandbox.get_node(node))["spec"].get("unschedulable")


async def test_a_person_s_cordon_is_never_touched(
    sandbox: ClusterSandbox, isolator: KubernetesIsolator
) -> None:
    node, _ = await sandbox.node("a"), await sandbox.node("b")
    await sandbox.workload("api", [node])
    before = await sandbox.cordon(node)
    ctx = await inspect_isolation(isolator, step_context(node))

    result = await isolator.isolate(ctx)

    assert isinstance(result, Busy)
    assert "cordoned by kubectl" in result.text
    assert isinstance(await isolator.return_to_service(ctx), Ok)
    assert spec_and_annotations(await sandbox.get_node(node)) == spec_and_annotations(before)
    assert len(await sandbox.pods_on(node)) == 1


async def test_a_cordon_between_our_look_and_our_write_wins(
    sandbox: ClusterSandbox, kubeconfig: Path, clock: Clock
) -> None:
    node = await sandbox.node("a")

    class Overtaken(Cluster):
        async def patch(self, path: str, body: JSON) -> JSON:
            if not (await sandbox.get_node(node))["spec"].get("unschedulable"):
                await sandbox.cordon(node)
            return await super().patch(path, body)

    cluster = Overtaken("test", kubeconfig)
    isolator = KubernetesIsolator(ClusterRegistry([cluster]), clock)
    ctx = await inspect_isolation(isolator, step_context(node))

    assert isinstance(await isolator.isolate(ctx), Busy)

    after = await sandbox.get_node(node)
    assert after["spec"]["unschedulable"] is True
    assert ISOLATED_BY_ANNOTATION not in (after["metadata"].get("annotations") or {})
    await isolator.return_to_service(ctx)
    assert (await sandbox.get_node(node))["spec"]["unschedulable"] is True
    await cluster.close()


async def test_uncordoned_and_cordoned_again_by_somebody_it_stays_cordoned(
    sandbox: ClusterSandbox, isolator: KubernetesIsolator
) -> None:
    node = await sandbox.node("a")
    ctx = await inspect_isolation(isolator, step_context(node))
    await isolator.isolate(ctx)
    await sandbox.cordon(node, unschedulable=False)
    await sandbox.cordon(node)

    assert isinstance(await isolator.isolate(ctx), Busy)
    result = await isolator.return_to_service(ctx)

    assert isinstance(result, Ok)
    assert "stays cordoned" in result.text
    after = await sandbox.get_node(node)
    assert after["spec"]["unschedulable"] is True
    assert ISOLATED_BY_ANNOTATION not in (after["metadata"].get("annotations") or {})


async def test_uncordoned_by_somebody_it_is_seen_and_isolated_again(
    sandbox: ClusterSandbox, isolator: KubernetesIsolator
) -> None:
    node = await sandbox.node("a")
    ctx = await inspect_isolation(isolator, step_context(node))
    await isolator.isolate(ctx)
    await sandbox.cordon(node, unschedulable=False)

    look = await isolator.inspect(ctx)
    assert isinstance(look, IsolationStatus)
    assert look.is_isolated is False
    assert isinstance(await isolator.isolate(ctx), Ok)
    assert (await sandbox.get_node(node))["spec"]["unschedulable"] is True
    await isolator.return_to_service(ctx)
    assert not (await sandbox.get_node(node))["spec"].get("unschedulable")


def soft_taints(node: JSON) -> list[JSON]:
    taints = node["spec"].get("taints") or ()
    return [taint for taint in taints if taint["effect"] == "PreferNoSchedule"]


async def test_soft_taint_precedes_cordon_and_goes_with_it(
    sandbox: ClusterSandbox, cluster: Cluster, clock: Clock
) -> None:
    isolator = KubernetesIsolator(ClusterRegistry([cluster]), clock, drain_pass_s=1.0)
    node = await sandbox.node("a")
    ctx = await inspect_isolation(isolator, step_context(node, prefer_no_schedule=2))

    first = await isolator.isolate(ctx)
    between = await sandbox.get_node(node)
    assert isinstance(first, Busy)
    assert "PreferNoSchedule" in first.text
    assert len(soft_taints(between)) == 1
    assert not between["spec"].get("unschedulable")

    async def isolated() -> bool:
        return isinstance(await isolator.isolate(ctx), Ok)

    await wait_in_loop_until(isolated)
    after = await sandbox.get_node(node)
    assert after["spec"]["unschedulable"] is True
    assert soft_taints(after) == []


async def test_return_during_soft_stage_removes_taint(
    sandbox: ClusterSandbox, cluster: Cluster, clock: Clock
) -> None:
    isolator = KubernetesIsolator(ClusterRegistry([cluster]), clock, drain_pass_s=0.1)
    node = await sandbox.node("a")
    before = spec_and_annotations(await sandbox.get_node(node))
    ctx = await inspect_isolation(isolator, step_context(node, prefer_no_schedule=600))
    assert isinstance(await isolator.isolate(ctx), Busy)
    assert isinstance(await isolator.return_to_service(ctx), Ok)
    after = await sandbox.get_node(node)
    assert (soft_taints(after), spec_and_annotations(after)) == ([], before)


async def test_an_annotated_hold_keeps_us_away(sandbox: ClusterSandbox, isolator: KubernetesIsolator) -> None:
    node = await sandbox.node("a")
    await sandbox.annotate(node, HOLD_ANNOTATION, "disk is being looked at")
    result = await isolator.isolate(await inspect_isolation(isolator, step_context(node)))
    assert isinstance(result, Busy)
    assert "disk is being looked at" in result.text
    assert not (await sandbox.get_node(node))["spec"].get("unschedulable")


@pytest.mark.parametrize("how", ["annotated", "held"])
async def test_a_hold_during_our_attempt_leaves_the_node_cordoned(
    sandbox: ClusterSandbox, isolator: KubernetesIsolator, how: str
) -> None:
    node = await sandbox.node("a")
    before = spec_and_annotations(await sandbox.get_node(node))
    ctx = await inspect_isolation(isolator, step_context(node))
    await isolator.isolate(ctx)
    if how == "annotated":
        await sandbox.annotate(node, HOLD_ANNOTATION, "mine now")
    else:
        ctx = replace(ctx, hold_reason="held by alice: mine now")

    result = await isolator.return_to_service(ctx)

    assert isinstance(result, Ok)
    assert "mine now" in result.text
    after = await sandbox.get_node(node)
    assert after["spec"]["unschedulable"] is True
    assert ISOLATED_BY_ANNOTATION not in after["metadata"]["annotations"]
    assert "mine now" in after["metadata"]["annotations"][KEPT_FOR_ANNOTATION]
    assert parse_node(after).left_isolated_by == ("" if how == "annotated" else "kubernetes")

    if how == "annotated":
        assert isinstance(await isolator.release(ctx.host), Busy)
        await sandbox.annotate(node, HOLD_ANNOTATION, None)
        assert parse_node(await sandbox.get_node(node)).left_isolated_by == "kubernetes"
    for _ in range(2):
        assert isinstance(await isolator.release(ctx.host), Ok)
    assert spec_and_annotations(await sandbox.get_node(node)) == before


@pytest.mark.parametrize("again", [False, True])
async def test_held_node_belongs_to_last_cordon_owner(
    sandbox: ClusterSandbox, isolator: KubernetesIsolator, again: bool
) -> None:
    node = await sandbox.node("a")
    ctx = replace(
        await inspect_isolation(isolator, step_context(node)), hold_reason="held by alice: mine now"
    )
    await isolator.isolate(ctx)
    await isolator.return_to_service(ctx)
    await sandbox.cordon(node, unschedulable=False)
    if again:
        await sandbox.cordon(node)

    assert isinstance(await isolator.release(ctx.host), Ok)

    after = await sandbox.get_node(node)
    assert bool(after["spec"].get("unschedulable")) is again
    assert KEPT_FOR_ANNOTATION not in (after["metadata"].get("annotations") or {})


async def test_a_kept_node_that_turned_red_is_ours_again(
    sandbox: ClusterSandbox, isolator: KubernetesIsolator
) -> None:
    node = await sandbox.node("a")
    ctx = replace(
        await inspect_isolation(isolator, step_context(node)), hold_reason="held by alice: mine now"
    )
    await isolator.isolate(ctx)
    await isolator.return_to_service(ctx)

    assert isinstance(await isolator.isolate(replace(ctx, cordon_only=True)), Ok)

    found = (await sandbox.get_node(node))["metadata"]["annotations"]
    assert ISOLATED_BY_ANNOTATION in found
    assert KEPT_FOR_ANNOTATION not in found
    await isolator.release(ctx.host)
    assert (await sandbox.get_node(node))["spec"]["unschedulable"] is True


async def test_kept_node_that_we_isolate_again_was_in_service(
    sandbox: ClusterSandbox, isolator: KubernetesIsolator
) -> None:
    node = await sandbox.node("a")
    before = spec_and_annotations(await sandbox.get_node(node))
    ctx = await inspect_isolation(isolator, step_context(node))
    await isolator.isolate(ctx)
    await isolator.return_to_service(replace(ctx, hold_reason="held by alice: mine now"))

    again = await inspect_isolation(isolator, step_context(node))
    assert isinstance(await isolator.isolate(replace(again, cordon_only=True)), Ok)
    assert isinstance(await isolator.return_to_service(again), Ok)

    assert spec_and_annotations(await sandbox.get_node(node)) == before


async def test_another_rollout_s_isolation_is_not_ours(
    sandbox: ClusterSandbox, isolator: KubernetesIsolator
) -> None:
    node = await sandbox.node("a")
    await isolator.isolate(await inspect_isolation(isolator, step_context(node, rollout="r-1")))
    other = await inspect_isolation(isolator, step_context(node, rollout="r-2"))
    result = await isolator.isolate(other)
    assert isinstance(result, Busy)
    assert "r-1" in result.text
    await isolator.return_to_service(other)
    assert (await sandbox.get_node(node))["spec"]["unschedulable"] is True


@pytest.mark.parametrize("last", ["r-1", "r-2"])
async def test_rollouts_that_share_an_isolation_own_it(
    sandbox: ClusterSandbox, isolator: KubernetesIsolator, last: str
) -> None:
    node = await sandbox.node("a")
    before = spec_and_annotations(await sandbox.get_node(node))
    first = await inspect_isolation(isolator, step_context(node, rollout="r-1"))
    assert isinstance(await isolator.isolate(first), Ok)
    joined = step_context(node, rollout="r-2", prior=first.prior)
    look = await isolator.inspect(joined)
    assert isinstance(look, IsolationStatus)
    assert look.is_isolated
    await sandbox.cordon(node, unschedulable=False)
    assert isinstance(await isolator.isolate(joined), Ok)
    assert isinstance(await isolator.return_to_service(replace(joined, rollout=last)), Ok)
    assert spec_and_annotations(await sandbox.get_node(node)) == before


async def test_gently_no_pod_is_driven_off(sandbox: ClusterSandbox, isolator: KubernetesIsolator) -> None:
    node, _ = await sandbox.node("a"), await sandbox.node("b")
    await sandbox.workload("api", [node])
    ctx = replace(await inspect_isolation(isolator, step_context(node)), cordon_only=True)
    assert isinstance(await isolator.isolate(ctx), Ok)
    assert (await sandbox.get_node(node))["spec"]["unschedulable"] is True
    assert len(await sandbox.pods_on(node)) == 1


async def test_a_node_that_left_is_put_back_by_doing_nothing(
    sandbox: ClusterSandbox, isolator: KubernetesIsolator
) -> None:
    node = await sandbox.node("a")
    ctx = await inspect_isolation(isolator, step_context(node))
    await isolator.isolate(ctx)
    await sandbox.api.delete(f"/api/v1/nodes/{node}")
    assert isinstance(await isolator.return_to_service(ctx), Ok)


async def test_an_unreachable_cluster_is_no_failure(tmp_path: Path, clock: Clock) -> None:
    cluster = Cluster("away", tmp_path / "none")
    isolator = KubernetesIsolator(ClusterRegistry([cluster]), clock, api_retry_s=0.0)
    ctx = step_context("n1")
    ctx = replace(
        ctx, host=replace(ctx.host, connection={**ctx.host.connection, "kubernetes_cluster": "away"})
    )
    for result in (await isolator.inspect(ctx), await isolator.isolate(ctx)):
        assert isinstance(result, Busy)
        assert "away" in result.text
