"""The facts that the invariants look at, and the plain way to lay them out.

An Index offers the same facts; ScannedFacts are made from a snapshot by scanning and
share nothing with it.  No rule is known here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from machines.book import Snapshot
from machines.limits import Limits, TeamRules
from machines.node import NO_LABEL, Node, Observation
from machines.rollout import Hold, Rollout, Target
from machines.traffic import Traffic
from machines.windows import Freeze


class Facts(Protocol):
    """What is known before an event; an Index offers it, so do ScannedFacts."""

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
    def targets(self, rollout: str) -> Iterable[Target]: ...
    def target(self, rollout: str, node: str) -> Target: ...
    def targets_on(self, node: str) -> Iterable[Target]: ...
    def holds_on(self, node: str) -> Iterable[Hold]: ...
    def observation(self, node: str) -> Observation | None: ...
    def traffic_of(self, rollout: str, node: str) -> Traffic | None: ...
    def members(self, key: str, value: str) -> Iterable[str]: ...


@dataclass(slots=True)
class ScannedFacts:
    """The facts of a snapshot, laid out by scanning it; slow and plain."""

    limits: Limits
    nodes: dict[str, Node] = field(default_factory=dict)
    rollouts: dict[str, Rollout] = field(default_factory=dict)
    freezes: tuple[Freeze, ...] = ()
    team_rules: Mapping[str, TeamRules] = field(default_factory=dict)
    holds: tuple[Hold, ...] = ()
    seen: dict[str, Observation] = field(default_factory=dict)
    probed: dict[tuple[str, str], Traffic] = field(default_factory=dict)
    rows: dict[tuple[str, str], Target] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        snapshot: Snapshot,
        limits: Limits,
        observations: Iterable[Observation],
        traffic: Iterable[Traffic] = (),
    ) -> ScannedFacts:
        """Lay out a snapshot."""
        return cls(
            limits=limits,
            nodes={node.name: node for node in snapshot.nodes},
            rollouts={rollout.id: rollout for rollout in snapshot.rollouts},
            freezes=snapshot.freezes,
            team_rules={each.team: each for each in snapshot.team_rules},
            holds=snapshot.holds,
            seen={seen.node: seen for seen in observations},
            probed={(each.rollout, each.node): each for each in traffic},
            rows={(target.rollout, target.node): target for target in snapshot.targets},
        )

    def targets(self, rollout: str) -> Iterable[Target]:
        """Return the targets of a rollout."""
        return [row for row in self.rows.values() if row.rollout == rollout]

    def target(self, rollout: str, node: str) -> Target:
        """Return one target; raises KeyError."""
        return self.rows[rollout, node]

    def targets_on(self, node: str) -> Iterable[Target]:
        """Return a node's targets."""
        return [row for row in self.rows.values() if row.node == node]

    def holds_on(self, node: str) -> Iterable[Hold]:
        """Return a node's holds."""
        return [hold for hold in self.holds if hold.node == node]

    def observation(self, node: str) -> Observation | None:
        """Return a node's last observation."""
        return self.seen.get(node)

    def traffic_of(self, rollout: str, node: str) -> Traffic | None:
        """Return what the probes last said of a node."""
        return self.probed.get((rollout, node))

    def members(self, key: str, value: str) -> Iterable[str]:
        """Return the nodes of a pool."""
        return [node.name for node in self.nodes.values() if node.labels.get(key, NO_LABEL) == value]
