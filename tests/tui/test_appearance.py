"""Sizes, themes, glyphs, scrolling, and the memory that drawing uses."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

from tests.support.replayed_fleet import ReplayedFleet
from tests.tui.harness import (
    NOON,
    paused_fleet,
    run_console,
    running_fleet,
    screen_text,
    wait_for_text,
    wait_until,
)
from tui.formatting.lines import line_text
from tui.screens.rollout import _group_items
from tui.widgets.summaries import WaitingGroup
from tui.widgets.virtual_list import VirtualList

FRAMES = 20


async def test_long_list_scrolls_with_the_cursor(socket_dir: Path) -> None:
    async with run_console(ReplayedFleet(pools=30, per_pool=20, at=NOON), socket_dir) as (app, pilot, _):
        await pilot.press("enter", "n")
        await wait_for_text(pilot, "600 nodes")
        await pilot.press("pagedown", "pagedown", "down")
        await wait_for_text(pilot, "▌ · med002-01")
        await pilot.press("G")
        await wait_for_text(pilot, "▌ · tea029-19")
        await pilot.press("g")
        await wait_for_text(pilot, "▌ · pay000-00")
        await pilot.press("escape", "tab", "end")
        await wait_for_text(pilot, "▌team/team029")
        await pilot.press("question_mark", "end")
        await wait_for_text(pilot, "▌  -                left")
        listing = app.screen.query_one("#body", VirtualList)
        assert listing.show_vertical_scrollbar
        assert listing.scroll_offset.y == listing.max_scroll_y


@pytest.mark.parametrize(("ascii_only", "here", "away"), [(False, "▌", "▏"), (True, "|", ":")])
async def test_focused_pane_is_visible_without_colour(
    socket_dir: Path, *, ascii_only: bool, here: str, away: str
) -> None:
    async with run_console(running_fleet(), socket_dir, ascii_only=ascii_only) as (_, pilot, _server):
        await pilot.press("enter")
        await wait_for_text(pilot, f"{away}team/media")
        await pilot.press("tab")
        await wait_for_text(pilot, f"{here}team/media")


async def test_click_moves_the_cursor_and_double_click_opens(socket_dir: Path) -> None:
    async with run_console(running_fleet(), socket_dir) as (app, pilot, _):
        await pilot.press("enter", "n")
        await wait_for_text(pilot, "12 nodes")
        await pilot.click("#body", offset=(5, 4))
        await wait_for_text(pilot, "▌ ◕ sea001-01")
        await pilot.click("#body", offset=(5, 4), times=2)
        await wait_for_text(pilot, "▸ sea001-01", "ATTEMPT 1")
        assert type(app.screen).__name__ == "NodePage"


async def test_drawing_leaves_no_garbage_cycles(socket_dir: Path) -> None:
    """A full collection stops the console, so reference counts alone must free drawn lines."""
    fleet = running_fleet()
    async with run_console(fleet, socket_dir, size=(200, 50)) as (app, pilot, _):
        await pilot.press("enter")
        await wait_for_text(pilot, "IN FLIGHT 3")
        gc.collect()
        gc.disable()
        try:
            for _ in range(FRAMES):
                fleet.at += 1.0
                app.redraw_screen()
                await pilot.pause()
            left = gc.collect()
        finally:
            gc.enable()
    assert left < 10 * FRAMES, "each drawn line waits for a full collection"


@pytest.mark.parametrize("size", [(80, 24), (200, 50), (40, 10)])
async def test_every_page_fits_every_size(socket_dir: Path, size: tuple[int, int]) -> None:
    async with run_console(paused_fleet(), socket_dir, size=size) as (app, pilot, _):
        await wait_for_text(pilot, "paused")
        for keys in (("enter",), ("n",), ("enter",), ("2",), ("3",), ("4",), ("5",), ("question_mark",)):
            await pilot.press(*keys)
            await pilot.pause()
            assert all(len(line) <= size[0] for line in screen_text(app).splitlines())
            assert all(each.size.width <= size[0] for each in app.screen.query(VirtualList)), keys


async def test_ascii_mode_draws_only_ascii(socket_dir: Path) -> None:
    fleet = running_fleet()
    fleet.nodes["pay000-02"]["team"] = "büro-節"
    async with run_console(fleet, socket_dir, ascii_only=True) as (app, pilot, _):
        await pilot.press("enter")
        await wait_for_text(pilot, "IN FLIGHT 3", "#m.")
        for keys, seen in (
            (("n",), "b?ro-??"),
            (("question_mark", "slash", *"approve", "enter"), "DECIDE AND ACT"),
            (("escape", "escape", "colon"), "open what is under the cursor"),
            (("escape", "F"), "Start a freeze?"),
            (("escape", "w"), "full line"),
        ):
            await pilot.press(*keys)
            await wait_for_text(pilot, seen)
            assert screen_text(app).isascii(), keys


async def test_theme_key_switches_the_theme(socket_dir: Path) -> None:
    async with run_console(running_fleet(), socket_dir, theme_name="light") as (app, pilot, _):
        await wait_for_text(pilot, "kernel-x7k2p")
        light = app.screen.styles.background
        await pilot.press("T")
        await wait_until(pilot, lambda: app.screen.styles.background != light)


def test_reason_to_wait_is_shown_in_full_with_its_nodes() -> None:
    text = "pool rack/r2 is full: n7 is isolating in somaxconn-bxv65 since 2026-11-23T07:35:41Z"
    group = WaitingGroup("pool-full rack/r2", text, ("n10", "n12"))
    for width in (40, 77, 200):
        keys, draws = zip(*_group_items(group, text, width), strict=True)
        drawn = [line_text(draw(width)) for draw in draws]
        if width > 40:
            assert " ".join(" ".join(drawn).split()) == f"2 {text} n10, n12"
        assert "n10, n12" in drawn[-1]
        assert all(len(line) <= width for line in drawn)
        assert [*filter(None, keys)] == ["reason:pool-full rack/r2"]
