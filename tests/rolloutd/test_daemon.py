"""What the daemon does where facts change between its look and its write, or vanish under its hands."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from machines.events import Frozen, HoldTaken, NodeOrdered, RolloutCancelled, RolloutDeleted, Unfrozen
from machines.moves import move
from machines.node import Observation, Sight
from machines.reconcile import BUSY_RETRY_S
from machines.rollout import Actor, ActorKind, Hold, Order
from machines.states import Outcome, Phase, Trigger
from machines.windows import Freeze
from rolloutd.daemon import Daemon
from rolloutd.driving.driver import Driver
from rolloutd.errors import StoreFailed
from rolloutd.ports import Busy, Host, Ok, StepContext, StepResult
from rolloutd.watching.keeping import AGAIN_S, Kept
from tests.contracts.twins.check import FakeCheck
from tests.contracts.twins.clock import FakeClock
from tests.contracts.twins.isolator import FakeIsolator
from tests.contracts.twins.runner import Script
from tests.rolloutd.control_house import PLAN, House, house
from tests.rolloutd.slow_house import Hosts, daemon_of, gear_of, slow, store_of, turns

ALL_CANARIES = 'canary: {select: "team in (payments,search)", max_parallel: 9}'

OLGA = Actor(ActorKind.PERSON, "olga", 1001)


@asynccontextmanager
async def running(daemon: Daemon) -> AsyncIterator[None]:
    """Let the daemon run meanwhile; at the end it must still be there."""
    task = asyncio.create_task(daemon.run())
    try:
        yield
        await turns(50)
        if task.done():
            task.result()
        assert not task.done()
    finally:
        task.cancel()
        await asyncio.wait({task})


async def until(inside: House, there: Callable[[], object]) -> None:
    """Let time pass until it is so."""
    for _ in range(2000):
        if there():
            return
        await asyncio.sleep(0)
        inside.clock.advance(0.001)
    raise AssertionError("it never came to be so")


async def delete(inside: House, rollout: str) -> None:
    """Cancel a rollout and take it off the lists."""
    now = inside.clock.now()
    await inside.commit(RolloutCancelled(rollout, OLGA, "because", now))
    await inside.commit(RolloutDeleted(rollout, OLGA, now))


class Patient(FakeCheck, FakeIsolator):
    """A check and an isolator that answer when they are let."""

    def __init__(self) -> None:
        FakeCheck.__init__(self)
        FakeIsolator.__init__(self)
        self.begun, self.let = asyncio.Event(), asyncio.Event()

    async def check(self, ctx: StepContext) -> Ok:
        """Pass, later."""
        await self._wait()
        return Ok()

    async def do(self, ctx: StepContext) -> StepResult:
        """Isolate the node, later."""
        await self._wait()
        return await super().do(ctx)

    async def _wait(self) -> None:
        self.begun.set()
        await self.let.wait()


# -- what takes time ---------------------------------------------------------------


class Ticking(FakeClock):
    """A clock of which every look costs a moment."""

    def now(self) -> float:
        self._now += 0.01
        return super().now()


@pytest.mark.parametrize("looks", range(1, 20))
async def test_a_decision_is_not_refused_for_the_time_that_it_took(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, looks: int
) -> None:
    """The pool mates were seen nearly a minute ago, and that is too long ago when it is written."""
    async with house(tmp_path) as inside:
        await inside.start()
        inside.see()
        old_at = inside.clock.now() + inside.state.index.limits.observe_within_s
        inside.state.clock = Ticking(old_at - 0.01 * looks - 0.005)
        async with running(daemon_of(inside, gear_of(inside, tmp_path))):
            await turns(50)
        assert "a decision could not be written" not in caplog.text


async def test_an_order_to_stop_waits_for_no_decision_that_cannot_be_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The disk fills up when the order is written, and another node could start."""
    async with house(tmp_path, store=slow) as inside:
        rollout = await inside.start(text=PLAN.replace("soak: 10m", ALL_CANARIES))
        await inside.isolate(rollout, "p1")
        inside.world.scripts = {"site.yml": Script.LONG}
        now = inside.clock.now()
        await inside.commit(Frozen(Freeze("f1", "node/s1", "because", "olga", now, None)))
        await inside.commit(Frozen(Freeze("f2", "node/s2", "because", "olga", now, None)))
        async with running(daemon_of(inside, gear_of(inside, tmp_path))):
            await until(inside, lambda: inside.world.busy("p1"))
            stop = NodeOrdered(rollout, "p1", Order.STOP, OLGA, "because", now)
            await inside.commit(Unfrozen("f1", OLGA, now), stop)
            store_of(inside).failure = StoreFailed("no space left on device")
            await until(inside, lambda: "a decision could not be written" in caplog.text)
            await turns(50)
            assert inside.phase(rollout, "s1") is Phase.PENDING
            assert not inside.world.busy("p1")


@pytest.mark.parametrize("moment", range(1, 60, 3))
async def test_who_has_left_is_told_though_its_driver_writes_at_the_same_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, moment: int
) -> None:
    """A playbook fails while the inventory loses its node: whatever is written first, nothing is refused."""
    async with house(tmp_path, store=slow) as inside:
        rollout = await inside.start()
        await inside.isolate(rollout, "p1")
        inside.world.scripts = {"site.yml": Script.FAIL}
        hosts = Hosts()
        daemon = daemon_of(inside, gear_of(inside, tmp_path), hosts)
        async with running(daemon):
            await turns(moment)
            hosts.gone.add("p1")
            daemon.refresh()
            await turns(200)
        assert inside.state.index.target(rollout, "p1").outcome is Outcome.LEFT
        assert "could not be written" not in caplog.text


