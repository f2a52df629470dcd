"""A console on a replayed fleet with a fixed clock, for the console's tests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from textual.pilot import Pilot

from rolloutd.control.client import Client
from tests.support.replay_server import ReplayServer
from tests.support.replayed_fleet import ReplayedFleet
from tui.app import Console
from tui.formatting.lines import line_text
from tui.operations.dialog import LOADING
from tui.widgets.virtual_list import VirtualList

NOON = 1_795_200_000.0
"""The instant at which the replayed fleets begin."""

MAX_POLLS = 1_000
"""Polls before a wait fails: twenty seconds, enough on a loaded machine."""

POLL_INTERVAL_S = 0.02


@asynccontextmanager
async def run_console(
    fleet: ReplayedFleet,
    directory: Path,
    *,
    size: tuple[int, int] = (80, 24),
    on_request: Any = None,
    **chosen: Any,
) -> AsyncIterator[tuple[Console, Pilot[None], ReplayServer]]:
    """Run a console on a fleet and wait until it has loaded."""
    path = directory / "s"
    server = ReplayServer(fleet, path, on_request or (lambda *_: None))
    app = Console(Client(path), now=lambda: fleet.at, **chosen)
    try:
        async with app.run_test(size=size, notifications=True) as pilot:
            await wait_until(pilot, lambda: app.has_connected and app.model.locks is not None)
            yield app, pilot, server
    finally:
        server.close()


async def wait_until(pilot: Pilot[Any], condition: Callable[[], bool]) -> None:
    """Wait until a condition holds."""
    for _ in range(MAX_POLLS):
        if condition():
            await pilot.pause()
            return
        await pilot.pause(POLL_INTERVAL_S)
    raise AssertionError(f"the condition never held:\n{screen_text(pilot.app)}")


def screen_text(app: Any) -> str:
    """Return the screen as text."""
    width, height = app.size
    strips = app.screen._compositor.render_strips()
    return "\n".join(strip.text.rstrip() for strip in strips[:height]) if width else ""


async def wait_for_text(pilot: Pilot[Any], *texts: str) -> str:
    """Wait until all texts are on the screen, and a dialog is loaded; return the screen."""

    def is_shown() -> bool:
        shown = screen_text(pilot.app)
        return all(text in shown for text in texts) and (LOADING in texts or LOADING not in shown)

    await wait_until(pilot, is_shown)
    return screen_text(pilot.app)


def row_texts(listing: VirtualList, width: int = 120) -> list[str]:
    """Return all rows of a list as text, visible or not."""
    assert listing.rows is not None
    return [line_text(listing.rows.draw(row, width)) for row in range(len(listing.rows))]


def list_text(app: Console, name: str) -> str:
    return "\n".join(row_texts(app.screen.query_one(name, VirtualList)))


# -- shown


def start_gate_fleet() -> ReplayedFleet:
    """Return twelve nodes of four teams, waiting at the start gate."""
    fleet = ReplayedFleet(pools=4, per_pool=3, at=NOON)
    missing = "the start gate waits: the vote of the owner, team infra, is missing"
    fleet.reason = {
        "code": "gate-start",
        "text": missing,
        "since": "2026-11-20T18:35:00.000Z",
        "lifted_by": "approve",
        "subject": fleet.id,
        "params": {},
        "remedy": None,
    }
    return fleet


def running_fleet() -> ReplayedFleet:
    """Return twelve nodes: canaries done, some in flight, the rest waiting."""
    fleet = start_gate_fleet()
    fleet.vote("start", by="ana", uid=1001, teams=["infra"])
    fleet.open_gates |= {("start", ""), ("continue", "canary")}
    fleet.state, fleet.reason = "running", None
    for name in [name for name, node in fleet.nodes.items() if node["wave"] == "canary"]:
        for phase, outcome in (
            ("isolating", None),
            ("maintaining", None),
            ("verifying", None),
            ("done", "changed"),
        ):
            fleet.at += 30
            fleet.move(name, phase, outcome=outcome)
    for name, phases in (("pay000-01", 2), ("sea001-01", 3), ("med002-01", 1)):
        for phase in ("isolating", "maintaining", "verifying")[:phases]:
            fleet.at += 10
            fleet.move(name, phase)
        fleet.in_progress[name].update(percent=40.0, task="Set the values that differ")
    return fleet


def paused_fleet() -> ReplayedFleet:
    """Return a rollout that a failed node has paused."""
    fleet = running_fleet()
    fleet.move("sea001-01", "failed", failure="nginx did not come back: exit status 1")
    fleet.at += 240
    text = "sea001-01 failed in run.configure: nginx did not come back: exit status 1"
    fleet.state = "paused"
    fleet.reason = {
        "code": "node-failed",
        "text": text,
        "since": "2026-11-20T18:49:00.000Z",
        "lifted_by": "approve",
        "subject": fleet.id,
        "params": {},
        "remedy": None,
    }
    return fleet
