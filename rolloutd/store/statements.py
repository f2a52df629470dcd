"""SQL statements for each event: events in, statements out.

A statement says how many rows it must change, and the conflict when it changes another number: so a
lost race for a row is detected without a read.  This file executes nothing and knows no connection.

What an event does to a target is said once, in machines/facts/apply.py: the writer reads the row, applies the
event and writes the row, in one transaction (TargetChange).  A step's result is written only over its intent;
a vote, an opened gate and a withdrawal happen once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any, assert_never

from machines.facts.apply import validate_edge
from machines.model.configuration import NodeConfiguration
from machines.model.events import (
    ArtifactsBuilt,
    ChangeNeeded,
    DaemonStarted,
    DeadlineExtended,
    DriftRecorded,
    Event,
    FreezeLifted,
    FreezeStarted,
    GateOpened,
    HoldReleased,
    HoldTaken,
    MismatchSettled,
    NodeAdvanced,
    NodeOrdered,
    NodesDiscovered,
    NodesRemoved,
    PhaseMoved,
    PilotEvidenceAttached,
    PreparationRecorded,
    RecordOnlyEvent,
    RolloutCancelled,
    RolloutDeleted,
    RolloutEnded,
    RolloutOpened,
    RolloutPaused,
    RolloutResumed,
    SoakRestarted,
    StepRecorded,
    TargetChanged,
    TargetsJoined,
    TeamRulesChanged,
    VerdictCleared,
    VerdictRecorded,
    VoteCast,
    VoteWithdrawn,
)
from machines.model.rollout import Target
from machines.states import Trigger
from rolloutd.audit_chain import canonical_json
from rolloutd.errors import StoreFailed
from rolloutd.ports import SourceAnswer
from rolloutd.store.audit_entries import MAX_STEP_TEXT_CHARS
from rolloutd.store.audited_tables import settle_row
from rolloutd.store.preparations import preparation_statements
from rolloutd.store.rollout_statements import (
    clear_passed_verdicts,
    insert_rollout,
    mark_token_used,
    update_gate,
    update_hold_or_freeze,
    update_rollout_state,
    update_verdicts,
    upsert_pilot_evidence,
    upsert_team_rules,
)
from rolloutd.store.sql_statement import Statement, TargetChange, encode_actor, encode_conflicts, encode_list

MAX_OUTPUT_CHARS = 65_536
"""Characters kept of a step's output: its end, which has the error; the run directory has all of it."""

MAX_PRIOR_CHARS = 1_048_576
"""Characters of what an isolator found; a cut one could not be restored, so a larger one is refused."""


def build_statements(event: Event, at: float) -> Iterator[Statement | TargetChange]:  # noqa: C901  # a case for each event
    """Yield the statements of an event that is committed at `at`, without its audit entry.

    Raises IllegalTransition for a move that is not in the table, ValueError or TypeError for a value that has
    no JSON form, StoreFailed for one too large.
    """
    match event:
        case PhaseMoved():
            yield from _transition_statements(event)
        case StepRecorded():
            yield from _step_statements(event)
        case NodesDiscovered() | NodesRemoved():
            yield from _node_statements(event, at)
        case RolloutOpened():
            yield insert_rollout(event)
            yield _insert_targets(event.targets)
        case TargetsJoined() | TargetChanged():
            yield from _membership_statements(event)
        case PreparationRecorded() | ArtifactsBuilt():
            yield from preparation_statements(event)
        case (
            DeadlineExtended()
            | ChangeNeeded()
            | DriftRecorded()
            | SoakRestarted()
            | NodeOrdered()
            | NodeAdvanced()
        ):
            yield TargetChange(event.rollout, event.node, event)
        case VoteCast() | VoteWithdrawn() | GateOpened():
            yield from mark_token_used(event)
            yield update_gate(event)
        case PilotEvidenceAttached():
            yield upsert_pilot_evidence(event)
        case RolloutPaused() | RolloutResumed() | RolloutCancelled() | RolloutEnded() | RolloutDeleted():
            yield update_rollout_state(event)
        case HoldTaken() | HoldReleased() | FreezeStarted() | FreezeLifted() | TeamRulesChanged():
            yield (
                upsert_team_rules(event)
                if isinstance(event, TeamRulesChanged)
                else update_hold_or_freeze(event)
            )
        case VerdictRecorded() | VerdictCleared():
            yield update_verdicts(event)
        case MismatchSettled():
            yield from settle_row(event)
        case _ if isinstance(event, DaemonStarted | RecordOnlyEvent):
            return
        case _:
            assert_never(event)


