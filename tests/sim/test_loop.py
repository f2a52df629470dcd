"""The simulation's loop: what a seed decides, and nothing else does."""

from __future__ import annotations

import asyncio
import random

from tests.sim.loop import SimLoop

TASKS = 40


def cancelled_in_order(unrelated: list[object]) -> list[int]:
    """Return the order in which tasks of a group end after one has failed."""
    order: list[int] = []

    async def wait(number: int) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            order.append(number)

    async def fail() -> None:
        raise OSError

    async def run() -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(TASKS):
                unrelated.append(bytearray(random.randrange(2_000)))
                group.create_task(wait(number))
            group.create_task(fail())

    loop = SimLoop(random.Random(0))  # type: ignore[abstract]  # what it lacks must raise
    with loop.entered():
        task = loop.create_task(run())
        while not task.done() and loop.step():
            pass
    assert isinstance(task.exception(), ExceptionGroup)
    return order


def test_failed_group_cancels_in_same_order() -> None:
    unrelated: list[object] = []
    first = cancelled_in_order(unrelated)
    assert sorted(first) == list(range(TASKS))
    assert cancelled_in_order(unrelated) == first
