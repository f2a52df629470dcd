"""How far a rollout has come, computed from its targets and gates and stored nowhere.

Counting: total = done + failed + skipped + pending + in flight.  Nodes that
left are out of the total, rolled-back ones count as skipped, and percent is
100 * done / (total - skipped).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from machines import rules, schedule, waves
from machines.index import Index
from machines.plan import WaveSpec
from machines.rollout import Reason, Rollout, Target
from machines.states import BUSY, Phase
from machines.waves import Course

PASSING: Final = frozenset(
    {"turn", "starting", "max-parallel", "pool-full", "mate-unknown", "node-unknown", "backoff"}
)
"""Reasons that pass by themselves soon: when a node is done, or at the next look."""


class State(StrEnum):
    """How a rollout as a whole stands; a closed window or a freeze is running, with a reason."""

    AWAITING_APPROVAL = "awaiting-approval"
    RUNNING = "running"
    SOAKING = "soaking"
    PAUSED = "paused"
    DONE = "done"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class PoolProgress:
    """How far a rollout has come in one pool.

    `down` counts all known nodes of the pool, `unseen` those of them that are
    down only because nobody has looked at them lately.
    """

    pool: str
    total: int
    done: int
    failed: int
    in_flight: int
    down: int
    unseen: int
    max_unavailable: int


@dataclass(frozen=True, slots=True)
class Progress:
    """A rollout's standing; `eta_s` is in seconds from now, None when nobody can say."""

    rollout: str
    state: State
    wave: str
    percent: float
    total: int
    done: int
    failed: int
    skipped: int
    pending: int
    in_flight: tuple[Target, ...]
    pools: tuple[PoolProgress, ...]
    eta_s: float | None
    reason: Reason | None


def progress(index: Index, rollout_id: str, now: float) -> Progress:
    """Return how far a rollout has come; raises KeyError."""
    index.advance(now)
    rollout, tally = index.rollout(rollout_id), index.tally(rollout_id)
    course = waves.course(index, rollout, now)
    state = _state(index, rollout, course, now)
    total = tally.phases.total() - tally.left
    reason = None if state is State.DONE else schedule.rollout_reason(index, rollout_id, now)
    return Progress(
        rollout=rollout_id,
        state=state,
        wave=_wave(rollout, course),
        percent=_percent(total - tally.skipped, tally.done, state),
        total=total,
        done=tally.done,
        failed=tally.phases[Phase.FAILED],
        skipped=tally.skipped,
        pending=tally.phases[Phase.PENDING],
        in_flight=tuple(index.target(rollout_id, node) for node in sorted(tally.busy)),
        pools=_pools(index, rollout_id),
        eta_s=_eta_s(index, rollout, course, state, reason, now),
        reason=reason,
    )


def soaking(index: Index, now: float) -> tuple[Target, ...]:
    """Return the done nodes of every wave that soaks now, in all rollouts.

    A node that another rollout has out of service says nothing about this one.
    """
    index.advance(now)
    found: list[Target] = []
    for rollout in index.rollouts.values():
        if rollout.closed:
            continue
        course = waves.course(index, rollout, now)
        if course.soaking and course.wave is not None:
            name = course.wave.name
            done = (t for t in index.targets(rollout.id) if t.wave == name and t.phase is Phase.DONE)
            found += [target for target in done if not _is_taken(index, target.node)]
    return tuple(found)


def may_redden(index: Index, seen: Target) -> bool:
    """Say whether a check that began while a node soaked may still fail it.

    Looks take their time: meanwhile its rollout may be over, or another one have the node in hand.
    """
    rollout = index.rollouts.get(seen.rollout)
    if rollout is None or rollout.closed or seen.node not in index.nodes:
        return False
    return index.target(seen.rollout, seen.node) == seen and not _is_taken(index, seen.node)


