"""The reading half of the store: rows in, values of the core out.

Plain synchronous functions on a connection.  A column that a newer rolloutd
wrote, or a hand, in a way that this one cannot read, is an error with the place
in it, never a guess.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any
from zoneinfo import ZoneInfo

from machines.book import Snapshot
from machines.events import StepAction, StepRecord, StepState
from machines.limits import TeamRules
from machines.node import Kind, Node
from machines.plan import Digest, GateName, Plan
from machines.rollout import Actor, ActorKind, Failure, Hold, Opened, Order, Pause, Rollout, Target, Vote
from machines.states import Outcome, Phase
from machines.windows import Freeze, Window
from rolloutd.errors import NotFound, RolloutdError, StoreFailed
from rolloutd.ports import JSON, ClosedRollout, Entry, Remembered

Compile = Callable[[Mapping[str, Any]], Plan]
"""Makes a plan of its canonical content."""

MAX_LIMIT = 10_000
"""Rows of one audit read at most, so that no client makes the daemon hold the whole log in memory."""

# A closed rollout is alive while something of it still has to be brought home.  The holds are gone
# through once, not once for each rollout: a start after years looks at thousands of both.
_LIVE = """
deleted_at IS NULL AND (ended_at IS NULL AND cancelled_at IS NULL OR EXISTS (
    SELECT 1 FROM target
    WHERE target.rollout = rollout.id
      AND (phase NOT IN ('pending', 'done') OR isolated OR order_kind IS NOT NULL)) OR rollout.id IN (
    SELECT substr(id, 1, length(id) - length(node) - 1) FROM hold
    WHERE source = 'left' AND substr(id, -length(node) - 1) = '/' || node))"""

_ROLLOUT = """
SELECT id, content, change_digest, scope_digest, policy_digest, digest, submitted_by, submitted_at,
       approved_count, amendments, paused_by, paused_reason, paused_at, cancelled_by, cancelled_reason,
       cancelled_at, ended_at, supersedes
FROM rollout"""

_TARGET = """
SELECT target.rollout, target.node, team, pools, wave, position, phase, outcome, target.attempt, rolling_back,
       isolated, since, not_before, put_backs, last_text, failure.id, failure.attempt, failure.step,
       failure.message, failure.at, order_kind, order_by, ordered_at, joined, needs_vote_of, maybe_current,
       admitted_at
FROM target LEFT JOIN failure ON failure.rollout = target.rollout AND failure.id = target.failure"""

_CLOSED = f"""
SELECT id, name, change_digest, scope_digest, policy_digest, digest, submitted_by, submitted_at, cancelled_by,
       cancelled_reason, cancelled_at, ended_at
FROM rollout WHERE deleted_at IS NULL AND NOT ({_LIVE}) ORDER BY number DESC LIMIT ?"""  # noqa: S608  # two constants

_VOTE = """
SELECT rollout, id, gate, digest, actor, yes, reason, at, teams, wave, shown, nodes, more, until, withdrawn_at
FROM vote"""

_STEP = """
SELECT rollout, node, attempt, step, action, number, state, at, began_at, stage, handle, prior, text, output,
       visible_to