# -- nodes in rollouts ----------------------------------------------------------

_INSERT_FAILURE = """
INSERT INTO failure (rollout, id, node, attempt, step, message, at, code) VALUES (?, ?, ?, ?, ?, ?, ?, ?)"""

_TARGET_COLUMNS = (
    *("rollout", "node", "team", "pools", "wave", "position", "phase", "outcome", "attempt", "rolling_back"),
    *(
        "isolated",
        "since",
        "not_before",
        "aborted_isolations",
        "last_text",
        "failure",
        "order_kind",
        "order_by",
    ),
    *("ordered_at", "joined", "needs_vote_of", "maybe_current", "admitted_at", "downtime_s"),
    *("drift_since", "drift_tasks", "content"),
)

# The values of both statements are those of _encode_target(), which begin with the key.
_PLACES = ", ".join("?" * len(_TARGET_COLUMNS))
_ASSIGNMENTS = ", ".join(f"{name} = ?{number}" for number, name in enumerate(_TARGET_COLUMNS[2:], 3))
_INSERT_TARGET = f"INSERT INTO target ({', '.join(_TARGET_COLUMNS)}) VALUES ({_PLACES})"  # noqa: S608  # constants
_UPDATE_TARGET = f"UPDATE target SET {_ASSIGNMENTS} WHERE rollout = ?1 AND node = ?2"  # noqa: S608  # constants

_COUNT_AMENDMENT = "UPDATE rollout SET amendments = amendments + 1 WHERE id = ?"


def _transition_statements(event: PhaseMoved) -> Iterator[Statement | TargetChange]:
    validate_edge(event)
    yield TargetChange(event.rollout, event.node, event)
    if event.trigger is Trigger.VERIFIED:
        yield clear_passed_verdicts(event)
    failure = event.failure
    if failure is not None:
        row = (
            *(event.rollout, failure.id, failure.node, failure.attempt, failure.step),
            *(failure.message, failure.at, failure.code),
        )
        yield Statement(
            _INSERT_FAILURE, (row,), 1, f"failure {failure.id} of {event.rollout} is known already"
        )


def update_target(target: Target) -> Statement:
    return Statement(_UPDATE_TARGET, (_encode_target(target),), 1)


_UPSERT_CONFIGURATION_RECORDS = """
INSERT INTO node_configuration (node, current, previous, invalid) VALUES (?, ?, ?, ?)
ON CONFLICT (node) DO UPDATE
SET current = excluded.current, previous = excluded.previous, invalid = excluded.invalid"""


def upsert_configuration_records(node: str, records: NodeConfiguration) -> Statement:
    """Return the statement that writes the three records of a node."""
    texts = (
        None if record is None else canonical_json(asdict(record))
        for record in (records.current, records.previous, records.invalid)
    )
    return Statement(_UPSERT_CONFIGURATION_RECORDS, ((node, *texts),), 1)


def _encode_target(target: Target) -> Sequence[Any]:
    failure = target.failure.id if target.failure else None
    return (
        *(target.rollout, target.node, target.team, encode_list(target.pools), target.wave, target.position),
        *(target.phase, target.outcome, target.attempt, target.rolling_back, target.isolated),
        *(
            target.since,
            target.not_before,
            target.aborted_isolations,
            target.last_text,
            failure,
            target.order,
        ),
        *(encode_actor(target.order_by), target.ordered_at, target.joined, target.needs_vote_of),
        *(target.maybe_current, target.admitted_at, target.downtime_s),
        *((None, "[]") if target.drift is None else (target.drift.since, encode_list(target.drift.tasks))),
        target.content,
    )


def _insert_targets(targets: Sequence[Target]) -> Statement:
    rows = [_encode_target(target) for target in targets]
    return Statement(_INSERT_TARGET, rows, len(rows), "a node cannot be a target of the same rollout twice")


def _membership_statements(event: TargetsJoined | TargetChanged) -> Iterator[Statement | TargetChange]:
    yield Statement(_COUNT_AMENDMENT, ((event.rollout,),), 1, f"there is no rollout {event.rollout}")
    if isinstance(event, TargetsJoined):
        yield _insert_targets(event.targets)
    else:
        yield TargetChange(event.rollout, event.node, event)


# -- steps ------------------------------------------------------------------------

