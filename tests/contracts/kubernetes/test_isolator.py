"""A node is taken out of service and put back exactly as it was, and nobody else's hand is moved."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rolloutd.adapters.kubernetes.cluster import Cluster
from rolloutd.adapters.kubernetes.clusters import Clusters
from rolloutd.adapters.kubernetes.isolator import KubernetesIsolator
from rolloutd.adapters.kubernetes.nodes import HOLD, ISOLATED_BY, KEPT, view
from rolloutd.ports import Busy, Clock, Look, Ok, StepContext
from tests.contracts.kubernetes.steps import context
from tests.support.kubeworld import World

JSON = Any

WRITTEN_BY_OTHERS = ("taints", "podCIDR", "podCIDRs")


@pytest.fixture
def isolator(cluster: Cluster, clock: Clock) -> KubernetesIsolator:
    """The adapter under test; its passes are short."""
    return KubernetesIsolator(Clusters([cluster]), clock, pass_s=15.0, patience_s=1.0)


async def looked(isolator: KubernetesIsolator, ctx: StepContext) -> StepContext:
    """Look as the driver does, and keep what was there before."""
    look = await isolator.look(ctx)
    assert isinstance(look, Look)
    return replace(ctx, prior=look.prior)


def spec_and_notes(node: JSON) -> tuple[JSON, JSON]:
    """Return what of a node must be as before; what a control plane writes by itself is left out."""
    spec = {key: value for key, value in node["spec"].items() if key not in WRITTEN_BY_OTHERS}
    notes = node["metadata"].get("annotations") or {}
    return spec, {key: value for key, value in notes.items() if "kubernetes.io/" not in key}


async def test_a_node_is_cordoned_drained_and_put_back_exactly(
    world: World, isolator: KubernetesIsolator
) -> None:
    node, _ = await world.node("a"), await world.node("b")
    await world.workload("api", [node, node])
    before = spec_and_notes(await world.read(node))
    ctx = await looked(isolator, context(node))

    assert isinstance(await isolator.do(ctx), Ok)

    assert await world.pods_on(node) == set()
    closed = await world.read(node)
    assert closed["spec"]["unschedulable"] is True
    said = json.loads(closed["metadata"]["annotations"][ISOLATED_BY])
    assert (said["rollout"], said["attempt"], said["unschedulable"]) == ("r-1", 1, False)
    look = await isolator.look(ctx)
    assert isinstance(look, Look)
    assert look.done
    assert isinstance(await isolator.undo(ctx), Ok)
    assert spec_and_notes(await world.read(node)) == before


async def test_all_is_safe_to_repeat(world: World, isolator: KubernetesIsolator) -> None:
    node = await world.node("a")
    before = spec_and_notes(await world.read(node))
    ctx = await looked(isolator, context(node))
    for _ in range(2):
        assert isinstance(await isolator.do(ctx), Ok)
    for _ in range(2):
        assert isinstance(await isolator.undo(ctx), Ok)
    assert spec_and_notes(await world.read(node)) == before


async def test_a_later_attempt_takes_up_what_an_earlier_one_left(
    world: World, isolator: KubernetesIsolator
) -> None:
    node = await world.node("a")
    first = await looked(isolator, context(node))
    await isolator.do(first)
    second = replace(first, attempt=2, prior=None)
    second = await looked(isolator, second)
    assert isinstance(await isolator.do(second), Ok)
    assert isinstance(await isolator.undo(second), Ok)
    assert not (await world.read(node))["spec"].get("unschedulable")


async def test_a_person_s_cordon_is_never_touched(world: World, isolator: KubernetesIsolator) -> None:
    node, _ = await world.node("a"), await world.node("b")
    await world.workload("api", [node])
    before = await world.cordon(node)
    ctx = await looked(isolator, context(node))

    result = await isolator.do(ctx)

    assert isinstance(result, Busy)
    assert "cordoned by kubectl" in result.text
    assert isinstance(await isolator.undo(ctx), Ok)
    assert spec_and_notes(await world.read(node)) == spec_and_notes(before)
    assert len(await world.pods_on(node)) == 1


async def test_a_cordon_between_our_look_and_our_write_wins(
    world: World, kubeconfig: Path, clock: Clock
) -> None:
    node = await world.node("a")

    class Overtaken(Cluster):
        async def patch(self, path: str, body: JSON) -> JSON:
            if not (await world.read(node))["spec"].get("unschedulable"):
                await world.cordon(node)
            return await super().patch(path, body)

    cluster = Overtaken("test", kubeconfig)
    isolator = KubernetesIsolator(Clusters([cluster]), clock)
    ctx = await looked(isolator, context(node))

    assert isinstance(await isolator.do(ctx), Busy)

    after = await world.read(node)
    assert after["spec"]["unschedulable"] is True
    assert ISOLATED_BY not in (after["metadata"].get("annotations") or {})
    await isolator.undo(ctx)
    assert (await world.read(node))["spec"]["unschedulable"] is True
    await cluster.close()


async def test_uncordoned_and_cordoned_again_by_somebody_it_stays_cordoned(
    world: World, isolator: KubernetesIsolator
) -> None:
    node = await world.node("a")
    ctx = await looked(isolator, context(node))
    await isolator.do(ctx)
    await world.cordon(node, closed=False)
    await world.cordon(node)

    assert isinstance(await isolator.do(ctx), Busy)
    result = await isolator.undo(ctx)

    assert isinstance(result, Ok)
    assert "stays cordoned" in result.text
    after = await world.read(node)
    assert after["spec"]["unschedulable"] is True
    assert ISOLATED_BY not in (after["metadata"].get("annotations") or {})


async def test_uncordoned_by_somebody_it_is_seen_and_isolated_again(
    world: World, isolator: KubernetesIsolator
) -> None:
    node = await world.node("a")
    ctx = await looked(isolator, context(node))
    await isolator.do(ctx)
    await world.cordon(node, closed=False)

    look = await isolator.look(ctx)
    assert isinstance(look, Look)
    assert look.done is False
    assert isinstance(await isolator.do(ctx), Ok)
    assert (await world.read(node))["spec"]["unschedulable"] is True
    await isolator.undo(ctx)
    assert not (await world.read(node))["spec"].get("unschedulable")


async def test_an_annotated_hold_keeps_us_away(world: World, isolator: KubernetesIsolator) -> None:
    node = await world.node("a")
    await world.annotate(node, HOLD, "disk is being looked at")
    result = await isolator.do(await looked(isolator, context(node)))
    assert isinstance(result, Busy)
    assert "disk is being looked at" in result.text
    assert not (await world.read(node))["spec"].get("unschedulable")


@pytest.mark.parametrize("how", ["annotated", "held"])
async def test_a_hold_during_our_attempt_leaves_the_node_cordoned(
    world: World, isolator: KubernetesIsolator, how: str
) -> None:
    node = await world.node("a")
    before = spec_and_notes(await world.read(node))
    ctx = await looked(isolator, context(node))
    await isolator.do(ctx)
    if how == "annotated":
        await world.annotate(node, HOLD, "mine now")
    else:
        ctx = replace(ctx, held="held by alice: mine now")

    result = await isolator.undo(ctx)

    assert isinstance(result, Ok)
    assert "mine now" in result.text
    after = await world.read(node)
    assert after["spec"]["unschedulable"] is True
    assert ISOLATED_BY not in after["metadata"]["annotations"]
    assert "mine now" in after["metadata"]["annotations"][KEPT]
    assert view(after).kept == ("" if how == "annotated" else "kubernetes")

    if how == "annotated":
        assert isinstance(await isolator.let_go(ctx.host), Busy)
        await world.annotate(node, HOLD, None)
        assert view(await world.read(node)).kept == "kubernetes"
    for _ in range(2):
        assert isinstance(await isolator.let_go(ctx.host), Ok)
    assert spec_and_notes(await world.read(node)) == before


@pytest.mark.parametrize("again", [False, True])
async def test_a_node_kept_for_a_hold_is_whose_hand_was_last_on_it(
    world: World, isolator: KubernetesIsolator, again: bool
) -> None:
    node = await world.node("a")
    ctx = replace(await looked(isolator, context(node)), held="held by alice: mine now")
    await isolator.do(ctx)
    await isolator.undo(ctx)
    await world.cordon(node, closed=False)
    if again:
        await world.cordon(node)

    assert isinstance(await isolator.let_go(ctx.host), Ok)

    after = await world.read(node)
    assert bool(after["spec"].get("unschedulable")) is again
    assert KEPT not in (after["metadata"].get("annotations") or {})


async def test_a_kept_node_that_turned_red_is_ours_again(world: World, isolator: KubernetesIsolator) -> None:
    node = await world.node("a")
    ctx = replace(await looked(isolator, context(node)), held="held by alice: mine now")
    await isolator.do(ctx)
    await isolator.undo(ctx)

    assert isinstance(await isolator.do(replace(ctx, gentle=True)), Ok)

    found = (await world.read(node))["metadata"]["annotations"]
    assert ISOLATED_BY in found
    assert KEPT not in found
    await isolator.let_go(ctx.host)
    assert (await world.read(node))["spec"]["unschedulable"] is True


async def test_another_rollout_s_isolation_is_not_ours(world: World, isolator: KubernetesIsolator) -> None:
    node = await world.node("a")
    await isolator.do(await looked(isolator, context(node, rollout="r-1")))
    other = await looked(isolator, context(node, rollout="r-2"))
    result = await isolator.do(other)
    assert isinstance(result, Busy)
    assert "r-1" in result.text
    await isolator.undo(other)
    assert (await world.read(node))["spec"]["unschedulable"] is True


async def test_gently_no_pod_is_driven_off(world: World, isolator: KubernetesIsolator) -> None:
    node, _ = await world.node("a"), await world.node("b")
    await world.workload("api", [node])
    ctx = replace(await looked(isolator, context(node)), gentle=True)
    assert isinstance(await isolator.do(ctx), Ok)
    assert (await world.read(node))["spec"]["unschedulable"] is True
    assert len(await world.pods_on(node)) == 1


async def test_a_node_that_left_is_put_back_by_doing_nothing(
    world: World, isolator: KubernetesIsolator
) -> None:
    node = await world.node("a")
    ctx = await looked(isolator, context(node))
    await isolator.do(ctx)
    await world.api.delete(f"/api/v1/nodes/{node}")
    assert isinstance(await isolator.undo(ctx), Ok)


async def test_an_unreachable_cluster_is_no_failure(tmp_path: Path, clock: Clock) -> None:
    cluster = Cluster("away", tmp_path / "none")
    isolator = KubernetesIsolator(Clusters([cluster]), clock, patience_s=0.0)
    ctx = context("n1")
    ctx = replace(
        ctx, host=replace(ctx.host, connection={**ctx.host.connection, "kubernetes_cluster": "away"})
    )
    for result in (await isolator.look(ctx), await isolator.do(ctx)):
        assert isinstance(result, Busy)
        assert "away" in result.text
