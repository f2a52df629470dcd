"""An index kept up by events, and equal to one built afresh.

A projection is made of a snapshot and of nothing else; from then on each event
becomes fact here, and what follows from it is counted anew and no more than
that.  Whoever only reads is given an Index.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, assert_never

from machines import changes
from machines.book import Snapshot
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
from machines.index import Index
from machines.lanes import place_of
from machines.limits import Limits
from machines.node import Observation
from machines.plan import Plan
from machines.prospects import Prospect
from machines.rollout import Hold, Rollout, Target
from machines.stands import kept_down
from machines.states import BUSY, Phase
from machines.tally import Tally
from machines.traffic import Traffic

Compile = Callable[[Mapping[str, Any]], Plan]
"""Makes a plan of its canonical content; the shell knows how."""


class Projection(Index):
    """The facts as events leave them, with all that an index keeps of them."""

    def __init__(self, limits: Limits, compile_plan: Compile | None = None) -> None:
        super().__init__(limits)
        self._compile = compile_plan

    @classmethod
    def build(
        cls,
        snapshot: Snapshot,
        limits: Limits,
        compile: Compile | None = None,  # noqa: A002  # what it does, in the word of the plan file
    ) -> Projection:
        """Return the index of a snapshot; `compile` makes plans of what is submitted later."""
        index = cls(limits, compile)
        index._epoch = snapshot.epoch
        for rollout in snapshot.rollouts:
            index._add_rollout(rollout)
        for name, targets in groupby(snapshot.targets, key=lambda target: target.rollout):
            index._gather(name, tuple(targets))
        for hold in snapshot.holds:
            index._take(hold)
        index._freezes = {freeze.id: freeze for freeze in snapshot.freezes}
        index._team_rules = {each.team: each for each in snapshot.team_rules}
        index._nodes = {node.name: node for node in snapshot.nodes}
        index._repool()
        return index

    def apply(self, event: Event) -> None:
        """Let one event become fact; raises IllegalTransition for a move that is not in the table."""
        match event:
            case PhaseMoved():
                after = changes.target_after(self.target(event.rollout, event.node), event)
                self._replace(event.rollout, changes.rollout_after(self.rollout(event.rollout), event))
                self._put(after)
            case StepRecorded(record=record):
                if event.isolated is not None:
                    self._put(changes.target_after(self.target(record.rollout, record.node), event))
            case LookedCurrent() | NodeOrdered() | NodeAdvanced():
                self._put(changes.target_after(self.target(event.rollout, event.node), event))
            case TargetChanged():
                self._replace(event.rollout, changes.rollout_after(self.rollout(event.rollout), event))
                self._put(changes.target_after(self.target(event.rollout, event.node), event))
            case TargetsJoined():
                self._replace(event.rollout, changes.rollout_after(self.rollout(event.rollout), event))
                for target in event.targets:
                    self._put(target)
            case (
                VoteCast()
                | VoteWithdrawn()
                | GateOpened()
                | RolloutPaused()
                | RolloutResumed()
                | RolloutCancelled()
                | RolloutEnded()
            ):
                self._replace(event.rollout, changes.rollout_after(self.rollout(event.rollout), event))
                self.lanes.heat_rollout(event.rollout)
            case RolloutOpened():
                self._open(event)
            case RolloutDeleted():
                self._delete(event.rollout)
            case _:
                self._apply_to_fleet(event)

    def observed(self, observations: Iterable[Observation], now: float) -> None:
        """Take in what observers saw; an observation older than the last one is ignored."""
        self.advance(now)
        for seen in observations:
            last = self._seen.get(seen.node)
            if last is not None and last.at > seen.at:
                continue
            self._seen[seen.node] = seen
            (self._kept.add if seen.kept else self._kept.discard)(seen.node)
            self._expires(seen)
            self._slots.judge((seen.node,))

    def foresaw(self, prospect: Prospect) -> None:
        """Take in what a rehearsal told of a node that waits to start."""
        self.prospects.take(prospect)
        self.lanes.heat_node(prospect.node, (prospect.rollout,))

    def probed(self, traffic: Traffic) -> None:
        """Take in what traffic probes say of a node; of a rollout that is over nothing is kept."""
        rollout = self._rollouts.get(traffic.rollout)
        if rollout is None or rollout.closed:
            return
        self._traffic.take(traffic)
        self.lanes.heat_node(traffic.node, (traffic.rollout,))

    def relimit(self, limits: Limits, plans: Mapping[str, Plan] | None = None) -> None:
        """Take up new settings; `plans` are the rollouts' plans as they compile under them."""
        self.limits = limits
        self._keys = tuple(limits.pools)
        for name, rollout in self._rollouts.items():
            if plans is not None and name in plans:
                self._rollouts[name] = replace(rollout, plan=plans[name])
            self._add_keys(self._rollouts[name].plan)
        self._unsettled.clear()
        self._repool()
        for seen in self._seen.values():
            self._expires(seen)

    # -- how facts change

    def _apply_to_fleet(
        self,
        event: NodesSeen
        | NodesGone
        | HoldTaken
        | HoldReleased
        | Frozen
        | Unfrozen
        | TeamSet
        | CallRefused
        | DaemonStarted
        | SettingsChanged
        | RunsRemoved
        | NodeLetGo,
    ) -> None:
        match event:
            case NodesSeen():
                for node in event.nodes:
                    self._nodes[node.name] = node
                    self._slots.join(node, self._keys)
                    self._replace_lanes(node.name)
            case NodesGone():
                for name in event.names:
                    self._slots.leave(name)
                    self._nodes.pop(name, None)
                    self._seen.pop(name, None)
                    self._traffic.forget_node(name)
                    self._replace_lanes(name)
            case HoldTaken():
                self._take(event.hold)
                self._slots.judge((event.hold.node,))
            case HoldReleased():
                key = (event.node, event.source, event.id)
                self._holds.pop(key, None)
                self._held.get(event.node, {}).pop(key, None)
                self._slots.judge((event.node,))
            case Frozen():
                self._freezes[event.freeze.id] = event.freeze
                self.lanes.heat_all()
            case Unfrozen():
                self._freezes.pop(event.freeze, None)
                self.lanes.heat_all()
            case TeamSet():
                self._team_rules[event.rules.team] = event.rules
                self.lanes.heat_all()
            case DaemonStarted():
                self._epoch = event.epoch
            case CallRefused() | SettingsChanged() | RunsRemoved() | NodeLetGo():
                pass
            case _:
                assert_never(event)

    def _open(self, event: RolloutOpened) -> None:
        if self._compile is None:
            raise ValueError("this index was built without a way to compile plans")
        self._add_rollout(changes.opened(event, self._compile(event.content)))
        for target in event.targets:
            self._put(target)

    def _add_rollout(self, rollout: Rollout) -> None:
        self._rollouts[rollout.id] = rollout
        self._targets[rollout.id] = {}
        self._tallies[rollout.id] = Tally()
        self._pending[rollout.id] = {}
        if self._add_keys(rollout.plan):
            self._repool()

    def _replace(self, rollout_id: str, rollout: Rollout) -> None:
        closes = rollout.closed and not self._rollouts[rollout_id].closed
        self._rollouts[rollout_id] = rollout
        self._unsettled.pop(rollout_id, None)
        if closes:
            targets = self._targets[rollout_id].values()
            for target in targets:
                self.lanes.unplace(target)
            self._traffic.forget_rollout(rollout_id)
            # What can still be done for nodes that it keeps down is less from now on.
            self._slots.judge(target.node for target in targets if kept_down(self, target).code)

    def _delete(self, rollout: str) -> None:
        if rollout not in self._rollouts:
            return  # it closed before this index was built
        gone = list(self._targets[rollout].values())
        for target in gone:
            self.lanes.unplace(target)
            self._on_node[target.node].pop(rollout, None)
            self._wanted.discard((rollout, target.node))
            self._wave_ends.pop((rollout, target.wave), None)
        self._at_work -= len(self._tallies[rollout].busy)
        for table in (self._rollouts, self._targets, self._tallies, self._pending, self._unsettled):
            table.pop(rollout, None)
        self._slots.judge(target.node for target in gone)

    def _gather(self, rollout: str, targets: Sequence[Target]) -> None:
        """Store targets that are new, before there are any pools and lanes."""
        self._tallies[rollout].gather(targets)
        for target in targets:
            self._targets[rollout][target.node] = target
            self._on_node.setdefault(target.node, {})[rollout] = target
            if target.phase in BUSY:
                self._at_work += 1
            elif target.phase is Phase.PENDING:
                self._pending[rollout].setdefault(target.wave, []).append(place_of(target))
            if target.phase in BUSY or target.order is not None:
                self._wanted.add((rollout, target.node))
        for queue in self._pending[rollout].values():
            queue.sort()

    def _put(self, target: Target) -> None:
        """Store a target and keep all that is counted from it."""
        rollout, node = target.rollout, target.node
        before = self._targets[rollout].get(node)
        expected = self._tallies[rollout].expected_s(0.0)
        if before is not None:
            self._uncount(before)
        self._targets[rollout][node] = target
        self._on_node.setdefault(node, {})[rollout] = target
        self._count(target)
        if self._tallies[rollout].expected_s(0.0) != expected:
            self.lanes.heat_rollout(rollout)
        needs_driver = target.phase in BUSY or target.order is not None
        (self._wanted.add if needs_driver else self._wanted.discard)((rollout, node))
        self._unsettled.pop(rollout, None)
        self._wave_ends.pop((rollout, target.wave), None)
        self._slots.judge((node,))

    def _count(self, target: Target) -> None:
        self._tallies[target.rollout].count(target, 1)
        if target.phase in BUSY:
            self._at_work += 1
        if target.phase is Phase.PENDING:
            insort(self._pending[target.rollout].setdefault(target.wave, []), place_of(target))
            self._enlane(target)

    def _uncount(self, target: Target) -> None:
        self._tallies[target.rollout].count(target, -1)
        if target.phase in BUSY:
            self._at_work -= 1
        if target.phase is Phase.PENDING:
            queue = self._pending[target.rollout][target.wave]
            del queue[bisect_left(queue, place_of(target))]
            self.lanes.unplace(target)

    def _enlane(self, target: Target) -> None:
        if self._rollouts[target.rollout].closed:
            return
        ids = tuple(pool.id for pool in self.pools_for(target.rollout, target.node))
        self.lanes.place(target, ids)

    def _replace_lanes(self, node: str) -> None:
        """Let a node whose pools changed wait in other lanes."""
        for target in self.targets_on(node):
            if target.phase is Phase.PENDING:
                self.lanes.unplace(target)
                self._enlane(target)

    def _take(self, hold: Hold) -> None:
        key = (hold.node, hold.source, hold.id)
        self._holds[key] = hold
        self._held.setdefault(hold.node, {})[key] = hold
        if hold.until is not None:
            self._slots.expires(hold.node, hold.until, lifts=True)

    # -- pools

    def _add_keys(self, plan: Plan) -> bool:
        """Add the pool keys of a plan; say whether there were new ones."""
        added = tuple(key for key in plan.pool_keys if key not in self._keys)
        self._keys += added
        return bool(added)

    def _repool(self) -> None:
        """Lay out the pools and the lanes anew."""
        self.lanes.clear()
        self._slots.rebuild(self._nodes.values(), self._keys)
        for targets in self._targets.values():
            for target in targets.values():
                if target.phase is Phase.PENDING:
                    self._enlane(target)
