"""The traffic probe counts the pods that are somebody's work on the node, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from rolloutd.adapters.kubernetes.check import KubernetesTrafficProbe
from rolloutd.adapters.kubernetes.cluster import Cluster
from rolloutd.adapters.kubernetes.cluster_registry import ClusterRegistry
from rolloutd.ports import Busy, Host, Ok, Unknown
from tests.contracts.kubernetes.steps import step_context
from tests.support.cluster_sandbox import ClusterSandbox

JOB = {"app.kubernetes.io/component": "job"}
PODS = "app.kubernetes.io/component=job"


@pytest.fixture
def probe(cluster: Cluster) -> KubernetesTrafficProbe:
    """The adapter under test."""
    return KubernetesTrafficProbe(ClusterRegistry([cluster]))


async def test_the_pod_is_named_with_its_owner_until_it_has_finished(
    sandbox: ClusterSandbox, probe: KubernetesTrafficProbe
) -> None:
    node = await sandbox.node("w3")
    await sandbox.pod("train-7", node, job="train", labels=JOB)
    found = await probe.probe(step_context(node, pods=PODS))
    assert found == Busy(f"{node} is busy: pod {sandbox.namespace}/train-7 (Job train) runs there")
    await sandbox.finish("train-7")
    assert isinstance(await probe.probe(step_context(node, pods=PODS)), Ok)


async def test_only_these_labels_of_these_namespaces_on_this_node_count(
    sandbox: ClusterSandbox, probe: KubernetesTrafficProbe
) -> None:
    node, other = await sandbox.node("w3"), await sandbox.node("w4")
    await sandbox.pod("web-1", node)
    await sandbox.pod("train-1", other, labels=JOB)
    assert isinstance(await probe.probe(step_context(node, pods=PODS)), Ok)
    await sandbox.pod("train-2", node, labels=JOB)
    assert isinstance(await probe.probe(step_context(node, pods=PODS, namespaces=["elsewhere"])), Ok)
    among = await probe.probe(step_context(node, pods=PODS, namespaces=["elsewhere", sandbox.namespace]))
    assert isinstance(among, Busy)
    assert f"{sandbox.namespace}/train-2" in among.text


@pytest.mark.parametrize(
    "kind", [{"daemon": "agent"}, {"annotations": {"kubernetes.io/config.mirror": "static"}}], ids=str
)
async def test_what_belongs_to_the_node_itself_does_not_count(
    sandbox: ClusterSandbox, probe: KubernetesTrafficProbe, kind: dict[str, Any]
) -> None:
    node = await sandbox.node("w3")
    await sandbox.pod("own", node, labels=JOB, **kind)
    assert isinstance(await probe.probe(step_context(node, pods=PODS)), Ok)


async def test_a_pod_that_is_ending_still_runs(
    sandbox: ClusterSandbox, probe: KubernetesTrafficProbe
) -> None:
    node = await sandbox.node("w3")
    await sandbox.pod("train-1", node, labels=JOB, grace_s=60)
    sandbox.silent_nodes.add(node)
    await sandbox.api.delete(f"{sandbox.pods_path}/train-1")
    found = await probe.probe(step_context(node, pods=PODS))
    assert isinstance(found, Busy)
    assert "train-1, ending runs there" in found.text


async def test_many_pods_are_a_few_names(sandbox: ClusterSandbox, probe: KubernetesTrafficProbe) -> None:
    node = await sandbox.node("w3")
    for number in range(5):
        await sandbox.pod(f"train-{number}", node, labels=JOB)
    found = await probe.probe(step_context(node, pods=PODS))
    assert isinstance(found, Busy)
    assert "and 2 more run there" in found.text


async def test_a_node_of_no_cluster_is_unknown(probe: KubernetesTrafficProbe) -> None:
    plain = step_context("h1", pods=PODS)
    found = await probe.probe(type(plain)(Host("h1"), "r-1", 1, "s", "k", {"pods": PODS}, plain.deadline))
    assert isinstance(found, Unknown)
    assert "h1 is in no Kubernetes cluster" in found.text
