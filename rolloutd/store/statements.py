"""Which rows each event changes: events in, SQL statements out.

A statement says how many rows it must change and what to tell a person when it
changes another number; that is how two who move the same thing are told apart,
without reading first.  This module executes nothing and knows no connection.

An event carries the values that hold after it.  A phase is moved only from the
phase and attempt that the event names; a step's result is written only over its
intent; a vote, an opened gate and a withdrawal happen once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, assert_never

from machines.events import (
    CallRefused,
    DaemonStarted,
    Event,
    Frozen,
    GateOpened,
    HoldReleased,
    HoldTaken,
    LookedCurrent,
    NodeOrdered,
    NodesGone,
    NodesSeen,
    PhaseMoved,
    RolloutCancelled,
    RolloutDeleted,
    RolloutEnded,
    RolloutOpened,
    RolloutPaused,
    RolloutResumed,
    StepRecorded,
    TargetChanged,
    TargetsJoined,
    Unfrozen,
    VoteCast,
    VoteWithdrawn,
)
from machines.rollout import Actor, Target
from machines.states import IllegalTransition, Phase, Trigger, edge
from rolloutd.errors import StoreFailed
from rolloutd.journal import canonical
from rolloutd.store.entries import MAX_TEXT

MAX_OUTPUT = 65_536
"""Characters kept of one step's output: its end, where the error stands; the run directory has the whole."""

MAX_PRIOR = 1_048_576
"""Characters of what an isolator found; what is not kept whole cannot be restored, so more is refused."""


@dataclass(frozen=True, slots=True)
class Statement:
    """SQL with the rows for it; `changes` is how many rows it must change, None for any number."""

    sql: str
    rows: Sequence[Sequence[Any]]
    changes: int | None = None
    otherwise: str = ""


def statements(event: Event, at: float) -> Iterator[Statement]:
    """Yield what an event that is committed at `at` writes, besides its audit entry.

    Raises IllegalTransition for a move that is not in the table, ValueError or
    TypeError for a value that has no JSON form, StoreFailed for one too large.
    """
    match event:
        case PhaseMoved():
            yield from _move(event)
        case StepRecorded():
            yield from _record(event)
        case NodesSeen() | NodesGone():
            yield from _nodes(event, at)
        case RolloutOpened():
            yield from _open_rollout(event)
        case TargetsJoined() | TargetChanged():
            yield from _amend(event)
        case LookedCurrent() | NodeOrdered():
            yield _note(event)
        case VoteCast() | VoteWithdrawn() | GateOpened():
            yield _gate(event)
        case RolloutPaused() | RolloutResumed() | RolloutCancelled() | RolloutEnded() | RolloutDeleted():
            yield _mark_rollout(event)
        case HoldTaken() | HoldReleased() | Frozen() | Unfrozen():
            yield _hold(event)
        case CallRefused() | DaemonStarted():
            return
        case _:
            assert_never(event)


# -- nodes in rollouts ----------------------------------------------------------

_MOVE = """
UPDATE target
SET phase = ?, outcome = ?, attempt = ?, rolling_back = ?, isolated = ifnull(?, isolated), since = ?,
    not_before = ?, put_backs = put_backs * ? + ?, last_text = ?, failure = ?,
    admitted_at = ifnull(?, admitted_at)
WHERE rollout = ? AND node = ? AND phase = ? AND attempt BETWEEN ? AND ?"""

_FAIL = "INSERT INTO failure (rollout, id, node, attempt, step, message, at) VALUES (?, ?, ?, ?, ?, ?, ?)"

_NEW_TARGET = """
INSERT INTO target (rollout, node, team, pools, wave, position, phase, outcome, attempt, rolling_back,
                    isolated, since, not_before, put_backs, last_text, failure, order_kind, order_by,
                    ordered_at, joined, needs_vote_of, maybe_current, admitted_at)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"""

_AMENDED = "UPDATE rollout SET amendments = amendments + 1 WHERE id = ?"


