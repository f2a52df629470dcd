"""What decide() needs, kept by events and equal to an index built afresh."""

from __future__ import annotations

from dataclasses import dataclass

from machines.node import Node
from machines.rollout import Hold, Rollout, Target
from machines.windows import Freeze


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything the store remembers that decisions are made from."""

    nodes: tuple[Node, ...] = ()
    rollouts: tuple[Rollout, ...] = ()
    targets: tuple[Target, ...] = ()
    holds: tuple[Hold, ...] = ()
    freezes: tuple[Freeze, ...] = ()
    epoch: int = 0
