"""Events of trains."""

from __future__ import annotations

from dataclasses import dataclass

from machines.model.rollout import Actor
from machines.model.train import Train


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
