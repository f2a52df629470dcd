"""The queries of the store: rows in, values of the core out.

Synchronous functions on a connection.  A column that this version cannot read is an error that names the
place, never a guess.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any
from zoneinfo import ZoneInfo

from machines.facts.fleet_facts import FactsSnapshot
from machines.model.events import StepAction, StepRecord, StepState
from machines.model.limits import TeamRules
from machines.model.node import Conflict, ConflictKind, Node, NodeKind
from machines.model.plan import Digest, GateName, Plan
from machines.model.rollout import (
    Actor,
    ActorKind,
    Drift,
    Failure,
    FailureCode,
    GateOpening,
    Hold,
    Interruption,
    NodeOrder,
    PilotEvidence,
    Rollout,
    Target,
    Vote,
)
from machines.model.windows import Freeze, Window
from machines.states import Outcome, Phase
from rolloutd.audit_names import stored_event_names
from rolloutd.errors import NotFound, RolloutdError, StoreFailed
from rolloutd.ports import (
    JSON,
    AuditEntry,
    ClosedRollout,
    DiscoveredNode,
    RolloutRecord,
    SourceAnswer,
)
from rolloutd.store.preparations import has_lost_prepare_run, load_built, load_preparations

PlanCompiler = Callable[[Mapping[str, Any]], Plan]
"""Makes a plan from its canonical content."""

MAX_AUDIT_ROWS = 10_000
"""Limit of one audit read, so that no client makes the daemon load the whole audit into memory."""

# A closed rollout is live while one of its nodes must still be returned to service, while a prepare stage
# of it runs, and, once cancelled, until its preparation is cleaned up (RolloutPreparations.needs_cleanup).  A
# `left` hold has the id `rollout/node`.  The subquery reads the holds once, not once per rollout: after years
# there are thousands.
IS_LIVE = """
deleted_at IS NULL AND (ended_at IS NULL AND cancelled_at IS NULL OR EXISTS (
    SELECT 1 FROM target
    WHERE target.rollout = rollout.id
      AND (phase NOT IN ('pending', 'done') OR isolated OR order_kind IS NOT NULL)) OR rollout.id IN (
    SELECT substr(id, 1, length(id) - length(node) - 1) FROM hold
    WHERE source = 'left' AND substr(id, -length(node) - 1) = '/' || node) OR EXISTS (
    SELECT 1 FROM preparation AS row JOIN target ON target.rollout = row.rollout AND target.node = row.node
    WHERE row.rollout = rollout.id AND row.state = 'running') OR cancelled_at IS NOT NULL AND NOT EXISTS (
    SELECT 1 FROM rollout AS later WHERE later.number > rollout.number AND later.name = rollout.name)
    AND EXISTS (
    SELECT 1 FROM preparation AS row JOIN target ON target.rollout = row.rollout AND target.node = row.node
    WHERE row.rollout = rollout.id AND phase = 'pending' AND stage != 'cleanup' AND state != 'skipped'
        AND NOT EXISTS (SELECT 1 FROM preparation AS cleanup
            WHERE cleanup.rollout = row.rollout AND cleanup.node = row.node AND cleanup.stage = 'cleanup'
              AND (cleanup.state = 'done' OR cleanup.attempt >= 3))))"""

_SELECT_ROLLOUT = """
SELECT id, content, change_digest, scope_digest, policy_digest, digest, submitted_by, submitted_at,
       approved_count, amendments, paused_by, paused_reason, paused_at, cancelled_by, cancelled_reason,
       cancelled_at, ended_at, supersedes, source, overrides
FROM rollout"""

_SELECT_TARGET = """
SELECT target.rollout, target.node, team, pools, wave, position, phase, outcome, target.attempt, rolling_back,
       isolated, since, not_before, aborted_isolations, last_text, failure.id, failure.attempt, failure.step,
       failure.message, failure.at, failure.code, order_kind, order_by, ordered_at, joined, needs_vote_of,
       maybe_current, admitted_at, downtime_s, drift_since, drift_tasks, content
FROM target LEFT JOIN failure ON failure.rollout = target.rollout AND failure.id = target.failure"""

_SELECT_CLOSED = f"""
SELECT id, name, change_digest, scope_digest, policy_digest, digest, submitted_by, submitted_at, cancelled_by,
       cancelled_reason, cancelled_at, ended_at
