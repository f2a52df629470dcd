"""Keys that work as in k9s, and keys that come too early or on the wrong page."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from textual import events

import tui.screens
from tests.support.replayed_fleet import ReplayedFleet
from tests.tui.harness import (
    NOON,
    run_console,
    running_fleet,
    screen_text,
    start_gate_fleet,
    wait_for_text,
    wait_until,
)
from tui.connection.streams import Response
from tui.operations.dialog import LOADING


async def test_filter_applies_while_typing_and_escape_removes_it(socket_dir: Path) -> None:
    async with run_console(running_fleet(), socket_dir) as (_, pilot, _server):
        await pilot.press("enter", "slash")
        await wait_for_text(pilot, "▸ nodes", "12 nodes", "show nodes that contain")
        await pilot.press(*"!done")
        await wait_for_text(pilot, "8 nodes", "/!done")
        await pilot.press(*" media")
        await wait_for_text(pilot, "2 nodes", "/!done media")
        await pilot.press("escape")
        await wait_for_text(pilot, "12 nodes")
        await pilot.press("slash", *"media", "enter")
        await wait_for_text(pilot, "3 nodes", "esc show all")
        await pilot.press("escape")
        await wait_for_text(pilot, "12 nodes", "esc back")
        await pilot.press("escape")
        await wait_for_text(pilot, "IN FLIGHT 3")


async def test_every_list_has_a_filter(socket_dir: Path) -> None:
    fleet = running_fleet()
    async with run_console(fleet, socket_dir, size=(100, 40)) as (_, pilot, _server):
        await wait_for_text(pilot, "kernel-x7k2p", "3 nodes in flight")
        await pilot.press("slash", *"paused", "enter")
        await wait_until(pilot, lambda: "kernel-x7k2p" not in screen_text(pilot.app))
        await pilot.press("escape", "slash", *"flight", "enter")
        await wait_for_text(pilot, "/flight", "kernel-x7k2p", "3 nodes in flight")
        await pilot.press("5", "slash", *"pia", "enter")
        text = await wait_for_text(pilot, "/pia", "payments")
        assert "platform" not in text
        await pilot.press("question_mark", "slash", *"canaries", "enter")
        text = await wait_for_text(pilot, "/canaries", "compare the nodes with the canaries")
        assert "handover" not in text
        await pilot.press("2", "slash")
        await wait_for_text(pilot, "find: this page has no filter")


async def test_q_leaves_the_page_and_ctrl_c_the_console(socket_dir: Path) -> None:
    async with run_console(running_fleet(), socket_dir) as (app, pilot, _):
        await pilot.press("enter", "n", "q")
        await wait_for_text(pilot, "IN FLIGHT 3")
        await pilot.press("p")
        await wait_for_text(pilot, "Pause kernel-x7k2p?")
        await pilot.press("ctrl+c")
        await wait_until(pilot, lambda: type(app.screen).__name__ == "RolloutPage")
        assert app.is_running
        await pilot.press("ctrl+c")
        await wait_until(pilot, lambda: not app.is_running)
    async with run_console(running_fleet(), socket_dir) as (app, pilot, _):
        await pilot.press("q")
        await wait_until(pilot, lambda: not app.is_running)


async def test_key_without_effect_says_where_it_works(socket_dir: Path) -> None:
    async with run_console(running_fleet(), socket_dir, size=(100, 30)) as (_, pilot, _server):
        await wait_for_text(pilot, "kernel-x7k2p")
        await pilot.press("o")
        await wait_for_text(pilot, "sort: not on this page; it works on changes, nodes, rollout")
        await pilot.press("3")
        await wait_for_text(pilot, "SLOTS TAKEN in 3 of 4 pools", "team/platform")
        await pilot.press("end", "enter")
        await wait_for_text(pilot, "▸ team/platform", "3 nodes of pool team/platform")


async def test_keys_typed_before_the_review_has_come_are_the_reason(socket_dir: Path) -> None:
    fleet, released = start_gate_fleet(), threading.Event()

    def wait_before_review(path: str) -> None:
        if path.endswith("/review"):
            assert released.wait(20)

    async with run_console(fleet, socket_dir) as (_, pilot, server):
        server.before_read = wait_before_review
        await wait_for_text(pilot, "1 for you")
        await pilot.press("a", *"pods are fine", "enter")
        await wait_for_text(pilot, "Approve start?", "pods are fine", LOADING, "press Enter again then")
        assert not fleet.requests
        released.set()
        await wait_for_text(pilot, "Your approval gives")
        await pilot.press("enter")
        await wait_until(pilot, lambda: bool(fleet.requests))
    assert fleet.requests[0][2]["reason"] == "pods are fine"


async def test_second_enter_closes_no_page_below_a_dialog(socket_dir: Path) -> None:
    fleet = running_fleet()
    async with run_console(fleet, socket_dir) as (app, pilot, _):
        await wait_for_text(pilot, "kernel-x7k2p", "running")
        await pilot.press("F")
        await wait_for_text(pilot, "Start a freeze?")
        for _ in range(2):
            app.post_message(events.Key("enter", None))
        await wait_for_text(pilot, "all is frozen")
        assert type(app.screen).__name__ == "FleetPage"
    assert len(fleet.requests) == 1


async def test_cursor_is_visible_after_sorting_and_filtering(socket_dir: Path) -> None:
    fleet = ReplayedFleet(pools=10, per_pool=10, at=NOON)
    fleet.move("tea009-09", "isolating")
    async with run_console(fleet, socket_dir) as (_, pilot, _server):
        await pilot.press("enter", "n")
        await wait_for_text(pilot, "100 nodes", "▌ · pay000-00")
        await pilot.press("o")
        await wait_for_text(pilot, "most urgent first", "▌ ◔ tea009-09")
        await pilot.press("slash", *"sea001-05", "enter")
        await wait_for_text(pilot, "1 node,", "▌ · sea001-05")
        await pilot.press("o", "o", "o", "escape")
        await wait_for_text(pilot, "100 nodes, plan order", "▌ · sea001-05")


async def test_keys_typed_before_the_dialog_is_mounted_are_its_text(socket_dir: Path) -> None:
    fleet = running_fleet()
    async with run_console(fleet, socket_dir) as (app, pilot, _):
        await wait_for_text(pilot, "kernel-x7k2p", "running")
        # All at once, as a terminal sends what a user typed while the console was busy.
        for key in "pfree the disk":
            app.post_message(events.Key(key, key))
        await wait_for_text(pilot, "Pause kernel-x7k2p?", "free the disk")


async def test_filter_typed_on_the_rollout_starts_no_action(socket_dir: Path) -> None:
    async with run_console(running_fleet(), socket_dir) as (app, pilot, _):
        await pilot.press("enter")
        await wait_for_text(pilot, "IN FLIGHT 3")
        # All at once: `p` pauses the rollout where it is not the filter.
        for key in ("slash", *"pay"):
            app.post_message(events.Key(key, "/" if key == "slash" else key))
        await wait_for_text(pilot, "▸ nodes", "3 nodes", "/pay")


async def test_review_that_precedes_its_dialog_completes_it(
    socket_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = start_gate_fleet()
    async with run_console(fleet, socket_dir) as (app, pilot, _):
        await wait_for_text(pilot, "1 for you")
        review = await app.fetch_path("rollouts", fleet.id, "review")

        async def fetch_at_once(*_path: str, **_query: str) -> Response[Any]:
            return review

        monkeypatch.setattr(app, "fetch_path", fetch_at_once)
        await pilot.press("a")
        await wait_for_text(pilot, "Your approval gives")


def test_import_of_pages_leaves_none_to_a_later_upgrade() -> None:
    code = "import sys, tui.app as found; found.import_pages(); print(*sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    pages = {f"tui.screens.{each.stem}" for each in Path(tui.screens.__path__[0]).glob("[a-z]*.py")}
    assert pages <= set(ran.stdout.split())
