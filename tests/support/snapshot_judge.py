"""The invariants over the difference of two snapshots; shares no code with the Index."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from machines.facts.counters import RolloutCounters
from machines.facts.fleet_facts import FactsSnapshot
from machines.facts.node_work import NodeWork
from machines.facts.pending_groups import QueuePosition, queue_position
from machines.facts.pool_index import Pool
from machines.invariants.facts import EarlierEvents
from machines.invariants.violations import is_down, violation
from machines.model.events import GateOpened, PhaseMoved
from machines.model.limits import Limits, TeamRules
from machines.model.node import Node, Observation, SourceFreshness, pool_value
from machines.model.preparation import Preparation, PreparationState, StagedComparison
from machines.model.rollout import Failure, Hold, Rollout, Target
from machines.model.traffic import TrafficResult
from machines.model.train import OutageProgress, Train
from machines.model.windows import Freeze
from machines.states import IllegalTransition, Outcome, Phase, Trigger, next_phase


@dataclass(slots=True)
class SnapshotFacts:
    """The facts of a snapshot, found by scanning it: slow and simple."""

    limits: Limits
    now: float
    nodes: dict[str, Node] = field(default_factory=dict)
    rollouts: dict[str, Rollout] = field(default_factory=dict)
    freezes: tuple[Freeze, ...] = ()
    team_rules: Mapping[str, TeamRules] = field(default_factory=dict)
    holds: tuple[Hold, ...] = ()
    observations: dict[str, Observation] = field(default_factory=dict)
    traffic_results: dict[tuple[str, str], TrafficResult] = field(default_factory=dict)
    comparisons: dict[tuple[str, str], StagedComparison] = field(default_factory=dict)
    target_rows: dict[tuple[str, str], Target] = field(default_factory=dict)
    sources: Mapping[str, SourceFreshness] = field(default_factory=dict)
    preparations: dict[tuple[str, str, str], Preparation] = field(default_factory=dict)
    trains: tuple[Train, ...] = ()
    worked_on: Mapping[str, float] = field(default_factory=dict)
    changed_values: Mapping[tuple[str, str], tuple[tuple[str, str, str], ...]] = field(default_factory=dict)
    outages: Mapping[tuple[str, str], OutageProgress] = field(default_factory=dict)

    @classmethod
    def from_snapshot(
        cls,
        snapshot: FactsSnapshot,
        limits: Limits,
        observations: Iterable[Observation],
        traffic: Iterable[TrafficResult] = (),
        sources: Iterable[SourceFreshness] = (),
        comparisons: Iterable[StagedComparison] = (),
        now: float = 0.0,
        outages: Mapping[tuple[str, str], OutageProgress] | None = None,
    ) -> SnapshotFacts:
        return cls(
            limits=limits,
            now=now,
            nodes={node.name: node for node in snapshot.nodes},
            rollouts={rollout.id: rollout for rollout in snapshot.rollouts},
            freezes=snapshot.freezes,
            team_rules={each.team: each for each in snapshot.team_rules},
            holds=snapshot.holds,
            observations={each.node: each for each in observations},
            traffic_results={(each.rollout, each.node): each for each in traffic},
            comparisons={(each.rollout, each.node): each for each in comparisons},
            target_rows={(target.rollout, target.node): target for target in snapshot.targets},
            sources={each.source: each for each in sources},
            preparations={(each.rollout, each.node, each.stage): each for each in snapshot.preparations},
            trains=snapshot.trains,
            worked_on=snapshot.worked_on,
            outages=outages or {},
        )

    def targets(self, rollout: str) -> Iterable[Target]:
        return [row for row in self.target_rows.values() if row.rollout == rollout]

    def target(self, rollout: str, node: str) -> Target:
        return self.target_rows[rollout, node]

    def targets_on(self, node: str) -> Iterable[Target]:
        return [row for row in self.target_rows.values() if row.node == node]

    def holds_on(self, node: str) -> Iterable[Hold]:
        return [hold for hold in self.holds if hold.node == node]

    def preparation(self, rollout: str, node: str, stage: str) -> Preparation | None:
        return self.preparations.get((rollout, node, stage))

    def preparing_rollouts(self, node: str) -> Iterable[str]:
        running = [row for row in self.preparations.values() if row.state is PreparationState.RUNNING]
        known = {row.rollout: self.rollouts[row.rollout] for row in running if row.rollout in self.rollouts}
        return {
            row.rollout
            for row in running
            if row.rollout in known and known[row.rollout].node_of_stage(row.node, row.stage) == node
        }

    def recorded_work(self, node: str) -> Iterable[NodeWork]:
        return ()  # a snapshot has what is stored

    def train_of(self, rollout: str) -> Train | None:
        approved = (each for each in self.trains if set(each.rollouts) <= set(each.approvals))
        return next((each for each in approved if rollout in each.rollouts), None)

    def outage_progress(self, target: Target) -> OutageProgress:
        progress = self.outages.get((target.rollout, target.node))
        is_current = progress is not None and progress.attempt == target.attempt
        return progress if progress is not None and is_current else OutageProgress(target.attempt)

    def observation(self, node: str) -> Observation | None:
        return self.observations.get(node)

    def traffic_of(self, rollout: str, node: str) -> TrafficResult | None:
        return self.traffic_results.get((rollout, node))

    def staged_comparison(self, rollout: str, node: str) -> StagedComparison | None:
        return self.comparisons.get((rollout, node))

    def pool(self, pool: str) -> Pool:
        key, _, value = pool.partition("/")
        nodes = [node.name for node in self.nodes.values() if pool_value(node.labels, key) == value]
        # All of them as unknown: the invariants count those like the others.
        return Pool(key, value, members=set(nodes), unknown={n for n in nodes if is_down(self, n, self.now)})

    def counters(self, rollout: str) -> RolloutCounters:
        counters = RolloutCounters()
        counters.add_all(self.targets(rollout))
        return counters

    def all_done(self, rollout: str) -> bool:
        return all(target.phase is Phase.DONE for target in self.targets(rollout))

    def pending(self, rollout: str, wave: str) -> Sequence[QueuePosition]:
        targets = [each for each in self.targets(rollout) if each.wave == wave]
        return sorted(queue_position(each) for each in targets if each.phase is Phase.PENDING)

    def wave_end(self, rollout: str, wave: str) -> float | None:
        return max((each.since for each in self.targets(rollout) if each.wave == wave), default=None)

    @property
    def recounted_failures(self) -> dict[str, list[Failure]]:
        return {}  # nothing is kept between two questions


def violations(
    before: FactsSnapshot,
    after: FactsSnapshot,
    *,
    limits: Limits,
    observations: Iterable[Observation],
    now: float,
    traffic: Iterable[TrafficResult] = (),
    sources: Iterable[SourceFreshness] = (),
    comparisons: Iterable[StagedComparison] = (),
    outages: Mapping[tuple[str, str], OutageProgress] | None = None,
) -> list[str]:
    """Return what must never happen and did between two snapshots, one event or one commit apart."""
    measured = observations, traffic, sources, comparisons
    facts = SnapshotFacts.from_snapshot(before, limits, *measured, now, outages)
    found: list[str] = []
    transitions: list[PhaseMoved] = []
    known = {rollout.id: rollout for rollout in before.rollouts}
    for rollout in after.rollouts:
        old = known.get(rollout.id)
        for each in rollout.opened if old is None else rollout.opened[len(old.opened) :]:
            opened = GateOpened(rollout.id, each.gate, each.wave, each.at)
            found += filter(None, [violation(facts, opened, now)])
    for target in after.targets:
        before_target = facts.target_rows.get((target.rollout, target.node))
        if before_target is not None and (before_target.phase, before_target.attempt) != (
            target.phase,
            target.attempt,
        ):
            transition = _transition_between(before_target, target)
            if transition is None:
                edge = f"{before_target.phase} to {target.phase}"
                found.append(f"{target.node} of {target.rollout}: the table has no edge from {edge}")
                continue
            transitions.append(transition)
    # A commit has its rollbacks first: they may obey a pool of their plan that an admission does not.
    transitions.sort(key=lambda each: each.trigger is not Trigger.ROLLBACK_ORDERED)
    earlier = EarlierEvents()
    for transition in transitions:
        found += filter(None, [violation(facts, transition, now, earlier)])
        earlier.add(transition)
    return found


def _transition_between(row: Target, target: Target) -> PhaseMoved | None:
    """Return the transition between two versions of a target, None when the table has none."""
    # Two edges lead from done to pending; the outcome before tells them apart.
    other = Trigger.DRIFTED if row.outcome is Outcome.LEFT else Trigger.REJOINED
    for trigger in Trigger:
        if trigger is other:
            continue
        try:
            reached = next_phase(trigger, row.phase, target.outcome)
        except IllegalTransition:
            continue
        if reached is target.phase:
            return PhaseMoved(
                target.rollout,
                target.node,
                trigger,
                row.phase,
                target.phase,
                target.attempt,
                target.since,
                outcome=target.outcome,
                failure=target.failure,
                isolated=target.isolated,
            )
    return None
