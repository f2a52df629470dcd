"""The queries of what ended rollouts left on nodes and in the database."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

from rolloutd.store.queries import IS_LIVE

_UNCLEANED = f"""
WITH ended AS (
    SELECT id, iif({IS_LIVE}, NULL, coalesce(cancelled_at, ended_at, deleted_at)) AS at FROM rollout
    WHERE coalesce(cancelled_at, ended_at, deleted_at, :after) >= :after),
touched AS (
    SELECT node, max(coalesce(ended.at, :before + 1)) AS at
    FROM ended JOIN target ON target.rollout = ended.id
    WHERE attempt > 0 OR ended.at IS NULL OR EXISTS (
        SELECT 1 FROM preparation
        WHERE preparation.rollout = target.rollout AND preparation.node = target.node)
    GROUP BY node)
SELECT node FROM touched WHERE at >= :after AND at <= :before AND NOT EXISTS (
    SELECT 1 FROM audit WHERE audit.node = touched.node AND event = 'NodeCleaned' AND audit.at >= touched.at)
ORDER BY node"""  # noqa: S608  # a constant

_IN_EFFECT = """
SELECT deleted_at IS NULL AND target.outcome IN ('changed', 'already-current') AND NOT EXISTS (
    SELECT 1 FROM rollout AS later JOIN target AS newer ON newer.rollout = later.id AND newer.node = ?
    WHERE later.name = rollout.name AND later.number > rollout.number AND later.deleted_at IS NULL
      AND newer.outcome IN ('changed', 'already-current'))
FROM rollout LEFT JOIN target ON target.rollout = rollout.id AND target.node = ?
WHERE rollout.id = ?"""

_EXPIRED_CONFIGURATIONS = f"""
SELECT node_configuration.node FROM node_configuration JOIN node ON node.name = node_configuration.node
WHERE gone_at <= ? AND node.name NOT IN (
    SELECT target.node FROM target WHERE rollout IN (SELECT id FROM rollout WHERE {IS_LIVE}))
ORDER BY node.name"""  # noqa: S608  # a constant

_REMOVE_UNUSED_DOCUMENTS = f"""
DELETE FROM configuration WHERE content NOT IN (
    SELECT coalesce(json_extract(current, '$.content'), '') FROM node_configuration
    UNION ALL SELECT coalesce(json_extract(previous, '$.content'), '') FROM node_configuration
    UNION ALL SELECT coalesce(json_extract(invalid, '$.content'), '') FROM node_configuration
    UNION ALL SELECT content FROM target WHERE rollout IN (SELECT id FROM rollout WHERE {IS_LIVE}))"""  # noqa: S608  # a constant


def list_uncleaned_nodes(connection: sqlite3.Connection, after: float, before: float) -> tuple[str, ...]:
    """Return the nodes whose last rollout ended in the period, and that were not cleaned since."""
    rows = connection.execute(_UNCLEANED, {"after": after, "before": before})
    return tuple(node for (node,) in rows)


def find_changes_in_effect(
    connection: sqlite3.Connection, node: str, rollouts: Sequence[str]
) -> dict[str, bool]:
    """Return for each known rollout whether the node has its change, and no later one of the plan."""
    found = {each: connection.execute(_IN_EFFECT, (node, node, each)).fetchone() for each in rollouts}
    return {each: bool(row[0]) for each, row in found.items() if row is not None}


def list_expired_configurations(connection: sqlite3.Connection, gone_before: float) -> tuple[str, ...]:
    """Return the nodes with records that are gone since then, and that no live rollout has."""
    return tuple(node for (node,) in connection.execute(_EXPIRED_CONFIGURATIONS, (gone_before,)))


def remove_unused_documents(connection: sqlite3.Connection) -> None:
    connection.execute(_REMOVE_UNUSED_DOCUMENTS)
