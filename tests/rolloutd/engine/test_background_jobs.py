"""Background jobs that fail: reported, counted, tried again later; the daemon goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from rolloutd.engine.tasks import JOB_RETRY_S, BackgroundJobs, for_each
from tests.contracts.fakes.clock import FakeClock
from tests.rolloutd.control_environment import control_environment


async def test_job_error_is_shown_and_ends_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tries, wakes = [], []
    async with control_environment(tmp_path) as inside:
        state = inside.state
        jobs: BackgroundJobs[str] = BackgroundJobs("soak", state, lambda: wakes.append(state.now()))

        async def check(key: str) -> None:
            tries.append(key)
            if len(tries) == 1:
                raise KeyError("deleted")

        async with asyncio.TaskGroup() as tasks:
            jobs.start(tasks, check, "r1", name="soak r1")
            while not state.job_failures:
                await asyncio.sleep(0)
            assert state.problems() == ("soak r1: unexpected KeyError: 'deleted'; it is tried again",)
            jobs.start(tasks, check, "r1", name="soak r1")
            assert isinstance(state.clock, FakeClock)
            began_at = state.now()
            while not wakes:
                state.clock.advance(JOB_RETRY_S / 2)
                await asyncio.sleep(0)
            assert wakes[0] - began_at >= JOB_RETRY_S
            assert tries == ["r1"]
            jobs.start(tasks, check, "r1", name="soak r1")
        assert tries == ["r1", "r1"]
        assert state.problems() == ()
        assert state.job_failures == {"soak": 1}


async def test_items_taken_when_their_turn_comes() -> None:
    taken: list[int] = []
    done: list[int] = []
    turn = asyncio.Event()

    def items() -> Iterator[int]:
        for number in range(100):
            taken.append(number)
            yield number

    async def work(number: int) -> None:
        await turn.wait()
        done.append(number)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(for_each(items(), work, at_once=3))
        for _ in range(20):
            await asyncio.sleep(0)
        assert (taken, done) == ([0, 1, 2], [])
        turn.set()
    assert sorted(done) == list(range(100))


async def test_first_error_ends_the_rest() -> None:
    begun: list[int] = []

    async def work(number: int) -> None:
        begun.append(number)
        await asyncio.sleep(0)
        if number == 1:
            raise KeyError("deleted")

    with pytest.raises(KeyError, match="deleted"):
        await for_each(range(100), work, at_once=2)
    assert len(begun) < 5