# -- a rollout that is deleted while something of it is done -------------------------


async def test_a_look_whether_a_node_needs_the_change_outlasts_its_rollout(tmp_path: Path) -> None:
    async with house(tmp_path) as inside:
        before = await inside.start()
        await inside.finish(before, "p1")
        now = inside.clock.now()
        await inside.commit(Frozen(Freeze("f1", "team/search", "because", "olga", now, None)))
        rollout = await inside.start(again=True)
        check = Patient()
        async with running(daemon_of(inside, gear_of(inside, tmp_path, check=check))):
            await check.begun.wait()
            await delete(inside, rollout)
            check.let.set()


async def test_a_node_that_left_while_it_was_isolated_outlasts_its_rollout(tmp_path: Path) -> None:
    async with house(tmp_path) as inside:
        rollout = await inside.start()
        await inside.move(rollout, "p1", Trigger.ADMITTED)
        isolator, hosts = Patient(), Hosts()
        daemon = daemon_of(inside, gear_of(inside, tmp_path, isolator), hosts)
        now = inside.clock.now()
        await inside.commit(Frozen(Freeze("f1", "all", "because", "olga", now, None)))
        async with running(daemon):
            await isolator.begun.wait()
            hosts.gone.add("p1")
            daemon.refresh()
            await until(inside, lambda: inside.phase(rollout, "p1") is Phase.DONE)
            await delete(inside, rollout)
            await turns(50)
            isolator.let.set()
            await turns(50)
        assert not inside.state.lasting


# -- a clock that is set back --------------------------------------------------------


async def test_a_node_that_cannot_be_isolated_is_put_back_no_later(tmp_path: Path) -> None:
    async with house(tmp_path) as inside:
        rollout = await inside.start()
        await inside.move(rollout, "p1", Trigger.ADMITTED)
        isolator = FakeIsolator()
        isolator.answers["p1", "do"] = Busy("a pod is held by its budget")
        gear = gear_of(inside, tmp_path, isolator)
        driver = Driver(inside.state, gear, rollout, "p1", alive_since=inside.clock.now())
        driving = asyncio.create_task(driver.drive())
        await turns(20)
        inside.clock.advance(-3600.0)
        limit_s = inside.state.index.rollout(rollout).plan.isolate_timeout_s
        for _ in range(int(limit_s / BUSY_RETRY_S) + 2):
            driver.turn()
            await turns(20)
            inside.clock.advance(BUSY_RETRY_S)
        assert driving.done()
        assert inside.state.index.target(rollout, "p1").put_backs == 1


# -- what is said while the disk is full, and after -----------------------------------


async def test_trouble_with_the_store_is_over_once_it_writes_again(tmp_path: Path) -> None:
    """No node is at work, whose driver could tell."""
    async with house(tmp_path, store=slow) as inside:
        now = inside.clock.now()
        await inside.commit(Frozen(Freeze("f1", "all", "because", "olga", now, None)))
        daemon = daemon_of(inside, gear_of(inside, tmp_path))
        rollout = await inside.submit()
        await inside.vote("olga", rollout, "start")
        store_of(inside).failure = StoreFailed("no space left on device")
        async with running(daemon):
            await until(inside, lambda: inside.state.trouble)
            store_of(inside).failure = None
            daemon.turn()
            await until(inside, lambda: inside.state.index.rollout(rollout).opened)
            assert inside.state.troubles() == ()


# -- who is kept for a hold ------------------------------------------------------------


class Keeper(FakeIsolator):
    """An isolator that keeps nodes for whoever holds them."""

    async def let_go(self, host: Host) -> Ok:
        """Put the node back in service."""
        self.acts.append((host.name, "let go"))
        return Ok()


@pytest.mark.parametrize("at_work", [False, True])
async def test_a_kept_node_is_not_let_go_while_it_is_being_isolated(tmp_path: Path, at_work: bool) -> None:
    """It failed in service, its hold was released, and a person ordered its rollback."""
    async with house(tmp_path) as inside:
        rollout = await inside.start()
        keeper = Keeper()
        if at_work:
            await inside.fail(rollout, "p1", isolated=False)
            failed = inside.state.index.target(rollout, "p1")
            await inside.commit(move(failed, Trigger.ROLLBACK_ORDERED, inside.clock.now()))
        now = inside.clock.now()
        inside.state.index.observed([Observation("p1", Sight.DOWN, now, kept="command")], now)
        async with asyncio.TaskGroup() as tasks:
            Kept(inside.state, gear_of(inside, tmp_path, keeper)).ask(tasks)
            await turns(10)
            inside.clock.advance(AGAIN_S)
        assert keeper.acts == ([] if at_work else [("p1", "let go")])


async def test_a_kept_node_that_is_held_again_in_that_moment_is_not_let_go(tmp_path: Path) -> None:
    async with house(tmp_path, store=slow) as inside:
        keeper, now = Keeper(), inside.clock.now()
        seen = Observation("p1", Sight.DOWN, now, foreign=True, kept="command")
        inside.state.index.observed([seen], now)
        hold = HoldTaken(Hold("p1", "person", "olga", OLGA, "because", now))
        holding = asyncio.create_task(inside.commit(hold))
        await turns(3)
        async with asyncio.TaskGroup() as tasks:
            Kept(inside.state, gear_of(inside, tmp_path, keeper)).ask(tasks)
            await turns(50)
            inside.clock.advance(AGAIN_S)
        await holding
        assert keeper.acts == []
