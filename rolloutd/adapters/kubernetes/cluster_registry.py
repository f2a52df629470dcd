"""Clusters of the settings, found by a node's connection.

The inventory source writes the cluster's name and the node's name there, because the fleet may use another
name and two clusters may use the same one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rolloutd.adapters.kubernetes.cluster import Cluster
from rolloutd.errors import NodeUnreachable
from rolloutd.ports import Host

CLUSTER_KEY = "kubernetes_cluster"
NODE_KEY = "kubernetes_node"


class ClusterRegistry:
    def __init__(self, clusters: Iterable[Cluster] = ()) -> None:
        self._clusters = {cluster.name: cluster for cluster in clusters}

    def __iter__(self) -> Iterator[Cluster]:
        return iter(self._clusters.values())

    def add(self, cluster: Cluster) -> Cluster:
        """Add a cluster and return it, or the known cluster of the same name."""
        return self._clusters.setdefault(cluster.name, cluster)

    def resolve(self, host: Host) -> tuple[Cluster, str]:
        """Return a node's cluster and its name there; raises NodeUnreachable."""
        name, node = host.connection.get(CLUSTER_KEY), host.connection.get(NODE_KEY)
        if name is None or node is None:
            raise NodeUnreachable(
                f"{host.name} is in no Kubernetes cluster that the settings name; "
                "a plan that names kubernetes must target Kubernetes nodes alone"
            )
        if name not in self._clusters:
            raise NodeUnreachable(f"{host.name} is in cluster {name}, which the settings no longer name")
        return self._clusters[name], str(node)

    async def close(self) -> None:
        for cluster in self._clusters.values():
            await cluster.close()


def source_name(cluster: Cluster) -> str:
    return f"kubernetes/{cluster.name}"
