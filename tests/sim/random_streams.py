"""One seed, split by name, so that drawing more of one thing does not move the others."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Self


@dataclass(frozen=True, slots=True)
class RandomStreams:
    """The random streams of one simulation."""

    schedule: random.Random
    latency: random.Random
    faults: random.Random
    people: random.Random
    shape: random.Random
    traffic: random.Random
    pilots: random.Random
    checks: random.Random
    compliance: random.Random
    forgeries: random.Random
    rollbacks: random.Random
    preparation: random.Random
    guards: random.Random
    listeners: random.Random
    artifacts: random.Random
    superseding: random.Random
    checkpoints: random.Random
    damage: random.Random
    inventories: random.Random
    commits: random.Random
    cleaning: random.Random
    selections: random.Random
    jobs: random.Random
    trains: random.Random
    clusters: random.Random

    @classmethod
    def of(cls, seed: int) -> Self:
        """Split a seed."""
        return cls(*(random.Random(f"{seed}/{name}") for name in cls.__slots__))


@dataclass(slots=True)
class Coverage:
    """What really happened, counted by name: a simulator that is silent proves nothing."""

    counts: dict[str, int] = field(default_factory=dict)

    def count(self, name: str) -> None:
        """Count one more."""
        self.counts[name] = self.counts.get(name, 0) + 1

    def merge(self, other: Coverage) -> None:
        """Count what another simulation counted."""
        for name, count in other.counts.items():
            self.counts[name] = self.counts.get(name, 0) + count