def _move(event: PhaseMoved) -> Iterator[Statement]:
    if edge(event.trigger, event.source, event.outcome).target is not event.target:
        raise IllegalTransition(f"{event.trigger} does not lead from {event.source} to {event.target}")
    if (event.failure is None) == (event.target is Phase.FAILED):
        raise IllegalTransition("a failure belongs to every move to failed and to no other")
    failure = event.failure
    # What target_after() in machines.changes does to the value, said in SQL.
    trigger, begins = event.trigger, event.trigger in (Trigger.ADMITTED, Trigger.ROLLBACK_ORDERED)
    least, most = event.attempt - begins, event.attempt - (trigger is Trigger.ADMITTED)
    row: Sequence[Any] = (
        *(event.target, event.outcome, event.attempt, event.rolling_back, event.isolated, event.at),
        *(event.not_before, trigger is not Trigger.RETRIED, trigger is Trigger.PUT_BACK, event.text),
        *(failure.id if failure else None, event.at if begins else None),
        *(event.rollout, event.node, event.source, least, most),
    )
    yield Statement(
        _MOVE,
        (row,),
        1,
        f"{event.node} is not {event.source} in {event.rollout} at attempt {event.attempt}, so it cannot be"
        f" {event.trigger}: somebody else moved it first",
    )
    if failure is not None:
        row = (
            event.rollout,
            failure.id,
            failure.node,
            failure.attempt,
            failure.step,
            failure.message,
            failure.at,
        )
        yield Statement(_FAIL, (row,), 1, f"failure {failure.id} of {event.rollout} is known already")


def _target_row(target: Target) -> Sequence[Any]:
    return (
        *(
            target.rollout,
            target.node,
            target.team,
            canonical(list(target.pools)),
            target.wave,
            target.position,
        ),
        *(target.phase, target.outcome, target.attempt, target.rolling_back, target.isolated, target.since),
        *(
            target.not_before,
            target.put_backs,
            target.last_text,
            target.failure.id if target.failure else None,
        ),
        *(target.order, _actor(target.order_by), target.ordered_at, target.joined, target.needs_vote_of),
        *(target.maybe_current, target.admitted_at),
    )


def _new_targets(targets: Sequence[Target]) -> Statement:
    rows = [_target_row(target) for target in targets]
    return Statement(_NEW_TARGET, rows, len(rows), "a node cannot be a target of the same rollout twice")


def _amend(event: TargetsJoined | TargetChanged) -> Iterator[Statement]:
    yield Statement(_AMENDED, ((event.rollout,),), 1, f"there is no rollout {event.rollout}")
    if isinstance(event, TargetsJoined):
        yield _new_targets(event.targets)
        return
    sql = "UPDATE target SET team = ?, pools = ?, needs_vote_of = ? WHERE rollout = ? AND node = ?"
    row = (event.team, canonical(list(event.pools)), event.needs_vote_of, event.rollout, event.node)
    yield Statement(sql, (row,), 1, f"{event.node} is no target of {event.rollout}")


def _note(event: LookedCurrent | NodeOrdered) -> Statement:
    if isinstance(event, LookedCurrent):
        sql = """
        UPDATE target SET maybe_current = 0, last_text = ifnull(?, last_text)
        WHERE rollout = ? AND node = ?"""
        row: Sequence[Any] = (event.text or None, event.rollout, event.node)
    else:
        sql = "UPDATE target SET order_kind = ?, order_by = ?, ordered_at = ? WHERE rollout = ? AND node = ?"
        by, at = (_actor(event.actor), event.at) if event.order else (None, 0.0)
        row = (event.order, by, at, event.rollout, event.node)
    return Statement(sql, (row,), 1, f"{event.node} is no target of {event.rollout}")


# -- steps ------------------------------------------------------------------------

# A repeat of the same answer changes nothing that matters and is let through, so
# that whoever lost an answer may say it again; another answer is a conflict.  A
# step began when it was first intended, and what an isolator found then is never
# forgotten for a later record that says nothing of it.
_RECORD = """
INSERT INTO step (rollout, node, attempt, step, action, number, state, began_at, at, stage, handle, prior,
                  text, output, visible_to)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (rollout, node, ifnull(attempt, -1), step, action, number) DO UPDATE
SET state = excluded.state, at = excluded.at, stage = excluded.stage, handle = excluded.handle,
    prior = iif(excluded.prior = 'null', prior, excluded.prior), text = excluded.text,
    output = excluded.output, visible_to = excluded.visible_to
WHERE step.state = 'intended'
   OR (step.state = excluded.state AND step.handle = excluded.handle AND step.text = excluded.text
       AND step.output = excluded.output AND excluded.prior IN ('null', step.prior))"""


