"""The queries of the store: rows in, values of the core out.

Synchronous functions on a connection.  A column that this version cannot read is an error that names the
place, never a guess.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, get_args

from machines.facts.fleet_facts import FactsSnapshot
from machines.model.configuration import NodeConfiguration
from machines.model.limits import TeamRules
from machines.model.node import Node
from machines.model.plan import Digest, Plan
from machines.model.preparation import Preparation
from machines.model.reboots import RebootApproval
from machines.model.rollout import Failure, GateOpening, Hold, Rollout, Target, Verdict, Vote
from machines.model.rows import (
    ConfigurationDocument,
    PreparationSnapshot,
    RolloutAddition,
    RolloutRow,
    with_part,
)
from machines.model.step_record import StepAction, StepRecord
from machines.model.train import Train
from machines.model.windows import Freeze
from rolloutd import ports
from rolloutd.errors import NotFound, RolloutdError, StoreFailed
from rolloutd.store.backend import Connection
from rolloutd.store.codec import decode_actor
from rolloutd.store.schema import decode_interruption
from rolloutd.store.stored_rows import StoredRows
from rolloutd.texts.audit_names import stored_event_names

PlanCompiler = Callable[[Mapping[str, Any]], Plan]
"""Makes a plan from its canonical content."""

MAX_AUDIT_ROWS = 10_000
"""Limit of one audit read, so that no client makes the daemon load the whole audit into memory."""

# A closed rollout is live while one of its nodes must still be returned to service, while a prepare stage
# of it runs, and, once cancelled, until its preparation is cleaned up (RolloutPreparations.needs_cleanup).  A
# `left` hold has the id `rollout/node`.  Unfinished targets and holds are read once, by an index: after years
# there are thousands.
IS_LIVE = """
deleted_at IS NULL AND (ended_at IS NULL AND cancelled_at IS NULL OR rollout.id IN (
    SELECT target.rollout FROM target
    WHERE phase NOT IN ('pending', 'done') OR isolated != 0 OR order_kind IS NOT NULL) OR rollout.id IN (
    SELECT CASE WHEN length(id) > length(node) THEN substr(id, 1, length(id) - length(node) - 1) END FROM hold
    WHERE source = 'left' AND substr(id, length(id) - length(node)) = '/' || node) OR EXISTS (
    SELECT 1 FROM preparation AS known
    JOIN target ON target.rollout = known.rollout AND target.node = known.node
    WHERE known.rollout = rollout.id AND known.state = 'running') OR cancelled_at IS NOT NULL AND NOT EXISTS (
    SELECT 1 FROM rollout AS later WHERE later.number > rollout.number AND later.name = rollout.name)
    AND EXISTS (
    SELECT 1 FROM preparation AS known
    JOIN target ON target.rollout = known.rollout AND target.node = known.node
    WHERE known.rollout = rollout.id AND phase = 'pending' AND known.stage != 'cleanup'
        AND known.state != 'skipped'
        AND NOT EXISTS (SELECT 1 FROM preparation AS cleanup
            WHERE cleanup.rollout = known.rollout AND cleanup.node = known.node AND cleanup.stage = 'cleanup'
              AND (cleanup.state = 'done' OR cleanup.attempt >= 3))))"""

# Of all rollouts: a cluster that one of them broke may be down when it is no longer live.
_LIST_WORK_ON_CLUSTERS = """
SELECT node, max(since) FROM target
WHERE node IN (SELECT name FROM node WHERE kind = 'cluster') AND attempt > 0
    AND phase IN ('pending', 'done', 'failed')
GROUP BY node"""

_SELECT_ROLLOUT = """
SELECT id, content, change_digest, scope_digest, policy_digest, digest, submitted_by, submitted_at,
       approved_count, supersedes, source, overrides
FROM rollout"""

_SELECT_CLOSED = f"""
SELECT id, name, change_digest, scope_digest, policy_digest, digest, submitted_by, submitted_at, cancelled_by,
       cancelled_reason, cancelled_at, ended_at
