"""A fake cluster whose pods are real processes, which run real Ansible against an sshd."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import yaml

from rolloutd.adapters.ansible.runner import AnsibleRunner
from rolloutd.adapters.kubernetes_jobs.job import job_name
from rolloutd.adapters.kubernetes_jobs.runner import KubernetesRunner, make_runner
from rolloutd.adapters.timers import SystemClock
from rolloutd.contracts import Work
from rolloutd.ports import Runner, RunnerContext, RunRequest
from tests.contracts.runner_backends import AnsibleBackend, tree_of
from tests.support.fake_kubernetes.cluster import FakeKubernetes
from tests.support.fake_kubernetes.jobs import JobController

NAMESPACE = "rolloutd-runs"
MANIFEST = Path(__file__).parents[3] / "deploy/kubernetes/runner/runner.yaml"


def shipped_rules() -> list[dict[str, Any]]:
    """Return the rules of the shipped Role, which the runner of each test has."""
    documents = yaml.safe_load_all(MANIFEST.read_text())
    (role,) = (each for each in documents if each["kind"] == "Role")
    return [{**rule, "namespaces": [NAMESPACE]} for rule in role["rules"]]


class JobsBackend:
    """contracts.RunnerBackend over a FakeKubernetes."""

    playbooks: ClassVar = {Work.SUCCEEDS: "ok.yml", Work.FAILS: "fail.yml", Work.NEVER_ENDS: "long.yml"}

    def __init__(self, directory: Path, cluster: FakeKubernetes) -> None:
        self.directory, self.cluster = directory, cluster
        self.ansible = AnsibleBackend(directory)
        self.jobs = JobController(cluster.objects, directory / "pods")
        cluster.server.read_log = self.jobs.read_log
        self.kubeconfig = cluster.kubeconfig(directory / "kubeconfig", token=cluster.token(shipped_rules()))
        self._shared: list[dict[str, Any]] = []

    def open_runner(self) -> Runner:
        return self.open()

    def open(self, **params: Any) -> KubernetesRunner:
        """Return a new runner, by the settings of a daemon and further parameters."""
        self._shared.append({})
        local = self.ansible.runner(self.directory / "local")
        return open_runner(self.directory, self.ansible, local, self.kubeconfig, self._shared[-1], **params)

    def open_elsewhere(self) -> KubernetesRunner:
        """Return the runner of another machine of the same store, which has just taken over."""
        self._shared.append({})
        (directory := self.directory / "elsewhere").mkdir(exist_ok=True)
        marks = str(self.directory / "local")
        local = self.ansible.runner(directory / "local", marks=marks, inherited_nodes={"n0"})
        return open_runner(directory, self.ansible, local, self.kubeconfig, self._shared[-1])

    def request(
        self, work: Work, run_id: str, *, timeout_s: float = 300.0, fencing_token: str = ""
    ) -> RunRequest:
        return self.ansible.request(self.playbooks[work], run_id, timeout_s=timeout_s, fence=fencing_token)

    async def begun(self) -> Sequence[str]:
        return self.ansible.started_runs()

    async def has_work(self) -> bool:
        return self.ansible.has_work()

    async def lose(self, handle: str) -> None:
        self.jobs.lose(job_name(handle))

    async def set_reachable(self, reachable: bool) -> None:
        await (self.cluster.start() if reachable else self.cluster.stop())

    async def close(self) -> None:
        self.jobs.end_all()
        for shared in self._shared:
            for each in shared.values():
                await each.close()
        await self.ansible.close()


def open_runner(
    directory: Path,
    ansible: AnsibleBackend,
    local: AnsibleRunner,
    kubeconfig: Path,
    shared: dict[str, Any],
    **params: Any,
) -> KubernetesRunner:
    """Return a runner over a cluster, in addition to that of its machine; what it opens is in `shared`."""
    settings = SimpleNamespace(
        state_dir=directory / "state",
        ansible=SimpleNamespace(fence_dir=str(ansible.directory / "fence"), pipelining="as-configured"),
        ssh=SimpleNamespace(known_hosts=ansible.node.known_hosts, user=None, key_file=None),
    )
    settings.state_dir.mkdir(exist_ok=True)
    given = {
        "kubeconfig": str(kubeconfig),
        "namespace": NAMESPACE,
        "image": "rolloutd@sha256:0",
        "python": sys.executable,
        "memory": "512Mi",
        "trees": {"listen": "127.0.0.1:0"},
    }
    context = RunnerContext(
        "fra",
        ansible.shell,
        SystemClock(),
        ansible.inventory,
        settings,
        tree_of,
        params={**given, **params},
        stale_runs=local,
        shared=shared,
    )
    return make_runner(context)


@asynccontextmanager
async def open_jobs_backend(directory: Path) -> AsyncIterator[JobsBackend]:
    async with FakeKubernetes() as cluster:
        cluster.objects.create("namespaces", {"metadata": {"name": NAMESPACE}, "spec": {}})
        backend = JobsBackend(directory, cluster)
        controller = asyncio.create_task(backend.jobs.run())
        try:
            yield backend
        finally:
            await backend.close()
            controller.cancel()
            await asyncio.wait({controller})
            controller.cancelled() or controller.result()
