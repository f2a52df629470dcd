"""The driver's guard: no run without it, and a run whose node has restored itself is stopped."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from machines.model.events import NodesDiscovered
from machines.model.node import NodeHealth, NodeKind, Observation
from machines.model.rollout import FailureCode, Target
from machines.states import Phase
from rolloutd.engine.drivers.driver import Driver
from rolloutd.engine.drivers.node_session import AdapterSet
from rolloutd.errors import AdapterFailed
from rolloutd.ports import (
    Failed,
    GuardReport,
    GuardState,
    NodeGuard,
    Ok,
    RunRequest,
    RunState,
    StepContext,
    Unknown,
)
from tests.contracts.fakes.check import FakeCheck
from tests.contracts.fakes.isolator import FakeIsolator
from tests.contracts.fakes.node_guard import FakeNodeGuard
from tests.contracts.fakes.runner import FakeRun, FakeRunHost, FakeRunner, Script
from tests.contracts.fakes.sources import find_source
from tests.rolloutd.control_environment import PLAN, ControlEnvironment, control_environment

AFTER_S = 120
GUARDED = PLAN + "  guard: {paths: [/etc/net], after: 2m}\n"


class GuardedNode:
    """One node, isolated and about to be changed under a guard; its playbook runs until the test ends it."""

    def __init__(self, env: ControlEnvironment, rollout: str) -> None:
        self.env, self.rollout = env, rollout
        self.runner: FakeRunner = FakeRunner(env.run_host)
        self.check = FakeCheck()
        self.guard = FakeNodeGuard(env.clock)
        self.guards: dict[str, NodeGuard] = {"ssh": self.guard}
        self.files["/etc/net"] = "before"
        self.driver: asyncio.Task[None] | None = None

    @property
    def files(self) -> dict[str, str]:
        return self.guard.node("p1").files

    @property
    def target(self) -> Target:
        return self.env.state.index.target(self.rollout, "p1")

    @property
    def code(self) -> FailureCode | None:
        return None if self.target.failure is None else self.target.failure.code

    def start(self) -> None:
        isolator = FakeIsolator()
        isolator.isolated.add("p1")
        checks = {"reachable": self.check}
        adapters = AdapterSet(self.runner, {"command": isolator}, checks, find_source, {}, self.guards)
        now = self.env.clock.now()
        driver = Driver(self.env.state, adapters, self.rollout, "p1", daemon_started_at=now)
        self.driver = asyncio.create_task(driver.run())

    async def stop(self) -> None:
        """End the driver, as a daemon's end does."""
        assert self.driver is not None
        self.driver.cancel()
        await asyncio.wait({self.driver})

    async def pass_time(self, seconds: int) -> None:
        for _ in range(seconds):
            await self.settle()
            self.env.clock.advance(1.0)
        await self.settle()

    async def settle(self) -> None:
        for _ in range(60):
            await asyncio.sleep(0)

    async def until(self, condition: Callable[[], bool]) -> None:
        for _ in range(40):
            if condition():
                return
            await self.pass_time(5)
        raise AssertionError(f"still {self.target.phase}: {self.target.last_text}")

    async def run_in_progress(self) -> FakeRun:
        """Let the playbook begin, and change the node."""
        await self.until(lambda: bool(self.env.run_host.runs))
        (run,) = self.env.run_host.runs.values()
        self.files["/etc/net"] = "after"
        return run


@asynccontextmanager
async def guarded_node(tmp_path: Path) -> AsyncIterator[GuardedNode]:
    async with control_environment(tmp_path) as env:
        env.run_host.scripts = {"site.yml": Script.LONG}
        rollout = await env.start(text=GUARDED)
        await env.isolate(rollout, "p1")
        node = GuardedNode(env, rollout)
        node.start()
        try:
            yield node
        finally:
            await node.stop()


