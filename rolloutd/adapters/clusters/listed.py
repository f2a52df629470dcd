"""Inventory `kubeconfigs`: a list of clusters, each of which is asked by itself."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from machines.model.node import NodeHealth, NodeKind, Observation
from rolloutd.adapters.clusters.inventory import INITIALIZED_KEY, MANAGEMENT_KEY, NAME_KEY, NAMESPACE_KEY
from rolloutd.adapters.clusters.target_identity import ASKED_AT_ONCE, read_identity
from rolloutd.adapters.kubernetes.api_errors import ApiError, ClusterUnreachable
from rolloutd.adapters.kubernetes.cluster import Cluster
from rolloutd.ports import (
    CLUSTER_ID,
    JSON,
    Clock,
    DiscoveredNode,
    OnNodesChanged,
    OnObserved,
    OnTried,
    ignore_tries,
)


class ListedClusters:
    """ports.Inventory and ports.Watch of a list; one that does not answer is unknown, and delays no other."""

    def __init__(self, params: Mapping[str, JSON], clock: Clock) -> None:
        self.clusters = {
            name: Cluster(name, each["kubeconfig"], each.get("context"))
            for name, each in params["clusters"].items()
        }
        self.name: str = params["name"]
        self._listed = params["clusters"]
        self._every_s: float = params["every"]
        self._clock = clock
        self._slots = asyncio.Semaphore(ASKED_AT_ONCE)
        self._seen: dict[str, Observation] = {}
        self._identities: dict[str, str] = {}

    @property
    def source(self) -> str:
        return f"kubeconfigs/{self.name}"

    async def refresh(self) -> Sequence[DiscoveredNode]:
        if not self._seen:
            await self._ask_all()
        return [self._to_discovered_node(name, each) for name, each in self._listed.items()]

    async def run(
        self, on_observed: OnObserved, on_nodes_changed: OnNodesChanged, on_tried: OnTried = ignore_tries
    ) -> None:
        while True:
            before = dict(self._identities)
            on_observed(await self._ask_all())
            on_tried("")
            if self._identities != before:
                on_nodes_changed()
            await self._clock.sleep(self._every_s)

    def observe(self, name: str) -> Observation:
        unasked = Observation(name, NodeHealth.UNKNOWN, self._clock.now(), "its API was not asked yet")
        return self._seen.get(name, unasked)

    async def find_missing_prerequisites(self) -> Sequence[str]:
        return [each.why for each in await self._ask_all() if each.sight is not NodeHealth.UP]

    async def close(self) -> None:
        for cluster in self.clusters.values():
            await cluster.close()

    async def _ask_all(self) -> Sequence[Observation]:
        return await asyncio.gather(*(self._ask(name) for name in self.clusters))

    async def _ask(self, name: str) -> Observation:
        try:
            async with self._slots:
                identity = await read_identity(self.clusters[name])
        except (ClusterUnreachable, ApiError) as error:
            # A refusal is of our account: it says nothing of the cluster, and must fail no check of it.
            is_refused = isinstance(error, ApiError) and error.status in (401, 403)
            sight = NodeHealth.UNKNOWN if is_refused else NodeHealth.DOWN
            self._seen[name] = Observation(name, sight, self._clock.now(), str(error), watch=self.source)
        else:
            self._identities[name] = identity
            now, why = self._clock.now(), "its API answers"
            self._seen[name] = Observation(name, NodeHealth.UP, now, why, watch=self.source)
        return self._seen[name]

    def _to_discovered_node(self, name: str, listed: Mapping[str, JSON]) -> DiscoveredNode:
        connection: dict[str, JSON] = {
            MANAGEMENT_KEY: f"{self.name}/{name}",
            NAMESPACE_KEY: "flux-system",
            NAME_KEY: name,
            INITIALIZED_KEY: True,
            "ansible_connection": "local",
            "kubeconfig": str(listed["kubeconfig"]),
        }
        if name in self._identities:
            connection[CLUSTER_ID] = self._identities[name]
        return DiscoveredNode(name, self.source, NodeKind.CLUSTER, dict(listed["labels"]), connection)
