"""A decision that is being made: its commands, what it has reserved, and when the next one is due."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

from machines.model import traffic
from machines.model.decision import BackOff, Command, Decision, Observe
from machines.model.reasons import Reason
from machines.rules import pools


@dataclass(slots=True)
class PoolRequests:
    """Probes or dry runs that one decision requests, at most `limit` in a pool.

    In an undecided pool a slot depends on the answer: an earlier node keeps its position until then.
    """

    limit: int
    _requested: Counter[str] = field(default_factory=Counter)
    _undecided_pools: set[str] = field(default_factory=set)

    def is_exhausted(self, pools: Collection[str]) -> bool:
        return any(self._requested[pool] >= self.limit for pool in pools)

    def is_undecided(self, pools: Collection[str]) -> bool:
        return not self._undecided_pools.isdisjoint(pools)

    def add(self, pools: Collection[str], *, undecided: bool) -> None:
        self._requested.update(pools)
        if undecided:
            self._undecided_pools.update(pools)


@dataclass(slots=True)
class DecisionBuilder:
    """A decision being made; `dry_reason` is why none of it may be carried out."""

    dry_reason: Reason | None = None
    capacity: pools.Capacity = field(default_factory=pools.Capacity)
    commands: list[Command] = field(default_factory=list)
    nodes_to_observe: dict[str, None] = field(default_factory=dict)
    backoffs: list[BackOff] = field(default_factory=list)
    probes_by_pool: PoolRequests = field(default_factory=lambda: PoolRequests(traffic.PROBE_AHEAD))
    unobserved_by_pool: dict[str, bool] = field(default_factory=dict)
    reasons: dict[str, Reason] = field(default_factory=dict)
    wake_at: float = math.inf
    _counts: Counter[type[Command]] = field(default_factory=Counter)

    def add(self, command: Command) -> None:
        self.commands.append(command)
        self._counts[type(command)] += 1

    def count(self, kind: type[Command]) -> int:
        return self._counts[kind]

    def wake_by(self, at: float) -> None:
        """Have the next decision made at this instant (epoch seconds) at the latest."""
        self.wake_at = min(self.wake_at, at)

    def build(self) -> Decision:
        return Decision(
            (*self.commands, *map(Observe, self.nodes_to_observe)),
            tuple(self.backoffs),
            self.reasons,
            None if math.isinf(self.wake_at) else self.wake_at,
        )
