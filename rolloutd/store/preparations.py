"""Statements and queries of prepare stages and the manifests that builds make."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from machines.model.events import ArtifactsBuilt, PreparationRecorded
from machines.model.preparation import (
    ManifestEntry,
    Preparation,
    PreparationState,
    entry_of_record,
    entry_record,
)
from rolloutd.audit_chain import canonical_json
from rolloutd.store.sql_statement import Statement

MAX_TEXT_CHARS = 4_000
"""Characters of a stage's text; the run's output has the rest."""

MAX_SNAPSHOT_CHARS = 1_048_576
"""Characters of a node's snapshot: some ten thousand values."""

_COLUMNS = "rollout, node, stage, attempt, state, content, at, began_at, bytes, text, handle, not_before"

# A row is of the latest attempt: an earlier one that ends late changes nothing.
_UPSERT = f"""
INSERT INTO preparation ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (rollout, node, stage) DO UPDATE
SET attempt = excluded.attempt, state = excluded.state, content = excluded.content, at = excluded.at,
    began_at = excluded.began_at, bytes = excluded.bytes, text = excluded.text, handle = excluded.handle,
    not_before = excluded.not_before
WHERE excluded.attempt >= preparation.attempt"""  # noqa: S608  # a constant

# In a table of its own: a row is written several times, its snapshot of some hundred kilobytes changes once.
_UPSERT_SNAPSHOT = """
INSERT INTO preparation_snapshot (rollout, node, stage, before) VALUES (?, ?, ?, ?)
ON CONFLICT (rollout, node, stage) DO UPDATE SET before = excluded.before"""
_DELETE_SNAPSHOT = "DELETE FROM preparation_snapshot WHERE rollout = ? AND node = ? AND stage = ?"

_INSERT_BUILT = "INSERT INTO built_manifest (rollout, stage, manifest, at) VALUES (?, ?, ?, ?)"
_COUNT_AMENDMENT = "UPDATE rollout SET amendments = amendments + 1 WHERE id = ?"


def preparation_statements(event: PreparationRecorded | ArtifactsBuilt) -> Iterator[Statement]:
    """Yield the statements of a stage's record, or of a manifest that a build made."""
    if isinstance(event, ArtifactsBuilt):
        manifest = canonical_json([entry_record(each) for each in event.manifest])
        row = (event.rollout, event.stage, manifest, event.at)
        text = f"stage {event.stage} of {event.rollout} has built its manifest already"
        yield Statement(_INSERT_BUILT, (row,), 1, text)
        yield Statement(_COUNT_AMENDMENT, ((event.rollout,),), 1, f"there is no rollout {event.rollout}")
        return
    each = event.preparation
    key = (each.rollout, each.node, each.stage)
    values = (
        *(*key, each.attempt, each.state, each.content, each.at),
        *(each.began_at, each.bytes, each.text[:MAX_TEXT_CHARS], each.handle, each.not_before),
    )
    text = f"stage {each.stage} of {each.node} in {each.rollout} has a later attempt than {each.attempt}"
    yield Statement(_UPSERT, (values,), 1, text)
    if each.before is None:
        yield Statement(_DELETE_SNAPSHOT, (key,))
    else:
        before = canonical_json(dict(each.before))[:MAX_SNAPSHOT_CHARS]
        yield Statement(_UPSERT_SNAPSHOT, ((*key, before),))


def load_preparations(connection: sqlite3.Connection, rollout: str) -> tuple[Preparation, ...]:
    snapshots = {
        (node, stage): _decode_snapshot(before)
        for node, stage, before in connection.execute(
            "SELECT node, stage, before FROM preparation_snapshot WHERE rollout = ?", (rollout,)
        )
    }
    sql = f"SELECT {_COLUMNS} FROM preparation WHERE rollout = ? ORDER BY rowid"  # noqa: S608  # a constant
    rows = connection.execute(sql, (rollout,))
    return tuple(_decode_row(row, snapshots.get((row[1], row[2]))) for row in rows)


def _decode_row(row: Sequence[Any], before: Mapping[str, str] | None) -> Preparation:
    rollout, node, stage, attempt, state, content, at, began_at, size, text, handle, not_before = row
    return Preparation(
        *(rollout, node, stage, attempt, PreparationState(state), content, at, began_at, size, text, handle),
        before=before,
        not_before=not_before,
    )


def has_lost_prepare_run(connection: sqlite3.Connection, node: str) -> bool:
    """Return whether the run of a failed stage may have left processes on the node."""
    sql = "SELECT 1 FROM preparation WHERE node = ? AND handle != '' AND state = 'failed' LIMIT 1"
    return connection.execute(sql, (node,)).fetchone() is not None


def load_built(connection: sqlite3.Connection, rollout: str) -> Mapping[str, tuple[ManifestEntry, ...]]:
    rows = connection.execute(
        "SELECT stage, manifest FROM built_manifest WHERE rollout = ? ORDER BY rowid", (rollout,)
    )
    return {stage: tuple(map(entry_of_record, json.loads(manifest))) for stage, manifest in rows}


def _decode_snapshot(text: str) -> Mapping[str, str] | None:
    """Return a stored snapshot; one that was too large to keep whole counts as none."""
    try:
        found: Mapping[str, str] = json.loads(text)
        return found
    except ValueError:
        return None
