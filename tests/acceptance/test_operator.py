"""A rollout from `kubectl apply` to done: two people vote by kubectl, and the daemon is killed.

Real are kubectl, git's server, the daemon, sshd and Ansible; the API server is the fake.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.rolloutd.fleetlock.test_fleetlock import make_certificates
from tests.rolloutd.operator.test_health import argocd, kstatus
from tests.support.cluster_environment import (
    WORK_PLAYBOOK,
    ClusterEnvironment,
    assert_restored,
    cluster_environment,
)
from tests.support.daemon_environment import WAIT_LIMIT_S, plan
from tests.support.fake_kubernetes.access import ALL_RULES, User
from tests.support.git_repository import Repository, git_server
from tests.support.ports import free_port

pytestmark = [pytest.mark.servers("kubectl", "lua5.1"), pytest.mark.long]

NODES = int(os.environ.get("ROLLOUTD_TEST_OPERATOR_NODES", "8"))
NOTES = "".join(f"# {number} {'x' * 1_015}\n" for number in range(900))
"""Comments of 900 KiB: etcd takes the plan, and client-side apply would not."""

MANIFESTS = Path(__file__).parents[2] / "deploy/kubernetes/operator"
PLAN_NAME, OBJECT, NAMESPACE = "kernel", "kernel-1", "ops"
PEOPLE = {"oidc:olga@corp": "olga", "oidc:oscar@corp": "oscar"}


async def kubectl(kubeconfig: Path, *words: str, stdin: str = "", is_refused: bool = False) -> str:
    """Run the real kubectl, which finds our plugin beside this Python."""
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    environment |= {"KUBECONFIG": str(kubeconfig), "HOME": str(kubeconfig.parent)}
    done = await asyncio.to_thread(
        subprocess.run,
        [shutil.which("kubectl") or "kubectl", *words],
        input=stdin.encode(),
        env=environment,
        capture_output=True,
        timeout=WAIT_LIMIT_S,
    )
    text = (done.stdout + done.stderr).decode()
    assert (done.returncode != 0) == is_refused, text
    return text


async def test_rollout_from_kubectl_apply_to_done(tmp_path: Path) -> None:
    certificates = await asyncio.to_thread(make_certificates, tmp_path)
    port = free_port()
    tls = {"cert": f"{tmp_path}/server.pem", "key": f"{tmp_path}/server.key"}
    operator = {
        "cluster": "ams",
        "namespaces": {NAMESPACE: ["infra"]},
        "people": PEOPLE,
        "votes": {"listen": f"127.0.0.1:{port}", "tls": tls},
    }
    teams = {"infra": {"members": ["olga", "oscar"]}} | {f"t{n}": {"members": ["root"]} for n in range(1, 5)}
    repository = Repository(tmp_path / "changes")
    repository.commit("change.yml", WORK_PLAYBOOK)
    async with (
        git_server(tmp_path) as url,
        cluster_environment(tmp_path, NODES, operator=operator, teams=teams) as env,
    ):
        fake = env.kubernetes
        fake.access.anonymous = ALL_RULES  # kubectl sends no token without TLS
        fake.objects.create("namespaces", {"metadata": {"name": NAMESPACE}, "spec": {}})
        ours = fake.kubeconfig(tmp_path / "of-submitter")
        applied = await kubectl(
            ours,
            "apply",
            "--server-side",
            "--validate=false",
            "-f",
            "-",
            stdin=manifest(env, f"{url}/changes"),
        )
        assert "serverside-applied" in applied
        await env.wait_until(lambda: status_of(env).get("state") == "awaiting-approval", "it awaits votes")
        voting = ("-n", NAMESPACE, "--server", f"127.0.0.1:{port}", "--ca-file", f"{certificates}/ca.pem")
        vote = ("rolloutd", "approve", OBJECT)
        submitter = await kubectl(ours, *vote, "start", *voting, "--reason", "mine", is_refused=True)
        assert "not valid for rolloutd" in submitter
        reader = login(env, tmp_path, next(iter(PEOPLE)))
        why = await kubectl(reader, "rolloutd", "why", env.nodes[0], *voting)
        assert f"{OBJECT}: {env.nodes[0]} is pending: " in why
        for user in PEOPLE:
            person = login(env, tmp_path, user)
            await kubectl(person, *vote, "start", *voting, "--reason", "read the diff")
        await env.in_thread(env.daemon.kill_daemon)
        await env.in_thread(env.daemon.start_daemon)
        await env.wait_until(lambda: "continue" in waiting_gates(env), "the canaries are judged")
        await kubectl(person, *vote, "continue", *voting, "--reason", "healthy")
        await env.wait_until(lambda: status_of(env).get("state") == "done", "it is done")
        status = status_of(env)
        assert (status["progress"], status["failed"]) == (f"{NODES}/{NODES}", 0)
        assert {each["status"] for each in status["conditions"] if each["type"] == "Ready"} == {"True"}
        assert sorted(span.node for span in env.daemon.spans()) == sorted(env.nodes)
        for node in env.nodes:
            await assert_restored(env, node)
        thing = fake.objects.get("maintenancerollouts", NAMESPACE, OBJECT)
        assert (kstatus(thing), argocd(thing)) == ("Current", "Healthy")
        described = await kubectl(ours, "describe", "mr", OBJECT, "-n", NAMESPACE)
        assert [word in described for word in ("Submitted", "AwaitingApproval", "Done")] == [True] * 3
        listed = await kubectl(ours, "get", "mr", "-n", NAMESPACE, "-o", "json")
        assert json.loads(listed)["items"][0]["status"]["rollout"] == status["rollout"]
        rollouts = await env.in_thread(env.daemon.client.get, "/v1/rollouts")
        assert len(rollouts["rollouts"]) == 1


def manifest(env: ClusterEnvironment, url: str) -> str:
    change = plan(
        PLAN_NAME,
        source={"git": url, "ref": "main"},
        isolate=[{"kubernetes": {"drain_timeout": "10m"}}],
        maintain={"playbook": "change.yml", "vars": {"log_file": str(env.daemon.log_file)}},
        verify=[{"kubernetes": {"ready": True, "within": "1m"}}],
        soak="1s",
        gates={"start": {"owner": 2}, "continue": {"owner": 1}},
    )
    return yaml.safe_dump(
        {
            "apiVersion": "rolloutd.io/v1",
            "kind": "MaintenanceRollout",
            "metadata": {"name": OBJECT, "namespace": NAMESPACE},
            "spec": {"plan": yaml.safe_dump(change) + NOTES},
        }
    )


def status_of(env: ClusterEnvironment) -> Any:
    """Return the object's status, by the server's own books."""
    return env.kubernetes.objects.get("maintenancerollouts", NAMESPACE, OBJECT).get("status") or {}


def waiting_gates(env: ClusterEnvironment) -> list[str]:
    return [each["gate"] for each in status_of(env).get("gates", ())]


def login(env: ClusterEnvironment, directory: Path, user: str) -> Path:
    """Give a user of the cluster a token, and return their kubeconfig."""
    role = yaml.safe_load_all((MANIFESTS / "people.yaml").read_text())
    rules = next(each["rules"] for each in role if each["metadata"]["name"] == "rolloutd-approver")
    token = env.kubernetes.token(rules)
    env.kubernetes.access.users[token] = User(user, rules=rules)
    return env.kubernetes.kubeconfig(directory / f"of-{PEOPLE[user]}", token=token)
