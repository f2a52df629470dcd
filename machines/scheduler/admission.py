"""Admission: a walk over the pending nodes of a wave that starts each node that no rule blocks.

An admitted node takes its slots before the next one is tried.  What a rule needs to know and does not is
requested: observations, dry runs, traffic probes, comparisons of staged files.  This file knows one wave of
one rollout at a time; whether that wave may start is decided before.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from heapq import heappop, heappush, nsmallest
from typing import Final

from machines.facts import dry_runs
from machines.facts.availability import observed_unavailability
from machines.facts.index import Index
from machines.facts.pending_groups import QueuePosition
from machines.model import traffic
from machines.model.decision import (
    Admit,
    AwaitTurn,
    BackOff,
    CheckIfCurrent,
    CompareStaged,
    DryRun,
    ProbeTraffic,
    QueueGroup,
)
from machines.model.node import natural_sort_key
from machines.model.plan import WaveDef
from machines.model.preparation import COMPARISON_RETRY_S
from machines.model.reasons import Reason
from machines.model.rollout import Rollout, Target
from machines.rules import parallelism, pools, preparing, start_blockers, trains
from machines.rules.runners import runner_blocker
from machines.scheduler.decision_builder import DecisionBuilder, PoolRequests
from machines.states import Phase

MAX_OBSERVATIONS: Final = 256
"""Nodes to observe in one decision: what one batch of connections can carry."""

MAX_PASSED_OVER: Final = 512
"""Nodes without an observation that a wave passes over in one decision when it may request no more: some
milliseconds.  Behind them may be nodes that a watch has reported.
"""

MAX_STARTS: Final = 32
"""Nodes that one decision starts: a start takes a fifth of a millisecond, and the loop does nothing else
meanwhile.  Its commit is followed by the next decision.
"""

MAX_BACKOFFS: Final = 256
"""Groups that one decision backs off: some ten milliseconds.  After a window has opened over a fleet whose
inventory is stale, each of its groups backs off; the next decision continues at once.
"""

MAX_CURRENT_CHECKS: Final = 16
"""Nodes that one decision checks for compliance: each check is a login on the node."""


def admit_wave(index: Index, rollout: Rollout, wave: WaveDef, now: float, builder: DecisionBuilder) -> None:
    """Try the nodes of the ready groups in the order of their positions.

    A group without a node that could start, whatever else this decision starts, backs off.
    """
    wave_admission = _WaveAdmission(index, rollout, wave, now, builder)
    if rollout.plan.max_unready is not None:
        unready = parallelism.unready_nodes(index, rollout)
        request_observations(index, unready, builder)
        wave_admission.unready = frozenset(
            node for node in unready if index.target(rollout.id, node).phase is Phase.PENDING
        )
    # First, because the nodes are out of service for them already.
    for target in trains.joinable(index, rollout, wave.name):
        wave_admission.admit_joiner(target)
    groups = index.pending_groups
    entries = iter(groups.ready(rollout.id, wave.name))
    entry = next(entries, None)
    begun: list[tuple[QueuePosition, QueueGroup, _GroupCursor]] = []
    # Groups that only the capacity leaves ready do not back off, so the next decision tries them.
    while (entry or begun) and wave_admission.may_continue():
        # Across groups the order of positions holds: the next node is of a begun group or of the next one.
        if entry is not None and (not begun or entry[0] < begun[0][0]):
            (position, group), cursor, entry = entry, _GroupCursor(), next(entries, None)
            if (expires_at := wave_admission.group_blocked_until(group)) is not None:
                builder.backoffs.append(BackOff(group, expires_at))
                continue
        else:
            position, group, cursor = heappop(begun)
        if wave_admission.try_admit(index.target(rollout.id, position[2]), cursor):
            cursor.offset += 1
            positions = groups.positions(group)
            if cursor.offset < len(positions):
                heappush(begun, (positions[cursor.offset], group, cursor))
                continue
        if not cursor.stays_active:
            builder.backoffs.append(BackOff(group, cursor.retry_at))
    if (entry or begun) and len(builder.backoffs) >= MAX_BACKOFFS:
        builder.wake_by(now)  # no event follows a backoff
    wave_admission.admit_deferred()


def request_peer_observations(index: Index, target: Target, builder: DecisionBuilder) -> bool:
    """Request observations of the node's unknown peers; return whether any peer needs one."""
    if len(builder.nodes_to_observe) >= MAX_OBSERVATIONS:
        return True  # the next decision asks
    needs_observation = False
    for pool in index.pools_for(target.rollout, target.node):
        if pool.id not in builder.unobserved_by_pool:
            builder.unobserved_by_pool[pool.id] = request_observations(
                index, nsmallest(MAX_OBSERVATIONS, pool.unknown, key=natural_sort_key), builder
            )
        needs_observation |= builder.unobserved_by_pool[pool.id]
    return needs_observation