async def test_confirmed_change_stays(tmp_path: Path) -> None:
    async with guarded_node(tmp_path) as node:
        run = await node.run_in_progress()
        await node.pass_time(10 * AFTER_S)  # a long playbook is no silence
        run.end(Ok("changed"))
        await node.until(lambda: node.target.phase is not Phase.MAINTAINING)
        assert node.guard.outcomes == [GuardState.CONFIRMED]
        assert node.files["/etc/net"] == "after"


async def test_node_that_cannot_arm_is_not_touched(tmp_path: Path) -> None:
    async with guarded_node(tmp_path) as node:
        node.guard.refusing.add("p1")
        await node.until(lambda: node.target.phase is Phase.FAILED)
        assert node.env.run_host.runs == {}
        assert node.code is FailureCode.NEVER_STARTED


class StumblingGuard(FakeNodeGuard):
    """A guard whose first disarm does not reach its script."""

    has_failed = False

    async def disarm(self, ctx: StepContext) -> GuardReport:
        if self.has_failed:
            return await super().disarm(ctx)
        self.has_failed = True
        raise AdapterFailed("p1: sudo: a timestamp is in the future")


async def test_error_of_disarm_is_no_answer_of_node(tmp_path: Path) -> None:
    async with guarded_node(tmp_path) as node:
        await node.stop()
        node.guard = StumblingGuard(node.env.clock)
        node.guards = {"ssh": node.guard}
        node.start()
        (await node.run_in_progress()).end(Ok("changed"))
        await node.until(lambda: node.target.phase is not Phase.MAINTAINING)
        assert node.guard.outcomes == [GuardState.CONFIRMED]


async def test_node_whose_guard_is_not_installed_does_not_move(tmp_path: Path) -> None:
    async with guarded_node(tmp_path) as node:
        await node.stop()
        installed, node.guards = node.guards, {}
        node.start()
        await node.pass_time(AFTER_S)
        assert node.target.phase is Phase.MAINTAINING
        assert node.env.state.conditions
        await node.stop()
        node.guards = installed
        node.start()
        assert await node.run_in_progress()


class UnclaimedRunner(FakeRunner):
    """A runner whose machine stops after it has prepared its first run, and before the run begins."""

    prepared = ""

    async def start(self, request: RunRequest) -> str:
        if not self.prepared:
            self.prepared = request.run_id
            await asyncio.Event().wait()
        return await super().start(request)

    async def get_state(self, handle: str) -> RunState:
        if handle == self.prepared and handle not in self._world.runs:
            return RunState(Unknown("it was prepared and never began"), has_begun=False)
        return await super().get_state(handle)


