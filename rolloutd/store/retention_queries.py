"""What ended rollouts left on nodes and in the database, and how much the database holds."""

from __future__ import annotations

from collections.abc import Sequence

from rolloutd.ports import StoredVolume
from rolloutd.store.backend import Connection
from rolloutd.store.queries import IS_LIVE

# The rollouts that ended in the period come first, hence CROSS JOIN: without one, no target is read.
_UNCLEANED = f"""
WITH live AS (SELECT id FROM rollout WHERE {IS_LIVE}),
ended AS (
    SELECT id, coalesce(cancelled_at, ended_at, deleted_at) AS at
    FROM rollout
    WHERE coalesce(cancelled_at, ended_at, deleted_at) >= ?1 AND id NOT IN (SELECT id FROM live)),
touched AS (
    SELECT node, max(ended.at) AS at
    FROM ended CROSS JOIN target
    WHERE target.rollout = ended.id AND (attempt > 0 OR EXISTS (
        SELECT 1 FROM preparation
        WHERE preparation.rollout = target.rollout AND preparation.node = target.node))
    GROUP BY node)
SELECT node FROM touched WHERE at >= ?1 AND at <= ?2
AND node NOT IN (SELECT target.node FROM target WHERE rollout IN (SELECT id FROM live))
AND NOT EXISTS (
    SELECT 1 FROM audit WHERE audit.node = touched.node AND event = 'NodeCleaned' AND audit.at >= touched.at)
ORDER BY node"""  # noqa: S608  # a constant

# How a node got the change that it has, whatever came after: the row of one that drifted, left, failed in its
# soak or was to be rolled back does not say so, the last transition that passed does.  Each backend has
# replace(); a quote within a JSON text is escaped, so these characters are a key and its value only.  Where
# the oldest entries of the rollout are in segments, that transition may be too: an attempt counts as passed.
_CARRIED = """
CASE WHEN target.outcome IN ('changed', 'already-current', 'rolled-back') THEN target.outcome ELSE coalesce((
    SELECT CASE WHEN replace(entry, '"outcome":"changed"', '') <> entry THEN 'changed'
                WHEN replace(entry, '"outcome":"already-current"', '') <> entry THEN 'already-current' END
    FROM audit WHERE audit.node = :node AND audit.rollout = latest.id AND event = 'PhaseMoved'
      AND (replace(entry, '"trigger":"verified"', '') <> entry
        OR replace(entry, '"trigger":"found-current"', '') <> entry)
    ORDER BY seq DESC LIMIT 1), (
    SELECT 'changed' WHERE target.attempt > 0 AND NOT EXISTS (
        SELECT 1 FROM audit WHERE audit.rollout = latest.id AND event = 'RolloutOpened'))) END"""

_IN_EFFECT = f"""
SELECT coalesce((
    SELECT latest.id = rollout.id OR EXISTS (
        SELECT 1 FROM preparation AS used
        JOIN preparation AS made ON made.node = used.node AND made.stage = used.stage
        WHERE used.rollout = latest.id AND used.node = :node AND used.state = 'skipped'
          AND made.rollout = rollout.id AND made.state IN ('done', 'skipped')
          AND made.content = used.content)
    FROM rollout AS latest JOIN target ON target.rollout = latest.id AND target.node = :node
    WHERE latest.name = rollout.name AND latest.deleted_at IS NULL
      AND ({_CARRIED} = 'changed' OR ({_CARRIED} = 'already-current' AND EXISTS (
        SELECT 1 FROM preparation AS own
        WHERE own.rollout = latest.id AND own.node = :node AND own.state IN ('done', 'skipped'))))
    ORDER BY latest.number DESC LIMIT 1), false)
FROM rollout WHERE rollout.id = :rollout"""  # noqa: S608  # a constant

_EXPIRED_CONFIGURATIONS = f"""
SELECT node_configuration.node FROM node_configuration JOIN node ON node.name = node_configuration.node
WHERE gone_at <= ? AND node.name NOT IN (
    SELECT target.node FROM target WHERE rollout IN (SELECT id FROM rollout WHERE {IS_LIVE}))
ORDER BY node.name"""  # noqa: S608  # a constant

# Not NOT IN: PostgreSQL would compare each document with each of a list that exceeds its work_mem.
_REMOVE_UNUSED_DOCUMENTS = f"""
DELETE FROM configuration WHERE content IN (
    SELECT content FROM configuration
    EXCEPT SELECT current ->> 'content' FROM node_configuration
    EXCEPT SELECT previous ->> 'content' FROM node_configuration
    EXCEPT SELECT invalid ->> 'content' FROM node_configuration
    EXCEPT SELECT content FROM target WHERE rollout IN (SELECT id FROM rollout WHERE {IS_LIVE}))"""  # noqa: S608  # a constant


def list_uncleaned_nodes(connection: Connection, ended_after: float, ended_before: float) -> tuple[str, ...]:
    """Return the nodes whose last rollout ended in this period, and that were not cleaned since.

    It omits nodes on which no rollout did anything, and those of a rollout that has not ended.
    """
    rows = connection.execute(_UNCLEANED, (ended_after, ended_before))
    return tuple(node for (node,) in rows)


def find_changes_in_effect(connection: Connection, node: str, rollouts: Sequence[str]) -> dict[str, bool]:
    """Return whether the node has the change of each rollout, or a later one that skipped its stages.

    A later rollout of the plan that changed the node counts in place of the earlier ones.  It omits
    rollouts that the database does not have; a deleted one has no change in effect.
    """
    found = {
        each: connection.execute(_IN_EFFECT, {"node": node, "rollout": each}).fetchone() for each in rollouts
    }
    return {each: bool(row[0]) for each, row in found.items() if row is not None}


