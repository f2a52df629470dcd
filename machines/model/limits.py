"""Limits of the settings; every plan obeys them.

A plan can add pool keys for its own rollout, with a budget of 1, and can widen nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from machines.model.runners import RunnerRule
from machines.model.windows import Window

DEFAULT_OBSERVATION_MAX_AGE_S = 60.0


@dataclass(frozen=True, slots=True)
class Budget:
    """How many of a pool's nodes may be down: a number, or a percentage of its members.

    A percentage is rounded down and at least 1; 0 closes the pool.
    """

    count: int | None = 1
    percent: int | None = None

    def resolve(self, member_count: int) -> int:
        if self.percent is None:
            return self.count if self.count is not None else 1
        # A small pool must be maintainable too: 10 % of five nodes is one node, not none.
        return max(1, member_count * self.percent // 100) if self.percent > 0 else 0


@dataclass(frozen=True, slots=True)
class PoolRule:
    """The budget of all pools of one key, and of the values that differ."""

    default: Budget = Budget(1)
    values: Mapping[str, Budget] = field(default_factory=dict)

    def budget_for(self, value: str) -> Budget:
        return self.values.get(value, self.default)


@dataclass(frozen=True, slots=True)
class DiskShortage:
    """Too little space is free for the files of a run; `since` is when that began (epoch seconds)."""

    free_bytes: int
    needed_bytes: int
    since: float


@dataclass(frozen=True, slots=True)
class Refusal:
    """A rollout's decision broke an invariant or met another row; `until`: the next try (epoch seconds)."""

    problem: str
    until: float


@dataclass(frozen=True, slots=True)
class TeamRules:
    """A team's own rules; they only tighten the settings.

    Without windows the team adds no limit; its canaries are added to those of the settings.
    """

    team: str
    windows: tuple[Window, ...] = ()
    canaries: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Limits:
    """What the settings say about pools, windows and the whole fleet.

    `teams`: the teams of the settings, the only ones that can vote; None if unknown.  `runners` in the order
    in which a node is matched.  `workers`: how many nodes of a source may be in
    flight with changes.
    """

    pools: Mapping[str, PoolRule] = field(default_factory=lambda: {"team": PoolRule()})
    max_parallel: int = 64
    observe_within_s: float = DEFAULT_OBSERVATION_MAX_AGE_S
    team_windows: Mapping[str, tuple[Window, ...]] = field(default_factory=dict)
    observe_only: bool = False
    teams: frozenset[str] | None = None
    runners: tuple[RunnerRule, ...] = (RunnerRule(),)
    workers: Mapping[str, int] = field(default_factory=dict)
