"""What time changes: passed deadlines, the age of the state, and clocks while the daemon is away."""

from __future__ import annotations

from pathlib import Path

from rolloutd.control.nodes.streams import STATUS_INTERVAL_S
from tests.support.replayed_fleet import format_rfc3339
from tests.tui.harness import (
    paused_fleet,
    run_console,
    running_fleet,
    screen_text,
    start_gate_fleet,
    wait_for_text,
    wait_until,
)
from tests.tui.test_model import model_of, pending_fleet, stream_lines
from tui.console import FRAME_INTERVAL_S
from tui.state.model import OVERDUE_INTERVAL_S, REFRESH_INTERVAL_S
from tui.widgets.virtual_list import VirtualList


async def test_expired_freeze_disappears_without_an_event(socket_dir: Path) -> None:
    fleet = running_fleet()
    fleet.freezes = [
        {"id": "f1", "scope": "all", "by": "ana", "reason": "storm", "at": None, "until": None}
        | {"at": format_rfc3339(fleet.at), "until": format_rfc3339(fleet.at + 12)}
    ]
    async with run_console(fleet, socket_dir) as (app, pilot, _):
        await pilot.press("3")
        await wait_for_text(pilot, "frozen: all, by ana", "12s left")
        fleet.freezes = []
        fleet.at += 13
        await wait_until(pilot, lambda: "frozen" not in screen_text(app))


async def test_age_of_the_state_is_visible_and_bounded(socket_dir: Path) -> None:
    fleet = start_gate_fleet()
    async with run_console(fleet, socket_dir) as (app, pilot, _server):
        await wait_for_text(pilot, "age 0s")
        # The stream's own status may come late: after the one of this entry there is none without news.
        fleet.write("RequestDenied")
        await wait_until(pilot, lambda: app.model.seq == fleet.seq)
        fleet.at += 5
        await wait_for_text(pilot, "age 5s")
        fleet.at += REFRESH_INTERVAL_S
        await wait_for_text(pilot, "age 0s")


async def test_work_left_is_refreshed_while_nodes_are_in_flight(socket_dir: Path) -> None:
    fleet = running_fleet()
    async with run_console(fleet, socket_dir) as (_, pilot, _server):
        await wait_for_text(pilot, "age 0s")
        for _ in range(3):
            fleet.at += 5
            await wait_for_text(pilot, "age 0s")


async def test_clocks_stop_and_pages_dim_while_disconnected(socket_dir: Path) -> None:
    fleet = running_fleet()
    async with run_console(fleet, socket_dir) as (app, pilot, server):
        await pilot.press("enter")
        await wait_for_text(pilot, "0:50 of ~4:00")
        server.close()
        await wait_for_text(pilot, "✗ offline")
        fleet.at += 60
        app.redraw_screen()
        await wait_for_text(pilot, "0:50 of ~4:00", "60s ago")
        now_pane = app.screen.query_one("#now", VirtualList)
        styles = [segment.style for segment in now_pane.render_line(1)]
        assert all(style is not None and style.dim for style in styles)


def test_passed_deadline_is_requested_once_at_once() -> None:
    fleet = pending_fleet()
    fleet.reason = {
        **dict.fromkeys(("text", "subject"), "soaking"),
        "code": "soaking",
        "since": None,
        "lifted_by": None,
        "params": {},
        "remedy": {"kind": "wait-until", "command": None, "who": None, "until": format_rfc3339(1_010.0)},
    }
    model = model_of(fleet)
    for now, is_requested in (
        (1_000.0, False),
        (1_009.9, False),
        (1_010.1, True),
        (1_010.1 + OVERDUE_INTERVAL_S / 2, False),
        (1_010.1 + OVERDUE_INTERVAL_S, True),
    ):
        model.fetch_requests.clear()
        model.refresh(now)
        assert (("status", "") in model.fetch_requests) is is_requested, now
    assert ("nodes", fleet.id) in model.fetch_requests


def test_status_of_the_stream_is_not_requested_again() -> None:
    fleet = pending_fleet()
    model = model_of(fleet)
    model.refresh(1_000.0)
    for status_at, now, is_requested in ((1_009.0, 1_010.0, False), (1_009.0, 1_020.0, True)):
        model.apply_stream_lines([{"seq": None, "status": fleet.status()}], status_at)
        model.fetch_requests.clear()
        model.refresh(now)
        assert (("status", "") in model.fetch_requests) is is_requested
        assert ("locks", "") in model.fetch_requests


def test_console_draws_each_status_of_a_stream_at_once() -> None:
    assert STATUS_INTERVAL_S > FRAME_INTERVAL_S


def test_vote_requests_the_reasons_of_waiting_nodes() -> None:
    fleet = pending_fleet()
    model = model_of(fleet)
    model.fetch_requests.clear()
    fleet.vote("start", by="ana", uid=1, teams=["infra"])
    model.apply_stream_lines(stream_lines(fleet))
    assert model.fetch_requests["nodes", fleet.id].is_urgent


async def test_reasons_of_waiting_nodes_change_after_a_vote(socket_dir: Path) -> None:
    fleet = paused_fleet()
    async with run_console(fleet, socket_dir, size=(100, 40)) as (_, pilot, _server):
        await pilot.press("enter")
        await wait_for_text(pilot, "as the whole rollout is paused")
        fleet.state, fleet.reason = "running", None
        fleet.vote("proceed", by="ana", uid=1001, teams=["infra"])
        await wait_for_text(pilot, "next  pla003-01")
        full = {"code": "pool-full", "subject": "team/media", "text": "pool team/media is full"}
        fleet.reason = {**dict.fromkeys(("since", "lifted_by", "remedy")), "params": {}, **full}
        fleet.vote("proceed", by="bo", uid=1002, teams=["infra"])
        await wait_for_text(pilot, "    5 pool team/media is full")
