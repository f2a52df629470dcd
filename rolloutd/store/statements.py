"""Which rows each event changes: events in, SQL statements out.

A statement says how many rows it must change and what to tell a person when it
changes another number; that is how two who move the same thing are told apart,
without reading first.  This module executes nothing and knows no connection.

An event carries the values that hold after it.  A phase is moved only from the
phase and attempt that the event names; a step's result is written only over its
intent; a vote, an opened gate and a withdrawal happen once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
    NodeAdvanced,
    NodeLetGo,
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
    RunsRemoved,
    SettingsChanged,
    StepRecorded,
    TargetChanged,
    TargetsJoined,
    TeamSet,
    Unfrozen,
    VoteCast,
    VoteWithdrawn,
)
from machines.rollout import Target
from machines.states import FROM_ANEW, NEW_ATTEMPT, IllegalTransition, Phase, Trigger, edge
from rolloutd.chain import canonical
from rolloutd.errors import StoreFailed
from rolloutd.store.decisions import (
    gate_moved,
    new_rollout,
    rollout_marked,
    slot_held,
    team_set,
    token_spent,
)
from rolloutd.store.entries import MAX_TEXT
from rolloutd.store.statement import Statement, actor_text, list_text

MAX_OUTPUT = 65_536
"""Characters kept of one step's output: its end, where the error stands; the run directory has the whole."""

MAX_PRIOR = 1_048_576
"""Characters of what an isolator found; what is not kept whole cannot be restored, so more is refused."""


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
            yield new_rollout(event)
            yield _new_targets(event.targets)
        case TargetsJoined() | TargetChanged():
            yield from _amend(event)
        case LookedCurrent() | NodeOrdered() | NodeAdvanced():
            yield _note(event)
        case VoteCast() | VoteWithdrawn() | GateOpened():
            yield from token_spent(event)
            yield gate_moved(event)
        case RolloutPaused() | RolloutResumed() | RolloutCancelled() | RolloutEnded() | RolloutDeleted():
            yield rollout_marked(event)
        case HoldTaken() | HoldReleased() | Frozen() | Unfrozen() | TeamSet():
            yield team_set(event) if isinstance(event, TeamSet) else slot_held(event)
        case CallRefused() | DaemonStarted() | SettingsChanged() | RunsRemoved() | NodeLetGo():
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
    trigger, begins = event.trigger, event.trigger in NEW_ATTEMPT
    least, most = event.attempt - begins, event.attempt - (trigger is Trigger.ADMITTED)
    row: Sequence[Any] = (
        *(event.target, event.outcome, event.attempt, event.rolling_back, event.isolated, event.at),
        *(event.not_before, trigger not in FROM_ANEW, trigger is Trigger.PUT_BACK, event.text),
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
            *(event.rollout, failure.id, failure.node, failure.attempt, failure.step),
            *(failure.message, failure.at),
        )
        yield Statement(_FAIL, (row,), 1, f"failure {failure.id} of {event.rollout} is known already")


def _target_row(target: Target) -> Sequence[Any]:
    failure = target.failure.id if target.failure else None
    return (
        *(target.rollout, target.node, target.team, list_text(target.pools), target.wave, target.position),
        *(target.phase, target.outcome, target.attempt, target.rolling_back, target.isolated),
        *(target.since, target.not_before, target.put_backs, target.last_text, failure, target.order),
        *(actor_text(target.order_by), target.ordered_at, target.joined, target.needs_vote_of),
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
    row = (event.team, list_text(event.pools), event.needs_vote_of, event.rollout, event.node)
    yield Statement(sql, (row,), 1, f"{event.node} is no target of {event.rollout}")


def _note(event: LookedCurrent | NodeOrdered | NodeAdvanced) -> Statement:
    if isinstance(event, NodeAdvanced):
        sql = "UPDATE target SET position = ? WHERE rollout = ? AND node = ? AND phase = 'pending'"
        place = (event.position, event.rollout, event.node)
        return Statement(sql, (place,), 1, f"{event.node} does not wait in {event.rollout}")
    if isinstance(event, LookedCurrent):
        sql = """
        UPDATE target SET maybe_current = 0, last_text = ifnull(?, last_text)
        WHERE rollout = ? AND node = ?"""
        row: Sequence[Any] = (event.text or None, event.rollout, event.node)
    else:
        sql = "UPDATE target SET order_kind = ?, order_by = ?, ordered_at = ? WHERE rollout = ? AND node = ?"
        by, at = (actor_text(event.actor), event.at) if event.order else (None, 0.0)
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
        *(record.rollout, record.node, record.attempt, record.step, record.action, record.number),
        *(record.state, record.began_at, record.at, record.stage, record.handle, prior),
        *(record.text[:MAX_TEXT], record.output[-MAX_OUTPUT:], record.visible_to),
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
            list_text(node.sources),
            canonical(node.labels),
            _connection(event, node.name),
        )
        for node in event.nodes
    ]
    yield Statement(_SEEN, rows)


def _connection(event: NodesSeen, name: str) -> str | None:
    connection = event.connections.get(name)
    return None if connection is None else canonical(connection)
