"""The shipped role, given to a service account with a short-lived token, suffices and grants nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from rolloutd.adapters.kubernetes.api_errors import ApiError
from rolloutd.adapters.kubernetes.cluster import Cluster
from rolloutd.adapters.kubernetes.cluster_registry import ClusterRegistry
from rolloutd.adapters.kubernetes.isolator import KubernetesIsolator
from rolloutd.adapters.kubernetes.permissions import find_missing_permissions
from rolloutd.ports import Clock, Ok, ProgressKind, ProgressReport
from tests.contracts.kubernetes.steps import step_context
from tests.support.cluster_sandbox import ClusterSandbox

JSON = Any

MANIFEST = Path(__file__).parents[3] / "deploy/kubernetes/rolloutd.yaml"
RBAC = "/apis/rbac.authorization.k8s.io/v1"
PLURALS = {
    "ClusterRole": "clusterroles",
    "ClusterRoleBinding": "clusterrolebindings",
    "Role": "namespaces/default/roles",
    "RoleBinding": "namespaces/default/rolebindings",
}


async def apply_manifest(sandbox: ClusterSandbox) -> list[str]:
    """Create the shipped account and roles under the test's own name; return the paths of the roles."""
    name, made = sandbox.prefix, []
    for document in yaml.safe_load_all(MANIFEST.read_text()):
        document["metadata"]["name"] = name
        for subject in document.get("subjects", ()):
            subject |= {"name": name, "namespace": name}
        if "roleRef" in document:
            document["roleRef"]["name"] = name
        if document["kind"] == "ServiceAccount":
            document["metadata"]["namespace"] = name
            await sandbox.api.post(f"/api/v1/namespaces/{name}/serviceaccounts", document)
        elif document["kind"] in PLURALS:
            path = f"{RBAC}/{PLURALS[document['kind']]}"
            await sandbox.api.post(path, document)
            made.append(f"{path}/{name}")
    return made


async def test_shipped_role_suffices_with_token_of_an_hour(
    sandbox: ClusterSandbox, kubeconfig: Path, tmp_path: Path, clock: Clock
) -> None:
    name, node = sandbox.prefix, await sandbox.node("a")
    made = await apply_manifest(sandbox)
    asked = {"spec": {"expirationSeconds": 3600}}
    token = await sandbox.api.post(f"/api/v1/namespaces/{name}/serviceaccounts/{name}/token", asked)
    document = yaml.safe_load(kubeconfig.read_text())
    for user in document["users"]:
        user["user"] = {"token": token["status"]["token"]}
    path = tmp_path / "of-the-account"
    path.write_text(yaml.safe_dump(document))
    cluster = Cluster("test", path)
    isolator = KubernetesIsolator(ClusterRegistry([cluster]), clock)
    ctx = step_context(node)
    try:
        assert await find_missing_permissions(cluster) == []
        assert isinstance(await isolator.isolate(ctx), Ok)
        report = ProgressReport(ProgressKind.ISOLATED, "r-1", 1, clock.now(), "drained")
        for _ in range(2):
            await isolator.report(ctx.host, report)
        assert isinstance(await isolator.return_to_service(ctx), Ok)
        for forbidden in (f"/api/v1/namespaces/{name}/configmaps", "/api/v1/nodes/{node}/proxy"):
            with pytest.raises(ApiError, match="403"):
                await cluster.get(forbidden.format(node=node))
    finally:
        await cluster.close()
        for each in made:
            await sandbox.api.delete(each)