def request_observations(index: Index, nodes: Iterable[str], builder: DecisionBuilder) -> bool:
    needs_observation = False
    for node in nodes:
        seen = observed_unavailability(index, node)
        if seen is not None and seen.needs_observation:
            needs_observation = True
            # The rest stays without an observation, so the next decision asks for it.
            if len(builder.nodes_to_observe) >= MAX_OBSERVATIONS:
                break
            builder.nodes_to_observe[node] = None
    return needs_observation


@dataclass(slots=True)
class _GroupCursor:
    """How far a queue group has been tried; one that stays active is tried again in the next decision."""

    offset: int = 0
    stays_active: bool = False
    retry_at: float = math.inf


@dataclass(slots=True)
class _WaveAdmission:
    index: Index
    rollout: Rollout
    wave: WaveDef
    now: float
    builder: DecisionBuilder
    dry_runs_by_pool: PoolRequests = field(default_factory=lambda: PoolRequests(dry_runs.DRY_RUN_AHEAD))
    deferred: list[Target] = field(default_factory=list)
    probe_count: int = 0
    passed_over: int = 0
    counted_starts: int = -1
    capacity_left: int = 0
    unready: frozenset[str] = frozenset()
    """Pending nodes that are not ready after their change."""
    is_full_for_ready: bool = False
    window_blockers: dict[str | None, Reason | None] = field(default_factory=dict)
    """By team, which is asked once for all its groups."""

    def may_continue(self) -> bool:
        """Return whether one more node may be tried in this decision."""
        # Only a start changes the capacity, and asking for it costs more than to pass over a node.
        if len(self.builder.capacity.nodes) != self.counted_starts:
            self.counted_starts = len(self.builder.capacity.nodes)
            # Each of them counts for all others, so one of them may have room where no ready node has.
            unready = next(iter(self.unready), None)
            self.capacity_left = self._remaining_capacity(unready)
            self.is_full_for_ready = unready is not None and not self._remaining_capacity(None)
        has_room = self.capacity_left > 0 and self.builder.count(Admit) < MAX_STARTS
        # Of all waves together: a later rollout takes no slot of nodes that this decision does not reach.
        may_back_off = len(self.builder.backoffs) < MAX_BACKOFFS
        return has_room and may_back_off and self.passed_over < MAX_PASSED_OVER

    def group_blocked_until(self, group: QueueGroup) -> float | None:
        """Return until when a freeze or a window blocks all nodes of a group; None if neither does."""
        index, team = self.index, group.team
        if team not in self.window_blockers:
            self.window_blockers[team] = start_blockers.window_blocker(index, self.rollout, team, self.now)
        blocker = (
            start_blockers.freeze_blocker(index, team, group.pools, self.now) or self.window_blockers[team]
        )
        return None if blocker is None else self._expires_at(team, blocker)

    def try_admit(self, target: Target, cursor: _GroupCursor) -> bool:
        """Admit the node unless a rule blocks it; return whether to try the next one of its group."""
        index, builder = self.index, self.builder
        is_full = self.is_full_for_ready and target.node not in self.unready
        if is_full or self._is_passed_over(target.node) or target.node in builder.capacity.nodes:
            # Another node's outage ends, and a node that another rollout starts is free again later.
            cursor.stays_active = True
            return True
        if runner_blocker(index, target) is not None:
            # Before what costs more: a full runner may have all nodes of the fleet.
            return True
        if target.is_checked_first:
            return self._request_current_check(target, cursor)
        blocked = pools.pool_without_slot(index, target, builder.capacity)
        if blocked is not None and blocked[1] is not None:
            # A pool that only this decision's reservations fill may have a slot in the next one.
            without_reservations = pools.pool_without_slot(index, target)
            is_full = without_reservations is not None and without_reservations[1] is not None
            cursor.stays_active |= not is_full
            # A group is one set of pools, so the next node is blocked as well; only isolated nodes, which
            # come first and have slots of their own, say nothing about it.
            return target.isolated
        node_blocker = start_blockers.node_blocker(index, self.rollout, target, self.now)
        if node_blocker is None and (turn := trains.turn_blocker(index, target, self.now)) is not None:
            self._await_turn(target, turn, cursor)
            return True
        if node_blocker is not None and node_blocker.code not in start_blockers.NEEDS_OBSERVATION:
            cursor.retry_at = min(cursor.retry_at, self._node_expires_at(target, node_blocker))
            return True
        if node_blocker is not None or blocked is not None:
            # Both are requested at once: one after the other would take two rounds of observations.
            stale = request_observations(index, (target.node,), builder) | request_peer_observations(
                index, target, builder
            )
            cursor.stays_active |= stale or pools.pool_without_slot(index, target) != blocked
            return blocked is None or target.isolated
        if runner_blocker(index, target, builder.capacity) is not None:
            # What this decision starts fills the runner, which may have room in the next one.
            cursor.stays_active = True
            return True
        if self.rollout.plan.traffic and index.plan_for(target).traffic:
            result = index.traffic_of(target.rollout, target.node)
            if result is None or not result.is_idle(self.now, self.rollout.plan.idle_for_s):
                return self._request_probe(target, result, cursor)
        if builder.dry_reason is None and preparing.needs_comparison(index, target, self.now):
            self._request_comparison(target, cursor)
            return True
        cursor.stays_active = True
        return builder.dry_reason is None and self._admit(target)

    def admit_deferred(self) -> None:
        """Admit deferred nodes whose slots no other node took."""
        for target in self.deferred:
            # An earlier node of the pool awaits its dry run; it must not find its slot taken.
            if self.dry_runs_by_pool.is_undecided(self._pool_ids(target)):
                continue
            capacity = self.builder.capacity
            blocked = pools.pool_without_slot(self.index, target, capacity)
            is_full = runner_blocker(self.index, target, capacity) is not None
            if blocked is None and not is_full and self._remaining_capacity(target.node):
                capacity.reserve(self.index, target)
                self.builder.add(Admit(target.rollout, target.node))

    def _admit(self, target: Target) -> bool:
        """Admit a node that no rule blocks, unless another node of its pools should go first."""
        builder = self.builder
        # An earlier node of the pool awaits its probe and keeps its position until the answer.
        # The items of a node are among those of the plan.
        if not self.rollout.plan.traffic and not dry_runs.needs_dry_run(
            self.index, self.rollout.plan, target
        ):
            self._start(target)
            return True
        plan = self.index.plan_for(target)
        if plan.traffic and builder.probes_by_pool.is_undecided(self._pool_ids(target)):
            return False
        if dry_runs.needs_dry_run(self.index, plan, target):
            is_next_eligible = self._request_dry_run(target)
            if is_next_eligible is not None:
                return is_next_eligible
        self._start(target)
        return True

    def _start(self, target: Target) -> None:
        self.builder.add(Admit(target.rollout, target.node))
        self.builder.capacity.reserve(self.index, target)

    def _request_current_check(self, target: Target, cursor: _GroupCursor) -> bool:
        """Check a node that may need nothing, which takes no slot; return whether to try the next one."""
        index, builder = self.index, self.builder
        blocker = start_blockers.node_blocker(index, self.rollout, target, self.now)
        if blocker is None:
            cursor.stays_active = True
            if builder.dry_reason is not None or builder.count(CheckIfCurrent) >= MAX_CURRENT_CHECKS:
                return False
            builder.add(CheckIfCurrent(target.rollout, target.node))
        elif blocker.code in start_blockers.NEEDS_OBSERVATION:
            cursor.stays_active |= request_observations(index, (target.node,), builder)
        else:
            cursor.retry_at = min(cursor.retry_at, self._node_expires_at(target, blocker))
        return True

    def _request_dry_run(self, target: Target) -> bool | None:
        """Return None for a node to admit now; else whether to try the next one of its group."""
        result, pool_ids = self.index.dry_run_results.fresh(target, self.now), self._pool_ids(target)
        has_competitors = any(self.index.pending_groups.has_competitors(pool) for pool in pool_ids)
        ahead = dry_runs.DRY_RUN_AHEAD * self._remaining_capacity(target.node)
        # Later nodes wait for these answers: more dry runs would only find out more than can start.
        if self.dry_runs_by_pool.is_exhausted(pool_ids) or self.builder.count(DryRun) >= ahead:
            return False
        # Without a competitor too: a node that can never be isolated must take no slot of the fleet.
        if result is None or (has_competitors and result.succeeds is False):
            self.dry_runs_by_pool.add(pool_ids, undecided=result is None)
            self.deferred.append(target)
            if result is None:
                self.builder.add(DryRun(target.rollout, target.node))
                self.builder.wake_by(self.now + dry_runs.RESULT_MAX_AGE_S)
            return True
        return False if self.dry_runs_by_pool.is_undecided(pool_ids) else None

    def _request_probe(
        self, target: Target, result: traffic.TrafficResult | None, cursor: _GroupCursor
    ) -> bool:
        """Probe a node that is not known to be idle; return whether to try the next one of its group.

        A node that was never probed, or last idle, keeps its position until the answer.  A node that is busy
        or unknown, or must be idle for longer, yields to the others.
        """
        builder, pool_ids = self.builder, self._pool_ids(target)
        if result is not None and result.is_recent(self.now):
            # It is one of the candidates of this poll, and the next poll may probe others.
            builder.probes_by_pool.add(pool_ids, undecided=False)
            builder.wake_by(result.at + result.poll_s)
        # A busy node is probed less and less often, so that its pool is not held up by polls of it.
        if result is not None:
            due_at = start_blockers.reprobe_at(self.index, target, result)
            if result.at <= self.now < due_at:
                cursor.retry_at = min(cursor.retry_at, due_at)
                return True
        yields = result is not None and (result.busy is not False or self.rollout.plan.idle_for_s > 0)
        cursor.stays_active = True
        if builder.probes_by_pool.is_exhausted(
            pool_ids
        ) or self.probe_count >= traffic.PROBE_AHEAD * self._remaining_capacity(target.node):
            return yields
        self.probe_count += 1
        builder.probes_by_pool.add(pool_ids, undecided=not yields)
        builder.add(ProbeTraffic(target.rollout, target.node))
        builder.wake_by(self.now + self.rollout.plan.poll_s)
        return True

    def admit_joiner(self, target: Target) -> None:
        """Admit a node that is isolated by its train already; what its rules need to know is requested."""
        index, builder, cursor = self.index, self.builder, _GroupCursor()
        if target.node in builder.capacity.nodes:
            return
        blocker = trains.join_blocker(index, target, self.now)
        if blocker is not None:
            if blocker.code in start_blockers.NEEDS_OBSERVATION:
                request_observations(index, (target.node,), builder)
                request_peer_observations(index, target, builder)
            return
        if index.plan_for(target).traffic:
            result = index.traffic_of(target.rollout, target.node)
            if result is None or not result.is_idle(self.now, self.rollout.plan.idle_for_s):
                self._request_probe(target, result, cursor)
                return
        if preparing.needs_comparison(index, target, self.now):
            self._request_comparison(target, cursor)
            return
        builder.add(Admit(target.rollout, target.node))
        builder.capacity.reserve(index, target)

    def _await_turn(self, target: Target, reason: Reason, cursor: _GroupCursor) -> None:
        """Note since when a node waits for another rollout of its train, and ask again in a while."""
        if reason.since is None:
            self.builder.add(AwaitTurn(target.rollout, target.node))
        cursor.retry_at = min(cursor.retry_at, self._node_expires_at(target, reason))

    def _request_comparison(self, target: Target, cursor: _GroupCursor) -> None:
        """Compare the staged files of a node that could start; without an answer it yields to the others."""
        last = self.index.staged_comparison(target.rollout, target.node)
        if last is not None and last.problem:
            due_at = last.at + COMPARISON_RETRY_S
            if last.at <= self.now < due_at:
                cursor.retry_at = min(cursor.retry_at, due_at)
                self.builder.wake_by(due_at)
                return
        else:
            # It takes its slots with the answer: no node after it may find them free until then.
            self.builder.capacity.reserve(self.index, target)
        cursor.stays_active = True
        self.builder.add(CompareStaged(target.rollout, target.node))

    def _is_passed_over(self, node: str) -> bool:
        """Return whether the node needs an observation that this decision requests no more."""
        if len(self.builder.nodes_to_observe) < MAX_OBSERVATIONS:
            return False
        index, seen = self.index, self.index.reported_observation(node)
        if seen is not None and index.now < index.observed_at(seen) + index.limits.observe_within_s:
            return False
        self.passed_over += 1
        return True

    def _node_expires_at(self, target: Target, blocker: Reason) -> float:
        node = self.index.nodes.get(target.node)
        return self._expires_at(None if node is None else node.team, blocker)

    def _expires_at(self, team: str | None, blocker: Reason) -> float:
        return start_blockers.blocker_expires_at(self.index, self.rollout, team, blocker, self.now)

    def _remaining_capacity(self, node: str | None) -> int:
        left = parallelism.remaining_capacity(
            self.index, self.rollout, self.wave, self.builder.capacity, node=node
        )
        return max(0, left - trains.reserved_places(self.index, self.rollout))

    def _pool_ids(self, target: Target) -> list[str]:
        return [pool.id for pool in self.index.all_pools(target.node)]
