"""Keys of k9s' users: logs, describe, YAML, plan, search, save, clicks; and what moved since 0.1."""

from __future__ import annotations

from pathlib import Path
from string import ascii_lowercase
from typing import Any

import pytest
import yaml
from textual.binding import Binding
from textual.pilot import Pilot

from tests.support.replayed_fleet import MEMBERS, ReplayedFleet
from tests.tui.harness import (
    list_text,
    paused_fleet,
    row_texts,
    run_console,
    running_fleet,
    screen_text,
    wait_for_text,
    wait_until,
)
from tui.app import Console
from tui.console import import_pages
from tui.operations import actions
from tui.operations.actions import ACTIONS, MOVED
from tui.operations.dialog import Dialog
from tui.screens.page import Page
from tui.widgets.virtual_list import VirtualList

AT = "2026-11-20T18:45:00.000Z"
LIST_KEYS = {
    key for binding in VirtualList.BINDINGS if isinstance(binding, Binding) for key in binding.key.split(",")
}
"""Keys that move the cursor in a list."""

TASKS = ("Gather facts", "Restart nginx", "Write values", "restart NGINX again", "End")
CONFIGURATION = {
    "content": "c" * 64,
    "change": "d" * 64,
    "rollout": "kernel-before",
    "at": AT,
    "values": {"somaxconn": 4096},
    "evidence": None,
}


def logging_fleet() -> ReplayedFleet:
    """Return a paused rollout whose failed node has a log of five lines."""
    fleet = paused_fleet()
    fleet.logs["sea001-01"] = [
        {"offset": number, "at": AT, "kind": "task", "text": text} for number, text in enumerate(TASKS, 1)
    ]
    return fleet


async def open_failed_node(pilot: Pilot[None], key: str) -> None:
    """Press a key on the row of the failed node."""
    await pilot.press("enter")
    await wait_for_text(pilot, "FAILED 1", "▌ ✗ sea001-01")
    await pilot.press(key)


async def test_logs_key_shows_the_log_alone(socket_dir: Path) -> None:
    async with run_console(logging_fleet(), socket_dir) as (app, pilot, _):
        await open_failed_node(pilot, "l")
        text = await wait_for_text(pilot, "▸ sea001-01", "LOG", "Restart nginx")
        assert "ATTEMPT 1" not in text
        assert app.screen.query_one("#log").has_focus
        await pilot.press("l")
        await wait_for_text(pilot, "ATTEMPT 1", "Restart nginx")


async def test_describe_shows_why_steps_and_configuration(socket_dir: Path) -> None:
    fleet = logging_fleet()
    fleet.configuration["current"] = CONFIGURATION
    async with run_console(fleet, socket_dir, size=(100, 50)) as (_, pilot, _server):
        await open_failed_node(pilot, "d")
        text = await wait_for_text(pilot, "sea001-01 description", "CONFIGURATION")
        for part in (
            "WHY",
            "nginx did not come back: exit status 1",
            "cordoned, 14 pods evicted",
            "current: cccccccccccc of kernel-before",
            "somaxconn: 4096",
        ):
            assert part in text
        await pilot.press("escape")
        await wait_for_text(pilot, "FAILED 1")


PAGES: dict[str, tuple[tuple[str, ...], str, str]] = {
    "fleet": ((), "kernel-x7k2p", "plan: kernel"),
    "node in rollout": (("enter",), "FAILED 1", "node: sea001-01"),
    "nodes": (("n",), "12 nodes", "node: pay000-00"),
    "gates": (("2",), "FAILURES 1", "gate: proceed"),
    "freeze": (("3",), "FREEZES 1", "reason: storm"),
    "audit": (("4",), "entries, the latest first", "event: PhaseMoved"),
}


