"""Watch of one cluster's nodes, and of the leases by which other tools lock them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from machines.model.node import NodeHealth, Observation
from rolloutd.adapters.kubernetes.api_errors import MALFORMED, malformed_answers, require_text
from rolloutd.adapters.kubernetes.cluster import Cluster, api_path
from rolloutd.adapters.kubernetes.cluster_registry import source_name
from rolloutd.adapters.kubernetes.list_watch import WatchHandler, run_list_watch
from rolloutd.adapters.kubernetes.nodes import ISOLATED_BY, CordonOwner, NodeView, find_annotation, parse_node
from rolloutd.adapters.kubernetes.object_watch import ObjectWatch
from rolloutd.ports import JSON

NODES_PATH = api_path("nodes")

log = logging.getLogger(__name__)

PREFIX: Final = "node-"
NO_END: Final = float("inf")


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


@dataclass(frozen=True, slots=True)
class NodeLease:
    """Who holds a node's lease, and until when (epoch seconds) unless it is renewed."""

    node: str
    holder: str
    until: float


@malformed_answers()
def parse_lease(obj: Mapping[str, JSON]) -> NodeLease | None:
    """Return a node's lease; None for the lease of something else, or one without a holder."""
    name, spec = require_text(obj["metadata"]["name"]), obj.get("spec") or {}
    holder = spec.get("holderIdentity")
    if not name.startswith(PREFIX) or not holder:
        return None
    return NodeLease(name.removeprefix(PREFIX), require_text(holder), _end_of(spec))


def _end_of(spec: Mapping[str, JSON]) -> float:
    """Return when a lease ends; one without an end is held until it is given back."""
    renewed, duration_s = spec.get("renewTime") or spec.get("acquireTime"), spec.get("leaseDurationSeconds")
    if not renewed or not duration_s:
        return NO_END
    try:
        return datetime.fromisoformat(require_text(renewed)).timestamp() + float(duration_s)
    except MALFORMED:  # one that cannot be read must not hide the others
        return NO_END


class LeaseWatch(WatchHandler):
    """The leases of one namespace; `problem` says why it is not known who holds them, "" if it is."""

    def __init__(self, cluster: Cluster, namespace: str) -> None:
        self._cluster = cluster
        self.namespace = namespace
        self._leases: dict[str, NodeLease] = {}
        self._on_changed: Callable[[Iterable[str] | None], None] = lambda nodes: None
        self.problem = f"the leases of {namespace} were not read yet"

    async def run(self, on_changed: Callable[[Iterable[str] | None], None]) -> None:
        """Watch until cancelled; `on_changed` gets the nodes whose leases have changed, None for all."""
        self._on_changed = on_changed
        path = api_path("leases", namespace=self.namespace, group="coordination.k8s.io/v1")
        await run_list_watch(self._cluster, path, {}, self)

    def holder_of(self, node: str, now: float) -> str:
        """Return who holds a node's lease now, "" for no one."""
        lease = self._leases.get(node)
        return lease.holder if lease is not None and now < lease.until else ""

    def ending_nodes(self) -> list[str]:
        """Return the nodes with a lease that ends unless it is renewed."""
        return [node for node, lease in self._leases.items() if lease.until != NO_END]

    def parse(self, obj: Mapping[str, JSON]) -> NodeLease | None:
        return parse_lease(obj)

    def on_list(self, objects: Sequence[NodeLease | None]) -> None:
        before, self._leases = self._leases, {each.node: each for each in objects if each is not None}
        nodes = before.keys() | self._leases.keys()
        self._on_changed([node for node in nodes if before.get(node) != self._leases.get(node)])

    def on_event(self, kind: str, obj: Mapping[str, JSON]) -> None:
        lease, name = parse_lease(obj), str(obj["metadata"]["name"])
        if not name.startswith(PREFIX):
            return
        name = name.removeprefix(PREFIX)
        if kind == "DELETED" or lease is None:
            self._leases.pop(name, None)
        else:
            self._leases[name] = lease
        self._on_changed([name])

    def on_connected(self) -> None:
        self._set_problem("")

    def on_disconnected(self, reason: str) -> None:
        log.warning("leases of %s: %s", self.namespace, reason)
        self._set_problem(f"the leases of {self.namespace} cannot be read: {reason}")

    def _set_problem(self, problem: str) -> None:
        if problem != self.problem:
            self.problem = problem
            self._on_changed(None)
