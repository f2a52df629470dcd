"""Leadership in memory: one seat, and candidates that wait for it."""

from __future__ import annotations

import asyncio

from rolloutd.errors import LeadershipLost
from rolloutd.ports import Peers


class Seat:
    """What the candidates compete for."""

    def __init__(self) -> None:
        self.leader: FakeLeadership | None = None
        self.changed = asyncio.Condition()


class FakeLeadership:
    """A candidate that waits; `usurp` gives the seat to another one before the first can know."""

    def __init__(self, seat: Seat) -> None:
        self.lost = asyncio.Event()
        self.peers: Peers | None = None
        self.renewal_s = 5.0
        self._seat = seat

    async def acquire(self) -> None:
        async with self._seat.changed:
            await self._seat.changed.wait_for(lambda: self._seat.leader is None)
            self._seat.leader = self

    def require(self) -> None:
        if self._seat.leader is not self:
            self.lost.set()
            raise LeadershipLost("another daemon has taken over")

    def record_followed(self, seq: int) -> None:
        self.followed = seq

    async def hand_over(self) -> None:
        await self.release()

    async def renew(self) -> None:
        if self._seat.leader is not self:
            self.lost.set()

    async def release(self) -> None:
        async with self._seat.changed:
            if self._seat.leader is self:
                self._seat.leader = None
                self._seat.changed.notify_all()

    def usurp(self) -> None:
        self._seat.leader = self