FROM rollout WHERE deleted_at IS NULL AND NOT ({IS_LIVE}) ORDER BY number DESC LIMIT ?"""  # noqa: S608  # two constants

_SELECT_VOTE = """
SELECT rollout, id, gate, digest, actor, yes, reason, at, teams, wave, shown, nodes, more, until, withdrawn_at
FROM vote"""

_SELECT_STEP = """
SELECT rollout, node, attempt, step, action, number, state, at, began_at, stage, handle, prior, text, output,
       visible_to, code
FROM step"""


def load_snapshot(connection: sqlite3.Connection, compile_plan: PlanCompiler) -> FactsSnapshot:
    """Return the facts that decisions use, all as of one commit."""
    connection.execute("BEGIN")
    try:
        (epoch,) = connection.execute("SELECT epoch FROM term").fetchone()
        rollouts = _load_rollouts(connection, IS_LIVE, (), compile_plan)
        targets = [target for rollout in rollouts for target in load_targets(connection, rollout.id)]
        nodes = connection.execute(
            "SELECT name, kind, sources, labels, conflicts, identity FROM node"
            " WHERE gone_at IS NULL ORDER BY name"
        )
        holds = connection.execute(
            "SELECT node, source, id, actor, reason, at, until FROM hold ORDER BY at, node, source, id"
        )
        freezes = connection.execute("SELECT id, scope, reason, by, at, until FROM freeze ORDER BY at, id")
        preparations = [row for rollout in rollouts for row in load_preparations(connection, rollout.id)]
        rules = connection.execute("SELECT team, windows, canaries FROM team_rules ORDER BY team")
        return FactsSnapshot(
            nodes=tuple(
                Node(
                    name,
                    _KIND_BY_VALUE[kind],
                    _decode_strings(sources),
                    _decode_labels(labels),
                    _decode_conflicts(conflicts),
                    _decode_labels(identity),
                )
                for name, kind, sources, labels, conflicts, identity in nodes
            ),
            rollouts=tuple(rollouts),
            targets=tuple(targets),
            holds=tuple(
                Hold(node, source, id_, _decode_actor(actor), reason, at, until)
                for node, source, id_, actor, reason, at, until in holds
            ),
            freezes=tuple(Freeze(*row) for row in freezes),
            team_rules=tuple(
                TeamRules(team, tuple(map(_decode_window, json.loads(windows))), _decode_strings(canaries))
                for team, windows, canaries in rules
            ),
            preparations=tuple(preparations),
            epoch=epoch,
        )
    finally:
        connection.execute("ROLLBACK")


def load_rollout(connection: sqlite3.Connection, rollout: str, compile_plan: PlanCompiler) -> Rollout:
    """Return one rollout; raises NotFound."""
    found = _load_rollouts(connection, "id = ? AND deleted_at IS NULL", (rollout,), compile_plan)
    if not found:
        raise NotFound(f"there is no rollout {rollout}")
    return found[0]


def load_targets(connection: sqlite3.Connection, rollout: str) -> tuple[Target, ...]:
    rows = connection.execute(
        f"{_SELECT_TARGET} WHERE target.rollout = ? ORDER BY position, target.node", (rollout,)
    )
    return tuple(map(_decode_target, rows))


def load_target(connection: sqlite3.Connection, rollout: str, node: str) -> Target | None:
    sql = f"{_SELECT_TARGET} WHERE target.rollout = ? AND target.node = ?"
    row = connection.execute(sql, (rollout, node)).fetchone()
    return None if row is None else _decode_target(row)


def load_steps(
    connection: sqlite3.Connection, rollout: str, node: str, attempt: int | None
) -> tuple[StepRecord, ...]:
    where, values = "rollout = ? AND node = ?", (rollout, node)
    if attempt is None:
        rows = connection.execute(f"{_SELECT_STEP} WHERE {where} ORDER BY rowid", values)
    else:
        where += " AND ifnull(attempt, -1) = ?"
        rows = connection.execute(f"{_SELECT_STEP} WHERE {where} ORDER BY rowid", (*values, attempt))
    return tuple(map(_decode_step, rows))


def has_unfinished_run(connection: sqlite3.Connection, node: str) -> bool:
    """Return whether a run may have left processes on the node, and no cleanup has succeeded since."""
    row = connection.execute(
        "SELECT 1 FROM step AS run WHERE run.node = ? AND run.handle != '' AND run.state != 'ok'"
        " AND (run.action != 'check' OR run.state != 'failed')"  # a check leaves nothing behind
        " AND NOT EXISTS (SELECT 1 FROM step AS clean_up WHERE clean_up.node = run.node"
        " AND clean_up.action = 'clean-up' AND clean_up.state = 'ok' AND clean_up.rowid > run.rowid) LIMIT 1",
        (node,),
    ).fetchone()
    return row is not None or has_lost_prepare_run(connection, node)


def load_content(
    connection: sqlite3.Connection, rollout: str
) -> tuple[Mapping[str, JSON], Mapping[str, str]]:
    """Return a rollout's content and its pinned source; raises NotFound."""
    sql = "SELECT content, source FROM rollout WHERE id = ? AND deleted_at IS NULL"
    row = connection.execute(sql, (rollout,)).fetchone()
    if row is None:
        raise NotFound(f"there is no rollout {rollout}")
    return json.loads(row[0]), json.loads(row[1])


