"""Finds the cluster of a node: by what its inventory source wrote into the node's connection.

A node keeps the cluster's name and its own name there, because the fleet may
know it by another name, and two clusters may each have a node of one name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rolloutd.adapters.kubernetes.cluster import Cluster
from rolloutd.errors import NodeUnreachable
from rolloutd.ports import Host

CLUSTER = "kubernetes_cluster"
NODE = "kubernetes_node"


class Clusters:
    """The clusters that the settings name."""

    def __init__(self, clusters: Iterable[Cluster] = ()) -> None:
        self._clusters = {cluster.name: cluster for cluster in clusters}

    def __iter__(self) -> Iterator[Cluster]:
        return iter(self._clusters.values())

    def add(self, cluster: Cluster) -> Cluster:
        """Keep a cluster; one of the same name that is already known is returned in its place."""
        return self._clusters.setdefault(cluster.name, cluster)

    def of(self, host: Host) -> tuple[Cluster, str]:
        """Return a node's cluster and its name there; raises NodeUnreachable."""
        name, node = host.connection.get(CLUSTER), host.connection.get(NODE)
        if name is None or node is None:
            raise NodeUnreachable(
                f"{host.name} is in no Kubernetes cluster that the settings name; "
                "a plan that names kubernetes must target Kubernetes nodes alone"
            )
        if name not in self._clusters:
            raise NodeUnreachable(f"{host.name} is in cluster {name}, which the settings no longer name")
        return self._clusters[name], str(node)

    async def close(self) -> None:
        """Close the connections to all of them."""
        for cluster in self._clusters.values():
            await cluster.close()


def source_of(cluster: Cluster) -> str:
    """Return the name under which the findings of a cluster's inventory and watch are known."""
    return f"kubernetes/{cluster.name}"
