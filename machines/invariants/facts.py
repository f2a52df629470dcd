"""The facts that the invariants read, and a plain implementation of them.

SnapshotFacts shares no code with the Index, which offers the same facts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from machines.facts.fleet_facts import FactsSnapshot
from machines.model.limits import Limits, TeamRules
from machines.model.node import UNLABELED, Node, Observation, SourceFreshness
from machines.model.preparation import Preparation, PreparationState
from machines.model.rollout import Hold, Rollout, Target
from machines.model.traffic import TrafficResult
from machines.model.windows import Freeze


class InvariantFacts(Protocol):
    """The facts before an event; an Index and SnapshotFacts both offer them."""

    @property
    def limits(self) -> Limits: ...
    @property
    def nodes(self) -> Mapping[str, Node]: ...
    @property
    def rollouts(self) -> Mapping[str, Rollout]: ...
    @property
    def freezes(self) -> Sequence[Freeze]: ...
    @property
    def team_rules(self) -> Mapping[str, TeamRules]: ...
    @property
    def sources(self) -> Mapping[str, SourceFreshness]: ...
    def targets(self, rollout: str) -> Iterable[Target]: ...
    def target(self, rollout: str, node: str) -> Target: ...
    def targets_on(self, node: str) -> Iterable[Target]: ...
    def holds_on(self, node: str) -> Iterable[Hold]: ...
    def preparation(self, rollout: str, node: str, stage: str) -> Preparation | None: ...
    def preparing_rollouts(self, node: str) -> Iterable[str]: ...
    def observation(self, node: str) -> Observation | None: ...
    def traffic_of(self, rollout: str, node: str) -> TrafficResult | None: ...
    def members(self, key: str, value: str) -> Iterable[str]: ...


@dataclass(slots=True)
class SnapshotFacts:
    """The facts of a snapshot, found by scanning it: slow and simple."""

    limits: Limits
    nodes: dict[str, Node] = field(default_factory=dict)
    rollouts: dict[str, Rollout] = field(default_factory=dict)
    freezes: tuple[Freeze, ...] = ()
    team_rules: Mapping[str, TeamRules] = field(default_factory=dict)
    holds: tuple[Hold, ...] = ()
    observations: dict[str, Observation] = field(default_factory=dict)
    traffic_results: dict[tuple[str, str], TrafficResult] = field(default_factory=dict)
    target_rows: dict[tuple[str, str], Target] = field(default_factory=dict)
    sources: Mapping[str, SourceFreshness] = field(default_factory=dict)
    preparations: dict[tuple[str, str, str], Preparation] = field(default_factory=dict)

    @classmethod
    def from_snapshot(
        cls,
        snapshot: FactsSnapshot,
        limits: Limits,
        observations: Iterable[Observation],
        traffic: Iterable[TrafficResult] = (),
        sources: Iterable[SourceFreshness] = (),
    ) -> SnapshotFacts:
        return cls(
            limits=limits,
            nodes={node.name: node for node in snapshot.nodes},
            rollouts={rollout.id: rollout for rollout in snapshot.rollouts},
            freezes=snapshot.freezes,
            team_rules={each.team: each for each in snapshot.team_rules},
            holds=snapshot.holds,
            observations={each.node: each for each in observations},
            traffic_results={(each.rollout, each.node): each for each in traffic},
            target_rows={(target.rollout, target.node): target for target in snapshot.targets},
            sources={each.source: each for each in sources},
            preparations={(each.rollout, each.node, each.stage): each for each in snapshot.preparations},
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

    def observation(self, node: str) -> Observation | None:
        return self.observations.get(node)

    def traffic_of(self, rollout: str, node: str) -> TrafficResult | None:
        return self.traffic_results.get((rollout, node))

    def members(self, key: str, value: str) -> Iterable[str]:
        return [node.name for node in self.nodes.values() if node.labels.get(key, UNLABELED) == value]
