"""Merge of the nodes that several inventory sources report.

Two sources report the same node under one name or one `provider_id`; one source does not.  A Kubernetes node
is in one cluster: where two clusters use the same name, the known node keeps it and the other is rejected,
because a cordon for one must never reach the other.  A name that is a pattern to Ansible is rejected too:
`!n1` is every node but n1.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from machines.model.node import Node, NodeKind
from rolloutd.engine.background.inventory_conflicts import read_text
from rolloutd.ports import GROUPS, IMPLICIT_GROUPS, PROVIDER_ID, DiscoveredNode

NODE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
"""A node's name becomes part of Ansible patterns, file names and URLs."""


@dataclass(slots=True)
class MergedInventory:
    """Nodes and connections by name; where two sources differ, the first one named wins.

    `canonical_names` maps (source, its name) to the fleet's name where they differ, empty for a rejected
    node; `rejected` has the problems by source, `refused` the records of these nodes.  `reports` are the
    sources' other records by the fleet's name.
    """

    nodes: dict[str, Node] = field(default_factory=dict)
    connections: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    canonical_names: dict[tuple[str, str], str] = field(default_factory=dict)
    rejected: dict[str, list[str]] = field(default_factory=dict)
    refused: list[DiscoveredNode] = field(default_factory=list)
    reports: dict[str, tuple[DiscoveredNode, ...]] = field(default_factory=dict)
    sources: dict[str, tuple[str]] = field(default_factory=dict)
    """One object for all nodes that only this source reports."""


def merge_inventories(
    discovered: Iterable[DiscoveredNode],
    known_nodes: Mapping[str, Node] | None = None,
    connections: Mapping[str, Mapping[str, Any]] | None = None,
    unanswered: Iterable[str] = (),
    foreign_groups: Mapping[str, str] | None = None,
) -> MergedInventory:
    """Merge what the sources found, in their order.

    `known_nodes` and `connections` keep their names and clusters; `unanswered` sources have not answered yet.
    `foreign_groups` are those of all nodes, if the sources found more than these (groups_without_host()).
    """
    known_nodes = known_nodes or {}
    merged, unanswered_sources = MergedInventory(), frozenset(unanswered)
    # The known name stays: a node must not change its name because another source answers first.
    name_by_provider_id = {read_text(each, PROVIDER_ID): name for name, each in (connections or {}).items()}
    found = tuple(discovered)
    named: list[tuple[str, DiscoveredNode]] = []
    # By source and the fleet's name, that source's own name; its node of the very same name comes first.
    taken = {(node.source, node.name): node.name for node in found}
    for node in found:
        provider_id = read_text(node.connection, PROVIDER_ID)
        name = name_by_provider_id.setdefault(provider_id, node.name) if provider_id else node.name
        # A source reports a node once: two nodes with one provider_id are two machines, and with one name
        # the playbook for one would run on the other.  Both are quarantined.
        if taken.setdefault((node.source, name), node.name) != node.name:
            name = node.name
        if name != node.name:
            merged.canonical_names[node.source, node.name] = name
        named.append((name, node))
    clusters = _assign_clusters(named, known_nodes, unanswered_sources)
    if foreign_groups is None:
        foreign_groups = groups_without_host(found)
    for name, node in named:
        cluster = clusters.get(name, node.source)
        problem = ""
        if name in IMPLICIT_GROUPS:
            problem = f"{name} is the name of a group that Ansible makes; rename the node in the source"
        elif name in foreign_groups:
            problem = (
                f"{name} is the name of a group of {foreign_groups[name]}; rename the node in the source"
            )
        elif not _is_valid_name(name):
            problem = f"{name[:60]!r} is not a node name; use letters, digits, '-', '_' and '.', at most 128"
        elif node.kind is not NodeKind.HOST and cluster != node.source:
            problem = (
                f"{node.name} is also in {cluster}: give one of the two clusters a prefix in the settings"
            )
        if problem:
            merged.canonical_names[node.source, node.name] = ""
            merged.rejected.setdefault(node.source, []).append(problem)
            merged.refused.append(node)
        else:
            _add_node(merged, name, node)
    return merged


def groups_without_host(found: Iterable[DiscoveredNode]) -> dict[str, str]:
    """Return the sources of the groups that have no host of their name in their source.

    A host of another source with such a name would take the group's place in playbooks: they would skip the
    group's nodes.
    """
    groups: dict[str, set[str]] = {}
    for node in found:
        if names := node.connection.get(GROUPS):
            groups.setdefault(node.source, set()).update(names)
    hosts = {(node.source, node.name) for node in found} if groups else set()
    return {name: source for source, names in groups.items() for name in names if (source, name) not in hosts}


def _is_valid_name(name: str) -> bool:
    if NODE_NAME.fullmatch(name):
        return True
    try:
        # Ansible does not parse its colons as a pattern.  Behind its % any text may stand.
        return ipaddress.ip_address(name).version == 6 and "%" not in name
    except ValueError:
        return False


def _assign_clusters(
    named: Sequence[tuple[str, DiscoveredNode]], known: Mapping[str, Node], unanswered: frozenset[str]
) -> dict[str, str]:
    """Return the source of each node of a cluster and whole cluster: its last one, else the first with it."""
    claims: dict[str, list[str]] = {}
    for name, node in named:
        if node.kind is not NodeKind.HOST:
            claims.setdefault(name, []).append(node.source)
    owners: dict[str, str] = {}
    for name, sources in claims.items():
        before = known[name].sources if name in known and known[name].kind is not NodeKind.HOST else ()
        unanswered_owners = [source for source in before if source in unanswered]
        current_owners = [source for source in before if source in sources]
        owners[name] = next(iter((*current_owners, *unanswered_owners)), sources[0])
    return owners


def _add_node(merged: MergedInventory, name: str, discovered: DiscoveredNode) -> None:
    merged.reports[name] = (*merged.reports.get(name, ()), discovered)
    known = merged.nodes.get(name)
    if known is None:
        sources = merged.sources.setdefault(discovered.source, (discovered.source,))
        merged.nodes[name] = Node(name, discovered.kind, sources, discovered.labels)
        merged.connections[name] = discovered.connection
        return
    kind = discovered.kind if known.kind is NodeKind.HOST else known.kind
    merged.nodes[name] = Node(
        name, kind, (*known.sources, discovered.source), {**discovered.labels, **known.labels}
    )
    groups = dict.fromkeys((*_group_names(merged.connections[name]), *_group_names(discovered.connection)))
    own = {GROUPS: list(groups)} if groups else {}
    merged.connections[name] = {**discovered.connection, **merged.connections[name], **own}


def _group_names(connection: Mapping[str, Any]) -> Sequence[str]:
    group_names: Sequence[str] = connection.get(GROUPS, ())
    return group_names
