"""What the daemon measured on nodes of rollouts, and no store keeps: dry runs, traffic, comparisons.

It also has the times of the next measurements of nodes in service.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from machines.facts.dry_runs import DryRunResult
from machines.facts.records import Records, journaled
from machines.model.decision import NextRound
from machines.model.preparation import StagedComparison
from machines.model.traffic import TrafficResult


class MeasuredFacts(Records):
    """An index that takes measurements; each marks the groups of its node."""

    @journaled
    def record_dry_run(self, result: DryRunResult) -> None:
        self.dry_run_results = self._own(self.dry_run_results)
        self.dry_run_results.record(result)
        self.pending_groups.mark_node(result.node, (result.rollout,))

    @journaled
    def forget_dry_run(self, rollout: str, node: str) -> None:
        """Drop a dry-run result, because what it was about has changed."""
        self.dry_run_results = self._own(self.dry_run_results)
        self.dry_run_results.forget(rollout, node)
        self.pending_groups.mark_node(node, (rollout,))

    @journaled
    def record_traffic(self, traffic: TrafficResult) -> None:
        """Record a traffic result; one of a closed rollout is ignored, unless nodes wait for a rollback."""
        rollout = self._rollouts.get(traffic.rollout)
        if rollout is None or (rollout.closed and not self._counters[rollout.id].rollbacks_due):
            return
        self._traffic = self._own(self._traffic)
        key = (traffic.rollout, traffic.node)
        found = replace(traffic, poll_s=rollout.plan.poll_s)
        self._traffic[key] = found.following(self._traffic.get(key))
        # A busy node concerns its whole group: the next one of it is tried instead.
        self.pending_groups.mark_node(traffic.node, (traffic.rollout,))

    @journaled
    def record_comparison(self, comparison: StagedComparison) -> None:
        """Record that a node's staged files were compared; of a closed rollout it is ignored."""
        rollout = self._rollouts.get(comparison.rollout)
        if rollout is None or rollout.closed:
            return
        self._comparisons = self._own(self._comparisons)
        self._comparisons[comparison.rollout, comparison.node] = comparison
        self.pending_groups.mark_node(comparison.node, (comparison.rollout,))

    @journaled
    def record_next_round(self, next_round: NextRound) -> None:
        """Record when the next round of checks of a rollout begins."""
        if next_round.rollout in self._rollouts:
            self._next_rounds = self._own(self._next_rounds)
            self._next_rounds[next_round.rollout, next_round.checks] = next_round.at

    def _forget_measured(self, is_of: Callable[[str, str], bool]) -> None:
        """Drop the traffic and the comparisons of these (rollout, node)."""
        self._traffic = {key: each for key, each in self._traffic.items() if not is_of(*key)}
        self._comparisons = {key: each for key, each in self._comparisons.items() if not is_of(*key)}
