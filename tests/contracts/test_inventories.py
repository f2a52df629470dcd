"""The contracts of ports.Inventory and ports.Watch, for their fakes and the adapters."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from rolloutd.adapters.ansible.inventory import AnsibleInventory
from rolloutd.adapters.clusters.cluster_watch import ClusterWatch
from rolloutd.adapters.clusters.inventory import ClusterInventory
from rolloutd.adapters.clusters.views import CLUSTER_API, parse_cluster
from rolloutd.adapters.kubernetes.cluster import Cluster
from rolloutd.adapters.kubernetes.inventory import KubernetesInventory
from rolloutd.adapters.kubernetes.node_watch import NodeWatch
from rolloutd.contracts import (
    InventoryBackend,
    InventoryContract,
    SystemClock,
    WatchBackend,
    WatchContract,
)
from rolloutd.ports import Inventory, Watch
from tests.contracts.fakes.inventory import FakeInventory, FakeWatch
from tests.support.cluster_fleet import ClusterFleet
from tests.support.cluster_sandbox import ClusterSandbox, KubernetesApi
from tests.support.fake_kubernetes import FakeKubernetes


class FakeBackend:
    """The fakes."""

    def __init__(self) -> None:
        self.names = {"n1", "n2"}
        self.inventory = FakeInventory(*self.names)
        self.watch = FakeWatch(self.inventory, SystemClock())

    async def break_source(self) -> None:
        self.inventory.error = "the source cannot be read"

    async def add_node(self) -> str:
        self.watch.add("n3")
        return "n3"


class AnsibleBackend:
    """The inventory `ansible`: a file."""

    def __init__(self, directory: Path) -> None:
        self.names = {"n1", "n2"}
        self._file = directory / "hosts.yml"
        self._file.write_text("all: {hosts: {n1: {team: a}, n2: {team: b}}}\n")
        self.inventory: Inventory = AnsibleInventory(self._file, ["team"])

    async def break_source(self) -> None:
        self._file.write_text("all: [\n")


class KubernetesBackend:
    """The inventory and the watch `kubernetes`: a cluster."""

    def __init__(self, server: FakeKubernetes, sandbox: ClusterSandbox, cluster: Cluster, node: str) -> None:
        self.names = {node}
        self._server, self._sandbox = server, sandbox
        self.inventory: Inventory = KubernetesInventory(cluster)
        self.watch: Watch = NodeWatch(cluster, SystemClock())

    async def break_source(self) -> None:
        for token in self._server.access.tokens.keys() - {self._server.admin_token}:
            self._server.access.tokens[token] = []

    async def add_node(self) -> str:
        return await self._sandbox.node("added")


class ManagementBackend:
    """The inventory and the watch `clusterapi`: a management cluster."""

    def __init__(self, server: FakeKubernetes, fleet: ClusterFleet, cluster: Cluster) -> None:
        self.names = {"east"}
        self._server, self._fleet = server, fleet
        watch = ClusterWatch(
            cluster, SystemClock(), CLUSTER_API, parse_cluster, kind="clusterapi", namespace=fleet.namespace
        )
        watch.is_enabled = False
        self.watch: Watch = watch
        self.inventory: Inventory = ClusterInventory(watch)

    async def break_source(self) -> None:
        self._server.server.groups[CLUSTER_API] = "v1alpha4"

    async def add_node(self) -> str:
        await self._fleet.add_cluster("added")
        return "added"


class TestFakeInventory(InventoryContract):
    @asynccontextmanager
    async def open_backend(self, directory: Path) -> AsyncIterator[InventoryBackend]:
        yield FakeBackend()


class TestAnsibleInventory(InventoryContract):
    @asynccontextmanager
    async def open_backend(self, directory: Path) -> AsyncIterator[InventoryBackend]:
        yield AnsibleBackend(directory)


class TestFakeWatch(WatchContract):
    @asynccontextmanager
    async def open_backend(self, directory: Path) -> AsyncIterator[WatchBackend]:
        yield FakeBackend()


class TestKubernetesWatch(WatchContract):
    @asynccontextmanager
    async def open_backend(self, directory: Path) -> AsyncIterator[WatchBackend]:
        async with FakeKubernetes() as server, open_cluster(server, directory) as backend:
            yield backend


class TestKubernetesInventory(InventoryContract):
    @asynccontextmanager
    async def open_backend(self, directory: Path) -> AsyncIterator[InventoryBackend]:
        async with FakeKubernetes() as server, open_cluster(server, directory) as backend:
            yield backend


@asynccontextmanager
async def open_cluster(server: FakeKubernetes, directory: Path) -> AsyncIterator[KubernetesBackend]:
    """Open a cluster of one node."""
    kubeconfig = server.kubeconfig(directory / "adapter", token=server.token())
    api, cluster = KubernetesApi(server.kubeconfig(directory / "admin")), Cluster("test", kubeconfig)
    await api.open()
    try:
        async with ClusterSandbox(api) as sandbox:
            yield KubernetesBackend(server, sandbox, cluster, await sandbox.node("w3"))
    finally:
        await api.close()
        await cluster.close()


class TestClusterApiInventory(InventoryContract):
    @asynccontextmanager
    async def open_backend(self, directory: Path) -> AsyncIterator[InventoryBackend]:
        async with open_management(directory) as backend:
            yield backend


class TestClusterApiWatch(WatchContract):
    @asynccontextmanager
    async def open_backend(self, directory: Path) -> AsyncIterator[WatchBackend]:
        async with open_management(directory) as backend:
            yield backend


@asynccontextmanager
async def open_management(directory: Path) -> AsyncIterator[ManagementBackend]:
    """Open a management cluster with one cluster."""
    async with FakeKubernetes() as server:
        kubeconfig = server.kubeconfig(directory / "kubeconfig")
        cluster = Cluster("hub", kubeconfig)
        async with ClusterFleet(kubeconfig) as fleet:
            await fleet.add_cluster("east")
            yield ManagementBackend(server, fleet, cluster)
            server.server.groups[CLUSTER_API] = "v1beta2"
        await cluster.close()
