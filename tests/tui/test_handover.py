"""The handover, the comparison with canaries and the forecast in the console."""

from __future__ import annotations

from pathlib import Path

from rolloutd.control.user_time import DEFAULT_SPAN_S, LastLook
from tests.support.replayed_fleet import format_rfc3339
from tests.tui.harness import paused_fleet, run_console, running_fleet, wait_for_text, wait_until
from tui.app import AWAY_S


async def test_handover_shows_what_waits_changed_and_was_decided(socket_dir: Path) -> None:
    fleet = paused_fleet()
    async with run_console(fleet, socket_dir) as (_, pilot, _server):
        await pilot.press("D")
        text = await wait_for_text(pilot, "WAITS 1", "CHANGED since", "DECISIONS 1")
        assert "proceed: the vote of infra is missing" in text
        assert "4 nodes changed, sea001-01 failed" in text
        assert "voted yes at start: seen" in text
        await pilot.press("enter")
        await wait_for_text(pilot, "IN FLIGHT")


async def test_handover_begins_where_the_user_last_looked(socket_dir: Path) -> None:
    fleet = paused_fleet()
    opened = fleet.at
    async with run_console(fleet, socket_dir) as (_, pilot, _server):
        await pilot.press("D")
        await wait_until(pilot, lambda: len(fleet.asked_since) == 1)
        fleet.at += 60
        await pilot.press("escape", "D")
        await wait_until(pilot, lambda: len(fleet.asked_since) == 2)
        # The user is away, and the console stays open.
        left = fleet.at
        fleet.at += 2 * AWAY_S
        await pilot.press("escape", "D")
        await wait_until(pilot, lambda: len(fleet.asked_since) == 3)
    shown = [each.replace("+00:00", ".000Z") for each in fleet.asked_since]
    assert shown == [format_rfc3339(at) for at in (opened - DEFAULT_SPAN_S, opened, left)]


async def test_closing_the_console_is_the_last_look(socket_dir: Path) -> None:
    fleet = paused_fleet()
    async with run_console(fleet, socket_dir) as (_, pilot, _server):
        await pilot.press("2")
        closed = fleet.at
    assert LastLook(str(socket_dir / "s")).read(closed + 100) == closed


async def test_comparison_marks_outliers_first(socket_dir: Path) -> None:
    async with run_console(running_fleet(), socket_dir) as (_, pilot, _server):
        await pilot.press("enter", "V")
        text = await wait_for_text(pilot, "IN FLIGHT AND CHANGED 1 outlier", "1 canary took 30s")
        slow, like = text.index("slow-01"), text.index("like-01")
        assert slow < like
        assert "slower than all canaries" in text


async def test_forecast_shows_ends_gates_and_nodes(socket_dir: Path) -> None:
    async with run_console(running_fleet(), socket_dir) as (_, pilot, _server):
        await pilot.press("enter", "i")
        text = await wait_for_text(pilot, "NODES 2", "bottleneck", "continue after canary")
        assert "pool rack/r1; with one more there it ends 1h earlier" in text
        assert "each gate gets its votes 0s after it is asked" in text
        assert "closed-01" in text
        assert "never, as things are" in text


async def test_rollout_shows_its_train_and_what_it_waits_for(socket_dir: Path) -> None:
    fleet = running_fleet()
    train = {"name": "week", "rollouts": ["kernel-x", fleet.id], "state": "active", "outages_saved": 5}
    fleet.train = {**train, "missing": []}
    async with run_console(fleet, socket_dir, size=(140, 40)) as (_, pilot, _server):
        await pilot.press("enter")
        await wait_for_text(pilot, "train week (active): 2 of 2, 5 outages saved")
    fleet.train = {**train, "state": "waiting", "missing": [fleet.id]}
    async with run_console(fleet, socket_dir, size=(140, 40)) as (_, pilot, _server):
        await pilot.press("enter")
        await wait_for_text(pilot, f"(waiting): 2 of 2; rolloutctl approve {fleet.id} train")
