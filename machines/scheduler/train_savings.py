"""What a train saves: the nodes that rollouts share, and the outages that they have shared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import chain
from typing import NamedTuple

from machines.facts.index import Index
from machines.model.rollout import Target
from machines.model.train import Train
from machines.states import IN_FLIGHT_PHASES, Outcome, Phase


class TrainSavings(NamedTuple):
    """How many nodes are targets of two rollouts or more, and how many attempts needed no outage."""

    nodes_shared: int
    outages_saved: int


def train_savings(targets_by_rollout: Iterable[Iterable[Target]]) -> TrainSavings:
    """Return what rollouts with these targets share and have saved."""
    rollouts_on: Counter[str] = Counter()
    saved = 0
    for target in chain.from_iterable(targets_by_rollout):
        rollouts_on[target.node] += target.outcome is not Outcome.LEFT
        saved += target.joined_outage
    return TrainSavings(sum(count > 1 for count in rollouts_on.values()), saved)


def outages_ahead(index: Index, train: Train) -> int:
    """Return how many outages the train may still save: each pending target that can join one."""
    members = [each for each in train.rollouts if each in index.rollouts and not index.rollout(each).closed]
    pending, at_work = Counter[str](), set[str]()
    for target in chain.from_iterable(index.targets(each) for each in members):
        pending[target.node] += target.phase is Phase.PENDING
        if target.phase in IN_FLIGHT_PHASES:
            at_work.add(target.node)
    return sum(max(0, count - (node not in at_work)) for node, count in pending.items())


def shareable_nodes(index: Index, nodes: Iterable[str]) -> dict[str, int]:
    """Return how many of these nodes each open rollout has still to change, by id, in order of submission."""
    counts = Counter(
        target.rollout
        for node in nodes
        for target in index.targets_on(node)
        if target.phase is not Phase.DONE and not index.rollout(target.rollout).closed
    )
    return {rollout: counts[rollout] for rollout in index.rollouts if counts[rollout]}
