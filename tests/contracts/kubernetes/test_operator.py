"""Rollouts and votes as objects, on the fake and on a real control plane.

A real one must allow the kubeconfig's user to impersonate others and to define kinds; the tests remove what
they define.  People are impersonated: a cluster that gives tokens to people is not needed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from rolloutd.adapters.kubernetes.cluster import Cluster
from rolloutd.operator import controller, vote_objects
from rolloutd.operator.controller import Controller
from rolloutd.operator.vote_objects import VoteCounter
from tests.rolloutd.control_environment import PLAN, ControlEnvironment, control_environment
from tests.support.cluster_sandbox import ApiError, ClusterSandbox, KubernetesApi
from tests.support.waiting import wait_in_loop_until

JSON = Any

DEPLOY = Path(__file__).parents[3] / "deploy/kubernetes/operator"
RBAC = "/apis/rbac.authorization.k8s.io/v1"
OLGA, EVE = "oidc:olga@corp", "oidc:eve@corp"
CLUSTER_WIDE = {
    "CustomResourceDefinition": "/apis/apiextensions.k8s.io/v1/customresourcedefinitions",
    "ClusterRole": f"{RBAC}/clusterroles",
    "ValidatingAdmissionPolicy": "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies",
    "ValidatingAdmissionPolicyBinding": (
        "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicybindings"
    ),
}


@dataclass
class Front:
    """The daemon's front end over a cluster, and its users."""

    inside: ControlEnvironment
    api: KubernetesApi
    olga: KubernetesApi
    eve: KubernetesApi
    namespace: str

    def path(self, kind: str, name: str = "") -> str:
        return f"/apis/rolloutd.io/v1/namespaces/{self.namespace}/{kind}" + (f"/{name}" if name else "")

    async def apply(self, name: str, **spec: JSON) -> JSON:
        body = {
            "apiVersion": "rolloutd.io/v1",
            "kind": "MaintenanceRollout",
            "metadata": {"name": name, "namespace": self.namespace},
            "spec": spec,
        }
        return await self.api.apply(self.path("maintenancerollouts", name), body)

    async def status(self, name: str) -> JSON:
        return (await self.api.get(self.path("maintenancerollouts", name))).get("status") or {}

    async def vote(self, person: KubernetesApi, name: str, **changes: JSON) -> str:
        """Create a vote at the start gate; return its name."""
        obj = await self.api.get(self.path("maintenancerollouts", name))
        spec = {
            "rollout": name,
            "rolloutUid": obj["metadata"]["uid"],
            "gate": "start",
            "digest": obj["status"]["digest"],
            "choice": "yes",
            "voter": person.user,
            "reason": "read it",
        }
        body = {
            "apiVersion": "rolloutd.io/v1",
            "kind": "MaintenanceVote",
            "metadata": {"generateName": "v-", "namespace": self.namespace},
            "spec": spec | changes,
        }
        made = await person.post(self.path("maintenancevotes"), body)
        return str(made["metadata"]["name"])

    async def counted(self, vote: str) -> JSON:
        """Return the status of a vote once the daemon has judged it."""
        found: JSON = {}

        async def is_judged() -> bool:
            found.update(await self.api.get(self.path("maintenancevotes", vote)))
            return "counted" in (found.get("status") or {})

        await wait_in_loop_until(is_judged)
        return found["status"]


@asynccontextmanager
async def installed(api: KubernetesApi, namespace: str) -> AsyncIterator[None]:
    """Install what is shipped, the kinds first, and remove it afterwards."""
    files = ("crd.yaml", "people.yaml", "votes.yaml")
    documents = [each for name in files for each in yaml.safe_load_all((DEPLOY / name).read_text())]
    paths = []
    try:
        for each in documents:
            if each["kind"] in CLUSTER_WIDE:
                paths.append(f"{CLUSTER_WIDE[each['kind']]}/{each['metadata']['name']}")
                await api.apply(paths[-1], each)

        async def are_served() -> bool:
            kinds = ("maintenancerollouts", "maintenancevotes")
            found = [await api.find(f"/apis/rolloutd.io/v1/namespaces/{namespace}/{kind}") for kind in kinds]
            return None not in found

        await wait_in_loop_until(are_served)
        # Eve may create votes, and approves nothing.
        rule = {"apiGroups": ["rolloutd.io"], "resources": ["maintenancevotes"], "verbs": ["create"]}
        reads = {"apiGroups": ["rolloutd.io"], "resources": ["maintenancerollouts"], "verbs": ["get"]}
        role = {"metadata": {"name": "voter", "namespace": namespace}, "rules": [rule, reads]}
        await api.post(f"{RBAC}/namespaces/{namespace}/roles", role)
        for user, kind, name in ((OLGA, "ClusterRole", "rolloutd-approver"), (EVE, "Role", "voter")):
            binding = {
                "metadata": {"name": name, "namespace": namespace},
                "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": kind, "name": name},
                "subjects": [{"kind": "User", "apiGroup": "rbac.authorization.k8s.io", "name": user}],
            }
            await api.post(f"{RBAC}/namespaces/{namespace}/rolebindings", binding)
        yield
    finally:
        for path in reversed(paths):
            await api.delete(path)


