"""What each event writes: the one place that says what an event does.

The facts in memory and every store take the same writes, so they cannot drift apart.  A reader gives the rows
that an event changes; one that is not as the event expects is an UnexpectedRow, and nothing is written.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, TypeVar, assert_never

from machines.model import events
from machines.model.configuration import NodeConfiguration
from machines.model.node import Node
from machines.model.plan import Plan
from machines.model.preparation import Preparation
from machines.model.reboots import RebootApproval, RebootApprovalWithdrawn, RebootsApproved
from machines.model.rollout import (
    DAEMON,
    Drift,
    GateOpening,
    Hold,
    Interruption,
    NodeOrder,
    Rollout,
    Target,
    Verdict,
    Vote,
)
from machines.model.rows import (
    ConfigurationDocument,
    Delete,
    Expected,
    NodeConnection,
    NodeRemoval,
    PreparationSnapshot,
    RolloutRecords,
    RolloutRow,
    RowReader,
    UsedToken,
    Write,
)
from machines.model.step_record import StepRecord, StepState
from machines.model.train import Train, TrainRemoved, TrainStored
from machines.model.windows import Freeze
from machines.states import NEW_ATTEMPT, RESETS_BACKOFF, IllegalTransition, Phase, Trigger, next_phase

PASSED = "the same content has passed"
"""Why a verdict is cleared without a person."""

RowKind = TypeVar("RowKind")


class UnexpectedRow(ValueError):
    """A row is not what the event expects, because another change came first."""


def writes(event: events.Event, rows: RowReader, at: float) -> tuple[Write | Delete, ...]:
    """Return what an event writes that is committed at `at`.

    `rows` has the rows before the event.  Raises IllegalTransition for a transition that is not in the table,
    UnexpectedRow.
    """
    return tuple(_writes(event, rows, at))


def _writes(event: events.Event, rows: RowReader, at: float) -> Iterator[Write | Delete]:  # noqa: C901  # a case for each event
    match event:
        case events.PhaseMoved():
            yield from _transition_writes(event, rows)
        case events.StepRecorded():
            yield from _step_writes(event, rows)
        case (
            events.DeadlineExtended()
            | events.ChangeNeeded()
            | events.SoakRestarted()
            | events.DriftRecorded()
            | events.NodeOrdered()
            | events.NodeAdvanced()
        ):
            yield _target_write(event.rollout, event.node, event, rows)
        case events.PreparationRecorded(preparation=row):
            yield from _preparation_writes(row, rows)
        case events.VoteCast(vote=vote):
            _require(rows, RolloutRow, event.rollout)
            yield from _token_writes(event.token, vote.at)
            yield Write(vote, owner=event.rollout)
        case events.VoteWithdrawn():
            yield from _token_writes(event.token, event.at)
            cast = _require(rows, Vote, event.rollout, event.vote)
            _expect(cast.withdrawn_at is None, f"vote {event.vote} was withdrawn already")
            yield Write(event, Expected.PRESENT, event.rollout)
        case events.GateOpened():
            _require(rows, RolloutRow, event.rollout)
            yield Write(GateOpening(event.gate, event.wave, event.at), owner=event.rollout)
        case events.PilotEvidenceAttached():
            # A retried pilot brings new evidence in the place of the old.
            yield Write(event.evidence, Expected.ANY, event.rollout)
        case (
            events.RolloutPaused()
            | events.RolloutResumed()
            | events.RolloutCancelled()
            | events.RolloutEnded()
            | events.RolloutDeleted()
        ):
            rollout = _require(rows, RolloutRow, event.rollout)
            yield Write(_apply_to_rollout(rollout, event), Expected.PRESENT, event.rollout)
        case events.RolloutOpened():
            # The submit itself is the row of the rollout; a RolloutRow has what changes of it later.
            yield Write(event)
            yield from map(Write, event.targets)
        case events.TargetsJoined():
            yield _amendment(event.rollout, rows)
            yield from map(Write, event.targets)
        case events.TargetChanged():
            yield _amendment(event.rollout, rows)
            yield _target_write(event.rollout, event.node, event, rows)
        case events.ArtifactsBuilt():
            yield Write(event, owner=event.rollout)
            yield _amendment(event.rollout, rows)
        case events.NodesDiscovered():
            for node in event.nodes:
                # The event has whole nodes, merged from all sources, so it replaces what was known.
                yield Write(node, Expected.ANY)
                if node.name in event.connections:
                    connection = NodeConnection(node.name, event.connections[node.name])
                    yield Write(connection, Expected.PRESENT)
        case events.NodesRemoved():
            # A node that is gone already is no conflict: the inventory says what is, not what changed.
            known = filter(None, (rows.get(Node, name) for name in event.names))
            yield from (Write(NodeRemoval(node.name, at), Expected.PRESENT) for node in known)
        case events.HoldTaken():
            # Its owner may take a hold again, to change its end or its reason.
            yield Write(event.hold, Expected.ANY)
        case events.HoldReleased():
            yield Delete(_require(rows, Hold, event.node, event.source, event.id))
        case events.FreezeStarted():
            yield Write(event.freeze)
        case events.FreezeLifted():
            yield Delete(_require(rows, Freeze, event.freeze))
        case TrainStored(train=train):
            yield Write(train, Expected.ANY)
        case TrainRemoved():
            yield Delete(_require(rows, Train, event.train))
        case RebootsApproved():
            # A person may approve again, to change its end or its reason.
            yield Write(event.approval, Expected.ANY)
        case RebootApprovalWithdrawn():
            yield Delete(_require(rows, RebootApproval, event.approval))
        case events.TeamRulesChanged():
            yield Write(event, Expected.ANY)
        case events.ConfigurationPruned():
            _expect(rows.get(Node, event.node) is None, f"the inventory has {event.node} again")
            yield Delete(NodeConfiguration(), event.node)
        case events.RecordsPruned():
            closed = rows.get(RolloutRow, event.rollout)
            if closed is not None:  # removed already: the entry before was written, and its answer was lost
                _expect(closed.closed or closed.deleted_at is not None, f"{event.rollout} is not closed")
                yield Delete(RolloutRecords(event.rollout, event.nodes))
        case events.VerdictRecorded():
            yield Write(event.verdict)
        case events.VerdictCleared():
            _require(rows, Verdict, event.verdict)
            yield Write(event, Expected.PRESENT)
        case _ if isinstance(event, events.RecordOnlyEvent | events.DaemonStarted | events.MismatchSettled):
            # The epoch is of the store's term, and a settled mismatch is a row in the store's own terms.
            return
        case _:
            assert_never(event)


def _transition_writes(event: events.PhaseMoved, rows: RowReader) -> Iterator[Write]:
    target = _require(rows, Target, event.rollout, event.node)
    after = apply_to_target(target, event)
    # The failure goes first, because the row of the target refers to it.
    if event.failure is not None:
        yield Write(event.failure, owner=event.rollout)
    yield Write(after, Expected.PRESENT)
    records = rows.get(NodeConfiguration, event.node)
    before = records or NodeConfiguration()
    if (changed := before.after(target, event)) != before:
        yield Write(changed, _expected(records), event.node)
    # What has passed here disproves the verdict, so no person needs to clear it.
    if event.trigger is Trigger.VERIFIED:
        for verdict in rows.verdicts_on(event.node):
            if verdict.content == target.content:
                cleared = events.VerdictCleared(verdict.id, DAEMON, PASSED, event.at)
                yield Write(cleared, Expected.PRESENT)


def _target_write(rollout: str, node: str, event: events.TargetEvent, rows: RowReader) -> Write:
    target = _require(rows, Target, rollout, node)
    return Write(apply_to_target(target, event), Expected.PRESENT)


def _step_writes(event: events.StepRecorded, rows: RowReader) -> Iterator[Write]:
    record = event.record.trimmed()
    place = (record.rollout, record.node)
    before = rows.get(StepRecord, *place, record.attempt, record.step, record.action, record.number)
    # That the step has a target is a reference between rows, which stores check without reading the target.
    yield Write(record if before is None else _repeated_step(before, record), _expected(before))
    if event.isolated is not None or event.content:
        yield _target_write(*place, event, rows)
    if event.document is not None:
        yield Write(ConfigurationDocument(event.content, event.document), Expected.ANY)


def _repeated_step(before: StepRecord, record: StepRecord) -> StepRecord:
    """Return the record after an intent, or after the same result.

    A caller that missed the answer repeats its result; another result is unexpected.  The start stays that of
    the first intent, and a record without `prior` keeps what was found.
    """
    prior = before.prior if record.prior is None else record.prior
    result = (record.state, record.handle, record.text, record.output, prior)
    is_same = result == (before.state, before.handle, before.text, before.output, before.prior)
    _expect(
        before.state is StepState.INTENDED or is_same,
        f"step {record.step} ({record.action}, number {record.number}) of {record.node} in {record.rollout},"
        f" attempt {record.attempt}, has ended already and not as {record.state}",
    )
    if (record.began_at, record.prior) == (before.began_at, prior):
        return record
    return replace(record, began_at=before.began_at, prior=prior)


def _preparation_writes(row: Preparation, rows: RowReader) -> Iterator[Write | Delete]:
    before = rows.get(Preparation, row.rollout, row.node, row.stage)
    _expect(
        before is None or row.attempt >= before.attempt,
        f"stage {row.stage} of {row.node} in {row.rollout} has a later attempt than {row.attempt}",
    )
    yield Write(row, _expected(before))
    key = (row.rollout, row.node, row.stage)
    if row.before is not None:
        yield Write(PreparationSnapshot(*key, row.before), Expected.ANY)
    # The comparison is over, also with a disturbance; the snapshot is large, so it is not kept.
    elif before is not None:
        yield Delete(PreparationSnapshot(*key))


def _expected(before: object | None) -> Expected:
    return Expected.ABSENT if before is None else Expected.PRESENT


def _token_writes(token: str, at: float) -> Iterator[Write]:
    if token:
        yield Write(UsedToken(token, at))


def _amendment(rollout: str, rows: RowReader) -> Write:
    row = _require(rows, RolloutRow, rollout)
    return Write(replace(row, amendments=row.amendments + 1), Expected.PRESENT, rollout)


def _require(rows: RowReader, kind: type[RowKind], *key: Any) -> RowKind:
    row = rows.get(kind, *key)
    if row is None:
        noun = kind.__name__.removesuffix("Row").lower()
        raise UnexpectedRow(f"there is no {noun} {'/'.join(map(str, key))}")
    return row


def _expect(holds: bool, problem: str) -> None:
    if not holds:
        raise UnexpectedRow(problem)


def rollout_of(event: events.Event) -> str | None:
    if isinstance(event, events.StepRecorded):
        return event.record.rollout
    if isinstance(event, events.PreparationRecorded):
        return event.preparation.rollout
    rollout: str | None = getattr(event, "rollout", None)
    return rollout


def count_rows(committed: Iterable[events.Event]) -> int:
    """Return about how many rows the events write."""
    return sum(map(_rows_of, committed))


def _rows_of(event: events.Event) -> int:
    match event:
        case events.RolloutOpened() | events.TargetsJoined():
            return len(event.targets)
        case events.NodesDiscovered():
            return len(event.nodes)
        case events.NodesRemoved():
            return len(event.names)
        case _:
            return 1


def new_rollout(event: events.RolloutOpened, plan: Plan) -> Rollout:
    """Return the rollout of a submit; `plan` is its compiled content."""
    return Rollout(
        id=event.rollout,
        plan=plan,
        digest=event.digest,
        submitted_by=event.submitted_by,
        submitted_at=event.at,
        approved_count=len(event.targets),
        supersedes=event.supersedes,
        overrides=event.overrides,
        source=event.source,
    )


def apply_to_target(target: Target, event: events.TargetEvent) -> Target:
    """Return the target after the event; raises UnexpectedRow when it is not in the phase of the event."""
    match event:
        case events.PhaseMoved():
            return _apply_transition(target, event)
        case events.StepRecorded():
            isolated = target.isolated if event.isolated is None else event.isolated
            return replace(target, isolated=isolated, content=event.content or target.content)
        case events.DeadlineExtended():
            return replace(target, downtime_s=event.downtime_s)
        case events.ChangeNeeded():
            return replace(target, maybe_current=False, last_text=event.text or target.last_text)
        case events.SoakRestarted() | events.DriftRecorded():
            return _change_done_target(target, event)
        case events.NodeOrdered(order=None):
            return replace(target, order=None, order_by=None, ordered_at=0.0)
        case events.NodeOrdered():
            return replace(target, order=event.order, order_by=event.actor, ordered_at=event.at)
        case events.NodeAdvanced():
            _expect_phase(target, Phase.PENDING)
            return replace(target, position=event.position)
        case events.TargetChanged():
            return replace(target, team=event.team, pools=event.pools, needs_vote_of=event.needs_vote_of)
        case _:
            assert_never(event)


def _change_done_target(target: Target, event: events.SoakRestarted | events.DriftRecorded) -> Target:
    _expect_phase(target, Phase.DONE)
    if isinstance(event, events.SoakRestarted):
        return replace(target, since=event.at)
    since = event.at if target.drift is None else target.drift.since
    return replace(target, drift=Drift(since, event.tasks) if event.tasks else None)


def _apply_to_rollout(
    row: RolloutRow,
    event: events.RolloutPaused
    | events.RolloutResumed
    | events.RolloutCancelled
    | events.RolloutEnded
    | events.RolloutDeleted,
) -> RolloutRow:
    # A command is decided before it is written, so another one may have come between.
    is_open, name = not row.closed and row.deleted_at is None, row.id
    match event:
        case events.RolloutPaused():
            _expect(is_open and row.paused is None, f"{name} is paused by a person already or closed")
            return replace(row, paused=Interruption(event.actor, event.reason, event.at))
        case events.RolloutResumed():
            _expect(row.paused is not None, f"{name} is not paused by a person")
            return replace(row, paused=None)
        case events.RolloutCancelled():
            _expect(is_open, f"{name} is closed already")
            return replace(row, cancelled=Interruption(event.actor, event.reason, event.at))
        case events.RolloutEnded():
            _expect(row.ended_at is None and row.deleted_at is None, f"{name} has ended already")
            return replace(row, ended_at=event.at)
        case events.RolloutDeleted():
            _expect(row.closed and row.deleted_at is None, f"{name} is not closed, or deleted already")
            return replace(row, deleted_at=event.at)
        case _:
            assert_never(event)


def _expect_phase(target: Target, phase: Phase) -> None:
    _expect(target.phase is phase, f"{target.node} of {target.rollout} is {target.phase}, not {phase}")


def validate_edge(event: events.PhaseMoved) -> None:
    """Raise IllegalTransition unless the table has this transition, for a target in any state."""
    target_phase = next_phase(event.trigger, event.source, event.outcome)
    if target_phase is not event.target:
        raise IllegalTransition(
            f"{event.trigger} leads from {event.source} to {target_phase}, not {event.target}"
        )
    if (event.failure is None) == (event.target is Phase.FAILED):
        raise IllegalTransition(
            f"{event.node}: every transition to failed has a failure, and no other has one"
        )


def validate_transition(target: Target, event: events.PhaseMoved) -> None:
    """Raise IllegalTransition unless the table has this transition, UnexpectedRow for another target."""
    validate_edge(event)
    trigger = event.trigger
    _expect_phase(target, event.source)
    # A rollback may repeat the attempt that failed or begin the next one.
    lowest = target.attempt + (trigger is Trigger.ADMITTED)
    highest = target.attempt + (trigger in NEW_ATTEMPT)
    _expect(
        lowest <= event.attempt <= highest,
        f"{target.node} of {target.rollout} is in attempt {target.attempt};"
        f" {trigger} cannot follow in attempt {event.attempt}",
    )


def _apply_transition(target: Target, event: events.PhaseMoved) -> Target:
    validate_transition(target, event)
    aborted_isolations = 0 if _resets_backoff(target, event.trigger) else target.aborted_isolations
    if target.order is NodeOrder.ROLLBACK and not _keeps_rollback_order(event):
        target = replace(target, order=None, order_by=None, ordered_at=0.0)
    return replace(
        target,
        phase=event.target,
        outcome=event.outcome,
        attempt=event.attempt,
        rolling_back=event.rolling_back,
        isolated=target.isolated if event.isolated is None else event.isolated,
        since=event.at,
        not_before=event.not_before,
        aborted_isolations=aborted_isolations + (event.trigger is Trigger.ISOLATION_ABORTED),
        last_text=event.text,
        failure=event.failure,
        admitted_at=event.at if event.trigger in NEW_ATTEMPT else target.admitted_at,
        # Each phase has a deadline of its own, and check mode has to find a drift again.
        downtime_s=0.0,
        drift=None,
        # The new attempt has given the node nothing yet: its failure must not blame earlier content.
        content="" if event.trigger in NEW_ATTEMPT else target.content,
        # An isolation that is aborted has changed nothing: the next attempt may need an outage of its own.
        joined_outage=event.joins_outage
        or (target.joined_outage and event.trigger is not Trigger.ISOLATION_ABORTED),
    )


def _resets_backoff(target: Target, trigger: Trigger) -> bool:
    # A changed node with a backoff has had the isolation of its rollback aborted.
    is_again = target.phase is Phase.DONE and target.not_before > 0
    return trigger in RESETS_BACKOFF and not is_again


def _keeps_rollback_order(event: events.PhaseMoved) -> bool:
    """Return whether the rollback may have to begin again: it is being isolated, or that was aborted."""
    is_aborted = event.trigger is Trigger.ISOLATION_ABORTED and event.target is Phase.DONE
    return is_aborted or event.trigger is Trigger.ROLLBACK_ORDERED
