"""What the answers of all sources change in the fleet, as values.

It runs in a thread: a fleet of a hundred thousand nodes takes seconds.  So it reads only what no other thread
changes, and the loop carries out what it found.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from machines.model.node import Node, NodeKind
from rolloutd.configuration.sealed_variables import seal
from rolloutd.configuration.secret_variables import storable_variables
from rolloutd.engine.background.inventory_conflicts import Expectations, SourceReports, reconcile
from rolloutd.engine.background.inventory_merge import MergedInventory, merge_inventories
from rolloutd.ports import JSON, DiscoveredNode


@dataclass(frozen=True, slots=True)
class FleetAnswers:
    """The sources' answers in effect, and what is known of the fleet before them.

    `answers` are None for a source that has never answered.
    """

    answers: Mapping[str, Sequence[DiscoveredNode] | None]
    expectations: Expectations
    known: Mapping[str, Node]
    connections: Mapping[str, Mapping[str, JSON]]
    reports: Mapping[str, Sequence[DiscoveredNode]]
    pool_keys: tuple[str, ...]
    now: float
    key: bytes = field(repr=False)

    @property
    def size(self) -> int:
        return max(len(self.known), sum(len(nodes or ()) for nodes in self.answers.values()))

    @property
    def unanswered(self) -> frozenset[str]:
        return frozenset(name for name, nodes in self.answers.items() if nodes is None)

    def reported_later(self) -> Collection[str]:
        """Return the nodes that a source which has not answered yet may report.

        A source that the settings no longer name may have been renamed to one that has not answered.
        """
        if not self.unanswered:
            return ()
        answered = self.answers.keys() - self.unanswered
        return {name for name, node in self.known.items() if not answered.issuperset(node.sources)}


@dataclass(slots=True)
class FleetChange:
    """What differs: nodes to write with their stored variables, nodes to remove, variables in memory.

    `reports`, `canonical_names` and `rejected` are those of all nodes: see MergedInventory.
    """

    reports: Mapping[str, Sequence[DiscoveredNode]]
    canonical_names: Mapping[tuple[str, str], str]
    rejected: Mapping[str, Sequence[str]]
    changed: list[Node] = field(default_factory=list)
    stored: dict[str, Mapping[str, JSON]] = field(default_factory=dict)
    removed: list[str] = field(default_factory=list)
    connections: dict[str, Mapping[str, JSON]] = field(default_factory=dict)


def compare_fleet(answers: FleetAnswers) -> FleetChange:
    """Merge the answers, find their conflicts, and return what differs from what is known."""
    known, unanswered = answers.known, answers.unanswered
    discovered = [node for nodes in answers.answers.values() for node in nodes or ()]
    merged = merge_inventories(discovered, known, answers.connections, unanswered)
    nodes, connections = merged.nodes, merged.connections
    may_come = answers.reported_later()
    for name in [name for name, node in nodes.items() if _has_left_cluster(known.get(name), node)]:
        # Another source may still list the machine: remove the node now; the next refresh adds a host.
        if name not in may_come:
            del nodes[name], connections[name]
    _reconcile(merged, answers)
    for name in may_come:
        if name in nodes:
            # A source that has never answered may still report the node: keep everything.
            nodes[name] = known[name]
            connections[name] = answers.connections.get(name, connections[name])
    # Mostly the reports are the same, and then the loop has no others to free.
    reports = answers.reports if merged.reports == answers.reports else merged.reports
    change = FleetChange(reports, merged.canonical_names, merged.rejected)
    for name, node in nodes.items():
        before, connection = answers.connections.get(name), connections[name]
        if before != connection:
            change.connections[name] = connection
        if known.get(name) != node or _stores_other(before, connection):
            change.changed.append(node)
            change.stored[name] = seal(connection, answers.key)
    change.removed = [name for name in known if name not in nodes and name not in may_come]
    return change


def _reconcile(merged: MergedInventory, answers: FleetAnswers) -> None:
    """Set each node's pinned identity and its conflicts."""
    answered = frozenset(answers.answers.keys() - answers.unanswered)
    reports = SourceReports(merged.reports, answered, answers.expectations)
    found = reconcile(merged.nodes, answers.known, reports, answers.pool_keys, answers.now)
    for name, (identity, conflicts) in found.items():
        if identity or conflicts:
            node = merged.nodes[name]
            merged.nodes[name] = replace(node, identity=identity, conflicts=conflicts)


def _stores_other(before: Mapping[str, JSON] | None, connection: Mapping[str, JSON]) -> bool:
    """Return whether the stored variables change; secrets change in memory only."""
    if before is None or before == connection:
        return before is None
    return storable_variables(before) != storable_variables(connection)


def _has_left_cluster(known: Node | None, node: Node) -> bool:
    return known is not None and known.kind is not NodeKind.HOST and node.kind is NodeKind.HOST
