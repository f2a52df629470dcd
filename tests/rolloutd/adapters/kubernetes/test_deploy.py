"""The shipped manifests: the rights suffice and are all needed, and the token is short-lived."""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
import subprocess
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.packages import image
from machines.model.node import NodeHealth
from rolloutd import __version__
from rolloutd.adapters.kubernetes.api_errors import ApiError
from rolloutd.adapters.kubernetes.budgets import BudgetWatch
from rolloutd.adapters.kubernetes.cluster import Cluster
from rolloutd.adapters.kubernetes.cluster_registry import ClusterRegistry
from rolloutd.adapters.kubernetes.cordon import cordon_node, uncordon_node
from rolloutd.adapters.kubernetes.drain import drain
from rolloutd.adapters.kubernetes.inventory import KubernetesInventory
from rolloutd.adapters.kubernetes.isolator import KubernetesIsolator
from rolloutd.adapters.kubernetes.node_watch import NodeWatch
from rolloutd.adapters.kubernetes.permissions import find_missing_permissions
from rolloutd.adapters.kubernetes.pods import EvictionPolicy
from rolloutd.adapters.kubernetes.progress import CONDITION, show_report
from rolloutd.adapters.timers import SystemClock
from rolloutd.cli.main import parser
from rolloutd.ports import Ok, ProgressKind, ProgressReport
from rolloutd.settings import load
from tests.contracts.kubernetes.steps import host, step_context
from tests.rolloutd.adapters.kubernetes.test_faults import add_node, add_pod, watching
from tests.support.fake_kubernetes import FakeKubernetes
from tests.support.fake_kubernetes.access import ALL_RULES
from tests.support.fake_kubernetes.objects import condition
from tests.support.waiting import wait_in_loop_until

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


async def run(*command: str | Path, kubeconfig: Path) -> str:
    """Run a command as the cluster's admin and return its output."""
    environment = {**os.environ, "KUBECONFIG": str(kubeconfig), "HOME": str(kubeconfig.parent)}
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, env=environment, stdout=pipe, stderr=pipe)
    output, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()
    return output.decode()


@pytest.fixture
async def admin(fake: FakeKubernetes, tmp_path: Path) -> Path:
    """The kubeconfig of an admin who has applied the shipped manifests with kubectl."""
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed")
    fake.access.anonymous = ALL_RULES  # kubectl sends no token without TLS
    kubeconfig = fake.kubeconfig(tmp_path / "admin")
    for manifest in (ROLE, IN_CLUSTER):
        await run("kubectl", "apply", "--validate=false", "-f", manifest, kubeconfig=kubeconfig)
    ca = {"metadata": {"name": "kube-root-ca.crt", "namespace": "rolloutd"}, "data": {"ca.crt": "none"}}
    fake.objects.create("configmaps", ca)
    return kubeconfig


async def test_manifests_apply_with_known_fields_only(
    fake: FakeKubernetes, admin: Path, tmp_path: Path
) -> None:
    shipped = [each for path in (ROLE, IN_CLUSTER) for each in yaml.safe_load_all(path.read_text())]
    again = [
        await run("kubectl", "apply", "--validate=false", "-f", path, kubeconfig=admin)
        for path in (ROLE, IN_CLUSTER)
    ]
    assert "".join(again).count(" unchanged\n") == len(shipped)
    misspelt = tmp_path / "misspelt.yaml"
    misspelt.write_text(IN_CLUSTER.read_text().replace("replicas:", "replica:").replace("-state", "-x"))
    fake.objects.remove("deployments", fake.objects.get("deployments", "rolloutd", "rolloutd"))
    with pytest.raises(AssertionError, match=r'unknown field "Deployment\.spec\.replica"'):
        await run("kubectl", "apply", "--validate=false", "-f", misspelt, kubeconfig=admin)


async def test_every_granted_verb_is_used_and_no_other(
    fake: FakeKubernetes, admin: Path, tmp_path: Path
) -> None:
    kubeconfig = tmp_path / "daemon"
    kubeconfig.write_text(await run(ROLE.with_name("make-kubeconfig.sh"), "ams", kubeconfig=admin))
    add_node(fake, "n1")
    add_pod(fake, "api", "n1", grace_s=0)
    fake.server.requests.clear()
    cluster = Cluster("ams", kubeconfig)
    watch = NodeWatch(cluster, SystemClock())
    isolator = KubernetesIsolator(ClusterRegistry([cluster]), SystemClock())
    ctx = replace(step_context("n1"), host=host("n1", "ams"))
    async with watching(watch):
        assert await KubernetesInventory(cluster).refresh()
        await wait_in_loop_until(lambda: watch.observe("n1").sight is NodeHealth.UP)
        assert isinstance(await isolator.isolate(ctx), Ok)
        for _ in range(2):
            await isolator.report(ctx.host, ProgressReport(ProgressKind.ISOLATED, "r-1", 1, 0.0, "drained"))
        assert isinstance(await isolator.return_to_service(ctx), Ok)
        assert await find_missing_permissions(cluster) == []
    await cluster.close()

    assert [each.request for each in fake.server.answered if each.code == 403] == []
    used = {(each.verb, each.group, each.full_resource, each.namespace) for each in fake.server.requests}
    roles = (each for each in yaml.safe_load_all(ROLE.read_text()) if each["kind"] in ("ClusterRole", "Role"))
    granted = {
        (verb, group, resource, role["metadata"].get("namespace", ""))
        for role in roles
        for rule in role["rules"]
        for group, resource, verb in itertools.product(rule["apiGroups"], rule["resources"], rule["verbs"])
    }
    # An eviction is a right for all namespaces, and is asked for in that of its pod.
    assert {(*each[:3], "" if each[2] == "pods/eviction" else each[3]) for each in used} == granted


