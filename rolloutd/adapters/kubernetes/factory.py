"""Factories of the Kubernetes adapters.

All adapters of one daemon share their clusters, so that each API server has one client and one watch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from machines.model.node import NodeHealth, Observation
from rolloutd.adapters.kubernetes.check import KubernetesCheck, KubernetesTrafficProbe
from rolloutd.adapters.kubernetes.cluster import Cluster
from rolloutd.adapters.kubernetes.cluster_registry import CLUSTER_KEY, NODE_KEY, ClusterRegistry
from rolloutd.adapters.kubernetes.inventory import KubernetesInventory
from rolloutd.adapters.kubernetes.isolator import KubernetesIsolator
from rolloutd.adapters.kubernetes.node_watch import LeaseWatch, NodeWatch
from rolloutd.adapters.kubernetes.nodes import ADAPTER_KIND
from rolloutd.ports import JSON, AdapterContext, Clock, Host


class WatchedClusters:
    def __init__(self, sources: Sequence[Mapping[str, JSON]], clock: Clock) -> None:
        self.clusters = ClusterRegistry()
        self.watches: dict[str, NodeWatch] = {}
        for source in sources:
            cluster = Cluster(
                source["name"],
                source["kubeconfig"],
                source.get("context"),
                domain=source["domain"],
                lock_annotations=source["lock_annotations"],
            )
            self.clusters.add(cluster)
            watch = NodeWatch(cluster, clock, prefix=source["prefix"])
            if "lock_leases" in source:
                watch.leases = LeaseWatch(cluster, source["lock_leases"])
            self.watches[cluster.name] = watch
            watch.is_enabled = False

    async def close(self) -> None:
        await self.clusters.close()


def make_inventory(context: AdapterContext) -> KubernetesInventory:
    watched, source = _watched_clusters(context), context.params
    watch = watched.watches[source["name"]]
    return KubernetesInventory(
        watch.cluster,
        labels=source["labels"],
        prefix=source["prefix"],
        address=source["address"],
        watch=watch,
    )


def make_watch(context: AdapterContext) -> NodeWatch:
    watch = _watched_clusters(context).watches[context.params["name"]]
    watch.is_enabled = True
    return watch


def make_observer(context: AdapterContext) -> WatchObserver:
    return WatchObserver(_watched_clusters(context).watches, context.clock)


def make_isolator(context: AdapterContext) -> KubernetesIsolator:
    return KubernetesIsolator(_watched_clusters(context).clusters, context.clock)


def make_probe(context: AdapterContext) -> KubernetesTrafficProbe:
    return KubernetesTrafficProbe(_watched_clusters(context).clusters)


def make_check(context: AdapterContext) -> KubernetesCheck:
    return KubernetesCheck(_watched_clusters(context).clusters)


def find_cluster(context: AdapterContext, name: str) -> Cluster | None:
    """Return the shared cluster of this name in the settings, None without one."""
    watch = _watched_clusters(context).watches.get(name)
    return None if watch is None else watch.cluster


class WatchObserver:
    """ports.Observer that returns the watches' current state and sends no request."""

    def __init__(self, watches: Mapping[str, NodeWatch], clock: Clock) -> None:
        self._watches = watches
        self._clock = clock

    async def observe(self, hosts: Sequence[Host]) -> Sequence[Observation]:
        return [self._observe(host) for host in hosts]

    def _observe(self, host: Host) -> Observation:
        watch = self._watches.get(str(host.connection.get(CLUSTER_KEY)))
        if watch is None:
            return Observation(
                host.name, NodeHealth.UNKNOWN, self._clock.now(), "it is in no watched cluster"
            )
        return watch.observe(str(host.connection[NODE_KEY]), host.name)


def _watched_clusters(context: AdapterContext) -> WatchedClusters:
    """Return the daemon's shared clusters; the first call creates them."""
    if ADAPTER_KIND not in context.shared:
        sources = [source.params for source in context.settings.inventory if source.kind == ADAPTER_KIND]
        context.shared[ADAPTER_KIND] = WatchedClusters(sources, context.clock)
    return cast(WatchedClusters, context.shared[ADAPTER_KIND])