async def test_run_that_never_began_waits_for_silent_node(tmp_path: Path) -> None:
    async with guarded_node(tmp_path) as node:
        await node.stop()
        node.runner = runner = UnclaimedRunner(node.env.run_host)
        node.start()
        await node.until(lambda: bool(runner.prepared))
        await node.stop()
        node.guard.down.add("p1")
        node.start()
        await node.pass_time(AFTER_S // 4)
        assert node.env.run_host.runs == {}
        node.guard.down.clear()
        assert await node.run_in_progress()


async def test_cut_off_node_restores_itself_and_run_is_stopped(tmp_path: Path) -> None:
    async with guarded_node(tmp_path) as node:
        run = await node.run_in_progress()
        node.guard.down.add("p1")
        await node.pass_time(AFTER_S)
        assert node.files["/etc/net"] == "before"
        node.guard.down.clear()
        await node.until(lambda: node.target.phase is Phase.FAILED)
        assert isinstance(run.result, Failed)
        assert node.code is FailureCode.RESTORED_ITSELF
        assert "p1 restored itself because the daemon was silent: /etc/net" in node.target.failure.message
        assert node.guard.outcomes == [GuardState.RESTORED]


async def test_daemon_that_was_away_finds_restore(tmp_path: Path) -> None:
    async with guarded_node(tmp_path) as node:
        run = await node.run_in_progress()
        await node.stop()
        run.end(Ok("changed"))
        await node.pass_time(AFTER_S)
        node.start()
        await node.until(lambda: node.target.phase is Phase.FAILED)
        assert node.code is FailureCode.RESTORED_ITSELF
        assert await node.env.state.store.load_verdicts() == ()


class BusyRunner(FakeRunner):
    """A runner without a free slot."""

    starts = 0

    async def start(self, request: RunRequest) -> str:
        self.starts += 1
        return await asyncio.Future()


class FailingRunner(FakeRunner):
    """A runner that cannot start a run; its nodes fall silent then."""

    def __init__(self, world: FakeRunHost, guard: FakeNodeGuard) -> None:
        super().__init__(world)
        self.guard, self.starts = guard, 0

    async def start(self, request: RunRequest) -> str:
        self.starts += 1
        self.guard.down.add(request.node)
        raise OSError("no memory left")


async def test_run_that_waits_for_slot_does_not_begin_after_its_guard(tmp_path: Path) -> None:
    async with guarded_node(tmp_path) as node:
        await node.stop()
        node.runner = runner = BusyRunner(node.env.run_host)
        node.start()
        await node.until(lambda: runner.starts > 0)
        node.guard.down.add("p1")
        await node.pass_time(AFTER_S)
        node.guard.down.clear()
        await node.until(lambda: node.target.phase is Phase.FAILED)
        assert node.env.run_host.runs == {}
        assert node.code is FailureCode.NEVER_STARTED


async def test_second_try_of_run_waits_until_node_is_heard(tmp_path: Path) -> None:
    async with guarded_node(tmp_path) as node:
        await node.stop()
        node.runner = runner = FailingRunner(node.env.run_host, node.guard)
        node.start()
        await node.until(lambda: runner.starts > 0)
        await node.pass_time(AFTER_S // 2)
        assert runner.starts == 1


async def test_kubernetes_node_that_is_lost_is_not_blamed_by_its_guard(tmp_path: Path) -> None:
    async with guarded_node(tmp_path) as node:
        run, state = await node.run_in_progress(), node.env.state
        await node.env.commit(NodesDiscovered((replace(state.index.nodes["p1"], kind=NodeKind.KUBERNETES),)))
        now = node.env.clock.now() + 1
        state.index.record_observations([Observation("p1", NodeHealth.DOWN, now, "NotReady")], now)
        run.end(Failed("no answer"))
        await node.until(lambda: node.target.phase is Phase.FAILED)
        assert node.code is FailureCode.LOST


async def test_short_absence_changes_nothing(tmp_path: Path) -> None:
    async with guarded_node(tmp_path) as node:
        run = await node.run_in_progress()
        await node.stop()
        await node.pass_time(AFTER_S // 2)
        node.start()
        await node.pass_time(AFTER_S)
        run.end(Ok("changed"))
        await node.until(lambda: node.target.phase is not Phase.MAINTAINING)
        assert node.guard.outcomes == [GuardState.CONFIRMED]


async def test_run_does_not_begin_after_its_guard(tmp_path: Path) -> None:
    async with guarded_node(tmp_path) as node:
        while not node.guard.node("p1").guards:
            await asyncio.sleep(0)
        await node.stop()
        await node.pass_time(AFTER_S)
        node.start()
        await node.until(lambda: node.target.phase is Phase.FAILED)
        assert node.env.run_host.runs == {}


async def test_failed_confirmation_restores_node(tmp_path: Path) -> None:
    async with guarded_node(tmp_path) as node:
        node.check.results["p1"] = [Failed("p1: no route to the gateway")]
        (await node.run_in_progress()).end(Ok("changed"))
        await node.until(lambda: node.target.phase is Phase.FAILED)
        assert node.files["/etc/net"] == "before"
        assert node.code is FailureCode.RESTORED_ITSELF
        assert node.target.failure.step == "confirm.0.reachable"
