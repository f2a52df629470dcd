"""Which tables and columns follow from the audit, and the settling of one row."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from typing import Final

from machines.model.events import MismatchSettled
from rolloutd.errors import Conflict

KEYS: Final[Mapping[str, tuple[str, ...]]] = {
    "rollout": ("id",),
    "target": ("rollout", "node"),
    "failure": ("rollout", "id"),
    "step": ("rollout", "node", "attempt", "step", "action", "number"),
    "pilot_evidence": ("rollout",),
    "preparation": ("rollout", "node", "stage"),
    "built_manifest": ("rollout", "stage"),
    "vote": ("id",),
    "opened": ("rollout", "gate", "wave"),
    "hold": ("node", "source", "id"),
    "freeze": ("id",),
    "team_rules": ("team",),
    "spent_token": ("id",),
    "node": ("name",),
    "node_configuration": ("node",),
    "verdicts": ("id",),
}
"""The compared tables and their keys; a table comes after those that it refers to."""

NOT_COMPARED_TABLES: Final[Mapping[str, str]] = {
    "audit": "its own hash chain covers it",
    "term": "a start and a restore raise the epoch, and the nodes' fences refuse a lower one",
    "meta": "not used yet",
    "source": "what sources reported last; the audit has the nodes that are made of it",
    "source_node": "what sources reported last; the audit has the nodes that are made of it",
    "preparation_snapshot": "needed only while the stage runs; the audit has none of it",
    "configuration": "its key is the hash of its document; the audit has the key",
}

NOT_COMPARED_COLUMNS: Final[Mapping[str, Mapping[str, str]]] = {
    "rollout": {"number": "only orders rows"},
    "failure": {"number": "only orders rows"},
    "opened": {"number": "only orders rows"},
    "vote": {"number": "only orders rows"},
    "step": {"output": "evidence for people; the entry has a hash of it"},
    "node": {"connection": "may hold secrets, which the audit never has; the inventory sets it again"},
}

HASHED_COLUMNS: Final = frozenset({("rollout", "content"), ("pilot_evidence", "content"), ("step", "prior")})
"""Columns of which the audit has only a hash, so they cannot be restored from it."""


def settle_row(connection: sqlite3.Connection, event: MismatchSettled, *, hashed: bool = False) -> None:
    """Make a row what the event says; raises Conflict when it cannot be that.

    `hashed` writes hashed columns too: a replay keeps their hashes, a real row keeps its values.
    """
    table, row = event.table, event.row
    keys = {name: event.key[name] for name in KEYS[table]}
    where = " AND ".join(f"{name} IS ?" for name in keys)
    if row is None:
        connection.execute(f"DELETE FROM {table} WHERE {where}", tuple(keys.values()))  # noqa: S608
        return
    names = [name for name in row if hashed or (table, name) not in HASHED_COLUMNS]
    insert = f"INSERT OR IGNORE INTO {table} ({', '.join(row)}) VALUES ({', '.join('?' * len(row))})"  # noqa: S608
    connection.execute(insert, tuple(row.values()))
    update = f"UPDATE {table} SET {', '.join(f'{name} = ?' for name in names)} WHERE {where}"  # noqa: S608
    if connection.execute(update, (*(row[name] for name in names), *keys.values())).rowcount != 1:
        raise Conflict(f"{event.subject}: the row cannot be restored; restore a backup")