def list_expired_configurations(connection: Connection, gone_before: float) -> tuple[str, ...]:
    """Return the nodes with records that are gone since then, and that no live rollout has."""
    return tuple(node for (node,) in connection.execute(_EXPIRED_CONFIGURATIONS, (gone_before,)))


# A node's latest change of a plan stays as long as the inventory has the node: `changes`, drift, rollbacks
# and cleaning ask for it.
_EXPIRED_ROLLOUTS = f"""
SELECT id FROM rollout WHERE coalesce(cancelled_at, ended_at, deleted_at) <= ? AND NOT ({IS_LIVE})
AND (deleted_at IS NOT NULL OR NOT EXISTS (
    SELECT 1 FROM target JOIN node ON node.name = target.node AND gone_at IS NULL
    WHERE target.rollout = rollout.id AND outcome IN ('changed', 'already-current') AND NOT EXISTS (
        SELECT 1 FROM target AS newer JOIN rollout AS later ON later.id = newer.rollout
        WHERE newer.node = target.node AND later.name = rollout.name AND later.number > rollout.number
          AND later.deleted_at IS NULL AND newer.outcome IN ('changed', 'already-current'))))
ORDER BY number"""  # noqa: S608  # a constant


def list_expired_rollouts(connection: Connection, ended_before: float) -> tuple[str, ...]:
    """Return the closed rollouts whose records may go, oldest first.

    It omits rollouts that are live, and those that some node of the inventory has its latest change from.
    """
    return tuple(rollout for (rollout,) in connection.execute(_EXPIRED_ROLLOUTS, (ended_before,)))


def list_recorded_nodes(connection: Connection, rollout: str, limit: int) -> tuple[str, ...]:
    sql = "SELECT node FROM target WHERE rollout = ? ORDER BY node LIMIT ?"
    return tuple(node for (node,) in connection.execute(sql, (rollout, limit)))


def has_step_output(connection: Connection, rollout: str) -> bool:
    sql = "SELECT 1 FROM step WHERE rollout = ? AND output != '' LIMIT 1"
    return connection.execute(sql, (rollout,)).fetchone() is not None


def remove_step_output(connection: Connection, rollout: str, limit: int) -> None:
    """Remove the output of so many steps; the audit keeps its hash."""
    connection.execute(
        "UPDATE step SET output = '' WHERE rowid IN"
        " (SELECT rowid FROM step WHERE rollout = ? AND output != '' LIMIT ?)",
        (rollout, limit),
    )


_UNFINISHED_RUNS = """
SELECT target.node FROM step JOIN target ON target.rollout = step.rollout AND target.node = step.node
WHERE step.state = 'intended' AND step.handle != '' AND phase NOT IN ('pending', 'done', 'failed')
UNION SELECT node FROM preparation WHERE state = 'running' AND handle != '' ORDER BY 1"""


def list_nodes_with_runs(connection: Connection) -> tuple[str, ...]:
    """Return the nodes on which a run may be under way; a build has the node ""."""
    return tuple(node for (node,) in connection.execute(_UNFINISHED_RUNS))


MACHINES_KEY = "machines"
"""Row of `meta` with the machines whose runs may be under way, separated by blanks."""

_NODES_IN_STEPS = """
SELECT node FROM step WHERE state = 'intended'
UNION SELECT node FROM preparation WHERE state = 'running' AND handle != '' AND node != ''"""


def take_over_runs(connection: Connection, machine: str) -> frozenset[str]:
    """Note that this machine begins runs; return the nodes on which other machines' may be under way."""
    row = connection.execute("SELECT value FROM meta WHERE key = ?", (MACHINES_KEY,)).fetchone()
    others = [] if row is None else [name for name in row[0].split() if name != machine]
    nodes = frozenset(node for (node,) in connection.execute(_NODES_IN_STEPS))
    # Until no step is under way, each of them may have begun it, also one that led before the last.
    machines = " ".join([*others, machine] if nodes else [machine])
    connection.execute(
        "INSERT INTO meta (key, value) VALUES (?1, ?2) ON CONFLICT (key) DO UPDATE SET value = ?2",
        (MACHINES_KEY, machines),
    )
    return nodes if others else frozenset()


WEEK_S = 7 * 86_400.0


def measure(connection: Connection, now: float) -> StoredVolume:
    """Return how much the tables hold, and how many entries were written a day in the last week."""
    first = connection.execute("SELECT seq, at FROM audit ORDER BY seq LIMIT 1").fetchone()
    last = connection.execute("SELECT seq FROM audit ORDER BY seq DESC LIMIT 1").fetchone()
    end = "min(coalesce(cancelled_at, ended_at, deleted_at))"
    closed = connection.execute(f"SELECT count(*), {end} FROM rollout WHERE NOT ({IS_LIVE})").fetchone()  # noqa: S608
    if first is None:
        return StoredVolume(closed_rollouts=closed[0])
    since = max(now - WEEK_S, first[1])
    days = max(1.0, (now - since) / 86_400.0)
    entries_a_day = (last[0] - _entry_before(connection, since, first[0], last[0])) / days
    return StoredVolume(last[0] - first[0] + 1, first[1], entries_a_day, closed[0], closed[1])


def _entry_before(connection: Connection, at: float, low: int, high: int) -> int:
    """Return about the last entry before an instant; a clock that was set back makes it inexact."""
    while low < high:
        middle = (low + high + 1) // 2
        row = connection.execute("SELECT at FROM audit WHERE seq = ?", (middle,)).fetchone()
        low, high = (middle, high) if row is not None and row[0] < at else (low, middle - 1)
    return low


def remove_unused_documents(connection: Connection) -> None:
    """Remove the documents of configurations that no node's record and no live rollout has."""
    connection.execute(_REMOVE_UNUSED_DOCUMENTS)
