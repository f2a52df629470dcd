"""What `workers` of an inventory does: how long modules wait in a controller that works on four at once.

The daemon is a process of its own; Flux's controllers are played in this one, and each reconciliation holds
one of their workers for half a second, as a health check does.
"""

from __future__ import annotations

import asyncio
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.cluster_fleet import ClusterFleet
from tests.support.daemon_environment import DaemonEnvironment, plan
from tests.support.fake_kubernetes import FakeKubernetes
from tests.support.flux_controllers import Content, FluxControllers

CONCURRENT = 4
"""`--concurrent` of kustomize-controller, as it is shipped."""

RECONCILE_S = 0.5
DIGEST = f"sha256:{'a' * 64}"
WORKERS = (None, 8, 4, 2)


@dataclass
class BusyControllers(FluxControllers):
    """Controllers with few workers; `waits_s` is how long each module waited for one."""

    waits_s: list[float] = field(default_factory=list)
    queued: int = 0
    most_queued: int = 0
    _busy: set[tuple[str, str]] = field(default_factory=set)

    async def _reconcile(self) -> None:
        slots = asyncio.Semaphore(CONCURRENT)
        async with asyncio.TaskGroup() as tasks:
            while True:
                await self._wakeup.wait()
                self._wakeup.clear()
                work, self._dirty = self._dirty - self._busy, self._dirty & self._busy
                for key in sorted(work):
                    self._busy.add(key)
                    tasks.create_task(self._work(key, slots))

    async def _work(self, key: tuple[str, str], slots: asyncio.Semaphore) -> None:
        clock, obj = asyncio.get_running_loop(), self._objects[key]
        if (
            key[0] == "kustomizations"
            and self._artifact(obj["spec"]["sourceRef"])
            and key[1] not in self.applied
        ):
            since = clock.time()
            self.queued += 1
            self.most_queued = max(self.most_queued, self.queued)
            async with slots:
                self.waits_s.append(clock.time() - since)
                await asyncio.sleep(RECONCILE_S)
            self.queued -= 1
        await self._reconcile_one(*key, self._objects.get(key, obj))
        self._busy.discard(key)
        if key in self._dirty:
            self._wakeup.set()


async def roll(clusters: int, workers: int | None, directory: Path) -> tuple[float, BusyControllers]:
    """Return how long a module takes to all clusters in one wave, and what its controllers saw."""
    async with FakeKubernetes() as server:
        kubeconfig = server.kubeconfig(directory / "kubeconfig")
        async with ClusterFleet(kubeconfig) as objects:
            for number in range(clusters):
                await objects.add_cluster(f"c{number:02}", {"module": "apps"})
            flux = BusyControllers(objects, {DIGEST: Content.GOOD})
            playing = asyncio.create_task(flux.run())
            daemon = DaemonEnvironment(directory, {})
            source = {"name": "hub", "kubeconfig": str(kubeconfig), "namespace": objects.namespace}
            source |= {} if workers is None else {"workers": workers}
            try:
                await asyncio.to_thread(daemon.start_nodes)
                daemon.write_settings(
                    inventory=[{"clusterapi": source}], pools={"team": {"max_unavailable": clusters}}
                )
                await asyncio.to_thread(daemon.start_daemon)
                began = asyncio.get_running_loop().time()
                await asyncio.to_thread(_finish, daemon)
                return asyncio.get_running_loop().time() - began, flux
            finally:
                await asyncio.to_thread(daemon.stop)
                playing.cancel()
                await asyncio.gather(playing, return_exceptions=True)


def _finish(daemon: DaemonEnvironment) -> None:
    flux = {
        "kustomization": "{{ node.name }}-apps",
        "oci": {"url": "oci://registry.example/apps", "digest": DIGEST},
        "create": {"path": "./"},
    }
    body = plan(
        "apps",
        targets="module=apps",
        maintain={"flux": flux, "expected": "5s", "timeout": "5m"},
        isolate=[{"none": {}}],
        verify=[{"cluster": {"within": "60s"}}],
    )
    daemon.finish(daemon.submit(body, {"unused.yml": "[]\n"}))


async def measure_workers(clusters: int = 24) -> None:
    for workers in WORKERS:
        with tempfile.TemporaryDirectory() as name:
            took_s, flux = await roll(clusters, workers, Path(name))
        waits = sorted(flux.waits_s)
        mean_s = sum(waits) / len(waits)
        print(
            f"{clusters} clusters, workers {workers or 'not set'}: {took_s:.1f} s, at most {flux.most_queued}"
            f" modules at the controller; they waited {mean_s:.1f} s, {waits[-1]:.1f} s at most"
        )
