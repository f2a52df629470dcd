"""A train: rollouts that share the outage of a node."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from machines.model.rollout import Actor


@dataclass(frozen=True, slots=True)
class Train:
    """An order of rollouts whose changes a node gets in one outage, where it can.

    `wait_s`: how long one of them waits for another, at most.  `approvals`: who approved, by rollout; what is
    approved is that these contents run in one outage, in this order.
    """

    name: str
    rollouts: tuple[str, ...]
    wait_s: float
    by: Actor
    at: float
    approvals: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_approved(self) -> bool:
        return all(rollout in self.approvals for rollout in self.rollouts)

    def precedes(self, rollout: str, other: str) -> bool:
        """Return whether both are in the train and the first one comes before the other."""
        order = self.rollouts
        return rollout in order and other in order and order.index(rollout) < order.index(other)
