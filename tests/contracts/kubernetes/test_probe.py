"""The traffic probe counts the pods that are somebody's work on the node, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from rolloutd.adapters.kubernetes.cluster import Cluster
from rolloutd.adapters.kubernetes.clusters import Clusters
from rolloutd.adapters.kubernetes.probe import KubernetesProbe
from rolloutd.ports import Busy, Host, Ok, Unknown
from tests.contracts.kubernetes.steps import context
from tests.support.kubeworld import World

JOB = {"app.kubernetes.io/component": "job"}
PODS = "app.kubernetes.io/component=job"


@pytest.fixture
def probe(cluster: Cluster) -> KubernetesProbe:
    """The adapter under test."""
    return KubernetesProbe(Clusters([cluster]))


async def test_the_pod_is_named_with_its_owner_until_it_has_finished(
    world: World, probe: KubernetesProbe
) -> None:
    node = await world.node("w3")
    await world.pod("train-7", node, job="train", labels=JOB)
    found = await probe.look(context(node, pods=PODS))
    assert found == Busy(f"{node} is busy: pod {world.namespace}/train-7 (Job train) runs there")
    await world.finish("train-7")
    assert isinstance(await probe.look(context(node, pods=PODS)), Ok)


async def test_only_these_labels_of_these_namespaces_on_this_node_count(
    world: World, probe: KubernetesProbe
) -> None:
    node, other = await world.node("w3"), await world.node("w4")
    await world.pod("web-1", node)
    await world.pod("train-1", other, labels=JOB)
    assert isinstance(await probe.look(context(node, pods=PODS)), Ok)
    await world.pod("train-2", node, labels=JOB)
    assert isinstance(await probe.look(context(node, pods=PODS, namespaces=["elsewhere"])), Ok)
    among = await probe.look(context(node, pods=PODS, namespaces=["elsewhere", world.namespace]))
    assert isinstance(among, Busy)
    assert f"{world.namespace}/train-2" in among.text


@pytest.mark.parametrize(
    "kind", [{"daemon": "agent"}, {"annotations": {"kubernetes.io/config.mirror": "static"}}], ids=str
)
async def test_what_belongs_to_the_node_itself_does_not_count(
    world: World, probe: KubernetesProbe, kind: dict[str, Any]
) -> None:
    node = await world.node("w3")
    await world.pod("own", node, labels=JOB, **kind)
    assert isinstance(await probe.look(context(node, pods=PODS)), Ok)


async def test_a_pod_that_is_ending_still_runs(world: World, probe: KubernetesProbe) -> None:
    node = await world.node("w3")
    await world.pod("train-1", node, labels=JOB, grace_s=60)
    world.silent.add(node)
    await world.api.delete(f"{world.pods_path}/train-1")
    found = await probe.look(context(node, pods=PODS))
    assert isinstance(found, Busy)
    assert "train-1, ending runs there" in found.text


async def test_many_pods_are_a_few_names(world: World, probe: KubernetesProbe) -> None:
    node = await world.node("w3")
    for number in range(5):
        await world.pod(f"train-{number}", node, labels=JOB)
    found = await probe.look(context(node, pods=PODS))
    assert isinstance(found, Busy)
    assert "and 2 more run there" in found.text


async def test_a_node_of_no_cluster_is_unknown(probe: KubernetesProbe) -> None:
    plain = context("h1", pods=PODS)
    found = await probe.look(type(plain)(Host("h1"), "r-1", 1, "s", "k", {"pods": PODS}, plain.deadline))
    assert isinstance(found, Unknown)
    assert "h1 is in no Kubernetes cluster" in found.text
