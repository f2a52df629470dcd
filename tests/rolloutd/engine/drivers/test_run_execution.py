"""A run whose start was refused is begun later only by who still may, and on a node that is still ours."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from machines.model.events import Event, NodeOrdered, NodesRemoved, StepRecorded
from machines.model.rollout import NodeOrder
from machines.model.step_record import StepAction, StepRecord, StepState
from machines.states import Outcome, Phase, Trigger
from rolloutd.engine.drivers.driver import Driver
from rolloutd.engine.drivers.node_session import AdapterSet
from rolloutd.engine.drivers.run_execution import ELSEWHERE_RETRY_S
from rolloutd.engine.runners import FOLLOW_RETRY_S
from rolloutd.engine.state import STORE_RETRY_S
from rolloutd.errors import AdapterFailed, LeadershipLost, NodeUnreachable
from rolloutd.ports import Busy, Failed, Host, IsolationStatus, Ok, RunRequest, StepContext, Unknown
from tests.contracts.fakes.isolator import FakeIsolator
from tests.contracts.fakes.runner import FakeRunner, Script
from tests.contracts.fakes.sources import find_source
from tests.contracts.store_backends import ALICE
from tests.rolloutd.control_environment import PLAN, ControlEnvironment, control_environment


class LosingIsolator(FakeIsolator):
    """An isolator during whose first look somebody does something."""

    def __init__(self, meddle: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self.isolated.add("p1")
        self._meddle = meddle

    async def inspect(self, ctx: StepContext) -> IsolationStatus:
        meddle, self._meddle = self._meddle, lambda: None
        meddle()
        return await super().inspect(ctx)


class FullRunner(FakeRunner):
    """A runner whose machine has no room for the first run it is asked for."""

    def __init__(self, inside: ControlEnvironment) -> None:
        super().__init__(inside.run_host)
        self.asked: list[str] = []
        self.cancelled: list[str] = []
        self.isolator = LosingIsolator()

    async def start(self, request: RunRequest) -> str:
        self.asked.append(request.run_id)
        if len(self.asked) == 1:
            raise AdapterFailed("no memory for another process")
        return await super().start(request)

    async def cancel(self, handle: str) -> None:
        self.cancelled.append(handle)


@asynccontextmanager
async def run_driver(
    inside: ControlEnvironment, rollout: str, runner: FakeRunner, isolators: dict[str, FakeIsolator]
) -> AsyncIterator[Driver]:
    """Drive a node of a rollout."""

    gear = AdapterSet(runner, dict(isolators), {}, find_source)
    driver = Driver(inside.state, gear, rollout, "p1", daemon_started_at=inside.clock.now())
    driving = asyncio.create_task(driver.run())
    try:
        yield driver
    finally:
        driving.cancel()
        await asyncio.wait({driving})


@asynccontextmanager
async def refused(tmp_path: Path) -> AsyncIterator[tuple[ControlEnvironment, FullRunner, str]]:
    """Drive a node whose run could not be started, up to the moment before that is tried again."""
    async with control_environment(tmp_path) as inside:
        rollout = await inside.start()
        await inside.isolate(rollout, "p1")
        runner = FullRunner(inside)
        async with run_driver(inside, rollout, runner, {"command": runner.isolator}):
            while not (runner.asked and inside.clock.sleepers):
                await asyncio.sleep(0)
            yield inside, runner, rollout


async def later(inside: ControlEnvironment, seconds: float) -> None:
    """Let time pass, and what waited for it."""
    inside.clock.advance(seconds)
    for _ in range(50):
        await asyncio.sleep(0)


async def test_it_is_begun_when_there_is_room(tmp_path: Path) -> None:
    async with refused(tmp_path) as (inside, runner, rollout):
        await later(inside, FOLLOW_RETRY_S)
        assert runner.asked == [f"{rollout}.p1.1.configure.1"] * 2


async def test_it_is_not_begun_before_the_pause(tmp_path: Path) -> None:
    async with refused(tmp_path) as (inside, runner, _):
        await later(inside, FOLLOW_RETRY_S - 1.0)
        assert len(runner.asked) == 1


async def test_a_deposed_daemon_does_not_begin_it(tmp_path: Path) -> None:
    async with refused(tmp_path) as (inside, runner, _):

        async def deposed(events: Sequence[Event], **_: Any) -> Any:
            raise LeadershipLost("another daemon has taken over")

        inside.state.store.commit = deposed  # type: ignore[method-assign]
        for _ in range(5):
            await later(inside, max(FOLLOW_RETRY_S, STORE_RETRY_S))
        assert len(runner.asked) == 1


async def test_it_is_not_begun_on_a_node_that_left(tmp_path: Path) -> None:
    async with refused(tmp_path) as (inside, runner, rollout):
        await inside.transition(rollout, "p1", Trigger.LEFT, outcome=Outcome.LEFT)
        await later(inside, FOLLOW_RETRY_S)
        assert len(runner.asked) == 1
        assert runner.cancelled == runner.asked


class DownRunner(FullRunner):
    """A runner that is never available."""

    async def start(self, request: RunRequest) -> str:
        self.asked.append(request.run_id)
        await asyncio.Event().wait()
        raise AssertionError


async def test_run_awaiting_runner_ends_when_node_leaves(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        rollout = await inside.start()
        await inside.isolate(rollout, "p1")
        runner = DownRunner(inside)
        async with run_driver(inside, rollout, runner, {"command": runner.isolator}) as driver:
            while not runner.asked:
                await asyncio.sleep(0)
            await inside.transition(rollout, "p1", Trigger.LEFT, outcome=Outcome.LEFT)
            driver.wake_up()
            await later(inside, 0.0)
            assert runner.cancelled == runner.asked


async def test_returned_node_isolated_again_before_run(tmp_path: Path) -> None:
    async with refused(tmp_path) as (inside, runner, _):
        runner.isolator.isolated.clear()
        await later(inside, FOLLOW_RETRY_S)
        assert runner.isolator.isolated == {"p1"}
        assert len(runner.asked) == 2


async def test_it_is_not_begun_on_a_node_that_cannot_be_isolated_again(tmp_path: Path) -> None:
    async with refused(tmp_path) as (inside, runner, rollout):
        runner.isolator.isolated.clear()
        runner.isolator.results["p1", "do"] = Busy("the load balancer does not answer")
        for _ in range(10):
            await later(inside, FOLLOW_RETRY_S)
        assert len(runner.asked) == 1
        assert inside.phase(rollout, "p1") is Phase.FAILED


async def test_what_somebody_undid_behind_a_look_is_had_again_before_the_run(tmp_path: Path) -> None:
    """One isolator was found standing; then somebody put the node in service, which the other one shows."""
    async with control_environment(tmp_path) as inside:
        two = PLAN.replace('undo: "true"}}]', 'undo: "true"}}, {playbook: {file: site.yml, undo: undo.yml}}]')
        rollout = await inside.start(text=two)
        await inside.transition(rollout, "p1", Trigger.ADMITTED)
        for step in ("isolate.0.command", "isolate.1.playbook"):
            await inside.commit(StepRecorded(inside.step(rollout, "p1", step), isolated=True))
        await inside.transition(rollout, "p1", Trigger.ISOLATED)

        def put_in_service() -> None:
            for each in isolators.values():
                each.isolated.clear()

        isolators: dict[str, FakeIsolator] = {
            "command": LosingIsolator(),
            "playbook": LosingIsolator(put_in_service),
        }
        standing: list[bool] = []

        class Runner(FakeRunner):
            async def start(self, request: RunRequest) -> str:
                standing.append(all("p1" in each.isolated for each in isolators.values()))
                return await super().start(request)

        async with run_driver(inside, rollout, Runner(inside.run_host), isolators):
            while not standing:
                await asyncio.sleep(0)
        assert standing == [True]


async def test_a_node_that_leaves_in_the_middle_of_a_step_is_no_surprise(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with control_environment(tmp_path) as inside:
        rollout = await inside.start()
        await inside.isolate(rollout, "p1")
        isolator = LosingIsolator()

        def leave() -> None:
            isolator.isolated.clear()
            inside.state.index.apply(NodesRemoved(("p1",)))

        isolator._meddle = leave
        async with run_driver(inside, rollout, FakeRunner(inside.run_host), {"command": isolator}):
            while not inside.clock.sleepers:
                await asyncio.sleep(0)
        assert not inside.state.conditions
        assert "unexpected" not in caplog.text


# -- a run that another machine began -------------------------------------------------


class OtherMachine(FakeRunner):
    """The runner of the machine that leads now; the node does not answer the first `silent` times."""

    def __init__(self, inside: ControlEnvironment, silent: int = 0) -> None:
        super().__init__(inside.run_host, machine="b" * 12)
        self.asked: list[str] = []
        self.silent = silent

    async def start(self, request: RunRequest) -> str:
        self.asked.append(request.run_id)
        return await super().start(request)

    async def clean_up_stale_runs(
        self, host: Host, *, timeout_s: float, fencing_token: str = ""
    ) -> Ok | Failed | Unknown:
        self.silent -= 1
        if self.silent >= 0:
            raise NodeUnreachable(f"{host.name}: connection refused")
        assert fencing_token, "an older run must not go on"
        return await super().clean_up_stale_runs(host, timeout_s=timeout_s, fencing_token=fencing_token)


@asynccontextmanager
async def taken_over(
    tmp_path: Path, silent: int = 0
) -> AsyncIterator[tuple[ControlEnvironment, OtherMachine, str]]:
    """A node on which the run of another machine is under way, and the driver of a machine that took over."""
    async with control_environment(tmp_path) as inside:
        inside.run_host.scripts = {"site.yml": Script.LONG}
        rollout = await inside.start()
        await inside.isolate(rollout, "p1")
        isolator = FakeIsolator()
        isolator.isolated.add("p1")
        there = FakeRunner(inside.run_host, machine="a" * 12)
        async with run_driver(inside, rollout, there, {"command": isolator}):
            while not inside.run_host.has_work("p1"):
                await asyncio.sleep(0)
        here = OtherMachine(inside, silent)
        async with run_driver(inside, rollout, here, {"command": isolator}):
            yield inside, here, rollout


async def runs_of(inside: ControlEnvironment, rollout: str) -> list[StepRecord]:
    steps = await inside.state.store.load_steps(rollout, "p1")
    return [each for each in steps if each.action is StepAction.RUN]


async def test_run_of_another_machine_ends_as_unknown(tmp_path: Path) -> None:
    async with taken_over(tmp_path) as (inside, here, rollout):
        await later(inside, 0)
        (run,) = await runs_of(inside, rollout)
        assert run.state is StepState.UNKNOWN
        assert run.text.startswith("the run on p1 was begun by another machine")
        assert not inside.run_host.has_work("p1")
        assert not here.asked


async def test_run_of_another_machine_on_a_silent_node_is_awaited(tmp_path: Path) -> None:
    async with taken_over(tmp_path, silent=3) as (inside, here, rollout):
        await later(inside, 0)
        for left in (1, 0, -1):
            assert [run.state for run in await runs_of(inside, rollout)] == [StepState.INTENDED]
            await later(inside, ELSEWHERE_RETRY_S)
            assert max(here.silent, -1) == left
        (run,) = await runs_of(inside, rollout)
        assert run.state is StepState.UNKNOWN
        assert not inside.run_host.has_work("p1")
        assert not here.asked


async def test_node_silent_beyond_the_runs_limit_is_unknown_and_unclean(tmp_path: Path) -> None:
    async with taken_over(tmp_path, silent=10**6) as (inside, here, rollout):
        await later(inside, 0)
        assert [run.state for run in await runs_of(inside, rollout)] == [StepState.INTENDED]
        await later(inside, 2 * 86_400.0)
        (run,) = await runs_of(inside, rollout)
        assert run.state is StepState.UNKNOWN
        assert "something of it may be left" in run.text
        assert await inside.state.has_unfinished_run("p1"), "the next run cleans up first"
        assert not here.asked


async def test_stopped_run_of_another_machine_is_ended_on_the_node(tmp_path: Path) -> None:
    async with taken_over(tmp_path, silent=1) as (inside, here, rollout):
        await later(inside, 0)
        now = inside.clock.now()
        await inside.commit(NodeOrdered(rollout, "p1", NodeOrder.STOP, ALICE, "stop it", now))
        await later(inside, ELSEWHERE_RETRY_S)
        assert not inside.run_host.has_work("p1")
        assert inside.phase(rollout, "p1") is Phase.FAILED
        assert not here.asked
