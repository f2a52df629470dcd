"""One plan over this machine, a cluster's Jobs and AWX: one slot, one percent, one report, and no secret.

Real are the daemon, sshd, ansible-playbook and the program of the pods; the cluster and AWX are the fakes.
"""

from __future__ import annotations

import asyncio
import base64
import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.parsing.vault import VaultLib, VaultSecret

from rolloutd.control.client import ApiError, api_path
from tests.acceptance.test_awx_runs import PLAYBOOK, awx_with_playbooks, plan_of_git, start_nodes
from tests.acceptance.test_kubernetes_runs import cluster_with_jobs
from tests.contracts.kubernetes_jobs.backend import NAMESPACE
from tests.support.daemon_environment import WAIT_LIMIT_S, DaemonEnvironment, plan
from tests.support.fake_awx import FakeAwx
from tests.support.fake_awx.server import TOKEN
from tests.support.fake_kubernetes.cluster import FakeKubernetes
from tests.support.forked_process import CLI, run_forked

pytestmark = [pytest.mark.servers, pytest.mark.long]

RUNNER_OF = {"n1": "local", "n2": "kubernetes", "n3": "awx"}
LABELS = {
    node: {"team": f"t{node[1]}", "rack": "r1", "role": "worker", "canary": str(node == "n1").lower()}
    for node in RUNNER_OF
}

VAULT_PASSWORD, VAULTED, PASSWORD = "planted-vault-Zq8", "planted-vaulted-Ht3", "planted-become-Wm5"


@dataclass
class ThreeRunners:
    """A daemon with three runners, one node for each, and the secrets that it was given."""

    awx: FakeAwx
    cluster: FakeKubernetes
    daemon: DaemonEnvironment
    git_url: str
    secrets: dict[str, str]

    async def ask(self, *path: str) -> Any:
        return await asyncio.to_thread(self.daemon.client.get, api_path("rollouts", *path))

    async def run_cli(self, *words: str) -> str:
        return (await asyncio.to_thread(run_forked, CLI, list(words), timeout_s=WAIT_LIMIT_S)).stdout


@asynccontextmanager
async def three_runners(directory: Path) -> AsyncIterator[ThreeRunners]:
    daemon = DaemonEnvironment(directory, LABELS)
    (directory / "vault").write_text(VAULT_PASSWORD)
    daemon.environment["ANSIBLE_VAULT_PASSWORD_FILE"] = str(directory / "vault")
    async with (
        awx_with_playbooks(directory) as (awx, git_url, of_awx),
        cluster_with_jobs(directory) as (cluster, _, of_jobs),
    ):
        try:
            sshd = await asyncio.to_thread(start_nodes, daemon, awx)
            _plant(directory / "hosts.yml")
            daemon.write_settings(
                runners=[
                    {"match": "team=t2", "kubernetes": of_jobs},
                    {"match": "team=t3", "awx": {**of_awx, "credential_variables": ["app_password"]}},
                ],
                pools={"role": {"max_unavailable": 1}},
                ssh={"known_hosts": str(directory / "known_hosts"), "key_file": str(sshd.key_file)},
            )
            await asyncio.to_thread(daemon.start_daemon)
            kubeconfig = yaml.safe_load(Path(of_jobs["kubeconfig"]).read_text())
            secrets = {
                "variable of the inventory": PASSWORD,
                "vaulted variable": VAULTED,
                "vault secret": VAULT_PASSWORD,
                "token of AWX": TOKEN,
                "token of the kubeconfig": kubeconfig["users"][0]["user"]["token"],
                "ssh key": Path(sshd.key_file).read_text().splitlines()[2],
            }
            yield ThreeRunners(awx, cluster, daemon, git_url, secrets)
        finally:
            await asyncio.to_thread(daemon.stop)


def _plant(inventory: Path) -> None:
    """Give each node a password, and a value that only the vault's secret opens."""
    vault = VaultLib([("default", VaultSecret(VAULT_PASSWORD.encode()))])
    hosts = yaml.safe_load(inventory.read_text())
    for host in hosts["all"]["hosts"].values():
        host |= {"ansible_become_password": PASSWORD, "app_password": "VAULTED"}
    sealed = vault.encrypt(VAULTED.encode()).decode().rstrip().replace("\n", "\n            ")
    text = yaml.safe_dump(hosts).replace("VAULTED", f"!vault |\n            {sealed}")
    inventory.write_text(text)


async def test_one_plan_over_three_runners_with_kills(tmp_path: Path) -> None:
    """The daemon is killed while each of the three runners is at work."""
    async with three_runners(tmp_path) as env:
        with commands_of_all_processes() as commands:
            rollout = await asyncio.to_thread(
                env.daemon.submit, plan_of_git("three", env.daemon, env.git_url), {"unused.yml": "[]\n"}
            )
            await asyncio.to_thread(env.daemon.vote, rollout, "start")
            percents = await _finish_with_kills(env, rollout)
        status = await env.ask(rollout)
        assert (status["percent"], status["done"], status["failed"]) == (100, 3, 0)
        assert percents == sorted(percents), "one percent over all, which does not fall"
        spans = sorted(env.daemon.spans(), key=lambda span: span.begin)
        assert sorted(span.node for span in spans) == ["n1", "n2", "n3"], "each once, in spite of the kills"
        assert all(span.end is not None for span in spans)
        assert all((a.end or 0) <= b.begin for a, b in pairwise(spans)), "one slot for all three"
        _assert_each_ran_where_it_should(env)
        for node, runner in RUNNER_OF.items():
            assert (await env.ask(rollout, "nodes", node, "why"))["runner"]["name"] == runner
        report = await env.run_cli("--socket", str(tmp_path / "s"), "report", rollout)
        assert all(report.count(f">{node}<") for node in RUNNER_OF), report
        assert "100" in report
        _assert_no_secret(env, commands, report)