async def test_events_outside_default_are_forbidden(
    fake: FakeKubernetes, admin: Path, tmp_path: Path
) -> None:
    kubeconfig = tmp_path / "daemon"
    kubeconfig.write_text(await run(ROLE.with_name("make-kubeconfig.sh"), "ams", kubeconfig=admin))
    cluster = Cluster("ams", kubeconfig)
    with pytest.raises(ApiError, match="403"):
        await cluster.post("/api/v1/namespaces/rolloutd/events", {"metadata": {"name": "e"}})
    for token, (namespace, name, _) in fake.access.service_accounts.items():
        fake.access.service_accounts[token] = (namespace, name, 0.0)
    with pytest.raises(ApiError, match="401"):
        await cluster.get("/api/v1/nodes")
    await cluster.close()


def pod_of_manifest() -> dict[str, JSON]:
    documents = {each["kind"]: each for each in yaml.safe_load_all(IN_CLUSTER.read_text())}
    spec: dict[str, JSON] = documents["Deployment"]["spec"]["template"]["spec"]
    return spec


def test_pod_meets_restricted_standard() -> None:
    pod = pod_of_manifest()
    security = pod["securityContext"]
    assert security["runAsNonRoot"] is True
    assert security["runAsUser"] == image.USER
    assert security["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in pod["containers"]:
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
    kinds = {kind for volume in pod["volumes"] for kind in volume if kind != "name"}
    assert kinds <= {"configMap", "emptyDir", "persistentVolumeClaim", "projected", "secret"}
    assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
    namespace = next(each for each in yaml.safe_load_all(ROLE.read_text()) if each["kind"] == "Namespace")
    assert namespace["metadata"]["labels"] == {"pod-security.kubernetes.io/enforce": "restricted"}


def test_pod_has_probes_resources_and_keys(tmp_path: Path) -> None:
    pod = pod_of_manifest()
    (container,) = pod["containers"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        words = container[probe]["exec"]["command"]
        assert words[0] == "rolloutctl"
        parser().parse_args(words[1:])
    assert {"cpu", "memory"} == container["resources"]["requests"].keys()
    mounted = {mount["name"]: mount for mount in container["volumeMounts"]}
    documents = {each["kind"]: each for each in yaml.safe_load_all(IN_CLUSTER.read_text())}
    settings = yaml.safe_load(documents["ConfigMap"]["data"]["config.yaml"])
    assert {str(Path(settings["ssh"][key]).parent) for key in ("key_file", "known_hosts")} == {
        mounted["ssh"]["mountPath"]
    }
    # ssh refuses a key that others may read.
    (secret,) = [volume["secret"] for volume in pod["volumes"] if volume["name"] == "ssh"]
    assert secret["defaultMode"] & 0o037 == 0


def test_pod_has_temporary_databases_on_its_volume() -> None:
    pod = pod_of_manifest()
    (container,) = pod["containers"]
    places = {each["mountPath"]: each["name"] for each in container["volumeMounts"]}
    (variable,) = (each for each in container["env"] if each["name"] == "SQLITE_TMPDIR")
    (volume,) = (each for each in pod["volumes"] if each["name"] == places[variable["value"]])
    assert "emptyDir" not in volume


def test_kustomization_has_the_image_of_this_version() -> None:
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed")
    command = ["kubectl", "kustomize", str(ROLE.parent)]
    built = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    documents = list(yaml.safe_load_all(built))
    shipped = [each for path in (ROLE, IN_CLUSTER) for each in yaml.safe_load_all(path.read_text())]
    assert len(documents) == len(shipped)
    (deployment,) = [each for each in documents if each["kind"] == "Deployment"]
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert container["image"] == f"registry.example/rolloutd:{__version__}"


def test_manifest_runs_one_daemon_with_short_lived_token(tmp_path: Path) -> None:
    documents = {each["kind"]: each for each in yaml.safe_load_all(IN_CLUSTER.read_text())}
    deployment = documents["Deployment"]["spec"]
    assert (deployment["replicas"], deployment["strategy"]) == (1, {"type": "Recreate"})
    pod = deployment["template"]["spec"]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    token = volumes["token"]["projected"]["sources"][0]["serviceAccountToken"]
    assert token["expirationSeconds"] <= 3600
    claim = volumes["state"]["persistentVolumeClaim"]["claimName"]
    assert claim == documents["PersistentVolumeClaim"]["metadata"]["name"]
    mounted = {mount["name"]: Path(mount["mountPath"]) for mount in pod["containers"][0]["volumeMounts"]}
    assert mounted.keys() == volumes.keys()
    (tmp_path / "config.yaml").write_text(documents["ConfigMap"]["data"]["config.yaml"])
    settings = load(tmp_path / "config.yaml")
    # The daemon makes its state directory, because the root of a volume may be open to others.
    assert (settings.state_dir.parent, settings.socket.parent) == (mounted["state"], mounted["socket"])
    roles = [each for each in yaml.safe_load_all(ROLE.read_text()) if each["kind"] != "Namespace"]
    assert "Secret" not in {each["kind"] for each in roles}
    assert pod["serviceAccountName"] in {each["metadata"]["name"] for each in roles}
