"""A train, its events, and how far each attempt is in the outage that its rollouts share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from machines.model.rollout import Actor, Target


@dataclass(frozen=True, slots=True)
class Train:
    """An order of rollouts whose changes a node gets in one outage, where it can.

    `wait_s`: how long one of them waits for another, at most.  `approvals`: who approved, by rollout; what is
    approved is that these contents run in one outage, in this order, with this wait.
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


@dataclass(frozen=True, slots=True)
class TrainStored:
    """A train was made, or its rollouts or approvals changed."""

    train: Train
    actor: Actor
    reason: str
    at: float


@dataclass(frozen=True, slots=True)
class TrainRemoved:
    """A train ended: what its rollouts share already, they finish together."""

    train: str
    actor: Actor
    reason: str
    at: float


@dataclass(frozen=True, slots=True)
class OutageProgress:
    """How far an attempt is in an outage that others may share.

    `has_passed`: its own checks have passed while the node was isolated.  `has_served`: its checks in service
    too.  `waits`: it does nothing on the node until another attempt has moved.  `judged`: what its checks
    said after the changes of others, by Peer.key: "" when they passed.
    """

    attempt: int
    has_passed: bool = False
    has_served: bool = False
    waits: bool = False
    judged: Mapping[str, str] = field(default_factory=dict)


def change_key(target: Target) -> str:
    """Return what names the change of an attempt, for the checks of others after it."""
    return f"{target.rollout}.{target.attempt}"
