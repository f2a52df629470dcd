"""Draining: rolloutd's isolator and `kubectl drain`, in turns, on the same API server.

    python -m bench drain, or python bench/drain.py [--pods 10,100] [--rounds N] [--nodes N]

Six nodes are drained at once, of 10 and of 100 pods each: without budgets, behind a budget of a fifth of the
node's pods, and with pods that are slow to end.  Each side has three rounds; the medians of all drains are
compared.  The fake's request log and its objects give the requests per drained pod, the share of evictions
that were refused, and the longest time for which an evictable pod was left alone.

The server is the tests' fake: it has no flow control and answers within a millisecond.  kubectl limits itself
to five requests a second (client-go's default), so of many pods it drains one every 0.2 s.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib
import shutil
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rolloutd.adapters.kubernetes.cluster import FIELD_MANAGER, Cluster
from rolloutd.adapters.kubernetes.cluster_registry import ClusterRegistry
from rolloutd.adapters.kubernetes.isolator import KubernetesIsolator
from rolloutd.adapters.timers import SystemClock
from rolloutd.ports import IsolationStatus, Ok
from tests.contracts.kubernetes.steps import step_context
from tests.support.fake_kubernetes import FakeKubernetes
from tests.support.fake_kubernetes.access import ALL_RULES
from tests.support.fake_kubernetes.controllers import is_healthy
from tests.support.fake_kubernetes.objects import Change, format_time

# The library loads in seconds, and the daemon has loaded it long before a drain.
importlib.import_module("kubernetes_asyncio.client")

JSON = Any

LIMIT_S = 600.0
NAMESPACE = "shop"
SPARE_NODES = 3
SAMPLE_S = 0.1
"""Interval at which it is judged whether an evictable pod is left alone."""

CONTROLLER_DELAY_S = 0.05
"""How far the fake's controllers work behind a change."""

MAX_PAUSE_S = 2.0
MAX_REQUESTS_PER_POD = 3.0
MAX_REFUSED_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class Workload:
    """The pods of each node: how long they take to end, and the part that may be down at once."""

    name: str
    end_s: float
    max_unavailable: float | None = None


WORKLOADS = (Workload("free", 0.5), Workload("budget", 0.5, 0.2), Workload("slow", 5.0))
READY_S = 0.3
"""How long a replacement takes to become Ready."""


class Kubelets:
    """Ends deleted pods and starts their replacements, in the fake's own objects."""

    def __init__(self, fake: FakeKubernetes, workload: Workload) -> None:
        self._fake = fake
        self._workload = workload
        self._tasks: set[asyncio.Task[None]] = set()
        self._ending: set[str] = set()
        self._number = 0
        fake.objects.listeners.append(self._on_change)

    def start_pod(self, app: str, node: str) -> None:
        """Start a Ready pod of a workload."""
        self._number += 1
        owner = {"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": app, "uid": app, "controller": True}
        name = f"{app}-{self._number}"
        meta = {"name": name, "namespace": NAMESPACE, "labels": {"app": app}, "ownerReferences": [owner]}
        spec = {"nodeName": node, "terminationGracePeriodSeconds": 30}
        status = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
        self._fake.objects.create("pods", {"metadata": meta, "spec": spec, "status": status})

    def stop(self) -> None:
        self._fake.objects.listeners.remove(self._on_change)
        for task in self._tasks:
            task.cancel()

    def _on_change(self, change: Change) -> None:
        pod = change.after
        if change.resource != "pods" or pod is None or "deletionTimestamp" not in pod["metadata"]:
            return
        if pod["metadata"]["uid"] not in self._ending:
            self._ending.add(pod["metadata"]["uid"])
            task = asyncio.create_task(self._replace(pod))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _replace(self, pod: JSON) -> None:
        await asyncio.sleep(READY_S)
        self.start_pod(pod["metadata"]["labels"]["app"], f"spare-{self._number % SPARE_NODES}")
        await asyncio.sleep(max(0.0, self._workload.end_s - READY_S))
        self._fake.objects.remove("pods", pod)


@dataclass(slots=True)
class Figures:
    """The drains of one side in one cell."""

    times_s: list[float] = field(default_factory=list)
    pods: int = 0
    requests: int = 0
    evictions: int = 0
    refused: int = 0
    longest_pause_s: float = 0.0

    @property
    def median_s(self) -> float:
        return statistics.median(self.times_s)


