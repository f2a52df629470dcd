"""A semaphore whose limit may change; it does not know what it limits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from machines.model.slot_queue import SlotQueue


class Slots:
    """Slots in use, at most `limit()` of them; those who wait get theirs in order."""

    def __init__(self, limit: Callable[[], int]) -> None:
        self._limit = limit
        self._queue = SlotQueue[asyncio.Future[None]](has_given_up=lambda slot: slot.done())

    @property
    def active(self) -> int:
        return self._queue.active

    async def acquire(self) -> None:
        slot = asyncio.get_running_loop().create_future()
        if self._queue.enter(slot, self._limit()):
            return
        try:
            await slot
        except asyncio.CancelledError:
            if not slot.cancelled():  # the slot came together with the cancellation
                self.release()
            raise

    def take(self) -> None:
        """Take a slot at once, beyond the limit if need be."""
        self._queue.active += 1

    def release(self) -> None:
        self._queue.active -= 1
        self.admit()

    def admit(self) -> None:
        """Give the free slots to those who wait; call it when the limit has grown."""
        for slot in self._queue.admit(self._limit()):
            slot.set_result(None)

    async def __aenter__(self) -> None:
        await self.acquire()

    async def __aexit__(self, *_: object) -> None:
        self.release()
