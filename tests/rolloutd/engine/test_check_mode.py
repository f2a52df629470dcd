"""Check mode: a run of which the daemon has lost sight does not go on beside other work."""

from __future__ import annotations

import asyncio
from pathlib import Path

from rolloutd.engine.check_mode import CANCEL_RETRY_S, CheckMode
from rolloutd.ports import RunRequest
from tests.contracts.fakes.runner import FakeRunner, Script
from tests.rolloutd.control_environment import control_environment
from tests.rolloutd.slow_store import adapters_of


class SilentRunner(FakeRunner):
    """A runner whose answers to starts are lost, and the first ones to cancellations."""

    cancels = 0

    async def start(self, request: RunRequest) -> str:
        await super().start(request)
        raise TimeoutError("no answer to the start")

    async def cancel(self, handle: str) -> None:
        self.cancels += 1
        if self.cancels < 3:
            raise TimeoutError("no answer to the cancellation")
        await super().cancel(handle)


async def test_run_without_an_answer_ends_before_its_work(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        rollout = await inside.start()
        plan, adapters = inside.state.index.rollout(rollout).plan, adapters_of(inside, tmp_path)
        inside.run_host.scripts = {"site.yml": Script.LONG}
        check_mode = CheckMode(inside.state, SilentRunner(inside.run_host))
        source = await adapters.source(rollout)
        checking = asyncio.create_task(check_mode.check("p1", source, plan, rollout=rollout))
        while not checking.done():
            inside.clock.advance(CANCEL_RETRY_S)
            await asyncio.sleep(0)
        report = await checking
        assert "no answer" in report.problem
        assert not inside.run_host.has_work("p1"), "another rollout may start the node now"
        assert not list(inside.state.index.recorded_work("p1"))