@contextlib.asynccontextmanager
async def api_server(directory: Path) -> AsyncIterator[tuple[FakeKubernetes, Path]]:
    async with FakeKubernetes(delay_s=CONTROLLER_DELAY_S) as fake:
        fake.access.anonymous = ALL_RULES  # kubectl sends no token without TLS
        yield fake, fake.kubeconfig(directory / "kubeconfig")


def add_node(fake: FakeKubernetes, name: str, **labels: str) -> None:
    ready = {"type": "Ready", "status": "True", "lastHeartbeatTime": format_time()}
    status = {"conditions": [ready], "nodeInfo": {"bootID": "b", "kubeletVersion": "v1.36.2"}}
    fake.objects.create("nodes", {"metadata": {"name": name, "labels": labels}, "spec": {}, "status": status})


def add_budget(fake: FakeKubernetes, app: str, **spec: JSON) -> None:
    meta = {"name": app, "namespace": NAMESPACE}
    selector = {"matchLabels": {"app": app}}
    fake.objects.create("poddisruptionbudgets", {"metadata": meta, "spec": {"selector": selector, **spec}})


async def measure_round(
    directory: Path, workload: Workload, nodes: int, pods: int, drain: Drain, figures: Figures, side: str
) -> None:
    """Drain all nodes at once on a new server, and add what was seen to the figures."""
    async with api_server(directory) as (fake, kubeconfig):
        fake.objects.create("namespaces", {"metadata": {"name": NAMESPACE}, "spec": {}})
        kubelets = Kubelets(fake, workload)
        names = [f"node-{number}" for number in range(nodes)]
        for name in [*names, *(f"spare-{number}" for number in range(SPARE_NODES))]:
            add_node(fake, name)
        for name in names:
            for _ in range(pods):
                kubelets.start_pod(f"app-{name}", name)
            if workload.max_unavailable is not None:
                add_budget(fake, f"app-{name}", minAvailable=round(pods * (1 - workload.max_unavailable)))
        await asyncio.sleep(0.5)  # the controllers count the budgets
        sampler = asyncio.create_task(watch_pauses(fake, names, figures))
        try:
            figures.times_s += await asyncio.gather(*(timed(drain(kubeconfig, name)) for name in names))
        finally:
            sampler.cancel()
            kubelets.stop()
        left = [pod for pod in fake.objects.all("pods") if pod["spec"]["nodeName"] in names]
        assert not left, f"{side} left {len(left)} pods"
        count_requests(fake, side, figures)
        figures.pods += nodes * pods


def count_requests(fake: FakeKubernetes, side: str, figures: Figures) -> None:
    for answered in fake.server.answered:
        if answered.request.manager.startswith(side):
            figures.requests += 1
            if answered.request.subresource == "eviction":
                figures.evictions += 1
                figures.refused += answered.code == 429


async def watch_pauses(fake: FakeKubernetes, names: Iterable[str], figures: Figures) -> None:
    """Measure for how long a node had an evictable pod while no eviction of its pods was requested."""
    since: dict[str, float] = {}
    nodes_of_pods: dict[str, str] = {}
    seen = 0
    while True:
        await asyncio.sleep(SAMPLE_S)
        now = time.monotonic()
        # A pod may be gone before its eviction is counted.
        nodes_of_pods |= {p["metadata"]["name"]: p["spec"]["nodeName"] for p in fake.objects.all("pods")}
        answered = list(fake.server.answered)
        for each in answered[seen:]:
            if each.request.subresource == "eviction":
                since.pop(nodes_of_pods.get(each.request.name, ""), None)
        seen = len(answered)
        evictable = set(_nodes_with_evictable_pods(fake))
        for name in names:
            if name not in evictable:
                since.pop(name, None)
                continue
            figures.longest_pause_s = max(figures.longest_pause_s, now - since.setdefault(name, now))


def _nodes_with_evictable_pods(fake: FakeKubernetes) -> Iterator[str]:
    allowed = {
        budget["metadata"]["name"]: (budget.get("status") or {}).get("disruptionsAllowed", 0)
        for budget in fake.objects.all("poddisruptionbudgets")
    }
    for pod in fake.objects.all("pods"):
        if is_healthy(pod) and allowed.get(pod["metadata"]["labels"]["app"], 1) > 0:
            yield pod["spec"]["nodeName"]


