"""A semaphore whose limit may change; it does not know what it limits."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable


class Slots:
    """Slots in use, at most `limit()` of them; those who wait get theirs in order."""

    def __init__(self, limit: Callable[[], int]) -> None:
        self._limit = limit
        self._waiters: deque[asyncio.Future[None]] = deque()
        self.active = 0

    async def acquire(self) -> None:
        self._drop_cancelled()
        if not self._waiters and self.active < self._limit():
            self.active += 1
            return
        slot = asyncio.get_running_loop().create_future()
        self._waiters.append(slot)
        try:
            await slot
        except asyncio.CancelledError:
            if not slot.cancelled():  # the slot came together with the cancellation
                self.release()
            raise

    def take(self) -> None:
        """Take a slot at once, beyond the limit if need be."""
        self.active += 1

    def release(self) -> None:
        self.active -= 1
        self.admit()

    def admit(self) -> None:
        """Give the free slots to those who wait; call it when the limit has grown."""
        self._drop_cancelled()
        while self._waiters and self.active < self._limit():
            self._waiters.popleft().set_result(None)
            self.active += 1
            self._drop_cancelled()

    def _drop_cancelled(self) -> None:
        """Drop the first ones if they gave up: a search for all of these would cost all who wait."""
        while self._waiters and self._waiters[0].done():
            self._waiters.popleft()

    async def __aenter__(self) -> None:
        await self.acquire()

    async def __aexit__(self, *_: object) -> None:
        self.release()