FROM step"""


def snapshot(connection: sqlite3.Connection, compile_plan: Compile) -> Snapshot:
    """Return what decisions are made from, as of one moment."""
    connection.execute("BEGIN")
    try:
        (epoch,) = connection.execute("SELECT epoch FROM tenure").fetchone()
        rollouts = _rollouts(connection, _LIVE, (), compile_plan)
        targets = [target for rollout in rollouts for target in targets_of(connection, rollout.id)]
        nodes = connection.execute(
            "SELECT name, kind, sources, labels FROM node WHERE gone_at IS NULL ORDER BY name"
        )
        holds = connection.execute(
            "SELECT node, source, id, actor, reason, at, until FROM hold ORDER BY at, node, source, id"
        )
        freezes = connection.execute("SELECT id, scope, reason, by, at, until FROM freeze ORDER BY at, id")
        rules = connection.execute("SELECT team, windows, canaries FROM team_rules ORDER BY team")
        return Snapshot(
            nodes=tuple(
                Node(name, _KIND[kind], _texts(sources), _labels(labels))
                for name, kind, sources, labels in nodes
            ),
            rollouts=tuple(rollouts),
            targets=tuple(targets),
            holds=tuple(
                Hold(node, source, id_, _actor(actor), reason, at, until)
                for node, source, id_, actor, reason, at, until in holds
            ),
            freezes=tuple(Freeze(*row) for row in freezes),
            team_rules=tuple(
                TeamRules(team, tuple(map(_window, json.loads(windows))), _texts(canaries))
                for team, windows, canaries in rules
            ),
            epoch=epoch,
        )
    finally:
        connection.execute("ROLLBACK")


def rollout_of(connection: sqlite3.Connection, rollout: str, compile_plan: Compile) -> Rollout:
    """Return one rollout; raises NotFound."""
    found = _rollouts(connection, "id = ? AND deleted_at IS NULL", (rollout,), compile_plan)
    if not found:
        raise NotFound(f"there is no rollout {rollout}")
    return found[0]


def targets_of(connection: sqlite3.Connection, rollout: str) -> tuple[Target, ...]:
    """Return the targets of one rollout in their order."""
    rows = connection.execute(
        f"{_TARGET} WHERE target.rollout = ? ORDER BY position, target.node", (rollout,)
    )
    return tuple(map(_target, rows))


def steps_of(
    connection: sqlite3.Connection, rollout: str, node: str, attempt: int | None
) -> tuple[StepRecord, ...]:
    """Return the steps of a node, oldest first."""
    where, values = "rollout = ? AND node = ?", (rollout, node)
    if attempt is None:
        rows = connection.execute(f"{_STEP} WHERE {where} ORDER BY rowid", values)
    else:
        where += " AND ifnull(attempt, -1) = ?"
        rows = connection.execute(f"{_STEP} WHERE {where} ORDER BY rowid", (*values, attempt))
    return tuple(map(_step, rows))


def unclean_of(connection: sqlite3.Connection, node: str) -> bool:
    """Say whether a run on the node may have left processes there, and nobody cleared it since."""
    row = connection.execute(
        "SELECT 1 FROM step AS run WHERE run.node = ? AND run.action = 'run' AND run.state != 'ok'"
        " AND NOT EXISTS (SELECT 1 FROM step AS clear WHERE clear.node = run.node"
        " AND clear.action = 'clear' AND clear.state = 'ok' AND clear.rowid > run.rowid) LIMIT 1",
        (node,),
    ).fetchone()
    return row is not None


def content_of(connection: sqlite3.Connection, rollout: str) -> tuple[Mapping[str, JSON], Mapping[str, str]]:
    """Return a rollout's content and its pinned source; raises NotFound."""
    sql = "SELECT content, source FROM rollout WHERE id = ? AND deleted_at IS NULL"
    row = connection.execute(sql, (rollout,)).fetchone()
    if row is None:
        raise NotFound(f"there is no rollout {rollout}")
    return json.loads(row[0]), json.loads(row[1])


def connections_of(connection: sqlite3.Connection) -> Mapping[str, Mapping[str, JSON]]:
    """Return how each node is reached."""
    return {name: json.loads(text) for name, text in connection.execute("SELECT name, connection FROM node")}


def closed_of(connection: sqlite3.Connection, limit: int) -> tuple[ClosedRollout, ...]:
    """Return headers of closed rollouts, latest first."""
    rows = connection.execute(_CLOSED, (limit,)).fetchall()
    tally = "SELECT ifnull(outcome, phase), count(*) FROM target WHERE rollout = ? GROUP BY 1"
    return tuple(
        ClosedRollout(
            *(id_, name, Digest(*digest), _actor(by), at, _pause(*cancelled), ended_at),
            dict(connection.execute(tally, (id_,)).fetchall()),
        )
        for id_, name, *digest, by, at, c_by, c_reason, c_at, ended_at in rows
        for cancelled in ((c_by, c_reason, c_at),)
    )