FROM rollout WHERE deleted_at IS NULL AND NOT ({IS_LIVE}) ORDER BY number DESC LIMIT ?"""  # noqa: S608  # two constants


def load_snapshot(connection: Connection, compile_plan: PlanCompiler) -> FactsSnapshot:
    """Return the facts that decisions use, all as of one commit.

    It omits deleted rollouts and nodes that are no longer in the inventory.  It also omits rollouts that
    have ended or were cancelled and have no node in flight, failed, isolated or ordered to return: see
    list_closed_rollouts().
    """
    # One read transaction: a commit between two queries would mix two moments.
    connection.execute("BEGIN")
    try:
        (epoch,) = connection.execute("SELECT epoch FROM term").fetchone()
        rollouts = _load_rollouts(connection, IS_LIVE, (), compile_plan)
        rows = StoredRows(connection)
        return FactsSnapshot(
            nodes=rows.load(Node, "gone_at IS NULL ORDER BY name"),
            rollouts=tuple(rollouts),
            targets=tuple(target for rollout in rollouts for target in load_targets(connection, rollout.id)),
            holds=rows.load(Hold, "true ORDER BY at, node, source, id"),
            freezes=rows.load(Freeze, "true ORDER BY at, id"),
            trains=rows.load(Train, "true ORDER BY at, name"),
            reboot_approvals=rows.load(RebootApproval, "true ORDER BY at, id"),
            team_rules=rows.load(TeamRules, "true ORDER BY team"),
            preparations=tuple(
                row for rollout in rollouts for row in load_preparations(connection, rollout.id)
            ),
            worked_on=dict(connection.execute(_LIST_WORK_ON_CLUSTERS)),
            epoch=epoch,
        )
    finally:
        connection.execute("ROLLBACK")


def load_rollout(connection: Connection, rollout: str, compile_plan: PlanCompiler) -> Rollout:
    """Return one rollout, also a closed one; raises NotFound."""
    found = _load_rollouts(connection, "id = ? AND deleted_at IS NULL", (rollout,), compile_plan)
    if not found:
        raise NotFound(f"{rollout}: no such rollout; list them with rolloutctl rollouts")
    return found[0]


def load_targets(connection: Connection, rollout: str) -> tuple[Target, ...]:
    """Return the targets of one rollout, also of a closed one, in order."""
    where = "target.rollout = ? ORDER BY position, target.node"
    return StoredRows(connection).load(Target, where, rollout)


def load_preparations(connection: Connection, rollout: str) -> tuple[Preparation, ...]:
    rows, where = StoredRows(connection), "rollout = ? ORDER BY rowid"
    snapshots = {
        (each.node, each.stage): each.before for each in rows.load(PreparationSnapshot, where, rollout)
    }
    return tuple(
        replace(row, before=snapshots.get((row.node, row.stage)))
        for row in rows.load(Preparation, where, rollout)
    )


def load_steps(
    connection: Connection, rollout: str, node: str, attempt: int | None = None
) -> tuple[StepRecord, ...]:
    """Return the step records of a node, oldest first; of one attempt if named."""
    where, order = "rollout = ? AND node = ?", "ORDER BY rowid"
    if attempt is None:
        return StoredRows(connection).load(StepRecord, f"{where} {order}", rollout, node)
    where += f" AND ifnull(attempt, -1) = ? {order}"
    return StoredRows(connection).load(StepRecord, where, rollout, node, attempt)


def load_step_durations(connection: Connection, limit: int) -> tuple[ports.StepDuration, ...]:
    """Return the durations of the latest steps and prepare stages that succeeded, the latest first."""
    steps = (
        "SELECT step.at, step.rollout, name, node, step, action, step.at - began_at - waited_s, handle != ''"
        " FROM step"
        " JOIN rollout ON rollout.id = step.rollout WHERE state = 'ok' ORDER BY step.rowid DESC LIMIT ?"
    )
    stages = (
        "SELECT preparation.at, preparation.rollout, name, node, stage, 'run', preparation.at - began_at,"
        " handle != '' FROM preparation JOIN rollout ON rollout.id = preparation.rollout WHERE state = 'done'"
        " ORDER BY preparation.at DESC LIMIT ?"
    )
    rows = [row for sql in (steps, stages) for row in connection.execute(sql, (limit,))]
    rows.sort(key=lambda row: -row[0])  # stable: the latest record first among equals
    return tuple(
        ports.StepDuration(rollout, plan, node, step, StepAction(action), max(0.0, seconds), at, bool(is_run))
        for at, rollout, plan, node, step, action, seconds, is_run in rows[:limit]
    )


def load_busy_times(connection: Connection, limit: int) -> tuple[ports.BusyTime, ...]:
    """Return how long traffic kept nodes from starting, the latest first; of so many changes of phase.

    Entries of the audit that are exported are not asked.
    """
    names = dict(connection.execute("SELECT id, name FROM rollout").fetchall())
    moves = connection.execute(
        "SELECT entry FROM audit WHERE event = 'PhaseMoved' ORDER BY seq DESC LIMIT ?", (limit,)
    )
    admitted = (json.loads(entry) for (entry,) in moves if '"trigger":"admitted"' in entry)
    return tuple(
        ports.BusyTime(entry["rollout"], names[entry["rollout"]], entry["node"], busy_s)
        for entry in admitted
        if (busy_s := entry["fields"].get("busy_s")) is not None and entry["rollout"] in names
    )


def count_attempts(connection: Connection, plan: str) -> tuple[int, int]:
    """Return how many attempts the rollouts of a plan had, and how many failures."""
    of_plan = "SELECT id FROM rollout WHERE name = ?"
    attempts = f"SELECT coalesce(sum(attempt), 0) FROM target WHERE rollout IN ({of_plan})"  # noqa: S608  # a constant
    failures = f"SELECT count(*) FROM failure WHERE rollout IN ({of_plan})"  # noqa: S608  # a constant
    counted = [connection.execute(sql, (plan,)).fetchone()[0] for sql in (attempts, failures)]
    return counted[0], counted[1]


KEPT_FORECASTS = 20
"""Forecasts that are kept of a rollout: one for each gate and calendar that people have seen."""

NODES_PER_LINE = 200
"""Nodes of a forecast that are encoded at once: a millisecond."""


def keep_forecast(connection: Connection, kept: ports.KeptForecast) -> None:
    """Keep a forecast, in place of one of the same rollout and instant, and drop the oldest ones."""
    connection.execute(
        "INSERT INTO forecast (rollout, made_at, occasion, answer, is_missed) VALUES (?, ?, ?, ?, ?)"
        " ON CONFLICT (rollout, made_at) DO UPDATE SET occasion = excluded.occasion,"
        " answer = excluded.answer, is_missed = excluded.is_missed",
        (kept.rollout, kept.made_at, kept.occasion, _forecast_text(kept.answer), kept.is_missed),
    )
    connection.execute(
        "DELETE FROM forecast WHERE rollout = ?1 AND made_at NOT IN"
        " (SELECT made_at FROM forecast WHERE rollout = ?1 ORDER BY made_at DESC LIMIT ?2)",
        (kept.rollout, KEPT_FORECASTS),
    )


def load_forecasts(connection: Connection, rollout: str | None = None) -> tuple[ports.KeptForecast, ...]:
    """Return the kept forecasts, latest first, of rollouts that are not deleted."""
    rows = connection.execute(
        "SELECT forecast.rollout, made_at, occasion, answer, is_missed FROM forecast"
        " JOIN rollout ON rollout.id = forecast.rollout"
        " WHERE deleted_at IS NULL AND forecast.rollout = coalesce(?1, forecast.rollout)"
        " ORDER BY made_at DESC",
        (rollout,),
    )
    return tuple(
        ports.KeptForecast(name, made_at, occasion, _read_forecast(answer), bool(is_missed))
        for name, made_at, occasion, answer, is_missed in rows
    )


def _forecast_text(answer: Mapping[str, Any]) -> str:
    """Return a forecast as lines of JSON: the answer without its nodes, then these in slices.

    One text of ten thousand nodes is one call that lets no other thread run, so it would stop the daemon's
    loop for a tenth of a second.
    """
    nodes = answer["nodes"]
    slices = (nodes[first : first + NODES_PER_LINE] for first in range(0, len(nodes), NODES_PER_LINE))
    return "\n".join(map(json.dumps, ({**answer, "nodes": []}, *slices)))


def _read_forecast(text: str) -> dict[str, Any]:
    first, *slices = text.split("\n")
    answer: dict[str, Any] = json.loads(first)
    for line in slices:
        answer["nodes"] += json.loads(line)
    return answer


def unfinished_runs(connection: Connection, node: str) -> tuple[str, ...]:
    """Return the handles of runs that may have left something on the node since the last cleanup of it."""
    rows = connection.execute(
        "SELECT DISTINCT run.handle FROM step AS run"
        " WHERE run.node = ? AND run.handle != '' AND run.state != 'ok'"
        " AND (run.action != 'check' OR run.state != 'failed')"  # a check leaves nothing behind
        # That of an isolator is found again by its id, and must not be ended as one that was lost.
        " AND run.action NOT IN ('apply', 'revert')"
        " AND NOT EXISTS (SELECT 1 FROM step AS clean_up WHERE clean_up.node = run.node"
        " AND clean_up.action = 'clean-up' AND clean_up.state = 'ok' AND clean_up.rowid > run.rowid)",
        (node,),
    ).fetchall()
    # The run of a failed prepare stage may have left processes too.
    lost = "SELECT handle FROM preparation WHERE node = ? AND handle != '' AND state = 'failed'"
    return tuple(handle for (handle,) in (*rows, *connection.execute(lost, (node,)).fetchall()))


def load_plan(connection: Connection, rollout: str) -> tuple[Mapping[str, ports.JSON], Mapping[str, str]]:
    """Return a rollout's canonical plan and its pinned source; raises NotFound."""
    sql = "SELECT content, source FROM rollout WHERE id = ? AND deleted_at IS NULL"
    row = connection.execute(sql, (rollout,)).fetchone()
    if row is None:
        raise NotFound(f"{rollout}: no such rollout; list them with rolloutctl rollouts")
    return json.loads(row[0]), json.loads(row[1])


