"""The Store port in memory, for tests of the daemon.

It passes the same suite as SQLite.  A `Memory` is its disk: the next store that
opens it takes over the term and finds all commits, as after a restart.  Its rows
are the core's own values; machines.facts.apply applies the events.

Longer than 500 lines: one store, one file.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, assert_never

from machines.facts import apply
from machines.facts.fleet_facts import FactsSnapshot
from machines.facts.preparations import preparations_of
from machines.model.configuration import NodeConfiguration
from machines.model.events import (
    Actor,
    ArtifactsBuilt,
    ChangeNeeded,
    DeadlineExtended,
    DriftRecorded,
    Event,
    GateOpened,
    NodeAdvanced,
    NodeOrdered,
    PhaseMoved,
    PilotEvidenceAttached,
    PreparationRecorded,
    RolloutCancelled,
    RolloutDeleted,
    RolloutEnded,
    RolloutOpened,
    RolloutPaused,
    RolloutResumed,
    StepAction,
    StepRecord,
    StepRecorded,
    StepState,
    TargetChanged,
    TargetEvent,
    TargetsJoined,
    VerdictCleared,
    VerdictRecorded,
    VoteCast,
    VoteWithdrawn,
)
from machines.model.plan import Plan
from machines.model.preparation import Preparation, PreparationState
from machines.model.rollout import Rollout, Target
from machines.model.verdict import Verdict
from machines.states import IN_FLIGHT_PHASES, IllegalTransition, Outcome, Phase, Trigger
from rolloutd.audit_chain import GENESIS_HASH, ChainVerification, hash_entry
from rolloutd.errors import Conflict, NotFound, StoreFailed, TokenAlreadyUsed
from rolloutd.ports import (
    JSON,
    AuditEntry,
    AuditReport,
    ClosedRollout,
    NodeConfigurations,
    RolloutRecord,
    SourceAnswer,
)
from rolloutd.store.audit_entries import add_sequence_number, draft_entries, rollout_of
from tests.contracts.fakes.memory_state import MemoryState, apply_to_fleet, require

Compile = Callable[[Mapping[str, Any]], Plan]


class MemoryStore:
    """A store without a file."""

    def __init__(
        self,
        *,
        compile: Compile,  # noqa: A002  # the word of open_store
        committed: Callable[[tuple[AuditEntry, ...]], object] | None = None,
        memory: MemoryState | None = None,
    ) -> None:
        self.memory = memory or MemoryState()
        self.memory.epoch += 1
        self._epoch = self.memory.epoch
        self._compile = compile
        self._committed = committed
        self._closed = False

    async def commit(
        self, events: Sequence[Event], *, actor: Actor, cause: str, at: float
    ) -> tuple[AuditEntry, ...]:
        if self._closed or self._epoch != self.memory.epoch:
            raise StoreFailed("nothing was written: the store is closed, or this tenure has ended")
        draft = self.memory.copy()
        try:
            for event in events:
                self._apply(draft, event)
            entries = self._append_entries(draft, events, actor, cause, at)
        except IllegalTransition as error:
            raise StoreFailed(f"nothing was written: {error}") from error
        for name in MemoryState.__slots__:
            setattr(self.memory, name, getattr(draft, name))
        if self._committed is not None and entries:
            asyncio.get_running_loop().call_soon(self._committed, entries)
        return entries

    async def load_snapshot(self) -> FactsSnapshot:
        memory = self.memory
        live = {name: rollout for name, rollout in memory.rollouts.items() if self._is_live(rollout)}
        return FactsSnapshot(
            nodes=tuple(sorted(memory.nodes.values(), key=lambda node: node.name)),
            rollouts=tuple(live.values()),
            targets=tuple(target for name in live for target in self._targets(name)),
            holds=tuple(memory.holds.values()),
            freezes=tuple(memory.freezes.values()),
            team_rules=tuple(sorted(memory.team_rules.values(), key=lambda each: each.team)),
            preparations=tuple(row for row in memory.preparations.values() if row.rollout in live),
            epoch=memory.epoch,
        )

    async def read_audit(
        self,
        *,
        after: int = 0,
        before: int | None = None,
        limit: int = 1000,
        rollout: str | None = None,
        node: str | None = None,
        event: str | None = None,
    ) -> Sequence[AuditEntry]:
        wanted = {"rollout": rollout, "node": node, "event": event}
        wanted = {key: value for key, value in wanted.items() if value is not None}
        found = [
            entry
            for entry in self.memory.entries[after:]
            if before is None or entry.seq < before
            if not wanted or wanted.items() <= json.loads(entry.text).items()
        ]
        return tuple(found[:limit] if before is None else found[-limit:])

    async def latest_audit_entry(self) -> AuditEntry | None:
        return self.memory.entries[-1] if self.memory.entries else None

    async def verify_audit(self, head: str | None = None) -> AuditReport:
        return AuditReport(self._verify_chain(head))

    def _verify_chain(self, head: str | None) -> ChainVerification:
        previous, noted = GENESIS_HASH, head in (None, GENESIS_HASH)
        for number, entry in enumerate(self.memory.entries, 1):
            if entry.seq != number or hash_entry(previous, entry.text) != entry.hash:
                return ChainVerification(False, number - 1, previous, number, f"entry {number} was altered")
            previous = entry.hash
            noted = noted or previous == head
        count = len(self.memory.entries)
        if not noted:
            return ChainVerification(
                False, count, previous, count + 1, f"none of the {count} entries has the hash"
            )
        entries = "1 entry" if count == 1 else f"{count} entries"
        return ChainVerification(
            True, count, previous, None, f"{entries}, each one hashed over the one before"
        )

    async def is_token_used(self, token: str) -> bool:
        return token in self.memory.used_tokens

    async def load_steps(self, rollout: str, node: str, attempt: int | None = None) -> Sequence[StepRecord]:
        return tuple(
            record
            for record in self.memory.steps.values()
            if (record.rollout, record.node) == (rollout, node) and attempt in (None, record.attempt)
        )

    async def load_connections(self) -> Mapping[str, Mapping[str, JSON]]:
        return dict(self.memory.connections)

    async def save_source_answer(self, answer: SourceAnswer, removed: Sequence[str] = ()) -> None:
        before = self.memory.answers.get(answer.source)
        nodes = {node.name: node for node in (before.nodes if before else ())}
        nodes |= {node.name: node for node in answer.nodes}
        kept = tuple(nodes[name] for name in sorted(nodes) if name not in removed)
        self.memory.answers[answer.source] = replace(answer, nodes=kept)

    async def load_source_answers(self) -> Sequence[SourceAnswer]:
        return tuple(self.memory.answers[name] for name in sorted(self.memory.answers))

    async def load_plan(self, rollout: str) -> tuple[Mapping[str, JSON], Mapping[str, str]]:
        await self.load_rollout(rollout)
        return self.memory.opened_events[rollout].content, self.memory.opened_events[rollout].source

    async def load_rollout(self, rollout: str) -> Rollout:
        if rollout not in self.memory.rollouts or rollout in self.memory.deleted:
            raise NotFound(f"there is no rollout {rollout}")
        return self.memory.rollouts[rollout]

    async def load_preparations(self, rollout: str) -> Sequence[Preparation]:
        return tuple(row for row in self.memory.preparations.values() if row.rollout == rollout)

    async def load_targets(self, rollout: str) -> Sequence[Target]:
        return self._targets(rollout)

    async def list_closed_rollouts(self, limit: int = 100) -> Sequence[ClosedRollout]:
        closed = [
            rollout
            for rollout in reversed(self.memory.rollouts.values())
            if rollout.id not in self.memory.deleted and not self._is_live(rollout)
        ]
        return tuple(
            ClosedRollout(
                rollout.id,
                self.memory.opened_events[rollout.id].name,
                rollout.digest,
                rollout.submitted_by,
                rollout.submitted_at,
                rollout.cancelled,
                rollout.ended_at,
                Counter(str(target.outcome or target.phase) for target in self._targets(rollout.id)),
            )
            for rollout in closed[:limit]
        )

    async def list_rollout_records(self) -> Sequence[RolloutRecord]:
        return tuple(
            RolloutRecord(
                rollout.id,
                self.memory.opened_events[rollout.id].source,
                None
                if self._is_live(rollout)
                else rollout.cancelled.at
                if rollout.cancelled
                else rollout.ended_at,
                rollout.id in self.memory.deleted,
            )
            for rollout in self.memory.rollouts.values()
        )

    async def find_identical(self, change: str, selector_digest: str, policy: str) -> str | None:
        for name, event in reversed(self.memory.opened_events.items()):
            same = (event.digest.change, event.selector_digest, event.digest.policy)
            dead = name in self.memory.deleted or self.memory.rollouts[name].cancelled is not None
            if same == (change, selector_digest, policy) and not dead:
                return name
        return None

    async def find_nodes_with_change(self, change: str) -> frozenset[str]:
        return frozenset(
            target.node
            for target in self.memory.targets.values()
            if self.memory.opened_events[target.rollout].digest.change == change
            and target.outcome in (Outcome.CHANGED, Outcome.ALREADY_CURRENT)
        )

    async def find_later_changes(self, rollout: str) -> Mapping[str, str]:
        ids, opened = list(self.memory.rollouts), self.memory.opened_events
        later = [each for each in ids[ids.index(rollout) + 1 :] if opened[each].name == opened[rollout].name]
        return {
            target.node: each
            for each in later
            if each not in self.memory.deleted
            for target in self._targets(each)
            if target.outcome is Outcome.CHANGED
        }

    async def load_configurations(self, nodes: Sequence[str]) -> NodeConfigurations:
        memory = self.memory
        return NodeConfigurations(
            {node: memory.configurations[node] for node in nodes if node in memory.configurations},
            dict(memory.documents),
            {name: event.digest.change for name, event in memory.opened_events.items()},
        )

    async def load_verdicts(self) -> Sequence[Verdict]:
        return tuple(sorted(self.memory.verdicts.values(), key=lambda each: (each.at, each.id)))

    async def has_unfinished_run(self, node: str) -> bool:
        rows = self.memory.preparations.values()
        lost = (row for row in rows if row.node == node and row.state is PreparationState.FAILED)
        if any(row.handle for row in lost):
            return True
        left = False
        for record in self.memory.steps.values():
            is_failed_check = record.action is StepAction.CHECK and record.state is StepState.FAILED
            is_over = record.state is StepState.OK or is_failed_check
            if record.node == node and record.handle and not is_over:
                left = True
            if record.node == node and record.action is StepAction.CLEAN_UP and record.state is StepState.OK:
                left = False
        return left

    async def close(self) -> None:
        self._closed = True

    def _targets(self, rollout: str) -> tuple[Target, ...]:
        mine = [target for target in self.memory.targets.values() if target.rollout == rollout]
        return tuple(sorted(mine, key=lambda target: (target.position, target.node)))

    def _is_live(self, rollout: Rollout) -> bool:
        if rollout.id in self.memory.deleted:
            return False
        rows = (row for row in self.memory.preparations.values() if row.rollout == rollout.id)
        known, targets = preparations_of(rollout, rows, (), {}), self._targets(rollout.id)
        of_plan = [each.id for each in self.memory.rollouts.values() if each.plan.name == rollout.plan.name]
        if not rollout.closed or known.is_unfinished(targets, has_later=of_plan[-1] != rollout.id):
            return True
        return any(
            target.phase in IN_FLIGHT_PHASES | {Phase.FAILED}
            or target.isolated
            or target.order
            or (target.node, "left", f"{rollout.id}/{target.node}") in self.memory.holds
            for target in self._targets(rollout.id)
        )

    def _append_entries(
        self, memory: MemoryState, events: Sequence[Event], actor: Actor, cause: str, at: float
    ) -> tuple[AuditEntry, ...]:
        first = len(memory.entries)
        for event in events:
            opened = memory.opened_events.get(rollout_of(event) or "")
            digest = opened.digest.whole if opened else None
            for drafted in draft_entries(event, actor=actor, cause=cause, at=at, digest=digest):
                previous = memory.entries[-1].hash if memory.entries else GENESIS_HASH
                text = add_sequence_number(drafted, len(memory.entries) + 1)
                memory.entries.append(AuditEntry(len(memory.entries) + 1, text, hash_entry(previous, text)))
        return tuple(memory.entries[first:])

    # -- what events do

    def _apply(self, memory: MemoryState, event: Event) -> None:  # noqa: C901  # a case per event
        match event:
            case PhaseMoved():
                self._apply_transition(memory, event)
            case StepRecorded():
                _record(memory, event)
            case (
                DeadlineExtended()
                | ChangeNeeded()
                | DriftRecorded()
                | NodeOrdered()
                | NodeAdvanced()
                | TargetChanged()
            ):
                _apply_to_target(memory, event.rollout, event.node, event)
                if isinstance(event, TargetChanged):
                    _change(memory, event)
            case RolloutOpened():
                require(event.rollout in memory.opened_events, f"there is a rollout {event.rollout} already")
                memory.opened_events[event.rollout] = event
                memory.rollouts[event.rollout] = apply.new_rollout(event, self._compile(event.content))
                _add(memory, event.targets)
            case TargetsJoined():
                _change(memory, event)
                _add(memory, event.targets)
            case RolloutDeleted():
                require(
                    event.rollout in memory.deleted or not _get_rollout(memory, event.rollout).closed,
                    "not closed",
                )
                memory.deleted.add(event.rollout)
            case VoteCast() | VoteWithdrawn() | GateOpened():
                _gate(memory, event)
            case PilotEvidenceAttached() | ArtifactsBuilt():
                _change(memory, event)
            case PreparationRecorded(preparation=row):
                key = (row.rollout, row.node, row.stage)
                before = memory.preparations.get(key)
                require(before is not None and row.attempt < before.attempt, "has a later attempt")
                memory.preparations[key] = row
            case RolloutPaused() | RolloutResumed() | RolloutCancelled() | RolloutEnded():
                _apply_rollout_event(memory, event)
            case VerdictRecorded(verdict=verdict):
                require(verdict.id in memory.verdicts, f"there is a verdict {verdict.id} already")
                memory.verdicts[verdict.id] = verdict
            case VerdictCleared():
                require(event.verdict not in memory.verdicts, f"there is no verdict {event.verdict}")
                del memory.verdicts[event.verdict]
            case _:
                apply_to_fleet(memory, event)

    def _apply_transition(self, memory: MemoryState, event: PhaseMoved) -> None:
        apply.validate_edge(event)
        before = memory.targets.get((event.rollout, event.node))
        _apply_to_target(memory, event.rollout, event.node, event)
        records = memory.configurations.get(event.node, NodeConfiguration())
        if before is not None and (after := records.after(before, event)) != records:
            memory.configurations[event.node] = after
        if before is not None and event.trigger is Trigger.VERIFIED:
            passed = (event.node, before.content)
            for each in list(memory.verdicts.values()):
                if (each.node, each.content) == passed:
                    del memory.verdicts[each.id]
        rollout = memory.rollouts[event.rollout]
        known = {failure.id for failure in rollout.failures}
        require(event.failure is not None and event.failure.id in known, "this failure is known already")
        memory.rollouts[event.rollout] = apply.apply_to_rollout(rollout, event)


def _record(memory: MemoryState, event: StepRecorded) -> None:
    record = event.record
    key = (record.rollout, record.node, record.attempt, record.step, record.action, record.number)
    before = memory.steps.get(key)
    if before is not None:
        record = replace(record, began_at=before.began_at)
        record = record if record.prior is not None else replace(record, prior=before.prior)
        same = replace(record, at=before.at, stage=before.stage, visible_to=before.visible_to) == before
        require(before.state is not StepState.INTENDED and not same, f"step {record.step} has ended already")
    _apply_to_target(memory, record.rollout, record.node, event)
    memory.steps[key] = record
    if event.document is not None:
        memory.documents[event.content] = event.document


def _gate(memory: MemoryState, event: VoteCast | VoteWithdrawn | GateOpened) -> None:
    rollout = _get_rollout(memory, event.rollout)
    if not isinstance(event, GateOpened) and event.token:
        if event.token in memory.used_tokens:
            raise TokenAlreadyUsed(f"token {event.token} was used before; each counts once")
        memory.used_tokens.add(event.token)
    match event:
        case VoteCast():
            votes = {vote.id for known in memory.rollouts.values() for vote in known.votes}
            require(event.vote.id in votes, f"vote {event.vote.id} was cast already")
        case VoteWithdrawn():
            votes = {vote.id for vote in rollout.votes if vote.withdrawn_at is None}
            require(event.vote not in votes, f"there is no vote {event.vote}")
        case GateOpened():
            gates = {(opened.gate, opened.wave) for opened in rollout.opened}
            require((event.gate, event.wave) in gates, f"gate {event.gate} is open already")
        case _:
            assert_never(event)
    _change(memory, event)


def _apply_rollout_event(
    memory: MemoryState, event: RolloutPaused | RolloutResumed | RolloutCancelled | RolloutEnded
) -> None:
    rollout = _get_rollout(memory, event.rollout)
    match event:
        case RolloutPaused():
            require(rollout.closed or rollout.paused is not None, "paused already, or closed")
        case RolloutResumed():
            require(rollout.paused is None, f"{rollout.id} is not paused by a person")
        case RolloutCancelled():
            require(rollout.closed, f"{rollout.id} is closed already")
        case RolloutEnded():
            require(rollout.ended_at is not None, f"{rollout.id} has ended already")
        case _:
            assert_never(event)
    _change(memory, event)


def _change(memory: MemoryState, event: apply.RolloutEvent) -> None:
    rollout = _get_rollout(memory, event.rollout)
    memory.rollouts[event.rollout] = apply.apply_to_rollout(rollout, event)


def _add(memory: MemoryState, targets: Sequence[Target]) -> None:
    for target in targets:
        key = (target.rollout, target.node)
        require(key in memory.targets, f"{target.node} is a target already")
        _get_rollout(memory, target.rollout)
        memory.targets[key] = target


def _apply_to_target(memory: MemoryState, rollout: str, node: str, event: TargetEvent) -> None:
    require((rollout, node) not in memory.targets, f"{node} is not a target of {rollout}")
    try:
        memory.targets[rollout, node] = apply.apply_to_target(memory.targets[rollout, node], event)
    except IllegalTransition as error:
        raise Conflict(str(error)) from error


def _get_rollout(memory: MemoryState, rollout: str) -> Rollout:
    require(rollout not in memory.rollouts, f"there is no rollout {rollout}")
    return memory.rollouts[rollout]
