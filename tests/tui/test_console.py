"""The console under Textual's pilot: what it shows, and what it sends."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.replayed_fleet import DIGEST, ReplayedFleet
from tests.tui.harness import (
    NOON,
    list_text,
    paused_fleet,
    row_texts,
    run_console,
    running_fleet,
    screen_text,
    start_gate_fleet,
    wait_for_text,
    wait_until,
)
from tests.tui.test_model import model_of
from tui.formatting.lines import line_text
from tui.screens.fleet import progress_line
from tui.screens.locks import _pool_row
from tui.widgets.virtual_list import VirtualList


async def test_fleet_page_shows_progress_status_and_my_gates(socket_dir: Path) -> None:
    async with run_console(start_gate_fleet(), socket_dir) as (_, pilot, _server):
        await wait_for_text(
            pilot, "kernel-x7k2p", "1 for you", "start waits for votes of infra (owner)", "0/12", "~25m"
        )


async def test_rollout_page_shows_pools_in_flight_and_reasons(socket_dir: Path) -> None:
    async with run_console(running_fleet(), socket_dir) as (app, pilot, _):
        await pilot.press("enter")
        await wait_for_text(
            pilot, "IN FLIGHT 3", "POOLS 4", "WAITING 5", "Set the value", "4 of 12 changed, 3 in flight"
        )
        waits = list_text(app, "#now")
        assert "pool team/payments is full: pay000-01 has its slot" in waits
        assert "2 next  pla003-01" in waits
        pools = row_texts(app.screen.query_one("#pools", VirtualList))
        assert any("team/payments" in each and "■◑·" in each and "1/1" in each for each in pools)


@pytest.mark.parametrize("width", [80, 120, 200])
def test_narrow_screen_cuts_no_figure(width: int) -> None:
    fleet = paused_fleet()
    rollout = model_of(fleet).rollouts[fleet.id]
    rollout.status = {**rollout.status, "work": {"low_s": 26.0, "high_s": 32.0}}
    shown = line_text(progress_line(rollout, 485.0, width))
    assert "33 %  4 of 12 changed, 1 failed, 2 in flight, 5 pending " in shown
    assert shown.endswith("~26s-32s left ")
    assert len(shown) == width


async def test_event_updates_the_counts(socket_dir: Path) -> None:
    fleet = running_fleet()
    async with run_console(fleet, socket_dir) as (_, pilot, _server):
        await pilot.press("enter")
        await wait_for_text(pilot, "3 in flight")
        fleet.move("sea001-01", "done", outcome="changed")
        await wait_for_text(pilot, "5 of 12 changed, 2 in flight")


async def test_node_page_shows_steps_and_log(socket_dir: Path) -> None:
    fleet = paused_fleet()
    fleet.logs["sea001-01"] = [
        {"offset": 1, "at": "2026-11-20T18:45:00.000Z", "kind": "task", "text": "Restart nginx"},
        {"offset": 2, "at": "2026-11-20T18:45:01.000Z", "kind": "failed", "text": "exit status 1"},
    ]
    async with run_console(fleet, socket_dir) as (app, pilot, _):
        await pilot.press("enter")
        await wait_for_text(pilot, "FAILED 1")
        app.open_page("node", fleet.id, "sea001-01")
        await wait_for_text(
            pilot, "ATTEMPT 1", "Restart nginx", "isolate: kubernetes", "nginx did not come back"
        )
        await pilot.press("ampersand", *"status", "enter")
        await wait_until(
            pilot, lambda: "Restart nginx" not in screen_text(app) and "exit status 1" in screen_text(app)
        )


async def test_pending_node_shows_whole_reason_and_slots(socket_dir: Path) -> None:
    fleet = paused_fleet()
    assert fleet.reason is not None
    fleet.reason["text"] = "sea001-01 failed: " + "a long story, " * 6 + "and its cause"
    async with run_console(fleet, socket_dir) as (app, pilot, _):
        app.open_page("node", fleet.id, "pay000-02")
        await wait_for_text(pilot, "and its cause", "ITS SLOTS")
        await pilot.press("tab", "home", "w")
        await wait_for_text(pilot, "full line", "esc back")


def test_narrow_pool_row_cuts_marks_and_no_figure() -> None:
    holders = [{"unobserved": False}] * 7
    pool = {"pool": "rack/r2", "max_unavailable": 2, "members": 8, "unobserved": 1, "holders": holders}
    text = line_text(_pool_row(pool)[1](79))  # type: ignore[arg-type]
    assert "7/2 down of 8 nodes" in text
    assert text.endswith("over budget  1 unobserved ")


async def test_node_filter_matches_any_word(socket_dir: Path) -> None:
    async with run_console(running_fleet(), socket_dir) as (_, pilot, _server):
        await pilot.press("enter", "n")
        await wait_for_text(pilot, "12 nodes")
        await pilot.press("slash", *"media", "space", *"pending", "enter")
        await wait_for_text(pilot, "1 node,", "med002-02")


async def test_node_sort_puts_urgent_nodes_first(socket_dir: Path) -> None:
    async with run_console(paused_fleet(), socket_dir) as (app, pilot, _):
        await pilot.press("enter", "n")
        await wait_for_text(pilot, "12 nodes, plan order")
        await pilot.press("o")
        await wait_for_text(pilot, "12 nodes, most urgent first")
        first, second = row_texts(app.screen.query_one("#body", VirtualList))[:2]
        assert "✗ sea001-01" in first
        assert "◑ pay000-01" in second
        await pilot.press("o", "o", "o")
        await wait_for_text(pilot, "12 nodes, plan order")


async def test_full_line_key_shows_cut_lines(socket_dir: Path) -> None:
    fleet = paused_fleet()
    fleet.nodes["sea001-01"]["failure"]["message"] = "a" * 90 + " and its end"
    fleet.logs["sea001-01"] = [
        {
            "offset": 1,
            "at": "2026-11-20T18:45:00.000Z",
            "kind": "failed",
            "text": "b" * 90 + " and its last",
        }
    ]
    async with run_console(fleet, socket_dir) as (app, pilot, _):
        await pilot.press("enter", "n", "slash", *"failed", "enter")
        await wait_for_text(pilot, "1 node,")
        assert "and its end" not in screen_text(app)
        await pilot.press("w")
        await wait_for_text(pilot, "and its end", "esc back")
        await pilot.press("escape", "enter")
        await wait_for_text(pilot, "ATTEMPT 1", "bbbb")
        assert "and its last" not in screen_text(app)
        await pilot.press("w")
        await wait_for_text(pilot, "and its last")
        await pilot.press("escape", "tab", "home", "w")
        await wait_for_text(pilot, "cordoned, 14 pods evicted", "esc back")
        await pilot.press("escape", "4", "w")
        await wait_for_text(pilot, f"entry {fleet.seq}:", '"event": "PhaseMoved"')


async def test_audit_locks_teams_and_help_pages_open(socket_dir: Path) -> None:
    async with run_console(running_fleet(), socket_dir) as (_, pilot, _server):
        await pilot.press("4")
        await wait_for_text(pilot, "entries, the latest first", "maintaining → verifying")
        await pilot.press("v")
        await wait_for_text(pilot, "intact:")
        await pilot.press("3")
        await wait_for_text(pilot, "SLOTS TAKEN in 3 of 4 pools", "no hold")
        await pilot.press("5")
        await wait_for_text(
            pilot, "uid 1001", "payments", "pia, pol", "runner fra", "site=fra: 3 of at most 20"
        )
        await pilot.press("question_mark")
        await wait_for_text(pilot, "ON THIS PAGE teams", "esc")
        await pilot.press("slash", *"approve", "enter")
        await wait_for_text(pilot, "DECIDE AND ACT", "approve at the gate", "KEYS THAT MOVED SINCE 0.1")
        await pilot.press("escape", "escape", "1")
        await wait_for_text(pilot, "kernel-x7k2p")


# -- sent


async def test_approval_needs_a_reason_and_names_the_digest(socket_dir: Path) -> None:
    fleet = start_gate_fleet()
    async with run_console(fleet, socket_dir) as (_, pilot, _server):
        await wait_for_text(pilot, "1 for you")
        await pilot.press("2", "a")
        text = await wait_for_text(pilot, "Approve start?")
        assert DIGEST[:12] in text
        await pilot.press("enter")
        await wait_for_text(pilot, "reason: missing")
        assert not fleet.requests
        await pilot.press(*"ready", "enter")
        await wait_until(pilot, lambda: bool(fleet.requests))
    assert fleet.requests == [
        (
            "POST",
            f"/v1/rollouts/{fleet.id}/votes",
            {"gate": "start", "yes": True, "reason": "ready", "digest": DIGEST},
        )
    ]


async def test_rejection_at_start_needs_the_digest_typed(socket_dir: Path) -> None:
    fleet = start_gate_fleet()
    async with run_console(fleet, socket_dir) as (_, pilot, _server):
        await wait_for_text(pilot, "1 for you")
        await pilot.press("2", "x")
        await wait_for_text(pilot, "Reject start?", "cannot be undone")
        await pilot.press(*"wrong plan", "enter")
        await wait_for_text(pilot, "type b281")
        assert not fleet.requests
        await pilot.press(*"b281", "enter")
        await wait_until(pilot, lambda: bool(fleet.requests))
    assert fleet.requests[0][2]["yes"] is False


async def test_escape_sends_nothing(socket_dir: Path) -> None:
    fleet = running_fleet()
    async with run_console(fleet, socket_dir) as (app, pilot, _):
        await pilot.press("p")
        await wait_for_text(pilot, "Pause kernel-x7k2p?")
        await pilot.press(*"why", "escape")
        await wait_until(pilot, lambda: len(app.screen_stack) == 1)
    assert not fleet.requests


async def test_proceed_vote_names_the_shown_failures(socket_dir: Path) -> None:
    fleet = paused_fleet()
    async with run_console(fleet, socket_dir) as (_, pilot, _server):
        await wait_for_text(pilot, "1 for you")
        await pilot.press("2")
        await wait_for_text(pilot, "FAILURES", "sea001-01")
        await wait_for_text(pilot, "FAILURES 1: an approval covers these")
        await pilot.press("a")
        await wait_for_text(pilot, "It covers 1 failure: sea001-01#1")
        await pilot.press(*"known", "enter")
        await wait_until(pilot, lambda: bool(fleet.requests))
    assert fleet.requests[0][2]["shown"] == ["sea001-01#1"]


async def test_unmoved_cursor_stays_on_the_most_urgent_row(socket_dir: Path) -> None:
    fleet = running_fleet()
    async with run_console(fleet, socket_dir) as (_, pilot, _server):
        await pilot.press("enter")
        await wait_for_text(pilot, "▌ ◑ pay000-01")
        fleet.move("sea001-01", "failed", failure="no route to host")
        # The gate comes with a later answer: a key before it would move past the place where it appears.
        await wait_for_text(pilot, "▌ ✗ sea001-01", "◆ proceed of kernel-x7k2p")
        await pilot.press("down")
        await wait_for_text(pilot, "▌◆ proceed of kernel-x7k2p")
        fleet.move("med002-01", "failed", failure="no route to host")
        await wait_for_text(pilot, "FAILED 2", "▌◆ proceed of kernel-x7k2p")


async def test_failed_node_opens_from_the_gate_page(socket_dir: Path) -> None:
    async with run_console(paused_fleet(), socket_dir) as (app, pilot, _):
        await pilot.press("2")
        await wait_for_text(pilot, "FAILURES 1: an approval covers these")
        await pilot.press("tab", "enter")
        await wait_for_text(pilot, "▸ sea001-01", "ATTEMPT 1")
        assert type(app.screen).__name__ == "NodePage"


async def test_nodes_page_opens_from_the_fleet_page(socket_dir: Path) -> None:
    async with run_console(running_fleet(), socket_dir) as (_, pilot, _server):
        await wait_for_text(pilot, "kernel-x7k2p")
        await pilot.press("n")
        await wait_for_text(pilot, "12 nodes", "sea001-01")


async def test_typing_replaces_the_initial_value(socket_dir: Path) -> None:
    fleet = running_fleet()
    async with run_console(fleet, socket_dir) as (_, pilot, _server):
        await wait_for_text(pilot, "kernel-x7k2p")
        await pilot.press("F")
        await wait_for_text(pilot, "Start a freeze?", "frozen from the console")
        await pilot.press(*"storm", "enter")
        await wait_until(pilot, lambda: bool(fleet.requests))
    assert fleet.requests[0][2]["reason"] == "storm"


async def test_one_vote_covers_hundreds_of_failures(socket_dir: Path) -> None:
    fleet = ReplayedFleet(pools=21, per_pool=10, at=NOON)
    fleet.state = "paused"
    for name in fleet.nodes:
        fleet.move(name, "isolating")
        fleet.move(name, "failed", failure="no route to host")
    async with run_console(fleet, socket_dir) as (_, pilot, _server):
        await pilot.press("2")
        await wait_for_text(pilot, "FAILURES 210: an approval covers these ─")
        await pilot.press("a")
        await wait_for_text(pilot, "It covers 210 failures: ", "and 206 more")
        await pilot.press(*"known", "enter")
        await wait_until(pilot, lambda: bool(fleet.requests))
    assert len(fleet.requests[0][2]["shown"]) == 210


async def test_unobserved_node_does_not_count_as_down(socket_dir: Path) -> None:
    fleet = running_fleet()
    unobserved = ("pay000-00", "pay000-02")
    fleet.unobserved = {name: f"{name} was last seen up at 2026-11-20T18:35:00Z" for name in unobserved}
    async with run_console(fleet, socket_dir) as (_, pilot, _server):
        await pilot.press("3")
        text = await wait_for_text(
            pilot, "SLOTS TAKEN in 3 of 4 pools", "unobserved: last seen up  pay000-00, pay000-02"
        )
        row = next(line for line in text.splitlines() if "team/payments" in line)
        assert "1/1 down of 3 nodes" in row
        assert "full  2 unobserved" in row
        assert "not observed lately" in text


async def test_approval_of_unread_failures_shows_them_first(socket_dir: Path) -> None:
    fleet = paused_fleet()
    async with run_console(fleet, socket_dir) as (app, pilot, _):
        await wait_for_text(pilot, "1 for you")
        await pilot.press("a")
        await wait_for_text(pilot, "FAILURES 1: an approval covers these", "read them, then press a")
        assert type(app.screen).__name__ == "GatesPage"
        await pilot.press("a")
        await wait_for_text(pilot, "It covers 1 failure: sea001-01#1")


async def test_node_that_fails_again_is_another_failure(socket_dir: Path) -> None:
    fleet = paused_fleet()
    async with run_console(fleet, socket_dir) as (app, pilot, _):
        await pilot.press("2")
        await wait_for_text(pilot, "FAILURES 1: an approval covers these")
        # One node is always failed: without any, the gate goes, and with it the cursor.
        fleet.move("med002-01", "failed", failure="it did, too")
        fleet.move("sea001-01", "pending")
        await wait_until(pilot, lambda: app.screen.selection().shown_failures == ("med002-01#1",))  # type: ignore[attr-defined]
        fleet.move("sea001-01", "isolating")
        fleet.move("sea001-01", "failed", failure="nginx did not come back: exit status 1")
        fleet.move("med002-01", "pending")
        await wait_until(pilot, lambda: app.screen.selection().shown_failures == ("sea001-01#2",))  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("key", "question", "call", "extra"),
    [
        ("r", "Retry sea001-01?", "nodes/sea001-01/retry", {}),
        ("S", "done with exceptions", "nodes/sea001-01/skip", {"put_back": "return"}),
        ("b", "Rollback sea001-01?", "nodes/sea001-01/rollback", {}),
    ],
)
async def test_failed_node_is_resolved_on_its_page(
    socket_dir: Path, key: str, question: str, call: str, extra: dict[str, Any]
) -> None:
    fleet = paused_fleet()
    async with run_console(fleet, socket_dir, size=(100, 30)) as (app, pilot, _):
        await wait_for_text(pilot, "kernel-x7k2p")
        app.open_page("node", fleet.id, "sea001-01")
        await wait_for_text(pilot, "ATTEMPT 1")
        await pilot.press(key)
        await wait_for_text(pilot, question)
        await pilot.press(*"repaired", "enter")
        await wait_until(pilot, lambda: bool(fleet.requests))
    assert fleet.requests == [("POST", f"/v1/rollouts/{fleet.id}/{call}", {"reason": "repaired", **extra})]


async def test_freeze_takes_a_duration(socket_dir: Path) -> None:
    fleet = running_fleet()
    async with run_console(fleet, socket_dir) as (_, pilot, _server):
        await pilot.press("F")
        await wait_for_text(pilot, "Start a freeze?")
        await pilot.press("tab", "tab", *"soon", "enter")
        await wait_for_text(pilot, "until: 'soon' is neither a time")
        await pilot.press(*["backspace"] * 4, *"2h", "enter")
        await wait_until(pilot, lambda: bool(fleet.requests))
        await wait_for_text(pilot, "all is frozen until")
    assert fleet.requests[0][2]["until"].endswith("Z")


async def test_freeze_needs_one_key_and_one_confirmation(socket_dir: Path) -> None:
    fleet = running_fleet()
    async with run_console(fleet, socket_dir) as (_, pilot, _server):
        await pilot.press("4", "F")
        await wait_for_text(pilot, "Start a freeze?")
        await pilot.press("enter")
        await wait_until(pilot, lambda: bool(fleet.requests))
    assert fleet.requests == [("POST", "/v1/freezes", {"reason": "frozen from the console", "scope": "all"})]


async def test_refused_request_shows_the_error(socket_dir: Path) -> None:
    fleet = running_fleet()
    fleet.error_response = (409, {"error": "somebody else was faster", "code": "conflict", "errors": []})
    async with run_console(fleet, socket_dir) as (_, pilot, _server):
        await wait_for_text(pilot, "kernel-x7k2p")
        await pilot.press("p")
        await wait_for_text(pilot, "Pause")
        await pilot.press(*"why", "enter")
        await wait_for_text(pilot, "refused: somebody else was faster")


async def test_user_without_permission_sees_who_may(socket_dir: Path) -> None:
    fleet = paused_fleet()
    fleet.whoami = {"user": "eve", "uid": 1666, "groups": [], "teams": [], "owner_of": [], "admin": False}
    async with run_console(fleet, socket_dir, size=(120, 40)) as (app, pilot, _):
        text = await wait_for_text(pilot, "kernel-x7k2p", "(not permitted)")
        assert "for you" not in text
        for key in ("p", "C", "a"):
            await pilot.press(key)
            await wait_for_text(pilot, "not permitted: team infra (ana, bo)")
        await pilot.press("F")
        await wait_for_text(pilot, "freeze: not permitted: members of any team")
        app.open_page("node", fleet.id, "sea001-01")
        await wait_for_text(pilot, "ATTEMPT 1")
        for key in ("r", "s", "S", "b", "h"):
            await pilot.press(key)
        assert type(app.screen).__name__ == "NodePage"
    assert not fleet.requests


async def test_failure_stands_above_its_gate_with_its_log(socket_dir: Path) -> None:
    fleet = paused_fleet()
    fleet.logs["sea001-01"] = [
        {"offset": number, "at": "2026-11-20T18:45:00.000Z", "kind": "ok", "text": f"log line {number}"}
        for number in range(1, 21)
    ]
    async with run_console(fleet, socket_dir, size=(100, 50)) as (_, pilot, _server):
        await pilot.press("enter")
        text = await wait_for_text(pilot, "log line 20", "r retry", "b roll back")
        assert "log line 11" in text
        assert "log line 10" not in text
        assert text.index("sea001-01") < text.index("log line 20") < text.index("proceed of kernel")
        await pilot.press("r")
        await wait_for_text(pilot, "Retry sea001-01?")


async def test_cause_of_a_failure_is_visible_on_a_small_screen(socket_dir: Path) -> None:
    fleet = running_fleet()
    message = (
        'task "Set the values that differ" failed on sea001-01: non-zero return code (1): sysctl: setting'
    )
    fleet.move("sea001-01", "failed", failure=f'{message} key "net.core.somaxconn": ENOENT')
    async with run_console(fleet, socket_dir) as (app, pilot, _):
        await pilot.press("enter")
        await wait_for_text(pilot, "FAILED 1", "ENOENT", "IN FLIGHT 2")
        app.open_page("node", fleet.id, "sea001-01")
        shown = await wait_for_text(pilot, "ATTEMPT 1", "ENOENT", "11 tasks, 3 changed")
        step = next(line for line in shown.splitlines() if "11 tasks, 3 changed" in line)
        assert re.search(r"\d:\d\d \d\d:\d\d:\d\d$", step.rstrip())


async def test_cancelled_rollout_shows_who_and_why(socket_dir: Path) -> None:
    fleet = running_fleet()
    fleet.state = "cancelled"
    fleet.reason = {
        "code": "cancelled",
        "text": "cancelled by bo: wrong kernel",
        "since": None,
        "lifted_by": None,
        "subject": fleet.id,
        "params": {"by": "bo", "reason": "wrong kernel"},
        "remedy": None,
    }
    async with run_console(fleet, socket_dir, size=(100, 30)) as (_, pilot, _server):
        await pilot.press("enter")
        await wait_for_text(pilot, "✗ cancelled by bo: wrong kernel; 3 nodes in flight will finish")


async def test_held_node_counts_as_a_used_slot(socket_dir: Path) -> None:
    fleet = running_fleet()
    fleet.pools["team/platform"]["down"] += 1
    async with run_console(fleet, socket_dir) as (app, pilot, _):
        await pilot.press("enter")
        await wait_for_text(pilot, "POOLS 4")
        pools = row_texts(app.screen.query_one("#pools", VirtualList))
        assert any("team/platform" in each and "1/1" in each for each in pools)


async def test_messages_stand_above_the_keys_and_cover_nothing(socket_dir: Path) -> None:
    async with run_console(paused_fleet(), socket_dir, size=(100, 30)) as (app, pilot, _):
        await pilot.press("enter")
        body = app.screen.query_one("#body")
        before = (await wait_for_text(pilot, "FAILED 1")).splitlines()
        height = body.size.height
        for number in range(5):
            app.show_message(f"error {number}", "error")
        app.show_message("no node is selected", "warning")
        await wait_until(pilot, lambda: body.size.height == height - 2)
        after = screen_text(app).splitlines()
        assert [line.strip() for line in after[-3:]] == ["error 4", "no node is selected", before[-1].strip()]
        assert after[:5] == before[:5]
