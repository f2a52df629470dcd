"""Each operation of the console applies to what the cursor shows, on every page and in every pane."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.replayed_fleet import ReplayedFleet
from tests.tui.harness import list_text, paused_fleet, run_console, wait_for_text, wait_until
from tui.app import Console
from tui.formatting.lines import line_text
from tui.operations import actions
from tui.screens.page import Page
from tui.widgets.virtual_list import VirtualList

UNCUT = 400
VALUES = {"reason": "because", "until": "", "scope": "all", "put_back": "return"}
OPERATIONS = [each for each in actions.ACTIONS if each.operation is not None]
NO_OBJECT = {"freeze"}
"""Operations that ask for their object in the dialog."""


def busy_fleet() -> ReplayedFleet:
    """Return a fleet with failed, isolated and waiting nodes, two holds, and two freezes of one scope."""
    fleet = paused_fleet()
    fleet.move("med001-01" if "med001-01" in fleet.nodes else "med002-01", "failed", failure="no route")
    fleet.holds = [
        {"node": node, "source": "person", "id": who, "by": who, "reason": f"disk of {node}", **LOCKED}
        for node, who in (("pay000-02", "ana"), ("sea001-02", "bo"))
    ]
    fleet.freezes = [
        {"id": f"freeze-{who}", "scope": "all", "by": who, "reason": f"party of {who}", **LOCKED}
        for who in ("ana", "bo")
    ]
    text = {"kind": "owners-differ", "about": "team", "values": {}, "text": "two teams", "warning": False}
    conflicts = [{**text, "since": LOCKED["at"]}]
    fleet.inventory["nodes"] = [
        {"node": node, "quarantined": True, "conflicts": conflicts} for node in ("pay000-00", "pay000-01")
    ]
    row = {"content": "", "bytes": 0, "text": "", "attempt": 1, "seconds": 1.0, "forced": False}
    fleet.preparations = [
        {**row, "node": node, "stage": "image", "state": "failed"} for node in ("pay000-00", "pay000-01")
    ]
    fleet.unobserved = {name: f"{name} was last seen up" for name in ("pay000-00", "pay000-02")}
    return fleet


NAME_LIST = re.compile(r"[a-z]{3}\d{3}-\d\d, [a-z]{3}\d{3}-\d\d")

LOCKED: dict[str, Any] = {"at": "2026-11-20T18:35:00.000Z", "until": None}


def cursor_rows(pane: VirtualList) -> Iterator[int]:
    """Put the cursor on each row that it can be on."""
    for row in range(len(pane.rows or ())):
        assert pane.rows is not None
        if pane.rows.key(row):
            pane._set_cursor(row)
            yield row


def visited_rows(page: Page) -> Iterator[tuple[VirtualList, int]]:
    """Yield each row of each pane, with cursor and focus there, for each row of the first pane."""
    panes = [pane for pane in page.query(VirtualList) if pane.can_focus]
    for number, pane in enumerate(panes):
        for _ in cursor_rows(panes[0]) if number else (0,):
            page.set_focus(pane)
            for row in cursor_rows(pane):
                yield pane, row


def shown_text(page: Page, pane: VirtualList, row: int) -> str:
    """Return the row under the cursor, the path of the page, and the row of the list that rules its pane."""
    rows, ruling = pane.rows, page.query(VirtualList).first()
    assert rows is not None
    assert ruling.rows is not None
    ruled = line_text(ruling.rows.draw(ruling.cursor, UNCUT)) if page.screen_name == "gates" else ""
    return f"{line_text(rows.draw(row, UNCUT))} {page.breadcrumb()} {ruled}"


def object_of(request: Any, fleet: ReplayedFleet) -> str:
    """Return what a person knows the object of a request by."""
    if request.path == "/v1/freezes":
        return next(each["reason"] for each in fleet.freezes if each["id"] == request.body["scope"])
    if request.path == "/v1/holds":
        return str(request.body["node"])
    parts = request.path.split("/")
    return parts[parts.index("nodes") + 1] if "nodes" in parts else fleet.id


def check_page(app: Console, fleet: ReplayedFleet) -> set[str]:
    """Check every operation on every row; return the names of those that applied to something."""
    page, applied = app.screen, set()
    assert isinstance(page, Page)
    for pane, row in visited_rows(page):
        selection, shown = page.selection(), shown_text(page, pane, row)
        for action in OPERATIONS:
            assert action.operation is not None
            if action.name in NO_OBJECT or action.operation.unavailable_reason(selection):
                continue
            request = action.operation.request(selection, VALUES)
            wanted = object_of(request, fleet)
            assert wanted in shown, f"{action.name} on {page.screen_name}: {wanted!r} is not in {shown!r}"
            # A reason may name another node; a list of nodes must not be one node's row.
            assert wanted == fleet.id or not NAME_LIST.search(shown), (
                f"{action.name}: {shown!r} names several"
            )
            applied.add(action.name)
    return applied


OPENED: dict[str, tuple[tuple[str, ...], str, set[str]]] = {
    "fleet": ((), "kernel-x7k2p", {"pause", "cancel", "approve"}),
    "rollout": (("enter",), "FAILED", {"retry", "skip", "rollback", "pause"}),
    "nodes": (("n",), "12 nodes", {"retry", "skip", "rollback", "hold", "shell"}),
    "node": (("n", "enter"), "ATTEMPT", {"hold", "shell"}),
    "inventory": (("6",), "CONFLICTS 2", {"hold", "shell"}),
    "preparation": (("enter", "P"), "2 failed", {"hold", "shell"}),
    "gates": (("2",), "THE PLAN", {"approve", "reject"}),
    "locks": (("3",), "HOLDS", {"release", "unfreeze", "hold"}),
    "audit": (("4",), "entr", set()),
}


@pytest.mark.parametrize("page", list(OPENED))
@pytest.mark.parametrize("size", [(80, 24), (200, 60)])
async def test_operation_applies_to_what_cursor_shows(
    socket_dir: Path, page: str, size: tuple[int, int]
) -> None:
    fleet = busy_fleet()
    keys, text, expected = OPENED[page]
    async with run_console(fleet, socket_dir, size=size) as (app, pilot, _):
        await wait_for_text(pilot, "1 for you")
        for key in keys:
            await pilot.press(key)
            await wait_for_text(pilot, *({"n": ["12 nodes"]}.get(key, [])))
        if page == "gates":
            await wait_until(pilot, lambda: text in list_text(app, "#content"))
        else:
            await wait_for_text(pilot, text)
        assert isinstance(app.screen, Page)
        assert app.screen.screen_name == page
        app.screen.update_view()
        assert check_page(app, fleet) >= expected


async def test_lifting_one_freeze_names_it_alone(socket_dir: Path) -> None:
    fleet = busy_fleet()
    async with run_console(fleet, socket_dir) as (_, pilot, _server):
        await wait_for_text(pilot, "1 for you")
        # On another page no freeze is shown, so the key opens the page that has them.
        await pilot.press("U")
        await wait_for_text(pilot, "party of bo", "put the cursor on the freeze to lift")
        await pilot.press("down", "U")
        await wait_for_text(pilot, "all is frozen by bo: party of bo")
        await pilot.press(*"over", "enter")
        await wait_until(pilot, lambda: bool(fleet.requests))
    assert fleet.requests == [("DELETE", "/v1/freezes", {"scope": "freeze-bo", "reason": "over"})]
