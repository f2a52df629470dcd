"""Trains: which rollout of a train may join the outage of a node, and which waits for another one.

Each rollout of a train keeps its own gates, waves, windows and limits: a train starts nothing that the
rollout alone might not start.  What it changes is when: a later rollout waits until the earlier one has its
turn on a node, and the node stays isolated for a rollout that may join.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Final

from machines.facts.index import Index
from machines.facts.node_work import in_flight_on, is_isolated
from machines.model.node import natural_sort_key
from machines.model.reasons import Params, Reason, ReasonCode, Remedy, RemedyKind
from machines.model.rollout import Rollout, Target
from machines.model.train import Train
from machines.rules import parallelism, pools, preparing, start_blockers, waves
from machines.states import IN_FLIGHT_PHASES, Phase

LIFTED_BY_TIME: Final = frozenset(
    {ReasonCode.BACKOFF, ReasonCode.FREEZE, ReasonCode.OUTSIDE_WINDOW, ReasonCode.SOAKING}
)
"""Reasons that end at the instant of their remedy, if they have one."""

MAX_WAITS_IN_A_ROW: Final = 4
"""Reasons that end one after the other: one of each."""


def turn_blocker(index: Index, target: Target, now: float) -> Reason | None:
    """Return the earlier rollout of the train that the pending node waits for."""
    train = index.train_of(target.rollout)
    # A node that holds its isolation waits for nothing: it costs its pool a slot.
    if train is None or target.isolated or in_flight_on(index, target.node):
        return None
    since = index.train_wait(target)
    # A wait that begins later than now is from before the clock was set back.
    if since is not None and not since <= now < since + train.wait_s:
        return None
    until = (now if since is None else since) + train.wait_s
    for other in _others_on(index, train, target.node):
        is_earlier = train.precedes(other.rollout, target.rollout)
        if is_earlier and other.phase is Phase.PENDING and _may_start_by(index, other, now, until):
            params: Params = {"rollout": other.rollout, "train": train.name}
            remedy = Remedy(
                RemedyKind.WAIT_FOR_ROLLOUT, {"node": target.node, "rollout": other.rollout}, until=until
            )
            return Reason(ReasonCode.TRAIN, target.node, params, since, remedy)
    return None


def next_joiner(index: Index, target: Target, now: float) -> str:
    """Return the rollout that this node stays isolated for; "" for none.

    It may join the outage now, once it is observed, or when time alone lets it within the train's wait.
    """
    train = index.train_of(target.rollout)
    if train is None:
        return ""
    # A verification of the future is from before the clock was set back.
    until = min(target.since, now) + train.wait_s
    for other in _others_on(index, train, target.node):
        is_later = other.phase is Phase.PENDING and train.precedes(target.rollout, other.rollout)
        may_join = is_later and not other.is_checked_first
        if may_join and _passes_by(partial(join_blocker, index, other), now, until):
            return other.rollout
    return ""


def outage_reason(index: Index, target: Target, now: float) -> Reason | None:
    """Return for which other rollout a node in flight stays in its outage; None when it does not wait."""
    if target.phase is not Phase.VERIFYING or not index.outage_progress(target).waits:
        return None
    train = index.train_of(target.rollout)
    others = [other for other in index.targets_on(target.node) if other.rollout != target.rollout]
    at_work = [other for other in others if other.phase in IN_FLIGHT_PHASES]
    first = [other.rollout for other in at_work if not index.outage_progress(other).waits]
    joiner = next_joiner(index, target, now)
    failed = [other.rollout for other in others if other.phase is Phase.FAILED and other.isolated]
    rollout = next(iter((*first, *([joiner] if joiner else ()), *failed)), None)
    if rollout is None:
        return None
    params: Params = {"rollout": rollout, "train": "" if train is None else train.name, "shares": True}
    remedy = Remedy(RemedyKind.WAIT_FOR_ROLLOUT, {"node": target.node, "rollout": rollout})
    return Reason(ReasonCode.TRAIN, target.node, params, remedy=remedy)


def join_blocker(index: Index, target: Target, now: float) -> Reason | None:
    """Return why a pending node may not join the outage in which it is; None also before a probe of it."""
    rollout = index.rollout(target.rollout)
    wave = next(spec for spec in rollout.plan.waves if spec.name == target.wave)
    return (
        start_blockers.observe_only_blocker(index)
        or start_blockers.rollout_blocker(index, rollout, now)
        or start_blockers.wave_blocker(waves.wave_progress(index, rollout, now), target)
        or start_blockers.node_blocker(index, rollout, target, now)
        or pools.slot_blocker(index, target, now)
        or parallelism.capacity_blocker(index, rollout, wave, pools.Capacity(), node=target.node, joins=True)
        or start_blockers.traffic_blocker(index, target)
        or preparing.comparison_blocker(index, target)
    )


def joinable(index: Index, rollout: Rollout, wave: str) -> list[Target]:
    """Return the pending nodes of a wave that are in an outage which the rollout may join, by name."""
    train = index.train_of(rollout.id)
    if train is None:
        return []
    nodes = _nodes_in_flight(index, train, rollout.id)
    targets = (index.target(rollout.id, node) for node in sorted(nodes, key=natural_sort_key))
    return [t for t in targets if t.wave == wave and not t.is_checked_first and is_isolated(index, t.node)]


def reserved_places(index: Index, rollout: Rollout) -> int:
    """Return how many nodes of its train the rollout is to join, so that it starts no others instead."""
    train = index.train_of(rollout.id)
    return 0 if train is None else len(_nodes_in_flight(index, train, rollout.id))


def _nodes_in_flight(index: Index, train: Train, rollout: str) -> set[str]:
    """Return the nodes on which the rollout is pending and an earlier one of the train is at work."""
    earlier = (each for each in train.rollouts if train.precedes(each, rollout) and each in index.rollouts)
    nodes = {node for each in earlier for node in index.counters(each).in_flight}
    mine = {target.node for node in nodes for target in index.targets_on(node) if target.rollout == rollout}
    return {node for node in mine if index.target(rollout, node).phase is Phase.PENDING}


def _may_start_by(index: Index, target: Target, now: float, until: float) -> bool:
    """Return whether a pending node may start by an instant, when its rollout has room for it."""
    rollout = index.rollout(target.rollout)

    def blocker(at: float) -> Reason | None:
        return (
            start_blockers.rollout_blocker(index, rollout, at)
            or start_blockers.wave_blocker(waves.wave_progress(index, rollout, at), target)
            or start_blockers.node_blocker(index, rollout, target, at)
        )

    return _passes_by(blocker, now, until)


def _passes_by(blocker_at: Callable[[float], Reason | None], now: float, until: float) -> bool:
    """Return whether nothing blocks now, or only what an observation or time alone lifts by an instant."""
    at = now
    for _ in range(MAX_WAITS_IN_A_ROW):
        blocker = blocker_at(at)
        if blocker is None or blocker.code in start_blockers.NEEDS_OBSERVATION:
            return True
        ends_at = None if blocker.remedy is None else blocker.remedy.until
        if blocker.code not in LIFTED_BY_TIME or ends_at is None or not at < ends_at < until:
            return False
        at = ends_at
    return False


def _others_on(index: Index, train: Train, node: str) -> Iterator[Target]:
    """Yield the targets of a train's rollouts on a node, in the train's order."""
    by_rollout = {target.rollout: target for target in index.targets_on(node)}
    return (by_rollout[each] for each in train.rollouts if each in by_rollout)
