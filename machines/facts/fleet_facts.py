"""The stored facts, and what was measured on nodes, read-only.

projection.py changes the stored ones by events, records.py the measured ones.  The store keeps no
measurements: observations, traffic results and comparisons of staged files are unknown after a start.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, cast

from machines.facts.node_work import NodeWork
from machines.facts.preparations import RolloutPreparations
from machines.facts.sharing import Forkable
from machines.model.causes import Causes
from machines.model.decision import CheckRounds
from machines.model.limits import DiskShortage, Limits, Refusal, RunnerProblem, TeamRules
from machines.model.node import Node, NodeKind, Observation, SourceFreshness
from machines.model.preparation import Preparation, StagedComparison
from machines.model.reasons import Reason
from machines.model.reboots import RebootApproval
from machines.model.rollout import Hold, Rollout, Target, Verdict
from machines.model.rows import AuditMismatch, find_part
from machines.model.traffic import TrafficResult
from machines.model.train import OutageProgress, Train
from machines.model.windows import Freeze
from machines.states import IN_FLIGHT_PHASES, Phase

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class FactsSnapshot:
    """All facts that the store keeps and decisions use."""

    nodes: tuple[Node, ...] = ()
    rollouts: tuple[Rollout, ...] = ()
    targets: tuple[Target, ...] = ()
    holds: tuple[Hold, ...] = ()
    freezes: tuple[Freeze, ...] = ()
    trains: tuple[Train, ...] = ()
    reboot_approvals: tuple[RebootApproval, ...] = ()
    team_rules: tuple[TeamRules, ...] = ()
    preparations: tuple[Preparation, ...] = ()
    worked_on: Mapping[str, float] = field(default_factory=dict)
    """When the latest work of any rollout on each cluster ended (epoch seconds)."""
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class IsolationProgress:
    """How far the isolation of a node is in this attempt; `moved`: what left it, such as its pods."""

    attempt: int
    is_complete: bool = False
    moved: int = 0


class FleetFacts(Forkable):
    """The facts at the instant `now` (epoch seconds), under the limits of the settings."""

    def __init__(self, limits: Limits) -> None:
        super().__init__()
        self.limits = limits
        self.now = 0.0
        self.epoch = 0
        """The daemon's term; it grows with every start."""
        self._nodes: dict[str, Node] = {}
        self.node_changes = 0
        """How often a node was written or removed: answers about all nodes are kept until then."""
        self._rollouts: dict[str, Rollout] = {}
        self._targets: dict[str, dict[str, Target]] = {}
        self._targets_by_node: dict[str, tuple[Target, ...]] = {}
        self._preparations: dict[str, RolloutPreparations] = {}
        self._preparing: dict[str, set[tuple[str, str, str]]] = {}
        self._recorded_work: dict[str, tuple[NodeWork, ...]] = {}
        self.worked_on: Mapping[str, float] = {}
        """When rollouts that are no longer here ended their work on each cluster (epoch seconds)."""
        self._holds: dict[tuple[str, str, str], Hold] = {}
        self._holds_by_node: dict[str, dict[tuple[str, str, str], Hold]] = {}
        self._freezes: dict[str, Freeze] = {}
        self._trains: dict[str, Train] = {}
        self._reboot_approvals: dict[str, RebootApproval] = {}
        self.team_rules: Mapping[str, TeamRules] = {}
        self._observations: dict[str, Observation] = {}
        self._confirmed_at: dict[str, float] = {}
        """By watch: when all that it has reported was last true, without a new report of each node."""
        self._traffic: dict[tuple[str, str], TrafficResult] = {}
        self._comparisons: dict[tuple[str, str], StagedComparison] = {}
        self._isolations: dict[tuple[str, str], IsolationProgress] = {}
        self._aborts: dict[tuple[str, str], Causes] = {}
        self._over_budget: Mapping[tuple[str, str], Reason] = {}
        self._outages: dict[tuple[str, str], OutageProgress] = {}
        self._train_waits: dict[tuple[str, str], float] = {}
        self._next_rounds: dict[tuple[str, CheckRounds], float] = {}
        self.mismatches: tuple[AuditMismatch, ...] = ()
        self.refusals: Mapping[str, Refusal] = {}
        """The rows that the audit did not account for at its last comparison."""
        self.disk_shortage: DiskShortage | None = None
        """The lack of space for the files of a run."""
        self.runner_problems: Mapping[str, RunnerProblem] = {}
        """What keeps runners from work, by name; a runner that is not here is available."""
        self.changed_values: Mapping[tuple[str, str], tuple[tuple[str, str, str], ...]] = {}
        """Values of targets that are not those of the vote, by rollout and node: name, before, now."""
        self.sources: Mapping[str, SourceFreshness] = {}
        """When each inventory source of the settings last reported its nodes."""

    @property
    def nodes(self) -> Mapping[str, Node]:
        return self._nodes

    @property
    def rollouts(self) -> Mapping[str, Rollout]:
        """All rollouts by id, in the order of their submission."""
        return self._rollouts

    @property
    def holds(self) -> Sequence[Hold]:
        """All holds, including expired ones that were not released."""
        return tuple(self._holds.values())

    @property
    def freezes(self) -> Sequence[Freeze]:
        """All freezes, including expired ones that were not lifted."""
        return tuple(self._freezes.values())

    @property
    def trains(self) -> Sequence[Train]:
        return tuple(self._trains.values())

    @property
    def reboot_approvals(self) -> tuple[RebootApproval, ...]:
        """All approvals of reboots, including those whose time is over."""
        return tuple(self._reboot_approvals.values())

    def train_of(self, rollout: str) -> Train | None:
        trains = self._trains.values()
        return next((each for each in trains if rollout in each.rollouts and each.is_approved), None)

    @property
    def observations(self) -> Sequence[Observation]:
        """The last observation of each node, at the instant at which it was last true."""
        return tuple(map(self._last_true, self._observations.values()))

    @property
    def reports(self) -> Collection[Observation]:
        """The last observation of each node, as it was reported."""
        return self._observations.values()

    @property
    def confirmations(self) -> Mapping[str, float]:
        """When each watch last confirmed all its reports (epoch seconds)."""
        return self._confirmed_at

    @property
    def traffic(self) -> Sequence[TrafficResult]:
        """The last traffic result of each node in each open rollout."""
        return tuple(self._traffic.values())

    @property
    def comparisons(self) -> Sequence[StagedComparison]:
        """The last comparison of staged files of each node in each open rollout."""
        return tuple(self._comparisons.values())

    @property
    def over_budget_targets(self) -> Collection[tuple[str, str]]:
        """The (rollout, node) of isolating nodes whose pools had no slot for them by the latest decision."""
        return self._over_budget.keys()

    @property
    def outages(self) -> Mapping[tuple[str, str], OutageProgress]:
        """How far each verifying attempt of a train is in the node's outage, as last reported."""
        return dict(self._outages)

    def is_quarantined(self, node: str) -> bool:
        known = self._nodes.get(node)
        return known is not None and known.quarantined

    def is_refused(self, rollout: str) -> bool:
        """Return whether a decision of the rollout was refused a short time ago."""
        return rollout in self.refusals and self.now < self.refusals[rollout].until

    def has_doubtful_records(self, rollout: str, node: str) -> bool:
        """Return whether the audit does not account for the target's own row, failures or steps."""
        # A doubtful row of the node in another rollout stops only that one.
        scope = f"rollout/{rollout}"
        return any(each.node == node and each.scope == scope for each in self.mismatches)

    def rollout(self, rollout: str) -> Rollout:
        return self._rollouts[rollout]

    def target(self, rollout: str, node: str) -> Target:
        return self._targets[rollout][node]

    def targets(self, rollout: str) -> Iterable[Target]:
        """Return the targets of a rollout, in the order in which they joined."""
        return self._targets[rollout].values()

    def targets_by_node(self, rollout: str) -> Mapping[str, Target]:
        return self._targets[rollout]

    def targets_on(self, node: str) -> Iterable[Target]:
        return self._targets_by_node.get(node, ())

    def preparations(self, rollout: str) -> RolloutPreparations | None:
        """Return how far the nodes of a rollout are prepared, None when its plan has no prepare stages."""
        return self._preparations.get(rollout)

    def preparation(self, rollout: str, node: str, stage: str) -> Preparation | None:
        known = self._preparations.get(rollout)
        return None if known is None else known.rows.get((node, stage))

    def preparing_rollouts(self, node: str) -> Iterable[str]:
        return {rollout for rollout, _, _ in self._preparing.get(node, ())}

    def recorded_work(self, node: str) -> Iterable[NodeWork]:
        """Return the work on a node that this process does and no stored fact shows."""
        return self._recorded_work.get(node, ())

    def get(self, kind: type[R], *key: Any) -> R | None:
        """Return a row by its key, of the kinds that are kept here."""
        # Only the kinds that an event of the facts reads before it writes; stores have the others.
        row: object = None
        if kind is Target:
            row = self._targets.get(key[0], {}).get(key[1])
        elif kind is Preparation:
            row = self.preparation(*key)
        elif kind is Node:
            row = self._nodes.get(*key)
        elif kind is Hold:
            row = self._holds.get(key)
        elif kind is Freeze:
            row = self._freezes.get(*key)
        elif kind is Train:
            row = self._trains.get(*key)
        elif kind is RebootApproval:
            row = self._reboot_approvals.get(*key)
        elif key[0] in self._rollouts:
            row = find_part(self._rollouts[key[0]], kind, *key[1:])
        return cast(R | None, row)

    def verdicts_on(self, node: str) -> Iterable[Verdict]:
        return ()  # decisions read none

    def holds_on(self, node: str) -> Iterable[Hold]:
        """Return the holds on a node, including expired ones."""
        return self._holds_by_node.get(node, {}).values()

    def isolation_progress(self, target: Target) -> IsolationProgress:
        """Return how far the isolation of the target's attempt is, as far as its driver has reported."""
        # What an earlier attempt has moved costs nothing in this one.
        known = self._isolations.get((target.rollout, target.node))
        is_current = known is not None and known.attempt == target.attempt
        return known if known is not None and is_current else IsolationProgress(target.attempt)

    def abort_causes(self, rollout: str, node: str) -> Causes:
        """Return why the isolation of a node is to be aborted; empty if it is not."""
        return self._aborts.get((rollout, node), ())

    def over_budget_reason(self, rollout: str, node: str) -> Reason | None:
        """Return why the pools of an isolating node have no slot for it; None if they have."""
        return self._over_budget.get((rollout, node))

    def outage_progress(self, target: Target) -> OutageProgress:
        """Return how far the target's attempt is in the node's outage, as its driver has reported."""
        known = self._outages.get((target.rollout, target.node))
        is_current = target.phase is Phase.VERIFYING and known is not None and known.attempt == target.attempt
        return known if known is not None and is_current else OutageProgress(target.attempt)

    def train_wait(self, target: Target) -> float | None:
        """Return since when a pending node waits for another rollout of its train (epoch seconds)."""
        return self._train_waits.get((target.rollout, target.node))

    def next_round(self, rollout: str, checks: CheckRounds) -> float:
        """Return when the next round of checks of a rollout begins (epoch seconds), 0.0 for the first."""
        return self._next_rounds.get((rollout, checks), 0.0)

    def observation(self, node: str) -> Observation | None:
        """Return the node's last observation, at the instant at which it was last true."""
        seen = self._observations.get(node)
        return None if seen is None else self._last_true(seen)

    def _last_true(self, seen: Observation) -> Observation:
        at = self.observed_at(seen)
        return seen if at == seen.at else replace(seen, at=at)

    def reported_observation(self, node: str) -> Observation | None:
        """Return the node's last observation, at the instant of its report."""
        return self._observations.get(node)

    def observed_at(self, observation: Observation) -> float:
        """Return when an observation was last true: when it was reported, or confirmed (epoch seconds)."""
        return max(observation.at, self._confirmed_at.get(observation.watch, 0.0))

    def released_at(self, node: str) -> float:
        """Return when rolloutd last finished work on a node (epoch seconds), 0.0 for never."""
        ends = (t.since for t in self.targets_on(node) if t.attempt and t.phase not in IN_FLIGHT_PHASES)
        return max((self.worked_on.get(node, 0.0), *ends))

    def _work_on(self, nodes: Iterable[str]) -> dict[str, float]:
        """Return when the latest work ended on those of these nodes that are clusters."""
        clusters = (
            name for name in nodes if name in self._nodes and self._nodes[name].kind is NodeKind.CLUSTER
        )
        return {name: at for name in clusters if (at := self.released_at(name))}

    def traffic_of(self, rollout: str, node: str) -> TrafficResult | None:
        return self._traffic.get((rollout, node))

    def staged_comparison(self, rollout: str, node: str) -> StagedComparison | None:
        """Return the last comparison of the node's staged files, None if there was none."""
        return self._comparisons.get((rollout, node))

    def snapshot(self) -> FactsSnapshot:
        """Return the facts as a value, as the store would load them."""
        return FactsSnapshot(
            nodes=tuple(self._nodes.values()),
            rollouts=tuple(self._rollouts.values()),
            targets=tuple(t for targets in self._targets.values() for t in targets.values()),
            holds=tuple(self._holds.values()),
            freezes=tuple(self._freezes.values()),
            trains=tuple(self._trains.values()),
            reboot_approvals=self.reboot_approvals,
            team_rules=tuple(self.team_rules.values()),
            preparations=tuple(row for each in self._preparations.values() for row in each.rows.values()),
            worked_on={**self.worked_on, **self._work_on(self._nodes)},
            epoch=self.epoch,
        )