def _is_taken(index: Index, node: str) -> bool:
    """Say whether some rollout works on the node, failed on it or has it isolated."""
    return any(t.phase in BUSY or t.phase is Phase.FAILED or t.isolated for t in index.targets_on(node))


def _state(index: Index, rollout: Rollout, course: Course, now: float) -> State:
    if rollout.cancelled is not None:
        return State.CANCELLED
    if rollout.ended_at is not None:
        return State.DONE
    block = rules.rollout_block(index, rollout, now)
    if block is not None:
        return State.AWAITING_APPROVAL if block.code == "gate-start" else State.PAUSED
    if course.soaking:
        return State.SOAKING
    return State.RUNNING if course.block is None else State.AWAITING_APPROVAL


def _wave(rollout: Rollout, course: Course) -> str:
    """Return the wave at work; the last one when all are over."""
    return rollout.plan.waves[-1].name if course.wave is None else course.wave.name


def _percent(wanted: int, done: int, state: State) -> float:
    if wanted > 0:
        return 100.0 * done / wanted
    return 100.0 if state is State.DONE else 0.0


def _pools(index: Index, rollout_id: str) -> tuple[PoolProgress, ...]:
    found = []
    for pool_id, tally in index.tally(rollout_id).pools.items():
        pool = index.pool(pool_id)
        found.append(
            PoolProgress(
                pool_id,
                tally.total,
                tally.done,
                tally.failed,
                tally.in_flight,
                len(pool.down) + len(pool.unknown),
                len(pool.unknown),
                index.budget(pool),
            )
        )
    return tuple(sorted(found, key=lambda each: each.pool))


def _eta_s(
    index: Index, rollout: Rollout, course: Course, state: State, reason: Reason | None, now: float
) -> float | None:
    """Return the seconds still to go if nothing gets in the way: the slowest pool, the limits, the soaks.

    While something is in the way that neither a node's end nor a look lifts, nobody can say.
    """
    if state not in (State.RUNNING, State.SOAKING):
        return 0.0 if state is State.DONE else None
    if state is State.RUNNING and reason is not None and reason.code not in PASSING:
        return None
    tally = index.tally(rollout.id)
    if reason is not None and reason.code == "pool-full" and not tally.busy and _asks_people(reason):
        return None
    rounds: float = sum(_rounds(index, rollout, spec) for spec in rollout.plan.waves)
    for pool_id, each in tally.pools.items():
        budget = index.budget(index.pool(pool_id))
        rounds = max(rounds, (each.total - each.done - each.failed) / budget if budget else math.inf)
    if math.isinf(rounds):
        return None
    return math.ceil(rounds) * index.expected_s(rollout.id) + _soaks_s(index, rollout, course, now)


def _asks_people(reason: Reason) -> bool:
    """Say whether a command must end it: who is at work in a pool is told before who failed there."""
    return (reason.lifted_by or "").startswith("rolloutctl ")


def _rounds(index: Index, rollout: Rollout, spec: WaveSpec) -> int:
    """Return how many nodes of a wave must follow each other, by the limits on nodes at work."""
    phases = index.tally(rollout.id).waves.get(spec.name)
    if phases is None:
        return 0
    to_do = phases.total() - phases[Phase.DONE] - phases[Phase.FAILED]
    limits = (index.limits.max_parallel, rollout.plan.max_parallel, spec.max_parallel)
    return math.ceil(to_do / max(1, min(limit for limit in (*limits, to_do) if limit is not None)))


def _soaks_s(index: Index, rollout: Rollout, course: Course, now: float) -> float:
    """Return the seconds of soaking that are still ahead."""
    if course.wave is None:
        return 0.0
    names = [spec.name for spec in rollout.plan.waves]
    ahead = rollout.plan.waves[names.index(course.wave.name) : -1]
    rest = sum(spec.soak_s for spec in ahead)
    if course.soaking and course.until is not None:
        rest += course.until - now - course.wave.soak_s
    return max(0.0, rest)
