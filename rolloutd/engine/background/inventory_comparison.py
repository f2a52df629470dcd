"""What the answers of all sources change in the fleet, as values.

Only the nodes are judged that a difference since the last comparison concerns; before the first one that is
all of them, which takes seconds of a large fleet.  So it runs in a thread, reads only what no other thread
changes, and the loop carries out what it found.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import TypeVar

from machines.model.node import Node, NodeKind
from rolloutd.configuration.sealed_variables import seal
from rolloutd.configuration.secret_variables import storable_variables
from rolloutd.engine.background.inventory_conflicts import Expectations, SourceReports, reconcile
from rolloutd.engine.background.inventory_differences import (
    ComparedInventory,
    ConcernedNodes,
    concerned_nodes,
    names_by_key,
)
from rolloutd.engine.background.inventory_identity import reported_name
from rolloutd.engine.background.inventory_merge import (
    MergedInventory,
    groups_without_host,
    merge_inventories,
)
from rolloutd.ports import JSON, DiscoveredNode

K = TypeVar("K")
V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class FleetAnswers:
    """The sources' answers in effect, and what is known of the fleet before them.

    `answers` are None for a source that has never answered.
    """

    answers: Mapping[str, Sequence[DiscoveredNode] | None]
    expectations: Expectations
    known: Mapping[str, Node]
    connections: Mapping[str, Mapping[str, JSON]]
    pool_keys: tuple[str, ...]
    now: float
    key: bytes = field(repr=False)

    @property
    def size(self) -> int:
        return max(len(self.known), sum(len(nodes or ()) for nodes in self.answers.values()))

    @property
    def unanswered(self) -> frozenset[str]:
        return frozenset(name for name, nodes in self.answers.items() if nodes is None)

    @property
    def basis(self) -> object:
        """Return what every node is judged by, besides what is reported and known of it."""
        return (self.unanswered, self.pool_keys)

    def reported_later(self, known: Mapping[str, Node]) -> Collection[str]:
        """Return those of some known nodes that a source which has not answered yet may report.

        A source that the settings no longer name may have been renamed to one that has not answered.
        """
        if not self.unanswered:
            return ()
        answered = self.answers.keys() - self.unanswered
        return {name for name, node in known.items() if not answered.issuperset(node.sources)}


@dataclass(slots=True)
class FleetChange:
    """What differs: nodes to write with their stored variables, nodes to remove, variables in memory.

    `compared` has what was found of all nodes, `rejected` all problems by source, and `canonical_names` the
    fleet's names by source and the name that the source has now.  `final` are the nodes that the next
    comparison need not judge again once they are written.  `renamed` are the accepted new names in the
    answers, by source and the name before.
    """

    compared: ComparedInventory
    canonical_names: Mapping[tuple[str, str], str]
    rejected: Mapping[str, Sequence[str]]
    changed: list[Node] = field(default_factory=list)
    stored: dict[str, Mapping[str, JSON]] = field(default_factory=dict)
    removed: list[str] = field(default_factory=list)
    connections: dict[str, Mapping[str, JSON]] = field(default_factory=dict)
    final: Set[str] = frozenset()
    renamed: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


def compare_fleet(answers: FleetAnswers, last: ComparedInventory) -> FleetChange:
    """Merge the answers, find their conflicts, and return what differs from what is known."""
    if last.basis != answers.basis:
        last = ComparedInventory(answers.basis)
    reported = {source: nodes or () for source, nodes in answers.answers.items()}
    foreign_groups = last.foreign_groups
    if any(nodes is not last.answers.get(source) for source, nodes in reported.items()):
        foreign_groups = groups_without_host([node for nodes in reported.values() for node in nodes])
    concerned = concerned_nodes(last, reported, answers.known, answers.connections, foreign_groups)
    # In the order of all, by which the last of two nodes with one id gives its name.
    known, connections = _only(concerned.names, answers.known), _only(concerned.names, answers.connections)
    merged = merge_inventories(concerned.records, known, connections, answers.unanswered, foreign_groups)
    change = _changes(merged, known, connections, answers)
    connections |= merged.connections
    for name in change.removed:
        connections.pop(name, None)
    change.compared = _compared(last, concerned, merged, change, answers, foreign_groups, connections)
    to_write = (*(node.name for node in change.changed), *change.connections)
    change.final = {name for name in to_write if change.compared.gives_same_again(name)}
    names, now = change.compared.canonical_names, change.compared.reported_names
    change.canonical_names = {**names, **now} if now else names
    return change


def _changes(
    merged: MergedInventory,
    known: Mapping[str, Node],
    connections: Mapping[str, Mapping[str, JSON]],
    answers: FleetAnswers,
) -> FleetChange:
    """Return what differs between the merged nodes and what is known of them."""
    nodes = merged.nodes
    may_come = answers.reported_later(known)
    for name in [name for name, node in nodes.items() if _has_left_cluster(known.get(name), node)]:
        # Another source may still list the machine: remove the node now; the next refresh adds a host.
        if name not in may_come:
            del nodes[name], merged.connections[name]
    _reconcile(merged, known, answers)
    for name in may_come:
        if name in nodes:
            # A source that has never answered may still report the node: keep everything.
            nodes[name] = known[name]
            merged.connections[name] = connections.get(name, merged.connections[name])
    change = FleetChange(ComparedInventory(), {}, merged.rejected)
    for name, node in nodes.items():
        before, connection = connections.get(name), merged.connections[name]
        if before != connection:
            change.connections[name] = connection
        if known.get(name) != node or _stores_other(before, connection):
            change.changed.append(node)
            change.stored[name] = seal(connection, answers.key)
    change.removed = [name for name in known if name not in nodes and name not in may_come]
    return change


def _compared(
    last: ComparedInventory,
    concerned: ConcernedNodes,
    merged: MergedInventory,
    change: FleetChange,
    answers: FleetAnswers,
    foreign_groups: Mapping[str, str],
    connections: Mapping[str, Mapping[str, JSON]],
) -> ComparedInventory:
    """Return the last comparison with what this one found of the nodes that it judged."""
    gone = [each for name in concerned.names for each in last.reports.get(name, ())] + list(last.refused)
    own_names = [(each.source, each.name) for each in gone]
    reported_names = [(each.source, reported_name(each)) for each in gone if each.conflicts]
    placed = [(name, each) for name, records in merged.reports.items() for each in records]
    placed += (("", each) for each in merged.refused)
    now_reported = {(each.source, reported_name(each)): name for name, each in placed if each.conflicts}
    reports = _replaced(last.reports, concerned.names, merged.reports)
    return ComparedInventory(
        answers.basis,
        {source: nodes or () for source, nodes in answers.answers.items()},
        answers.known,
        reports,
        _replaced(last.canonical_names, own_names, merged.canonical_names),
        _replaced(last.reported_names, reported_names, now_reported),
        merged.refused,
        foreign_groups,
        frozenset((*(node.name for node in change.changed), *change.removed, *change.connections)),
        names_by_key(last, concerned, merged.reports, connections),
    )


def _only(names: Set[str], table: Mapping[str, V]) -> dict[str, V]:
    return {name: each for name, each in table.items() if name in names} if names else {}


def _replaced(before: Mapping[K, V], gone: Collection[K], new: Mapping[K, V]) -> Mapping[K, V]:
    """Return a table without some of its keys, and with other ones; the same one if nothing differs."""
    if not (gone or new):
        return before
    made = dict(before)
    for key in gone:
        made.pop(key, None)
    made.update(new)
    return made


def _reconcile(merged: MergedInventory, known: Mapping[str, Node], answers: FleetAnswers) -> None:
    """Set each node's pinned identity and its conflicts."""
    answered = frozenset(answers.answers.keys() - answers.unanswered)
    reports = SourceReports(merged.reports, answered, answers.expectations)
    found = reconcile(merged.nodes, known, reports, answers.pool_keys, answers.now)
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
