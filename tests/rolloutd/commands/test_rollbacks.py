"""Rollbacks by hand: in the middle of a rollout, of a wave, and after its end and a restart."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from machines.facts.projection import Projection
from machines.model.decision import RollBack
from machines.model.events import RolloutDeleted
from machines.scheduler.decide import decide
from machines.states import Phase, Trigger
from rolloutd.commands import rollbacks
from rolloutd.commands.resolve import ensure_loaded
from rolloutd.settings.compile import compile_limits
from rolloutd.store import open_store
from tests.rolloutd.commands.test_commands import REASON, assert_refused, steer
from tests.rolloutd.control_environment import PLAN, ControlEnvironment, control_environment
from tests.sim.people import OLGA


async def order(inside: ControlEnvironment, rollout: str, who: str = "olga", **body: Any) -> list[str]:
    path = f"/v1/rollouts/{rollout}/rollback"
    answer: dict[str, list[str]] = await inside.request(who, "post", path, REASON | body)
    return sorted(answer["nodes"])


async def delete(inside: ControlEnvironment, rollout: str) -> None:
    await inside.request("olga", "delete", f"/v1/rollouts/{rollout}")


def due(inside: ControlEnvironment) -> list[str]:
    inside.observe_all_up()
    return [each.node for each in decide(inside.state.index, inside.clock.now()).of(RollBack)]


async def test_changed_node_waits_for_slot_and_order_can_be_withdrawn(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        rollout = await inside.start()
        await inside.finish(rollout, "p1")
        assert await assert_refused(order(inside, rollout, "paul", nodes=["p1"])) == (403, "not-allowed")
        assert await assert_refused(order(inside, rollout, nodes=["p2"])) == (409, "not-changed")
        assert await assert_refused(order(inside, rollout)) == (400, "wrong-request")
        assert await order(inside, rollout, nodes=["p1", "p1"]) == ["p1"]
        assert await order(inside, rollout, nodes=["p1"]) == [], "it is ordered already"
        assert inside.phase(rollout, "p1") is Phase.DONE
        assert due(inside) == ["p1"]
        await inside.request("paul", "put", "/v1/holds", {"node": "p1", **REASON})
        assert due(inside) == []
        why = await inside.request("olga", "get", f"/v1/rollouts/{rollout}/nodes/p1")
        assert why["reason"]["code"] == "held"
        assert await order(inside, rollout, withdraw=True) == ["p1"]
        assert inside.state.index.target(rollout, "p1").order is None


async def test_rollback_of_all_pauses_and_takes_failed_nodes_too(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        rollout = await inside.start()
        await inside.finish(rollout, "p1")
        await inside.fail(rollout, "s1")
        assert await assert_refused(order(inside, rollout, wave="third")) == (409, "no-wave")
        assert await order(inside, rollout, all=True) == ["p1", "s1"]
        shown = await inside.request("olga", "get", f"/v1/rollouts/{rollout}")
        assert (shown["state"], shown["reason"]["code"]) == ("paused", "paused")
        assert due(inside) == ["s1"], "the newest; the wave has one node at a time"


async def test_retry_of_node_that_plan_rolls_back_is_refused(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        rollout = await inside.start(text=PLAN.replace("rollback:", "on_failure: rollback-wave\n  rollback:"))
        await inside.finish(rollout, "p1")
        await inside.fail(rollout, "s1")
        assert await assert_refused(steer(inside, "olga", rollout, "retry", "s1")) == (409, "rollback-due")
        await inside.vote("olga", rollout, "proceed")
        await steer(inside, "olga", rollout, "retry", "s1")
        assert inside.phase(rollout, "s1") is Phase.PENDING


async def test_ended_rollout_is_rolled_back_after_restart(tmp_path: Path) -> None:
    async def sqlite(compiled: Any) -> Any:
        return await open_store(tmp_path, compile_plan=compiled)

    async with control_environment(tmp_path, store=sqlite) as inside:
        rollout = await inside.start()
        await inside.finish(rollout, "p1")
        await steer(inside, "olga", rollout, "cancel")
        # As a daemon that has just started knows it: the store does not load closed rollouts.
        state = inside.state
        compiler = state.index._compile
        state.index = Projection.build(
            await state.store.load_snapshot(), compile_limits(state.settings), compiler
        )
        assert rollout not in state.index.rollouts
        assert await order(inside, rollout, all=True) == ["p1"]
        assert due(inside) == ["p1"]
        loaded = await state.store.load_snapshot()
        assert [each.id for each in loaded.rollouts] == [rollout], "a restart knows the order too"
        await inside.transition(rollout, "p1", Trigger.ROLLBACK_ORDERED, rolling_back=True)


@pytest.mark.parametrize("is_rollback", [True, False])
async def test_command_on_deleted_rollout_is_refused(tmp_path: Path, is_rollback: bool) -> None:
    async def sqlite(compiled: Any) -> Any:
        return await open_store(tmp_path, compile_plan=compiled)

    async with control_environment(tmp_path, store=sqlite) as inside:
        rollout = await inside.start()
        await inside.finish(rollout, "p1")
        await steer(inside, "olga", rollout, "cancel")
        state = inside.state
        actor = state.index.rollout(rollout).submitted_by
        snapshot = await state.store.load_snapshot()
        state.index = Projection.build(snapshot, compile_limits(state.settings), state.index._compile)
        async with state.exclusive_commit(actor) as commit:
            # It resolves the rollout, then waits for the lock of commits.
            command = order(inside, rollout, all=True) if is_rollback else delete(inside, rollout)
            ordered = asyncio.create_task(command)
            while not state._write_lock._waiting:
                await asyncio.sleep(0.01)
            await commit([RolloutDeleted(rollout, actor, state.now())], "delete")
        assert await assert_refused(ordered) == (404, "not-found")
        assert rollout not in state.index.rollouts, "a decision must not find what was deleted"


async def test_rollout_with_rollback_ordered_meanwhile_is_not_deleted(tmp_path: Path) -> None:
    async def sqlite(compiled: Any) -> Any:
        return await open_store(tmp_path, compile_plan=compiled)

    async with control_environment(tmp_path, store=sqlite) as inside:
        rollout = await inside.start()
        await inside.finish(rollout, "p1")
        await steer(inside, "olga", rollout, "cancel")
        state = inside.state
        actor = state.index.rollout(rollout).submitted_by
        await inside.restart()
        async with state.exclusive_commit(actor) as commit:
            deleting = asyncio.create_task(delete(inside, rollout))
            while not state._write_lock._waiting:
                await asyncio.sleep(0.01)
            await ensure_loaded(state, rollout)
            events = rollbacks.roll_back_wave(state, OLGA, state.index.rollout(rollout), None, "bad", {})
            await commit(events, "rollback")
        assert await assert_refused(deleting) == (409, "not-settled")


async def test_command_on_node_refuses_one_that_later_rollout_changed(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        first = await inside.start()
        await inside.finish(first, "p1")
        second = await inside.start(again=True)
        await inside.finish(second, "p1")
        refused = await assert_refused(steer(inside, "olga", first, "rollback", "p1"))
        assert refused == (409, "changed-since")
        await steer(inside, "olga", second, "rollback", "p1")


async def test_node_that_later_rollout_changed_is_refused(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        first = await inside.start()
        await inside.finish(first, "p1")
        await steer(inside, "olga", first, "cancel")
        second = await inside.start(again=True)
        await inside.finish(second, "p1")
        assert await assert_refused(order(inside, first, nodes=["p1"])) == (409, "changed-since")
        assert await assert_refused(order(inside, first, all=True)) == (409, "changed-since")
        assert await order(inside, second, nodes=["p1"]) == ["p1"]
