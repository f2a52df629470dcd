"""Makes the adapters of Kubernetes from the daemon's kit.

Inventory, watch, observer, isolator, traffic probe and check of one daemon share their
clusters, so that each API server has one client and is watched once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from machines.node import Observation, Sight
from rolloutd.adapters.kit import Kit
from rolloutd.adapters.kubernetes.check import KubernetesCheck
from rolloutd.adapters.kubernetes.cluster import Cluster
from rolloutd.adapters.kubernetes.clusters import CLUSTER, NODE, Clusters
from rolloutd.adapters.kubernetes.inventory import KubernetesInventory
from rolloutd.adapters.kubernetes.isolator import KubernetesIsolator
from rolloutd.adapters.kubernetes.nodes import KIND
from rolloutd.adapters.kubernetes.probe import KubernetesProbe
from rolloutd.adapters.kubernetes.watch import NodeWatch
from rolloutd.ports import JSON, Clock, Host


class Fleet:
    """The clusters of the settings, and the watch of each by the cluster's name."""

    def __init__(self, sources: Sequence[Mapping[str, JSON]], clock: Clock) -> None:
        self.clusters = Clusters()
        self.watches: dict[str, NodeWatch] = {}
        for source in sources:
            cluster = Cluster(source["name"], source["kubeconfig"], source.get("context"))
            self.clusters.add(cluster)
            watch = self.watches[cluster.name] = NodeWatch(cluster, clock, prefix=source["prefix"])
            watch.wanted = False

    async def close(self) -> None:
        """Close the connections to all clusters."""
        await self.clusters.close()


def make_inventory(kit: Kit) -> KubernetesInventory:
    """Return the inventory source that `kit.params` describe."""
    fleet, source = _fleet(kit), kit.params
    watch = fleet.watches[source["name"]]
    return KubernetesInventory(
        watch.cluster,
        labels=source["labels"],
        prefix=source["prefix"],
        address=source["address"],
        watch=watch,
    )


def make_watch(kit: Kit) -> NodeWatch:
    """Return the watch of the source that `kit.params` describe."""
    watch = _fleet(kit).watches[kit.params["name"]]
    watch.wanted = True
    return watch


def make_observer(kit: Kit) -> WatchObserver:
    """Return the observer that tells what the watches know."""
    return WatchObserver(_fleet(kit).watches, kit.clock)


def make_isolator(kit: Kit) -> KubernetesIsolator:
    """Return the isolator `kubernetes`."""
    return KubernetesIsolator(_fleet(kit).clusters, kit.clock)


def make_probe(kit: Kit) -> KubernetesProbe:
    """Return the traffic probe `kubernetes`."""
    return KubernetesProbe(_fleet(kit).clusters)


def make_check(kit: Kit) -> KubernetesCheck:
    """Return the check `kubernetes`."""
    return KubernetesCheck(_fleet(kit).clusters)


class WatchObserver:
    """ports.Observer of nodes in watched clusters; of others it knows nothing."""

    def __init__(self, watches: Mapping[str, NodeWatch], clock: Clock) -> None:
        self._watches = watches
        self._clock = clock

    async def observe(self, hosts: Sequence[Host]) -> Sequence[Observation]:
        """Return what the watches know now; nothing is asked of any server."""
        return [self._observe(host) for host in hosts]

    def _observe(self, host: Host) -> Observation:
        watch = self._watches.get(str(host.connection.get(CLUSTER)))
        if watch is None:
            return Observation(host.name, Sight.UNKNOWN, self._clock.now(), "it is in no watched cluster")
        return watch.observe(str(host.connection[NODE]), host.name)


def _fleet(kit: Kit) -> Fleet:
    """Return the one fleet of this daemon, made when it is first asked for."""
    if KIND not in kit.shared:
        sources = [source.params for source in kit.settings.inventory if source.kind == KIND]
        kit.shared[KIND] = Fleet(sources, kit.clock)
    return cast(Fleet, kit.shared[KIND])
