"""A run whose start was refused is begun later only by who still may, and on a node that is still ours."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from machines.events import Event, NodesGone, StepRecorded
from machines.states import Outcome, Phase, Trigger
from rolloutd.driving.driver import STORE_RETRY_S, Driver
from rolloutd.driving.gear import Gear
from rolloutd.driving.running import FOLLOW_RETRY_S
from rolloutd.errors import AdapterFailed, TenureLost
from rolloutd.ports import Busy, Look, RunRequest, StepContext
from tests.contracts.twins.isolator import FakeIsolator
from tests.contracts.twins.runner import FakeRunner
from tests.rolloutd.control_house import PLAN, House, house


class Meddled(FakeIsolator):
    """An isolator during whose first look somebody does something."""

    def __init__(self, meddle: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self.isolated.add("p1")
        self._meddle = meddle

    async def look(self, ctx: StepContext) -> Look:
        meddle, self._meddle = self._meddle, lambda: None
        meddle()
        return await super().look(ctx)


class Full(FakeRunner):
    """A runner whose machine has no room for the first run it is asked for."""

    def __init__(self, inside: House) -> None:
        super().__init__(inside.world)
        self.asked: list[str] = []
        self.cancelled: list[str] = []
        self.isolator = Meddled()

    async def start(self, request: RunRequest) -> str:
        self.asked.append(request.run)
        if len(self.asked) == 1:
            raise AdapterFailed("no memory for another process")
        return await super().start(request)

    async def cancel(self, handle: str) -> None:
        self.cancelled.append(handle)


@asynccontextmanager
async def driven(
    inside: House, rollout: str, runner: FakeRunner, isolators: dict[str, FakeIsolator]
) -> AsyncIterator[None]:
    """Drive a node of a rollout."""

    async def tree(rollout: str) -> Path:
        return Path("/tree")

    gear = Gear(runner, dict(isolators), {}, tree)
    driver = Driver(inside.state, gear, rollout, "p1", alive_since=inside.clock.now())
    driving = asyncio.create_task(driver.drive())
    try:
        yield
    finally:
        driving.cancel()
        await asyncio.wait({driving})


@asynccontextmanager
async def refused(tmp_path: Path) -> AsyncIterator[tuple[House, Full, str]]:
    """Drive a node whose run could not be started, up to the moment before that is tried again."""
    async with house(tmp_path) as inside:
        rollout = await inside.start()
        await inside.isolate(rollout, "p1")
        runner = Full(inside)
        async with driven(inside, rollout, runner, {"command": runner.isolator}):
            while not (runner.asked and inside.clock.sleepers):
                await asyncio.sleep(0)
            yield inside, runner, rollout


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


async def test_a_node_that_is_back_in_service_is_isolated_again_before_it_is_begun(tmp_path: Path) -> None:
    async with refused(tmp_path) as (inside, runner, _):
        runner.isolator.isolated.clear()
        await later(inside, FOLLOW_RETRY_S)
        assert runner.isolator.isolated == {"p1"}
        assert len(runner.asked) == 2


async def test_it_is_not_begun_on_a_node_that_cannot_be_isolated_again(tmp_path: Path) -> None:
    async with refused(tmp_path) as (inside, runner, rollout):
        runner.isolator.isolated.clear()
        runner.isolator.answers["p1", "do"] = Busy("the load balancer does not answer")
        for _ in range(10):
            await later(inside, FOLLOW_RETRY_S)
        assert len(runner.asked) == 1
        assert inside.phase(rollout, "p1") is Phase.FAILED


async def test_what_somebody_undid_behind_a_look_is_had_again_before_the_run(tmp_path: Path) -> None:
    """One isolator was found standing; then somebody put the node in service, which the other one shows."""
    async with house(tmp_path) as inside:
        two = PLAN.replace('undo: "true"}}]', 'undo: "true"}}, {playbook: {file: site.yml, undo: undo.yml}}]')
        rollout = await inside.start(text=two)
        await inside.move(rollout, "p1", Trigger.ADMITTED)
        for step in ("isolate.0.command", "isolate.1.playbook"):
            await inside.commit(StepRecorded(inside.step(rollout, "p1", step), isolated=True))
        await inside.move(rollout, "p1", Trigger.ISOLATED)

        def put_in_service() -> None:
            for each in isolators.values():
                each.isolated.clear()

        isolators: dict[str, FakeIsolator] = {"command": Meddled(), "playbook": Meddled(put_in_service)}
        standing: list[bool] = []

        class Runner(FakeRunner):
            async def start(self, request: RunRequest) -> str:
                standing.append(all("p1" in each.isolated for each in isolators.values()))
                return await super().start(request)

        async with driven(inside, rollout, Runner(inside.world), isolators):
            while not standing:
                await asyncio.sleep(0)
        assert standing == [True]


async def test_a_node_that_leaves_in_the_middle_of_a_step_is_no_surprise(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with house(tmp_path) as inside:
        rollout = await inside.start()
        await inside.isolate(rollout, "p1")
        isolator = Meddled()

        def leave() -> None:
            isolator.isolated.clear()
            inside.state.index.apply(NodesGone(("p1",)))

        isolator._meddle = leave
        async with driven(inside, rollout, FakeRunner(inside.world), {"command": isolator}):
            while not inside.clock.sleepers:
                await asyncio.sleep(0)
        assert not inside.state.lasting
        assert "unexpected" not in caplog.text
