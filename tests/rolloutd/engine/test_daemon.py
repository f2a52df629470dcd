"""What the daemon does where facts change between its look and its write, or vanish under its hands."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from machines.facts.node_work import NodeWork, WorkKind
from machines.model.decision import Release
from machines.model.events import (
    DaemonStarted,
    FreezeLifted,
    FreezeStarted,
    HoldTaken,
    NodeOrdered,
    RolloutCancelled,
    RolloutDeleted,
)
from machines.model.node import NodeHealth, Observation
from machines.model.rollout import Actor, ActorKind, Hold, NodeOrder
from machines.model.step_record import StepAction, StepState
from machines.model.windows import Freeze
from machines.states import Phase, Trigger
from machines.workflow.phase_transitions import transition
from machines.workflow.steps import NOT_ISOLATED_RETRY_S
from rolloutd.engine.background.hold_release import RETRY_S
from rolloutd.engine.daemon import Daemon
from rolloutd.engine.drivers.driver import Driver
from rolloutd.errors import StoreFailed
from rolloutd.ports import Busy, Failed, Host, Ok, StepContext, StepResult
from tests.contracts.fakes.check import FakeCheck
from tests.contracts.fakes.clock import START, FakeClock, FakeTimers
from tests.contracts.fakes.isolator import FakeIsolator
from tests.contracts.fakes.runner import Script
from tests.machines.builders import reason_of
from tests.rolloutd.commands.test_commands import REASON
from tests.rolloutd.control_environment import PLAN, ControlEnvironment, control_environment
from tests.rolloutd.decided_jobs import command_jobs, start_decided
from tests.rolloutd.preparation_environment import Fleet, plan_with, preparing_adapters
from tests.rolloutd.slow_store import (
    FakeInventory,
    adapters_of,
    daemon_of,
    loop_iterations,
    open_slow_store,
    store_of,
)

ALL_CANARIES = 'canary: {select: "team in (payments,search)", max_parallel: 9}'

OLGA = Actor(ActorKind.PERSON, "olga", 1001)


@asynccontextmanager
async def running(daemon: Daemon) -> AsyncIterator[None]:
    """Let the daemon run meanwhile; at the end it must still be there."""
    task = asyncio.create_task(daemon.run())
    try:
        yield
        await loop_iterations(50)
        if task.done():
            task.result()
        assert not task.done()
    finally:
        task.cancel()
        await asyncio.wait({task})


async def until(inside: ControlEnvironment, there: Callable[[], object]) -> None:
    """Let time pass until it is so."""
    for _ in range(2000):
        if there():
            return
        await asyncio.sleep(0)
        inside.clock.advance(0.001)
    raise AssertionError("it never came to be so")


async def test_preparation_begins_when_its_window_opens(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        window = '{days: mon-sun, from: "08:05", to: "12:00", zone: UTC}'  # it is 08:00
        stages = "[{install: {name: one, playbook: site.yml}}]"
        text = plan_with().replace("prepare: []", f"prepare: {{stages: {stages}, windows: [{window}]}}")
        fleet, alarm = Fleet(), FakeTimers(inside.clock)
        rollout = await inside.start(text=text)
        daemon = daemon_of(inside, preparing_adapters(inside, fleet), alarm=alarm)

        def pass_time() -> bool:
            alarm.run_due()
            return inside.state.index.preparation(rollout, "p1", "one") is not None

        async with running(daemon):
            await loop_iterations(200)
            assert reason_of(inside.state.index, rollout, "p1", inside.clock.now()).code == "outside-window"
            inside.clock.advance(299.0 + START - inside.clock.now())
            alarm.run_due()
            await loop_iterations(200)
            assert fleet.runs == []
            inside.clock.advance(1.0)
            await until(inside, pass_time)
            assert inside.clock.now() - START < 301.0


async def delete(inside: ControlEnvironment, rollout: str) -> None:
    """Cancel a rollout and take it off the lists."""
    now = inside.clock.now()
    await inside.commit(RolloutCancelled(rollout, OLGA, "because", now))
    await inside.commit(RolloutDeleted(rollout, OLGA, now))


class BlockingAdapter(FakeCheck, FakeIsolator):
    """A check and an isolator that answer when they are let."""

    def __init__(self) -> None:
        FakeCheck.__init__(self)
        FakeIsolator.__init__(self)
        self.begun, self.let = asyncio.Event(), asyncio.Event()

    async def check(self, ctx: StepContext) -> Ok:
        """Pass, later."""
        await self._wait()
        return Ok()

    async def isolate(self, ctx: StepContext) -> StepResult:
        """Isolate the node, later."""
        await self._wait()
        return await super().isolate(ctx)

    async def _wait(self) -> None:
        self.begun.set()
        await self.let.wait()


# -- what takes time ---------------------------------------------------------------


class TickingClock(FakeClock):
    """A clock of which every look costs a moment."""

    def now(self) -> float:
        self._now += 0.01
        return super().now()


@pytest.mark.parametrize("looks", range(1, 20))
async def test_a_decision_is_not_refused_for_the_time_that_it_took(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, looks: int
) -> None:
    """The pool mates were seen nearly a minute ago, and that is too long ago when it is written."""
    async with control_environment(tmp_path) as inside:
        await inside.start()
        inside.observe_all_up()
        old_at = inside.clock.now() + inside.state.index.limits.observe_within_s
        inside.state.clock = TickingClock(old_at - 0.01 * looks - 0.005)
        async with running(daemon_of(inside, adapters_of(inside, tmp_path))):
            await loop_iterations(50)
        assert "decision: not written" not in caplog.text


async def test_node_waits_while_it_is_cleaned(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        rollout = await inside.start()
        inside.observe_all_up()
        cleaning = NodeWork(WorkKind.CLEANING, "p1")
        inside.state.index.record_work(cleaning)
        async with running(daemon_of(inside, adapters_of(inside, tmp_path))):
            await loop_iterations(200)
            assert inside.phase(rollout, "p1") is Phase.PENDING
            inside.state.end_work(cleaning)
            await until(inside, lambda: inside.phase(rollout, "p1") is not Phase.PENDING)


async def test_connection_is_kept_while_node_is_at_work(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        rollout = await inside.start()
        await inside.isolate(rollout, "p1")
        inside.run_host.scripts = {"site.yml": Script.LONG}
        inside.run_host.connected_nodes = frozenset({"s1"})  # by an earlier daemon
        async with running(daemon_of(inside, adapters_of(inside, tmp_path))):
            await until(inside, lambda: inside.run_host.has_work("p1"))
            await until(inside, lambda: inside.run_host.connected_nodes == {"p1"})
            for run in inside.run_host.runs.values():
                run.end(Failed("no such package"))
            await until(inside, lambda: inside.phase(rollout, "p1") is Phase.FAILED)
            await until(inside, lambda: not inside.run_host.connected_nodes)


async def test_an_order_to_stop_waits_for_no_decision_that_cannot_be_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The disk fills up when the order is written, and another node could start."""
    async with control_environment(tmp_path, store=open_slow_store) as inside:
        rollout = await inside.start(text=PLAN.replace("soak: 10m", ALL_CANARIES))
        await inside.isolate(rollout, "p1")
        inside.run_host.scripts = {"site.yml": Script.LONG}
        now = inside.clock.now()
        await inside.commit(FreezeStarted(Freeze("f1", "node/s1", "because", "olga", now, None)))
        await inside.commit(FreezeStarted(Freeze("f2", "node/s2", "because", "olga", now, None)))
        async with running(daemon_of(inside, adapters_of(inside, tmp_path))):
            await until(inside, lambda: inside.run_host.has_work("p1"))
            stop = NodeOrdered(rollout, "p1", NodeOrder.STOP, OLGA, "because", now)
            await inside.commit(FreezeLifted("f1", OLGA, now), stop)
            store_of(inside).failure = StoreFailed("no space left on device")
            await until(inside, lambda: "decision: not written" in caplog.text)
            await loop_iterations(50)
            assert inside.phase(rollout, "s1") is Phase.PENDING
            assert not inside.run_host.has_work("p1")


