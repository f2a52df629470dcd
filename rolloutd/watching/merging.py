"""Makes one node of what several inventory sources say of it.

Sources speak of the same node when they name it alike, or tell the same
`provider_id`.  A Kubernetes node is in one cluster: where two clusters have
nodes of one name, the one that is known keeps it and the other is refused,
because a cordon meant for one must never reach the other.  A name that Ansible
would read as a pattern is refused too: `!n1` is every node but n1 to it.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from machines.node import Kind, Node
from rolloutd.ports import GROUPS, PROVIDER_ID, Found

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
"""A node's name: it is part of a pattern of Ansible's, of a file's name beside the rollout's, and of URLs."""


@dataclass(slots=True)
class Merged:
    """Nodes and connections by name; where two sources differ, the first one named wins.

    `names` has what the fleet calls a node of a source where that differs, empty
    for one that was refused; `refused` why, by source.
    """

    nodes: dict[str, Node] = field(default_factory=dict)
    connections: dict[str, dict[str, Any]] = field(default_factory=dict)
    names: dict[tuple[str, str], str] = field(default_factory=dict)
    refused: dict[str, list[str]] = field(default_factory=dict)


def merge(
    found: Iterable[Found],
    known: Mapping[str, Node] | None = None,
    connections: Mapping[str, Mapping[str, Any]] | None = None,
    silent: Iterable[str] = (),
) -> Merged:
    """Merge what the sources found, in their order.

    `known` and `connections` are the nodes as they were, which keep their names
    and clusters; `silent` are sources that have not answered yet.
    """
    known = known or {}
    merged, quiet = Merged(), frozenset(silent)
    provided = {str(c[PROVIDER_ID]): n for n, c in (connections or {}).items() if PROVIDER_ID in c}
    called: list[tuple[str, Found]] = []
    for one in found:
        provider_id = str(one.connection.get(PROVIDER_ID) or "")
        name = provided.setdefault(provider_id, one.name) if provider_id else one.name
        if name != one.name:
            merged.names[one.source, one.name] = name
        called.append((name, one))
    clusters = _clusters(called, known, quiet)
    for name, one in called:
        cluster = clusters.get(name, one.source)
        if not _is_name(name):
            merged.names[one.source, one.name] = ""
            told = f"{name[:60]!r} is no name for a node: use letters, digits, '-', '_' and '.', at most 128"
            merged.refused.setdefault(one.source, []).append(told)
        elif one.kind is Kind.KUBERNETES and cluster != one.source:
            merged.names[one.source, one.name] = ""
            told = f"{one.name} is also in {cluster}: give one of the two clusters a prefix in the settings"
            merged.refused.setdefault(one.source, []).append(told)
        else:
            _add(merged, name, one)
    return merged


def _is_name(name: str) -> bool:
    if NAME.fullmatch(name):
        return True
    try:
        return ipaddress.ip_address(name).version == 6  # the colons are no pattern's there
    except ValueError:
        return False


def _clusters(
    called: Sequence[tuple[str, Found]], known: Mapping[str, Node], silent: frozenset[str]
) -> dict[str, str]:
    """Return the source whose cluster each Kubernetes node is in: the one it was in, else the first."""
    claims: dict[str, list[str]] = {}
    for name, one in called:
        if one.kind is Kind.KUBERNETES:
            claims.setdefault(name, []).append(one.source)
    owners: dict[str, str] = {}
    for name, sources in claims.items():
        before = known[name].sources if name in known and known[name].kind is Kind.KUBERNETES else ()
        away = [source for source in before if source in silent]
        kept = [source for source in before if source in sources]
        owners[name] = next(iter((*kept, *away)), sources[0])
    return owners


def _add(merged: Merged, name: str, one: Found) -> None:
    known = merged.nodes.get(name)
    if known is None:
        merged.nodes[name] = Node(name, one.kind, (one.source,), dict(one.labels))
        merged.connections[name] = dict(one.connection)
        return
    kind = Kind.KUBERNETES if Kind.KUBERNETES in (known.kind, one.kind) else known.kind
    merged.nodes[name] = Node(name, kind, (*known.sources, one.source), {**one.labels, **known.labels})
    groups = {*_groups(merged.connections[name]), *_groups(one.connection)}
    merged.connections[name] = {**one.connection, **merged.connections[name]}
    if groups:
        merged.connections[name] |= {GROUPS: sorted(groups)}


def _groups(connection: Mapping[str, Any]) -> Sequence[str]:
    named: Sequence[str] = connection.get(GROUPS, ())
    return named
