"""What the console's tests share: a console on a replayed fleet, with a clock that stands."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from textual.pilot import Pilot

from rolloutd.control.client import Client
from tests.support.replay import Voice
from tests.support.replayed import Fleet
from tui.app import Console
from tui.lines import plain
from tui.listing import Listing

NOON = 1_795_200_000.0
"""The instant at which the replayed fleets begin."""

LIMIT = 1_000
"""Looks before a condition is given up: twenty seconds, on a loaded machine too."""

LOOK_S = 0.02


@asynccontextmanager
async def console(
    world: Fleet, directory: Path, *, size: tuple[int, int] = (80, 24), ordered: Any = None, **chosen: Any
) -> AsyncIterator[tuple[Console, Pilot[None], Voice]]:
    """Run a console on a fleet, and wait until it knows it."""
    path = directory / "s"
    voice = Voice(world, path, ordered or (lambda *_: None))
    app = Console(Client(path), now=lambda: world.at, **chosen)
    try:
        async with app.run_test(size=size, notifications=True) as pilot:
            await until(pilot, lambda: app.is_known and app.model.locks is not None)
            yield app, pilot, voice
    finally:
        voice.close()


async def until(pilot: Pilot[Any], is_so: Callable[[], bool]) -> None:
    """Wait until something is so."""
    for _ in range(LIMIT):
        if is_so():
            await pilot.pause()
            return
        await pilot.pause(LOOK_S)
    raise AssertionError(f"it never came to be:\n{screen(pilot.app)}")


def screen(app: Any) -> str:
    """Return what is on the screen, as text."""
    width, height = app.size
    strips = app.screen._compositor.render_strips()
    return "\n".join(strip.text.rstrip() for strip in strips[:height]) if width else ""


async def shows(pilot: Pilot[Any], *texts: str) -> str:
    """Wait until all texts are on the screen, and return it."""
    await until(pilot, lambda: all(text in screen(pilot.app) for text in texts))
    return screen(pilot.app)


def rows(listing: Listing, width: int = 120) -> list[str]:
    """Return all rows of a listing as text, seen or not."""
    assert listing.rows is not None
    return [plain(line) for row in range(len(listing.rows)) for line in listing.rows.draw(row, width)]


def small() -> Fleet:
    """Return twelve nodes of four teams, waiting at the start gate."""
    world = Fleet(pools=4, per_pool=3, at=NOON)
    missing = "the start gate waits: the vote of the owner, team infra, is missing"
    world.reason = {
        "code": "gate-start",
        "text": missing,
        "since": "2026-11-20T18:35:00.000Z",
        "lifted_by": "approve",
    }
    return world


def running() -> Fleet:
    """Return twelve nodes: canaries done, some in flight, one failed and settled, the rest waiting."""
    world = small()
    world.vote("start", by="ana", uid=1001, teams=["infra"])
    world.opened |= {("start", ""), ("continue", "canary")}
    world.state, world.reason = "running", None
    for name in [name for name, node in world.nodes.items() if node["wave"] == "canary"]:
        for phase, outcome in (
            ("isolating", None),
            ("maintaining", None),
            ("verifying", None),
            ("done", "changed"),
        ):
            world.at += 30
            world.move(name, phase, outcome=outcome)
    for name, phases in (("pay000-01", 2), ("sea001-01", 3), ("med002-01", 1)):
        for phase in ("isolating", "maintaining", "verifying")[:phases]:
            world.at += 10
            world.move(name, phase)
        world.live[name].update(percent=40.0, task="Set the values that differ")
    return world


def broken() -> Fleet:
    """Return a rollout that a failed node has paused."""
    world = running()
    world.move("sea001-01", "failed", failure="nginx did not come back: exit status 1")
    world.at += 240
    text = "sea001-01 failed in run.configure: nginx did not come back: exit status 1"
    world.state = "paused"
    world.reason = {
        "code": "node-failed",
        "text": text,
        "since": "2026-11-20T18:49:00.000Z",
        "lifted_by": "approve",
    }
    return world
