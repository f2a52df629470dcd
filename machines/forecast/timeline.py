"""What nodes wait for during a walk, and when their rollout lets them start.

Nodes of one queue group wait for the same, so the times are kept for groups: a decision says why a group
backs off, and why a whole rollout or a wave waits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from machines.facts.index import Index
from machines.model.decision import Decision, QueueGroup
from machines.model.reasons import ReasonCode
from machines.model.rollout import Rollout, Target
from machines.rules import pools, start_blockers, waves

Waits = dict[ReasonCode, float]


@dataclass(slots=True)
class _GroupWaits:
    """What a group waits for since an instant, and for what it has waited so long."""

    since: float
    code: ReasonCode
    own_code: ReasonCode = ReasonCode.MAX_PARALLEL
    totals: Waits = field(default_factory=dict)

    def turn(self, code: ReasonCode, now: float) -> None:
        if code is not self.code:
            self.add_up(now)
            self.code = code

    def add_up(self, now: float) -> None:
        if now > self.since:
            self.totals[self.code] = self.totals.get(self.code, 0.0) + now - self.since
        self.since = now


@dataclass(slots=True)
class Epoch:
    """A time in which nodes of a rollout may start, from an instant on: a wave, or what follows a pause."""

    wave: str
    begins_at: float


@dataclass(slots=True)
class Timeline:
    """The waits of all groups, and the epochs of all rollouts."""

    began_at: float
    epochs: dict[str, list[Epoch]] = field(default_factory=dict)
    blocked: dict[str, tuple[ReasonCode | None, str]] = field(default_factory=dict)
    """Why each rollout waits as a whole, and the wave whose turn it is."""
    _states: dict[str, tuple[ReasonCode | None, str]] = field(default_factory=dict)
    """What of `blocked` is not by time."""
    _groups: dict[QueueGroup, _GroupWaits] = field(default_factory=dict)
    _by_rollout: dict[str, list[QueueGroup]] = field(default_factory=dict)
    _by_pool: dict[str, list[QueueGroup]] = field(default_factory=dict)
    _group_of: dict[tuple[str, str], QueueGroup] = field(default_factory=dict)

    def prepare(self, index: Index) -> None:
        """Take the groups of the facts before the walk."""
        for rollout in index.rollouts:
            for group in index.pending_groups.of_rollout(rollout):
                self._groups[group] = _GroupWaits(self.began_at, ReasonCode.QUEUED)
                self._by_rollout.setdefault(rollout, []).append(group)
                for pool in group.pools:
                    self._by_pool.setdefault(pool, []).append(group)
                for _, _, node in index.pending_groups.positions(group):
                    self._group_of[rollout, node] = group

    def note(self, index: Index, decision: Decision, now: float) -> None:
        """Note why groups and rollouts wait after a decision."""
        for each in decision.backoffs:
            group = each.group
            waits = self._groups.get(group)
            if waits is not None and group in index.pending_groups:
                target = index.target(group.rollout, index.pending_groups.positions(group)[0][2])
                waits.own_code = _own_code(index, target, now)
                self._turn(group, waits, now)
        for rollout in index.rollouts.values():
            if not rollout.closed:
                self._note_rollout(index, rollout, now)

    def take_slots(self, index: Index, target: Target, now: float) -> None:
        """Note that a node has begun: its pools may have no slot left."""
        for pool in index.pools_for(target.rollout, target.node):
            if len(pool.down) >= index.budget(pool):
                for group in self._by_pool.get(pool.id, ()):
                    waits = self._groups[group]
                    waits.own_code = ReasonCode.POOL_FULL
                    self._turn(group, waits, now)

    def free_slots(self, target: Target, now: float) -> None:
        """Note that a node has given its slots back: what its pools kept may start, if a limit allows it."""
        for pool in target.pools:
            for group in self._by_pool.get(pool, ()):
                waits = self._groups[group]
                if waits.own_code in (ReasonCode.POOL_FULL, ReasonCode.OTHER_ROLLOUT):
                    waits.own_code = ReasonCode.MAX_PARALLEL
                    self._turn(group, waits, now)

    def waits_of(self, key: tuple[str, str], now: float) -> Waits:
        """Return what a node that starts now has waited for."""
        group = self._group_of.get(key)
        if group is None:
            return {}
        self._groups[group].add_up(now)
        return dict(self._groups[group].totals)

    def final_waits(self, index: Index, target: Target, now: float, horizon_at: float) -> Waits:
        """Return what a node waits for that has not started when the walk ends, until the horizon."""
        waits = self.waits_of((target.rollout, target.node), now)
        code, wave = self.blocked.get(target.rollout, (None, target.wave))
        if code is None:
            code = _own_code(index, target, now) if wave == target.wave else ReasonCode.EARLIER_WAVE
        waits[code] = waits.get(code, 0.0) + horizon_at - now
        return waits

    def _note_rollout(self, index: Index, rollout: Rollout, now: float) -> None:
        progress = waves.wave_progress(index, rollout, now)
        reason = start_blockers.rollout_blocker(index, rollout, now) or progress.blocker
        state = (None if reason is None else reason.code, "" if progress.wave is None else progress.wave.name)
        if self._states.get(rollout.id) != state:
            self._states[rollout.id] = state
            if reason is None and progress.wave is not None:
                self.epochs.setdefault(rollout.id, []).append(Epoch(progress.wave.name, now))
        # A decision asks for the plan's window once, so no group backs off because of it.
        closed = start_blockers.window_blocker(index, rollout, None, now) if reason is None else None
        blocked = (state[0] if closed is None else closed.code, state[1])
        if self.blocked.get(rollout.id) == blocked:
            return
        self.blocked[rollout.id] = blocked
        for group in self._by_rollout.get(rollout.id, ()):
            self._turn(group, self._groups[group], now)

    def _turn(self, group: QueueGroup, waits: _GroupWaits, now: float) -> None:
        code, wave = self.blocked.get(group.rollout, (None, group.wave))
        if code is None:
            code = waits.own_code if wave == group.wave else ReasonCode.EARLIER_WAVE
        waits.turn(code, now)


def _own_code(index: Index, target: Target, now: float) -> ReasonCode:
    """Return why the first node of a group does not start."""
    rollout = index.rollout(target.rollout)
    reason = start_blockers.node_blocker(index, rollout, target, now) or pools.slot_blocker(
        index, target, now
    )
    return ReasonCode.MAX_PARALLEL if reason is None else reason.code


def own_bound(index: Index, target: Target, now: float) -> tuple[float, ReasonCode | None]:
    """Return before when this node may not start whatever its group does, by what time alone ends."""
    rollout, bound, code = index.rollout(target.rollout), now, None
    for hold in index.holds_on(target.node):
        if hold.until is not None and hold.until > bound:
            bound, code = hold.until, ReasonCode.HELD
    # A freeze that ends within another one, or within a backoff: each is asked at the end of the last.
    for _ in range(1 + len(index.freezes)):
        reason = start_blockers.node_blocker(index, rollout, target, bound)
        if reason is None or reason.code not in (ReasonCode.FREEZE, ReasonCode.BACKOFF):
            break
        until = start_blockers.blocker_expires_at(
            index, rollout, index.nodes[target.node].team, reason, bound
        )
        if math.isinf(until):
            break
        bound, code = until, reason.code
    return bound, code
