"""The contract of ports.Alarm and ports.Clock, for the twins and for APScheduler on the real clock."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from typing import Protocol

import pytest

from rolloutd.adapters.timers import ApschedulerAlarm
from rolloutd.ports import Alarm
from tests.contracts.twins.clock import FakeAlarm, FakeClock
from tests.contracts.worlds import LIMIT_S

FAR = 3600.0


class World(Protocol):
    """An alarm, its clock, and a way to let time pass until something was heard."""

    alarm: Alarm

    def now(self) -> float: ...

    async def pass_until(self, heard: list[str], count: int) -> None: ...


class TwinWorld:
    """The twin: a second passes at each look."""

    def __init__(self) -> None:
        self._clock = FakeClock()
        self._alarm = FakeAlarm(self._clock)
        self.alarm: Alarm = self._alarm

    def now(self) -> float:
        return self._clock.now()

    async def pass_until(self, heard: list[str], count: int) -> None:
        for _ in range(10):
            self._alarm.ring()
            if len(heard) >= count:
                return
            self._clock.advance(1.0)
        raise TimeoutError


class RealWorld:
    """APScheduler: time passes by itself."""

    def __init__(self) -> None:
        self.alarm: Alarm = ApschedulerAlarm()

    def now(self) -> float:
        return time.time()

    async def pass_until(self, heard: list[str], count: int) -> None:
        async with asyncio.timeout(LIMIT_S):
            while len(heard) < count:
                await asyncio.sleep(0.005)


@pytest.fixture(params=[TwinWorld, RealWorld], ids=["twin", "apscheduler"])
async def world(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    """Each world in turn."""
    made: World = request.param()
    yield made
    made.alarm.close()


async def test_pokes_at_the_instant_and_once(world: World) -> None:
    heard: list[str] = []
    early: list[bool] = []
    instant = world.now() + 0.2
    world.alarm.at(
        "soak", instant, lambda: (heard.append("soak"), early.append(world.now() < instant - 0.01))[0]
    )
    await world.pass_until(heard, 1)
    assert early == [False]
    world.alarm.at("later", world.now() + 0.05, lambda: heard.append("later"))
    await world.pass_until(heard, 2)
    assert heard == ["soak", "later"]


async def test_an_instant_in_the_past_pokes_at_once(world: World) -> None:
    heard: list[str] = []
    world.alarm.at("a", world.now() - 10 * 365 * 86400, lambda: heard.append("a"))
    world.alarm.at("b", 0.0, lambda: heard.append("b"))
    await world.pass_until(heard, 2)
    assert sorted(heard) == ["a", "b"]


async def test_the_same_key_replaces(world: World) -> None:
    heard: list[str] = []
    world.alarm.at("window", world.now() + FAR, lambda: heard.append("old"))
    world.alarm.at("window", world.now(), lambda: heard.append("new"))
    await world.pass_until(heard, 1)
    assert heard == ["new"]


async def test_a_cancelled_key_is_silent_and_unknown_ones_are_fine(world: World) -> None:
    heard: list[str] = []
    world.alarm.at("a", world.now() + 0.05, lambda: heard.append("a"))
    world.alarm.cancel("a")
    world.alarm.cancel("never")
    world.alarm.at("b", world.now() + 0.1, lambda: heard.append("b"))
    await world.pass_until(heard, 1)
    assert heard == ["b"]


async def test_every_pokes_again_and_again_in_the_same_thread(world: World) -> None:
    heard: list[str] = []
    world.alarm.every("refresh", 0.05, lambda: heard.append(threading.current_thread().name))
    await world.pass_until(heard, 3)
    assert set(heard) == {threading.current_thread().name}


async def test_an_instant_in_a_thousand_centuries_is_no_error(world: World) -> None:
    heard: list[str] = []
    world.alarm.at("far", 1e14, lambda: heard.append("far"))
    world.alarm.at("now", world.now(), lambda: heard.append("now"))
    await world.pass_until(heard, 1)
    assert heard == ["now"]


async def test_nothing_is_called_after_close(world: World) -> None:
    heard: list[str] = []
    world.alarm.at("a", world.now(), lambda: heard.append("a"))
    world.alarm.close()
    world.alarm.close()
    world.alarm.at("b", world.now(), lambda: heard.append("b"))
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