async def timed(work: Awaitable[None]) -> float:
    began = time.monotonic()
    await work
    return time.monotonic() - began


Drain = Callable[[Path, str], Awaitable[None]]


class RolloutdDrain:
    """What the daemon does to isolate a node; all nodes share one client, as in the daemon."""

    def __init__(self) -> None:
        self._isolators: dict[Path, KubernetesIsolator] = {}
        self._cluster: Cluster | None = None

    async def __call__(self, kubeconfig: Path, node: str) -> None:
        if self._cluster is None:
            self._cluster = Cluster("test", kubeconfig)
            clusters = ClusterRegistry([self._cluster])
            self._isolators[kubeconfig] = KubernetesIsolator(clusters, SystemClock())
        isolator = self._isolators[kubeconfig]
        ctx = step_context(node)
        status = await isolator.inspect(ctx)
        assert isinstance(status, IsolationStatus)
        ctx = replace(ctx, prior=status.prior, deadline=time.time() + LIMIT_S)
        while not isinstance(await isolator.isolate(ctx), Ok):
            pass

    async def close(self) -> None:
        if self._cluster is not None:
            await self._cluster.close()


async def kubectl_drain(kubeconfig: Path, node: str) -> None:
    process = await asyncio.create_subprocess_exec(
        "kubectl",
        f"--kubeconfig={kubeconfig}",
        "drain",
        node,
        "--ignore-daemonsets",
        f"--timeout={LIMIT_S:.0f}s",
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()[-2000:]


async def measure_cell(workload: Workload, nodes: int, pods: int, rounds: int) -> tuple[Figures, Figures]:
    ours, theirs = Figures(), Figures()
    with tempfile.TemporaryDirectory() as directory:
        for _ in range(rounds):
            drain = RolloutdDrain()
            await measure_round(Path(directory), workload, nodes, pods, drain, ours, FIELD_MANAGER)
            await drain.close()
            await measure_round(Path(directory), workload, nodes, pods, kubectl_drain, theirs, "kubectl")
    return ours, theirs


def report(pods: int, workload: Workload, ours: Figures, theirs: Figures) -> list[str]:
    """Print one row and return what misses its aim."""
    ratio, per_pod = ours.median_s / theirs.median_s, ours.requests / ours.pods
    refused = ours.refused / max(1, ours.evictions)
    print(
        f"drain: {pods:3d} pods, {workload.name:6s}: rolloutd {ours.median_s:6.2f} s, "
        f"kubectl {theirs.median_s:6.2f} s, ratio {ratio:.2f}; requests per pod {per_pod:.2f} "
        f"(kubectl {theirs.requests / theirs.pods:.2f}), refused {refused:.1%} "
        f"(kubectl {theirs.refused / max(1, theirs.evictions):.1%}), longest pause "
        f"{ours.longest_pause_s:.2f} s (kubectl {theirs.longest_pause_s:.2f} s)",
        flush=True,
    )
    cell = f"{pods} pods, {workload.name}"
    aims = {
        f"{cell}: ratio {ratio:.2f} > 1.00": ratio <= 1.0,
        f"{cell}: {per_pod:.2f} requests per pod": per_pod <= MAX_REQUESTS_PER_POD,
        f"{cell}: {refused:.1%} of evictions refused": refused <= MAX_REFUSED_SHARE,
        f"{cell}: pause of {ours.longest_pause_s:.2f} s": ours.longest_pause_s <= MAX_PAUSE_S,
    }
    return [aim for aim, is_met in aims.items() if not is_met]


async def main() -> int:
    asked = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    asked.add_argument("--pods", default="10,100")
    asked.add_argument("--workloads", default=",".join(each.name for each in WORKLOADS))
    asked.add_argument("--rounds", type=int, default=3)
    asked.add_argument("--nodes", type=int, default=6)
    options = asked.parse_args()
    missed: list[str] = []
    if shutil.which("kubectl") is None:
        print("drain: no comparison, because there is no kubectl here")
    else:
        chosen = defaultdict(bool, dict.fromkeys(options.workloads.split(","), True))
        for pods in (int(each) for each in options.pods.split(",")):
            for workload in WORKLOADS:
                if chosen[workload.name]:
                    cell = await measure_cell(workload, options.nodes, pods, options.rounds)
                    missed += report(pods, workload, *cell)
    for aim in missed:
        print(f"drain: MISSED: {aim}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
