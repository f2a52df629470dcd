"""What a train saves: the nodes that its rollouts share, and the outages that they have shared."""

from __future__ import annotations

from collections import Counter

from machines.facts.index import Index
from machines.model.rollout import Target
from machines.model.train import Train
from machines.states import IN_FLIGHT_PHASES, Outcome


def shared_nodes(index: Index, train: Train) -> set[str]:
    """Return the nodes that are targets of two or more of the train's rollouts."""
    counts = Counter(
        target.node
        for rollout in train.rollouts
        if rollout in index.rollouts
        for target in index.targets(rollout)
        if target.outcome is not Outcome.LEFT
    )
    return {node for node, count in counts.items() if count > 1}


def outages_saved(index: Index, train: Train) -> int:
    """Return how many attempts have joined the outage of another rollout of the train."""
    saved = 0
    for node in shared_nodes(index, train):
        begun = [t for t in index.targets_on(node) if t.rollout in train.rollouts and t.attempt]
        saved += sum(any(_was_joined(earlier, later) for earlier in begun) for later in begun)
    return saved


def _was_joined(earlier: Target, later: Target) -> bool:
    """Return whether the later target began while the earlier one was in flight."""
    if earlier is later or not earlier.admitted_at < later.admitted_at:
        return False
    return earlier.phase in IN_FLIGHT_PHASES or later.admitted_at <= earlier.since
