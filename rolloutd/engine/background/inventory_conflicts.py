"""Contradictions between the inventory sources, found in what they report of each node.

A node with a contradiction is quarantined: nothing decides which source is right.  It knows neither plans nor
observations; the core decides what a quarantined node may do.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from machines.model.node import Conflict, ConflictKind, Node
from machines.model.selector import Selector
from rolloutd import ports

TEAM = "team"
"""The label that names a node's owner."""

IDENTITY_KEYS = (ports.HOST_KEY, ports.MACHINE_ID, ports.CLUSTER_ID)

MAX_NAMES = 5
"""Other nodes named in one conflict; a shared address may have hundreds."""

_SSH = frozenset({"ssh", "smart", "paramiko", "paramiko_ssh"})
"""Ansible connections that reach a node by its address and port."""

Expectations = Mapping[str, Mapping[str, Selector]]
"""By source, the sources that must report its nodes too, each for the nodes that its selector matches."""


@dataclass(frozen=True, slots=True)
class SourceReports:
    """What the sources report: their records by node, and the sources that have ever answered."""

    by_node: Mapping[str, Sequence[ports.DiscoveredNode]]
    answered: frozenset[str]
    expectations: Expectations = field(default_factory=dict)


def reconcile(
    nodes: Mapping[str, Node],
    known: Mapping[str, Node],
    reports: SourceReports,
    pool_keys: Iterable[str],
    now: float,
) -> dict[str, tuple[Mapping[str, str], tuple[Conflict, ...]]]:
    """Return each node's pinned identity and its conflicts; one that lasts keeps its `since`."""
    keys = tuple(key for key in pool_keys if key != TEAM)
    shared = (
        _shared_addresses(reports.by_node),
        _shared_ids(reports.by_node, ports.MACHINE_ID, ConflictKind.MACHINE_ID_SHARED),
        # The merge gives one name to what shares this id, unless one source has two nodes with it.
        _shared_ids(reports.by_node, ports.PROVIDER_ID, ConflictKind.PROVIDER_ID_SHARED),
    )
    found = {}
    for name, node in nodes.items():
        records, before = reports.by_node.get(name, ()), known.get(name)
        identity = _pin_identity(records, {} if before is None else before.identity)
        conflicts = [
            *_label_conflicts(records, keys),
            *_missing_reports(node, reports),
            *_identity_conflicts(records, identity),
            *_status_conflicts(records),
            *_source_conflicts(records),
            *(each[name] for each in shared if name in each),
        ]
        found[name] = identity, _with_since(conflicts, () if before is None else before.conflicts, now)
    return found


def _with_since(
    conflicts: Sequence[Conflict], before: Sequence[Conflict], now: float
) -> tuple[Conflict, ...]:
    since = {(each.kind, each.about): each.since for each in before}
    return tuple(
        Conflict(each.kind, each.about, each.values, since.get((each.kind, each.about), now))
        for each in conflicts
    )


def _conflict(kind: ConflictKind, about: str, values: Mapping[str, str]) -> Conflict:
    return Conflict(kind, about, values, 0.0)


def _label_conflicts(records: Sequence[ports.DiscoveredNode], keys: Sequence[str]) -> Iterator[Conflict]:
    """Yield the owner and the pools that two sources report differently; a source may omit a label."""
    for key in (TEAM, *keys):
        values = {each.source: each.labels[key] for each in records if each.labels.get(key)}
        if len(set(values.values())) > 1:
            kind = ConflictKind.OWNERS_DIFFER if key == TEAM else ConflictKind.POOLS_DIFFER
            yield _conflict(kind, key, values)


def _missing_reports(node: Node, reports: SourceReports) -> Iterator[Conflict]:
    for source in node.sources:
        for expected, selector in reports.expectations.get(source, {}).items():
            is_missing = expected in reports.answered and expected not in node.sources
            if is_missing and selector.matches(node.labels):
                yield _conflict(ConflictKind.NOT_REPORTED, expected, {source: node.name})


