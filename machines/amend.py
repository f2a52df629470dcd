"""Amendments: what a changed inventory does to rollouts that are under way.

Asked after every refresh of the inventory.  Nodes that appeared and match join
(at the end, within bounds), nodes that are gone leave, nodes that changed team
or pools are followed.  None of this alters a digest or voids a vote.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from machines import ballots
from machines.events import Event, TargetChanged, TargetsJoined
from machines.index import Index
from machines.moves import move
from machines.node import Node, natural
from machines.plan import Enrol, GateName
from machines.rollout import Rollout, Target
from machines.states import Outcome, Phase, Trigger

JOIN_PERCENT: Final = 10
"""How much of the approved count may join without anybody being asked."""


def amendments(index: Index, now: float) -> tuple[Event, ...]:
    """Return the events that bring every rollout in line with the inventory, in order."""
    events: list[Event] = []
    for rollout in index.rollouts.values():
        events += _leavers(index, rollout, now)
        if not rollout.closed:
            events += _changed(index, rollout, now)
            events += _joiners(index, rollout, now)
    return tuple(events)


def _leavers(index: Index, rollout: Rollout, now: float) -> Iterator[Event]:
    """Yield the end of every target that the inventory no longer has; its slot is freed.

    What isolates it stays known: a node that was lost by mistake comes back as it was left.
    """
    if rollout.ended_at is not None:
        return
    for target in index.targets(rollout.id):
        if target.node in index.nodes or target.phase is Phase.DONE:
            continue
        why = "the inventory no longer has this node"
        yield move(target, Trigger.LEFT, now, outcome=Outcome.LEFT, text=why)


def _changed(index: Index, rollout: Rollout, now: float) -> Iterator[Event]:
    """Yield what became of targets whose team or pools are others now."""
    for target in index.targets(rollout.id):
        node = index.nodes.get(target.node)
        if node is None or target.phase is Phase.DONE:
            continue
        pools = tuple(pool.id for pool in index.pools_for(rollout.id, node.name))
        if (node.team, pools) == (target.team, target.pools):
            continue
        waits = target.needs_vote_of
        if node.team != target.team:
            waits = _unheard(rollout, node.team)
        yield TargetChanged(rollout.id, target.node, node.team, pools, waits, now)


def _joiners(index: Index, rollout: Rollout, now: float) -> Iterator[Event]:
    if rollout.plan.enrol is Enrol.NEVER:
        return
    present = {target.node: target for target in index.targets(rollout.id)}
    new = [
        n for n in index.nodes.values() if n.name not in present and rollout.plan.selector.matches(n.labels)
    ]
    if not new:
        return
    free = max(1, rollout.approved_count * JOIN_PERCENT // 100) - sum(t.joined for t in present.values())
    position = max((target.position for target in present.values()), default=-1) + 1
    joined = []
    for number, node in enumerate(sorted(new, key=lambda each: natural(each.name))):
        asked = rollout.plan.enrol is Enrol.ASK or number >= free
        joined.append(_joiner(index, rollout, node, position + number, now, asked))
    yield TargetsJoined(rollout.id, tuple(joined), now)


def _joiner(index: Index, rollout: Rollout, node: Node, position: int, now: float, asked: bool) -> Target:
    """Return the target of a node that joins: last of all, and waiting where somebody must be asked."""
    waits = (node.team or rollout.plan.owner) if asked else _unheard(rollout, node.team)
    return Target(
        rollout=rollout.id,
        node=node.name,
        team=node.team,
        pools=tuple(pool.id for pool in index.pools_for(rollout.id, node.name)),
        wave=rollout.plan.waves[-1].name,
        position=position,
        since=now,
        joined=True,
        needs_vote_of=waits,
    )


def _unheard(rollout: Rollout, team: str | None) -> str | None:
    """Return the team if a gate that is open already asks every team and this one has not voted."""
    if team is None:
        return None
    for each in rollout.opened:
        need = ballots.need_of(rollout, each.gate)
        if each.gate is GateName.PROCEED or not need.each_team:
            continue
        if not ballots.has_voted(rollout, need, ballots.cast_at(rollout, each.gate, each.wave), team):
            return team
    return None
