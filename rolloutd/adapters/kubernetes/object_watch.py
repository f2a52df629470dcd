"""Watch of a list of objects that are nodes of the fleet, and its observations.

A state stays valid while the watch is open and the server answers a periodic request, so the watch confirms
all states at once, well before they are too old for a decision.  While the server is unreachable, the nodes
are unknown.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

from machines.model.node import NodeHealth, Observation
from rolloutd.adapters.kubernetes.api_errors import ApiError, ClusterUnreachable
from rolloutd.adapters.kubernetes.cluster import Cluster
from rolloutd.adapters.kubernetes.list_watch import WatchHandler, run_list_watch
from rolloutd.errors import SourceFailed
from rolloutd.ports import JSON, Clock, OnConfirmed, OnNodesChanged, OnObserved, OnTried, ignore_tries

REPORT_INTERVAL_S = 15.0
"""Interval of confirmations: four within the minute for which an observation is valid."""

REPORTED_AT_ONCE = 200
"""Nodes of one report among all nodes: some milliseconds, between which the loop does other work."""

FIRST_SYNC_TIMEOUT_S = 10.0
"""Limit of the wait for the first list; after it the nodes stay as last known."""

DEBOUNCE_S = 0.3
"""A burst of changes (a node pool that grows) is announced once."""


class WatchedView(Protocol):
    """The used fields of a watched object."""

    @property
    def name(self) -> str: ...

    @property
    def inventory_fields(self) -> tuple[JSON, ...]:
        """The fields on which the inventory depends: a change of them requires a refresh."""


V = TypeVar("V", bound=WatchedView)


class ObjectWatch(WatchHandler, Generic[V]):
    """ports.Watch of one list; the fleet's name of a node is `prefix` and the object's name."""

    def __init__(
        self,
        cluster: Cluster,
        clock: Clock,
        *,
        prefix: str = "",
        report_interval_s: float = REPORT_INTERVAL_S,
    ) -> None:
        self.cluster = cluster
        self.prefix = prefix
        self.nodes: dict[str, V] = {}
        self.disconnect_reason = f"cluster {cluster.name} has not answered yet"
        self.is_failing = False
        self.is_enabled = True
        self.synced = asyncio.Event()
        self._clock = clock
        self._report_interval_s = report_interval_s
        self._is_open = False
        self._confirmed_at = 0.0
        self._inventory_changed = asyncio.Event()
        self._on_observed: OnObserved = lambda observations: None
        self._on_tried: OnTried = ignore_tries
        self._on_confirmed: OnConfirmed = lambda: False

    @property
    @abstractmethod
    def source(self) -> str: ...

    @abstractmethod
    async def find_path(self) -> str:
        """Return the path of the list; asked again with each list."""

    @abstractmethod
    def observation_of(self, view: V, node: str, now: float) -> Observation:
        """Return the state of a node that is there, by the fleet's name."""

    async def read(self) -> Sequence[V]:
        """Return the objects of the watch once they have been listed; raises SourceFailed."""
        try:
            # A cluster that is known to be away must not delay the refresh.
            async with asyncio.timeout(0 if self.is_failing else FIRST_SYNC_TIMEOUT_S):
                await self.synced.wait()
        except TimeoutError:
            raise SourceFailed(self.disconnect_reason) from None
        if self.disconnect_reason:
            raise SourceFailed(self.disconnect_reason)
        return list(self.nodes.values())

    def confirm_to(self, on_confirmed: OnConfirmed) -> None:
        self._on_confirmed = on_confirmed

    async def run(
        self, on_observed: OnObserved, on_nodes_changed: OnNodesChanged, on_tried: OnTried = ignore_tries
    ) -> None:
        self._on_observed, self._on_tried = on_observed, on_tried
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(
                    run_list_watch(self.cluster, self.find_path, {}, self), name=f"watch {self.cluster.name}"
                )
                tasks.create_task(self._report_periodically(), name=f"beat {self.cluster.name}")
                for name, more in self.watches_besides().items():
                    tasks.create_task(more, name=f"{name} {self.cluster.name}")
                tasks.create_task(
                    self._announce_changes(on_nodes_changed), name=f"changes {self.cluster.name}"
                )
        finally:
            self._is_open = False
            self.disconnect_reason = f"cluster {self.cluster.name} is not watched any more"

    def watches_besides(self) -> Mapping[str, Coroutine[Any, Any, None]]:
        """Return what else runs while the list is watched, by name."""
        return {}

    def key_of(self, obj: Mapping[str, JSON]) -> str:
        """Return the key of an object, which is the name of its view."""
        return str(obj["metadata"]["name"])

    def fleet_name(self, key: str) -> str:
        return self.prefix + key

    def on_list(self, objects: Sequence[V]) -> None:
        before, self.nodes = self.nodes, {each.name: each for each in objects}
        self._confirmed_at = self._clock.now()
        gone = [name for name in before if name not in self.nodes]
        self.disconnect_reason = ""
        self._report(self.nodes.values())
        self._report_removed(gone)
        if {n: v.inventory_fields for n, v in before.items()} != {
            n: v.inventory_fields for n, v in self.nodes.items()
        }:
            self._inventory_changed.set()
        self.synced.set()

    def on_event(self, kind: str, obj: Mapping[str, JSON]) -> None:
        name = self.key_of(obj)
        known = self.nodes.get(name)
        if kind == "DELETED":
            self.nodes.pop(name, None)
            self._report_removed([name])
            self._inventory_changed.set()
            return
        found = self.nodes[name] = self.parse(obj)
        if known is None or known.inventory_fields != found.inventory_fields:
            self._inventory_changed.set()
        if known != found:
            self._report([found])

    def on_connected(self) -> None:
        """Report all nodes as current; after a failure the inventory is refreshed too."""
        if self.is_failing:
            self._inventory_changed.set()
        self._on_tried("")
        was_silent = self.disconnect_reason or self._is_silent()
        self._is_open, self.is_failing = True, False
        if was_silent and self.synced.is_set():
            self.disconnect_reason = ""
            self._report(self.nodes.values())

    def on_watch_ended(self) -> None:
        """Stop refreshing observations until the watch reconnects."""
        self._is_open, self._confirmed_at = False, self._clock.now()

    def on_disconnected(self, reason: str) -> None:
        self._on_tried(reason)
        self._is_open, self.is_failing = False, True
        self.disconnect_reason = reason
        self._report(self.nodes.values())

    def observe(self, name: str, fleet_name: str = "") -> Observation:
        """Return the state of a node by the cluster's name, under the fleet's name."""
        now, node = self._clock.now(), fleet_name or self.fleet_name(name)
        known = self.nodes.get(name)
        if self.disconnect_reason:
            return Observation(node, NodeHealth.UNKNOWN, now, self.disconnect_reason, watch=self.source)
        # A server may accept the next watch and stay silent: no failure ends that state for minutes.
        if self._is_silent():
            why = f"cluster {self.cluster.name} has not answered since its watch ended"
            return Observation(node, NodeHealth.UNKNOWN, now, why, watch=self.source)
        if known is None:
            return self._removed_observation(node, now)
        return self.observation_of(known, node, now)

    def _is_silent(self) -> bool:
        """Return whether the last watch ended longer ago than observations are refreshed."""
        return not self._is_open and self._clock.now() - self._confirmed_at > self._report_interval_s

    def _report(self, views: Iterable[V]) -> None:
        observations = [self.observe(each.name) for each in views]
        if observations:
            self._on_observed(observations)

    def _report_names(self, names: Iterable[str] | None) -> None:
        """Report these nodes, None for all; a lease may be of a node that the cluster does not have."""
        names = tuple(self.nodes) if names is None else names
        self._report([self.nodes[name] for name in names if name in self.nodes])

    def _report_removed(self, names: Sequence[str]) -> None:
        now = self._clock.now()
        if names:
            self._on_observed([self._removed_observation(self.fleet_name(name), now) for name in names])

    def _removed_observation(self, node: str, now: float) -> Observation:
        # Not an outage: a deleted node leaves the fleet with the next refresh, and no peer must yield to it.
        why = f"it is no longer in cluster {self.cluster.name}"
        return Observation(node, NodeHealth.UNKNOWN, now, why, watch=self.source)

    async def _report_periodically(self) -> None:
        """Ping the server and confirm all reports, or report all nodes again."""
        while True:
            await asyncio.sleep(self._report_interval_s)
            # An open connection proves nothing: behind a dead load balancer it stays open.
            failure = await self._ping() if self._is_open else ""
            # The watch may have ended during the ping, and the ping's answer does not replace it.
            is_news = self._is_open and failure != self.disconnect_reason
            if self._is_open:
                self.disconnect_reason = failure
            self.report_expired()
            if (self._is_open or self.disconnect_reason) and (is_news or not self._on_confirmed()):
                await self._report_all()

    def report_expired(self) -> None:
        """Report the nodes of which something has ended by time alone."""

    async def _report_all(self) -> None:
        """Report all nodes, while events of single nodes may come in between."""
        names = tuple(self.nodes)
        for start in range(0, len(names), REPORTED_AT_ONCE):
            slice_ = names[start : start + REPORTED_AT_ONCE]
            self._report([self.nodes[name] for name in slice_ if name in self.nodes])
            await asyncio.sleep(0)

    async def _ping(self) -> str:
        """Return why the server does not answer; empty if it does."""
        try:
            await self.cluster.get(await self.find_path(), {"limit": "1"})
        except (ClusterUnreachable, ApiError) as error:
            return f"cluster {self.cluster.name}: {error}"
        return ""

    async def _announce_changes(self, on_nodes_changed: OnNodesChanged) -> None:
        while True:
            await self._inventory_changed.wait()
            await asyncio.sleep(DEBOUNCE_S)
            # Cleared after the pause: this refresh has what came meanwhile, and later changes set it again.
            self._inventory_changed.clear()
            on_nodes_changed()
