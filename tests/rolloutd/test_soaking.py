"""When a canary that soaks is believed to have turned red."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from machines.events import RolloutCancelled, RolloutDeleted
from machines.rollout import DAEMON
from machines.states import Phase, Trigger
from rolloutd.driving.gear import Gear
from rolloutd.ports import Check, Failed, Ok, StepContext, Unknown
from rolloutd.watching.soaking import RED_PAUSE_S, Soaking
from tests.contracts.twins.check import FakeCheck
from tests.contracts.twins.runner import FakeRunner
from tests.rolloutd.control_house import PLAN, House, house

LOST = Unknown("no answer within 15 s")


@asynccontextmanager
async def soaking(tmp_path: Path, within: str) -> AsyncIterator[tuple[House, FakeCheck, Soaking, str]]:
    """Serve a rollout whose two canaries soak, and what looks at them."""
    async with house(tmp_path) as inside:
        text = PLAN.replace("reachable: {}", f"reachable: {{within: {within}}}")
        rollout = await inside.start(text=text)
        for node in ("p1", "s1"):
            await inside.finish(rollout, node)
        check = FakeCheck()
        yield inside, check, watching(inside, check), rollout


def watching(inside: House, check: Check) -> Soaking:
    """Return what looks at canaries by this check."""

    async def tree(asked: str) -> Path:
        return Path("/tree")

    return Soaking(inside.state, Gear(FakeRunner(inside.world), {}, {"reachable": check}, tree))


async def look(inside: House, watch: Soaking) -> None:
    """Look once at all canaries, however long that takes."""
    async with asyncio.TaskGroup() as tasks:
        watch.watch(tasks)
        for _ in range(100):
            await asyncio.sleep(0)
            inside.clock.advance(RED_PAUSE_S)


@pytest.mark.parametrize(
    ("within", "answers", "phase"),
    [
        ("0s", (Failed("red"), Ok()), Phase.DONE),
        ("0s", (Failed("red"), Failed("red"), Ok()), Phase.FAILED),
        ("5m", (LOST, LOST, Ok()), Phase.DONE),
        ("5m", (LOST,), Phase.FAILED),
    ],
)
async def test_a_check_is_red_that_stays_red(
    tmp_path: Path, within: str, answers: tuple[Ok | Failed | Unknown, ...], phase: Phase
) -> None:
    """A check that may take a while to turn green is not believed at its second look."""
    async with soaking(tmp_path, within) as (inside, check, watch, rollout):
        check.answers["p1"] = answers
        await look(inside, watch)
        assert inside.state.index.target(rollout, "p1").phase is phase
        assert inside.state.index.target(rollout, "s1").phase is Phase.DONE


class Meanwhile(FakeCheck):
    """A check that is red, and slow enough for something to happen before it says so."""

    def __init__(self, happens: Callable[[], Awaitable[object]]) -> None:
        super().__init__()
        self._happens = happens

    async def check(self, ctx: StepContext) -> Failed:
        """Let it happen, once, and be red."""
        if not self.asked:
            self.asked.append(ctx.host.name)
            await self._happens()
        return Failed("red")


async def test_a_rollout_may_be_cancelled_and_deleted_while_its_canaries_are_looked_at(
    tmp_path: Path,
) -> None:
    async with soaking(tmp_path, "0s") as (inside, _, _, rollout):

        async def over() -> None:
            now = inside.clock.now()
            await inside.commit(RolloutCancelled(rollout, DAEMON, "because", now))
            await inside.commit(RolloutDeleted(rollout, DAEMON, now))

        await look(inside, watching(inside, Meanwhile(over)))
        assert rollout not in inside.state.index.rollouts


async def test_a_canary_of_a_cancelled_rollout_takes_no_slot_by_turning_red(tmp_path: Path) -> None:
    async with soaking(tmp_path, "0s") as (inside, _, _, rollout):

        async def over() -> None:
            await inside.commit(RolloutCancelled(rollout, DAEMON, "because", inside.clock.now()))

        await look(inside, watching(inside, Meanwhile(over)))
        assert inside.phase(rollout, "p1") is inside.phase(rollout, "s1") is Phase.DONE


async def test_a_canary_that_another_rollout_takes_meanwhile_is_not_red_for_that(tmp_path: Path) -> None:
    async with soaking(tmp_path, "0s") as (inside, _, _, rollout):
        other = await inside.start(text=PLAN.replace("name: sysctl", "name: other"))

        async def taken() -> None:
            await inside.move(other, "p1", Trigger.ADMITTED)

        await look(inside, watching(inside, Meanwhile(taken)))
        assert inside.phase(rollout, "p1") is Phase.DONE
        assert inside.phase(rollout, "s1") is Phase.FAILED