@pytest.mark.parametrize("page", list(PAGES))
async def test_yaml_key_shows_the_object_under_the_cursor(socket_dir: Path, page: str) -> None:
    fleet = paused_fleet()
    fleet.freezes = [
        {"id": "f1", "scope": "all", "by": "ana", "reason": "storm", "at": AT, "until": None},
    ]
    keys, shown, expected = PAGES[page]
    async with run_console(fleet, socket_dir, size=(120, 50)) as (app, pilot, _):
        await wait_for_text(pilot, "kernel-x7k2p")
        await pilot.press(*keys)
        await wait_for_text(pilot, shown)
        await pilot.press("y")
        await wait_until(pilot, lambda: app.screen.id != "" and expected in list_text(app, "#body"))
        listing = app.screen.query_one("#body", VirtualList)
        assert isinstance(yaml.safe_load("\n".join(row_texts(listing, 4_000))), dict)


async def test_plan_key_shows_the_plan_where_no_pager_can_run(socket_dir: Path) -> None:
    async with run_console(running_fleet(), socket_dir, size=(120, 50)) as (_, pilot, _server):
        await wait_for_text(pilot, "kernel-x7k2p")
        await pilot.press("e")
        await wait_for_text(pilot, "▸ kernel-x7k2p plan", "digest: b281f48a")


async def test_search_in_a_log_goes_around_in_both_directions(socket_dir: Path) -> None:
    async with run_console(logging_fleet(), socket_dir) as (app, pilot, _):
        await open_failed_node(pilot, "l")
        await wait_for_text(pilot, "LOG", "End")
        log = app.screen.query_one("#log", VirtualList)
        await pilot.press("home", "slash", *"nginx", "enter")
        await wait_until(pilot, lambda: log.cursor == 1)
        await pilot.press("n")
        await wait_until(pilot, lambda: log.cursor == 3)
        await pilot.press("n")
        await wait_for_text(pilot, "continues at the other end")
        assert log.cursor == 1
        await pilot.press("N")
        await wait_until(pilot, lambda: log.cursor == 3)
        assert len(row_texts(log)) == len(TASKS), "a search hides no line"
        await pilot.press("slash", *"nosuch", "enter")
        await wait_for_text(pilot, "no line contains “nosuch”")


