"""The Store port in memory: what the daemon's tests use instead of a file.

It passes the suite that the real store passes.  A `Memory` is its disk: whoever
opens it anew takes the tenure over and finds what was committed, as after a
restart.  It knows no SQL: rows are the core's own values, and what an event
makes of them is machines.changes.

Longer than 400 lines: it mirrors the store's one schema.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, assert_never

from machines import changes
from machines.book import Snapshot
from machines.events import (
    Actor,
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
    StepAction,
    StepRecord,
    StepRecorded,
    StepState,
    TargetChanged,
    TargetsJoined,
    TeamSet,
    Unfrozen,
    VoteCast,
    VoteWithdrawn,
)
from machines.limits import TeamRules
from machines.node import Node
from machines.plan import Plan
from machines.rollout import Hold, Rollout, Target
from machines.states import BUSY, IllegalTransition, Outcome, Phase, edge
from machines.windows import Freeze
from rolloutd.chain import GENESIS, Verdict, entry_hash
from rolloutd.errors import Conflict, NotFound, StoreFailed
from rolloutd.orders.tokens import SPENT
from rolloutd.ports import JSON, ClosedRollout, Entry, Remembered
from rolloutd.store.entries import draft, numbered, rollout_of

Compile = Callable[[Mapping[str, Any]], Plan]


@dataclass(slots=True)
class Memory:
    """What survives a restart."""

    epoch: int = 0
    entries: list[Entry] = field(default_factory=list)
    nodes: dict[str, Node] = field(default_factory=dict)
    connections: dict[str, Mapping[str, JSON]] = field(default_factory=dict)
    opened: dict[str, RolloutOpened] = field(default_factory=dict)
    rollouts: dict[str, Rollout] = field(default_factory=dict)
    targets: dict[tuple[str, str], Target] = field(default_factory=dict)
    steps: dict[tuple[Any, ...], StepRecord] = field(default_factory=dict)
    holds: dict[tuple[str, str, str], Hold] = field(default_factory=dict)
    freezes: dict[str, Freeze] = field(default_factory=dict)
    team_rules: dict[str, TeamRules] = field(default_factory=dict)
    spent: set[str] = field(default_factory=set)
    deleted: set[str] = field(default_factory=set)

    def copy(self) -> Memory:
        """Return a copy to write on; the values in it never change."""
        copied = {name: getattr(self, name).copy() for name in self.__slots__ if name != "epoch"}
        return Memory(self.epoch, **copied)


class MemoryStore:
    """A store without a file."""

    def __init__(
        self,
        *,
        compile: Compile,  # noqa: A002  # the word of open_store
        committed: Callable[[tuple[Entry, ...]], object] | None = None,
        memory: Memory | None = None,
    ) -> None:
        self.memory = memory or Memory()
        self.memory.epoch += 1
        self._epoch = self.memory.epoch
        self._compile = compile
        self._committed = committed
        self._closed = False

    async def commit(
        self, events: Sequence[Event], *, actor: Actor, cause: str, at: float
    ) -> tuple[Entry, ...]:
        if self._closed or self._epoch != self.memory.epoch:
            raise StoreFailed("nothing was written: the store is closed, or this tenure has ended")
        draftbook = self.memory.copy()
        try:
            for event in events:
                self._apply(draftbook, event)
            entries = self._chain(draftbook, events, actor, cause, at)
        except IllegalTransition as error:
            raise StoreFailed(f"nothing was written: {error}") from error
        for name in Memory.__slots__:
            setattr(self.memory, name, getattr(draftbook, name))
        if self._committed is not None and entries:
            asyncio.get_running_loop().call_soon(self._committed, entries)
        return entries

    async def load(self) -> Snapshot:
        memory = self.memory
        live = {name: rollout for name, rollout in memory.rollouts.items() if self._lives(rollout)}
        return Snapshot(
            nodes=tuple(sorted(memory.nodes.values(), key=lambda node: node.name)),
            rollouts=tuple(live.values()),
            targets=tuple(target for name in live for target in self._targets(name)),
            holds=tuple(memory.holds.values()),
            freezes=tuple(memory.freezes.values()),
            team_rules=tuple(sorted(memory.team_rules.values(), key=lambda each: each.team)),
            epoch=memory.epoch,
        )

    async def audit(
        self,
        *,
        after: int = 0,
        limit: int = 1000,
        rollout: str | None = None,
        node: str | None = None,
        event: str | None = None,
    ) -> Sequence[Entry]:
        wanted = {"rollout": rollout, "node": node, "event": event}
        wanted = {key: value for key, value in wanted.items() if value is not None}
        found = [
            entry
            for entry in self.memory.entries[after:]
            if not wanted or wanted.items() <= json.loads(entry.text).items()
        ]
        return tuple(found[:limit])

    async def head(self) -> Entry | None:
        return self.memory.entries[-1] if self.memory.entries else None

    async def verify(self, head: str | None = None) -> Verdict:
        previous, noted = GENESIS, head in (None, GENESIS)
        for number, entry in enumerate(self.memory.entries, 1):
            if entry.seq != number or entry_hash(previous, entry.text) != entry.hash:
                return Verdict(False, number - 1, previous, number, f"entry {number} was altered")
            previous = entry.hash
            noted = noted or previous == head
        count = len(self.memory.entries)
        if not noted:
            return Verdict(False, count, previous, count + 1, f"none of the {count} entries has the hash")
        entries = "1 entry" if count == 1 else f"{count} entries"
        return Verdict(True, count, previous, None, f"{entries}, each one hashed over the one before")

    async def is_spent(self, token: str) -> bool:
        return token in self.memory.spent

    async def steps(self, rollout: str, node: str, attempt: int | None = None) -> Sequence[StepRecord]:
        return tuple(
            record
            for record in self.memory.steps.values()
            if (record.rollout, record.node) == (rollout, node) and attempt in (None, record.attempt)
        )

    async def connections(self) -> Mapping[str, Mapping[str, JSON]]:
        return dict(self.memory.connections)

    async def content(self, rollout: str) -> tuple[Mapping[str, JSON], Mapping[str, str]]:
        await self.rollout(rollout)
        return self.memory.opened[rollout].content, self.memory.opened[rollout].source

    async def rollout(self, rollout: str) -> Rollout:
        if rollout not in self.memory.rollouts or rollout in self.memory.deleted:
            raise NotFound(f"there is no rollout {rollout}")
        return self.memory.rollouts[rollout]

    async def targets(self, rollout: str) -> Sequence[Target]:
        return self._targets(rollout)

    async def closed_rollouts(self, limit: int = 100) -> Sequence[ClosedRollout]:
        closed = [
            rollout
            for rollout in reversed(self.memory.rollouts.values())
            if rollout.id not in self.memory.deleted and not self._lives(rollout)
        ]
        return tuple(
            ClosedRollout(
                rollout.id,
                self.memory.opened[rollout.id].name,
                rollout.digest,
                rollout.submitted_by,
                rollout.submitted_at,
                rollout.cancelled,
                rollout.ended_at,
                Counter(str(target.outcome or target.phase) for target in self._targets(rollout.id)),
            )
            for rollout in closed[:limit]
        )

    async def remembered(self) -> Sequence[Remembered]:
        return tuple(
            Remembered(
                rollout.id,
                self.memory.opened[rollout.id].source,
                None
                if self._lives(rollout)
                else rollout.cancelled.at
                if rollout.cancelled
                else rollout.ended_at,
                rollout.id in self.memory.deleted,
            )
            for rollout in self.memory.rollouts.values()
        )

    async def find_identical(self, change: str, selector_digest: str, policy: str) -> str | None:
        for name, event in reversed(self.memory.opened.items()):
            same = (event.digest.change, event.selector_digest, event.digest.policy)
            dead = name in self.memory.deleted or self.memory.rollouts[name].cancelled is not None
            if same == (change, selector_digest, policy) and not dead:
                return name
        return None

    async def done_before(self, change: str) -> frozenset[str]:
        return frozenset(
            target.node
            for target in self.memory.targets.values()
            if self.memory.opened[target.rollout].digest.change == change
            and target.outcome in (Outcome.CHANGED, Outcome.ALREADY_CURRENT)
        )

    async def unclean(self, node: str) -> bool:
        left = False
        for record in self.memory.steps.values():
            if record.node == node and record.action is StepAction.RUN and record.state is not StepState.OK:
                left = True
            if record.node == node and record.action is StepAction.CLEAR and record.state is StepState.OK:
                left = False
        return left

    async def close(self) -> None:
        self._closed = True

    def _targets(self, rollout: str) -> tuple[Target, ...]:
        mine = [target for target in self.memory.targets.values() if target.rollout == rollout]
        return tuple(sorted(mine, key=lambda target: (target.position, target.node)))

    def _lives(self, rollout: Rollout) -> bool:
        if rollout.id in self.memory.deleted:
            return False
        return not rollout.closed or any(
            target.phase in BUSY | {Phase.FAILED}
            or target.isolated
            or target.order
            or (target.node, "left", f"{rollout.id}/{target.node}") in self.memory.holds
            for target in self._targets(rollout.id)
        )

    def _chain(
        self, memory: Memory, events: Sequence[Event], actor: Actor, cause: str, at: float
    ) -> tuple[Entry, ...]:
        first = len(memory.entries)
        for event in events:
            opened = memory.opened.get(rollout_of(event) or "")
            digest = opened.digest.whole if opened else None
            for drafted in draft(event, actor=actor, cause=cause, at=at, digest=digest):
                previous = memory.entries[-1].hash if memory.entries else GENESIS
                text = numbered(drafted, len(memory.entries) + 1)
                memory.entries.append(Entry(len(memory.entries) + 1, text, entry_hash(previous, text)))
        return tuple(memory.entries[first:])

    # -- what events do

    def _apply(self, memory: Memory, event: Event) -> None:
        match event:
            case PhaseMoved():
                self._move(memory, event)
            case StepRecorded():
                _record(memory, event)
            case LookedCurrent() | NodeOrdered() | NodeAdvanced() | TargetChanged():
                target = _the_target(memory, event.rollout, event.node)
                waits = target.phase is Phase.PENDING
                _refuse(isinstance(event, NodeAdvanced) and not waits, f"{event.node} does not wait")
                memory.targets[event.rollout, event.node] = changes.target_after(target, event)
                if isinstance(event, TargetChanged):
                    _change(memory, event)
            case RolloutOpened():
                _refuse(event.rollout in memory.opened, f"there is a rollout {event.rollout} already")
                memory.opened[event.rollout] = event
                memory.rollouts[event.rollout] = changes.opened(event, self._compile(event.content))
                _add(memory, event.targets)
            case TargetsJoined():
                _change(memory, event)
                _add(memory, event.targets)
            case RolloutDeleted():
                _refuse(
                    event.rollout in memory.deleted or not _the_rollout(memory, event.rollout).closed,
                    "not closed",
                )
                memory.deleted.add(event.rollout)
            case VoteCast() | VoteWithdrawn() | GateOpened():
                _gate(memory, event)
            case RolloutPaused() | RolloutResumed() | RolloutCancelled() | RolloutEnded():
                _mark(memory, event)
            case _:
                _apply_to_fleet(memory, event)

    def _move(self, memory: Memory, event: PhaseMoved) -> None:
        if edge(event.trigger, event.source, event.outcome).target is not event.target:
            raise IllegalTransition(f"{event.trigger} does not lead to {event.target}")
        target = _the_target(memory, event.rollout, event.node)
        try:
            memory.targets[event.rollout, event.node] = changes.target_after(target, event)
        except IllegalTransition as error:
            raise Conflict(str(error)) from error
        rollout = memory.rollouts[event.rollout]
        known = {failure.id for failure in rollout.failures}
        _refuse(event.failure is not None and event.failure.id in known, "this failure is known already")
        memory.rollouts[event.rollout] = changes.rollout_after(rollout, event)


def _record(memory: Memory, event: StepRecorded) -> None:
    record = event.record
    target = _the_target(memory, record.rollout, record.node)
    key = (record.rollout, record.node, record.attempt, record.step, record.action, record.number)
    before = memory.steps.get(key)
    if before is not None:
        record = replace(record, began_at=before.began_at)
        record = record if record.prior is not None else replace(record, prior=before.prior)
        same = replace(record, at=before.at, stage=before.stage, visible_to=before.visible_to) == before
        _refuse(before.state is not StepState.INTENDED and not same, f"step {record.step} has ended already")
    memory.steps[key] = record
    memory.targets[record.rollout, record.node] = changes.target_after(target, event)


def _gate(memory: Memory, event: VoteCast | VoteWithdrawn | GateOpened) -> None:
    rollout = _the_rollout(memory, event.rollout)
    if not isinstance(event, GateOpened) and event.token:
        _refuse(event.token in memory.spent, SPENT)
        memory.spent.add(event.token)
    match event:
        case VoteCast():
            votes = {vote.id for known in memory.rollouts.values() for vote in known.votes}
            _refuse(event.vote.id in votes, f"vote {event.vote.id} was cast already")
        case VoteWithdrawn():
            votes = {vote.id for vote in rollout.votes if vote.withdrawn_at is None}
            _refuse(event.vote not in votes, f"there is no vote {event.vote}")
        case GateOpened():
            gates = {(opened.gate, opened.wave) for opened in rollout.opened}
            _refuse((event.gate, event.wave) in gates, f"gate {event.gate} is open already")
        case _:
            assert_never(event)
    _change(memory, event)


def _mark(memory: Memory, event: RolloutPaused | RolloutResumed | RolloutCancelled | RolloutEnded) -> None:
    rollout = _the_rollout(memory, event.rollout)
    match event:
        case RolloutPaused():
            _refuse(rollout.closed or rollout.paused is not None, "paused already, or closed")
        case RolloutResumed():
            _refuse(rollout.paused is None, f"{rollout.id} is not paused by a person")
        case RolloutCancelled():
            _refuse(rollout.closed, f"{rollout.id} is closed already")
        case RolloutEnded():
            _refuse(rollout.ended_at is not None, f"{rollout.id} has ended already")
        case _:
            assert_never(event)
    _change(memory, event)


def _apply_to_fleet(
    memory: Memory,
    event: NodesSeen
    | NodesGone
    | HoldTaken
    | HoldReleased
    | Frozen
    | Unfrozen
    | TeamSet
    | CallRefused
    | NodeLetGo
    | DaemonStarted
    | SettingsChanged
    | RunsRemoved,
) -> None:
    match event:
        case NodesSeen():
            for node in event.nodes:
                memory.nodes[node.name] = node
                before = memory.connections.get(node.name, {})
                memory.connections[node.name] = event.connections.get(node.name, before)
        case NodesGone():
            for name in event.names:
                memory.nodes.pop(name, None)
        case HoldTaken():
            hold = event.hold
            memory.holds[hold.node, hold.source, hold.id] = hold
        case HoldReleased():
            key = (event.node, event.source, event.id)
            _refuse(key not in memory.holds, f"there is no hold {event.id}")
            del memory.holds[key]
        case Frozen():
            _refuse(event.freeze.id in memory.freezes, f"there is a freeze {event.freeze.id} already")
            memory.freezes[event.freeze.id] = event.freeze
        case Unfrozen():
            _refuse(event.freeze not in memory.freezes, f"there is no freeze {event.freeze}")
            del memory.freezes[event.freeze]
        case TeamSet():
            memory.team_rules[event.rules.team] = event.rules
        case CallRefused() | NodeLetGo() | DaemonStarted() | SettingsChanged() | RunsRemoved():
            pass
        case _:
            assert_never(event)


def _change(memory: Memory, event: changes.RolloutEvent) -> None:
    rollout = _the_rollout(memory, event.rollout)
    memory.rollouts[event.rollout] = changes.rollout_after(rollout, event)


def _add(memory: Memory, targets: Sequence[Target]) -> None:
    for target in targets:
        key = (target.rollout, target.node)
        _refuse(key in memory.targets, f"{target.node} is a target already")
        _the_rollout(memory, target.rollout)
        memory.targets[key] = target


def _the_target(memory: Memory, rollout: str, node: str) -> Target:
    _refuse((rollout, node) not in memory.targets, f"{node} is no target of {rollout}")
    return memory.targets[rollout, node]


def _the_rollout(memory: Memory, rollout: str) -> Rollout:
    _refuse(rollout not in memory.rollouts, f"there is no rollout {rollout}")
    return memory.rollouts[rollout]


def _refuse(wrong: bool, text: str) -> None:
    if wrong:
        raise Conflict(text)