def _pin_identity(records: Sequence[ports.DiscoveredNode], pinned: Mapping[str, str]) -> Mapping[str, str]:
    """Return the pinned values, the first reported one of what is not pinned yet, and the sources' ids."""
    found = dict(pinned)
    for record in records:
        # Those made of other values are pinned with these.
        if record.id and record.id.partition("/")[0] not in (ports.PROVIDER_ID, ports.MACHINE_ID):
            found[id_key(record.source)] = record.id
        for key in IDENTITY_KEYS:
            if value := read_text(record.connection, key):
                found.setdefault(key, value)
    return found


def id_key(source: str) -> str:
    """Return the key of a node's identity that has its id in a source."""
    return f"id in {source}"


def _identity_conflicts(
    records: Sequence[ports.DiscoveredNode], identity: Mapping[str, str]
) -> Iterator[Conflict]:
    for key in IDENTITY_KEYS:
        reported = {each.source: read_text(each.connection, key) for each in records}
        others = {source: value for source, value in reported.items() if value not in ("", identity.get(key))}
        if others:
            yield _conflict(ConflictKind.IDENTITY_CHANGED, key, {"pinned": identity[key], **others})


def _status_conflicts(records: Sequence[ports.DiscoveredNode]) -> Iterator[Conflict]:
    """Yield the sources in which the machine is planned or offline, though a plan could target it."""
    status = {
        each.source: each.labels.get(ports.STATUS) or read_text(each.connection, ports.STATUS)
        for each in records
    }
    values = {source: value for source, value in status.items() if value.lower() in ports.OUT_OF_SERVICE}
    if values:
        yield _conflict(ConflictKind.OUT_OF_SERVICE, ports.STATUS, values)


def _source_conflicts(records: Sequence[ports.DiscoveredNode]) -> Iterator[Conflict]:
    """Yield what contradicts the earlier answers of a source."""
    for record in records:
        for kind, detail in record.conflicts.items():
            if kind == ConflictKind.IDENTITY_CHANGED:
                values = {"pinned": record.id, record.source: detail}
                yield _conflict(ConflictKind.IDENTITY_CHANGED, "id", values)
            else:
                yield _conflict(ConflictKind(kind), record.source, {record.source: detail})


def _shared_addresses(by_node: Mapping[str, Sequence[ports.DiscoveredNode]]) -> dict[str, Conflict]:
    """Return the nodes whose address and port bear another name too: a run would reach the wrong one."""
    names: dict[tuple[str, str, str], list[str]] = {}
    for name, records in by_node.items():
        merged: dict[str, ports.JSON] = {}
        for record in reversed(records):
            merged |= record.connection
        host = ports.Host(name, connection=merged)
        merged = dict(host.connection)
        if str(merged.get("ansible_connection", "ssh")) in _SSH:
            port = str(merged.get("ansible_port") or merged.get("ansible_ssh_port") or 22)
            # Behind another jump host the same address is another machine.
            route = str(merged.get("ansible_ssh_common_args") or "")
            names.setdefault((host.address, port, route), []).append(name)
    return {
        name: _shared(ConflictKind.ADDRESS_SHARED, f"{address} port {port}", sharing, name)
        for (address, port, _), sharing in names.items()
        if len(sharing) > 1
        for name in sharing
    }


def _shared_ids(
    by_node: Mapping[str, Sequence[ports.DiscoveredNode]], key: str, kind: ConflictKind
) -> dict[str, Conflict]:
    names: dict[str, list[str]] = {}
    for name, records in by_node.items():
        for value in {read_text(each.connection, key) for each in records} - {""}:
            names.setdefault(value, []).append(name)
    return {
        name: _shared(kind, value, sharing, name)
        for value, sharing in names.items()
        if len(sharing) > 1
        for name in sharing
    }


def _shared(kind: ConflictKind, about: str, sharing: Iterable[str], name: str) -> Conflict:
    others = sorted(each for each in sharing if each != name)
    return _conflict(kind, about, dict.fromkeys(others[:MAX_NAMES], ""))


def read_text(connection: Mapping[str, ports.JSON], key: str) -> str:
    """Return an id or another text that a source reports of a node; empty if it reports none."""
    value = ports.plain_value(connection.get(key)) or ""
    text = str(value).strip() if isinstance(value, str | int) else ""  # some clouds' ids are numbers
    # ansible-inventory renders no template, so a whole group may have this one, which is the id of none.
    return "" if "{{" in text else text
