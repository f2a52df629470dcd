"""The contract of ports.TrafficProbe, for its fake and for `kubernetes`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from rolloutd.adapters.kubernetes.check import KubernetesTrafficProbe
from rolloutd.adapters.kubernetes.cluster import Cluster
from rolloutd.adapters.kubernetes.cluster_registry import ClusterRegistry
from rolloutd.contracts import TrafficProbeBackend, TrafficProbeContract
from rolloutd.plugin import PROBES, installed_adapters
from rolloutd.ports import Host, TrafficProbe
from tests.contracts.fakes.clock import FakeClock
from tests.contracts.fakes.traffic import FakeTrafficProbe
from tests.contracts.kubernetes.steps import host as kubernetes_host
from tests.support.cluster_sandbox import ClusterSandbox as ClusterWorld
from tests.support.cluster_sandbox import KubernetesApi
from tests.support.fake_kubernetes import FakeKubernetes


class FakeBackend:
    """The fake."""

    def __init__(self) -> None:
        self.host, self.params, self.clock = Host("n1"), {}, FakeClock()
        self._probe = FakeTrafficProbe()
        self.probe: TrafficProbe = self._probe

    async def start_traffic(self) -> None:
        self._probe.busy["n1"] = "n1 is busy: it has 12 connections on port 443"

    async def stop_traffic(self) -> None:
        self._probe.busy.clear()

    async def hide_traffic(self) -> None:
        self._probe.unknown.add("n1")


class KubernetesBackend:
    """The probe `kubernetes`: a pod is the traffic, and a cluster without a kubeconfig is blindness."""

    def __init__(self, world: ClusterWorld, cluster: Cluster, node: str) -> None:
        self._sandbox = world
        self.host, self.params, self.clock = kubernetes_host(node), {"pods": "kind=job"}, FakeClock()
        nowhere = Cluster("nowhere", Path("/nonexistent/kubeconfig"))
        self.probe: TrafficProbe = KubernetesTrafficProbe(ClusterRegistry([cluster, nowhere]))

    async def start_traffic(self) -> None:
        await self._sandbox.pod("train-7", self.host.name, labels={"kind": "job"})

    async def stop_traffic(self) -> None:
        await self._sandbox.api.delete(f"{self._sandbox.pods_path}/train-7", gracePeriodSeconds=0)

    async def hide_traffic(self) -> None:
        self.host = kubernetes_host(self.host.name, "nowhere")


class TestFakeProbe(TrafficProbeContract):
    @asynccontextmanager
    async def open_backend(self, directory: Path) -> AsyncIterator[TrafficProbeBackend]:
        yield FakeBackend()


class TestKubernetesProbe(TrafficProbeContract):
    @asynccontextmanager
    async def open_backend(self, directory: Path) -> AsyncIterator[TrafficProbeBackend]:
        async with FakeKubernetes() as server:
            kubeconfig = server.kubeconfig(directory / "kubeconfig")
            api, cluster = KubernetesApi(kubeconfig), Cluster("test", kubeconfig)
            await api.open()
            async with ClusterWorld(api) as world:
                yield KubernetesBackend(world, cluster, await world.node("w3"))
            await api.close()
            await cluster.close()


def test_every_installed_probe_is_tested() -> None:
    assert installed_adapters(PROBES).keys() == {"command", "haproxy", "kubernetes", "prometheus", "ssh"}
