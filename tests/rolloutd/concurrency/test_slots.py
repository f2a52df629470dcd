"""Slots with a limit that changes: order, cancellation, growth."""

from __future__ import annotations

import asyncio

from rolloutd.concurrency.slots import Slots


async def waiting(slots: Slots) -> asyncio.Task[None]:
    """Start an acquire() that does not get its slot yet."""
    task = asyncio.create_task(slots.acquire())
    await asyncio.sleep(0)
    return task


async def test_released_slots_are_given_in_order() -> None:
    slots = Slots(lambda: 1)
    await slots.acquire()
    first, second = await waiting(slots), await waiting(slots)
    slots.release()
    await first
    assert (second.done(), slots.active) == (False, 1)
    slots.release()
    await second


async def test_grown_limit_admits_those_who_wait() -> None:
    limit = 1
    slots = Slots(lambda: limit)
    tasks = [await waiting(slots) for _ in range(4)]
    limit = 3
    slots.admit()
    await asyncio.sleep(0)
    assert [task.done() for task in tasks] == [True, True, True, False]
    tasks[3].cancel()


async def test_shrunk_limit_takes_no_slot_away_and_gives_none() -> None:
    limit = 2
    slots = Slots(lambda: limit)
    await slots.acquire()
    await slots.acquire()
    limit = 1
    third = await waiting(slots)
    slots.release()
    await asyncio.sleep(0)
    assert not third.done()
    slots.release()
    await third
    assert slots.active == 1


async def test_cancelled_waiter_loses_no_slot() -> None:
    slots = Slots(lambda: 1)
    await slots.acquire()
    early, late = await waiting(slots), await waiting(slots)
    early.cancel()
    await asyncio.wait({early})
    slots.release()
    late.cancel()  # its slot has come already
    await asyncio.wait({late})
    assert slots.active == 0
    async with slots:
        assert slots.active == 1


async def test_cancelled_waiters_keep_no_slot_from_others() -> None:
    slots = Slots(lambda: 1)
    await slots.acquire()
    waiters = [asyncio.create_task(slots.acquire()) for _ in range(4)]
    await asyncio.sleep(0)
    for number in (0, 2):
        waiters[number].cancel()
    await asyncio.sleep(0)
    for number in (1, 3):
        slots.release()
        await waiters[number]
    slots.release()
    await slots.acquire()
    assert slots.active == 1
