"""Which rollouts decide nothing more, so that what they left in memory, in runs and on nodes may go."""

from __future__ import annotations

from machines.facts.index import Index
from machines.states import Phase


def is_at_rest(index: Index, rollout: str) -> bool:
    """Return whether a rollout stays open only to find drift, so that its old runs decide nothing."""
    if rollout not in index.rollouts or index.rollouts[rollout].plan.drift_every_s is None:
        return False
    counters = index.counters(rollout)
    is_done = counters.phases[Phase.DONE] == counters.phases.total()
    return is_done and not counters.rollbacks_due and not index.unresolved_failures(rollout)


def unfinished_rollout(index: Index, node: str) -> str | None:
    """Return a rollout that is not over on the node, so that what it left there is needed."""
    for target in index.targets_on(node):
        is_at_rest = target.phase in (Phase.PENDING, Phase.DONE) and not target.isolated
        if not is_at_rest or target.order is not None or not index.rollout(target.rollout).closed:
            return target.rollout
    return None


def is_forgettable(index: Index, rollout: str, before: float) -> bool:
    """Return whether a rollout in memory was closed by this instant (epoch seconds)."""
    known = index.rollouts[rollout]
    ended_at = known.cancelled.at if known.cancelled else known.ended_at
    return ended_at is not None and ended_at <= before
