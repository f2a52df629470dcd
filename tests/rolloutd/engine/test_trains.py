"""Trains: several rollouts change a node in one outage, through the daemon's loop and its drivers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from machines.model.events import NodeOrdered, RolloutCancelled, RolloutPaused
from machines.model.rollout import Actor, ActorKind, NodeOrder
from machines.model.step_record import StepRecord
from machines.model.train import Train, TrainRemoved, TrainStored
from machines.states import Outcome, Phase
from rolloutd.ports import Failed, GuardState, Ok, StepContext
from tests.contracts.fakes.check import FakeCheck
from tests.contracts.fakes.clock import FakeTimers
from tests.contracts.fakes.isolator import FakeIsolator
from tests.contracts.fakes.node_guard import FakeNodeGuard
from tests.rolloutd.control_environment import NODES, PLAN, ControlEnvironment, control_environment
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
    guard: FakeNodeGuard
    rollouts: list[str]
    alarm: FakeTimers

    def train_stored(self, members: int) -> TrainStored:
        """Return the event of a train of the first rollouts."""
        names, now = tuple(self.rollouts[:members]), self.env.clock.now()
        return TrainStored(
            Train("t", names, 3600.0, OLGA, now, dict.fromkeys(names, "olga")), OLGA, "week", now
        )

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

    async def runs(self, node: str, step: str = "run.configure") -> list[str]:
        """Return the rollouts whose playbook ran on a node, in order."""
        found = []
        for rollout in self.rollouts:
            records = await self.records(rollout, node)
            found += [(each.began_at, rollout) for each in records if each.step == step]
        return [rollout for _, rollout in sorted(found)]

    async def until_phase(self, rollout: str, node: str, *phases: Phase) -> None:
        """Let time pass until a node is in one of these phases."""
        await self.until(lambda: self.env.phase(rollout, node) in phases)

    def outages(self, node: str) -> int:
        """Return how often a node was returned to service."""
        return self.isolator.actions.count((node, "undo"))


@asynccontextmanager
async def train_environment(
    tmp_path: Path, size: int = 2, text: str = ONE_WAVE, *, members: int | None = None
) -> AsyncIterator[TrainEnvironment]:
    """Run a daemon over rollouts of the same nodes, in a train of all or of the first `members`."""
    async with control_environment(tmp_path, store=open_slow_store) as env:
        isolator, checks, alarm = FakeIsolator(), ChecksByRollout(), FakeTimers(env.clock)
        rollouts = []
        for number in range(size):
            plan = text.replace("name: sysctl", f"name: change{number}")
            rollouts.append(await env.start(text=plan))
        guard = FakeNodeGuard(env.clock)
        adapters = replace(adapters_of(env, tmp_path, isolator, checks), guards={"ssh": guard})
        inside = TrainEnvironment(env, isolator, checks, guard, rollouts, alarm)
        await env.commit(inside.train_stored(size if members is None else members))
        task = asyncio.create_task(daemon_of(env, adapters, alarm=alarm).run())
        try:
            yield inside
        finally:
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
        shown = [await inside.env.request("nora", "get", f"/v1/rollouts/{r}") for r in inside.rollouts]
        assert [each["train"]["outages_saved"] for each in shown] == [0, 4, 4]


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


async def test_cancelled_member_finishes_node_in_its_outage(tmp_path: Path) -> None:
    async with train_environment(tmp_path, 3) as inside:
        first, second, third = inside.rollouts
        await inside.until_phase(second, "p1", Phase.MAINTAINING, Phase.VERIFYING)
        await inside.env.commit(RolloutCancelled(second, OLGA, "no", inside.env.clock.now()))
        index = inside.env.state.index
        await inside.until(
            lambda: all(t.phase is Phase.DONE for r in (first, third) for t in index.targets(r))
        )
        assert index.target(second, "p1").outcome is Outcome.CHANGED
        assert await inside.runs("p1") == [first, second, third]
        assert inside.outages("p1") == 1
        assert await inside.runs("p2") == [first, third]
        assert not inside.isolator.isolated


async def test_superseded_member_runs_once_on_node(tmp_path: Path) -> None:
    async with train_environment(tmp_path, 2) as inside:
        first, second = inside.rollouts
        await inside.until_phase(second, "p1", Phase.MAINTAINING, Phase.VERIFYING)
        newer = ONE_WAVE.replace("name: sysctl", "name: change1").replace("spec:", "spec:\n  max_parallel: 9")
        third = await inside.env.start(text=newer, supersede=True)
        inside.rollouts.append(third)
        index = inside.env.state.index
        await inside.until(
            lambda: all(t.phase is Phase.DONE for r in (first, third) for t in index.targets(r))
        )
        assert await inside.runs("p1") == [first, second]
        assert inside.outages("p1") == 1
        assert index.target(third, "p1").outcome is Outcome.ALREADY_CURRENT
        assert not inside.isolator.isolated


async def test_rollout_added_in_middle_joins_outage(tmp_path: Path) -> None:
    async with train_environment(tmp_path, 3, members=2) as inside:
        await inside.until_phase(inside.rollouts[0], "p1", Phase.MAINTAINING)
        await inside.env.commit(inside.train_stored(3))
        await inside.until(inside.all_done)
        assert await inside.runs("p1") == inside.rollouts
        assert inside.outages("p1") == 1


async def test_train_removed_in_middle_ends_outage_together(tmp_path: Path) -> None:
    async with train_environment(tmp_path, 2) as inside:
        await inside.until_phase(inside.rollouts[1], "p1", Phase.MAINTAINING)
        await inside.env.commit(TrainRemoved("t", OLGA, "no", inside.env.clock.now()))
        await inside.until(inside.all_done)
        assert await inside.runs("p1") == inside.rollouts
        assert inside.outages("p1") == 1
        assert inside.outages("p2") == 2
        assert not inside.isolator.isolated


async def test_guard_is_confirmed_before_next_change(tmp_path: Path) -> None:
    guarded = ONE_WAVE.replace("spec:", "spec:\n  guard: {paths: [/etc/net], after: 30s}")
    async with train_environment(tmp_path, 2, guarded) as inside:
        await inside.until(inside.all_done)
        # A guard that is armed while another one is makes that one restore the node.
        assert {each.phase for r in inside.rollouts for each in inside.env.state.index.targets(r)} == {
            Phase.DONE
        }
        assert set(inside.guard.outcomes) == {GuardState.CONFIRMED}
        assert len(inside.guard.outcomes) == 2 * len(NODES)


async def test_changes_are_rolled_back_in_reverse_order(tmp_path: Path) -> None:
    async with train_environment(tmp_path, 3, ONE_WAVE.replace("undo.yml", "site.yml")) as inside:
        await inside.until(inside.all_done)
        now = inside.env.clock.now()
        await inside.env.commit(
            *(NodeOrdered(r, "p1", NodeOrder.ROLLBACK, OLGA, "as it was", now) for r in inside.rollouts)
        )
        index = inside.env.state.index
        await inside.until(
            lambda: all(t.outcome is Outcome.ROLLED_BACK for t in index.targets_on("p1")), 12_000
        )
        assert await inside.runs("p1", "run.rollback") == inside.rollouts[::-1]
        assert not inside.isolator.isolated


async def test_paused_rollout_does_not_join(tmp_path: Path) -> None:
    async with train_environment(tmp_path, 2) as inside:
        first, second = inside.rollouts
        await inside.env.commit(RolloutPaused(second, OLGA, "wait", inside.env.clock.now()))
        index = inside.env.state.index
        await inside.until(lambda: all(t.phase is Phase.DONE for t in index.targets(first)))
        assert all(t.attempt == 0 for t in index.targets(second))
        assert inside.outages("p1") == 1
