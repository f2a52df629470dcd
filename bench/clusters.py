"""What a daemon costs while nothing happens in 1,000 clusters, compared with `flux reconcile` in a loop.

At its end it rolls a module over 24 clusters, with more and fewer `workers`.

The management cluster is the fake, in this process; the daemon is a process of its own.  The loop does what
the command does for each module: it asks for a reconciliation and reads until it was handled.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections import Counter
from pathlib import Path

from bench._cluster_workers import measure_workers
from tests.support.cluster_fleet import READY, ClusterFleet, condition
from tests.support.daemon_environment import DaemonEnvironment
from tests.support.fake_kubernetes import FakeKubernetes
from tests.support.fake_kubernetes.objects import CLUSTER_API, FLUX_KUSTOMIZE

IDLE_S = 60.0
"""As long as an observation is valid: each is confirmed four times meanwhile."""

SETTLE_S = 20.0
"""The daemon's start and its first inventory are over."""


def fill(server: FakeKubernetes, clusters: int) -> None:
    """Create ready clusters, each with a module."""
    conditions = [condition(kind, status) for kind, status in READY.items()]
    for number in range(clusters):
        meta = {"name": f"c{number:04}", "namespace": "fleet", "labels": {"region": f"r{number % 6}"}}
        status = {"conditions": conditions, "initialization": {"controlPlaneInitialized": True}}
        spec = {"controlPlaneEndpoint": {"host": meta["name"], "port": 6443}}
        cluster = {"metadata": meta, "spec": spec, "status": status, "apiVersion": f"{CLUSTER_API}/v1beta2"}
        server.objects.create("clusters", cluster)
        source = {"kind": "GitRepository", "name": "apps"}
        spec = {"interval": "10m", "prune": True, "sourceRef": source}
        module = {"metadata": dict(meta), "spec": spec, "apiVersion": f"{FLUX_KUSTOMIZE}/v1"}
        server.objects.create("kustomizations", module)


async def idle(server: FakeKubernetes, directory: Path) -> tuple[float, Counter[str]]:
    """Return the daemon's share of a core while nothing happens, and its requests."""
    daemon = DaemonEnvironment(directory, {})
    kubeconfig = server.kubeconfig(directory / "kubeconfig")
    try:
        await asyncio.to_thread(daemon.start_nodes)
        source = {"name": "hub", "kubeconfig": str(kubeconfig), "namespace": "fleet"}
        daemon.write_settings(inventory=[{"clusterapi": source}])
        await asyncio.to_thread(daemon.start_daemon)
        await asyncio.sleep(SETTLE_S)
        before, count = daemon.daemon_cpu_s(), len(server.server.answered)
        await asyncio.sleep(IDLE_S)
        made = Counter(each.request.verb for each in list(server.server.answered)[count:])
        return (daemon.daemon_cpu_s() - before) / IDLE_S, made
    finally:
        await asyncio.to_thread(daemon.stop)


async def loop_once(server: FakeKubernetes, directory: Path, clusters: int) -> tuple[float, int]:
    """Return the CPU seconds of client and server of one pass of the loop, and its requests."""
    fleet = ClusterFleet(server.kubeconfig(directory / "loop"))
    await fleet.api.open()
    began, count = time.process_time(), len(server.server.answered)
    for number in range(clusters):
        name, asked = f"c{number:04}", {"reconcile.fluxcd.io/requestedAt": str(number)}
        await fleet.edit("kustomizations", name, {"metadata": {"annotations": asked}})
        await fleet.set_status("kustomizations", name, {"lastHandledReconcileAt": str(number)})
        await fleet.get("kustomizations", name)
    await fleet.api.close()
    return time.process_time() - began, len(server.server.answered) - count - clusters


async def measure(clusters: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        async with FakeKubernetes() as server:
            server.objects.create("namespaces", {"metadata": {"name": "fleet"}, "spec": {}})
            fill(server, clusters)
            share, made = await idle(server, Path(name))
            print(
                f"{clusters} clusters, nothing happens: {share:.2%} of a core, {dict(made)} in {IDLE_S:g} s"
            )
            cpu_s, requests = await loop_once(server, Path(name), clusters)
            print(f"a loop over {clusters} modules: {requests} requests, {cpu_s:.1f} CPU s with the server's")
    await measure_workers()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("clusters", nargs="?", type=int, default=1000)
    asyncio.run(measure(parser.parse_args().clusters))
