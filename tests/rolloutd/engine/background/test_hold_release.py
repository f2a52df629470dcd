"""A node that stayed out of service for a hold is put back by who may, on record, and not every moment."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from machines.model.decision import Release
from machines.model.events import Event, IsolationReleased
from machines.model.node import NodeHealth, Observation
from rolloutd.commands.holds_and_freezes import hold
from rolloutd.control.identity import Identity
from rolloutd.engine.background.hold_release import RETRY_MAX_S, RETRY_S
from rolloutd.engine.drivers.node_session import AdapterSet
from rolloutd.errors import LeadershipLost, Refused
from rolloutd.ports import Busy, Host, Ok
from tests.contracts.fakes.isolator import FakeIsolator
from tests.contracts.fakes.runner import FakeRunner
from tests.contracts.fakes.sources import find_source
from tests.rolloutd.control_environment import ControlEnvironment, control_environment
from tests.rolloutd.decided_jobs import command_jobs, start_decided


class RecordingCordon(FakeIsolator):
    """An isolator that keeps a node, and counts how often it is asked to let it go."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0
        self.answer = asyncio.Event()
        self.answer.set()

    async def release(self, host: Host) -> Ok | Busy:
        self.asked += 1
        await self.answer.wait()
        return Busy(f"the API of {host.name} is away")


@asynccontextmanager
async def hold_releaser(
    tmp_path: Path,
) -> AsyncIterator[tuple[ControlEnvironment, RecordingCordon, Callable[[], None]]]:
    """Serve a fleet of which one node is kept, and what puts it back."""

    async with control_environment(tmp_path) as inside:
        seen = Observation(
            "p1", NodeHealth.UP, inside.state.now(), cordoned_by_other=True, left_isolated_by="kubernetes"
        )
        inside.state.index.record_observations([seen], inside.state.now())
        cordon = RecordingCordon()
        adapters = AdapterSet(FakeRunner(inside.run_host), {"kubernetes": cordon}, {}, find_source)
        jobs = command_jobs(inside.state, adapters)
        async with asyncio.TaskGroup() as tasks:
            yield inside, cordon, lambda: start_decided(inside.state, jobs, tasks, Release)
            while inside.clock.sleepers:
                inside.clock.advance(RETRY_MAX_S)
                await settle()


async def settle() -> None:
    """Let everything go on that can."""
    for _ in range(50):
        await asyncio.sleep(0)


async def test_it_is_on_record_before_it_is_done(tmp_path: Path) -> None:
    async with hold_releaser(tmp_path) as (inside, cordon, start_release):
        start_release()
        await settle()
        (entry,) = await inside.state.store.read_audit(event=IsolationReleased.__name__)
        assert '"node":"p1"' in entry.text
        assert cordon.asked == 1


async def test_hold_during_release_is_refused(tmp_path: Path) -> None:
    async with hold_releaser(tmp_path) as (inside, cordon, start_release):
        cordon.answer.clear()
        start_release()
        await settle()
        adam = Identity(1, "adam", admin=True)
        with pytest.raises(Refused, match="being returned to service"):
            hold(inside.state, adam, "p1", "to inspect it")
        cordon.answer.set()
        await settle()
        assert not list(inside.state.index.recorded_work("p1"))


async def test_a_deposed_daemon_leaves_it_alone(tmp_path: Path) -> None:
    async with hold_releaser(tmp_path) as (inside, cordon, start_release):

        async def deposed(events: Sequence[Event], **_: Any) -> Any:
            raise LeadershipLost("another daemon has taken over")

        inside.state.store.commit = deposed  # type: ignore[method-assign]
        start_release()
        await settle()
        assert cordon.asked == 0


async def test_what_does_not_work_is_tried_ever_more_rarely(tmp_path: Path) -> None:
    async with hold_releaser(tmp_path) as (inside, cordon, start_release):
        began = inside.clock.now()
        while inside.clock.now() < began + 3600.0:
            start_release()
            await settle()
            inside.clock.advance(RETRY_S)
            await settle()
        assert 10 < cordon.asked < 20