def load_connections(connection: sqlite3.Connection) -> Mapping[str, Mapping[str, JSON]]:
    return {name: json.loads(text) for name, text in connection.execute("SELECT name, connection FROM node")}


def load_source_answers(connection: sqlite3.Connection) -> tuple[SourceAnswer, ...]:
    nodes: dict[str, list[DiscoveredNode]] = {}
    sql = "SELECT source, name, kind, labels, connection FROM source_node ORDER BY source, name"
    for source, name, kind, labels, variables in connection.execute(sql):
        node = DiscoveredNode(
            name, source, _KIND_BY_VALUE[kind], _decode_labels(labels), json.loads(variables)
        )
        nodes.setdefault(source, []).append(node)
    sources = connection.execute("SELECT name, answered_at FROM source ORDER BY name")
    return tuple(SourceAnswer(name, at, tuple(nodes.get(name, ()))) for name, at in sources)


def load_closed_rollouts(connection: sqlite3.Connection, limit: int) -> tuple[ClosedRollout, ...]:
    rows = connection.execute(_SELECT_CLOSED, (limit,)).fetchall()
    tally = "SELECT ifnull(outcome, phase), count(*) FROM target WHERE rollout = ? GROUP BY 1"
    return tuple(
        ClosedRollout(
            *(id_, name, Digest(*digest), _decode_actor(by), at, _decode_pause(*cancelled), ended_at),
            dict(connection.execute(tally, (id_,)).fetchall()),
        )
        for id_, name, *digest, by, at, c_by, c_reason, c_at, ended_at in rows
        for cancelled in ((c_by, c_reason, c_at),)
    )


def load_rollout_records(connection: sqlite3.Connection) -> tuple[RolloutRecord, ...]:
    sql = f"""
    SELECT id, source, iif({IS_LIVE}, NULL, coalesce(cancelled_at, ended_at, deleted_at)),
           deleted_at IS NOT NULL
    FROM rollout ORDER BY number"""  # noqa: S608  # a constant
    rows = connection.execute(sql)
    return tuple(RolloutRecord(id_, json.loads(source), at, bool(gone)) for id_, source, at, gone in rows)


def find_identical(connection: sqlite3.Connection, change: str, selector: str, policy: str) -> str | None:
    """Return the latest rollout of the same content that was not cancelled or deleted."""
    row = connection.execute(
        "SELECT id FROM rollout WHERE change_digest = ? AND selector_digest = ? AND policy_digest = ?"
        " AND cancelled_at IS NULL AND deleted_at IS NULL ORDER BY number DESC LIMIT 1",
        (change, selector, policy),
    ).fetchone()
    return row[0] if row else None


def load_done_nodes(connection: sqlite3.Connection, change: str) -> frozenset[str]:
    rows = connection.execute(
        "SELECT DISTINCT node FROM target JOIN rollout ON rollout.id = target.rollout"
        " WHERE change_digest = ? AND outcome IN ('changed', 'already-current')",
        (change,),
    )
    return frozenset(node for (node,) in rows)