def load_connections(connection: Connection) -> Mapping[str, Mapping[str, ports.JSON]]:
    """Return the connection of each node, also of nodes no longer in the inventory."""
    rows = connection.execute("SELECT name, connection FROM node WHERE gone_at IS NULL").fetchall()
    # As one text: Python decodes it in a third of the time of a hundred thousand texts.
    connections = json.loads(f"[{','.join(text for _, text in rows)}]")
    return {name: connection for (name, _), connection in zip(rows, connections, strict=True)}


def load_source_answers(connection: Connection) -> tuple[ports.SourceAnswer, ...]:
    """Return the last answer of each source, also of sources that the settings no longer name."""
    nodes: dict[str, list[ports.DiscoveredNode]] = {}
    for node in StoredRows(connection).load(ports.DiscoveredNode, "true ORDER BY source, name"):
        nodes.setdefault(node.source, []).append(node)
    sources = connection.execute("SELECT name, answered_at FROM source ORDER BY name")
    return tuple(ports.SourceAnswer(name, at, tuple(nodes.get(name, ()))) for name, at in sources)


def list_closed_rollouts(connection: Connection, limit: int = 100) -> tuple[ports.ClosedRollout, ...]:
    """Return the rollouts that load_snapshot() omits and that are not deleted, latest first."""
    rows = connection.execute(_SELECT_CLOSED, (limit,)).fetchall()
    tally = "SELECT coalesce(outcome, phase), count(*) FROM target WHERE rollout = ? GROUP BY 1"
    return tuple(
        ports.ClosedRollout(
            *(id_, name, Digest(*digest), decode_actor(by), at, decode_interruption(*cancelled), ended_at),
            dict(connection.execute(tally, (id_,)).fetchall()),
        )
        for id_, name, *digest, by, at, c_by, c_reason, c_at, ended_at in rows
        for cancelled in ((c_by, c_reason, c_at),)
    )