async def test_search_marks_matches_without_colour(socket_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    async with run_console(logging_fleet(), socket_dir) as (app, pilot, _):
        await open_failed_node(pilot, "l")
        await wait_for_text(pilot, "LOG", "End")
        await pilot.press("home", "slash", *"nginx", "enter")
        await wait_until(pilot, lambda: app.screen.query_one("#log", VirtualList).cursor == 1)
        strips = app.screen._compositor.render_strips()
        marked = [each.text for strip in strips for each in strip if each.style and each.style.reverse]
        assert [text for text in marked if text.strip()] == ["nginx", "NGINX"]


async def test_new_log_lines_leave_the_cursor_on_the_match(socket_dir: Path) -> None:
    async with run_console(logging_fleet(), socket_dir) as (app, pilot, _):
        await open_failed_node(pilot, "l")
        await wait_for_text(pilot, "LOG", "End")
        await pilot.press("slash", *"facts", "enter")
        log = app.screen.query_one("#log", VirtualList)
        await wait_until(pilot, lambda: log.cursor == 0)
        app.screen._append_log_lines([{"offset": 6, "at": AT, "kind": "ok", "text": "more"}])  # type: ignore[attr-defined]
        await wait_for_text(pilot, "more")
        assert log.cursor == 0


async def test_saved_log_replaces_no_other_file(
    socket_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    saved = tmp_path / "kernel-x7k2p-sea001-01-1.log"
    async with run_console(logging_fleet(), socket_dir, size=(160, 30)) as (_, pilot, _server):
        await open_failed_node(pilot, "l")
        await wait_for_text(pilot, "LOG", "End")
        await pilot.press("ctrl+s")
        await wait_for_text(pilot, f"save as: {saved.name}")
        await pilot.press("enter")
        await wait_for_text(pilot, "saved 5 lines as")
        assert saved.read_text().splitlines()[1] == f"{AT} Restart nginx"
        saved.write_text("of another")
        await pilot.press("ctrl+s", "enter")
        await wait_for_text(pilot, "File exists; save it under another name")
    assert saved.read_text() == "of another"


async def test_tabs_and_keys_are_clickable(socket_dir: Path) -> None:
    async with run_console(running_fleet(), socket_dir) as (app, pilot, _):
        first = (await wait_for_text(pilot, "kernel-x7k2p", "p pause")).splitlines()[0]
        await pilot.click(offset=(first.index("4"), 0))
        await wait_for_text(pilot, "entries, the latest first")
        await pilot.click(offset=(1, 0))
        keys = (await wait_for_text(pilot, "p pause")).splitlines()[-1]
        await pilot.click(offset=(keys.index("pause"), 23))
        await wait_for_text(pilot, "Pause kernel-x7k2p?")
        await pilot.press("escape")
        await wait_until(pilot, lambda: type(app.screen).__name__ == "FleetPage")


async def test_every_key_of_a_page_is_reached_by_clicks(socket_dir: Path) -> None:
    async with run_console(paused_fleet(), socket_dir) as (app, pilot, _):
        await open_failed_node(pilot, "tab")
        page = app.screen.screen_name  # type: ignore[attr-defined]
        seen = ""
        for _ in range(6):
            shown = screen_text(app).splitlines()[-1]
            assert len(shown) <= 80
            assert shown.rstrip().endswith("… ? keys")
            seen += shown
            await pilot.click(offset=(shown.index("…"), 23))
        for action in ACTIONS:
            if page in action.screens and action.operation is None and action.name != "help":
                assert f"{action.key_label} {action.title} " in seen, action.name


async def test_theme_is_remembered(socket_dir: Path) -> None:
    async with run_console(running_fleet(), socket_dir) as (app, pilot, _):
        before = app.theme
        await pilot.press("T")
        await wait_until(pilot, lambda: app.theme != before)
        chosen = app.theme
    async with run_console(running_fleet(), socket_dir) as (app, _pilot, _):
        assert app.theme == chosen
    async with run_console(running_fleet(), socket_dir, theme_name="dark") as (app, _pilot, _):
        assert app.theme == "rolloutd-dark"


def source(name: str, **changed: Any) -> dict[str, Any]:
    fresh = {"refreshed_at": AT, "stale": False, "nodes": 3, "error": None, "held": None}
    return {"source": name, **fresh, **changed}


async def test_inventory_page_shows_held_stale_and_conflicts(socket_dir: Path) -> None:
    fleet = running_fleet()
    conflict = {"kind": "owners-differ", "about": "team", "values": {}, "since": AT, "warning": False}
    held = {"at": AT, "known": 9, "removed": ["a1", "a2"]}
    fleet.inventory = {
        "nodes": [
            {"node": "pay000-01", "quarantined": True, "conflicts": [{**conflict, "text": "a and b own it"}]},
            {"node": "pay000-02", "quarantined": False, "conflicts": []},
        ],
        "sources": [
            source("netbox", held=held),
            source("hosts"),
            source("k8s", stale=True, error="no route"),
        ],
        "next": None,
    }
    async with run_console(fleet, socket_dir, size=(100, 24)) as (_, pilot, _server):
        await wait_for_text(pilot, "kernel-x7k2p")
        await pilot.press("6")
        text = await wait_for_text(pilot, "CONFLICTS 1 of 2 nodes, 1 quarantined (✗)")
        for part in (
            "held: an answer removes 2 of 9: a1, a2",
            "fresh",
            "stale: no node of it starts: no route",
        ):
            assert part in text
        assert "owners-differ: a and b own it" in text
        await pilot.press("end", "y")
        await wait_for_text(pilot, "▸ pay000-01 YAML", "node: pay000-01")


async def test_verdicts_page_shows_what_is_refused(socket_dir: Path) -> None:
    fleet = running_fleet()
    verdict = {"id": "old.p1.1", "class": "", "node": "p1", "at": AT, "step": "verify.0", "text": "no answer"}
    fleet.verdicts = [verdict]
    async with run_console(fleet, socket_dir, size=(120, 24)) as (_, pilot, _server):
        await wait_for_text(pilot, "kernel-x7k2p")
        await pilot.press("7")
        await wait_for_text(pilot, "old.p1.1", "p1 (all nodes) verify.0: no answer")
        await pilot.press("y")
        await wait_for_text(pilot, "verdict old.p1.1 YAML", "step: verify.0")


async def test_preparation_page_puts_failed_stages_first(socket_dir: Path) -> None:
    fleet = running_fleet()
    row = {"content": "", "bytes": 0, "text": "", "attempt": 1, "seconds": 65.0, "forced": False}
    fleet.preparations = [
        {**row, "node": "pay000-01", "stage": "image", "state": "done"},
        {**row, "node": "pay000-02", "stage": "image", "state": "failed", "text": "disk is full"},
    ]
    async with run_console(fleet, socket_dir) as (app, pilot, _):
        await pilot.press("enter")
        await wait_for_text(pilot, "IN FLIGHT 3")
        await pilot.press("P")
        text = await wait_for_text(pilot, "PREPARATION 1 failed, 1 done", "disk is full", "1:05")
        assert text.index("pay000-02") < text.index("pay000-01")
        await pilot.press("enter")
        await wait_until(pilot, lambda: getattr(app.screen, "node_name", "") == "pay000-02")


async def test_keys_that_moved_change_nothing(socket_dir: Path) -> None:
    fleet = logging_fleet()
    async with run_console(fleet, socket_dir) as (app, pilot, _):
        await open_failed_node(pilot, "enter")
        await wait_for_text(pilot, "ATTEMPT 1", "LOG")
        for key, _title, _now in MOVED:
            await pilot.press({"/": "slash"}.get(key, key))
            await pilot.pause()
            while type(app.screen).__name__ != "NodePage":
                await pilot.press("escape")
                await pilot.pause()
    assert fleet.requests == []


async def test_shell_is_not_recorded_where_it_cannot_run(socket_dir: Path) -> None:
    fleet = paused_fleet()
    fleet.whoami["teams"].append("search")
    async with run_console(fleet, socket_dir) as (_, pilot, _server):
        await open_failed_node(pilot, "s")
        await wait_for_text(pilot, "a browser has no terminal")
    assert fleet.requests == []


async def test_name_under_the_cursor_is_copied(socket_dir: Path) -> None:
    async with run_console(paused_fleet(), socket_dir) as (app, pilot, _):
        await open_failed_node(pilot, "c")
        await wait_for_text(pilot, "copied sea001-01 to the terminal's clipboard")
        assert app.clipboard == "sea001-01"


async def test_nodes_are_sorted_by_shift_letters(socket_dir: Path) -> None:
    async with run_console(paused_fleet(), socket_dir) as (_, pilot, _server):
        await pilot.press("enter", "n")
        await wait_for_text(pilot, "12 nodes, plan order")
        await pilot.press("A")
        await wait_for_text(pilot, "12 nodes, latest change first")
        await pilot.press("N")
        await wait_for_text(pilot, "12 nodes, by name")


ALL_PAGES: dict[str, tuple[str, ...]] = {
    "fleet": (),
    "rollout": ("enter",),
    "nodes": ("n",),
    "node": ("enter", "enter"),
    "preparation": ("enter", "P"),
    "comparison": ("enter", "V"),
    "forecast": ("2", "i"),
    "gates": ("2",),
    "locks": ("3",),
    "audit": ("4",),
    "teams": ("5",),
    "inventory": ("6",),
    "verdicts": ("7",),
    "changes": ("m",),
    "change": ("m", "enter"),
    "handover": ("D",),
    "text": ("4", "w"),
    "help": ("question_mark",),
}
"""The keys that open each page."""

LEAVING = {"escape", "backspace", "q", "ctrl+c"}


def test_each_page_is_opened_by_keys() -> None:
    import_pages()
    assert set(ALL_PAGES) == {page.screen_name for page in all_subclasses(Page) if page.screen_name}


@pytest.mark.parametrize("page", ["fleet", "rollout", "nodes", "node", "gates", "locks"])
async def test_no_single_key_changes_anything(socket_dir: Path, page: str) -> None:
    """Each bound key of the console, on the pages with operations, with an admin who may do all."""
    fleet = logging_fleet()
    fleet.whoami |= {"admin": True, "teams": list(MEMBERS), "owner_of": list(MEMBERS)}
    lock = {"by": "ana", "reason": "storm", "at": AT, "until": None}
    fleet.freezes = [{"id": "f1", "scope": "all", **lock}]
    fleet.holds = [{"node": "pay000-02", "source": "person", "id": "ana", **lock}]
    keys = sorted({*actions.names_by_key(), *LIST_KEYS, *map(str.upper, ascii_lowercase)} - LEAVING)
    async with run_console(fleet, socket_dir, size=(132, 40)) as (app, pilot, _):
        await wait_for_text(pilot, "kernel-x7k2p")
        opened = app.screen
        for key in keys:
            if opened not in app.screen_stack or opened.screen_name != page:  # type: ignore[attr-defined]
                app.do_fleet()
                await pilot.press(*ALL_PAGES[page])
                opened = app.screen
                assert opened.screen_name == page, key  # type: ignore[attr-defined]
            await pilot.press(key)
            while not isinstance(app.screen, Page):
                await pilot.press("escape")
            while opened in app.screen_stack and app.screen is not opened:
                app.pop_screen()
    assert fleet.requests == []


def all_subclasses(base: type[Page]) -> set[type[Page]]:
    return {base}.union(*(all_subclasses(each) for each in base.__subclasses__()))


def test_every_key_has_one_action_on_each_page() -> None:
    import_pages()
    pages, shared = all_subclasses(Page), [names for names in actions.names_by_key().values() if names[1:]]
    for names in shared:
        assert not any(
            hasattr(Console, f"do_{name}") or actions.ACTIONS_BY_NAME[name].operation for name in names
        )
        for page in pages:
            own = [name for name in names if name != "find" and hasattr(page, f"do_{name}")]
            assert len(own) <= 1, (page, own)
    # Key, title and text on a screen of 80 columns.
    assert all(0 < len(action.help) < 50 and 0 < len(action.title) < 12 for action in actions.ACTIONS)
    assert all(action.operation is not None for action in actions.ACTIONS if action.group == "decide")


ASKING = {
    "rollout": (("enter",), "FAILED 1", "p C r S b F"),
    "node": (("enter", "enter"), "ATTEMPT 1", "R h"),
    "gates": (("2",), "FAILURES 1: an approval", "a x W"),
    "hold": (("3", "down"), "HOLDS 1", "H"),
    "freeze": (("3",), "FREEZES 1", "U"),
}
"""How a page is opened, and the keys of the operations that apply there."""


def test_each_operation_is_asked_for_somewhere() -> None:
    pressed = {key for _, _, keys in ASKING.values() for key in keys.split()}
    # A shell needs a terminal (test_programs.py); nothing is to resume while a failure pauses the rollout.
    assert pressed == {each.key for each in ACTIONS if each.operation is not None} - {"s", "u"}


@pytest.mark.parametrize("page", list(ASKING))
async def test_operation_asks_before_it_sends_anything(socket_dir: Path, page: str) -> None:
    fleet = paused_fleet()
    fleet.vote("proceed", by="bo", uid=1002, teams=["infra"], yes=False)
    lock = {"by": "ana", "reason": "storm", "at": AT, "until": None}
    fleet.freezes = [{"id": "f1", "scope": "all", **lock}]
    fleet.holds = [{"node": "pay000-02", "source": "person", "id": "ana", **lock}]
    keys, shown, operations = ASKING[page]
    async with run_console(fleet, socket_dir, size=(120, 40)) as (app, pilot, _):
        await wait_for_text(pilot, "kernel-x7k2p")
        for key in keys:
            await pilot.press(key)
            await pilot.pause(0.3)
        await wait_for_text(pilot, shown)
        for key in operations.split():
            await pilot.press(key)
            await wait_until(pilot, lambda: isinstance(app.screen, Dialog))
            await pilot.press("escape")
            await wait_until(pilot, lambda: not isinstance(app.screen, Dialog))
    assert fleet.requests == []
