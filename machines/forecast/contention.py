"""How much longer runs take while others are active on the same machine.

How it works.  A run computes for a share of its time, and waits for the rest, mostly for its node.  Runs
that compute share the cores of the machine equally, so they are the customers of a closed queueing network
(the machine repairman's) with as many servers as cores.  Few runs that mostly wait do not delay each other;
of many, the cores decide how long they take.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

PRECISION = 1e-4
"""Of a share of a run's time."""


@dataclass(frozen=True, slots=True)
class Contention:
    """What runs share that are active at once.

    `cpu_share`: the share of its time alone in which a run computes on a machine of so many `cores`.
    `slowdown`: by what share each other run delays one beside that, for example because of a shared mirror.
    """

    cpu_share: float = 0.0
    cores: int = 1
    slowdown: float = 0.0

    def __bool__(self) -> bool:
        return bool(self.cpu_share or self.slowdown)

    def stretch(self, runs: float) -> float:
        """Return by how much a run takes longer than alone, where on average so many are active with it."""
        if runs <= 1.0 or not self:
            return 1.0
        waits = 1.0 - self.cpu_share
        return _duration(runs, self.cpu_share, waits, self.cores) * (1.0 + self.slowdown * (runs - 1.0))


def share_alone(share: float, runs: float, cores: int) -> float:
    """Return the share of its time alone that a run computes; measured was `share`, beside so many runs."""
    low, high = 0.0, 1.0 - share
    while high - low > PRECISION:
        waits = (low + high) / 2
        low, high = (low, waits) if _duration(runs, share, waits, cores) > 1.0 else (waits, high)
    return share / (share + low) if share else 0.0


def _duration(runs: float, computes: float, waits: float, cores: int) -> float:
    """Return how long a run takes that computes and waits for so long; parts of a run are interpolated."""
    few, part = max(1, math.floor(runs)), max(0.0, runs - math.floor(runs))
    duration = _duration_of(few, computes, waits, cores)
    return duration + part * (_duration_of(few + 1, computes, waits, cores) - duration) if part else duration


@lru_cache(maxsize=10_000)
def _duration_of(runs: int, computes: float, waits: float, cores: int) -> float:
    if not waits or not computes:
        return waits + computes * max(1.0, runs / cores)
    # The weight of the state in which so many compute, and how many cores it keeps busy.
    weight = total = 1.0
    busy = 0.0
    for computing in range(1, runs + 1):
        weight *= (runs - computing + 1) * computes / waits / min(computing, cores)
        if weight > 1e200:  # only the ratios matter
            weight, total, busy = weight / 1e200, total / 1e200, busy / 1e200
        total += weight
        busy += weight * min(computing, cores)
    return runs * computes * total / busy
