"""A cluster and the real daemon over it: one sshd is all its nodes, an API server on loopback.

For acceptance tests and benches.  It knows no pytest.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from rolloutd.adapters.kubernetes.nodes import ISOLATED_BY_ANNOTATION, KEPT_FOR_ANNOTATION
from tests.support.cluster_sandbox import ClusterSandbox as Cluster
from tests.support.cluster_sandbox import KubernetesApi
from tests.support.daemon_environment import WAIT_LIMIT_S, DaemonEnvironment, plan
from tests.support.fake_kubernetes import FakeKubernetes
from tests.support.forked_process import CLI, run_forked
from tests.support.sshd import Sshd

JSON = Any

WORK_PLAYBOOK = """\
- hosts: all
  gather_facts: false
  tasks:
    - name: work
      ansible.builtin.raw: |
        echo "begin {{ inventory_hostname }} $(date +%s.%N)" >> {{ log_file }}
        while test -e {{ log_file }}.hold; do sleep 0.1; done
        echo "end {{ inventory_hostname }} $(date +%s.%N)" >> {{ log_file }}
"""
"""One task and no module: what is walked here is the cluster."""


MAX_ADDRESSES = 16
"""Addresses on which one sshd listens at most, a constant of OpenSSH."""

TEAMS = 4
POOLS = tuple(f"t{number}" for number in range(1, TEAMS + 1))


@dataclass
class ClusterEnvironment:
    """A cluster, and a daemon that walks it; `fake` is None for a real cluster."""

    fake: FakeKubernetes | None
    sandbox: Cluster
    daemon: DaemonEnvironment
    nodes: list[str] = field(default_factory=list)
    hosts: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    probe_count: int = 0

    @property
    def kubernetes(self) -> FakeKubernetes:
        assert self.fake is not None, "only a fake can be looked into"
        return self.fake

    async def in_thread(self, question: Callable[..., JSON], *words: JSON) -> JSON:
        """Ask the daemon beside the loop in which its API server lives."""
        return await asyncio.to_thread(question, *words)

    async def rolloutctl(self, *words: str) -> str:
        """Run rolloutctl as a person does, and return what it prints; raises when it says no."""
        command = ["--socket", str(self.daemon.directory / "s"), *words]
        ended = await asyncio.to_thread(run_forked, CLI, command, timeout_s=WAIT_LIMIT_S)
        assert ended.returncode == 0, f"{words}: {ended.returncode}: {ended.stderr}"
        return ended.stdout + ended.stderr

    async def submit(self, name: str, *, playbook: str = WORK_PLAYBOOK, **spec: JSON) -> str:
        """Submit a plan over all nodes and open its start."""
        usual: dict[str, JSON] = {
            "isolate": [{"kubernetes": {"drain_timeout": "10m"}}],
            "maintain": {"playbook": "change.yml", "vars": {"log_file": str(self.daemon.log_file)}},
            "verify": [{"kubernetes": {"ready": True, "within": "1m"}}],
            "soak": "1s",
        }
        full = plan(name, **{**usual, **spec})
        rollout = await self.in_thread(self.daemon.submit, full, {"change.yml": playbook})
        await self.in_thread(self.daemon.vote, rollout, "start")
        return str(rollout)

    async def wait_until(self, condition: Callable[[], JSON], what: str) -> JSON:
        """Wait for something that the daemon says."""
        return await self.in_thread(self.daemon.wait_until, condition, what)

    async def wait_until_done(self, rollout: str) -> None:
        """Vote where the rollout asks, and wait for its end."""
        await self.in_thread(self.daemon.finish, rollout)


@contextlib.asynccontextmanager
async def cluster_environment(
    directory: Path,
    nodes: int,
    *,
    hosts: Mapping[str, Mapping[str, str]] | None = None,
    kubeconfig: Path | None = None,
    **settings: JSON,
) -> AsyncIterator[ClusterEnvironment]:
    """Start nodes of TEAMS pools in a cluster, one sshd that is all of them, and a daemon.

    The cluster is a fake unless `kubeconfig` names a real one.  `hosts` are plain hosts with their labels,
    each with an sshd of its own.
    """
    async with contextlib.AsyncExitStack() as stack:
        fake = None
        if kubeconfig is None:
            fake = await stack.enter_async_context(FakeKubernetes())
            kubeconfig = fake.kubeconfig(directory / "kubeconfig")
        api = KubernetesApi(kubeconfig)
        await api.open()
        stack.push_async_callback(api.close)
        cluster = await stack.enter_async_context(Cluster(api, ready_s=0.3, end_s=0.2))
        made = ClusterEnvironment(
            fake,
            cluster,
            DaemonEnvironment(directory, {f"t{n}": {"team": f"t{n}"} for n in range(1, TEAMS + 1)}),
            hosts=hosts or {},
        )
        for number in range(nodes):
            name = f"n{number + 1}"
            labels = {"example.com/team": POOLS[number % TEAMS], "role": "worker"}
            labels["kubernetes.io/hostname"] = f"{cluster.prefix}-{name}"
            made.nodes.append(await cluster.node(name, labels))
        # One server is many nodes, and each node has an address of its own.
        addresses = {node: f"127.0.1.{number}" for number, node in enumerate(made.nodes, 1)}
        listed: dict[str, dict[str, JSON]] = {}
        known_hosts = []
        for first in range(0, nodes, MAX_ADDRESSES):
            part = dict([*addresses.items()][first : first + MAX_ADDRESSES])
            sshd = await asyncio.to_thread(Sshd(tuple(part.values())).start, directory / f"sshd{first}")
            stack.push_async_callback(asyncio.to_thread, sshd.stop)
            listed |= {node: dict(sshd.connection(address)) for node, address in part.items()}
            known_hosts.append(sshd.known_hosts)
        for name, labels in made.hosts.items():
            own = await asyncio.to_thread(Sshd().start, directory / "nodes" / name)
            stack.push_async_callback(asyncio.to_thread, own.stop)
            listed[name] = {**own.connection(), **labels}
            known_hosts.append(own.known_hosts)
        (directory / "known_hosts").write_text("".join(each.read_text() for each in known_hosts))
        (directory / "hosts.yml").write_text(yaml.safe_dump({"all": {"hosts": listed}}))
        source = {"name": "ams", "kubeconfig": str(kubeconfig), "labels": {"team": "example.com/team"}}
        ansible = {"path": str(directory / "hosts.yml"), "labels": ["team", "role", "web"]}
        inventory = [{"ansible": ansible}, {"kubernetes": source}]
        made.daemon.write_settings(inventory=inventory, **settings)
        stack.push_async_callback(asyncio.to_thread, made.daemon.stop)
        await made.in_thread(made.daemon.start_daemon)
        yield made


def single_node_wave(node: str) -> JSON:
    """Return the canary wave of one node; the others wait behind its gate."""
    return {"select": f"kubernetes.io/hostname={node}"}


async def hold_drain(env: ClusterEnvironment, node: str) -> None:
    """Let a budget hold the drain of a node, as while a replacement does not become Ready."""
    other = env.nodes[-1]
    await env.sandbox.workload("db", [node, other], min_available=1)
    [pod] = await env.sandbox.pods_on(other)
    unready = {"conditions": [{"type": "Ready", "status": "False"}]}
    await env.sandbox.api.patch(f"{env.sandbox.pods_path}/{pod}/status", {"status": unready})
    await env.sandbox.wait_for_budget("db", 1)


def is_cordoned(env: ClusterEnvironment, node: str) -> bool:
    """Whether the node is cordoned, by the server's own books."""
    return bool(env.kubernetes.server.objects.get("nodes", "", node)["spec"].get("unschedulable"))


def pods_of(env: ClusterEnvironment, node: str) -> list[str]:
    """Return the pods on a node, by the server's own books."""
    pods = env.kubernetes.server.objects.all("pods", "")
    return [pod["metadata"]["name"] for pod in pods if pod["spec"].get("nodeName") == node]


async def assert_restored(env: ClusterEnvironment, node: str) -> None:
    """Assert that nothing of ours is left on the node."""
    after = await env.sandbox.get_node(node)
    assert not after["spec"].get("unschedulable")
    assert (
        not {ISOLATED_BY_ANNOTATION, KEPT_FOR_ANNOTATION}
        & (after["metadata"].get("annotations") or {}).keys()
    )


def is_in_progress(node: JSON) -> bool:
    """Whether something is still done to a node."""
    return node["phase"] in ("isolating", "maintaining", "verifying")
