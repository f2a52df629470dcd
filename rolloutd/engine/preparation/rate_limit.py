"""Rate limit of a rollout's transfers: when bytes may be sent, by arithmetic alone."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from machines.model.preparation import PrepareStage
from machines.model.rollout import Rollout

BURST_S = 0.25
"""How late all transfers may be and still catch up: the delay of a daemon on a busy machine."""


@dataclass(slots=True)
class ByteBudget:
    """Instants from which bytes may be sent so that `rate_bps` holds; first come, first served."""

    rate_bps: float
    next_at: float
    """From when the next bytes may be sent."""

    def reserve(self, size: int, now: float) -> float:
        """Return how many seconds to wait before these bytes are sent."""
        start = max(self.next_at, now - BURST_S)
        self.next_at = start + size / self.rate_bps
        return max(0.0, start - now)

    def give_back(self, size: int) -> None:
        """Free a reservation whose bytes are not sent."""
        self.next_at -= size / self.rate_bps


@dataclass(slots=True)
class RateLimit:
    """A limit for a whole rollout, or for the nodes of each value of a label.

    Transfers that each ask for one chunk at a time get equal shares.  It measures by the loop's clock: a wall
    clock that is set back would stop all transfers for as long.
    """

    rate_bps: float | None
    now: Callable[[], float] = field(default=lambda: asyncio.get_running_loop().time())
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    _budgets: dict[str, ByteBudget] = field(default_factory=dict)

    async def take(self, size: int, share: str = "") -> None:
        """Wait until these bytes may be sent; `share` is the label's value that the limit is for."""
        if self.rate_bps is None:
            return
        budget = self._budgets.get(share)
        if budget is None:
            budget = self._budgets[share] = ByteBudget(self.rate_bps, self.now())
        wait_s = budget.reserve(size, self.now())
        try:
            await self.sleep(wait_s)
        except asyncio.CancelledError:
            budget.give_back(size)
            raise


class RateLimits:
    """The limit of each stage of the open rollouts, also between its transfers."""

    def __init__(self) -> None:
        self._limits: dict[tuple[str, str], RateLimit] = {}

    def limit(self, rollout: str, stage: PrepareStage, rollouts: Mapping[str, Rollout]) -> RateLimit:
        """Return the limit of a stage; a new stage drops the limits of rollouts that were closed."""
        key = (rollout, stage.name)
        if key not in self._limits:
            is_open = {name for name, _ in self._limits if name in rollouts and not rollouts[name].closed}
            self._limits = {known: each for known, each in self._limits.items() if known[0] in is_open}
            self._limits[key] = RateLimit(stage.rate_bps)
        return self._limits[key]
