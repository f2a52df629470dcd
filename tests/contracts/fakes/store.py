"""The Store port in memory, for tests of the daemon.

It passes the same suite as SQLite.  A `Memory` is its disk: the next store that opens it takes over the term
and finds all commits.  Its rows are the core's own values; machines.facts.apply says what events write.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from machines.facts.apply import UnexpectedRow, rollout_of, writes
from machines.facts.fleet_facts import FactsSnapshot
from machines.facts.preparations import preparations_of
from machines.model.configuration import NodeConfiguration
from machines.model.events import Event, RolloutOpened, TeamRulesChanged
from machines.model.node import Node
from machines.model.plan import GateName, Plan
from machines.model.preparation import PREPARED, Preparation, PreparationState
from machines.model.reboots import RebootApproval
from machines.model.rollout import Actor, Failure, Hold, Rollout, Target, Verdict
from machines.model.rows import ConfigurationDocument, NodeConnection, UsedToken
from machines.model.step_record import StepAction, StepRecord, StepState
from machines.model.train import Train
from machines.model.windows import Freeze
from machines.states import IN_FLIGHT_PHASES, IllegalTransition, Outcome, Phase
from rolloutd.audit.audit_chain import GENESIS_HASH, ChainVerification, hash_entry, verify_entries
from rolloutd.errors import Conflict, LeadershipLost, NotFound, StoreFailed
from rolloutd.ports import (
    JSON,
    ApprovedRollout,
    AuditBase,
    AuditCheckpointReport,
    AuditEntry,
    AuditReport,
    BusyTime,
    ClosedRollout,
    KeptForecast,
    NodeConfigurations,
    RolloutRecord,
    SourceAnswer,
    StepDuration,
    StoredVolume,
)
from rolloutd.store.audit_entries import add_sequence_number, draft_entries
from rolloutd.store.queries import KEPT_FORECASTS
from tests.contracts.fakes.memory_state import MemoryState

Compile = Callable[[Mapping[str, Any]], Plan]
_HAS_CHANGE = (Outcome.CHANGED, Outcome.ALREADY_CURRENT)


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
            raise StoreFailed("nothing was written: the store is closed, or its term has ended")
        draft = self.memory.copy()
        try:
            for event in events:
                for write in writes(event, draft, at):
                    draft.apply(write, self._compile)
            entries = self._append_entries(draft, events, actor, cause, at)
        except UnexpectedRow as error:
            raise Conflict(str(error)) from error
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
            nodes=tuple(sorted(memory.all(Node), key=lambda node: node.name)),
            rollouts=tuple(live.values()),
            targets=tuple(target for name in live for target in self._targets(name)),
            holds=tuple(memory.all(Hold)),
            freezes=tuple(memory.all(Freeze)),
            trains=tuple(memory.all(Train)),
            reboot_approvals=tuple(memory.all(RebootApproval)),
            team_rules=tuple(
                sorted((row.rules for row in memory.all(TeamRulesChanged)), key=lambda each: each.team)
            ),
            preparations=tuple(row for row in memory.all(Preparation) if row.rollout in live),
            worked_on=memory.work_on_clusters(),
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
            for entry in self.memory.entries
            if entry.seq > after
            if before is None or entry.seq < before
            if not wanted or wanted.items() <= json.loads(entry.text).items()
        ]
        return tuple(found[:limit] if before is None else found[-limit:])

    async def list_changed_nodes(self, rollout: str, after: int) -> frozenset[str]:
        entries = map(json.loads, (each.text for each in self.memory.entries if each.seq > after))
        return frozenset(each["node"] for each in entries if each["rollout"] == rollout) - {None}

    async def latest_audit_entry(self) -> AuditEntry | None:
        return self.memory.entries[-1] if self.memory.entries else None

    async def list_expired_rollouts(self, ended_before: float) -> Sequence[str]:
        present = {node.name for node in self.memory.all(Node)}
        expired = []
        for each in await self.list_rollout_records():
            if each.ended_at is None or each.ended_at > ended_before:
                continue
            mine = [t for t in self._targets(each.id) if t.node in present and t.outcome in _HAS_CHANGE]
            if each.deleted or all(self._has_later_change(target) for target in mine):
                expired.append(each.id)
        return expired

    async def list_recorded_nodes(self, rollout: str, limit: int) -> Sequence[str]:
        return sorted(target.node for target in self._targets(rollout))[:limit]

    async def has_step_output(self, rollout: str) -> bool:
        return any(step.output for step in self.memory.all(StepRecord) if step.rollout == rollout)

    async def remove_step_output(self, rollout: str, limit: int) -> None:
        table = self.memory.rows[StepRecord]
        for key in [key for key, step in table.items() if step.rollout == rollout and step.output][:limit]:
            table[key] = replace(table[key], output="")

    async def release_space(self) -> bool:
        return False

    async def measure(self, now: float) -> StoredVolume:
        return StoredVolume(entries=len(self.memory.entries))

    async def verify_audit(self, head: str | None = None, *, gently: bool = False) -> AuditReport:
        chain = self._verify_chain(head)
        return AuditReport(chain, seq=chain.entries)

    async def verify_audit_checkpoint(self) -> AuditCheckpointReport:
        return AuditCheckpointReport("the database has none")

    async def sign_audit_checkpoint(
        self, verified_at: float | None = None, *, all_rows: bool = False
    ) -> None:
        return

    async def drop_audit_checkpoint(self) -> None:
        return

    def _verify_chain(self, head: str | None) -> ChainVerification:
        base, entries = self.memory.audit_base, self.memory.entries
        rows = ((e.seq, e.text.encode(), e.hash.encode()) for e in entries if e.seq > base.seq)
        return verify_entries(rows, head, start=(base.seq, base.head))

    async def load_audit_base(self) -> AuditBase:
        return self.memory.audit_base

    async def advance_audit_base(self, seq: int, at: float) -> None:
        exported = next((entry for entry in self.memory.entries if entry.seq == seq), None)
        if exported is None or seq > self.memory.entries[-1].seq - 2:
            raise StoreFailed(f"audit base: entry {seq} is not one that was exported; see audit verify")
        origin = self.memory.audit_base.origin or self.memory.entries[0].hash
        self.memory.audit_base = AuditBase(seq, exported.hash, origin, at)

    async def remove_exported_entries(self, limit: int) -> bool:
        left = sum(entry.seq <= self.memory.audit_base.seq for entry in self.memory.entries)
        del self.memory.entries[: min(left, limit)]
        return left > 0

    async def is_token_used(self, token: str) -> bool:
        return self.memory.get(UsedToken, token) is not None

    async def load_steps(self, rollout: str, node: str, attempt: int | None = None) -> Sequence[StepRecord]:
        return tuple(
            record
            for record in self.memory.all(StepRecord)
            if (record.rollout, record.node) == (rollout, node) and attempt in (None, record.attempt)
        )

    async def load_connections(self) -> Mapping[str, Mapping[str, JSON]]:
        known = {node.name: {} for node in self.memory.all(Node)}
        return {row.name: row.connection for row in self.memory.all(NodeConnection) if row.name in known} | {
            name: {} for name in known if not self.memory.get(NodeConnection, name)
        }

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
        opened = self.memory.opened(rollout)
        return opened.content, opened.source

    async def load_rollout(self, rollout: str) -> Rollout:
        if rollout not in self.memory.rollouts or self.memory.is_deleted(rollout):
            raise NotFound(f"{rollout}: no such rollout; list them with rolloutctl rollouts")
        return self.memory.rollouts[rollout]

    async def load_preparations(self, rollout: str) -> Sequence[Preparation]:
        return tuple(row for row in self.memory.all(Preparation) if row.rollout == rollout)

    async def load_targets(self, rollout: str) -> Sequence[Target]:
        return self._targets(rollout)

    async def list_closed_rollouts(self, limit: int = 100) -> Sequence[ClosedRollout]:
        closed = [
            rollout
            for rollout in reversed(self.memory.rollouts.values())
            if not self.memory.is_deleted(rollout.id) and not self._is_live(rollout)
        ]
        return tuple(
            ClosedRollout(
                rollout.id,
                self.memory.opened(rollout.id).name,
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
                self.memory.opened(rollout.id).source,
                None
                if self._is_live(rollout)
                else rollout.cancelled.at
                if rollout.cancelled
                else rollout.ended_at,
                self.memory.is_deleted(rollout.id),
            )
            for rollout in self.memory.rollouts.values()
        )

    async def list_uncleaned_nodes(self, ended_after: float, ended_before: float) -> Sequence[str]:
        ends: dict[str, float] = {}
        for each in await self.list_rollout_records():
            at = float("inf") if each.ended_at is None else each.ended_at
            for target in self._targets(each.id) if at >= ended_after else ():
                rows = self.memory.all(Preparation)
                is_prepared = any((row.rollout, row.node) == (each.id, target.node) for row in rows)
                if target.attempt or is_prepared or at == float("inf"):
                    ends[target.node] = max(at, ends.get(target.node, 0.0))
        read = map(json.loads, (entry.text for entry in self.memory.entries))
        cleaned = {each["node"]: each["at"] for each in read if each["event"] == "NodeCleaned"}
        return [node for node, at in sorted(ends.items()) if cleaned.get(node, -1.0) < at <= ended_before]

    async def require_redaction_key(self, fingerprint: str) -> None:
        await self.require_term()
        if self.memory.redaction_key not in ("", fingerprint):
            raise StoreFailed("another key")
        self.memory.redaction_key = fingerprint

    async def take_over_runs(self, machine: str) -> frozenset[str]:
        await self.require_term()
        others = self.memory.machines - {machine}
        nodes = {each.node for each in self.memory.all(StepRecord) if each.state is StepState.INTENDED}
        self.memory.machines = (others if nodes else set()) | {machine}
        return frozenset(nodes if others else ())

    async def require_term(self) -> None:
        if self._closed or self._epoch != self.memory.epoch:
            raise LeadershipLost("the term has ended")

    async def find_changes_in_effect(self, node: str, rollouts: Sequence[str]) -> Mapping[str, bool]:
        in_effect: dict[str, str] = {}
        opened = self.memory.rows[RolloutOpened].values()
        for event in opened:
            target = self.memory.get(Target, event.rollout, node)
            if target and not self.memory.is_deleted(event.rollout) and self._has_content(target):
                in_effect[event.name] = event.rollout
        names = {event.rollout: event.name for event in opened}
        return {
            each: latest == each or self._uses(latest or "", each, node)
            for each in rollouts
            if each in names
            for latest in (in_effect.get(names[each]),)
        }

    def _has_content(self, target: Target) -> bool:
        place, rows = (target.rollout, target.node), self.memory.all(Preparation)
        is_prepared = any(row.state in PREPARED and (row.rollout, row.node) == place for row in rows)
        entries = [json.loads(entry.text) for entry in self.memory.entries]
        moves = [each["fields"] for each in entries if (each["rollout"], each["node"]) == place]
        passed = [each["outcome"] for each in moves if each.get("trigger") in ("verified", "found-current")]
        outcome = target.outcome
        if outcome not in (*_HAS_CHANGE, Outcome.ROLLED_BACK):
            opened = [each["rollout"] for each in entries if each["event"] == "RolloutOpened"]
            default = None if target.rollout in opened or not target.attempt else Outcome.CHANGED
            outcome = passed[-1] if passed else default
        return outcome == Outcome.CHANGED or (is_prepared and outcome == Outcome.ALREADY_CURRENT)

    def _uses(self, rollout: str, earlier: str, node: str) -> bool:
        rows = [row for row in self.memory.all(Preparation) if row.node == node]
        made = {(row.stage, row.content) for row in rows if row.rollout == earlier and row.state in PREPARED}
        skipped = [row for row in rows if row.rollout == rollout and row.state is PreparationState.SKIPPED]
        return any((row.stage, row.content) in made for row in skipped)

    async def find_identical(self, change: str, selector_digest: str, policy: str) -> str | None:
        for event in reversed(self.memory.rows[RolloutOpened].values()):
            name = event.rollout
            same = (event.digest.change, event.selector_digest, event.digest.policy)
            dead = self.memory.is_deleted(name) or self.memory.rollouts[name].cancelled is not None
            if same == (change, selector_digest, policy) and not dead:
                return name
        return None

    async def find_previous_approved(self, rollout: str, owner: str) -> ApprovedRollout | None:
        opened, ids = self.memory.opened, list(self.memory.rollouts)
        for each in reversed(ids[: ids.index(rollout)]):
            event, gates = opened(each), [opening.gate for opening in self.memory.rollouts[each].opened]
            same = event.name == opened(rollout).name and event.content["metadata"]["owner"] == owner
            was_approved = GateName.START in gates and not self.memory.is_deleted(each)
            if same and was_approved and any(row.outcome in _HAS_CHANGE for row in self._targets(each)):
                return ApprovedRollout(each, event.content, event.source)
        return None

    async def find_nodes_with_change(self, change: str) -> frozenset[str]:
        return frozenset(
            target.node
            for target in self.memory.all(Target)
            if self.memory.opened(target.rollout).digest.change == change and target.outcome in _HAS_CHANGE
        )

    async def find_later_changes(self, rollout: str) -> Mapping[str, str]:
        ids, opened = list(self.memory.rollouts), self.memory.opened
        later = [each for each in ids[ids.index(rollout) + 1 :] if opened(each).name == opened(rollout).name]
        return {
            target.node: each
            for each in later
            if not self.memory.is_deleted(each)
            for target in self._targets(each)
            if target.outcome is Outcome.CHANGED
        }

    async def load_step_durations(self, limit: int) -> Sequence[StepDuration]:
        return tuple(self.memory.step_durations()[:limit])

    async def load_busy_times(self, limit: int) -> Sequence[BusyTime]:
        return tuple(self.memory.busy_times(limit))

    async def count_attempts(self, plan: str) -> tuple[int, int]:
        of_plan = {row.rollout for row in self.memory.all(RolloutOpened) if row.name == plan}
        attempts = sum(target.attempt for target in self.memory.all(Target) if target.rollout in of_plan)
        return attempts, sum(rollout in of_plan for rollout, _ in self.memory.rows[Failure])

    async def keep_forecast(self, kept: KeptForecast) -> None:
        forecasts = self.memory.forecasts
        forecasts[kept.rollout, kept.made_at] = kept
        for key in sorted(key for key in forecasts if key[0] == kept.rollout)[:-KEPT_FORECASTS]:
            del forecasts[key]

    async def load_forecasts(self, rollout: str | None = None) -> Sequence[KeptForecast]:
        kept = [each for each in self.memory.forecasts.values() if not self.memory.is_deleted(each.rollout)]
        kept = [each for each in kept if rollout in (None, each.rollout)]
        return tuple(sorted(kept, key=lambda each: -each.made_at))

    async def load_configurations(self, nodes: Sequence[str]) -> NodeConfigurations:
        memory = self.memory
        return NodeConfigurations(
            {node: row for node in nodes if (row := memory.get(NodeConfiguration, node))},
            {row.content: row.document for row in memory.all(ConfigurationDocument)},
            {row.rollout: row.digest.change for row in memory.all(RolloutOpened)},
        )

    async def list_expired_configurations(self, gone_before: float) -> Sequence[str]:
        read = map(json.loads, (entry.text for entry in self.memory.entries))
        removals = (each for each in read if each["event"] == "NodesRemoved")
        gone = {name: each["at"] for each in removals for name in each["fields"]["names"]}
        live = {each.id for each in self.memory.rollouts.values() if self._is_live(each)}
        in_work = {each.node for each in self.memory.all(Target) if each.rollout in live}
        known = sorted(node for (node,) in self.memory.rows[NodeConfiguration])
        return [
            node
            for node in known
            if not self.memory.get(Node, node) and gone.get(node, gone_before + 1) <= gone_before
            if node not in in_work
        ]

    async def remove_unused_documents(self) -> None:
        live = {each.id for each in self.memory.rollouts.values() if self._is_live(each)}
        used = {each.content for each in self.memory.all(Target) if each.rollout in live}
        for row in self.memory.all(NodeConfiguration):
            used |= {each.content for each in (row.current, row.previous, row.invalid) if each is not None}
        documents = self.memory.rows[ConfigurationDocument]
        for content in {row.content for row in documents.values()} - used:
            del documents[content,]

    async def load_verdicts(self) -> Sequence[Verdict]:
        return tuple(sorted(self.memory.all(Verdict), key=lambda each: (each.at, each.id)))

    async def unfinished_runs(self, node: str) -> Sequence[str]:
        rows = self.memory.all(Preparation)
        lost = [row.handle for row in rows if row.node == node and row.state is PreparationState.FAILED]
        left: list[str] = []
        for record in self.memory.all(StepRecord):
            is_failed_check = record.action is StepAction.CHECK and record.state is StepState.FAILED
            is_over = record.state is StepState.OK or is_failed_check
            if record.node == node and record.handle and not is_over:
                left.append(record.handle)
            if record.node == node and record.action is StepAction.CLEAN_UP and record.state is StepState.OK:
                left.clear()
        return (*left, *filter(None, lost))

    async def close(self) -> None:
        self._closed = True

    def _has_later_change(self, target: Target) -> bool:
        ids, opened = list(self.memory.rollouts), self.memory.opened
        return any(
            self.memory.rows[Target][each, target.node].outcome in _HAS_CHANGE
            for each in ids[ids.index(target.rollout) + 1 :]
            if opened(each).name == opened(target.rollout).name and not self.memory.is_deleted(each)
            if (each, target.node) in self.memory.rows[Target]
        )

    def _targets(self, rollout: str) -> tuple[Target, ...]:
        mine = [target for target in self.memory.all(Target) if target.rollout == rollout]
        return tuple(sorted(mine, key=lambda target: (target.position, target.node)))

    def _is_live(self, rollout: Rollout) -> bool:
        if self.memory.is_deleted(rollout.id):
            return False
        rows = (row for row in self.memory.all(Preparation) if row.rollout == rollout.id)
        known, targets = preparations_of(rollout, rows, (), {}), self._targets(rollout.id)
        of_plan = [each.id for each in self.memory.rollouts.values() if each.plan.name == rollout.plan.name]
        pending = (target.node for target in targets if target.phase is Phase.PENDING)
        is_latest = rollout.cancelled is not None and of_plan[-1] == rollout.id
        needs_cleanup = is_latest and any(map(known.needs_cleanup, pending))
        if not rollout.closed or known.active or needs_cleanup:
            return True
        return any(
            target.phase in IN_FLIGHT_PHASES | {Phase.FAILED}
            or target.isolated
            or target.order
            or (target.node, "left", f"{rollout.id}/{target.node}") in self.memory.rows[Hold]
            for target in self._targets(rollout.id)
        )

    def _append_entries(
        self, memory: MemoryState, events: Sequence[Event], actor: Actor, cause: str, at: float
    ) -> tuple[AuditEntry, ...]:
        appended: list[AuditEntry] = []
        for event in events:
            opened = memory.get(RolloutOpened, rollout_of(event))
            digest = opened.digest.whole if opened else None
            for drafted in draft_entries(event, actor=actor, cause=cause, at=at, digest=digest):
                newest = memory.entries[-1] if memory.entries else AuditEntry(0, "", GENESIS_HASH)
                text = add_sequence_number(drafted, newest.seq + 1)
                appended.append(AuditEntry(newest.seq + 1, text, hash_entry(newest.hash, text)))
                memory.entries.append(appended[-1])
        return tuple(appended)
