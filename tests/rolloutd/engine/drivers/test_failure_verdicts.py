"""Which failures make a verdict: only those of the node itself, as a driver meets them in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from machines.model.events import NodesDiscovered, NodesRemoved
from machines.model.node import NodeHealth, NodeKind, Observation
from machines.model.rollout import FailureCode, Target
from machines.states import Outcome, Phase, Trigger
from machines.workflow.phase_transitions import transition
from rolloutd.engine.drivers.driver import Driver
from rolloutd.engine.outcomes import verdict_events
from rolloutd.ports import Failed, Ok, Unknown
from tests.contracts.fakes.check import FakeCheck
from tests.contracts.fakes.runner import Script
from tests.rolloutd.control_environment import PLAN, ControlEnvironment, control_environment
from tests.rolloutd.slow_store import adapters_of, loop_iterations

PATIENT = PLAN.replace("reachable: {}", "reachable: {within: 2m}")
CHECK = "verify.0.reachable"
NOT_WELL, NO_ANSWER = Failed("the service is down"), Unknown("the API did not answer")


class Fleet:
    """A rollout whose first node is isolated, and what its checks find."""

    def __init__(self, inside: ControlEnvironment, tmp_path: Path, rollout: str) -> None:
        self.inside, self.rollout, self.check = inside, rollout, FakeCheck()
        self._adapters = adapters_of(inside, tmp_path, check=self.check)

    @asynccontextmanager
    async def daemon(self) -> Any:
        """Drive the node until the context ends, as a daemon that starts now."""
        state = self.inside.state
        started_at = self.inside.clock.now()
        driver = Driver(state, self._adapters, self.rollout, "p1", daemon_started_at=started_at)
        driving = asyncio.create_task(driver.run())
        try:
            yield
        finally:
            driving.cancel()
            await asyncio.wait({driving})

    async def wait(self, seconds: int = 1200) -> Target:
        """Let time pass until the node is done or failed, or for so long."""
        for _ in range(seconds // 5):
            await loop_iterations(60)
            target = self.inside.state.index.target(self.rollout, "p1")
            if target.phase in (Phase.DONE, Phase.FAILED):
                break
            self.inside.clock.advance(5)
        return target

    async def run_to_end(self, *results: Ok | Failed | Unknown) -> Target:
        """Drive the node to its end; the checks find these results, the last one stays."""
        self.check.results["p1"] = results
        async with self.daemon():
            return await self.wait()

    async def verdicts(self) -> Sequence[Any]:
        return await self.inside.state.store.load_verdicts()


@asynccontextmanager
async def fleet(tmp_path: Path, text: str = PLAN, **more: Any) -> Any:
    async with control_environment(tmp_path, **more) as inside:
        rollout = await inside.start(text=text)
        await inside.isolate(rollout, "p1")
        yield Fleet(inside, tmp_path, rollout)


def code_of(target: Target) -> FailureCode | None:
    return None if target.failure is None else target.failure.code


async def test_failed_check_makes_a_verdict(tmp_path: Path) -> None:
    async with fleet(tmp_path) as made:
        target = await made.run_to_end(NOT_WELL)
        assert code_of(target) is FailureCode.FAILED
        (verdict,) = await made.verdicts()
        assert (verdict.node, verdict.step, verdict.text) == (
            "p1",
            "verify.0.reachable",
            "the service is down",
        )
        assert verdict.content == target.content != ""
        found = await made.inside.state.store.load_configurations(("p1",))
        assert found.records["p1"].invalid.content == target.content


async def test_failed_task_makes_a_verdict(tmp_path: Path) -> None:
    async with fleet(tmp_path) as made:
        made.inside.run_host.scripts = {"site.yml": Script.FAIL}
        assert code_of(await made.run_to_end(Ok())) is FailureCode.FAILED
        assert len(await made.verdicts()) == 1


@pytest.mark.parametrize(
    ("script", "code"),
    [
        (Script.UNREACHABLE, FailureCode.UNREACHABLE),
        (Script.MISSING, FailureCode.NEVER_STARTED),
        (Script.BROKEN, FailureCode.NEVER_STARTED),
    ],
)
async def test_run_that_never_began_makes_none(tmp_path: Path, script: Script, code: FailureCode) -> None:
    async with fleet(tmp_path) as made:
        made.inside.run_host.scripts = {"site.yml": script}
        assert code_of(await made.run_to_end(Ok())) is code
        assert await made.verdicts() == ()


async def test_outage_of_an_api_makes_none(tmp_path: Path) -> None:
    async with fleet(tmp_path) as made:
        assert code_of(await made.run_to_end(NO_ANSWER)) is FailureCode.UNKNOWN
        assert await made.verdicts() == ()


async def test_outage_of_a_minute_within_the_limit_is_no_failure(tmp_path: Path) -> None:
    async with fleet(tmp_path, PATIENT) as made:
        began = made.inside.clock.now()
        target = await made.run_to_end(*[NO_ANSWER] * 12, Ok("well"))
        assert made.inside.clock.now() - began >= 60
        assert target.outcome is Outcome.CHANGED
        assert await made.verdicts() == ()


async def test_daemon_down_past_the_limit_is_no_failure(tmp_path: Path) -> None:
    async with fleet(tmp_path, PATIENT) as made:
        made.check.results["p1"] = (NOT_WELL,)
        async with made.daemon():
            assert (await made.wait(60)).phase is Phase.VERIFYING
        made.inside.clock.advance(300)
        target = await made.run_to_end(NOT_WELL, NOT_WELL, Ok("well"))
        assert target.outcome is Outcome.CHANGED
        assert await made.verdicts() == ()


async def test_node_that_is_not_ready_makes_none(tmp_path: Path) -> None:
    async with fleet(tmp_path) as made:
        target = await made.run_to_end(Failed("p1 is not Ready", code=FailureCode.LOST))
        assert code_of(target) is FailureCode.LOST
        assert await made.verdicts() == ()


async def test_failure_while_the_cluster_reports_the_node_down_makes_none(tmp_path: Path) -> None:
    async with fleet(tmp_path) as made:
        state = made.inside.state
        node = replace(state.index.nodes["p1"], kind=NodeKind.KUBERNETES)
        await made.inside.commit(NodesDiscovered((node,)))
        made.inside.run_host.scripts = {"site.yml": Script.FAIL}
        now = made.inside.clock.now() + 1
        state.index.record_observations([Observation("p1", NodeHealth.DOWN, now, "NotReady")], now)
        assert code_of(await made.run_to_end(Ok())) is FailureCode.LOST
        assert await made.verdicts() == ()


async def test_node_that_is_gone_makes_none(tmp_path: Path) -> None:
    async with fleet(tmp_path) as made:
        inside = made.inside
        await inside.run_playbook(made.rollout, "p1")
        target = inside.state.index.target(made.rollout, "p1")
        moved = transition(target, Trigger.FAILED, inside.clock.now(), step="verify.0", text="no answer")
        assert len(verdict_events(inside.state, target, moved)) == 1
        await inside.commit(moved)
        await inside.commit(NodesRemoved(("p1",)))
        assert verdict_events(inside.state, target, moved) == []
