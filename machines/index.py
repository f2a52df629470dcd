"""What decide() needs, kept by events and equal to an index built afresh.

The facts are those of the snapshot; everything else here is derived from them:
who is down, how full each pool is, how far each rollout has come.  Each event
touches only what it is about.  Time is an argument: `advance(now)` lets
observations grow old and holds run out.

It makes no decision: that is schedule.py's.

Longer than 400 lines: the facts and what is kept of them change together, in one place.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, assert_never

from machines import changes, gates, pools, waves
from machines.book import Book, Snapshot
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
    SettingsChanged,
    StepRecorded,
    TargetChanged,
    TargetsJoined,
    TeamSet,
    Unfrozen,
    VoteCast,
    VoteWithdrawn,
)
from machines.lanes import Lanes, Place, place_of
from machines.limits import Limits
from machines.node import Node, Observation, Sight, pools_of
from machines.plan import Plan
from machines.prospects import Prospect, Prospects
from machines.rollout import Failure, Hold, Reason, Rollout, Target
from machines.slots import Pool, Slots
from machines.states import BUSY, Phase
from machines.tally import Tally

__all__ = ["Compile", "Index", "Pool", "Snapshot"]

Compile = Callable[[Mapping[str, Any]], Plan]
"""Makes a plan of its canonical content; the shell knows how."""


class Index(Book):
    """The facts, and what follows from them at the instant `now` (epoch seconds)."""

    def __init__(self, limits: Limits, compile_plan: Compile | None = None) -> None:
        super().__init__(limits)
        self._compile = compile_plan
        self._keys: tuple[str, ...] = tuple(limits.pools)
        self.lanes = Lanes()
        self.prospects = Prospects()
        self._slots = Slots(self)
        self._pool_reasons: dict[str, Reason] = {}
        self._tallies: dict[str, Tally] = {}
        self._pending: dict[str, dict[str, list[Place]]] = {}
        self._unsettled: dict[str, tuple[Failure, ...]] = {}
        self._wave_ends: dict[tuple[str, str], float | None] = {}
        self._wanted: set[tuple[str, str]] = set()
        self._at_work = 0

    @classmethod
    def build(
        cls,
        snapshot: Snapshot,
        limits: Limits,
        compile: Compile | None = None,  # noqa: A002  # what it does, in the word of the plan file
    ) -> Index:
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

    # -- what follows from them

    def busy(self) -> list[Target]:
        """Return every target that needs a driver: at work, or with a person's order."""
        return [self._targets[rollout][node] for rollout, node in sorted(self._wanted)]

    def tally(self, rollout: str) -> Tally:
        """Return the running counts of a rollout."""
        return self._tallies[rollout]

    def in_flight(self) -> int:
        """Return how many nodes are at work in the whole fleet."""
        return self._at_work

    def all_done(self, rollout: str) -> bool:
        """Say whether every target of a rollout is done."""
        phases = self._tallies[rollout].phases
        return phases[Phase.DONE] == phases.total()

    def expected_s(self, rollout: str) -> float:
        """Return how long a node of this rollout takes."""
        return self._tallies[rollout].expected_s(self._rollouts[rollout].plan.expected_s)

    def has_failed(self, rollout: str, node: str) -> bool:
        """Say whether the node has failed in this rollout, settled or not."""
        return any(failure.node == node for failure in self._rollouts[rollout].failures)

    def crowded(self) -> list[Pool]:
        """Return the pools with more nodes down than their budget, in the order of their ids."""
        full = (self._slots.pools[pool] for pool in self._slots.full)
        over = (pool for pool in full if len(pool.down) > self.budget(pool))
        return sorted(over, key=lambda pool: pool.id)

    def pool_reasons(self) -> dict[str, Reason]:
        """Return why the full pools are full in which somebody waits.

        The keys are pool ids, or `rollout|id` for a pool that only plans name.
        """
        found: dict[str, Reason] = {}
        for pool_id in self._slots.full:
            if not self.lanes.waits_in(pool_id):
                continue
            reason = self._pool_reasons.get(pool_id)
            if reason is None:
                reason = self._pool_reasons[pool_id] = pools.explain(self, self._slots.pools[pool_id])
            if self._slots.pools[pool_id].key in self.limits.pools:
                found[pool_id] = reason
            else:
                found |= {f"{rollout}|{pool_id}": reason for rollout in self.lanes.rollouts_in(pool_id)}
        return found

    def reasons_changed(self, changed: Iterable[Pool]) -> None:
        """Forget the reasons of these pools: who takes their slots has changed."""
        for pool in changed:
            self._pool_reasons.pop(pool.id, None)

    def next_change(self) -> float:
        """Return when next time alone may change a decision, other than by a soak (epoch seconds)."""
        return min(self._slots.next_change(self._is_current), self.lanes.next_wake())

    def _is_current(self, node: str, at: float) -> bool:
        """Say whether a bad observation or a hold of the node still ends at the instant."""
        seen = self._seen.get(node)
        if seen is not None and seen.at + self.limits.observe_within_s == at:
            return True
        return any(hold.until == at for hold in self.holds_on(node))

    def unsettled(self, rollout: str) -> tuple[Failure, ...]:
        """Return the failures of a rollout that no sufficient vote covers."""
        known = self._unsettled.get(rollout)
        if known is None:
            known = gates.judge_failures(self._rollouts[rollout], sorted(self._tallies[rollout].teams))
            self._unsettled[rollout] = known
        return known

    def is_wave_over(self, rollout: str, wave: str) -> bool:
        """Say whether all nodes of a wave are done, or failed and covered by a vote."""
        tally = self._tallies[rollout]
        phases = tally.waves.get(wave)
        if phases is None:
            return True
        if any(count and phase not in (Phase.DONE, Phase.FAILED) for phase, count in phases.items()):
            return False
        if not phases[Phase.FAILED]:
            return True
        open_failures = {failure.id for failure in self.unsettled(rollout)}
        failed = (self._targets[rollout][node] for node in tally.failed)
        return not any(t.wave == wave and t.failure and t.failure.id in open_failures for t in failed)

    def wave_asks(self, rollout: str, wave: str) -> bool:
        """Say whether the gate after a wave is asked."""
        return waves.asks(self, self._rollouts[rollout], wave)

    def wave_end(self, rollout: str, wave: str) -> float | None:
        """Return when the last node of a wave came to its phase (epoch seconds); None for an empty wave."""
        key = (rollout, wave)
        if key not in self._wave_ends:
            times = (t.since for t in self._targets[rollout].values() if t.wave == wave)
            self._wave_ends[key] = max(times, default=None)
        return self._wave_ends[key]

    def pending(self, rollout: str, wave: str) -> Sequence[Place]:
        """Return the places of the wave's pending nodes, the next one first."""
        return self._pending.get(rollout, {}).get(wave, ())

    def released_at(self, node: str) -> float:
        """Return when we last let go of a node (epoch seconds); 0.0 when we never had it."""
        return max((t.since for t in self.targets_on(node) if t.attempt and t.phase not in BUSY), default=0.0)

    def stand(self, node: str) -> pools.Stand | None:
        """Return why the node counts as down at `now`, None when it is known to be up."""
        return self._slots.stand(node)

    def pools_of(self, node: Node) -> tuple[str, ...]:
        """Return the ids of the pools that every plan obeys on this node."""
        return pools_of(node.labels, tuple(self.limits.pools))

    def pools_for(self, rollout: str, node: str) -> tuple[Pool, ...]:
        """Return the node's pools under this rollout: those of all plans, and those its plan adds."""
        found = self._slots.of(node)
        if len(self._keys) == len(self.limits.pools):
            return found
        asked = self._rollouts.get(rollout)  # a hold asks on behalf of no rollout
        added = () if asked is None else asked.plan.pool_keys
        return tuple(pool for pool in found if pool.key in self.limits.pools or pool.key in added)

    def all_pools(self, node: str) -> tuple[Pool, ...]:
        """Return the pools of a node under any rollout: a node that is down is down in all of them."""
        return self._slots.of(node)

    def pool(self, pool: str) -> Pool:
        """Return a pool by its id; one that has no members is empty."""
        key, _, value = pool.partition("/")
        return self._slots.pools.get(pool) or Pool(key, value)

    def members(self, key: str, value: str) -> Iterable[str]:
        """Return the known nodes of the pool `key/value`, in no order."""
        return self.pool(f"{key}/{value}").members

    def pool_ids(self) -> Iterable[str]:
        """Return the ids of all pools that have had members."""
        return self._slots.pools.keys()

    def budget(self, pool: Pool) -> int:
        """Return how many of the pool's nodes may be down; 1 for a pool that only a plan names."""
        rule = self.limits.pools.get(pool.key)
        return 1 if rule is None else rule.budget(pool.value).of(len(pool.members))

    # -- changes

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
            self._expires(seen)
            self._slots.judge((seen.node,))

    def foresaw(self, prospect: Prospect) -> None:
        """Take in what a rehearsal told of a node that waits to start."""
        self.prospects.take(prospect)
        self.lanes.heat_node(prospect.node, (prospect.rollout,))

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

    def advance(self, now: float) -> None:
        """Let time pass: observations grow old, holds run out."""
        backwards = now < self.now
        self.now = now
        if backwards:
            self._turn_back()
        self._slots.advance(now)
        self.lanes.advance(now)

    def _turn_back(self) -> None:
        """Judge all anew: the clock was set back, and what had grown old or run out has not any more.

        How old an observation is that was made later than now nobody can say.
        """
        self._seen = {node: seen for node, seen in self._seen.items() if seen.at <= self.now}
        for seen in self._seen.values():
            self._expires(seen)
        for hold in self._holds.values():
            if hold.until is not None:
                self._slots.expires(hold.node, hold.until, lifts=True)
        self._slots.judge(self._nodes)
        self.lanes.heat_all()

    def _expires(self, seen: Observation) -> None:
        good = seen.sight is Sight.UP and not seen.foreign
        self._slots.expires(seen.node, seen.at + self.limits.observe_within_s, lifts=not good)

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
        | SettingsChanged,
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
            case CallRefused() | SettingsChanged():
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
        if rollout.closed and not self._rollouts[rollout_id].closed:
            for target in self._targets[rollout_id].values():
                self.lanes.unplace(target)
        self._rollouts[rollout_id] = rollout
        self._unsettled.pop(rollout_id, None)

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
        self._pool_reasons.clear()
        self.lanes = Lanes()
        self._slots.rebuild(self._nodes.values(), self._keys)
        for targets in self._targets.values():
            for target in targets.values():
                if target.phase is Phase.PENDING:
                    self._enlane(target)
