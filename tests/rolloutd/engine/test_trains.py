"""Trains: several rollouts change a node in one outage, through the daemon's loop and its drivers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from machines.model.events import RolloutPaused, StepAction, StepRecord
from machines.model.rollout import Actor, ActorKind
from machines.model.train import Train
from machines.model.train_events import TrainStored
from machines.states import Outcome, Phase
from rolloutd.engine.daemon import Daemon
from rolloutd.ports import Failed, Ok, StepContext
from tests.contracts.fakes.check import FakeCheck
from tests.contracts.fakes.clock import FakeScheduler
from tests.contracts.fakes.isolator import FakeIsolator
from tests.rolloutd.control_environment import PLAN, ControlEnvironment, control_environment
from tests.rolloutd.slow_store import adapters_of, daemon_of, open_slow_store

OLGA = Actor(ActorKind.PERSON, "olga", 1001)

ONE_WAVE = PLAN.replace(
    "soak: 10m", 'canary: {select: "team in (payments,search)", max_parallel: 9}'
).replace("reachable: {}", "reachable: {within: 1s}")
"""A plan whose nodes are all in its first wave."""


class ChecksByRollout(FakeCheck):
    """Checks whose answer depends on the rollout that asks."""

    def __init__(self) -> None:
        super().__init__()
        self.failing: dict[tuple[str, str], int] = {}
        """By rollout and node: from its how manieth check on it fails."""
        self.asked: dict[tuple[str, str], int] = {}

    async def check(self, ctx: StepContext) -> Ok | Failed:
        """Answer for the rollout that asks."""
        key = ctx.rollout, ctx.host.name
        self.asked[key] = self.asked.get(key, 0) + 1
        fails_from = self.failing.get(key)
        if fails_from is not None and self.asked[key] >= fails_from:
            return Failed(f"{ctx.rollout} is broken")
        return Ok("well")


@dataclass(slots=True)
class TrainEnvironment:
    """A daemon over a train of rollouts."""

    env: ControlEnvironment
    isolator: FakeIsolator
    checks: ChecksByRollout
    rollouts: list[str]
    daemon: Daemon
    alarm: FakeScheduler

    async def until(self, holds: Callable[[], bool], ticks: int = 6000) -> None:
        """Let time pass until it is so."""
        for _ in range(ticks):
            await asyncio.sleep(0)
            self.env.clock.advance(0.05)
            self.env.observe_all_up()
            self.alarm.run_due()
            if holds():
                return
        targets = [t for r in self.rollouts for t in self.env.state.index.targets(r)]
        raise AssertionError({(t.rollout, t.node): (t.phase, t.last_text) for t in targets})

    def all_done(self) -> bool:
        """Return whether every target is done."""
        index = self.env.state.index
        return all(each.phase is Phase.DONE for r in self.rollouts for each in index.targets(r))

    async def records(self, rollout: str, node: str) -> Sequence[StepRecord]:
        """Return what was recorded."""
        return await self.env.state.store.load_steps(rollout, node)

    async def runs(self, node: str) -> list[str]:
        """Return the rollouts whose playbook ran on a node, in order."""
        found = []
        for rollout in self.rollouts:
            records = await self.records(rollout, node)
            found += [(each.began_at, rollout) for each in records if each.action is StepAction.RUN]
        return [rollout for _, rollout in sorted(found)]

    def outages(self, node: str) -> int:
        """Return how often a node was returned to service."""
        return self.isolator.actions.count((node, "undo"))


@asynccontextmanager
async def train_environment(
    tmp_path: Path, size: int = 2, text: str = ONE_WAVE, *, starts: bool = True
) -> AsyncIterator[TrainEnvironment]:
    """Run a daemon over a train of rollouts of the same nodes."""
    async with control_environment(tmp_path, store=open_slow_store) as env:
        isolator, checks, alarm = FakeIsolator(), ChecksByRollout(), FakeScheduler(env.clock)
        rollouts = []
        for number in range(size):
            plan = text.replace("name: sysctl", f"name: change{number}")
            rollouts.append(await env.start(text=plan))
        train = Train("t", tuple(rollouts), 3600.0, OLGA, env.clock.now(), dict.fromkeys(rollouts, "olga"))
        await env.commit(TrainStored(train, OLGA, "kernel week", env.clock.now()))
        daemon = daemon_of(env, adapters_of(env, tmp_path, isolator, checks), alarm=alarm)
        inside = TrainEnvironment(env, isolator, checks, rollouts, daemon, alarm)
        task = asyncio.create_task(daemon.run()) if starts else None
        try:
            yield inside
        finally:
            if task is not None:
                task.cancel()
                await asyncio.wait({task})


async def test_train_isolates_node_once(tmp_path: Path) -> None:
    async with train_environment(tmp_path, 3) as inside:
        nodes = ("p1", "p2", "s1", "s2")
        await inside.until(inside.all_done)
        for node in nodes:
            targets = [inside.env.state.index.target(r, node) for r in inside.rollouts]
            assert [t.outcome for t in targets] == [Outcome.CHANGED] * 3
            assert not any(t.isolated for t in targets)
            assert [t.joined_outage for t in targets] == [False, True, True]
            assert await inside.runs(node) == inside.rollouts
            assert inside.isolator.actions.count((node, "do")) == 1
            assert inside.outages(node) == 1
        assert not inside.isolator.isolated


async def test_culprit_in_middle_pauses_alone(tmp_path: Path) -> None:
    async with train_environment(tmp_path, 3) as inside:
        first, second, third = inside.rollouts
        inside.checks.failing[second, "p1"] = 1
        index = inside.env.state.index

        def is_settled() -> bool:
            targets = {each.rollout: each for each in index.targets_on("p1")}
            return targets[second].phase is Phase.FAILED and targets[first].phase is Phase.DONE

        await inside.until(is_settled)
        assert index.target(first, "p1").outcome is Outcome.CHANGED
        assert not index.target(first, "p1").isolated
        assert index.target(second, "p1").isolated
        assert "p1" in inside.isolator.isolated
        assert index.target(third, "p1").attempt == 0
        assert inside.outages("p1") == 0
        # The others go on elsewhere.
        await inside.until(lambda: index.target(third, "s1").phase is Phase.DONE)
        assert index.target(second, "s1").attempt <= 1


async def test_later_change_that_breaks_earlier_check_fails(tmp_path: Path) -> None:
    async with train_environment(tmp_path, 2) as inside:
        first, second = inside.rollouts
        # Its own check and the one after the other change: the second answer is bad.
        inside.checks.failing[first, "p1"] = 2
        index = inside.env.state.index
        await inside.until(lambda: index.target(second, "p1").phase is Phase.FAILED)
        failure = index.target(second, "p1").failure
        assert failure is not None
        assert first in failure.message
        assert index.target(first, "p1").phase is Phase.VERIFYING
        assert not index.unresolved_failures(first)
        assert "p1" in inside.isolator.isolated


async def test_first_that_fails_lets_no_other_begin(tmp_path: Path) -> None:
    async with train_environment(tmp_path, 2) as inside:
        first, second = inside.rollouts
        inside.checks.failing[first, "p1"] = 1
        index = inside.env.state.index
        await inside.until(lambda: index.target(first, "p1").phase is Phase.FAILED)
        await inside.until(lambda: index.target(second, "s1").phase is Phase.DONE)
        assert index.target(second, "p1").attempt == 0
        assert await inside.runs("p1") == [first]


async def test_paused_rollout_does_not_join(tmp_path: Path) -> None:
    async with train_environment(tmp_path, 2) as inside:
        first, second = inside.rollouts
        await inside.env.commit(RolloutPaused(second, OLGA, "wait", inside.env.clock.now()))
        index = inside.env.state.index
        await inside.until(lambda: all(t.phase is Phase.DONE for t in index.targets(first)))
        assert all(t.attempt == 0 for t in index.targets(second))
        assert inside.outages("p1") == 1