def _assert_each_ran_where_it_should(env: ThreeRunners) -> None:
    jobs = list(env.cluster.objects.all("jobs", NAMESPACE))
    assert [each["metadata"]["annotations"]["rolloutd.io/node"] for each in jobs] == ["n2"]
    of_awx = [job.inventory.description for job in env.awx.jobs.by_id.values() if job.inventory]
    assert of_awx == ["n3"]
    local = [
        json.loads(path.read_text())["node"] for path in env.daemon.directory.glob("state/runs/*/run.json")
    ]
    assert local == ["n1"]


def _assert_no_secret(env: ThreeRunners, commands: set[bytes], report: str) -> None:
    """Search all that each runner, the daemon and the process table keep or show."""
    directory = env.daemon.directory
    kinds = ("jobs", "pods", "poddisruptionbudgets", "events")
    files = [path for path in directory.glob("state/**/*") if path.is_file()]
    stored = {str(path.relative_to(directory)): path.read_bytes() for path in files}
    assert {"state/rolloutd.sqlite", "state/rolloutd.sqlite-wal"} <= stored.keys()
    (given,) = env.cluster.objects.all("secrets", NAMESPACE)
    to_pod = b"".join(map(base64.b64decode, given["data"].values())).decode()
    assert env.secrets["ssh key"] in to_pod, "the pod gets its secrets, by a Secret alone"
    assert PASSWORD in to_pod
    searched = {
        **stored,
        "daemon.log": (directory / "daemon.log").read_bytes(),
        "arguments of processes": b"\n".join(commands),
        "objects of the cluster": repr([list(env.cluster.objects.all(k, NAMESPACE)) for k in kinds]).encode(),
        "logs of pods": b"".join(path.read_bytes() for path in directory.glob("pods/*/log")),
        "what AWX stores": env.awx.stored_text().encode(),
        "report": report.encode(),
    }
    for place, content in searched.items():
        for name, secret in env.secrets.items():
            for form in (secret.encode(), base64.b64encode(secret.encode())):
                assert form not in content, f"{name} is in {place}"


async def _finish_with_kills(env: ThreeRunners, rollout: str) -> list[float]:
    """Vote as people do, and kill the daemon once the playbook of each node is seen; return the percents."""
    killed: set[str] = set()
    percents: list[float] = []

    def step() -> bool:
        daemon = env.daemon
        for node in {span.node for span in daemon.spans()} - killed:
            killed.add(node)
            daemon.kill_daemon()
            daemon.start_daemon()
        status = daemon.status(rollout)
        percents.append(status["percent"])
        for gate in status["gates"]:
            if gate["gate"] == "continue" and gate["state"] == "waiting":
                daemon.vote(rollout, "continue")
        return bool(status["state"] == "done")

    async with asyncio.timeout(WAIT_LIMIT_S):
        while not await asyncio.to_thread(step):
            await asyncio.sleep(0.1)
    assert killed == set(RUNNER_OF)
    return percents


@contextmanager
def commands_of_all_processes() -> Iterator[set[bytes]]:
    """Collect the arguments of all processes of this machine, which is also the pods' and the nodes'."""
    commands: set[bytes] = set()
    ended = threading.Event()

    def collect() -> None:
        while not ended.wait(0.1):
            for entry in Path("/proc").iterdir():
                if entry.name.isdecimal():
                    try:
                        commands.add((entry / "cmdline").read_bytes())
                    except OSError:
                        continue

    thread = threading.Thread(target=collect)
    thread.start()
    try:
        yield commands
    finally:
        ended.set()
        thread.join()
    assert any(b"ansible-playbook" in each for each in commands)


async def test_awx_refuses_upload_and_doctor_names_refusals(tmp_path: Path) -> None:
    async with three_runners(tmp_path) as env:
        upload = plan("upload", maintain={"playbook": "change.yml", "vars": {"log_file": "x", "work_s": 0}})
        with pytest.raises(ApiError) as refused:
            await asyncio.to_thread(env.daemon.submit, upload, {"change.yml": PLAYBOOK})
        (mistake,) = refused.value.body["errors"]
        assert mistake["path"] == "spec.source"
        assert "playbooks of git only" in mistake["message"]
        words = ("doctor", "--config", str(tmp_path / "config.yaml"))
        said = await env.run_cli(*words)
        assert "ok    runner awx: available" in said
        assert "ok    runner kubernetes: available" in said
        env.awx.tokens.clear()
        assert "WRONG runner awx: it refuses the account" in await env.run_cli(*words)