@pytest.fixture
async def front(
    sandbox: ClusterSandbox,
    kubeconfig: Path,
    cluster: Cluster,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[Front]:
    # A test does not wait a minute for a policy, nor five seconds for a status.
    monkeypatch.setattr(vote_objects, "POLICY_SETTLES_S", 1.0)
    monkeypatch.setattr(controller, "STATUS_INTERVAL_S", 0.2)
    monkeypatch.setattr(controller, "COALESCE_S", 0.05)
    users = [KubernetesApi(kubeconfig, user=name) for name in (OLGA, EVE)]
    for each in users:
        await each.open()
    operator = {
        "cluster": cluster.name,
        "namespaces": {sandbox.namespace: ["infra"]},
        "people": {OLGA: "olga", EVE: "paul"},
        "vote_objects": True,
    }
    try:
        async with (
            installed(sandbox.api, sandbox.namespace),
            control_environment(tmp_path, operator=operator) as inside,
        ):
            inside.observe_all_up()
            settings = inside.state.settings.operator
            assert settings is not None
            shared = (inside.state, inside.sources, cluster, settings)
            tasks = [asyncio.create_task(each.run()) for each in (Controller(*shared), VoteCounter(*shared))]
            yield Front(inside, sandbox.api, *users, sandbox.namespace)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    finally:
        for each in users:
            await each.close()


async def is_approvable(front: Front, name: str) -> bool:
    return (await front.status(name)).get("state") == "awaiting-approval"


async def test_definition_refuses_what_is_not_one_plan(front: Front) -> None:
    for spec in ({}, {"plan": PLAN, "source": {"git": "https://x.example", "ref": "main", "path": "p.yml"}}):
        with pytest.raises(ApiError, match="422"):
            await front.apply("neither", **spec)
    await front.apply("one", plan=PLAN)
    with pytest.raises(ApiError, match="422"):
        await front.apply("one", plan=PLAN.replace("soak: 10m", "soak: 20m"))


async def test_applied_object_is_rollout_with_status_and_events(front: Front) -> None:
    # 900 KiB, which only server-side apply takes.
    await front.apply("large", plan=PLAN + "".join(f"# {n} {'x' * 1_015}\n" for n in range(900)))
    await wait_in_loop_until(lambda: is_approvable(front, "large"))
    status = await front.status("large")
    assert status["observedGeneration"] == 1
    edit = {"apiVersion": "rolloutd.io/v1", "kind": "MaintenanceRollout", "status": {"state": "done"}}
    await front.api.apply(front.path("maintenancerollouts", "large") + "/status", edit)
    await wait_in_loop_until(lambda: is_approvable(front, "large"))
    events = (await front.api.get(f"/api/v1/namespaces/{front.namespace}/events"))["items"]
    reasons = {each["reason"] for each in events if each["involvedObject"]["name"] == "large"}
    assert {"Submitted", "AwaitingApproval"} <= reasons
    await front.api.delete(front.path("maintenancerollouts", "large"))

    async def is_closed() -> bool:
        return bool(front.inside.state.index.rollouts[status["rollout"]].closed)

    await wait_in_loop_until(is_closed)


async def test_vote_objects_prove_their_voters(front: Front) -> None:
    await front.apply("kernel", plan=PLAN)
    await wait_in_loop_until(lambda: is_approvable(front, "kernel"))

    async def is_in_force() -> bool:
        try:
            await front.vote(front.eve, "kernel", voter=OLGA)
        except ApiError as refused:
            return "voter must be" in str(refused)
        return False

    await wait_in_loop_until(is_in_force)
    with pytest.raises(ApiError, match="may not approve"):
        await front.vote(front.eve, "kernel")
    # The clocks of a cluster count whole seconds.
    await asyncio.sleep(2.1)
    old = await front.counted(await front.vote(front.olga, "kernel", digest="0" * 64))
    assert (old["counted"], "digest" in old["reason"]) == (False, True)
    again = await front.counted(await front.vote(front.olga, "kernel", rolloutUid="of-one-that-was-deleted"))
    assert (again["counted"], "no open rollout" in again["reason"]) == (False, True)
    vote = await front.vote(front.olga, "kernel")
    assert await front.counted(vote) == {"counted": True, "reason": ""}
    [rollout] = front.inside.state.index.rollouts.values()
    assert [each.actor.name for each in rollout.votes] == ["kubernetes:olga"]


async def test_policy_put_back_proves_nothing_that_was_made_without_it(front: Front) -> None:
    await front.apply("kernel", plan=PLAN)
    await wait_in_loop_until(lambda: is_approvable(front, "kernel"))
    kind = "ValidatingAdmissionPolicyBinding"
    path = f"{CLUSTER_WIDE[kind]}/{vote_objects.POLICY_NAME}"
    shipped = {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": kind,
        "metadata": {"name": vote_objects.POLICY_NAME},
        "spec": vote_objects.BINDING_SPEC,
    }
    # Else the policy itself would be too young; the clocks of a cluster count whole seconds.
    await asyncio.sleep(2.1)
    await front.api.delete(path)
    forged: list[str] = []

    async def is_forged() -> bool:
        try:
            forged.append(await front.vote(front.olga, "kernel", voter=OLGA, reason="forged"))
        except ApiError:
            return False
        return True

    await wait_in_loop_until(is_forged)
    judged = await front.counted(forged[0])
    assert (judged["counted"], "missing" in judged["reason"]) == (False, True)
    await front.api.apply(path, shipped)
    [rollout] = front.inside.state.index.rollouts.values()
    assert rollout.votes == ()