def remembered_of(connection: sqlite3.Connection) -> tuple[Remembered, ...]:
    """Return every rollout that was ever submitted."""
    sql = f"""
    SELECT id, source, iif({_LIVE}, NULL, coalesce(cancelled_at, ended_at, deleted_at)),
           deleted_at IS NOT NULL
    FROM rollout ORDER BY number"""  # noqa: S608  # a constant
    rows = connection.execute(sql)
    return tuple(Remembered(id_, json.loads(source), at, bool(gone)) for id_, source, at, gone in rows)


def identical_of(connection: sqlite3.Connection, change: str, selector: str, policy: str) -> str | None:
    """Return the latest rollout of the same content that nobody cancelled or deleted."""
    row = connection.execute(
        "SELECT id FROM rollout WHERE change_digest = ? AND selector_digest = ? AND policy_digest = ?"
        " AND cancelled_at IS NULL AND deleted_at IS NULL ORDER BY number DESC LIMIT 1",
        (change, selector, policy),
    ).fetchone()
    return row[0] if row else None


def done_of(connection: sqlite3.Connection, change: str) -> frozenset[str]:
    """Return the nodes on which a change was made or found."""
    rows = connection.execute(
        "SELECT DISTINCT node FROM target JOIN rollout ON rollout.id = target.rollout"
        " WHERE change_digest = ? AND outcome IN ('changed', 'already-current')",
        (change,),
    )
    return frozenset(node for (node,) in rows)


def audit_of(
    connection: sqlite3.Connection, after: int, limit: int, **equal: str | None
) -> tuple[Entry, ...]:
    """Return audit entries after a sequence number; `equal` are columns and what they must hold."""
    wanted = {column: value for column, value in equal.items() if value is not None}
    where = "".join(f" AND {column} = ?" for column in wanted)
    sql = f"SELECT seq, entry, hash FROM audit WHERE seq > ?{where} ORDER BY seq LIMIT ?"  # noqa: S608  # our columns
    rows = connection.execute(sql, (after, *wanted.values(), min(limit, MAX_LIMIT)))
    return tuple(Entry(*row) for row in rows)


def head_of(connection: sqlite3.Connection) -> Entry | None:
    """Return the latest audit entry."""
    row = connection.execute("SELECT seq, entry, hash FROM audit ORDER BY seq DESC LIMIT 1").fetchone()
    return Entry(*row) if row else None


def is_spent(connection: sqlite3.Connection, token: str) -> bool:
    """Say whether a token was used."""
    return connection.execute("SELECT 1 FROM spent_token WHERE id = ?", (token,)).fetchone() is not None


def digests_of(connection: sqlite3.Connection) -> dict[str, str]:
    """Return the digest of every rollout, for the audit."""
    return dict(connection.execute("SELECT id, digest FROM rollout").fetchall())


def _rollouts(
    connection: sqlite3.Connection, where: str, values: Sequence[str], compile_plan: Compile
) -> list[Rollout]:
    rows = connection.execute(f"{_ROLLOUT} WHERE {where} ORDER BY number", values).fetchall()
    return [_rollout(connection, row, compile_plan) for row in rows]


