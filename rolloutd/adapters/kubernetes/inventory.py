"""The inventory source `kubernetes`: the nodes of a cluster with their labels.

Where the cluster is watched, the answer is what the watch knows, so a node that
joins is known within the second and a hundred clusters are read at no cost.
Which nodes matter to whom is decided by selectors and pools, elsewhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from machines.node import Kind
from rolloutd.adapters.kubernetes.answers import ApiError, ClusterUnreachable
from rolloutd.adapters.kubernetes.cluster import Cluster, path_of
from rolloutd.adapters.kubernetes.clusters import CLUSTER, NODE, source_of
from rolloutd.adapters.kubernetes.nodes import NodeView, view
from rolloutd.adapters.kubernetes.rights import missing_rights
from rolloutd.adapters.kubernetes.watch import NodeWatch
from rolloutd.errors import SourceFailed
from rolloutd.ports import JSON, PROVIDER_ID, Found

FIRST_LIST_S = 10.0
"""How long the first list of a cluster is waited for before its nodes stay as they were last known."""


class KubernetesInventory:
    """ports.Inventory and ports.Examined over one cluster.

    `labels` maps label keys of the fleet to those of the cluster; `address` is
    the type of node address that Ansible and ssh are told, none when empty.
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
        """The source's name."""
        return source_of(self._cluster)

    async def refresh(self) -> Sequence[Found]:
        """Return all nodes of the cluster; raises SourceFailed when it cannot be seen."""
        watch = self._watch
        views = await self._list() if watch is None or not watch.wanted else await self._watched(watch)
        return [self._found(each) for each in sorted(views, key=lambda each: each.name)]

    async def lacks(self) -> Sequence[str]:
        """Name the rights that are missing in the cluster; see ports.Examined."""
        return await missing_rights(self._cluster)

    async def _watched(self, watch: NodeWatch) -> Sequence[NodeView]:
        try:
            async with asyncio.timeout(0 if watch.failing else FIRST_LIST_S):
                await watch.synced.wait()
        except TimeoutError:
            raise SourceFailed(watch.why_blind) from None
        if watch.why_blind:
            raise SourceFailed(watch.why_blind)
        return list(watch.nodes.values())

    async def _list(self) -> Sequence[NodeView]:
        try:
            page = await self._cluster.list(path_of("nodes"))
        except (ClusterUnreachable, ApiError) as error:
            raise SourceFailed(f"cluster {self._cluster.name}: {error}") from error
        return [view(node) for node in page.items]

    def _found(self, node: NodeView) -> Found:
        labels = {ours: node.labels[theirs] for ours, theirs in self._labels.items() if theirs in node.labels}
        connection: dict[str, JSON] = {CLUSTER: self._cluster.name, NODE: node.name}
        if node.provider_id:
            connection[PROVIDER_ID] = node.provider_id
        if self._address in node.addresses:
            connection["ansible_host"] = node.addresses[self._address]
        return Found(
            name=self._prefix + node.name,
            source=self.source,
            kind=Kind.KUBERNETES,
            labels={**node.labels, **labels},
            connection=connection,
        )