def list_rollout_records(connection: Connection) -> tuple[ports.RolloutRecord, ...]:
    """Return all rollouts, including deleted ones."""
    sql = f"""
    SELECT id, source, CASE WHEN {IS_LIVE} THEN NULL ELSE coalesce(cancelled_at, ended_at, deleted_at) END,
           deleted_at IS NOT NULL
    FROM rollout ORDER BY number"""  # noqa: S608  # a constant
    rows = connection.execute(sql)
    return tuple(
        ports.RolloutRecord(id_, json.loads(source), at, bool(gone)) for id_, source, at, gone in rows
    )


def find_identical(connection: Connection, change: str, selector_digest: str, policy: str) -> str | None:
    """Return the latest rollout of the same content that is neither cancelled nor deleted."""
    row = connection.execute(
        "SELECT id FROM rollout WHERE change_digest = ? AND selector_digest = ? AND policy_digest = ?"
        " AND cancelled_at IS NULL AND deleted_at IS NULL ORDER BY number DESC LIMIT 1",
        (change, selector_digest, policy),
    ).fetchone()
    return row[0] if row else None


def find_nodes_with_change(connection: Connection, change: str) -> frozenset[str]:
    """Return the nodes that any rollout brought to this change, or found already there."""
    rows = connection.execute(
        "SELECT DISTINCT node FROM target JOIN rollout ON rollout.id = target.rollout"
        " WHERE change_digest = ? AND outcome IN ('changed', 'already-current')",
        (change,),
    )
    return frozenset(node for (node,) in rows)


