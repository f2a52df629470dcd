"""What to do now, and why the rest does not move.

`decide` walks the rollouts in the order of their submission and each one's
waiting nodes in order (starting.py).  `why` asks the same rules about one node.
Deciding changes nothing: the daemon commits what it carries out, and asking
again gives what is left.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from machines import gates, pools, putbacks, rules, starting, traffic, waves
from machines.ballots import is_opened
from machines.decision import Decision, Look, Open, Probe, PutBack, Start
from machines.index import Index
from machines.plan import GateName
from machines.rollout import Reason, Rollout, Target
from machines.starting import Draft
from machines.states import Phase
from machines.waves import Course


def decide(index: Index, now: float) -> Decision:
    """Return what to do at `now` (epoch seconds), and why the rest does not move."""
    index.advance(now)
    draft = Draft(rules.observe_only(index))
    for rollout in index.rollouts.values():
        if rollout.closed:
            continue
        _open_gates(index, rollout, now, draft)
        if index.all_done(rollout.id):
            _end(index, rollout, now, draft)
            continue
        _start(index, rollout, now, draft)
    if draft.quiet is None:
        _put_back(index, now, draft)
        _watch_mates(index, now, draft)
    draft.wake(index.next_change())
    draft.reasons.update(pools.reasons(index))
    return Decision(
        starts=tuple(draft.starts),
        looks=tuple(draft.looks),
        rehearse=tuple(draft.rehearse),
        probes=tuple(draft.probes),
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
        return rules.standing(index, target)
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
            found[target.node] = rules.standing(index, target)
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
        rules.traffic_block(index, rollout, target),
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
    return None if first is None else rules.standing(index, first)


# -- starting --------------------------------------------------------------------


def _end(index: Index, rollout: Rollout, now: float, draft: Draft) -> None:
    """End a rollout whose nodes are all done, once its last soak is over: a canary may still turn red."""
    until = max(waves.soaked_at(index, rollout, spec) for spec in rollout.plan.waves)
    if now >= until:
        draft.ends.append(rollout.id)
    else:
        draft.wake(until)


def _open_gates(index: Index, rollout: Rollout, now: float, draft: Draft) -> None:
    asked = [(GateName.START, "")]
    asked += [(GateName.CONTINUE, spec.name) for spec in rollout.plan.waves if spec.gate is not None]
    for gate, wave in asked:
        if is_opened(rollout, gate, wave):
            continue
        if gates.gate_view(index, rollout, gate, wave, now).state == "open":
            draft.opens.append(Open(rollout.id, gate, wave))


def _start(index: Index, rollout: Rollout, now: float, draft: Draft) -> None:
    """Start what may start of one rollout, and say why the first of the rest does not."""
    reason = rules.rollout_block(index, rollout, now)
    if reason is not None:
        draft.reasons[rollout.id] = reason
        return
    course = waves.course(index, rollout, now)
    if course.until is not None:
        draft.wake(course.until)
    if course.block is not None and course.wave is not None:
        draft.reasons[rollout.id] = draft.reasons[f"{rollout.id}/{course.wave.name}"] = course.block
        return
    if course.wave is None:
        return
    begun = draft.room.fleet
    starting.walk(index, rollout, course.wave, now, draft)
    if begun == draft.room.fleet and not index.tally(rollout.id).busy:
        places = index.pending(rollout.id, course.wave.name)
        first = index.target(rollout.id, places[0][2]) if places else None
        reason = None if first is None else _waiting(index, rollout, first, None, course, now)
        if reason is not None:
            draft.reasons[rollout.id] = reason


# -- putting back ----------------------------------------------------------------


def _put_back(index: Index, now: float, draft: Draft) -> None:
    """Put isolating nodes back that make room for a later outage, or for somebody who holds them."""
    told: dict[tuple[str, str], PutBack] = {}
    for pool, backs in putbacks.for_room(index, now).items():
        draft.reasons[pool] = backs[-1].reason
        for back in backs:
            told.setdefault((back.rollout, back.node), back)
    for back in putbacks.for_holds(index):
        told.setdefault((back.rollout, back.node), back)
    draft.put_backs += told.values()


def _watch_mates(index: Index, now: float, draft: Draft) -> None:
    """Keep looking at the mates of isolating nodes, so that an outage among them is noticed in time."""
    for target in index.busy():
        if target.phase is Phase.ISOLATING:
            starting.observe_mates(index, target, draft)
            draft.wake(now + index.limits.observe_within_s)


# -- explaining ------------------------------------------------------------------


def _turn(index: Index, target: Target, decision: Decision) -> Reason:
    """Say that nothing stands in the way but, perhaps, another node whose turn comes first."""
    for start in _begun(decision):
        if (start.rollout, start.node) == (target.rollout, target.node):
            return Reason("starting", f"{target.node} starts now", index.now)
    if Probe(target.rollout, target.node) in decision.probes:
        return traffic.being_looked_at(target)
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