# The same result may be written twice, because a caller that missed the answer repeats it; a different result
# is a conflict.  began_at stays that of the first intent, and a later record without `prior` keeps the stored
# one.
_UPSERT_STEP = """
INSERT INTO step (rollout, node, attempt, step, action, number, state, began_at, at, stage, handle, prior,
                  text, output, visible_to, code)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (rollout, node, ifnull(attempt, -1), step, action, number) DO UPDATE
SET state = excluded.state, at = excluded.at, stage = excluded.stage, handle = excluded.handle,
    prior = iif(excluded.prior = 'null', prior, excluded.prior), text = excluded.text,
    output = excluded.output, visible_to = excluded.visible_to, code = excluded.code
WHERE step.state = 'intended'
   OR (step.state = excluded.state AND step.handle = excluded.handle AND step.text = excluded.text
       AND step.output = excluded.output AND excluded.prior IN ('null', step.prior))"""


_INSERT_CONFIGURATION = "INSERT INTO configuration (content, document) VALUES (?, ?) ON CONFLICT DO NOTHING"


def _step_statements(event: StepRecorded) -> Iterator[Statement | TargetChange]:
    record = event.record
    prior = canonical_json(record.prior)
    if len(prior) > MAX_PRIOR_CHARS:
        raise StoreFailed(
            f"what {record.step} found on {record.node} has {len(prior)} characters; more than "
            f"{MAX_PRIOR_CHARS}"
            " are not kept, and what is not kept could not be restored: the step was not begun"
        )
    row = (
        *(record.rollout, record.node, record.attempt, record.step, record.action, record.number),
        *(record.state, record.began_at, record.at, record.stage, record.handle, prior),
        *(record.text[:MAX_STEP_TEXT_CHARS], record.output[-MAX_OUTPUT_CHARS:], record.visible_to),
        record.code,
    )
    yield Statement(
        _UPSERT_STEP,
        (row,),
        1,
        f"step {record.step} ({record.action}, number {record.number}) of {record.node} in {record.rollout},"
        f" attempt {record.attempt}, has ended already and not as {record.state}",
    )
    if event.isolated is not None or event.content:
        yield TargetChange(record.rollout, record.node, event)
    if event.document is not None:
        yield Statement(_INSERT_CONFIGURATION, ((event.content, canonical_json(event.document)),))


# -- the inventory ----------------------------------------------------------------

_UPSERT_NODE = """
INSERT INTO node (name, kind, sources, labels, connection, conflicts, identity)
VALUES (?, ?, ?, ?, ifnull(?, '{}'), ?, ?)
ON CONFLICT (name) DO UPDATE
SET kind = excluded.kind, sources = excluded.sources, labels = excluded.labels, gone_at = NULL,
    connection = ifnull(?5, connection), conflicts = excluded.conflicts, identity = excluded.identity"""

_MARK_NODE_GONE = "UPDATE node SET gone_at = ? WHERE name = ? AND gone_at IS NULL"


def _node_statements(event: NodesDiscovered | NodesRemoved, at: float) -> Iterator[Statement]:
    if isinstance(event, NodesRemoved):
        yield Statement(_MARK_NODE_GONE, [(at, name) for name in event.names])
        return
    rows = [
        (
            node.name,
            node.kind,
            encode_list(node.sources),
            canonical_json(node.labels),
            # NULL keeps the stored connection: this refresh did not report one.
            canonical_json(event.connections[node.name]) if node.name in event.connections else None,
            encode_conflicts(node.conflicts),
            canonical_json(node.identity),
        )
        for node in event.nodes
    ]
    yield Statement(_UPSERT_NODE, rows)


_UPSERT_SOURCE = """
INSERT INTO source (name, answered_at) VALUES (?, ?)
ON CONFLICT (name) DO UPDATE SET answered_at = excluded.answered_at"""

_UPSERT_SOURCE_NODE = """
INSERT INTO source_node (source, name, kind, labels, connection) VALUES (?, ?, ?, ?, ?)
ON CONFLICT (source, name) DO UPDATE
SET kind = excluded.kind, labels = excluded.labels, connection = excluded.connection"""

_DELETE_SOURCE_NODE = "DELETE FROM source_node WHERE source = ? AND name = ?"


def build_answer_statements(answer: SourceAnswer, removed: Sequence[str]) -> Iterator[Statement]:
    """Yield the statements that store the new and changed nodes of a source's answer."""
    yield Statement(_UPSERT_SOURCE, ((answer.source, answer.answered_at),))
    rows = [
        (answer.source, node.name, node.kind, canonical_json(node.labels), canonical_json(node.connection))
        for node in answer.nodes
    ]
    yield Statement(_UPSERT_SOURCE_NODE, rows)
    yield Statement(_DELETE_SOURCE_NODE, [(answer.source, name) for name in removed])