def find_later_changes(connection: Connection, rollout: str) -> dict[str, str]:
    """Return the nodes that later rollouts of the same plan changed, each with the latest of them.

    It omits deleted rollouts.
    """
    rows = connection.execute(
        "SELECT node, later.id FROM rollout AS asked JOIN rollout AS later ON later.name = asked.name"
        " JOIN target ON target.rollout = later.id"
        " WHERE asked.id = ? AND later.number > asked.number AND later.deleted_at IS NULL"
        " AND outcome = 'changed' ORDER BY later.number",
        (rollout,),
    )
    return dict(rows)


def read_audit(
    connection: Connection,
    *,
    after: int = 0,
    before: int | None = None,
    limit: int = 1000,
    rollout: str | None = None,
    node: str | None = None,
    event: str | None = None,
) -> tuple[ports.AuditEntry, ...]:
    """Return entries after the sequence number `after`, oldest first; `event` is a class name.

    They are the first `limit` of them, or with `before` the last `limit` before that number.
    """
    filters = {"rollout": rollout, "node": node}
    values: list[str | int] = [value for value in filters.values() if value is not None]
    where = "".join(f" AND {column} = ?" for column, value in filters.items() if value is not None)
    if event is not None:
        names = stored_event_names(event)
        where += f" AND event IN ({', '.join('?' * len(names))})"
        values += names
    order = "seq"
    if before is not None:
        where, values, order = where + " AND seq < ?", [*values, before], "seq DESC"
    sql = f"SELECT seq, entry, hash FROM audit WHERE seq > ?{where} ORDER BY {order} LIMIT ?"  # noqa: S608  # our columns
    rows = connection.execute(sql, (after, *values, min(limit, MAX_AUDIT_ROWS)))
    entries = tuple(ports.AuditEntry(*row) for row in rows)
    return entries if before is None else entries[::-1]


def list_changed_nodes(connection: Connection, rollout: str, after: int) -> frozenset[str]:
    """Return the nodes of a rollout that audit entries after a number name."""
    sql = "SELECT DISTINCT node FROM audit WHERE rollout = ? AND seq > ? AND node IS NOT NULL"
    return frozenset(node for (node,) in connection.execute(sql, (rollout, after)))


