"""Isolations that give way to an outage or a hold: what is remembered of why, and for how long."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from machines.model.events import HoldTaken
from machines.model.node import NodeHealth, Observation
from machines.model.rollout import Hold
from machines.model.step_record import StepState
from machines.states import Phase, Trigger
from rolloutd.engine import outcomes
from rolloutd.ports import Busy, StepContext, StepResult
from tests.contracts.fakes.isolator import FakeIsolator
from tests.rolloutd.control_environment import ControlEnvironment, control_environment
from tests.rolloutd.engine.test_daemon import OLGA, BlockingAdapter, running, until
from tests.rolloutd.slow_store import adapters_of, daemon_of, loop_iterations


class BlockingReturn(BlockingAdapter):
    """An isolator that isolates at once, and returns a node when it is let."""

    async def isolate(self, ctx: StepContext) -> StepResult:
        """Isolate the node."""
        return await FakeIsolator.isolate(self, ctx)

    async def return_to_service(self, ctx: StepContext) -> StepResult:
        """Return the node to service, later."""
        await self._wait()
        return await super().return_to_service(ctx)


class SilentIsolator(FakeIsolator):
    """An isolator that never says whether it has isolated a node."""

    async def isolate(self, ctx: StepContext) -> StepResult:
        """Isolate the node, and say nothing."""
        self._apply(ctx, "do", isolated=True)
        return await asyncio.Event().wait()  # type: ignore[return-value]


@asynccontextmanager
async def admitted_node(directory: Path) -> AsyncIterator[tuple[ControlEnvironment, str]]:
    """Start a rollout in which p1 is admitted, and no daemon runs."""
    async with control_environment(directory) as inside:
        rollout = await inside.start()
        await inside.transition(rollout, "p1", Trigger.ADMITTED)
        yield inside, rollout


@pytest.mark.parametrize("peer_recovers", [True, False])
async def test_isolated_node_outlasts_outage_of_peer(tmp_path: Path, peer_recovers: bool) -> None:
    async with admitted_node(tmp_path) as (inside, rollout):
        isolator = BlockingAdapter()
        async with running(daemon_of(inside, adapters_of(inside, tmp_path, isolator))):
            await isolator.begun.wait()
            observe(inside, "p2", NodeHealth.DOWN)
            await loop_iterations(50)
            isolator.let.set()
            await until(inside, lambda: inside.state.step_progress[rollout, "p1"].awaited_slot)
            assert isolator.actions == [("p1", "do")]
            assert inside.phase(rollout, "p1") is Phase.ISOLATING
            if peer_recovers:
                observe(inside, "p2", NodeHealth.UP)
                await until(inside, lambda: inside.phase(rollout, "p1") is Phase.DONE)
                assert inside.state.index.target(rollout, "p1").attempt == 1
            else:
                inside.clock.advance(inside.state.index.rollout(rollout).plan.isolate_timeout_s)
                observe(inside, "p2", NodeHealth.DOWN)
                await until(inside, lambda: inside.phase(rollout, "p1") is Phase.PENDING)
                assert isolator.actions == [("p1", "do"), ("p1", "undo")]


async def test_isolator_that_never_answers_keeps_no_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with admitted_node(tmp_path) as (inside, rollout):
        isolator, plan = SilentIsolator(), inside.state.index.rollout(rollout).plan
        monkeypatch.setattr(outcomes, "ANSWER_MARGIN_S", -plan.isolate[0].timeout_s)
        async with running(daemon_of(inside, adapters_of(inside, tmp_path, isolator))):
            await until(inside, lambda: isolator.actions)
            inside.clock.advance(plan.isolate_timeout_s)
            inside.observe_all_up()
            await until(inside, lambda: inside.phase(rollout, "p1") is Phase.PENDING)
        assert ("p1", "undo") in isolator.actions
        steps = await inside.state.store.load_steps(rollout, "p1")
        assert ("command has not answered within 0 s", StepState.UNKNOWN) in [
            (each.text, each.state) for each in steps
        ]


async def test_abort_keeps_cause_that_is_over(tmp_path: Path) -> None:
    async with admitted_node(tmp_path) as (inside, rollout):
        isolator = BlockingReturn()
        isolator.results["p1", "do"] = Busy("a pod is held by its budget")
        async with running(daemon_of(inside, adapters_of(inside, tmp_path, isolator))):
            await until(inside, lambda: isolator.actions)
            observe(inside, "p2", NodeHealth.DOWN)
            await isolator.begun.wait()
            observe(inside, "p2", NodeHealth.UP)
            await until(inside, lambda: not inside.state.index.over_budget_targets)
            isolator.let.set()
            await until(inside, lambda: inside.phase(rollout, "p1") is Phase.PENDING)
            assert "is over its budget" in inside.state.index.target(rollout, "p1").last_text


async def test_isolated_node_waits_for_slot_after_restart(tmp_path: Path) -> None:
    async with admitted_node(tmp_path) as (inside, rollout):
        isolator = BlockingAdapter()
        async with running(daemon_of(inside, adapters_of(inside, tmp_path, isolator))):
            await isolator.begun.wait()
            await inside.commit(HoldTaken(Hold("p2", "cli", "olga", OLGA, "repair", inside.clock.now())))
            await until(inside, lambda: inside.state.index.over_budget_targets)
            isolator.let.set()
            await until(inside, lambda: inside.state.step_progress[rollout, "p1"].awaited_slot)
        await inside.restart()
        async with running(daemon_of(inside, adapters_of(inside, tmp_path, isolator))):
            await until(inside, lambda: (rollout, "p1") in inside.state.step_progress)
            await loop_iterations(200)
            assert inside.phase(rollout, "p1") is Phase.ISOLATING
            assert inside.state.step_progress[rollout, "p1"].awaited_slot


def observe(inside: ControlEnvironment, node: str, health: NodeHealth) -> None:
    now = inside.clock.now()
    inside.state.index.record_observations([Observation(node, health, now, "kubelet")], now)
    inside.state.wake_up()
