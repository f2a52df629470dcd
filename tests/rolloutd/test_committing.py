"""What becomes of a write that somebody stops waiting for, and of a daemon that was deposed meanwhile."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from machines.events import Frozen
from machines.states import Phase
from machines.windows import Freeze
from rolloutd.errors import StoreFailed, TenureLost
from tests.rolloutd.control_house import House, house
from tests.rolloutd.slow_house import daemon_of, gear_of, slow, store_of, turns


async def cancelled_while_writing(inside: House) -> asyncio.Task[None]:
    """Freeze everything, and stop waiting for it, twice, while it is being written."""
    freeze = Frozen(Freeze("f1", "all", "because", "olga", inside.clock.now(), None))
    task = asyncio.create_task(inside.commit(freeze))
    while not store_of(inside).writing:
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait({task})
    return task


async def test_what_is_written_is_known_though_nobody_waits_for_it(tmp_path: Path) -> None:
    async with house(tmp_path, store=slow) as inside:
        task = await cancelled_while_writing(inside)
        assert task.cancelled()
        assert [each.id for each in inside.state.index.freezes] == ["f1"]


@pytest.mark.parametrize("failure", [StoreFailed("no space left on device"), TenureLost("another daemon")])
async def test_a_write_that_fails_does_not_undo_a_cancellation(tmp_path: Path, failure: StoreFailed) -> None:
    async with house(tmp_path, store=slow) as inside:
        store_of(inside).failure = failure
        task = await cancelled_while_writing(inside)
        assert task.cancelled()
        assert inside.state.deposed.is_set() is isinstance(failure, TenureLost)
        assert not inside.state.index.freezes


async def test_a_deposed_daemon_ends_though_several_were_about_to_write(tmp_path: Path) -> None:
    """The second one learns of it in the very moment in which it is told to end."""
    async with house(tmp_path, store=slow) as inside:
        rollout = await inside.start()
        await inside.isolate(rollout, "p1")
        await inside.isolate(rollout, "s1")
        running = asyncio.create_task(daemon_of(inside, gear_of(inside, tmp_path)).run())
        while not store_of(inside).writing:
            await asyncio.sleep(0)
        store_of(inside).failure = TenureLost("another daemon has taken over")
        await turns(100)
        try:
            assert running.done()
            with pytest.raises(ExceptionGroup) as raised:
                running.result()
            assert raised.group_contains(TenureLost)
        finally:
            running.cancel()
            await asyncio.wait({running}, timeout=0.1)
        assert inside.phase(rollout, "p1") is Phase.MAINTAINING
