"""What becomes of a write that somebody stops waiting for, and of a daemon that was deposed meanwhile."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from machines.model.events import FreezeStarted
from machines.model.windows import Freeze
from machines.states import Phase
from rolloutd.errors import LeadershipLost, StoreFailed
from tests.rolloutd.control_environment import ControlEnvironment, control_environment
from tests.rolloutd.slow_store import adapters_of, daemon_of, loop_iterations, open_slow_store, store_of


async def cancelled_while_writing(inside: ControlEnvironment) -> asyncio.Task[None]:
    """Freeze everything, and stop waiting for it, twice, while it is being written."""
    freeze = FreezeStarted(Freeze("f1", "all", "because", "olga", inside.clock.now(), None))
    task = asyncio.create_task(inside.commit(freeze))
    while not store_of(inside).writing:
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait({task})
    return task


async def test_what_is_written_is_known_though_nobody_waits_for_it(tmp_path: Path) -> None:
    async with control_environment(tmp_path, store=open_slow_store) as inside:
        task = await cancelled_while_writing(inside)
        assert task.cancelled()
        assert [each.id for each in inside.state.index.freezes] == ["f1"]


@pytest.mark.parametrize(
    "failure", [StoreFailed("no space left on device"), LeadershipLost("another daemon")]
)
async def test_a_write_that_fails_does_not_undo_a_cancellation(tmp_path: Path, failure: StoreFailed) -> None:
    async with control_environment(tmp_path, store=open_slow_store) as inside:
        store_of(inside).failure = failure
        task = await cancelled_while_writing(inside)
        assert task.cancelled()
        assert inside.state.leadership_lost.is_set() is isinstance(failure, LeadershipLost)
        assert not inside.state.index.freezes


async def test_lost_leadership_writes_nothing(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        head = await inside.state.store.latest_audit_entry()
        inside.state.leadership_lost.set()
        with pytest.raises(LeadershipLost):
            await inside.commit(FreezeStarted(Freeze("f1", "all", "because", "olga", 0.0, None)))
        assert await inside.state.store.latest_audit_entry() == head


async def test_a_deposed_daemon_ends_though_several_were_about_to_write(tmp_path: Path) -> None:
    """The second one learns of it in the very moment in which it is told to end."""
    async with control_environment(tmp_path, store=open_slow_store) as inside:
        rollout = await inside.start()
        await inside.isolate(rollout, "p1")
        await inside.isolate(rollout, "s1")
        running = asyncio.create_task(daemon_of(inside, adapters_of(inside, tmp_path)).run())
        while not store_of(inside).writing:
            await asyncio.sleep(0)
        store_of(inside).failure = LeadershipLost("another daemon has taken over")
        await loop_iterations(100)
        try:
            assert running.done()
            with pytest.raises(ExceptionGroup) as raised:
                running.result()
            assert raised.group_contains(LeadershipLost)
        finally:
            running.cancel()
            await asyncio.wait({running}, timeout=0.1)
        assert inside.phase(rollout, "p1") is Phase.MAINTAINING