def load_later_changes(connection: sqlite3.Connection, rollout: str) -> dict[str, str]:
    rows = connection.execute(
        "SELECT node, later.id FROM rollout AS asked JOIN rollout AS later ON later.name = asked.name"
        " JOIN target ON target.rollout = later.id"
        " WHERE asked.id = ? AND later.number > asked.number AND later.deleted_at IS NULL"
        " AND outcome = 'changed' ORDER BY later.number",
        (rollout,),
    )
    return dict(rows)


def load_audit(
    connection: sqlite3.Connection,
    after: int,
    before: int | None,
    limit: int,
    event: str | None,
    **filters: str | None,
) -> tuple[AuditEntry, ...]:
    """Return audit entries oldest first: the first after a number, or the last before another.

    `filters` are columns and the values they must hold.
    """
    conditions = {f"{column} = ?": value for column, value in filters.items() if value is not None}
    where = "".join(f" AND {condition}" for condition in conditions)
    values: list[str | int] = [*conditions.values()]
    if event is not None:
        names = stored_event_names(event)
        where += f" AND event IN ({', '.join('?' * len(names))})"
        values += names
    order = "seq"
    if before is not None:
        where, values, order = where + " AND seq < ?", [*values, before], "seq DESC"
    sql = f"SELECT seq, entry, hash FROM audit WHERE seq > ?{where} ORDER BY {order} LIMIT ?"  # noqa: S608  # our columns
    rows = connection.execute(sql, (after, *values, min(limit, MAX_AUDIT_ROWS)))
    entries = tuple(AuditEntry(*row) for row in rows)
    return entries if before is None else entries[::-1]


def load_head(connection: sqlite3.Connection) -> AuditEntry | None:
    row = connection.execute("SELECT seq, entry, hash FROM audit ORDER BY seq DESC LIMIT 1").fetchone()
    return AuditEntry(*row) if row else None


def is_token_used(connection: sqlite3.Connection, token: str) -> bool:
    return connection.execute("SELECT 1 FROM spent_token WHERE id = ?", (token,)).fetchone() is not None


def load_digests(connection: sqlite3.Connection) -> dict[str, str]:
    return dict(connection.execute("SELECT id, digest FROM rollout").fetchall())


def _load_rollouts(
    connection: sqlite3.Connection, where: str, values: Sequence[str], compile_plan: PlanCompiler
) -> list[Rollout]:
    rows = connection.execute(f"{_SELECT_ROLLOUT} WHERE {where} ORDER BY number", values).fetchall()
    return [_decode_rollout(connection, row, compile_plan) for row in rows]


def _decode_rollout(
    connection: sqlite3.Connection, row: Sequence[Any], compile_plan: PlanCompiler
) -> Rollout:
    id_, content, *digest, by, at, approved, amendments = row[:10]
    opened = connection.execute("SELECT gate, wave, at FROM opened WHERE rollout = ? ORDER BY number", (id_,))
    failures = connection.execute(
        "SELECT id, node, attempt, step, message, at, code FROM failure WHERE rollout = ? ORDER BY number",
        (id_,),
    )
    return Rollout(
        id=id_,
        plan=_compile_stored_plan(id_, content, compile_plan),
        digest=Digest(*digest),
        submitted_by=_decode_actor(by),
        submitted_at=at,
        approved_count=approved,
        votes=tuple(
            map(_decode_vote, connection.execute(f"{_SELECT_VOTE} WHERE rollout = ? ORDER BY number", (id_,)))
        ),
        opened=tuple(GateOpening(GateName(gate), wave, at) for gate, wave, at in opened),
        failures=tuple(map(_decode_failure, failures)),
        paused=_decode_pause(*row[10:13]),
        cancelled=_decode_pause(*row[13:16]),
        ended_at=row[16],
        amendments=amendments,
        supersedes=row[17],
        pilot_evidence=_load_pilot_evidence(connection, id_),
        source=json.loads(row[18]),
        overrides=_decode_strings(row[19]),
        built=load_built(connection, id_),
    )


def _load_pilot_evidence(connection: sqlite3.Connection, rollout: str) -> PilotEvidence | None:
    sql = "SELECT content, digest, pilot_since, at FROM pilot_evidence WHERE rollout = ?"
    row = connection.execute(sql, (rollout,)).fetchone()
    return None if row is None else PilotEvidence(json.loads(row[0]), *row[1:])


