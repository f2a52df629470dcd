"""What decide() needs, kept by events and equal to an index built afresh.

The facts are those of the snapshot; everything else here is derived from them:
who is down, how full each pool is, how far each rollout has come.  Each event
touches only what it is about.  Time is an argument: `advance(now)` lets
observations grow old and holds run out.

It makes no decision: that is schedule.py's.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, assert_never

from machines import changes, gates, pools, waves
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
from machines.limits import Limits
from machines.node import NO_LABEL, Node, Observation, pools_of
from machines.plan import Plan
from machines.rollout import Failure, Hold, Rollout, Target
from machines.states import BUSY, Phase
from machines.tally import Tally
from machines.windows import Freeze

Compile = Callable[[Mapping[str, Any]], Plan]
"""Makes a plan of its canonical content; the shell knows how."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything the store remembers that decisions are made from."""

    nodes: tuple[Node, ...] = ()
    rollouts: tuple[Rollout, ...] = ()
    targets: tuple[Target, ...] = ()
    holds: tuple[Hold, ...] = ()
    freezes: tuple[Freeze, ...] = ()
    epoch: int = 0


Place = tuple[bool, int, str]
"""Where a pending node stands in its wave: still isolated ones first, then by position."""


@dataclass(slots=True)
class Pool:
    """The members of one pool, those known to be down, and those of which nobody knows."""

    key: str
    value: str
    members: set[str] = field(default_factory=set)
    down: set[str] = field(default_factory=set)
    unknown: set[str] = field(default_factory=set)

    @property
    def id(self) -> str:
        """The pool's id, `key/value`."""
        return f"{self.key}/{self.value}"


