"""What an isolator says beforehand reaches the core, and what it does not say in time holds nobody up."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from machines.schedule import decide
from rolloutd.driving.gear import Gear
from rolloutd.errors import NodeUnreachable
from rolloutd.ports import Busy, Ok, StepContext
from rolloutd.watching.rehearsing import Rehearsing
from tests.contracts.twins.isolator import FakeIsolator
from tests.contracts.twins.runner import FakeRunner
from tests.rolloutd.control_house import PLAN, House, house

CANARIES = 'canary: {select: "team in (payments,search)", max_parallel: 9}\n  isolate: [{kubernetes: {}}]'
CORDONED = PLAN.replace('isolate: [{command: {do: "true", undo: "true"}}]', CANARIES)


class Foreseeing(FakeIsolator):
    """An isolator that can say beforehand: p1 cannot go, s1 cannot be asked."""

    def __init__(self, silent: asyncio.Event | None = None) -> None:
        super().__init__()
        self._silent = silent

    async def could(self, ctx: StepContext) -> Ok | Busy:
        """Say it, or wait for ever."""
        if self._silent is not None:
            await self._silent.wait()
        if ctx.host.name == "s1":
            raise NodeUnreachable("cluster ams does not answer")
        return Busy("held by budget web") if ctx.host.name == "p1" else Ok()


async def rehearse(inside: House, isolator: FakeIsolator) -> list[str]:
    """Rehearse what the core asks for, and return who starts then."""

    async def tree(rollout: str) -> Path:
        return Path("/tree")

    gear = Gear(FakeRunner(inside.world), {"kubernetes": isolator}, {}, tree)
    now = inside.state.now()
    asked = decide(inside.state.index, now)
    assert asked.starts == ()
    assert {each.node for each in asked.rehearse} == {"p1", "p2", "s1", "s2"}
    async with asyncio.TaskGroup() as tasks:
        rehearsing = Rehearsing(inside.state, gear)
        rehearsing.ask(tasks, asked.rehearse)
        rehearsing.ask(tasks, asked.rehearse)
    return [start.node for start in decide(inside.state.index, now).starts]


async def test_who_can_go_now_goes_first_and_who_cannot_be_asked_is_not_held_up(tmp_path: Path) -> None:
    async with house(tmp_path) as inside:
        inside.see()
        await inside.start(text=CORDONED)
        assert sorted(await rehearse(inside, Foreseeing())) == ["p2", "s1"]


async def test_an_isolator_that_cannot_say_or_does_not_in_time_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rolloutd.watching.rehearsing.LIMIT_S", 0.01)
    async with house(tmp_path) as inside:
        inside.see()
        await inside.start(text=CORDONED)
        assert sorted(await rehearse(inside, Foreseeing(asyncio.Event()))) == ["p1", "s1"]
