"""What to do now, and why the rest does not move.

`decide` walks the rollouts in the order of their submission and each one's
waiting nodes in order; whoever passes every rule takes its slots before the
next one is asked.  `why` asks the same rules about one node.  Deciding changes
nothing: the daemon commits what it carries out, and asking again gives what is
left.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, nsmallest
from typing import Final

from machines import gates, pools, prospects, putbacks, rules, waves
from machines.ballots import is_opened
from machines.decision import Decision, Look, Open, PutBack, Rehearse, Start
from machines.index import Index
from machines.lanes import Lane, Place
from machines.node import natural
from machines.plan import GateName, WaveSpec
from machines.rollout import Reason, Rollout, Target
from machines.stands import sight
from machines.states import Phase
from machines.waves import Course

OBSERVE_MOST: Final = 256
"""Nodes asked to be observed by one decision: what one batch of connections can carry."""


@dataclass(slots=True)
class _Draft:
    """A decision being made."""

    room: rules.Room = field(default_factory=rules.Room)
    starts: list[Start] = field(default_factory=list)
    looks: list[Look] = field(default_factory=list)
    rehearse: list[Rehearse] = field(default_factory=list)
    put_backs: list[PutBack] = field(default_factory=list)
    opens: list[Open] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)
    observe: dict[str, None] = field(default_factory=dict)
    asked: dict[str, bool] = field(default_factory=dict)
    reasons: dict[str, Reason] = field(default_factory=dict)
    wake_at: float = math.inf


def decide(index: Index, now: float) -> Decision:
    """Return what to do at `now` (epoch seconds), and why the rest does not move."""
    index.advance(now)
    draft = _Draft()
    quiet = rules.observe_only(index)
    for rollout in index.rollouts.values():
        if rollout.closed:
            continue
        _open_gates(index, rollout, now, draft)
        if index.all_done(rollout.id):
            _end(index, rollout, now, draft)
            continue
        _start(index, rollout, now, draft, quiet)
    if quiet is None:
        _put_back(index, now, draft)
        _watch_mates(index, now, draft)
    draft.wake_at = min(draft.wake_at, index.next_change())
    draft.reasons.update(pools.reasons(index))
    return Decision(
        starts=tuple(draft.starts),
        looks=tuple(draft.looks),
        rehearse=tuple(draft.rehearse),
        put_backs=tuple(draft.put_backs),
        opens=tuple(draft.opens),
        ends=tuple(draft.ends),
        observe=tuple(draft.observe),
        reasons=draft.reasons,
        wake_at=None if math.isinf(draft.wake_at) else draft.wake_at,
    )


def why(index: Index, rollout_id: str, node: str, now: float) -> Reason:
    """Return why a node stands where it stands; raises KeyError for a node that is no target."""
    index.advance(now)
    target = index.target(rollout_id, node)
    if target.phase is not Phase.PENDING:
        return rules.standing(target)
    rollout = index.rollout(rollout_id)
    shared = rules.rollout_block(index, rollout, now)
    course = waves.course(index, rollout, now)
    reason = _waiting(index, rollout, target, shared, course, now)
    return index.prospects.explain(target, reason or _turn(index, target, decide(index, now)))


def why_all(index: Index, rollout_id: str, now: float) -> dict[str, Reason]:
    """Return what why() says of every node of a rollout."""
    index.advance(now)
    rollout = index.rollout(rollout_id)
    shared = rules.rollout_block(index, rollout, now)
    course = waves.course(index, rollout, now)
    decision = decide(index, now)
    found = {}
    for target in index.targets(rollout_id):
        if target.phase is not Phase.PENDING:
            found[target.node] = rules.standing(target)
            continue
        reason = _waiting(index, rollout, target, shared, course, now)
        found[target.node] = index.prospects.explain(target, reason or _turn(index, target, decision))
    return found


def _waiting(
    index: Index, rollout: Rollout, target: Target, shared: Reason | None, course: Course, now: float
) -> Reason | None:
    """Return why a pending node may not start, None when only its turn is missing."""
    reason = shared or rules.wave_block(course, target)
    if reason is not None:
        return reason
    wave = next(spec for spec in rollout.plan.waves if spec.name == target.wave)
    reasons = (
        rules.own_block(index, rollout, target, now),
        pools.may_start(index, target, now),
        rules.room_block(index, rollout, wave, rules.Room()),
        rules.observe_only(index),
    )
    given = [reason for reason in reasons if reason is not None]
    return min(given, key=lambda reason: rules.vagueness(index, target, reason), default=None)


def rollout_reason(index: Index, rollout_id: str, now: float) -> Reason | None:
    """Return why a rollout as a whole does not move; None while a node of it is at work or may start."""
    index.advance(now)
    rollout = index.rollout(rollout_id)
    reason = rules.rollout_block(index, rollout, now)
    if reason is not None:
        return reason
    course = waves.course(index, rollout, now)
    if course.block is not None:
        return course.block
    if index.tally(rollout_id).busy:
        return None
    if course.wave is None:
        return _left_over(index, rollout)
    places = index.pending(rollout_id, course.wave.name)
    if not places:
        return None
    first = why(index, rollout_id, places[0][2], now)
    return None if first.code == "starting" else first


def _left_over(index: Index, rollout: Rollout) -> Reason | None:
    """Return why a rollout does not end whose waves are over: a vote covers a failure and mends no node."""
    nodes = dict.fromkeys(failure.node for failure in rollout.failures)
    failed = (target for node in nodes if (target := index.target(rollout.id, node)).phase is Phase.FAILED)
    first = next(failed, None)
    return None if first is None else rules.standing(first)


# -- starting --------------------------------------------------------------------


def _end(index: Index, rollout: Rollout, now: float, draft: _Draft) -> None:
    """End a rollout whose nodes are all done, once its last soak is over: a canary may still turn red."""
    until = max(waves.soaked_at(index, rollout, spec) for spec in rollout.plan.waves)
    if now >= until:
        draft.ends.append(rollout.id)
    else:
        draft.wake_at = min(draft.wake_at, until)


def _open_gates(index: Index, rollout: Rollout, now: float, draft: _Draft) -> None:
    asked = [(GateName.START, "")]
    asked += [(GateName.CONTINUE, spec.name) for spec in rollout.plan.waves if spec.gate is not None]
    for gate, wave in asked:
        if is_opened(rollout, gate, wave):
            continue
        if gates.gate_view(index, rollout, gate, wave, now).state == "open":
            draft.opens.append(Open(rollout.id, gate, wave))


def _start(index: Index, rollout: Rollout, now: float, draft: _Draft, quiet: Reason | None) -> None:
    """Start what may start of one rollout, and say why the first of the rest does not."""
    reason = rules.rollout_block(index, rollout, now)
    if reason is not None:
        draft.reasons[rollout.id] = reason
        return
    course = waves.course(index, rollout, now)
    if course.until is not None:
        draft.wake_at = min(draft.wake_at, course.until)
    if course.block is not None and course.wave is not None:
        draft.reasons[rollout.id] = draft.reasons[f"{rollout.id}/{course.wave.name}"] = course.block
        return
    if course.wave is None:
        return
    begun = draft.room.fleet
    _walk(index, rollout, course.wave, now, draft, quiet)
    if begun == draft.room.fleet and not index.tally(rollout.id).busy:
        places = index.pending(rollout.id, course.wave.name)
        first = index.target(rollout.id, places[0][2]) if places else None
        reason = None if first is None else _waiting(index, rollout, first, None, course, now)
        if reason is not None:
            draft.reasons[rollout.id] = reason


def _walk(
    index: Index, rollout: Rollout, wave: WaveSpec, now: float, draft: _Draft, quiet: Reason | None
) -> None:
    """Ask the hot lanes' nodes in the order of their places, and start whom every rule lets go.

    A lane of which nobody can start, whatever else this decision starts, is parked.
    """
    heads: list[tuple[Place, int, Lane, _Asked]] = []
    for number, lane in enumerate(index.lanes.hot(rollout.id, wave.name)):
        heads.append((lane.places[0], number, lane, _Asked()))
    heapify(heads)
    queue = prospects.Queue()
    while heads and rules.has_room(index, rollout, wave, draft.room):
        place, number, lane, asked = heappop(heads)
        if _ask(index, rollout, index.target(rollout.id, place[2]), now, draft, asked, queue, quiet):
            asked.at += 1
            if asked.at < len(lane.places):
                heappush(heads, (lane.places[asked.at], number, lane, asked))
                continue
        if not asked.hot:
            index.lanes.park(lane, asked.until)
    _start_passed(index, rollout, wave, draft, queue)


@dataclass(slots=True)
class _Asked:
    """How far a lane has been asked; `hot` says that it must be asked again next time."""

    at: int = 0
    hot: bool = False
    until: float = math.inf


def _ask(
    index: Index,
    rollout: Rollout,
    target: Target,
    now: float,
    draft: _Draft,
    asked: _Asked,
    queue: prospects.Queue,
    quiet: Reason | None,
) -> bool:
    """Start the node if every rule lets it go; say whether the next one of its lane is worth asking."""
    if target.node in draft.room.taken.nodes:
        asked.hot = True
        return True
    blocked = pools.blocked_by(index, target, draft.room.taken)
    if blocked is not None and blocked[1] is not None:
        asked.hot = asked.hot or not _is_full_anyway(index, target)
        return target.isolated
    own = rules.own_block(index, rollout, target, now)
    if own is not None and own.code not in rules.UNSEEN:
        asked.until = min(asked.until, rules.until(index, rollout, target, own, now))
        return True
    if own is not None or blocked is not None:
        asked.hot |= _ask_to_observe(index, target, draft) or pools.blocked_by(index, target) != blocked
        return blocked is None or target.isolated
    asked.hot = True
    if quiet is not None:
        return False
    if target.maybe_current:
        draft.looks.append(Look(target.rollout, target.node))
    else:
        if prospects.is_rehearsed(rollout.plan, target):
            passed = _pass_over(index, target, now, draft, queue)
            if passed is not None:
                return passed
        draft.starts.append(Start(target.rollout, target.node))
    draft.room.take(index, target)
    return True


def _pass_over(
    index: Index, target: Target, now: float, draft: _Draft, queue: prospects.Queue
) -> bool | None:
    """Return None for a node that goes now, else whether the next one of its lane may go in its place."""
    told = index.prospects.fresh(target, now)
    mine = [pool.id for pool in index.all_pools(target.node)]
    if queue.is_full(mine):
        return False
    rivals = any(index.lanes.has_rivals(pool) for pool in mine)
    if rivals and queue.pass_over(target, mine, told):
        if told is None:
            draft.rehearse.append(Rehearse(target.rollout, target.node))
            draft.wake_at = min(draft.wake_at, now + prospects.GOOD_FOR_S)
        return True
    return False if queue.is_unsure(mine) else None


def _start_passed(
    index: Index, rollout: Rollout, wave: WaveSpec, draft: _Draft, queue: prospects.Queue
) -> None:
    """Start nodes that were passed over where nobody else took their slots."""
    for target in queue.passed:
        if queue.is_unsure([pool.id for pool in index.all_pools(target.node)]):
            continue
        blocked = pools.blocked_by(index, target, draft.room.taken)
        if blocked is None and rules.has_room(index, rollout, wave, draft.room):
            draft.room.take(index, target)
            draft.starts.append(Start(target.rollout, target.node))


def _is_full_anyway(index: Index, target: Target) -> bool:
    """Say whether a pool is full also without what this decision starts."""
    blocked = pools.blocked_by(index, target)
    return blocked is not None and blocked[1] is not None


def _ask_to_observe(index: Index, target: Target, draft: _Draft) -> bool:
    """Ask for the node and its mates to be observed where that is too long ago; say whether any is."""
    return _observe(index, (target.node,), draft) | _observe_mates(index, target, draft)


def _observe_mates(index: Index, target: Target, draft: _Draft) -> bool:
    stale = False
    for pool in index.pools_for(target.rollout, target.node):
        if pool.id not in draft.asked:
            draft.asked[pool.id] = _observe(index, nsmallest(OBSERVE_MOST, pool.unknown, key=natural), draft)
        stale |= draft.asked[pool.id]
    return stale


def _observe(index: Index, nodes: Iterable[str], draft: _Draft) -> bool:
    stale = [node for node in nodes if (seen := sight(index, node)) is not None and seen.stale]
    for node in stale[: OBSERVE_MOST - len(draft.observe)]:
        draft.observe[node] = None
    return bool(stale)


# -- putting back ----------------------------------------------------------------


def _put_back(index: Index, now: float, draft: _Draft) -> None:
    """Put isolating nodes back that make room for a later outage, or for somebody who holds them."""
    told: dict[tuple[str, str], PutBack] = {}
    for pool, backs in putbacks.for_room(index, now).items():
        draft.reasons[pool] = backs[-1].reason
        for back in backs:
            told.setdefault((back.rollout, back.node), back)
    for back in putbacks.for_holds(index):
        told.setdefault((back.rollout, back.node), back)
    draft.put_backs += told.values()


def _watch_mates(index: Index, now: float, draft: _Draft) -> None:
    """Keep looking at the mates of isolating nodes, so that an outage among them is noticed in time."""
    for target in index.busy():
        if target.phase is Phase.ISOLATING:
            _observe_mates(index, target, draft)
            draft.wake_at = min(draft.wake_at, now + index.limits.observe_within_s)


# -- explaining ------------------------------------------------------------------


def _turn(index: Index, target: Target, decision: Decision) -> Reason:
    """Say that nothing stands in the way but, perhaps, another node whose turn comes first."""
    for start in _begun(decision):
        if (start.rollout, start.node) == (target.rollout, target.node):
            return Reason("starting", f"{target.node} starts now", index.now)
    ahead = next(_ahead(index, target, decision), None)
    text = f"{target.node} waits for its turn" + (f": {ahead} goes first" if ahead else "")
    return Reason("turn", text, target.since, ahead or "")


def _begun(decision: Decision) -> tuple[Start | Look, ...]:
    return (*decision.starts, *decision.looks)


def _ahead(index: Index, target: Target, decision: Decision) -> Iterator[str]:
    """Yield nodes that start now and take what this one needs."""
    mine = {pool.id for pool in index.pools_for(target.rollout, target.node)}
    for start in _begun(decision):
        theirs = {pool.id for pool in index.pools_for(start.rollout, start.node)}
        if start.node == target.node or mine & theirs:
            yield start.node
