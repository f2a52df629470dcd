"""Watch of one cluster's nodes, and of the leases by which other tools lock them."""

from __future__ import annotations

from collections.abc import Coroutine, Mapping
from typing import Any

from machines.model.node import NodeHealth, Observation
from rolloutd.adapters.kubernetes.cluster import api_path
from rolloutd.adapters.kubernetes.cluster_registry import source_name
from rolloutd.adapters.kubernetes.lease_watch import LeaseWatch
from rolloutd.adapters.kubernetes.nodes import ISOLATED_BY, CordonOwner, NodeView, find_annotation, parse_node
from rolloutd.adapters.kubernetes.object_watch import ObjectWatch
from rolloutd.ports import JSON

NODES_PATH = api_path("nodes")


class NodeWatch(ObjectWatch[NodeView]):
    """ports.Watch of one cluster; the fleet's name of a node is `prefix` and the cluster's name."""

    leases: LeaseWatch | None = None

    @property
    def source(self) -> str:
        return source_name(self.cluster)

    async def find_path(self) -> str:
        return NODES_PATH

    def watches_besides(self) -> Mapping[str, Coroutine[Any, Any, None]]:
        return {} if self.leases is None else {"leases": self.leases.run(self._report_names)}

    def observation_of(self, view: NodeView, node: str, now: float) -> Observation:
        # Whoever holds the node may be among those that could not be read.
        if self.leases is not None and self.leases.problem:
            return Observation(node, NodeHealth.UNKNOWN, now, self.leases.problem, watch=self.source)
        holder = "" if self.leases is None else self.leases.holder_of(view.name, now)
        return view.to_observation(node, now, self.source, holder)

    def report_expired(self) -> None:
        # A lease ends by time alone, so what was reported of its node may be true no longer.
        if self.leases is not None:
            self._report_names(self.leases.ending_nodes())

    def parse(self, obj: Mapping[str, JSON]) -> NodeView:
        name = obj["metadata"]["name"]
        domain = self.cluster.domain
        uncordoned = self.cluster.uncordoned_by_others.get(name)
        parsed = parse_node(obj, uncordoned, domain, self.cluster.lock_annotations)
        # Without field managers, a later cordon under our annotation would count as ours.
        if parsed.cordon_state.cordon_owner is CordonOwner.UNCORDONED_BY_OTHER:
            self.cluster.uncordoned_by_others[name] = find_annotation(obj, ISOLATED_BY, domain) or ""
        elif parsed.cordon_state.record is None:
            self.cluster.uncordoned_by_others.pop(name, None)
        return parsed
