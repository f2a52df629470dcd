"""The audit's entries of holds and freezes that end by time, and of soaks that begin again."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from machines.model.events import FreezeStarted, HoldTaken
from machines.model.rollout import Hold
from machines.model.windows import Freeze
from machines.states import Outcome, Trigger
from rolloutd.store import SqliteBackend
from rolloutd.store.audit_comparison import compare_with_audit
from rolloutd.store.sqlite import database
from tests.rolloutd.control_environment import ControlEnvironment
from tests.rolloutd.engine.test_audit_monitor import run_sql, sqlite_environment
from tests.rolloutd.engine.test_daemon import OLGA, running
from tests.rolloutd.slow_store import adapters_of, daemon_of, loop_iterations


async def until(env: ControlEnvironment, there: Callable[[], object]) -> None:
    """Let time pass until it is so; the store's threads take real time."""
    for _ in range(5000):
        if there():
            return
        await asyncio.sleep(0.002)
        env.clock.advance(0.001)
    raise AssertionError("it never came to be so")


async def entries(env: ControlEnvironment, event: str) -> list[dict[str, Any]]:
    return [json.loads(each.text) for each in await env.state.store.read_audit(event=event)]


async def test_end_by_time_has_one_audit_entry(tmp_path: Path) -> None:
    async with sqlite_environment(tmp_path) as env:
        now = env.clock.now()
        await env.commit(FreezeStarted(Freeze("f1", "team/search", "fair", "olga", now, now + 30.0)))
        await env.commit(HoldTaken(Hold("p1", "person", "olga", OLGA, "disk", now, now + 20.0)))
        for _ in range(2):  # a second daemon records nothing again
            async with running(daemon_of(env, adapters_of(env, tmp_path))):
                await loop_iterations(20)
                env.clock.advance(40.0)
                env.state.wake_up()
                await until(env, lambda: not env.state.index.freezes)
            await env.restart()
        (lifted,) = await entries(env, "FreezeLifted")
        (released,) = await entries(env, "HoldReleased")
        assert lifted["actor"]["kind"] == released["actor"]["kind"] == "daemon"
        assert (lifted["fields"]["scope"], lifted["fields"]["reason"]) == ("team/search", "its time is over")
        assert released["fields"]["reason"] == "its time is over"
        assert lifted["at"] >= now + 30.0
        assert compare_with_audit(SqliteBackend(tmp_path / "state" / database.FILE_NAME)).ok


async def test_lifted_freeze_has_scope_and_reason(tmp_path: Path) -> None:
    async with sqlite_environment(tmp_path) as env:
        await env.request("adam", "post", "/v1/freezes", {"scope": "all", "reason": "fair"})
        await env.request("adam", "delete", "/v1/freezes", {"scope": "all", "reason": "fair is over"})
        (lifted,) = await entries(env, "FreezeLifted")
        assert (lifted["fields"]["scope"], lifted["fields"]["reason"]) == ("all", "fair is over")


async def test_forged_end_of_a_hold_is_not_recorded(tmp_path: Path) -> None:
    async with sqlite_environment(tmp_path) as env:
        now = env.clock.now()
        await env.commit(HoldTaken(Hold("p1", "person", "olga", OLGA, "disk", now, None)))
        run_sql(tmp_path, f"UPDATE hold SET until = {now - 1}")
        await env.restart()
        async with running(daemon_of(env, adapters_of(env, tmp_path))):
            await until(env, lambda: env.state.index.mismatches)
            await loop_iterations(50)
        assert await entries(env, "HoldReleased") == []


async def test_hold_without_its_row_stops_no_decision(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with sqlite_environment(tmp_path) as env:
        now = env.clock.now()
        await env.commit(HoldTaken(Hold("p1", "person", "olga", OLGA, "disk", now, now + 20.0)))
        async with running(daemon_of(env, adapters_of(env, tmp_path))):
            await loop_iterations(20)
            run_sql(tmp_path, "DELETE FROM hold")
            env.clock.advance(40.0)
            env.state.wake_up()
            await until(env, lambda: env.state.index.mismatches)
            rollout = await env.submit()
            await env.vote("olga", rollout, "start")
            await until(env, lambda: env.state.index.rollout(rollout).opened)
        assert "decision: not written" not in caplog.text


async def test_soak_begun_by_a_clock_ahead_restarts(tmp_path: Path) -> None:
    async with sqlite_environment(tmp_path) as env:
        rollout = await env.start()
        env.clock.advance(2 * 86_400.0)
        for node in ("p1", "s1"):
            for trigger in (Trigger.ADMITTED, Trigger.ISOLATED, Trigger.MAINTAINED):
                await env.transition(rollout, node, trigger)
            await env.transition(rollout, node, Trigger.VERIFIED, outcome=Outcome.CHANGED)
        env.clock._now -= 2 * 86_400.0
        await env.restart()
        async with running(daemon_of(env, adapters_of(env, tmp_path))):
            await until(env, lambda: "clock" in env.state.conditions)
            assert "counts from" in env.state.conditions["clock"]
            env.clock.advance(601.0)
            env.state.wake_up()
            await until(env, lambda: "clock" not in env.state.conditions)
        restarted = await entries(env, "SoakRestarted")
        assert [each["node"] for each in restarted] == ["p1", "s1"]
        assert compare_with_audit(SqliteBackend(tmp_path / "state" / database.FILE_NAME)).ok
        with closing(sqlite3.connect(tmp_path / "state" / database.FILE_NAME)) as connection:
            (latest,) = connection.execute("SELECT max(since) FROM target WHERE phase = 'done'").fetchone()
        assert latest <= env.clock.now()
