"""The contract of ports.Timers and ports.Clock, for the fakes and for APScheduler on the real clock."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from typing import Protocol

import pytest

from rolloutd.adapters.timers import ApschedulerTimers
from rolloutd.ports import Timers
from tests.contracts.fakes.clock import FakeClock, FakeTimers
from tests.contracts.ssh_fixtures import LIMIT_S

FAR = 3600.0


class TimersBackend(Protocol):
    """An alarm, its clock, and a way to let time pass until something was heard."""

    timers: Timers

    def now(self) -> float: ...

    async def pass_until(self, heard: list[str], count: int) -> None: ...


class FakeBackend:
    """The fake: a second passes at each look."""

    def __init__(self) -> None:
        self._clock = FakeClock()
        self._fake_timers = FakeTimers(self._clock)
        self.timers: Timers = self._fake_timers

    def now(self) -> float:
        return self._clock.now()

    async def pass_until(self, heard: list[str], count: int) -> None:
        for _ in range(10):
            self._fake_timers.run_due()
            if len(heard) >= count:
                return
            self._clock.advance(1.0)
        raise TimeoutError


class ApschedulerBackend:
    """APScheduler: time passes by itself."""

    def __init__(self) -> None:
        self.timers: Timers = ApschedulerTimers()

    def now(self) -> float:
        return time.time()

    async def pass_until(self, heard: list[str], count: int) -> None:
        async with asyncio.timeout(LIMIT_S):
            while len(heard) < count:
                await asyncio.sleep(0.005)


@pytest.fixture(params=[FakeBackend, ApschedulerBackend], ids=["fake", "apscheduler"])
async def backend(request: pytest.FixtureRequest) -> AsyncIterator[TimersBackend]:
    """Each backend in turn."""
    made: TimersBackend = request.param()
    yield made
    made.timers.close()


async def test_pokes_at_the_instant_and_once(backend: TimersBackend) -> None:
    heard: list[str] = []
    early: list[bool] = []
    instant = backend.now() + 0.2
    backend.timers.call_at(
        "soak", instant, lambda: (heard.append("soak"), early.append(backend.now() < instant - 0.01))[0]
    )
    await backend.pass_until(heard, 1)
    assert early == [False]
    backend.timers.call_at("later", backend.now() + 0.05, lambda: heard.append("later"))
    await backend.pass_until(heard, 2)
    assert heard == ["soak", "later"]


async def test_an_instant_in_the_past_pokes_at_once(backend: TimersBackend) -> None:
    heard: list[str] = []
    backend.timers.call_at("a", backend.now() - 10 * 365 * 86400, lambda: heard.append("a"))
    backend.timers.call_at("b", 0.0, lambda: heard.append("b"))
    await backend.pass_until(heard, 2)
    assert sorted(heard) == ["a", "b"]


async def test_the_same_key_replaces(backend: TimersBackend) -> None:
    heard: list[str] = []
    backend.timers.call_at("window", backend.now() + FAR, lambda: heard.append("old"))
    backend.timers.call_at("window", backend.now(), lambda: heard.append("new"))
    await backend.pass_until(heard, 1)
    assert heard == ["new"]


async def test_a_cancelled_key_is_silent_and_unknown_ones_are_fine(backend: TimersBackend) -> None:
    heard: list[str] = []
    backend.timers.call_at("a", backend.now() + 0.05, lambda: heard.append("a"))
    backend.timers.cancel("a")
    backend.timers.cancel("never")
    backend.timers.call_at("b", backend.now() + 0.1, lambda: heard.append("b"))
    await backend.pass_until(heard, 1)
    assert heard == ["b"]


async def test_every_pokes_again_and_again_in_the_same_thread(backend: TimersBackend) -> None:
    heard: list[str] = []
    backend.timers.call_every("refresh", 0.05, lambda: heard.append(threading.current_thread().name))
    await backend.pass_until(heard, 3)
    assert set(heard) == {threading.current_thread().name}


async def test_an_instant_in_a_thousand_centuries_is_no_error(backend: TimersBackend) -> None:
    heard: list[str] = []
    backend.timers.call_at("far", 1e14, lambda: heard.append("far"))
    backend.timers.call_at("now", backend.now(), lambda: heard.append("now"))
    await backend.pass_until(heard, 1)
    assert heard == ["now"]


async def test_nothing_is_called_after_close(backend: TimersBackend) -> None:
    heard: list[str] = []
    backend.timers.call_at("a", backend.now(), lambda: heard.append("a"))
    backend.timers.close()
    backend.timers.close()
    backend.timers.call_at("b", backend.now(), lambda: heard.append("b"))
    for _ in range(20):
        await asyncio.sleep(0)
    assert heard == []


async def test_the_fake_clock_wakes_sleepers_when_told() -> None:
    clock, woken = FakeClock(), []

    async def sleeper(seconds: float) -> None:
        await clock.sleep(seconds)
        woken.append(seconds)

    async with asyncio.TaskGroup() as group:
        for seconds in (30.0, 10.0, 0.0):
            group.create_task(sleeper(seconds))
        while clock.sleepers < 2:
            await asyncio.sleep(0)
        clock.advance(10.0)
        while clock.sleepers or len(woken) < 2:
            if len(woken) == 2:
                clock.advance(20.0)
            await asyncio.sleep(0)
    assert woken == [0.0, 10.0, 30.0]
