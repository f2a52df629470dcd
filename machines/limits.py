"""The limits that every plan obeys, as the settings give them.

They are values of the daemon, not of a plan: a plan may add pool keys for its
own rollout, with a budget of 1, and can widen nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from machines.windows import Window

OBSERVE_WITHIN_S = 60.0


@dataclass(frozen=True, slots=True)
class Budget:
    """How many of a pool's nodes may be down: a number, or a percentage of its members.

    A percentage is max(1, floor(members * percent / 100)); 0 closes the pool.
    """

    count: int | None = 1
    percent: int | None = None

    def of(self, members: int) -> int:
        """Return the budget of a pool with so many members."""
        if self.percent is None:
            return self.count if self.count is not None else 1
        return max(1, members * self.percent // 100) if self.percent > 0 else 0


@dataclass(frozen=True, slots=True)
class PoolRule:
    """The budget of all pools of one key, and of the values that differ."""

    default: Budget = Budget(1)
    values: Mapping[str, Budget] = field(default_factory=dict)

    def budget(self, value: str) -> Budget:
        """Return the budget of the pool `key/value`."""
        return self.values.get(value, self.default)


@dataclass(frozen=True, slots=True)
class TeamRules:
    """What a team has set for itself; it comes on top of the settings and only tightens them.

    No windows are no further limit; canaries go first beside those of the settings.
    """

    team: str
    windows: tuple[Window, ...] = ()
    canaries: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Limits:
    """What the settings say of pools, windows and the whole fleet.

    `teams` are those that the settings name, of which alone votes can come; None where that is not known.
    """

    pools: Mapping[str, PoolRule] = field(default_factory=lambda: {"team": PoolRule()})
    max_parallel: int = 64
    observe_within_s: float = OBSERVE_WITHIN_S
    team_windows: Mapping[str, tuple[Window, ...]] = field(default_factory=dict)
    observe_only: bool = False
    teams: frozenset[str] | None = None
