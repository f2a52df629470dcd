"""Inventories `clusterapi` and `clusterprofile`: the clusters of a management cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from machines.model.node import NodeKind
from rolloutd.adapters.clusters.cluster_watch import ClusterWatch
from rolloutd.adapters.clusters.permissions import find_missing_cluster_permissions
from rolloutd.adapters.clusters.target_identity import TargetIdentities
from rolloutd.adapters.clusters.views import ClusterView
from rolloutd.adapters.kubernetes.api_errors import ApiError, ClusterUnreachable
from rolloutd.errors import SourceFailed
from rolloutd.ports import CLUSTER_ID, JSON, STATUS, DiscoveredNode

MANAGEMENT_KEY = "cluster_management"
"""Variable with the name of the inventory source that reports a cluster."""

NAMESPACE_KEY = "cluster_namespace"
NAME_KEY = "cluster_name"
OBJECT_KEY = "cluster_object"
INITIALIZED_KEY = "cluster_initialized"


class ClusterInventory:
    """ports.Inventory and ports.SupportsPreflight of one management cluster."""

    def __init__(
        self,
        watch: ClusterWatch,
        *,
        labels: Mapping[str, str] | None = None,
        identities: TargetIdentities | None = None,
    ) -> None:
        self._watch = watch
        self._identities = identities
        self._labels = dict(labels or {})

    @property
    def source(self) -> str:
        return self._watch.source

    async def refresh(self) -> Sequence[DiscoveredNode]:
        views = await self._watch.read() if self._watch.is_enabled else await self._list()
        identities: Mapping[str, str] = {each.name: each.identity for each in views}
        if self._identities is not None:
            answering = [each for each in views if each.status is None]
            identities = await self._identities.read_all([each.name for each in answering])
        return [
            self._to_discovered_node(each, identities.get(each.name))
            for each in sorted(views, key=lambda each: each.name)
        ]

    async def find_missing_prerequisites(self) -> Sequence[str]:
        watch = self._watch
        try:
            await watch.find_path()
            return await find_missing_cluster_permissions(
                watch.cluster, watch.group, watch.namespace, reads_secrets=self._identities is not None
            )
        except (ApiError, ClusterUnreachable) as error:
            return [f"cluster {watch.cluster.name}: {error}"]

    async def _list(self) -> Sequence[ClusterView]:
        cluster = self._watch.cluster
        try:
            return (await cluster.list(await self._watch.find_path(), convert=self._watch.parse)).items
        except ClusterUnreachable as error:
            raise SourceFailed(str(error)) from error
        except ApiError as error:
            raise SourceFailed(f"cluster {cluster.name}: {error}") from error

    def _to_discovered_node(self, view: ClusterView, identity: str | None) -> DiscoveredNode:
        labels = {ours: view.labels[theirs] for ours, theirs in self._labels.items() if theirs in view.labels}
        connection: dict[str, JSON] = {
            MANAGEMENT_KEY: self._watch.cluster.name,
            NAMESPACE_KEY: view.namespace,
            NAME_KEY: view.object_name,
            OBJECT_KEY: view.content,
            INITIALIZED_KEY: view.is_initialized,
        }
        if identity is not None:
            connection[CLUSTER_ID] = identity
        if view.status is not None:
            connection[STATUS] = str(view.status)
        return DiscoveredNode(
            name=self._watch.fleet_name(view.name),
            source=self.source,
            kind=NodeKind.CLUSTER,
            labels={**view.labels, **labels},
            connection=connection,
            id=f"uid/{view.uid}",
        )
