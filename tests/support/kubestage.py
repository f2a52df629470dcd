"""A cluster and the real daemon over it: one sshd is all its nodes, an API server on loopback.

For acceptance tests and benches.  It knows no pytest.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from rolloutd.adapters.kubernetes.nodes import ISOLATED_BY, KEPT
from tests.support.kubetwin import Twin
from tests.support.kubeworld import Api
from tests.support.kubeworld import World as Cluster
from tests.support.sshd import Sshd
from tests.support.world import World, plan

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


TEAMS = 4
POOLS = tuple(f"t{number}" for number in range(1, TEAMS + 1))


@dataclass
class Stage:
    """A cluster, and a daemon that walks it."""

    twin: Twin
    cluster: Cluster
    daemon: World
    nodes: list[str] = field(default_factory=list)
    looks: int = 0

    async def ask(self, question: Callable[..., JSON], *words: JSON) -> JSON:
        """Ask the daemon beside the loop in which its API server lives."""
        return await asyncio.to_thread(question, *words)

    async def rolloutctl(self, *words: str) -> str:
        """Run rolloutctl as a person does, and return what it prints; raises when it says no."""
        command = [sys.executable, "-m", "rolloutd.cli", "--socket", str(self.daemon.directory / "s"), *words]
        ended = await asyncio.to_thread(
            subprocess.run, command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )
        assert ended.returncode == 0, f"{words}: {ended.returncode}: {ended.stderr}"
        return ended.stdout + ended.stderr

    async def submit(self, name: str, **spec: JSON) -> str:
        """Submit a plan over all nodes and open its start."""
        usual: dict[str, JSON] = {
            "isolate": [{"kubernetes": {"drain_timeout": "10m"}}],
            "maintain": {"playbook": "change.yml", "vars": {"log_file": str(self.daemon.log_file)}},
            "verify": [{"kubernetes": {"ready": True, "within": "1m"}}],
            "soak": "1s",
        }
        full = plan(name, **{**usual, **spec})
        rollout = await self.ask(self.daemon.submit, full, {"change.yml": WORK_PLAYBOOK})
        await self.ask(self.daemon.vote, rollout, "start")
        return str(rollout)

    async def until(self, true: Callable[[], JSON], what: str) -> JSON:
        """Wait for something that the daemon says."""
        return await self.ask(self.daemon.until, true, what)

    async def until_done(self, rollout: str) -> None:
        """Vote where the rollout asks, and wait for its end."""
        await self.ask(self.daemon.wait_for_gate, rollout, "continue")
        await self.ask(self.daemon.vote, rollout, "continue")

        def done() -> bool:
            status = self.daemon.status(rollout)
            assert status["state"] != "paused", status["reason"]
            return bool(status["state"] == "done")

        await self.until(done, f"{rollout} is done")


@contextlib.asynccontextmanager
async def stage(directory: Path, nodes: int, **settings: JSON) -> AsyncIterator[Stage]:
    """Start an API server with nodes of TEAMS pools, one sshd that is all of them, and a daemon."""
    async with contextlib.AsyncExitStack() as stack:
        twin = await stack.enter_async_context(Twin())
        kubeconfig = twin.kubeconfig(directory / "kubeconfig")
        api = Api(kubeconfig)
        await api.open()
        stack.push_async_callback(api.close)
        cluster = await stack.enter_async_context(Cluster(api, ready_s=0.3, end_s=0.2))
        made = Stage(
            twin, cluster, World(directory, {f"t{n}": {"team": f"t{n}"} for n in range(1, TEAMS + 1)})
        )
        for number in range(nodes):
            name = f"n{number + 1}"
            labels = {"example.com/team": POOLS[number % TEAMS], "role": "worker"}
            labels["kubernetes.io/hostname"] = f"{cluster.prefix}-{name}"
            made.nodes.append(await cluster.node(name, labels))
        sshd = await asyncio.to_thread(Sshd().start, directory / "sshd")
        stack.push_async_callback(asyncio.to_thread, sshd.stop)
        (directory / "known_hosts").write_text(sshd.known_hosts.read_text())
        hosts = {node: dict(sshd.connection()) for node in made.nodes}
        (directory / "hosts.yml").write_text(yaml.safe_dump({"all": {"hosts": hosts}}))
        source = {"name": "ams", "kubeconfig": str(kubeconfig), "labels": {"team": "example.com/team"}}
        inventory = [{"ansible": {"path": str(directory / "hosts.yml")}}, {"kubernetes": source}]
        made.daemon.write_settings(inventory=inventory, **settings)
        stack.push_async_callback(asyncio.to_thread, made.daemon.stop)
        await made.ask(made.daemon.start_daemon)
        yield made


def only(node: str) -> JSON:
    """Return the canary wave of one node; the others wait behind its gate."""
    return {"select": f"kubernetes.io/hostname={node}"}


def is_closed(made: Stage, node: str) -> bool:
    """Whether the node is cordoned, by the server's own books."""
    return bool(made.twin.server.objects.get("nodes", "", node)["spec"].get("unschedulable"))


def pods_of(made: Stage, node: str) -> list[str]:
    """Return the pods on a node, by the server's own books."""
    pods = made.twin.server.objects.all("pods", "")
    return [pod["metadata"]["name"] for pod in pods if pod["spec"].get("nodeName") == node]


async def is_as_before(made: Stage, node: str) -> None:
    """Assert that nothing of ours is left on the node."""
    after = await made.cluster.read(node)
    assert not after["spec"].get("unschedulable")
    assert not {ISOLATED_BY, KEPT} & (after["metadata"].get("annotations") or {}).keys()


def isolating(node: JSON) -> bool:
    """Whether something is still done to a node."""
    return node["phase"] in ("isolating", "maintaining", "verifying")
