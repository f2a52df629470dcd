"""Leases by which other tools lock nodes: `node-NAME` in one namespace (medik8s and others)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from rolloutd.adapters.kubernetes.api_errors import malformed_answers, require_text
from rolloutd.adapters.kubernetes.cluster import Cluster, api_path
from rolloutd.adapters.kubernetes.list_watch import WatchHandler, run_list_watch
from rolloutd.ports import JSON

log = logging.getLogger("rolloutd.kubernetes")

PREFIX: Final = "node-"
NO_END: Final = float("inf")


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
    renewed, duration_s = spec.get("renewTime"), spec.get("leaseDurationSeconds")
    # A lease without an end is held until it is given back.
    until = NO_END
    if renewed and duration_s:
        until = datetime.fromisoformat(require_text(renewed)).timestamp() + float(duration_s)
    return NodeLease(name.removeprefix(PREFIX), require_text(holder), until)


class LeaseWatch(WatchHandler):
    """The leases of one namespace.  While they cannot be read the last known ones count."""

    def __init__(self, cluster: Cluster, namespace: str) -> None:
        self._cluster = cluster
        self._namespace = namespace
        self._leases: dict[str, NodeLease] = {}
        self._on_changed: Callable[[str], None] = lambda node: None

    async def run(self, on_changed: Callable[[str], None]) -> None:
        """Watch until cancelled; `on_changed` gets the node whose lease has changed."""
        self._on_changed = on_changed
        path = api_path("leases", namespace=self._namespace, group="coordination.k8s.io/v1")
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
        for node in before.keys() | self._leases.keys():
            if before.get(node) != self._leases.get(node):
                self._on_changed(node)

    def on_event(self, kind: str, obj: Mapping[str, JSON]) -> None:
        lease = parse_lease(obj)
        name = str(obj["metadata"]["name"]).removeprefix(PREFIX)
        if kind == "DELETED" or lease is None:
            self._leases.pop(name, None)
        else:
            self._leases[name] = lease
        self._on_changed(name)

    def on_connected(self) -> None:
        """Nothing to do: the leases are as listed."""

    def on_disconnected(self, reason: str) -> None:
        log.warning("leases of %s: %s", self._namespace, reason)
