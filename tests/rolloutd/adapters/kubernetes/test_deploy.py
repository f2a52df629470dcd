"""The shipped manifests: the rights suffice and are all needed, and the token is short-lived."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from rolloutd.adapters.kubernetes.api_errors import ApiError
from rolloutd.adapters.kubernetes.budgets import BudgetWatch
from rolloutd.adapters.kubernetes.cluster import Cluster
from rolloutd.adapters.kubernetes.cluster_registry import ClusterRegistry
from rolloutd.adapters.kubernetes.cordon import cordon_node, uncordon_node
from rolloutd.adapters.kubernetes.drain import drain
from rolloutd.adapters.kubernetes.isolator import KubernetesIsolator
from rolloutd.adapters.kubernetes.permissions import find_missing_permissions
from rolloutd.adapters.kubernetes.pods import EvictionPolicy
from rolloutd.adapters.kubernetes.progress import CONDITION, show_report
from rolloutd.app import SystemClock
from rolloutd.ports import Ok, ProgressKind, ProgressReport
from tests.contracts.kubernetes.steps import host, step_context
from tests.rolloutd.adapters.kubernetes.test_faults import add_node, add_pod
from tests.support.fake_kubernetes import FakeKubernetes
from tests.support.fake_kubernetes.objects import condition

JSON = Any

ROLE = Path(__file__).parents[4] / "deploy/kubernetes/rolloutd.yaml"
IN_CLUSTER = ROLE.with_name("in-cluster.yaml")


@pytest.fixture
async def fake() -> AsyncIterator[FakeKubernetes]:
    async with FakeKubernetes() as fake:
        yield fake


def shipped_rules() -> list[dict[str, JSON]]:
    """Return the rules of the shipped ClusterRole and Role; the fake has no namespaced rights."""
    documents = yaml.safe_load_all(ROLE.read_text())
    roles = (each for each in documents if each["kind"] in ("ClusterRole", "Role"))
    return [rule for role in roles for rule in role["rules"]]


async def test_shipped_role_is_sufficient_and_minimal(fake: FakeKubernetes, tmp_path: Path) -> None:
    rules = shipped_rules()
    cluster = Cluster("ams", fake.kubeconfig(tmp_path / "k", token=fake.token(rules)))
    add_node(fake, "n1")
    fake.objects.create("namespaces", {"metadata": {"name": "shop"}})
    add_pod(fake, "done", "n1")
    pods = fake.objects.all("pods")
    fake.objects.modify("pods", next(pods), lambda pod: pod.update(status={"phase": "Succeeded"}))
    assert await find_missing_permissions(cluster) == []
    assert isinstance(await cordon_node(cluster, "n1", rollout="r", attempt=1, at=0.0), Ok)
    assert isinstance(await drain(BudgetWatch(cluster), "n1", EvictionPolicy(), timeout_s=30.0), Ok)
    for _ in range(2):
        await show_report(cluster, "n1", ProgressReport(ProgressKind.ISOLATED, "r", 1, 0.0, "drained"))
    assert condition(fake.objects.get("nodes", "", "n1"), CONDITION)
    assert isinstance(await uncordon_node(cluster, "n1", rollout="r", was_cordoned=False), Ok)
    for gone in rules:
        rest = [rule for rule in rules if rule is not gone]
        less = Cluster("ams", fake.kubeconfig(tmp_path / "less", token=fake.token(rest)))
        words = " ".join(await find_missing_permissions(less))
        assert all(f"{verb} {gone['resources'][0]}" in words for verb in gone["verbs"])
        await less.close()
    await cluster.close()


async def test_missing_rights_for_progress_hinder_no_isolation(fake: FakeKubernetes, tmp_path: Path) -> None:
    rules = [rule for rule in shipped_rules() if not {"events", "nodes/status"} & set(rule["resources"])]
    cluster = Cluster("ams", fake.kubeconfig(tmp_path / "k", token=fake.token(rules)))
    isolator = KubernetesIsolator(ClusterRegistry([cluster]), SystemClock())
    add_node(fake, "n1")
    ctx = step_context("n1")
    ctx = replace(ctx, host=host("n1", "ams"))
    assert isinstance(await isolator.isolate(ctx), Ok)
    with pytest.raises(ApiError, match="403"):
        await isolator.report(ctx.host, ProgressReport(ProgressKind.ISOLATED, "r-1", 1, 0.0, "drained"))
    assert isinstance(await isolator.return_to_service(ctx), Ok)
    await cluster.close()


async def test_renewed_token_file_costs_no_request(fake: FakeKubernetes, tmp_path: Path) -> None:
    token_file, kubeconfig = tmp_path / "token", tmp_path / "k"
    old, new = fake.token(shipped_rules()), fake.token(shipped_rules())
    token_file.write_text(old)
    [shipped] = [d for d in yaml.safe_load_all(IN_CLUSTER.read_text()) if d["kind"] == "ConfigMap"]
    document = yaml.safe_load(shipped["data"]["kubeconfig"])
    document["clusters"][0]["cluster"] = {"server": fake.url}
    document["users"][0]["user"]["tokenFile"] = str(token_file)
    kubeconfig.write_text(yaml.safe_dump(document))
    cluster = Cluster("ams", kubeconfig)
    add_node(fake, "n1")
    assert await cluster.get("/api/v1/nodes/n1")

    token_file.write_text(new)
    del fake.access.tokens[old]

    assert await cluster.get("/api/v1/nodes/n1")
    await cluster.close()


def test_manifest_runs_one_daemon_with_short_lived_token() -> None:
    documents = {each["kind"]: each for each in yaml.safe_load_all(IN_CLUSTER.read_text())}
    deployment = documents["Deployment"]["spec"]
    assert (deployment["replicas"], deployment["strategy"]) == (1, {"type": "Recreate"})
    pod = deployment["template"]["spec"]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    token = volumes["token"]["projected"]["sources"][0]["serviceAccountToken"]
    assert token["expirationSeconds"] <= 3600
    claim = volumes["state"]["persistentVolumeClaim"]["claimName"]
    assert claim == documents["PersistentVolumeClaim"]["metadata"]["name"]
    mounted = {mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
    assert mounted == volumes.keys()
    roles = [each for each in yaml.safe_load_all(ROLE.read_text()) if each["kind"] != "Namespace"]
    assert "Secret" not in {each["kind"] for each in roles}
    assert pod["serviceAccountName"] in {each["metadata"]["name"] for each in roles}
