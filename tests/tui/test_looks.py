"""How the console looks: sizes, themes, glyphs, scrolling, and what drawing leaves behind."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

from tests.support.replayed import Fleet
from tests.tui.house import NOON, broken, console, running, screen, shows, until
from tui.listing import Listing

FRAMES = 20


async def test_what_is_longer_than_the_screen_scrolls_with_the_cursor(place: Path) -> None:
    async with console(Fleet(pools=30, per_pool=20, at=NOON), place) as (app, pilot, _):
        await pilot.press("enter", "n")
        await shows(pilot, "600 nodes")
        await pilot.press("pagedown", "pagedown", "down")
        await shows(pilot, "▌ · med002-01")
        await pilot.press("G")
        await shows(pilot, "▌ · tea029-19")
        await pilot.press("g")
        await shows(pilot, "▌ · pay000-00")
        await pilot.press("escape", "tab", "end")
        await shows(pilot, "▌team/team029")
        await pilot.press("question_mark", "end")
        await shows(pilot, "▌  -                left")
        listing = app.screen.query_one("#body", Listing)
        assert listing.show_vertical_scrollbar
        assert listing.scroll_offset.y == listing.max_scroll_y


@pytest.mark.parametrize(("ascii_only", "here", "away"), [(False, "▌", "▏"), (True, "|", ":")])
async def test_the_half_that_has_the_keys_is_told_without_colour(
    place: Path, *, ascii_only: bool, here: str, away: str
) -> None:
    async with console(running(), place, ascii_only=ascii_only) as (_, pilot, _voice):
        await pilot.press("enter")
        await shows(pilot, f"{away}team/media")
        await pilot.press("tab")
        await shows(pilot, f"{here}team/media")


async def test_a_click_moves_the_cursor_and_two_open(place: Path) -> None:
    async with console(running(), place) as (app, pilot, _):
        await pilot.press("enter", "n")
        await shows(pilot, "12 nodes")
        await pilot.click("#body", offset=(5, 4))
        await shows(pilot, "▌ ◕ sea001-01")
        await pilot.click("#body", offset=(5, 4), times=2)
        await shows(pilot, "▸ sea001-01", "ATTEMPT 1")
        assert type(app.screen).__name__ == "NodePage"


async def test_drawing_leaves_nothing_for_the_collector(place: Path) -> None:
    """A full collection stops the picture, so what was drawn must be gone without one."""
    world = running()
    async with console(world, place, size=(200, 50)) as (app, pilot, _):
        await pilot.press("enter")
        await shows(pilot, "IN FLIGHT 3")
        gc.collect()
        gc.disable()
        try:
            for _ in range(FRAMES):
                world.at += 1.0
                app.redraw()
                await pilot.pause()
            left = gc.collect()
        finally:
            gc.enable()
    assert left < 10 * FRAMES, "each of the lines that were drawn waits for a full collection"


@pytest.mark.parametrize("size", [(80, 24), (200, 50), (40, 10)])
async def test_every_screen_fits_every_size(place: Path, size: tuple[int, int]) -> None:
    async with console(broken(), place, size=size) as (app, pilot, _):
        await shows(pilot, "kernel")
        for keys in (("enter",), ("n",), ("enter",), ("2",), ("3",), ("4",), ("5",), ("question_mark",)):
            await pilot.press(*keys)
            await pilot.pause()
            assert all(len(line) <= size[0] for line in screen(app).splitlines())


async def test_without_glyphs_everything_is_ascii(place: Path) -> None:
    world = running()
    world.nodes["pay000-02"]["team"] = "büro-節"
    async with console(world, place, ascii_only=True) as (app, pilot, _):
        await pilot.press("enter")
        text = await shows(pilot, "IN FLIGHT 3")
        assert "#m." in text
        for keys, seen in (
            (("n",), "b?ro-??"),
            (("question_mark", "pagedown"), "DECIDE AND ACT"),
            (("escape", "colon"), "open what the cursor is on"),
            (("escape", "F"), "Freeze everything?"),
            (("escape", "l"), "the whole line"),
        ):
            await pilot.press(*keys)
            await shows(pilot, seen)
            assert screen(app).isascii(), keys


async def test_light_and_dark(place: Path) -> None:
    async with console(running(), place, theme_name="light") as (app, pilot, _):
        await shows(pilot, "kernel-x7k2p")
        light = app.screen.styles.background
        await pilot.press("T")
        await until(pilot, lambda: app.screen.styles.background != light)