def _rollout(connection: sqlite3.Connection, row: Sequence[Any], compile_plan: Compile) -> Rollout:
    id_, content, *digest, by, at, approved, amendments = row[:10]
    opened = connection.execute("SELECT gate, wave, at FROM opened WHERE rollout = ? ORDER BY number", (id_,))
    failures = connection.execute(
        "SELECT id, node, attempt, step, message, at FROM failure WHERE rollout = ? ORDER BY number", (id_,)
    )
    return Rollout(
        id=id_,
        plan=_compiled(id_, content, compile_plan),
        digest=Digest(*digest),
        submitted_by=_actor(by),
        submitted_at=at,
        approved_count=approved,
        votes=tuple(map(_vote, connection.execute(f"{_VOTE} WHERE rollout = ? ORDER BY number", (id_,)))),
        opened=tuple(Opened(GateName(gate), wave, at) for gate, wave, at in opened),
        failures=tuple(Failure(*failure) for failure in failures),
        paused=_pause(*row[10:13]),
        cancelled=_pause(*row[13:16]),
        ended_at=row[16],
        amendments=amendments,
        supersedes=row[17],
    )


def _compiled(rollout: str, content: str, compile_plan: Compile) -> Plan:
    try:
        return compile_plan(json.loads(content))
    except (RolloutdError, LookupError, TypeError, ValueError) as error:
        raise StoreFailed(
            f"this version cannot read the plan of rollout {rollout} ({error}): start the version that opened"
            " it, let it end or cancel it there, then upgrade"
        ) from error


def _target(row: Sequence[Any]) -> Target:
    rollout, node, team, pools, wave, position, phase, outcome, attempt, rolling_back, isolated = row[:11]
    since, not_before, put_backs, last_text, *failure = row[11:20]
    order, order_by, ordered_at, joined, needs_vote_of, maybe_current, admitted_at = row[20:]
    # By position: of a hundred thousand targets, keywords alone cost a tenth of a second.
    return Target(
        *(rollout, node, team, _texts(pools), wave, position, _PHASE[phase], _OUTCOME[outcome], attempt),
        *(bool(rolling_back), bool(isolated), since, not_before, put_backs, last_text),
        Failure(failure[0], node, *failure[1:]) if failure[0] else None,
        Order(order) if order else None,
        _actor(order_by) if order_by else None,
        *(ordered_at, bool(joined), needs_vote_of, bool(maybe_current), admitted_at),
    )


def _step(row: Sequence[Any]) -> StepRecord:
    rollout, node, attempt, step, action, number, state, at, began_at, stage, handle, prior = row[:12]
    return StepRecord(
        *(rollout, node, attempt, step, StepAction(action), number, StepState(state), at, began_at, stage),
        *(handle, json.loads(prior), *row[12:]),
    )


def _vote(row: Sequence[Any]) -> Vote:
    _, id_, gate, digest, actor, yes, reason, at, teams, wave, shown, nodes, more, until, withdrawn_at = row
    return Vote(
        *(id_, GateName(gate), digest, _actor(actor), bool(yes), reason, at, _texts(teams), wave),
        *(_texts(shown), _texts(nodes), more, until, withdrawn_at),
    )


def _pause(by: str | None, reason: str | None, at: float | None) -> Pause | None:
    return None if by is None or at is None else Pause(_actor(by), reason or "", at)


# Few actors, pools and sets of labels are named by many rows: each is read once and shared.


@lru_cache(maxsize=4096)
def _actor(text: str) -> Actor:
    value = json.loads(text)
    return Actor(ActorKind(value["kind"]), value["name"], value["uid"])


@lru_cache(maxsize=16_384)
def _texts(text: str) -> tuple[str, ...]:
    return tuple(json.loads(text))


def _window(value: Mapping[str, Any]) -> Window:
    return Window(frozenset(value["days"]), value["from"], value["to"], ZoneInfo(value["zone"]))


@lru_cache(maxsize=16_384)
def _labels(text: str) -> Mapping[str, str]:
    labels: dict[str, str] = json.loads(text)
    return labels


_PHASE: Mapping[str, Phase] = {phase.value: phase for phase in Phase}
_OUTCOME: Mapping[str | None, Outcome | None] = {
    None: None,
    **{outcome.value: outcome for outcome in Outcome},
}
_KIND: Mapping[str, Kind] = {kind.value: kind for kind in Kind}
