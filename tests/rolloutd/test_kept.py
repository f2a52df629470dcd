"""A node that stayed out of service for a hold is put back by who may, on record, and not every moment."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from machines.events import Event, NodeLetGo
from machines.node import Observation, Sight
from rolloutd.driving.gear import Gear
from rolloutd.errors import TenureLost
from rolloutd.ports import Busy, Host, Ok
from rolloutd.watching.keeping import AGAIN_MOST_S, AGAIN_S, Kept
from tests.contracts.twins.isolator import FakeIsolator
from tests.contracts.twins.runner import FakeRunner
from tests.rolloutd.control_house import House, house


class Cordon(FakeIsolator):
    """An isolator that keeps a node, and counts how often it is asked to let it go."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0

    async def let_go(self, host: Host) -> Ok | Busy:
        self.asked += 1
        return Busy(f"the API of {host.name} is away")


@asynccontextmanager
async def keeping(tmp_path: Path) -> AsyncIterator[tuple[House, Cordon, Kept, asyncio.TaskGroup]]:
    """Serve a fleet of which one node is kept, and what puts it back."""

    async def tree(rollout: str) -> Path:
        return tmp_path

    async with house(tmp_path) as inside:
        seen = Observation("p1", Sight.UP, inside.state.now(), foreign=True, kept="kubernetes")
        inside.state.index.observed([seen], inside.state.now())
        cordon = Cordon()
        kept = Kept(inside.state, Gear(FakeRunner(inside.world), {"kubernetes": cordon}, {}, tree))
        async with asyncio.TaskGroup() as tasks:
            yield inside, cordon, kept, tasks
            while inside.clock.sleepers:
                inside.clock.advance(AGAIN_MOST_S)
                await settle()


async def settle() -> None:
    """Let everything go on that can."""
    for _ in range(50):
        await asyncio.sleep(0)


async def test_it_is_on_record_before_it_is_done(tmp_path: Path) -> None:
    async with keeping(tmp_path) as (inside, cordon, kept, tasks):
        kept.ask(tasks)
        await settle()
        (entry,) = await inside.state.store.audit(event=NodeLetGo.__name__)
        assert '"node":"p1"' in entry.text
        assert cordon.asked == 1


async def test_a_deposed_daemon_leaves_it_alone(tmp_path: Path) -> None:
    async with keeping(tmp_path) as (inside, cordon, kept, tasks):

        async def deposed(events: Sequence[Event], **_: Any) -> Any:
            raise TenureLost("another daemon has taken over")

        inside.state.store.commit = deposed  # type: ignore[method-assign]
        kept.ask(tasks)
        await settle()
        assert cordon.asked == 0


async def test_what_does_not_work_is_tried_ever_more_rarely(tmp_path: Path) -> None:
    async with keeping(tmp_path) as (inside, cordon, kept, tasks):
        began = inside.clock.now()
        while inside.clock.now() < began + 3600.0:
            kept.ask(tasks)
            await settle()
            inside.clock.advance(AGAIN_S)
            await settle()
        assert 10 < cordon.asked < 20