def _record(event: StepRecorded) -> Iterator[Statement]:
    record = event.record
    prior = canonical(record.prior)
    if len(prior) > MAX_PRIOR:
        raise StoreFailed(
            f"what {record.step} found on {record.node} has {len(prior)} characters; more than {MAX_PRIOR}"
            " are not kept, and what is not kept could not be restored: the step was not begun"
        )
    row = (
        *(
            record.rollout,
            record.node,
            record.attempt,
            record.step,
            record.action,
            record.number,
            record.state,
        ),
        *(record.began_at, record.at, record.stage, record.handle, prior, record.text[:MAX_TEXT]),
        *(record.output[-MAX_OUTPUT:], record.visible_to),
    )
    yield Statement(
        _RECORD,
        (row,),
        1,
        f"step {record.step} ({record.action}, number {record.number}) of {record.node} in {record.rollout},"
        f" attempt {record.attempt}, has ended already and not as {record.state}",
    )
    if event.isolated is not None:
        sql = "UPDATE target SET isolated = ? WHERE rollout = ? AND node = ?"
        yield Statement(
            sql,
            ((event.isolated, record.rollout, record.node),),
            1,
            f"{record.node} is no target of {record.rollout}",
        )


# -- the inventory ----------------------------------------------------------------

_SEEN = """
INSERT INTO node (name, kind, sources, labels, connection) VALUES (?, ?, ?, ?, ifnull(?, '{}'))
ON CONFLICT (name) DO UPDATE
SET kind = excluded.kind, sources = excluded.sources, labels = excluded.labels, gone_at = NULL,
    connection = ifnull(?5, connection)"""

_GONE = "UPDATE node SET gone_at = ? WHERE name = ? AND gone_at IS NULL"


def _nodes(event: NodesSeen | NodesGone, at: float) -> Iterator[Statement]:
    if isinstance(event, NodesGone):
        yield Statement(_GONE, [(at, name) for name in event.names])
        return
    rows = [
        (
            node.name,
            node.kind,
            canonical(list(node.sources)),
            canonical(node.labels),
            _connection(event, node.name),
        )
        for node in event.nodes
    ]
    yield Statement(_SEEN, rows)


def _connection(event: NodesSeen, name: str) -> str | None:
    connection = event.connections.get(name)
    return None if connection is None else canonical(connection)


# -- rollouts ---------------------------------------------------------------------

_NEW_ROLLOUT = """
INSERT INTO rollout (id, name, content, source, change_digest, scope_digest, policy_digest, digest,
                     selector_digest, submitted_by, submitted_at, approved_count)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"""

_PAUSE = """
UPDATE rollout SET paused_by = ?, paused_reason = ?, paused_at = ?
WHERE id = ? AND paused_at IS NULL AND cancelled_at IS NULL AND ended_at IS NULL AND deleted_at IS NULL"""
_RESUME = """
UPDATE rollout SET paused_by = NULL, paused_reason = NULL, paused_at = NULL
WHERE id = ? AND paused_at IS NOT NULL"""
_CANCEL = """
UPDATE rollout SET cancelled_by = ?, cancelled_reason = ?, cancelled_at = ?
WHERE id = ? AND cancelled_at IS NULL AND ended_at IS NULL AND deleted_at IS NULL"""
_END = "UPDATE rollout SET ended_at = ? WHERE id = ? AND ended_at IS NULL AND deleted_at IS NULL"
_DELETE = """
UPDATE rollout SET deleted_at = ?
WHERE id = ? AND deleted_at IS NULL AND (cancelled_at IS NOT NULL OR ended_at IS NOT NULL)"""


def _open_rollout(event: RolloutOpened) -> Iterator[Statement]:
    digest = event.digest
    row = (
        *(event.rollout, event.name, canonical(event.content), canonical(dict(event.source))),
        *(digest.change, digest.scope, digest.policy, digest.whole, event.selector_digest),
        *(_actor(event.submitted_by), event.at, len(event.targets)),
    )
    yield Statement(_NEW_ROLLOUT, (row,), 1, f"there is a rollout {event.rollout} already")
    yield _new_targets(event.targets)


