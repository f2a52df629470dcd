"""Connection variables of the nodes as their sources report them, and what is made of them for runs.

Variables with secrets are in memory only.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping

from machines.model.node import Node, NodeKind
from rolloutd import ports

MAX_KEPT_HOSTS = 4_096
"""Hosts whose variables are kept in plain form: a thousand nodes in flight, and peers observed meanwhile."""

NO_VARIABLES: Mapping[str, ports.JSON] = {}


class ConnectionVariables(dict[str, Mapping[str, ports.JSON]]):
    def __init__(self) -> None:
        super().__init__()
        self._hosts: OrderedDict[str, tuple[Node, object, ports.Host]] = OrderedDict()
        """Hosts, and what they were made of: a node in flight asks for its own some thirty times."""
        self._snapshot: ports.InventorySnapshot | None = None
        self._generation = 0

    def host(self, node: Node) -> ports.Host:
        """Return a node with its connection variables."""
        connection = self.get(node.name, NO_VARIABLES)
        kept = self._hosts.get(node.name)
        if kept is not None and kept[0] is node and kept[1] is connection:
            self._hosts.move_to_end(node.name)  # it outlasts the peers that are observed for it
            return kept[2]
        if len(self._hosts) >= MAX_KEPT_HOSTS:
            self._hosts.popitem(last=False)
        host = ports.Host(node.name, node.kind, node.labels, _with_pinned_identity(node, connection))
        self._hosts[node.name] = node, connection, host
        return host

    def change(
        self, connections: Mapping[str, Mapping[str, ports.JSON]], removed: Iterable[str] = ()
    ) -> None:
        """Set the variables of nodes, and drop those of removed nodes."""
        lost = [name for name in removed if self.pop(name, None) is not None]
        if lost or any(self.get(name) != each for name, each in connections.items()):
            self.update(connections)
            self._snapshot = None
            self._hosts.clear()  # secrets stay in memory no longer than their node

    def snapshot(self) -> ports.InventorySnapshot:
        """Return all nodes' variables and groups; the same object until one of them changes."""
        if self._snapshot is None:
            self._generation += 1
            groups: dict[str, list[str]] = {}
            for node, connection in self.items():
                names = connection.get(ports.GROUPS)
                for group in names if isinstance(names, list) else ():
                    groups.setdefault(str(group), []).append(node)
            snapshot = ports.InventorySnapshot(dict(self), groups, self._generation)
            self._snapshot = snapshot
        return self._snapshot


def _with_pinned_identity(node: Node, connection: Mapping[str, ports.JSON]) -> Mapping[str, ports.JSON]:
    """Return a cluster's variables with its pinned identity: a source may report another one by now."""
    if node.kind is not NodeKind.CLUSTER:
        return connection
    others = {key: each for key, each in connection.items() if key != ports.CLUSTER_ID}
    pinned = {key: each for key, each in node.identity.items() if key == ports.CLUSTER_ID}
    return {**others, **ports.without_templates(pinned)}
