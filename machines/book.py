"""The facts as they are remembered: nodes, rollouts, targets, holds, freezes, observations, traffic.

They are read here; projection.py alone changes them, with all that follows from
them.
Everything but the observations and the traffic is what the store keeps; those
are as old as the daemon.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from machines.limits import Limits, TeamRules
from machines.node import Node, Observation
from machines.rollout import Hold, Rollout, Target
from machines.states import BUSY
from machines.traffic import Traffic, TrafficSeen
from machines.windows import Freeze


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything the store remembers that decisions are made from."""

    nodes: tuple[Node, ...] = ()
    rollouts: tuple[Rollout, ...] = ()
    targets: tuple[Target, ...] = ()
    holds: tuple[Hold, ...] = ()
    freezes: tuple[Freeze, ...] = ()
    team_rules: tuple[TeamRules, ...] = ()
    epoch: int = 0


class Book:
    """The facts at the instant `now` (epoch seconds), under the limits of the settings."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.now = 0.0
        self._epoch = 0
        self._nodes: dict[str, Node] = {}
        self._rollouts: dict[str, Rollout] = {}
        self._targets: dict[str, dict[str, Target]] = {}
        self._on_node: dict[str, dict[str, Target]] = {}
        self._holds: dict[tuple[str, str, str], Hold] = {}
        self._held: dict[str, dict[tuple[str, str, str], Hold]] = {}
        self._freezes: dict[str, Freeze] = {}
        self._team_rules: dict[str, TeamRules] = {}
        self._seen: dict[str, Observation] = {}
        self._traffic = TrafficSeen()

    @property
    def nodes(self) -> Mapping[str, Node]:
        """All known nodes by name."""
        return self._nodes

    @property
    def rollouts(self) -> Mapping[str, Rollout]:
        """All rollouts by id, first submitted first."""
        return self._rollouts

    @property
    def holds(self) -> Sequence[Hold]:
        """All holds, also those that have run out and were not released."""
        return tuple(self._holds.values())

    @property
    def freezes(self) -> Sequence[Freeze]:
        """All freezes, also those that have run out and were not lifted."""
        return tuple(self._freezes.values())

    @property
    def team_rules(self) -> Mapping[str, TeamRules]:
        """What teams have set for themselves, by team."""
        return self._team_rules

    @property
    def observations(self) -> Sequence[Observation]:
        """The last observation of each node."""
        return tuple(self._seen.values())

    @property
    def traffic(self) -> Sequence[Traffic]:
        """What the traffic probes last said of each node."""
        return tuple(self._traffic)

    @property
    def epoch(self) -> int:
        """The daemon's tenure: it grows with every start."""
        return self._epoch

    def rollout(self, rollout: str) -> Rollout:
        """Return a rollout; raises KeyError."""
        return self._rollouts[rollout]

    def target(self, rollout: str, node: str) -> Target:
        """Return a node of a rollout; raises KeyError."""
        return self._targets[rollout][node]

    def targets(self, rollout: str) -> Iterable[Target]:
        """Return all targets of a rollout, in the order in which they came in."""
        return self._targets[rollout].values()

    def targets_on(self, node: str) -> Iterable[Target]:
        """Return the node's targets in all rollouts."""
        return self._on_node.get(node, {}).values()

    def holds_on(self, node: str) -> Iterable[Hold]:
        """Return the holds on a node, also those that have run out."""
        return self._held.get(node, {}).values()

    def observation(self, node: str) -> Observation | None:
        """Return the last observation of a node."""
        return self._seen.get(node)

    def released_at(self, node: str) -> float:
        """Return when we last let go of a node (epoch seconds); 0.0 when we never had it."""
        return max((t.since for t in self.targets_on(node) if t.attempt and t.phase not in BUSY), default=0.0)

    def traffic_of(self, rollout: str, node: str) -> Traffic | None:
        """Return what the traffic probes of a rollout last said of a node."""
        return self._traffic.of(rollout, node)

    def snapshot(self) -> Snapshot:
        """Return the facts as a value, as the store would load them."""
        return Snapshot(
            nodes=tuple(self._nodes.values()),
            rollouts=tuple(self._rollouts.values()),
            targets=tuple(t for targets in self._targets.values() for t in targets.values()),
            holds=tuple(self._holds.values()),
            freezes=tuple(self._freezes.values()),
            team_rules=tuple(self._team_rules.values()),
            epoch=self._epoch,
        )
