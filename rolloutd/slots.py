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
        if not self._waiters and self.active < self._limit():
            self.active += 1
            return
        slot = asyncio.get_running_loop().create_future()
        self._waiters.append(slot)
        try:
            await slot
        except asyncio.CancelledError:
            if slot.cancelled():
                self._waiters.remove(slot)
            else:  # the slot came together with the cancellation
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
        free = self._limit() - self.active
        for slot in [each for each in self._waiters if not each.done()][: max(0, free)]:
            self._waiters.remove(slot)
            self.active += 1
            slot.set_result(None)

    async def __aenter__(self) -> None:
        await self.acquire()

    async def __aexit__(self, *_: object) -> None:
        self.release()
