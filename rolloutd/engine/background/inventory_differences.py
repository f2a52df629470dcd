"""What differs between two states of the inventory, and the nodes that it may concern.

A node is judged with those that share a name, an id or an address with it: so a pass over these nodes alone
finds of them what a pass over the fleet finds.  It knows no judgement.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

from machines.model.node import Node
from rolloutd.engine.background.inventory_conflicts import read_text
from rolloutd.engine.background.inventory_identity import reported_name, without
from rolloutd.ports import ADDRESS_VARIABLES, JSON, MACHINE_ID, PROVIDER_ID, DiscoveredNode, plain_value

NO_VARIABLES: Mapping[str, JSON] = {}


@dataclass(frozen=True, slots=True)
class ComparedInventory:
    """What the last comparison was of, and what it found; without values, the state before the first one.

    `basis` is what the judgement of every node depends on.  `reports`, `canonical_names` and `refused` are as
    in MergedInventory, `reported_names` the other names that the sources have now.  `unsettled` are the nodes
    that the comparison wanted to change: whether that was written is not known here.
    """

    basis: object = None
    answers: Mapping[str, Sequence[DiscoveredNode]] = field(default_factory=dict)
    known: Mapping[str, Node] = field(default_factory=dict)
    reports: Mapping[str, Sequence[DiscoveredNode]] = field(default_factory=dict)
    canonical_names: Mapping[tuple[str, str], str] = field(default_factory=dict)
    reported_names: Mapping[tuple[str, str], str] = field(default_factory=dict)
    refused: Sequence[DiscoveredNode] = ()
    foreign_groups: Mapping[str, str] = field(default_factory=dict)
    unsettled: frozenset[str] = frozenset()
    names_by_key: Mapping[str, str | tuple[str, ...]] = field(default_factory=dict)
    """The nodes by what else than their name they may share with others; mostly one has it."""

    def gives_same_again(self, name: str) -> bool:
        """Return whether a node is judged as before once it is written: no other node gives it its name."""
        for record in self.reports.get(name, ()):
            provider_id = read_text(record.connection, PROVIDER_ID)
            if record.name != name or self.names_by_key.get(provider_id, name) != name:
                return False
        return True

    def after_write(self, nodes: Iterable[Node], settled: Set[str]) -> ComparedInventory:
        """Return the comparison after it was written; the settled nodes are as it wanted and stay so."""
        written = {node.name: node for node in nodes if node.name in settled}
        known = {**self.known, **written} if written else self.known
        return replace(self, known=known, unsettled=self.unsettled - settled)


@dataclass(frozen=True, slots=True)
class ConcernedNodes:
    """The nodes of the fleet that a difference may concern, all their records, and what they share."""

    names: Set[str]
    records: Sequence[DiscoveredNode]
    keys: Set[str]


def concerned_nodes(
    last: ComparedInventory,
    answers: Mapping[str, Sequence[DiscoveredNode]],
    known: Mapping[str, Node],
    connections: Mapping[str, Mapping[str, JSON]],
    foreign_groups: Mapping[str, str],
) -> ConcernedNodes:
    """Return what differs since the last comparison, with all that may depend on it."""
    new, gone = changed_records(answers, last.answers), changed_records(last.answers, answers)
    records = {id(each): each for each in (*new, *last.refused)}
    todo = [key for each in (*records.values(), *gone) for key in _keys_of(each)]
    todo += _changed_names(last.known, known)
    todo += last.unsettled
    todo += (name for name, _ in foreign_groups.items() ^ last.foreign_groups.items())
    names, keys = set[str](), set[str]()
    while todo:
        key = todo.pop()
        if key in keys:
            continue
        keys.add(key)
        others = last.names_by_key.get(key, ())
        for name in (key, *((others,) if isinstance(others, str) else others)):
            if name not in names and (name in last.reports or name in known):
                names.add(name)
                reports = last.reports.get(name, ())
                records.update((id(each), each) for each in reports)
                todo += keys_of_node(name, reports, connections)
    for each in gone:
        records.pop(id(each), None)
    # In the order of the answers, by which the first of two wins.
    ordered = [each for nodes in answers.values() for each in nodes if id(each) in records] if records else ()
    return ConcernedNodes(names, ordered, keys)


def names_by_key(
    last: ComparedInventory,
    concerned: ConcernedNodes,
    reports: Mapping[str, Sequence[DiscoveredNode]],
    connections: Mapping[str, Mapping[str, JSON]],
) -> Mapping[str, str | tuple[str, ...]]:
    """Return the nodes by what they may share, with the new reports and variables of those concerned."""
    if not concerned.keys:
        return last.names_by_key
    found: dict[str, dict[str, None]] = {}
    for name in concerned.names | reports.keys():
        for key in keys_of_node(name, reports.get(name, ()), connections):
            if key != name:
                found.setdefault(key, {})[name] = None
    kept = dict(last.names_by_key)
    # All nodes that share one of these were concerned.
    for key in concerned.keys:
        kept.pop(key, None)
    kept |= {key: next(iter(names)) if len(names) == 1 else tuple(names) for key, names in found.items()}
    return kept


def changed_records(
    answers: Mapping[str, Sequence[DiscoveredNode]], others: Mapping[str, Sequence[DiscoveredNode]]
) -> list[DiscoveredNode]:
    return [
        node
        for source, nodes in answers.items()
        if nodes is not others.get(source)
        for node in without(nodes, others.get(source, ()))
    ]


def keys_of_node(
    name: str, records: Iterable[DiscoveredNode], connections: Mapping[str, Mapping[str, JSON]]
) -> list[str]:
    """Return what other nodes may share with a node: its name, and what its records and variables say."""
    keys = [name, *(key for each in records for key in _keys_of(each))]
    if provider_id := read_text(connections.get(name, NO_VARIABLES), PROVIDER_ID):
        keys.append(provider_id)
    return keys


def _keys_of(record: DiscoveredNode) -> Iterator[str]:
    yield record.name
    if record.conflicts:
        yield reported_name(record)
    variables = record.connection
    for key in (PROVIDER_ID, MACHINE_ID):
        if key in variables and (value := read_text(variables, key)):
            yield value
    for key in ADDRESS_VARIABLES:
        if key in variables and (address := plain_value(variables[key])):
            yield str(address)


def _changed_names(before: Mapping[str, Node], after: Mapping[str, Node]) -> Iterator[str]:
    """Yield the nodes that were written or removed since."""
    if before is not after:
        yield from (name for name, node in after.items() if before.get(name) is not node)
        yield from (name for name in before if name not in after)
