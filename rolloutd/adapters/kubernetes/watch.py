"""Watches the nodes of one cluster and tells the core how they are.

What was seen stays true for as long as the watch is open and the server answers
a small question now and then; so observations are told again with a new instant
long before they are too old to decide on.  While the cluster cannot be seen, its
nodes are unknown, for that reason, and no others are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from machines.node import Observation, Sight
from rolloutd.adapters.kubernetes.answers import ApiError, ClusterUnreachable
from rolloutd.adapters.kubernetes.cluster import Cluster, path_of
from rolloutd.adapters.kubernetes.clusters import source_of
from rolloutd.adapters.kubernetes.following import follow
from rolloutd.adapters.kubernetes.nodes import ISOLATED_BY, Hand, NodeView, view
from rolloutd.ports import Clock

JSON = Any

BEAT_S = 15.0
"""How often all nodes are told of again: four times within the minute that observations are good for."""

SETTLE_S = 0.3
"""Changes that come in a burst (a node pool that grows) are announced once."""

NODES = path_of("nodes")


class NodeWatch:
    """ports.Watch over one cluster; `prefix` is put before each node's name to make it ours."""

    def __init__(self, cluster: Cluster, clock: Clock, *, prefix: str = "", beat_s: float = BEAT_S) -> None:
        self.cluster = cluster
        self.prefix = prefix
        self.nodes: dict[str, NodeView] = {}
        self.why_blind = f"cluster {cluster.name} has not answered yet"
        self.failing = False
        self.wanted = True
        self.synced = asyncio.Event()
        self._clock = clock
        self._beat_s = beat_s
        self._open = False
        self._dirty = asyncio.Event()
        self._seen: Callable[[Sequence[Observation]], None] = lambda observations: None

    @property
    def source(self) -> str:
        """The name of the cluster's inventory source."""
        return source_of(self.cluster)

    async def run(self, seen: Callable[[Sequence[Observation]], None], changed: Callable[[], None]) -> None:
        """Observe until cancelled; see ports.Watch."""
        self._seen = seen
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(follow(self.cluster, NODES, {}, self), name=f"watch {self.cluster.name}")
                tasks.create_task(self._beat(), name=f"beat {self.cluster.name}")
                tasks.create_task(self._announce(changed), name=f"changes {self.cluster.name}")
        finally:
            self._open = False
            self.why_blind = f"cluster {self.cluster.name} is not watched any more"

    # -- following.Listener

    def listed(self, objects: Sequence[Mapping[str, JSON]]) -> None:
        """Take the whole list of nodes."""
        known, self.nodes = self.nodes, {}
        for node in objects:
            self._keep(node)
        gone = [name for name in known if name not in self.nodes]
        self.why_blind = ""
        self._tell(self.nodes.values())
        self._tell_gone(gone)
        if {n: _face(v) for n, v in known.items()} != {n: _face(v) for n, v in self.nodes.items()}:
            self._dirty.set()
        self.synced.set()

    def told(self, kind: str, thing: Mapping[str, JSON]) -> None:
        """Take one change of one node."""
        name = thing["metadata"]["name"]
        known = self.nodes.get(name)
        if kind == "DELETED":
            self.nodes.pop(name, None)
            self._tell_gone([name])
            self._dirty.set()
            return
        found = self._keep(thing)
        if known is None or _face(known) != _face(found):
            self._dirty.set()
        if known != found:
            self._tell([found])

    def seeing(self) -> None:
        """Know that the watch is open; after trouble, the inventory is to be asked again."""
        if self.failing:
            self._dirty.set()
        self._open, self.failing = True, False
        if self.why_blind and self.synced.is_set():
            self.why_blind = ""
            self._tell(self.nodes.values())

    def ended(self) -> None:
        """Vouch for nothing until the next watch is open: what was told grows old meanwhile."""
        self._open = False

    def blind(self, why: str) -> None:
        """Know that the cluster cannot be seen."""
        self._open, self.failing = False, True
        self.why_blind = why
        self._tell(self.nodes.values())

    # -- what is told

    def observe(self, name: str, known_as: str = "") -> Observation:
        """Return how one node is now; `name` is the cluster's own for it, `known_as` the fleet's."""
        now, node = self._clock.now(), known_as or self.prefix + name
        known = self.nodes.get(name)
        if self.why_blind:
            return Observation(node, Sight.UNKNOWN, now, self.why_blind)
        if known is None:
            return self._gone(node, now)
        return known.observation(node, now)

    def _keep(self, node: Mapping[str, JSON]) -> NodeView:
        name = node["metadata"]["name"]
        found = view(node, self.cluster.uncordoned.get(name))
        if found.cordon.hand is Hand.LOST:
            self.cluster.uncordoned[name] = node["metadata"]["annotations"][ISOLATED_BY]
        elif found.cordon.owner is None:
            self.cluster.uncordoned.pop(name, None)
        self.nodes[name] = found
        return found

    def _tell(self, views: Iterable[NodeView]) -> None:
        observations = [self.observe(each.name) for each in views]
        if observations:
            self._seen(observations)

    def _tell_gone(self, names: Sequence[str]) -> None:
        now = self._clock.now()
        if names:
            self._seen([self._gone(self.prefix + name, now) for name in names])

    def _gone(self, node: str, now: float) -> Observation:
        return Observation(node, Sight.DOWN, now, f"it is no longer in cluster {self.cluster.name}")

    async def _beat(self) -> None:
        """Ask the server something small, and tell of all nodes again."""
        while True:
            await asyncio.sleep(self._beat_s)
            why = await self._small_talk() if self._open else ""
            # The watch may have ended while the server was asked, and an answer is no watch.
            if self._open:
                self.why_blind = why
            if self._open or self.why_blind:
                self._tell(self.nodes.values())

    async def _small_talk(self) -> str:
        """Return why the server does not answer; nothing when it does."""
        try:
            await self.cluster.get(NODES, {"limit": "1"})
        except (ClusterUnreachable, ApiError) as error:
            return f"cluster {self.cluster.name}: {error}"
        return ""

    async def _announce(self, changed: Callable[[], None]) -> None:
        while True:
            await self._dirty.wait()
            await asyncio.sleep(SETTLE_S)
            self._dirty.clear()
            changed()


def _face(node: NodeView) -> tuple[JSON, ...]:
    """Return what an inventory says of a node: when it differs, the inventory is to be asked again."""
    return (node.uid, node.labels, node.addresses, node.provider_id)
