"""Facts that come in without an event, because the store does not keep them.

Observations, measurements on nodes of rollouts, work of this process, and what the daemon found out about
itself.  They are unknown after a start.  Each is written to a journal too, while the facts after a large
commit are made.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from machines.facts.availability import Unavailability, observed_unavailability
from machines.facts.dry_runs import DryRunResult
from machines.facts.fleet_facts import FleetFacts, IsolationProgress
from machines.facts.index import Index
from machines.facts.node_work import NodeWork
from machines.model.causes import Causes
from machines.model.decision import BackOff, NextRound
from machines.model.limits import DiskShortage, Limits, Refusal, RunnerProblem
from machines.model.node import NodeHealth, Observation, SourceFreshness
from machines.model.preparation import StagedComparison
from machines.model.reasons import Reason, UnavailabilityCause
from machines.model.rows import AuditMismatch
from machines.model.traffic import TrafficResult
from machines.model.train import OutageProgress

P = ParamSpec("P")

R = TypeVar("R", bound="Records")

Record = Callable[[Any], None]
"""Records something in other facts."""


def journaled(
    method: Callable[Concatenate[R, P], None],
) -> Callable[Concatenate[R, P], None]:
    """Return a method that also writes its calls to the journal, if there is one."""

    def record(self: R, /, *args: P.args, **kwargs: P.kwargs) -> None:
        if self.journal is not None:
            self.journal.append(lambda successor: method(successor, *args, **kwargs))
        method(self, *args, **kwargs)

    return record


class Records(Index):
    """`journal` collects what comes in, for facts that are being made from these; None without."""

    def __init__(self, limits: Limits) -> None:
        super().__init__(limits)
        self.journal: list[Record] | None = None

    def fork(self) -> Self:
        """Return the same facts; a later change of one does not change the other."""
        made = super().fork()
        made.journal = None
        return made

    @journaled
    def record_observations(self, observations: Collection[Observation], now: float) -> None:
        """Record observations; one that is older than the last of its node is ignored."""
        self.advance_in_part(now)
        known = self._observations = self._own(self._observations)
        fresh_after, up = self.now - self.limits.observe_within_s, NodeHealth.UP
        for observation in observations:
            last = known.get(observation.node)
            if last is None:
                self._record_observation(observation, repeats=False)
                continue
            last_at, is_same_watch = self.observed_at(last), last.watch == observation.watch
            # A slow poll may end after a watch has reported something newer.
            if last_at > observation.at:
                continue
            if not is_same_watch:
                self._lose_report(last)
            repeats = observation.says_the_same_as(last)
            # Most of the reports of all nodes that a watch makes.
            is_up = observation.sight is up and not last.cordoned_by_other
            if repeats and is_up and is_same_watch and last_at > fresh_after:
                known[observation.node] = observation
            else:
                self._record_observation(observation, repeats=repeats)

    def record_observations_of(self, facts: FleetFacts) -> None:
        """Record what other facts know of the nodes' health."""
        self.record_observations(facts.reports, facts.now)
        for watch, at in facts.confirmations.items():
            self.record_confirmation(watch, at, facts.now)

    @journaled
    def record_confirmation(self, watch: str, at: float, now: float) -> None:
        """Record that all that a watch has reported was true at an instant: one for all its nodes."""
        self.advance_in_part(now)
        if watch not in self._covering_watches:
            seen, within_s = self._observations, self.limits.observe_within_s
            reports = (seen[node] for node in self._nodes_of_watch(watch))
            expired = [each.node for each in reports if not each.is_up or self.now >= each.at + within_s]
            self._confirm(watch, at)
            self._pool_index.judge_again(expired)
            self.advance_in_part(now)
            return
        # What was wrong at the end of our work is the node's own state if it is confirmed after it.
        not_up: Iterable[str] = self._watched_not_up.get(watch, ())
        before = {node: observed_unavailability(self, node) for node in not_up}
        self._confirm(watch, at)
        for node, judged in before.items():
            after = observed_unavailability(self, node)
            if _judgement(judged) != _judgement(after):
                self._pool_index.reevaluate(self, (node,))

    def _confirm(self, watch: str, at: float) -> None:
        self._confirmed_at = {**self._confirmed_at, watch: at}
        if self._lapses_at(watch) > self.now:
            self._covering_watches = {**self._covering_watches, watch: None}

    @journaled
    def expect_reports(self, watch: str) -> None:
        """Record that the watch is about to report all its nodes."""
        self._incomplete_watches = self._incomplete_watches - {watch}

    def lacks_reports(self, watch: str) -> bool:
        """Return whether something that the watch has reported was dropped, so that it must report again."""
        return watch in self._incomplete_watches

    def _record_observation(self, observation: Observation, *, repeats: bool) -> None:
        node = observation.node
        before, last = observed_unavailability(self, node), self._observations.get(node)
        self._observations[node] = observation
        after = observed_unavailability(self, node)
        if not repeats:
            # What blocked the isolation may be gone, or be new.
            self.dry_run_results = self._own(self.dry_run_results)
            for target in self.targets_on(node):
                self.dry_run_results.forget(target.rollout, node)
        is_left = bool(observation.left_isolated_by)
        self._left_cordoned = self._own(self._left_cordoned)
        (self._left_cordoned.add if is_left else self._left_cordoned.discard)(node)
        if last is not None and last.watch and not last.is_up:
            self._watched_not_up = self._own(self._watched_not_up)
            self._own_row(self._watched_not_up, last.watch, dict).pop(node, None)
        if observation.watch and not observation.is_up:
            self._watched_not_up = self._own(self._watched_not_up)
            self._own_row(self._watched_not_up, observation.watch, dict)[node] = None
        self._schedule_reevaluation(observation)
        # The node's first cause may be another one, which hides that the judgement has changed.
        marks = not repeats or _judgement(before) != _judgement(after)
        self._pool_index.reevaluate(self, (node,), marks=marks)

    @journaled
    def record_work(self, work: NodeWork) -> None:
        """Record that this process begins work on a node, which no stored fact shows."""
        self._recorded_work = self._own(self._recorded_work)
        self._recorded_work[work.node] = (*self.recorded_work(work.node), work)
        self._mark_targets_on(work.node)

    @journaled
    def end_work(self, work: NodeWork) -> None:
        self._recorded_work = self._own(self._recorded_work)
        # By identity: two checks of one node are equal, and each ends for itself.
        left = tuple(each for each in self.recorded_work(work.node) if each is not work)
        if left:
            self._recorded_work[work.node] = left
        else:
            self._recorded_work.pop(work.node, None)
        self._mark_targets_on(work.node)

    @journaled
    def record_isolation(self, rollout: str, node: str, progress: IsolationProgress) -> None:
        """Record how far an isolation is; the last report of each node counts."""
        self._isolations = self._own(self._isolations)
        self._isolations[rollout, node] = progress

    @journaled
    def record_abort(self, rollout: str, node: str, causes: Causes) -> None:
        """Record why the isolation of a node is to be aborted; later causes may follow from the first."""
        self._aborts = self._own(self._aborts)
        self._aborts.setdefault((rollout, node), causes)

    @journaled
    def record_over_budget(self, reasons: Mapping[tuple[str, str], Reason]) -> None:
        """Replace the isolating nodes whose pools have no slot for them."""
        self._over_budget = reasons

    @journaled
    def record_outage(self, rollout: str, node: str, progress: OutageProgress) -> None:
        """Record how far an attempt is in the node's outage; another of its train may join now."""
        self._outages = self._own(self._outages)
        self._outages[rollout, node] = progress
        self._mark_targets_on(node)

    @journaled
    def record_train_wait(self, rollout: str, node: str, at: float) -> None:
        """Record since when a pending node waits for its train; the first report counts."""
        self._train_waits = self._own(self._train_waits)
        self._train_waits.setdefault((rollout, node), at)

    @journaled
    def record_backoffs(self, backoffs: Collection[BackOff]) -> None:
        """Record in which queue groups a decision could start nothing."""
        self.pending_groups.back_off(backoffs)

    @journaled
    def record_mismatches(self, mismatches: Sequence[AuditMismatch]) -> None:
        """Replace the rows that the audit does not account for."""
        if tuple(mismatches) != self.mismatches:
            self.mismatches = tuple(mismatches)
            self.pending_groups.mark_all()

    @journaled
    def record_refusal(self, rollout: str, refusal: Refusal) -> None:
        """Record that a decision of a rollout was refused; a settled mismatch is a reason to forget it."""
        self.refusals = {**self.refusals, rollout: refusal}

    @journaled
    def record_disk_shortage(self, shortage: DiskShortage | None) -> None:
        self.disk_shortage = shortage
        self.pending_groups.mark_all()

    @journaled
    def record_runner_problems(self, problems: Mapping[str, RunnerProblem]) -> None:
        """Replace what keeps runners from work."""
        if problems != self.runner_problems:
            self.runner_problems = {**problems}
            self.pending_groups.mark_all()

    @journaled
    def record_changed_values(
        self, changed: Mapping[tuple[str, str], tuple[tuple[str, str, str], ...]]
    ) -> None:
        """Replace what targets have other values than people voted for."""
        if changed != self.changed_values:
            self.changed_values = {**changed}
            self.pending_groups.mark_all()

    @journaled
    def record_sources(self, sources: Collection[SourceFreshness]) -> None:
        """Replace what is known of the inventory sources' last answers."""
        recorded = {each.source: each for each in sources}
        for each in recorded.values():
            before = self.sources.get(each.source)
            answered = each.refreshed_at
            # Compared with the new answer too: `now` is that of the last decision, which may be long ago.
            if before and answered and (before.is_stale(answered) or before.is_stale(self.now)):
                self.pending_groups.mark_all()
                break
        self.sources = recorded

    def _mark_targets_on(self, node: str) -> None:
        self.pending_groups.mark_node(node, [each.rollout for each in self.targets_on(node)])

    # -- measurements on nodes of rollouts

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


def _judgement(seen: Unavailability | None) -> tuple[UnavailabilityCause, bool] | None:
    return None if seen is None else (seen.code, seen.needs_observation)
