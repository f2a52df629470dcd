"""When a canary that soaks is believed to have turned red."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from machines.states import Phase
from rolloutd.driving.gear import Gear
from rolloutd.ports import Failed, Ok, Unknown
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

        async def tree(asked: str) -> Path:
            return tmp_path

        gear = Gear(FakeRunner(inside.world), {}, {"reachable": check}, tree)
        yield inside, check, Soaking(inside.state, gear), rollout


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
