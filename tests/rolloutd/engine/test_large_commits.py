"""Commits of many rows: applied in a thread, to facts that replace the others at once."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest

from machines.facts.apply import count_rows
from machines.facts.node_work import NodeWork, WorkKind
from machines.model.events import Event, FreezeLifted, FreezeStarted, PhaseMoved, StepRecorded
from machines.model.node import NodeHealth, Observation
from machines.model.rollout import DAEMON
from machines.model.windows import Freeze
from machines.states import Trigger
from machines.workflow.phase_transitions import transition
from rolloutd.engine.state import InvariantViolation
from rolloutd.errors import Conflict, StoreFailed
from tests.rolloutd.control_environment import ControlEnvironment, control_environment
from tests.rolloutd.slow_store import open_slow_store, store_of


def freezes(inside: ControlEnvironment) -> list[Event]:
    return [FreezeStarted(Freeze(f"f{n}", "all", "test", "olga", inside.clock.now(), None)) for n in range(3)]


def admission(inside: ControlEnvironment, rollout: str, node: str) -> PhaseMoved:
    return transition(inside.state.index.target(rollout, node), Trigger.ADMITTED, inside.clock.now())


async def commit_meanwhile(inside: ControlEnvironment, events: Sequence[Event]) -> asyncio.Task[None]:
    """Begin a commit, and return when it is being written."""
    task = asyncio.create_task(inside.commit(*events))
    while not store_of(inside).writing:
        await asyncio.sleep(0)
    return task


async def test_large_commit_replaces_facts_once_written(tmp_path: Path) -> None:
    async with control_environment(tmp_path, store=open_slow_store) as inside:
        inside.state.large_commit_rows = 3
        before = inside.state.index
        task = await commit_meanwhile(inside, freezes(inside))
        assert not inside.state.index.freezes
        await task
        assert [each.id for each in inside.state.index.freezes] == ["f0", "f1", "f2"]
        assert inside.state.index is not before
        assert (before.freezes, before.journal) == ((), None)


async def test_smaller_commit_keeps_facts(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        inside.state.large_commit_rows = 4
        before = inside.state.index
        await inside.commit(*freezes(inside))
        assert inside.state.index is before


async def test_records_during_large_commit_are_kept(tmp_path: Path) -> None:
    async with control_environment(tmp_path, store=open_slow_store) as inside:
        state = inside.state
        state.large_commit_rows = 1
        ended = NodeWork(WorkKind.CHECKS, "p1")
        state.index.record_work(ended)
        task = await commit_meanwhile(inside, freezes(inside))
        now = inside.clock.now()
        state.index.record_observations([Observation("p1", NodeHealth.DOWN, now, "crashed")], now)
        state.index.record_work(begun := NodeWork(WorkKind.CLEANING, "s1"))
        state.index.end_work(ended)
        await task
        seen = state.index.observation("p1")
        assert seen is not None
        assert seen.why == "crashed"
        assert list(state.index.recorded_work("s1")) == [begun]
        assert list(state.index.recorded_work("p1")) == []


async def test_large_commits_of_two_nodes_are_both_kept(tmp_path: Path) -> None:
    async with control_environment(tmp_path, store=open_slow_store) as inside:
        state, rollout, nodes = inside.state, await inside.start(), ("p1", "s1")
        for node in nodes:
            await inside.transition(rollout, node, Trigger.ADMITTED)
        steps = [StepRecorded(inside.step(rollout, node, "isolate.0.command"), True) for node in nodes]
        state.large_commit_rows = 1
        await asyncio.gather(*map(inside.commit, steps))
        assert all(state.index.target(rollout, node).isolated for node in nodes)


async def test_later_event_judged_after_earlier_ones(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        inside.state.large_commit_rows = 2
        rollout = await inside.start()
        inside.observe_all_up()
        same_team = [admission(inside, rollout, node) for node in ("p1", "p2")]
        with pytest.raises(
            InvariantViolation, match=r"p2 of .* cannot start: a node of wave canary is isolating"
        ):
            await inside.commit(*same_team)
        assert not inside.state.index.in_flight()


@pytest.mark.parametrize("failure", [StoreFailed("no space left on device"), Conflict("a row changed")])
async def test_failed_write_of_large_commit_changes_nothing(tmp_path: Path, failure: StoreFailed) -> None:
    async with control_environment(tmp_path, store=open_slow_store) as inside:
        inside.state.large_commit_rows = 1
        before, store_of(inside).failure = inside.state.index, failure
        with pytest.raises(type(failure)):
            await inside.commit(*freezes(inside))
        assert inside.state.index is before
        assert (before.freezes, before.journal) == ((), None)


async def test_unexpected_row_of_large_commit_is_conflict(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        inside.state.large_commit_rows = 1
        with pytest.raises(Conflict, match="there is no freeze f9"):
            await inside.commit(FreezeLifted("f9", DAEMON, inside.clock.now()))
        assert inside.state.index.journal is None


async def test_submit_counts_its_targets(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        counted: list[int] = []
        inside.state.commit_listeners.append(lambda events, _: counted.append(count_rows(events)))
        rollout = await inside.submit()
        assert counted == [len(list(inside.state.index.targets(rollout)))]


async def test_loop_continues_while_many_observations_expire(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        index = inside.state.index
        index.judged_at_once = 1
        inside.clock.advance(index.limits.observe_within_s)
        advancing = asyncio.create_task(inside.state.advance())
        await asyncio.sleep(0)
        assert index.at(inside.clock.now()) is not index
        assert gc.isenabled() is False
        assert await advancing == inside.clock.now()
        assert all(index.unavailability(node) for node in index.nodes)
        assert gc.isenabled()


async def test_waiters_share_parts_and_survive_cancelled_one(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        index = inside.state.index
        index.judged_at_once = 1
        inside.clock.advance(index.limits.observe_within_s)
        waiting = [asyncio.create_task(inside.state.advance()) for _ in range(3)]
        expired = [0]
        while not waiting[-1].done():
            await asyncio.sleep(0)
            expired.append(sum(index.unavailability(node) is not None for node in index.nodes))
            # The first one runs the parts, until it is cancelled.
            waiting[0].cancel()
            if any(each.done() and not each.cancelled() for each in waiting):
                assert expired[-1] == len(index.nodes)
        assert waiting[0].cancelled()
        assert max(after - before for before, after in pairwise(expired)) == 1