def _mark_rollout(
    event: RolloutPaused | RolloutResumed | RolloutCancelled | RolloutEnded | RolloutDeleted,
) -> Statement:
    name = event.rollout
    match event:
        case RolloutPaused():
            row: Sequence[Any] = (_actor(event.actor), event.reason, event.at, name)
            return Statement(_PAUSE, (row,), 1, f"{name} is paused by a person already, closed or unknown")
        case RolloutResumed():
            return Statement(_RESUME, ((name,),), 1, f"{name} is not paused by a person")
        case RolloutCancelled():
            row = (_actor(event.actor), event.reason, event.at, name)
            return Statement(_CANCEL, (row,), 1, f"{name} is closed already or unknown")
        case RolloutEnded():
            return Statement(_END, ((event.at, name),), 1, f"{name} has ended already or is unknown")
        case RolloutDeleted():
            return Statement(
                _DELETE, ((event.at, name),), 1, f"{name} is not closed, deleted already or unknown"
            )
        case _:
            assert_never(event)


# -- gates ------------------------------------------------------------------------

_VOTE = """
INSERT INTO vote (id, rollout, gate, wave, digest, actor, yes, reason, at, teams, shown, nodes, more,
                  until, withdrawn_at)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"""

_WITHDRAW = """
UPDATE vote SET withdrawn_at = ?, withdrawn_by = ?, withdrawn_reason = ?
WHERE id = ? AND rollout = ? AND withdrawn_at IS NULL"""

_OPENED = "INSERT INTO opened (rollout, gate, wave, at) VALUES (?, ?, ?, ?) ON CONFLICT DO NOTHING"


def _gate(event: VoteCast | VoteWithdrawn | GateOpened) -> Statement:
    match event:
        case VoteCast():
            vote = event.vote
            row: Sequence[Any] = (
                *(vote.id, event.rollout, vote.gate, vote.wave, vote.digest, _actor(vote.actor), vote.yes),
                *(
                    vote.reason,
                    vote.at,
                    *map(_list, (vote.teams, vote.shown, vote.nodes)),
                    vote.more,
                    vote.until,
                ),
                vote.withdrawn_at,
            )
            text = f"vote {vote.id} was cast already, or there is no rollout {event.rollout}"
            return Statement(_VOTE, (row,), 1, text)
        case VoteWithdrawn():
            row = (event.at, _actor(event.actor), event.reason, event.vote, event.rollout)
            text = f"there is no vote {event.vote} in {event.rollout} that could be withdrawn"
            return Statement(_WITHDRAW, (row,), 1, text)
        case GateOpened():
            row = (event.rollout, event.gate, event.wave, event.at)
            text = f"gate {event.gate} of wave {event.wave!r} in {event.rollout} is open already"
            return Statement(_OPENED, (row,), 1, text)
        case _:
            assert_never(event)


# -- holds and freezes ------------------------------------------------------------

_HOLD = """
INSERT INTO hold (node, source, id, actor, reason, at, until) VALUES (?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (node, source, id) DO UPDATE
SET actor = excluded.actor, reason = excluded.reason, at = excluded.at, until = excluded.until"""

_FREEZE = "INSERT INTO freeze (id, scope, reason, by, at, until) VALUES (?, ?, ?, ?, ?, ?)"


def _hold(event: HoldTaken | HoldReleased | Frozen | Unfrozen) -> Statement:
    match event:
        case HoldTaken():
            hold = event.hold
            row: Sequence[Any] = (
                *(hold.node, hold.source, hold.id, _actor(hold.actor), hold.reason, hold.at, hold.until),
            )
            return Statement(_HOLD, (row,), 1)
        case HoldReleased():
            text = f"there is no hold {event.id} of {event.source} on {event.node}"
            sql = "DELETE FROM hold WHERE node = ? AND source = ? AND id = ?"
            return Statement(sql, ((event.node, event.source, event.id),), 1, text)
        case Frozen():
            freeze = event.freeze
            row = (freeze.id, freeze.scope, freeze.reason, freeze.by, freeze.at, freeze.until)
            return Statement(_FREEZE, (row,), 1, f"there is a freeze {freeze.id} already")
        case Unfrozen():
            text = f"there is no freeze {event.freeze}"
            return Statement("DELETE FROM freeze WHERE id = ?", ((event.freeze,),), 1, text)
        case _:
            assert_never(event)


def _actor(actor: Actor | None) -> str | None:
    return None if actor is None else canonical({"kind": actor.kind, "name": actor.name, "uid": actor.uid})


def _list(values: Iterable[str]) -> str:
    return canonical(list(values))