def latest_audit_entry(connection: Connection) -> ports.AuditEntry | None:
    row = connection.execute("SELECT seq, entry, hash FROM audit ORDER BY seq DESC LIMIT 1").fetchone()
    return ports.AuditEntry(*row) if row else None


def is_token_used(connection: Connection, token: str) -> bool:
    return connection.execute("SELECT 1 FROM spent_token WHERE id = ?", (token,)).fetchone() is not None


def load_digests(connection: Connection) -> dict[str, str]:
    return dict(connection.execute("SELECT id, digest FROM rollout").fetchall())


def _load_rollouts(
    connection: Connection, where: str, values: Sequence[str], compile_plan: PlanCompiler
) -> list[Rollout]:
    rows = connection.execute(f"{_SELECT_ROLLOUT} WHERE {where} ORDER BY number", values).fetchall()
    return [_decode_rollout(connection, row, compile_plan) for row in rows]


def _decode_rollout(connection: Connection, row: Sequence[Any], compile_plan: PlanCompiler) -> Rollout:
    id_, content, *digest, by, at, approved, supersedes, source, overrides = row
    rows, where = StoredRows(connection), "rollout = ? ORDER BY rowid"
    rollout = Rollout(
        id=id_,
        plan=_compile_stored_plan(id_, content, compile_plan),
        digest=Digest(*digest),
        submitted_by=decode_actor(by),
        submitted_at=at,
        approved_count=approved,
        supersedes=supersedes,
        source=json.loads(source),
        overrides=tuple(json.loads(overrides)),
        # All at once: with_part() copies the collection for each row, which takes a second for thousands.
        votes=rows.load(Vote, where, id_),
        opened=rows.load(GateOpening, where, id_),
        failures=rows.load(Failure, where, id_),
    )
    changed = rows.get(RolloutRow, id_)
    assert changed is not None, "it is of the same row"
    rollout = with_part(rollout, changed)
    for kind in set(get_args(RolloutAddition)) - {Vote, GateOpening, Failure}:
        for part in rows.load(kind, where, id_):
            rollout = with_part(rollout, part)
    return rollout


def _compile_stored_plan(rollout: str, content: str, compile_plan: PlanCompiler) -> Plan:
    try:
        return compile_plan(json.loads(content))
    except (RolloutdError, LookupError, TypeError, ValueError) as error:
        raise StoreFailed(
            f"this version cannot read the plan of rollout {rollout} ({error}): start the version that opened"
            " it, let it end or cancel it there, then upgrade"
        ) from error


def load_configurations(connection: Connection, nodes: Sequence[str]) -> ports.NodeConfigurations:
    """Return the records of these nodes, without those that have none, and what they refer to."""
    # One transaction: a document of a replaced record may be removed meanwhile.
    connection.execute("BEGIN")
    try:
        return _load_configurations(connection, nodes)
    finally:
        connection.execute("ROLLBACK")


def _load_configurations(connection: Connection, nodes: Sequence[str]) -> ports.NodeConfigurations:
    rows = StoredRows(connection)
    known = {node: rows.get(NodeConfiguration, node) for node in nodes}
    records = {node: each for node, each in known.items() if each not in (None, NodeConfiguration())}
    found = [
        record
        for each in records.values()
        for record in (each.current, each.previous, each.invalid)
        if record is not None
    ]
    contents, rollouts = {each.content for each in found}, {each.rollout for each in found}
    documents = (rows.get(ConfigurationDocument, content) for content in contents)
    changes = "SELECT id, change_digest FROM rollout WHERE id = ?"
    return ports.NodeConfigurations(
        records,
        {each.content: each.document for each in documents if each is not None},
        dict(row for each in rollouts for row in connection.execute(changes, (each,))),
    )


def load_verdicts(connection: Connection) -> tuple[Verdict, ...]:
    """Return the verdicts that are not cleared, oldest first."""
    return StoredRows(connection).load(Verdict, "cleared_at IS NULL ORDER BY at, id")