class Index:
    """The facts, and what follows from them at the instant `now` (epoch seconds)."""

    def __init__(self, limits: Limits, compile_plan: Compile | None = None) -> None:
        self.limits = limits
        self.now = 0.0
        self._compile = compile_plan
        self._epoch = 0
        self._nodes: dict[str, Node] = {}
        self._rollouts: dict[str, Rollout] = {}
        self._targets: dict[str, dict[str, Target]] = {}
        self._on_node: dict[str, dict[str, Target]] = {}
        self._holds: dict[tuple[str, str, str], Hold] = {}
        self._held: dict[str, dict[tuple[str, str, str], Hold]] = {}
        self._freezes: dict[str, Freeze] = {}
        self._seen: dict[str, Observation] = {}
        self._keys: tuple[str, ...] = tuple(limits.pools)
        self._pools: dict[str, Pool] = {}
        self._pools_of: dict[str, tuple[Pool, ...]] = {}
        self._stands: dict[str, pools.Stand] = {}
        self._tallies: dict[str, Tally] = {}
        self._pending: dict[str, dict[str, list[Place]]] = {}
        self._unsettled: dict[str, tuple[Failure, ...]] = {}
        self._wave_ends: dict[tuple[str, str], float | None] = {}
        self._wanted: set[tuple[str, str]] = set()
        self._timers: list[tuple[float, str]] = []

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
        for target in snapshot.targets:
            index._put(target)
        for hold in snapshot.holds:
            index._take(hold)
        index._freezes = {freeze.id: freeze for freeze in snapshot.freezes}
        for node in snapshot.nodes:
            index._nodes[node.name] = node
            index._join_pools(node)
        index._restand(index._nodes)
        return index

    # -- facts

    @property
    def nodes(self) -> Mapping[str, Node]:
        """All known nodes by name."""
        return self._nodes

    @property
    def rollouts(self) -> Mapping[str, Rollout]:
        """All rollouts by id, first submitted first."""
        return self._rollouts

    @property
    def holds(self) -> Sequence[Hold]:
        """All holds, also those that have run out and were not released."""
        return tuple(self._holds.values())

    @property
    def freezes(self) -> Sequence[Freeze]:
        """All freezes, also those that have run out and were not lifted."""
        return tuple(self._freezes.values())

    @property
    def observations(self) -> Sequence[Observation]:
        """The last observation of each node."""
        return tuple(self._seen.values())

    @property
    def epoch(self) -> int:
        """The daemon's tenure: it grows with every start."""
        return self._epoch

    def rollout(self, rollout: str) -> Rollout:
        """Return a rollout; raises KeyError."""
        return self._rollouts[rollout]

    def target(self, rollout: str, node: str) -> Target:
        """Return a node of a rollout; raises KeyError."""
        return self._targets[rollout][node]

    def targets(self, rollout: str) -> Iterable[Target]:
        """Return all targets of a rollout, in the order in which they came in."""
        return self._targets[rollout].values()

    def targets_on(self, node: str) -> Iterable[Target]:
        """Return the node's targets in all rollouts."""
        return self._on_node.get(node, {}).values()

    def holds_on(self, node: str) -> Iterable[Hold]:
        """Return the holds on a node, also those that have run out."""
        return self._held.get(node, {}).values()

    def observation(self, node: str) -> Observation | None:
        """Return the last observation of a node."""
        return self._seen.get(node)

    def snapshot(self) -> Snapshot:
        """Return the facts as a value, as the store would load them."""
        return Snapshot(
            nodes=tuple(self._nodes.values()),
            rollouts=tuple(self._rollouts.values()),
            targets=tuple(t for targets in self._targets.values() for t in targets.values()),
            holds=tuple(self._holds.values()),
            freezes=tuple(self._freezes.values()),
            epoch=self._epoch,
        )

    # -- what follows from them

    def busy(self) -> list[Target]:
        """Return every target that needs a driver: at work, or with a person's order."""
        return [self._targets[rollout][node] for rollout, node in sorted(self._wanted)]

    def tally(self, rollout: str) -> Tally:
        """Return the running counts of a rollout."""
        return self._tallies[rollout]

    def in_flight(self) -> int:
        """Return how many nodes are at work in the whole fleet."""
        return sum(len(tally.busy) for tally in self._tallies.values())

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
        over = [pool for pool in self._pools.values() if len(pool.down) > self.budget(pool)]
        return sorted(over, key=lambda pool: pool.id)

    def next_change(self) -> float:
        """Return when next a hold runs out or a bad observation is too old (epoch seconds)."""
        soon = (at for at, node in self._timers if node in self._stands)
        return min(soon, default=math.inf)

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
        return self._stands.get(node)

    def pools_of(self, node: Node) -> tuple[str, ...]:
        """Return the ids of the pools that every plan obeys on this node."""
        return pools_of(node.labels, tuple(self.limits.pools))

    def pools_for(self, rollout: str, node: str) -> tuple[Pool, ...]:
        """Return the node's pools under this rollout: those of all plans, and those its plan adds."""
        found = self._pools_of.get(node, ())
        if len(self._keys) == len(self.limits.pools):
            return found
        asked = self._rollouts.get(rollout)  # a hold asks on behalf of no rollout
        added = () if asked is None else asked.plan.pool_keys
        return tuple(pool for pool in found if pool.key in self.limits.pools or pool.key in added)

    def pool(self, pool: str) -> Pool:
        """Return a pool by its id; one that has no members is empty."""
        key, _, value = pool.partition("/")
        return self._pools.get(pool) or Pool(key, value)

    def members(self, key: str, value: str) -> Iterable[str]:
        """Return the known nodes of the pool `key/value`, in no order."""
        return self.pool(f"{key}/{value}").members

    def pool_ids(self) -> Iterable[str]:
        """Return the ids of all pools that have had members."""
        return self._pools.keys()

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
            case LookedCurrent() | NodeOrdered():
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
            heapq.heappush(self._timers, (seen.at + self.limits.observe_within_s, seen.node))
            self._restand((seen.node,))

    def relimit(self, limits: Limits) -> None:
        """Take up new settings."""
        self.limits = limits
        self._keys = tuple(limits.pools)
        for rollout in self._rollouts.values():
            self._add_keys(rollout.plan)
        self._repool()

    def advance(self, now: float) -> None:
        """Let time pass: observations grow old, holds run out."""
        if now < self.now:
            self.now = now
            self._restand(tuple(self._nodes))
            return
        self.now = now
        due: dict[str, None] = {}
        while self._timers and self._timers[0][0] <= now:
            due[heapq.heappop(self._timers)[1]] = None
        self._restand(due)

    # -- how facts change

    def _apply_to_fleet(
        self,
        event: NodesSeen
        | NodesGone
        | HoldTaken
        | HoldReleased
        | Frozen
        | Unfrozen
        | CallRefused
        | DaemonStarted,
    ) -> None:
        match event:
            case NodesSeen():
                for node in event.nodes:
                    self._nodes[node.name] = node
                    self._leave_pools(node.name)
                    self._join_pools(node)
                self._restand(node.name for node in event.nodes)
            case NodesGone():
                for name in event.names:
                    self._leave_pools(name)
                    self._nodes.pop(name, None)
                    self._seen.pop(name, None)
                    self._stands.pop(name, None)
            case HoldTaken():
                self._take(event.hold)
                self._restand((event.hold.node,))
            case HoldReleased():
                key = (event.node, event.source, event.id)
                self._holds.pop(key, None)
                self._held.get(event.node, {}).pop(key, None)
                self._restand((event.node,))
            case Frozen():
                self._freezes[event.freeze.id] = event.freeze
            case Unfrozen():
                self._freezes.pop(event.freeze, None)
            case DaemonStarted():
                self._epoch = event.epoch
            case CallRefused():
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
        self._rollouts[rollout_id] = rollout
        self._unsettled.pop(rollout_id, None)

    def _delete(self, rollout: str) -> None:
        nodes = list(self._targets.get(rollout, ()))  # one that ended in an earlier life is not here
        for node in nodes:
            self._on_node[node].pop(rollout, None)
            self._wanted.discard((rollout, node))
        for table in (self._rollouts, self._targets, self._tallies, self._pending):
            table.pop(rollout, None)
        self._restand(nodes)

    def _put(self, target: Target) -> None:
        """Store a target and keep all that is counted from it."""
        tally, places = self._tallies[target.rollout], self._pending[target.rollout]
        self._unsettled.pop(target.rollout, None)
        self._wave_ends.pop((target.rollout, target.wave), None)
        before = self._targets[target.rollout].get(target.node)
        if before is not None:
            tally.count(before, -1)
            _unplace(places, before)
        self._targets[target.rollout][target.node] = target
        self._on_node.setdefault(target.node, {})[target.rollout] = target
        tally.count(target, 1)
        _place(places, target)
        key = (target.rollout, target.node)
        (self._wanted.add if target.phase in BUSY or target.order is not None else self._wanted.discard)(key)
        self._restand((target.node,))

    def _take(self, hold: Hold) -> None:
        key = (hold.node, hold.source, hold.id)
        self._holds[key] = hold
        self._held.setdefault(hold.node, {})[key] = hold
        if hold.until is not None:
            heapq.heappush(self._timers, (hold.until, hold.node))

    # -- pools

    def _add_keys(self, plan: Plan) -> bool:
        """Add the pool keys of a plan; say whether there were new ones."""
        added = tuple(key for key in plan.pool_keys if key not in self._keys)
        self._keys += added
        return bool(added)

    def _repool(self) -> None:
        self._pools.clear()
        self._pools_of.clear()
        for node in self._nodes.values():
            self._join_pools(node)
        self._restand(tuple(self._nodes))

    def _join_pools(self, node: Node) -> None:
        joined = []
        for key in self._keys:
            value = node.labels.get(key, NO_LABEL)
            pool = self._pools.setdefault(f"{key}/{value}", Pool(key, value))
            pool.members.add(node.name)
            joined.append(pool)
        self._pools_of[node.name] = tuple(joined)

    def _leave_pools(self, node: str) -> None:
        for pool in self._pools_of.pop(node, ()):
            for nodes in (pool.members, pool.down, pool.unknown):
                nodes.discard(node)
            if not pool.members:
                del self._pools[pool.id]

    def _restand(self, nodes: Iterable[str]) -> None:
        """Judge again whether these nodes are down."""
        for node in nodes:
            if node not in self._nodes:
                continue
            stand = pools.stand(self, node)
            if stand is None:
                self._stands.pop(node, None)
            else:
                self._stands[node] = stand
            for pool in self._pools_of.get(node, ()):
                (pool.down.add if stand is not None and stand.sure else pool.down.discard)(node)
                (pool.unknown.add if stand is not None and not stand.sure else pool.unknown.discard)(node)


def _place(places: dict[str, list[Place]], target: Target) -> None:
    if target.phase is Phase.PENDING:
        insort(places.setdefault(target.wave, []), (not target.isolated, target.position, target.node))


def _unplace(places: dict[str, list[Place]], target: Target) -> None:
    if target.phase is Phase.PENDING:
        queue = places[target.wave]
        del queue[bisect_left(queue, (not target.isolated, target.position, target.node))]
