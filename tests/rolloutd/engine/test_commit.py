"""What becomes of a write that somebody stops waiting for, and of a daemon that was deposed meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from machines.model.events import Event, FreezeLifted, FreezeStarted
from machines.model.rollout import DAEMON
from machines.model.windows import Freeze
from machines.states import Phase
from rolloutd.control.client import ApiError
from rolloutd.errors import FactsBehind, LeadershipLost, StoreFailed
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


async def test_failed_write_of_a_command_is_trouble(tmp_path: Path) -> None:
    async with control_environment(tmp_path, store=open_slow_store) as inside:
        rollout = await inside.submit()
        store_of(inside).failure = StoreFailed("no space left on device")
        with pytest.raises(ApiError, match="no space left"):
            await inside.vote("olga", rollout, "start")
        assert inside.state.problems() == ("no space left on device",)


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


async def test_failing_listener_loses_no_fact(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    heard: list[str] = []

    def fail(events: Sequence[Event], commit_s: float) -> None:
        raise OSError("the pipe is closed")

    async with control_environment(tmp_path) as inside:
        inside.state.commit_listeners += [
            fail,
            lambda events, commit_s: heard.append(type(events[0]).__name__),
        ]
        await inside.commit(FreezeStarted(Freeze("f1", "all", "because", "olga", 0.0, None)))
        assert [each.id for each in inside.state.index.freezes] == ["f1"]
        assert heard == ["FreezeStarted"]
    assert "commit listener: OSError('the pipe is closed'); it misses a commit" in caplog.text


async def test_event_that_facts_refuse_ends_daemon(tmp_path: Path) -> None:
    """The store has the event: whatever is decided without it may do a thing twice."""
    async with control_environment(tmp_path) as inside:
        await inside.commit(FreezeStarted(Freeze("f1", "all", "because", "olga", 0.0, None)))
        inside.state.index.apply(FreezeLifted("f1", DAEMON, 0.0))
        running = asyncio.create_task(daemon_of(inside, adapters_of(inside, tmp_path)).run())
        await loop_iterations(20)
        with pytest.raises(FactsBehind, match="a written event was not applied"):
            await inside.commit(FreezeLifted("f1", DAEMON, 0.0))
        with pytest.raises(FactsBehind, match="the daemon wrote nothing"):
            await inside.commit(FreezeStarted(Freeze("f2", "all", "because", "olga", 0.0, None)))
        with pytest.raises(ExceptionGroup) as raised:
            await asyncio.wait_for(running, 60.0)
        assert raised.group_contains(FactsBehind)
