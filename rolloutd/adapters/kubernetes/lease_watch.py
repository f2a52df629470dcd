"""Leases by which other tools lock nodes: `node-NAME` in one namespace (medik8s and others)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from rolloutd.adapters.kubernetes.api_errors import MALFORMED, malformed_answers, require_text
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
