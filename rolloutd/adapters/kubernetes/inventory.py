"""Inventory source `kubernetes`: the nodes of a cluster with their labels.

If the cluster is watched, a refresh returns the watch's nodes: a new node is known within a second, and a
refresh of a hundred clusters costs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from machines.model.node import NodeKind
from rolloutd.adapters.kubernetes.api_errors import ApiError, ClusterUnreachable
from rolloutd.adapters.kubernetes.cluster import Cluster, api_path
from rolloutd.adapters.kubernetes.cluster_registry import CLUSTER_KEY, NODE_KEY, source_name
from rolloutd.adapters.kubernetes.node_watch import NodeWatch
from rolloutd.adapters.kubernetes.nodes import NodeView, parse_node
from rolloutd.adapters.kubernetes.permissions import find_missing_permissions
from rolloutd.errors import SourceFailed
from rolloutd.ports import JSON, MACHINE_ID, PROVIDER_ID, DiscoveredNode


class KubernetesInventory:
    """ports.Inventory and ports.SupportsPreflight of one cluster.

    `labels` maps the fleet's label keys to the cluster's; `address` is the type of the address for Ansible
    and ssh.
    """

    def __init__(
        self,
        cluster: Cluster,
        *,
        labels: Mapping[str, str] | None = None,
        prefix: str = "",
        address: str = "InternalIP",
        watch: NodeWatch | None = None,
    ) -> None:
        self._cluster = cluster
        self._labels = dict(labels or {})
        self._prefix = prefix
        self._address = address
        self._watch = watch

    @property
    def source(self) -> str:
        return source_name(self._cluster)

    async def refresh(self) -> Sequence[DiscoveredNode]:
        watch = self._watch
        views = await self._list_nodes() if watch is None or not watch.is_enabled else await watch.read()
        return [self._to_discovered_node(each) for each in sorted(views, key=lambda each: each.name)]

    async def find_missing_prerequisites(self) -> Sequence[str]:
        leases = None if self._watch is None else self._watch.leases
        return await find_missing_permissions(self._cluster, "" if leases is None else leases.namespace)

    async def _list_nodes(self) -> Sequence[NodeView]:
        try:
            parse = partial(parse_node, domain=self._cluster.domain)
            page = await self._cluster.list(api_path("nodes"), convert=parse)
        except ClusterUnreachable as error:
            raise SourceFailed(str(error)) from error
        except ApiError as error:
            raise SourceFailed(f"cluster {self._cluster.name}: {error}") from error
        return page.items

    def _to_discovered_node(self, node: NodeView) -> DiscoveredNode:
        labels = {ours: node.labels[theirs] for ours, theirs in self._labels.items() if theirs in node.labels}
        connection: dict[str, JSON] = {CLUSTER_KEY: self._cluster.name, NODE_KEY: node.name}
        if node.provider_id:
            connection[PROVIDER_ID] = node.provider_id
        if node.machine_id:
            connection[MACHINE_ID] = node.machine_id
        if self._address in node.addresses:
            connection["ansible_host"] = node.addresses[self._address]
        return DiscoveredNode(
            name=self._prefix + node.name,
            source=self.source,
            kind=NodeKind.KUBERNETES,
            labels={**node.labels, **labels},
            connection=connection,
        )
