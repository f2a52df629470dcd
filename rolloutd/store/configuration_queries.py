"""The queries of configurations and verdicts: rows in, values of the core out."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Sequence

from machines.model.configuration import ConfigurationRecord, NodeConfiguration
from machines.model.verdict import Verdict
from rolloutd.ports import NodeConfigurations


def load_configuration_records(connection: sqlite3.Connection, node: str) -> NodeConfiguration:
    """Return the records of one node; without any for a node that no run has reached."""
    sql = "SELECT current, previous, invalid FROM node_configuration WHERE node = ?"
    row = connection.execute(sql, (node,)).fetchone()
    return NodeConfiguration() if row is None else _decode_records(row)


def load_configurations(connection: sqlite3.Connection, nodes: Sequence[str]) -> NodeConfigurations:
    """Return the records of these nodes, without those that have none, and what they refer to."""
    records = {node: load_configuration_records(connection, node) for node in nodes}
    records = {node: each for node, each in records.items() if each != NodeConfiguration()}
    found = [
        record
        for each in records.values()
        for record in (each.current, each.previous, each.invalid)
        if record is not None
    ]
    documents = _load_pairs(
        connection,
        "SELECT content, document FROM configuration WHERE content = ?",
        {r.content for r in found},
    )
    changes = _load_pairs(
        connection, "SELECT id, change_digest FROM rollout WHERE id = ?", {r.rollout for r in found}
    )
    return NodeConfigurations(records, {key: json.loads(text) for key, text in documents.items()}, changes)


def _load_pairs(connection: sqlite3.Connection, sql: str, keys: Iterable[str]) -> dict[str, str]:
    rows = (connection.execute(sql, (key,)).fetchone() for key in keys)
    return dict(row for row in rows if row is not None)


def _decode_records(row: Sequence[str | None]) -> NodeConfiguration:
    return NodeConfiguration(
        *(None if text is None else ConfigurationRecord(**json.loads(text)) for text in row)
    )


def load_verdicts(connection: sqlite3.Connection) -> tuple[Verdict, ...]:
    """Return the verdicts that are not cleared, oldest first."""
    rows = connection.execute(
        "SELECT id, change_digest, content, host_class, rollout, node, step, text, at FROM verdicts"
        " WHERE cleared_at IS NULL ORDER BY at, id"
    )
    return tuple(
        Verdict(id_, change, content, json.loads(host_class), *evidence)
        for id_, change, content, host_class, *evidence in rows
    )
