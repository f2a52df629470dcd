"""Draining one node of 100 pods: rolloutd's drain and `kubectl drain`, in turns, on the same API server.

    python -m bench drain, or python bench/drain.py [--pods N] [--rounds N]

The server is the tests' fake, or that of ROLLOUTD_TEST_KUBECONFIG.  Both cordon
the node and wait until the last pod is gone, and both are checked to have left
none.  Skipped where there is no kubectl.

Read the ratio for what it is.  kubectl holds itself to five requests a second
(client-go's default, seen in its own log as "client-side throttling"), and that
is nearly all of its time here; we keep sixteen requests under way and leave the
rate to the server's flow control.  The fake has no flow control of its own and
answers within a millisecond, so a real server narrows the gap.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rolloutd.adapters.kubernetes.budgets import BudgetWatch
from rolloutd.adapters.kubernetes.cluster import Cluster
from rolloutd.adapters.kubernetes.cordon import cordon_node, uncordon_node
from rolloutd.adapters.kubernetes.drain import drain
from rolloutd.adapters.kubernetes.pods import EvictionPolicy
from rolloutd.ports import Ok
from tests.support.cluster_sandbox import ClusterSandbox, KubernetesApi
from tests.support.fake_kubernetes import FakeKubernetes
from tests.support.fake_kubernetes.access import ALL_RULES

LIMIT_S = 300.0
END_S = 0.5
"""How long each pod takes to end: what both wait for."""


async def main() -> None:
    """Measure, and say the medians and their ratio."""
    asked = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    asked.add_argument("--pods", type=int, default=100)
    asked.add_argument("--rounds", type=int, default=5)
    options = asked.parse_args()
    if shutil.which("kubectl") is None:
        print("drain: skipped, there is no kubectl here")
        return
    ours: list[float] = []
    theirs: list[float] = []
    with tempfile.TemporaryDirectory() as directory:
        async with _server(Path(directory)) as kubeconfig, _world(kubeconfig) as world:
            node = await world.node("drained")
            for _ in range(options.rounds):
                await _fill(world, node, options.pods)
                ours.append(await _timed(_drain(kubeconfig, node)))
                assert not await world.pods_on(node), "our drain left pods"
                await _fill(world, node, options.pods)
                theirs.append(await _timed(_kubectl(kubeconfig, node)))
                assert not await world.pods_on(node), "kubectl left pods"
                await world.cordon(node, unschedulable=False)
    mine, other = statistics.median(ours), statistics.median(theirs)
    print(
        f"drain: {options.pods} pods, each {END_S:g} s to end: rolloutd {mine:.2f} s, kubectl {other:.2f} s, "
        f"ratio {mine / other:.2f} (median of {options.rounds}, aim: at most 1.00; "
        f"kubectl throttles itself to 5 requests/s)"
    )


async def _timed(work: Awaitable[None]) -> float:
    began = time.monotonic()
    await work
    return time.monotonic() - began


async def _drain(kubeconfig: Path, node: str) -> None:
    """Do what the isolator does, with a connection of its own, as kubectl has."""
    cluster = Cluster("bench", kubeconfig)
    try:
        await cordon_node(cluster, node, rollout="bench", attempt=1, at=time.time())
        result = await drain(
            BudgetWatch(cluster), node, EvictionPolicy(delete_without_controller=True), timeout_s=LIMIT_S
        )
        assert isinstance(result, Ok), result
        await uncordon_node(cluster, node, rollout="bench", was_cordoned=False)
    finally:
        await cluster.close()


async def _kubectl(kubeconfig: Path, node: str) -> None:
    process = await asyncio.create_subprocess_exec(
        "kubectl",
        f"--kubeconfig={kubeconfig}",
        "drain",
        node,
        "--force",
        "--ignore-daemonsets",
        f"--timeout={LIMIT_S:.0f}s",
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()[-2000:]


async def _fill(world: ClusterSandbox, node: str, pods: int) -> None:
    """Start the pods and wait until all are Ready."""
    for number in range(pods):
        await world.pod(f"p{time.monotonic_ns()}-{number}", node)

    async def ready() -> bool:
        found = await world.api.get(world.pods_path, fieldSelector=f"spec.nodeName={node}")
        return sum(pod["status"].get("phase") == "Running" for pod in found["items"]) == pods

    await world.wait_until(ready)


@contextlib.asynccontextmanager
async def _server(directory: Path) -> AsyncIterator[Path]:
    named = os.environ.get("ROLLOUTD_TEST_KUBECONFIG")
    if named:
        yield Path(named)
        return
    async with FakeKubernetes() as fake:
        fake.access.anonymous = ALL_RULES  # kubectl sends no token without TLS
        yield fake.kubeconfig(directory / "kubeconfig")


@contextlib.asynccontextmanager
async def _world(kubeconfig: Path) -> AsyncIterator[ClusterSandbox]:
    api = KubernetesApi(kubeconfig)
    await api.open()
    try:
        async with ClusterSandbox(api, end_s=END_S) as world:
            yield world
    finally:
        await api.close()


if __name__ == "__main__":
    asyncio.run(main())