def _compile_stored_plan(rollout: str, content: str, compile_plan: PlanCompiler) -> Plan:
    try:
        return compile_plan(json.loads(content))
    except (RolloutdError, LookupError, TypeError, ValueError) as error:
        raise StoreFailed(
            f"this version cannot read the plan of rollout {rollout} ({error}): start the version that opened"
            " it, let it end or cancel it there, then upgrade"
        ) from error


def _decode_target(row: Sequence[Any]) -> Target:
    rollout, node, team, pools, wave, position, phase, outcome, attempt, rolling_back, isolated = row[:11]
    since, not_before, aborted, last_text = row[11:15]
    order, order_by, ordered_at, joined, needs_vote_of, maybe_current, admitted_at, downtime_s = row[21:29]
    drift_since, drift_tasks, content = row[29:]
    # Positional arguments: for a hundred thousand targets, keywords alone cost a tenth of a second.
    return Target(
        *(
            rollout,
            node,
            team,
            _decode_strings(pools),
            wave,
            position,
            _PHASE_BY_VALUE[phase],
            _OUTCOME_BY_VALUE[outcome],
            attempt,
        ),
        *(bool(rolling_back), bool(isolated), since, not_before, aborted, last_text),
        _decode_failure((row[15], node, *row[16:21])) if row[15] else None,
        NodeOrder(order) if order else None,
        _decode_actor(order_by) if order_by else None,
        *(ordered_at, bool(joined), needs_vote_of, bool(maybe_current), admitted_at, downtime_s),
        None if drift_since is None else Drift(drift_since, _decode_strings(drift_tasks)),
        content,
    )


def _decode_failure(row: Sequence[Any]) -> Failure:
    id_, node, attempt, step, message, at, code = row
    return Failure(id_, node, attempt, step, message, at, FailureCode(code))


def _decode_step(row: Sequence[Any]) -> StepRecord:
    rollout, node, attempt, step, action, number, state, at, began_at, stage, handle, prior = row[:12]
    return StepRecord(
        *(rollout, node, attempt, step, StepAction(action), number, StepState(state), at, began_at, stage),
        *(handle, json.loads(prior), *row[12:15], FailureCode(row[15])),
    )


def _decode_vote(row: Sequence[Any]) -> Vote:
    _, id_, gate, digest, actor, yes, reason, at, teams, wave, shown, nodes, more, until, withdrawn_at = row
    return Vote(
        *(
            id_,
            GateName(gate),
            digest,
            _decode_actor(actor),
            bool(yes),
            reason,
            at,
            _decode_strings(teams),
            wave,
        ),
        *(_decode_strings(shown), _decode_strings(nodes), more, until, withdrawn_at),
    )


def _decode_pause(by: str | None, reason: str | None, at: float | None) -> Interruption | None:
    return None if by is None or at is None else Interruption(_decode_actor(by), reason or "", at)


# Many rows share few actors, pools and label sets: each is decoded once.


@lru_cache(maxsize=4096)
def _decode_actor(text: str) -> Actor:
    value = json.loads(text)
    return Actor(ActorKind(value["kind"]), value["name"], value["uid"])


@lru_cache(maxsize=16_384)
def _decode_strings(text: str) -> tuple[str, ...]:
    return tuple(json.loads(text))


def _decode_window(value: Mapping[str, Any]) -> Window:
    return Window(frozenset(value["days"]), value["from"], value["to"], ZoneInfo(value["zone"]))


@lru_cache(maxsize=1024)
def _decode_conflicts(text: str) -> tuple[Conflict, ...]:
    return tuple(
        Conflict(ConflictKind(each["kind"]), each["about"], each["values"], each["since"])
        for each in json.loads(text)
    )


@lru_cache(maxsize=16_384)
def _decode_labels(text: str) -> Mapping[str, str]:
    labels: dict[str, str] = json.loads(text)
    return labels


_PHASE_BY_VALUE: Mapping[str, Phase] = {phase.value: phase for phase in Phase}
_OUTCOME_BY_VALUE: Mapping[str | None, Outcome | None] = {
    None: None,
    **{outcome.value: outcome for outcome in Outcome},
}
_KIND_BY_VALUE: Mapping[str, NodeKind] = {kind.value: kind for kind in NodeKind}
