"""A run whose start was refused is begun later only by who still may, and on a node that is still ours."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from machines.events import Event
from machines.states import Outcome, Trigger
from rolloutd.driving.driver import STORE_RETRY_S, Driver
from rolloutd.driving.gear import Gear
from rolloutd.driving.running import FOLLOW_RETRY_S
from rolloutd.errors import AdapterFailed, TenureLost
from rolloutd.ports import RunRequest
from tests.contracts.twins.isolator import FakeIsolator
from tests.contracts.twins.runner import FakeRunner
from tests.rolloutd.control_house import House, house


class Full(FakeRunner):
    """A runner whose machine has no room for the first run it is asked for."""

    def __init__(self, inside: House) -> None:
        super().__init__(inside.world)
        self.asked: list[str] = []
        self.cancelled: list[str] = []

    async def start(self, request: RunRequest) -> str:
        self.asked.append(request.run)
        if len(self.asked) == 1:
            raise AdapterFailed("no memory for another process")
        return await super().start(request)

    async def cancel(self, handle: str) -> None:
        self.cancelled.append(handle)


@asynccontextmanager
async def refused(tmp_path: Path) -> AsyncIterator[tuple[House, Full, str]]:
    """Drive a node whose run could not be started, up to the moment before that is tried again."""

    async def tree(rollout: str) -> Path:
        return tmp_path

    async with house(tmp_path) as inside:
        rollout = await inside.start()
        await inside.isolate(rollout, "p1")
        runner = Full(inside)
        isolator = FakeIsolator()
        isolator.isolated.add("p1")
        gear = Gear(runner, {"command": isolator}, {}, tree)
        driver = Driver(inside.state, gear, rollout, "p1", alive_since=inside.clock.now())
        driving = asyncio.create_task(driver.drive())
        while not (runner.asked and inside.clock.sleepers):
            await asyncio.sleep(0)
        try:
            yield inside, runner, rollout
        finally:
            driving.cancel()
            await asyncio.wait({driving})


async def later(inside: House, seconds: float) -> None:
    """Let time pass, and what waited for it."""
    inside.clock.advance(seconds)
    for _ in range(50):
        await asyncio.sleep(0)


async def test_it_is_begun_when_there_is_room(tmp_path: Path) -> None:
    async with refused(tmp_path) as (inside, runner, rollout):
        await later(inside, FOLLOW_RETRY_S)
        assert runner.asked == [f"{rollout}.p1.1.configure.1"] * 2


async def test_a_deposed_daemon_does_not_begin_it(tmp_path: Path) -> None:
    async with refused(tmp_path) as (inside, runner, _):

        async def deposed(events: Sequence[Event], **_: Any) -> Any:
            raise TenureLost("another daemon has taken over")

        inside.state.store.commit = deposed  # type: ignore[method-assign]
        for _ in range(5):
            await later(inside, max(FOLLOW_RETRY_S, STORE_RETRY_S))
        assert len(runner.asked) == 1


async def test_it_is_not_begun_on_a_node_that_left(tmp_path: Path) -> None:
    async with refused(tmp_path) as (inside, runner, rollout):
        await inside.move(rollout, "p1", Trigger.LEFT, outcome=Outcome.LEFT)
        await later(inside, FOLLOW_RETRY_S)
        assert len(runner.asked) == 1
        assert runner.cancelled == runner.asked