@pytest.mark.parametrize("moment", range(1, 60, 3))
async def test_node_removed_in_flight_is_driven_to_its_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, moment: int
) -> None:
    """A playbook fails while the inventory loses its node: its log has an end, and nothing is refused."""
    async with control_environment(tmp_path, store=open_slow_store) as inside:
        rollout = await inside.start()
        await inside.isolate(rollout, "p1")
        inside.run_host.scripts = {"site.yml": Script.FAIL}
        hosts = FakeInventory()
        daemon = daemon_of(inside, adapters_of(inside, tmp_path), hosts)
        async with running(daemon):
            await loop_iterations(moment)
            hosts.removed.add("p1")
            daemon.refresh_inventory()
            await until(inside, lambda: inside.phase(rollout, "p1") is Phase.FAILED)
        steps = await inside.state.store.load_steps(rollout, "p1")
        assert [each.state for each in steps if each.action is StepAction.RUN] == [StepState.FAILED]
        assert "could not be written" not in caplog.text


# -- a rollout that is deleted while something of it is done -------------------------


async def test_a_look_whether_a_node_needs_the_change_outlasts_its_rollout(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        before = await inside.start()
        await inside.finish(before, "p1")
        now = inside.clock.now()
        await inside.commit(FreezeStarted(Freeze("f1", "team/search", "because", "olga", now, None)))
        rollout = await inside.start(again=True)
        check = BlockingAdapter()
        async with running(daemon_of(inside, adapters_of(inside, tmp_path, check=check))):
            await check.begun.wait()
            await delete(inside, rollout)
            check.let.set()


async def test_node_removed_while_isolating_is_maintained(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        rollout = await inside.start()
        await inside.transition(rollout, "p1", Trigger.ADMITTED)
        isolator, hosts = BlockingAdapter(), FakeInventory()
        daemon = daemon_of(inside, adapters_of(inside, tmp_path, isolator), hosts)
        async with running(daemon):
            await isolator.begun.wait()
            hosts.removed.add("p1")
            daemon.refresh_inventory()
            await until(inside, lambda: inside.state.index.nodes["p1"].quarantined)
            assert inside.phase(rollout, "p1") is Phase.ISOLATING
            isolator.let.set()
            await until(inside, lambda: inside.phase(rollout, "p1") is Phase.MAINTAINING)
        assert not inside.state.conditions


async def test_rollback_and_admission_of_one_decision_are_written(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        # Only this plan obeys the pool `zone`, in which all nodes are.
        own_pool = PLAN.replace('targets: ""', "targets: team=payments\n  pools: {by: [zone]}")
        first = await inside.start(text=own_pool)
        await inside.finish(first, "p1")
        other = PLAN.replace("name: sysctl", "name: other").replace('targets: ""', "targets: team=search")
        second = await inside.start(text=other)
        await inside.request("olga", "post", f"/v1/rollouts/{first}/rollback", REASON | {"nodes": ["p1"]})
        inside.observe_all_up()
        async with running(daemon_of(inside, adapters_of(inside, tmp_path, BlockingAdapter()))):
            await loop_iterations(100)
        assert inside.phase(first, "p1") is Phase.ISOLATING
        assert inside.phase(second, "s1") is Phase.ISOLATING
        assert not inside.state.conditions


async def test_a_node_that_cannot_be_isolated_is_put_back_no_later(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        rollout = await inside.start()
        await inside.transition(rollout, "p1", Trigger.ADMITTED)
        isolator = FakeIsolator()
        isolator.results["p1", "do"] = Busy("a pod is held by its budget")
        gear = adapters_of(inside, tmp_path, isolator)
        driver = Driver(inside.state, gear, rollout, "p1", daemon_started_at=inside.clock.now())
        driving = asyncio.create_task(driver.run())
        await loop_iterations(20)
        inside.clock.advance(-3600.0)
        limit_s = inside.state.index.rollout(rollout).plan.isolate_timeout_s
        for _ in range(int(limit_s / NOT_ISOLATED_RETRY_S) + 2):
            driver.wake_up()
            await loop_iterations(20)
            inside.clock.advance(NOT_ISOLATED_RETRY_S)
        assert driving.done()
        assert inside.state.index.target(rollout, "p1").aborted_isolations == 1


async def test_restarts_do_not_extend_isolation_for_ever(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        rollout = await inside.start()
        await inside.transition(rollout, "p1", Trigger.ADMITTED)
        isolator = FakeIsolator()
        isolator.results["p1", "do"] = Busy("a pod is held by its budget")
        adapters = adapters_of(inside, tmp_path, isolator)
        limit_s = inside.state.index.rollout(rollout).plan.isolate_timeout_s
        began, restarts = inside.clock.now(), 0
        while inside.phase(rollout, "p1") is Phase.ISOLATING:
            driver = Driver(inside.state, adapters, rollout, "p1", daemon_started_at=inside.clock.now())
            driving = asyncio.create_task(driver.run())
            await loop_iterations(20)
            inside.clock.advance(NOT_ISOLATED_RETRY_S)
            await loop_iterations(20)
            shown = inside.state.step_progress.get((rollout, "p1"))
            driving.cancel()
            await asyncio.wait({driving})
            assert restarts == 0 or shown is None or shown.isolation_deadline >= began + limit_s - 2
            inside.clock.advance(NOT_ISOLATED_RETRY_S)
            inside.observe_all_up()
            restarts += 1
            assert inside.clock.now() < began + 3 * limit_s
        assert restarts > 2
        assert inside.state.index.target(rollout, "p1").aborted_isolations == 1
        assert inside.clock.now() >= began + limit_s


async def test_downtime_never_counts_against_isolation(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        rollout = await inside.start()
        await inside.transition(rollout, "p1", Trigger.ADMITTED)
        isolator = FakeIsolator()
        isolator.results["p1", "do"] = Busy("a pod is held by its budget")
        adapters = adapters_of(inside, tmp_path, isolator)
        limit_s = inside.state.index.rollout(rollout).plan.isolate_timeout_s
        deadline = inside.clock.now() + limit_s
        # The second outage is longer than the limit, and the third is as long again.
        for epoch, downtime_s in enumerate((5.0, 300.0, 2 * limit_s, 2 * limit_s), 2):
            inside.clock.advance(downtime_s)
            deadline += downtime_s
            started = DaemonStarted(epoch, "0", "", inside.clock.now())
            await inside.state.record_start(started, await inside.state.store.latest_audit_entry())
            driver = Driver(inside.state, adapters, rollout, "p1", daemon_started_at=inside.clock.now())
            driving = asyncio.create_task(driver.run())
            await loop_iterations(20)
            shown = inside.state.step_progress[rollout, "p1"].isolation_deadline
            driving.cancel()
            await asyncio.wait({driving})
            assert shown == pytest.approx(deadline, abs=1)
        assert inside.phase(rollout, "p1") is Phase.ISOLATING


# -- what is said while the disk is full, and after -----------------------------------


async def test_trouble_with_the_store_is_over_once_it_writes_again(tmp_path: Path) -> None:
    """No node is at work, whose driver could tell."""
    async with control_environment(tmp_path, store=open_slow_store) as inside:
        now = inside.clock.now()
        await inside.commit(FreezeStarted(Freeze("f1", "all", "because", "olga", now, None)))
        daemon = daemon_of(inside, adapters_of(inside, tmp_path))
        rollout = await inside.submit()
        await inside.vote("olga", rollout, "start")
        store_of(inside).failure = StoreFailed("no space left on device")
        async with running(daemon):
            await until(inside, lambda: inside.state.last_write_error)
            store_of(inside).failure = None
            daemon.wake_up()
            await until(inside, lambda: inside.state.index.rollout(rollout).opened)
            assert inside.state.problems() == ()


# -- who is kept for a hold ------------------------------------------------------------


class FakeHoldController(FakeIsolator):
    """An isolator that keeps nodes for whoever holds them."""

    async def release(self, host: Host) -> Ok:
        """Put the node back in service."""
        self.actions.append((host.name, "let go"))
        return Ok()


@pytest.mark.parametrize("at_work", [False, True])
async def test_a_kept_node_is_not_let_go_while_it_is_being_isolated(tmp_path: Path, at_work: bool) -> None:
    """It failed in service, its hold was released, and a person ordered its rollback."""
    async with control_environment(tmp_path) as inside:
        rollout = await inside.start()
        keeper = FakeHoldController()
        if at_work:
            await inside.fail(rollout, "p1", isolated=False)
            failed = inside.state.index.target(rollout, "p1")
            await inside.commit(transition(failed, Trigger.ROLLBACK_ORDERED, inside.clock.now()))
        now = inside.clock.now()
        inside.state.index.record_observations(
            [Observation("p1", NodeHealth.DOWN, now, left_isolated_by="command")], now
        )
        async with asyncio.TaskGroup() as tasks:
            jobs = command_jobs(inside.state, adapters_of(inside, tmp_path, keeper))
            start_decided(inside.state, jobs, tasks, Release)
            await loop_iterations(10)
            inside.clock.advance(RETRY_S)
        assert keeper.actions == ([] if at_work else [("p1", "let go")])


async def test_new_hold_prevents_release(tmp_path: Path) -> None:
    async with control_environment(tmp_path, store=open_slow_store) as inside:
        keeper, now = FakeHoldController(), inside.clock.now()
        seen = Observation("p1", NodeHealth.DOWN, now, cordoned_by_other=True, left_isolated_by="command")
        inside.state.index.record_observations([seen], now)
        hold = HoldTaken(Hold("p1", "person", "olga", OLGA, "because", now))
        holding = asyncio.create_task(inside.commit(hold))
        await loop_iterations(3)
        async with asyncio.TaskGroup() as tasks:
            jobs = command_jobs(inside.state, adapters_of(inside, tmp_path, keeper))
            start_decided(inside.state, jobs, tasks, Release)
            await loop_iterations(50)
            inside.clock.advance(RETRY_S)
        await holding
        assert keeper.actions == []
